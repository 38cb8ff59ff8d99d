"""What would run and why, asked without running it. Uses ops and what stands below."""
