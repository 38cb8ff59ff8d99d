"""What compiled objects say of themselves. Uses records."""
