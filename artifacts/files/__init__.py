"""Files that hold code: which are trusted, how they are opened, locked and published. Uses the format."""
