"""Bundles made ready to ship: read and checked (package), as a data wheel, an OCI image layout or a directory."""
