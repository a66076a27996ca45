"""What users set: each option is described and checked at its field."""
