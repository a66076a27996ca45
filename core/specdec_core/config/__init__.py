"""All options of users, each checked and described at its field."""
