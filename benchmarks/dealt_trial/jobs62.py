# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

S = dict(AHEAD=1, STREAMED=False)
JOBS = [cdw("dW k32", "cur", 32, 8, **S), cdw("dW k32n", "nw", 32, 8, **S)]
for m, t in (("cur", ""), ("pE", "E"), ("nw", "n")):
    JOBS += [pdw(f"dW pp{t}", m, **S), pdw(f"dW ppA{t}", m, ACROSS=True, **S)]
JOBS += [
    pdw(f"dW pp64n", "nw", bm=64, st=5, **S),
    prow("fwd pp", "cur", False),
    prow("fwd ppE", "pE", False),
    prow("dX pp", "cur", True),
    prow("dX ppE", "pE", True),
    prow("fwd 128", "cur", False, BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0),
    prow("fwd 128E", "pE", False, BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0),
    prow("dX 128", "cur", True, BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0),
    prow("dX 128E", "pE", True, BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0),
]
