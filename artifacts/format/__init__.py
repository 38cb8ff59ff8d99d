"""The byte format of bundles: records to msgpack and back, each field checked. Uses records."""
