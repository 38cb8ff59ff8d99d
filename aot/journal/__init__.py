"""The journal of measured times: records, file, and times by cell. Uses artifacts' records."""
