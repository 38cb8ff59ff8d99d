# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
from jobs84 import arow

D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        prow(f"{o} 128", "fin2", kn, **D),
        prow(f"{o} pp", "fin2", kn),
        crows(f"{o} s4", "fin2", 256, 4, kn),
        crows(f"{o} 128s6", "fin2", 128, 6, kn, 1),
    ]
    JOBS += [
        arow(f"{o} ac32", "ac", kn),
        arow(f"{o} ac64", "ac", kn, grain=64, xbox=64),
        arow(f"{o} ac32x64", "ac", kn, xbox=64),
        arow(f"{o} ac32g1", "ac", kn, g=1),
        arow(f"{o} ac32s1", "ac", kn, slots=1),
    ]
