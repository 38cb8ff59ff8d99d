# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

S = dict(AHEAD=1, STREAMED=False)
D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0)
JOBS = []
for m, t in (("cur", ""), ("as", "a")):
    JOBS += [cdw(f"dW k32{t}", m, 32, 8, **S), pdw(f"dW pp{t}", m, **S), pdw(f"dW ppA{t}", m, ACROSS=True, **S)]
    for kn in (False, True):
        o = "dX" if kn else "fwd"
        JOBS += [
            crows(f"{o} s4{t}", m, 256, 4, kn),
            crows(f"{o} 128s6{t}", m, 128, 6, kn, 1),
            prow(f"{o} pp{t}", m, kn),
            prow(f"{o} 128{t}", m, kn, **D),
        ]
JOBS += [pdw(f"dW ppan", "asn", **S), pdw(f"dW ppAan", "asn", ACROSS=True, **S)]
