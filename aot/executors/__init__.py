"""Executors of measuring jobs: this machine's GPUs, or a cluster's. Uses measure."""
