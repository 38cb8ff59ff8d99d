# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
from jobs50 import cw

S = dict(AHEAD=1, STREAMED=False)
JOBS = [
    cdw("dW k32", "cur", 32, 8, **S),
    pdw("dW pp", "cur", **S),
    pdw("dW ppA", "cur", ACROSS=True, **S),
    cdw("dW k64", "cur", 64, 4, **S),
    pdw("dW pp64", "cur", bm=64, st=5, **S),
    pdw("dW ppA64", "cur", bm=64, st=5, ACROSS=True, **S),
    pdw("dW pp64g1", "cur", bm=64, st=5, g=1, **S),
    pdw("dW ppg1", "cur", g=1, **S),
    pdw("dW ppg16", "cur", g=16, **S),
    cw("dW 128c", 2, 1, 12),
    cw("dW 128c64", 2, 1, 6, bm=64),
    cw("dW 128cd64", 2, 2, 6, bm=64),
    cw("dW 192c64", 3, 1, 5, bm=64),
    cw("dW 192cd64", 3, 2, 5, bm=64),
    cw("dW 128c64g1", 2, 1, 6, g=1, bm=64),
    cw("dW 128c64g16", 2, 1, 6, g=16, bm=64),
]
JOBS = [(n, m, o, c | ({"DYN": False} if "CLUSTER" in c else {})) for n, m, o, c in JOBS]
