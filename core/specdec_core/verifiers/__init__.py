"""The acceptance rules that come with core."""
