# ruff: noqa
from jobs1 import F, S

JOBS = []
for kn in (False,):
    o = "dX" if kn else "forward"
    JOBS += [
        F(f"{o} x256", "fj", kn, 256, 4, False, 2, RW="fit", INDEXED=False),
        F(f"{o} x192", "fj", kn, 192, 5, True, 1, RW="fit", INDEXED=False),
        S(f"{o} p128", "fj", kn, 128, 6, True, 1),
    ]
    for fl, t in ((2, " S"), (6, " SW")):
        JOBS += [
            F(f"{o} j256{t}", "fj", kn, 256, 4, False, 1, fl, RW="fit", INDEXED=True, YMAP=False),
            F(f"{o} j192{t}", "fj", kn, 192, 5, True, 1, fl, RW="fit", INDEXED=True, YMAP=False),
        ]
        for m in ("base", "fj"):
            for bn, st, pp, sl in ((128, 6, True, 2), (192, 5, True, 1)):
                JOBS += [S(f"{o} {m} p{bn}{t}", m, kn, bn, st, pp, sl, True, fl)]
        JOBS += [S(f"{o} s256{t}", "base", kn, 256, 4, False, 2, True, fl)]
