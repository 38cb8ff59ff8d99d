# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
S = dict(STREAMED=False)
D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for m, t, k in (("cur", "", {}), ("sc", "s", dict(LATE=False)), ("sv", "v", dict(LATE=6,WAVES=0)), ("sv", "w", dict(LATE=10,WAVES=0)), ("sv", "h", dict(LATE=6,WAVES=-2)), ("sv", "q", dict(LATE=6,WAVES=4))):
    JOBS += [pdw(f"dW pp{t}", m, **S,**k), pdw(f"dW ppA{t}", m, ACROSS=True, **S,**k)]
JOBS += [cdw(f"dW k32", 'cur', 32, 8, AHEAD=1,**S)]
for m, t, k in (("cur", "", {}), ("rb", "x", dict(AHEAD=2)), ("rh", "p", dict(AHEAD=2,WAVES=2)), ("rh", "q", dict(AHEAD=2,WAVES=4)), ("rh", "h", dict(AHEAD=2,WAVES=-2))):
    for kn in (False, True):
        o = "dX" if kn else "fwd"
        JOBS += [prow(f"{o} 128{t}", m, kn, **D, **k)]
        JOBS += [crows(f"{o} s4{t}", m, 256, 4, kn, **k), prow(f"{o} pp{t}", m, kn, **k)]
