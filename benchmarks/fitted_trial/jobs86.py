# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
from jobs84 import arow as arow_


def arow(name, mod, kn, wb=2, bal=1, xbox=64, **k):
    k = dict(k)
    if wb == 1:
        k["WDIV"] = 1
    return arow_(name, mod, kn, xbox=xbox, WB=wb, BAL=bal, **k)


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
    JOBS += [arow(f"{o} acA", "ad", kn)]
    JOBS += [arow(f"{o} acG", "ad", kn, bal=0)]
    JOBS += [arow(f"{o} acX128", "ad", kn, xbox=128), arow(f"{o} acX256", "ad", kn, xbox=256)]
    if not kn:
        JOBS += [
            arow(f"{o} acW", "ad", kn, wb=1),
            arow(f"{o} acWX128", "ad", kn, wb=1, xbox=128),
            arow(f"{o} acWG", "ad", kn, wb=1, bal=0),
        ]
    else:
        JOBS += [arow(f"{o} acGX128", "ad", kn, bal=0, xbox=128)]
    JOBS += [arow(f"{o} ac5", "ad", kn, tokens=128, st=6, g=8, **{})] if 0 else []
