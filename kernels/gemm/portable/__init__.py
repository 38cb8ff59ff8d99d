"""Kernels in Triton's language for every capability."""
