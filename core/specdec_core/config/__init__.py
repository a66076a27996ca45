"""All options that users can set, each checked and described at its field."""
