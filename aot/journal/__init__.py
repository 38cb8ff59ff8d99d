"""What was measured, kept line by line, and read back. Uses artifacts' records."""
