"""What is computed: GPUs as tables, the contract of compiler and launcher, the search, the cost model, and the kernels.

Only the rooms that hold kernels (gemm, rowops) import Triton; ``reference`` is the same in torch.
"""
