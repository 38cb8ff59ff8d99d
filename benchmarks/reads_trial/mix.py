# ruff: noqa
"""python mix.py OUT.json, on an H200, beside ../method.py: dw-like writes with reads of other memory among them."""

import json, os, statistics, sys

sys.path.insert(0, os.path.dirname(os.path.abspath(__file__)) + "/..")
import method, torch, triton, triton.language as tl


# writes [R, C] bf16 in 128 x 256 tiles by 132 programs; before every EVERY-th tile a program reads EVERY * WORDS words of src
@triton.jit
def mix(y, src, C, tiles_c, total, WORDS: tl.constexpr, EVERY: tl.constexpr, SHARED: tl.constexpr):
    n = tl.num_programs(0)
    pid = tl.program_id(0)
    seen = tl.zeros((256,), tl.int32)
    i = 0
    for t in tl.range(pid, total, n):
        if WORDS > 0:
            if i % EVERY == 0:
                for j in tl.range(0, WORDS * EVERY, 256):
                    at = (
                        ((i // EVERY) * WORDS * EVERY * (1 if SHARED else n)).to(tl.int64)
                        + (0 if SHARED else pid * WORDS * EVERY)
                        + j
                        + tl.arange(0, 256)
                    )
                    seen += tl.load(src + at)
        rows = (t // tiles_c).to(tl.int64) * 128 + tl.arange(0, 128)
        cols = (t % tiles_c) * 256 + tl.arange(0, 256)
        tl.store(y + rows[:, None] * C + cols[None, :], tl.full((128, 256), 1.0, tl.bfloat16))
        i += 1
    tl.store(src + tl.arange(0, 256), seen, mask=seen == 123456789)


clock = method.Clock()
R, C = 128 * 1536, 2048
y = torch.empty(R, C, dtype=torch.bfloat16, device="cuda")
src = torch.zeros(512 << 20 >> 2, dtype=torch.int32, device="cuda")
tiles = (R // 128) * (C // 256)
calls = {}
for W in (0, 256, 512, 1280, 2560, 5120):
    for every in (1, 4, 16, 48):
        if W == 0 and every > 1:
            continue
        calls[f"{tiles * W * 4 / 1e6:.0f} MB read, every {every} tiles"] = lambda W=W, every=every: mix[(132,)](
            y, src, C, C // 256, tiles, W, every, False, num_warps=8
        )
calls["5 kB a tile, the same for all"] = lambda: mix[(132,)](y, src, C, C // 256, tiles, 1280, 1, True, num_warps=8)
graphs = []
for call in calls.values():
    call()
    graphs.append(clock.capture(call))
json.dump(
    [[k, round(statistics.median(t), 1)] for k, t in zip(calls, clock.rounds_us(graphs, 9))], open(sys.argv[1], "w")
)
