# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    for t, k in (("", {}), ("F", dict(SHINT="first"))):
        JOBS += [prow(f"{o} pp{t}", "ws", kn, **k)]
        JOBS += [crows(f"{o} s4{t}", "ws", 256, 4, kn, **k)]
        JOBS += [crows(f"{o} 128s6{t}", "ws", 128, 6, kn, 1, **k)]
