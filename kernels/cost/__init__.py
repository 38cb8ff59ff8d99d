"""What cost terms are made of: constants, occupancy, expected rows."""
