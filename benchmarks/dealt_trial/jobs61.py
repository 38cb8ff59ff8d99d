# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

S = dict(AHEAD=1, STREAMED=False)
JOBS = [cdw("dW k32", "cur", 32, 8, **S)]
for m, t in (("cur", ""), ("pE", "E"), ("pN", "N"), ("pS", "S")):
    JOBS += [pdw(f"dW pp{t}", m, **S), pdw(f"dW pp64{t}", m, bm=64, st=5, **S)]
JOBS += [
    pdw("dW ppAE", "pE", ACROSS=True, **S),
    pdw("dW ppA", "cur", ACROSS=True, **S),
    pdw("dW pp9x2E", "pE", st=9, slots=2, **S),
]
