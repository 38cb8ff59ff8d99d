"""Bundle files: how they are trusted, opened, locked and published. Uses the format."""
