"""What the kernels for sm_90 share, in Gluon."""
