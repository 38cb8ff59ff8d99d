# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    for k, f, a, kw in (("pp128", prow, (kn,), D), ("s4", crows, (256, 4, kn), {}), ("pp192", prow, (kn,), {})):
        JOBS += [f(f"{o} {k}", "pl", *a, PLACED=0, SB=64, CLEAR=1, **kw)]
        for how in ("id", "rand", "pairs", "gpc", "broken"):
            JOBS += [f(f"{o} {k}_{how}", "pl", *a, PLACED=4, SB=64, HOW=how, CLEAR=1, **kw)]
        JOBS += [f(f"{o} {k}_draw2", "pl", *a, PLACED=3, SB=64, CLEAR=1, **kw)]
