"""Warp-specialised kernels in Gluon for sm_90. May use the portable ones."""
