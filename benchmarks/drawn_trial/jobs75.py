# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
S = dict(STREAMED=False)
D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
G = dict(GATHER=True, INDEXED=True, YMAP=True, WARPS0=4)
JOBS = []
for m, t, k in (("cur", "", {}), ("sc", "s", dict(LATE=False)), ("sv", "v", dict(LATE=6)), ("sv", "w", dict(LATE=10))):
    JOBS += [pdw(f"dW pp{t}", m, **S,**k), pdw(f"dW ppA{t}", m, ACROSS=True, **S,**k)]
for m, t, k in (("cur", "", {}), ("k2", "x", dict(LATE=2)), ("k2", "y", dict(LATE=4)),  ("k2", "z", dict(LATE=8))):
    JOBS += [cdw(f"dW k32{t}", m, 32, 8, AHEAD=1,**S, **k)]
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [prow(f"{o} 128", "cur", kn, **D), prow(f"{o} 128p", "rh", kn, AHEAD=2, WAVES=2, **D), prow(f"{o} 128s", "rs", kn, LATE=2, DYN=2, **D)]
    JOBS += [prow(f"{o} pp", "cur", kn), prow(f"{o} ppx", "rb", kn, AHEAD=2), prow(f"{o} pps", "rs", kn, LATE=2, DYN=1)]
    JOBS += [crows(f"{o} s4", "cur", 256, 4, kn), crows(f"{o} s4x", "rb", 256, 4, kn, AHEAD=2), crows(f"{o} s4s", "rs", 256, 4, kn, LATE=2, DYN=1), crows(f"{o} s4d", "rg", 256, 4, kn, AHEAD=2)]
