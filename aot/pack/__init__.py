"""Package bundles: read and check them, and write a data wheel, an OCI image layout or a directory."""
