# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
S = dict(STREAMED=False)
D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for m, t, k in (("cur", "", {}), ("tb", "t", {}), ("sc", "s", dict(LATE=False)), ("sc", "l", dict(LATE=True))):
    JOBS += [cdw(f"dW k32{t}", m, 32, 8, AHEAD=1,**S,**k), pdw(f"dW pp{t}", m, **S,**k), pdw(f"dW ppA{t}", m, ACROSS=True, **S,**k)]
for m, t, k in (("cur", "", {}), ("sc", "s", dict(LATE=False, DYN=True)), ("sc", "l", dict(LATE=True, DYN=True)), ("sc", "d", dict(LATE=False, DYN=False))):
    for kn in (False, True):
        o = "dX" if kn else "fwd"
        JOBS += [prow(f"{o} 128{t}", m, kn, **D, **k)]
        if t != "d": JOBS += [crows(f"{o} s4{t}", m, 256, 4, kn, **k), prow(f"{o} pp{t}", m, kn, **k)]
