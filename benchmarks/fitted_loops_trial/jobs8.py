# ruff: noqa
D = dict(tma=True, persistent=False)
JOBS = []
for n, c in (
    ("d128s", dict(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, streamed=True, **D)),
    ("d256", dict(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=3, **D)),
    ("d128w", dict(block_m=16, block_n=128, block_k=128, num_warps=4, num_stages=3, **D)),
):
    JOBS += [(f"forward {n}", "forward", c, 0, (), {})]
