"""One problem timed on this GPU, and its results judged. Uses the journal's records."""
