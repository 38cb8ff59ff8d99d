# ruff: noqa
import os

W = dict(num_warps=8, tma=True, specialized=True)
L = {
    "pp": dict(block_m=32, block_n=128, block_k=192, num_stages=10, pingpong=True, **W),
    "ac": dict(block_m=32, block_n=192, block_k=128, num_stages=10, pingpong=True, **W),
}
t = os.environ["TAG"]
JOBS = [(f"dW {n} {t}", "dW", c, 0, (), {}) for n, c in L.items()]
