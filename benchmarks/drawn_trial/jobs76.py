# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
G = dict(GATHER=True, INDEXED=True, YMAP=True, REGISTERS=152)
JOBS = []
for m, t, k in (("cur", "", {}), ("rg", "x", dict(AHEAD=2)), ("rg", "y", dict(AHEAD=4))):
  for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [crows(f"{o} s4{t}", m, 256, 4, kn, **k, **G), crows(f"{o} 128s6{t}", m, 128, 6, kn, 1, **k, **G)]
