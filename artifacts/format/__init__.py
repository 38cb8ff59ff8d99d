"""A bundle's bytes: msgpack values, each field checked, to records and back. Uses records."""
