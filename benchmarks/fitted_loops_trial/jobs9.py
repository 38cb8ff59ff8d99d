# ruff: noqa
from jobs1 import F, S
import functools

JOBS = []
for kn in (False,):
    o = "dX" if kn else "forward"
    JOBS += [
        F(f"{o} x256", "fi", kn, 256, 4, False, 2, RW="fit", INDEXED=False),
        F(f"{o} x192", "fi", kn, 192, 5, True, 1, RW="fit", INDEXED=False),
    ]
    for fl, t in ((2, " S"), (6, " SW")):
        JOBS += [
            F(f"{o} x256{t}", "fi", kn, 256, 4, False, 2, fl, RW="fit", INDEXED=True, YMAP=False),
            F(f"{o} x192{t}", "fi", kn, 192, 5, True, 1, fl, RW="fit", INDEXED=True, YMAP=False),
        ]
        for m in ("base", "pi"):
            for bn, st, pp, sl in ((128, 6, True, 2), (192, 5, True, 1)):
                JOBS += [S(f"{o} {m} p{bn}{t}", m, kn, bn, st, pp, sl, True, fl)]
        JOBS += [S(f"{o} s256{t}", "base", kn, 256, 4, False, 2, True, fl)]
    JOBS += [
        S(f"{o} p128", "base", kn, 128, 6, True, 1),
        S(f"{o} p192", "base", kn, 192, 5, True, 1),
        S(f"{o} s256", "base", kn, 256, 4, False, 2),
    ]
    JOBS += [
        S(f"{o} p128 I", "base", kn, 128, 6, True, 2, True, 2, IDENT=True),
        S(f"{o} s256 I", "base", kn, 256, 4, False, 2, True, 2, IDENT=True),
        F(f"{o} x192 I", "fi", kn, 192, 5, True, 1, 2, RW="fit", INDEXED=True, YMAP=False, IDENT=True),
    ]
