"""Reports on which kernels would run and why, without running them. Uses ops and the layers below."""
