"""One page that shows what was measured and modelled: cells (the data), roofline, charts (SVG), page (HTML)."""
