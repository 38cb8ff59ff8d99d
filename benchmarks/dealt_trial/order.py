# ruff: noqa
import heapq, numpy as np, sys
from pretuned.aot.inputs import routed_rows


def sim(rows, tiles, P=132, ahead=2, order=None, step=0.262, least=2.0):
    order = range(len(rows)) if order is None else order
    ts = [max(step * -(-int(rows[e]) // 32), least) + 0.1 for e in order for _ in range(tiles)]
    # each program: draws its next tile when it begins the tile `ahead` before
    n = len(ts)
    i = 0
    q = [(0.0, p) for p in range(P)]
    heapq.heapify(q)
    # queue per program of start times
    end = [0.0] * P
    starts = [[] for _ in range(P)]
    # event: program p may draw at time t
    while i < n and q:
        t, p = heapq.heappop(q)
        s = max(end[p], t)
        end[p] = s + ts[i]
        starts[p].append(s)
        i += 1
        # next draw when tile (len-ahead) begins
        k = len(starts[p]) - ahead
        heapq.heappush(q, (starts[p][k] if k >= 0 else 0.0, p))
    return max(end), sum(ts) / P


for name, E, k, N, K, T in (
    ("q30 down", 128, 8, 2048, 768, 8192),
    ("q30 gate", 128, 8, 1536, 2048, 8192),
    ("olmoe gate", 64, 8, 2048, 2048, 8192),
    ("olmoe down", 64, 8, 2048, 1024, 8192),
    ("next gate", 512, 10, 1024, 2048, 8192),
    ("mixtral", 8, 2, 4096, 14336, 8192),
    ("gptoss", 32, 4, 5760, 2880, 8192),
):
    r = routed_rows(E, k, T).numpy()
    tiles = -(-N // 128) * -(-K // 192)
    print(name, list(r[-4:]), tiles * E, end=" ")
    for a in (0, 1, 2, 3):
        m, s = sim(r, tiles, ahead=a + 1 if a else 1)
        o = np.argsort(-r, kind="stable")
        m2, _ = sim(r, tiles, ahead=a + 1 if a else 1, order=o)
        print(f"ahead {a}: {m / s:.3f} sorted {m2 / s:.3f}", end=" | ")
    print(round(s, 1))
print("classes")


def classes(r, cuts, mean):
    c = np.zeros(len(r), int)
    for q in cuts:
        c += r < q * mean
    return np.argsort(c, kind="stable")


CUTS = {
    "6 half-oct": (2.83, 2, 1.41, 1, 0.71),
    "6 oct": (4, 2, 1.4, 1, 0.5),
    "6b": (2, 1.41, 1, 0.75, 0.5),
    "3": (2, 1),
}
for name, E, k, N, K, T in (
    ("q30 down", 128, 8, 2048, 768, 8192),
    ("q30 down", 128, 8, 2048, 768, 4096),
    ("q30 down", 128, 8, 2048, 768, 16384),
    ("olmoe down", 64, 8, 2048, 1024, 8192),
    ("olmoe down", 64, 8, 2048, 1024, 4096),
    ("granite", 32, 8, 1024, 512, 8192),
    ("granite2", 32, 8, 1024, 1024, 8192),
    ("mixtral", 8, 2, 4096, 14336, 1024),
    ("llama4", 16, 1, 16384, 5120, 4096),
    ("next down", 512, 10, 2048, 512, 8192),
):
    for seed in (0, 1):
        r = routed_rows(E, k, T, seed).numpy()
        tiles = -(-N // 128) * -(-K // 192)
        m, s = sim(r, tiles)
        out = [f"nat {m / s:.3f}"]
        m, _ = sim(r, tiles, order=np.argsort(-r, kind="stable"))
        out.append(f"sorted {m / s:.3f}")
        for n, cuts in CUTS.items():
            m, _ = sim(r, tiles, order=classes(r, cuts, r.sum() / E))
            out.append(f"{n} {m / s:.3f}")
        print(
            name,
            T,
            seed,
            tiles * E // 132,
            "per program",
            "busiest share %.3f" % (r.max() * 132 / (r.sum() * tiles)),
            *out,
            round(s, 1),
        )
