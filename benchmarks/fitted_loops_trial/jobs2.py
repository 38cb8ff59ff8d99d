# ruff: noqa
P = dict(num_warps=8, tma=True, specialized=True)
PP = dict(block_m=128, block_n=128, block_k=64, num_stages=6, pingpong=True, **P)
D = dict(block_m=16, block_n=64, block_k=128, num_warps=4, num_stages=4, tma=True, persistent=False, streamed=True)
D2 = dict(block_m=16, block_n=64, block_k=256, num_warps=4, num_stages=3, tma=True, persistent=False)
JOBS = []
for n, c in (("p128", PP), ("d128", D), ("d256", D2)):
    JOBS += [(f"forward {n}", "forward", c, 0, (), {})]
    JOBS += [
        (f"forward {n} +{k * 16 // 1024}K{' stack' if s else ''}", "forward", c, 0, (("dead", "dead", (k, s)),), {})
        for k, s in ((8, 0), (2048, 0), (4096, 0), (8192, 0), (16384, 0), (8, 64), (4096, 64))
    ]
