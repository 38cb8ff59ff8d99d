# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [prow(f"{o} pp0", "pl", kn, PLACED=0, SB=64, **D)]
    for how in ("id", "smid", "rand", "side"):
        JOBS += [prow(f"{o} pp_{how}", "pl", kn, PLACED=1, SB=64, HOW=how, **D)]
    JOBS += [crows(f"{o} s4", "pl", 256, 4, kn, PLACED=0, SB=64, CLEAR=1)]
    for sb in (16, 48, 128):
        for how in ("side", "rand"):
            JOBS += [crows(f"{o} s4_{sb}{how}", "pl", 256, 4, kn, PLACED=2, SB=sb, HOW=how, CLEAR=1)]
