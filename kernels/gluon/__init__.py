"""Gluon functions that the kernels for H100/H200 (sm_90) share."""
