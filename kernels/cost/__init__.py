"""Parts of the cost models: fitted constants, occupancy, expected rows of experts."""
