"""The grouped GEMM kernels: portable ones in Triton, and those for one generation."""
