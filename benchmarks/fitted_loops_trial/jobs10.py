# ruff: noqa
from jobs1 import F, S

JOBS = []
for kn in (False, True):
    o = "dX" if kn else "forward"
    JOBS += [
        F(f"{o} x256", "fw", kn, 256, 4, False, 2, RW="fit", COLUMNS=128),
        F(f"{o} x192", "fw", kn, 192, 5, True, 1, RW="fit", COLUMNS=128),
    ]
    JOBS += [F(f"{o} x128", "fw", kn, 128, 6, True, 1, RW="fit", COLUMNS=128)]
    JOBS += [F(f"{o} xw256", "fw", kn, 128, 4, False, 1, RW="fit", COLUMNS=256, BLOCK_N=256, WCOLS=64 if kn else 256)]
    JOBS += [F(f"{o} xw256s3", "fw", kn, 128, 3, False, 2, RW="fit", COLUMNS=256, BLOCK_N=256, WCOLS=64 if kn else 256)]
    JOBS += [
        S(f"{o} p128", "base", kn, 128, 6, True, 1),
        S(f"{o} s256", "base", kn, 256, 4, False, 2),
        S(f"{o} s128", "base", kn, 128, 6, False, 1),
        S(f"{o} p192", "base", kn, 192, 5, True, 1),
    ]
