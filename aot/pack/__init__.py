"""Bundles made ready to ship: read and checked (contents), as a data wheel, an OCI image layout or a directory."""
