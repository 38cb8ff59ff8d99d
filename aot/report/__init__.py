"""One page that shows what was measured and modelled: cells (the data), roofline, page (HTML), script (its charts)."""
