# ruff: noqa
import os

W = dict(num_warps=8, tma=True, specialized=True)
P192 = dict(block_m=128, block_n=192, block_k=64, num_stages=5, pingpong=True, **W)
P128 = dict(block_m=128, block_n=128, block_k=64, num_stages=6, pingpong=True, **W)
F192 = dict(block_m=192, block_n=128, block_k=64, num_stages=5, pingpong=True, **W)
F256 = dict(block_m=256, block_n=128, block_k=64, num_stages=4, **W)
S = dict(block_m=128, block_n=256, block_k=64, num_stages=4, **W)
L = dict(p192=P192, p128=P128, f192=F192, f256=F256, s256=S)
t = os.environ["TAG"]
JOBS = [(f"forward {n} {t}", "forward", c, 0, (), {}) for n, c in L.items()]
JOBS += [(f"forward {n} s {t}", "forward", c, 6, (), dict(FLAGS=22)) for n, c in L.items() if n != "s256"]
JOBS += [(f"dX {n} {t}", "dX", c, 0, (), {}) for n, c in L.items()]
L = {
    "pp": dict(block_m=32, block_n=128, block_k=192, num_stages=10, pingpong=True, **W),
    "ac": dict(block_m=32, block_n=192, block_k=128, num_stages=10, pingpong=True, **W),
    "s": dict(block_m=32, block_n=128, block_k=256, num_stages=8, **W),
}
JOBS += [(f"dW {n} {t}", "dW", c, 0, (), {}) for n, c in L.items()]
