"""Which variant runs: the snapshot of all bundles, the ranking, the decision. Imports no torch."""
