# ruff: noqa
from jobs1 import F, S

JOBS = []
for kn in (False,):
    o = "dX" if kn else "forward"
    JOBS += [
        F(f"{o} f256", "base", kn, 256, 4, False, 2),
        F(f"{o} fp192", "base", kn, 192, 5, True, 1),
        S(f"{o} p128", "base", kn, 128, 6, True, 1),
        S(f"{o} p192", "base", kn, 192, 5, True, 1),
        S(f"{o} s256", "base", kn, 256, 4, False, 2),
        S(f"{o} s128", "base", kn, 128, 6, False, 1),
    ]
    JOBS += [
        F(f"{o} xn256", "un16", kn, 256, 4, False, 2, RW=("unswitch", 16, 16)),
        F(f"{o} xn192", "un16", kn, 192, 5, True, 1, RW=("unswitch", 12, 16)),
    ]
    JOBS += [
        F(f"{o} 8n256", "un8", kn, 256, 4, False, 2, RW=("unswitch", 32, 8)),
        F(f"{o} 8n192", "un8", kn, 192, 5, True, 1, RW=("unswitch", 24, 8)),
    ]
