"""The report page: cells (the data), roofline, page (HTML), script (its charts)."""
