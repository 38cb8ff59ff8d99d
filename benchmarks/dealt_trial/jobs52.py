# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    p = lambda name, mod="nk", **k: prow(
        f"{o} {name}", mod, kn, **(dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2, DYN=0) | k)
    )
    JOBS += [
        p("128"),
        p("128S2", slots=2),
        p("128g4", g=4),
        p("128g16", g=16),
        p("128g32", g=32),
        p("128S2g4", slots=2, g=4),
        p("128S2g16", slots=2, g=16),
        crows(f"{o} s4", "cur", 256, 4, kn),
        crows(f"{o} 128s6", "cur", 128, 6, kn, 1),
        prow(f"{o} pp", "cur", kn),
    ]
