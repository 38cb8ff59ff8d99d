"""A decision becomes a launcher: variants are loaded, arguments packed. Uses dispatch and the driver."""
