"""Reports on what would run and why, without running it. Uses ops and the layers below."""
