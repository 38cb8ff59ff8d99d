"""Time one problem on this GPU, and check its results. Uses the journal's records."""
