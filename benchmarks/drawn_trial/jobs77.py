# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
S = dict(STREAMED=False)
D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for m, t, k in (("cur", "", {}), ("fin", "n", {})):
    JOBS += [pdw(f"dW pp{t}", m, **S,**k), pdw(f"dW ppA{t}", m, ACROSS=True, **S,**k)]
    JOBS += [cdw(f"dW k32{t}", m, 32, 8, AHEAD=1,**S, **k)]
    for kn in (False, True):
        o = "dX" if kn else "fwd"
        JOBS += [prow(f"{o} 128{t}", m, kn, **D)]
        JOBS += [prow(f"{o} pp{t}", m, kn)]
        JOBS += [crows(f"{o} s4{t}", m, 256, 4, kn)]
        JOBS += [crows(f"{o} 128s6{t}", m, 128, 6, kn, 1)]
