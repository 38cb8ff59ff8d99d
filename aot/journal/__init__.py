"""The journal of measured times: records, file and what they say of each cell. Uses artifacts' records."""
