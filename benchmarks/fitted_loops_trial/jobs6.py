# ruff: noqa
from jobs1 import F, S

JOBS = []
for kn in (False, True):
    o = "dX" if kn else "forward"
    JOBS += [
        F(f"{o} f256", "base", kn, 256, 4, False, 2),
        F(f"{o} fp192", "base", kn, 192, 5, True, 1),
        S(f"{o} p128", "base", kn, 128, 6, True, 1),
        S(f"{o} s256", "base", kn, 256, 4, False, 2),
    ]
    for fl, t in ((0, ""), (2, " S"), (6, " SW")):
        JOBS += [
            F(f"{o} mu256{t}", "mu", kn, 256, 4, False, 2, fl, RW=("unswitch", 8)),
            F(f"{o} mu192{t}", "mu", kn, 192, 5, True, 1, fl, RW=("unswitch", 6)),
        ]
    JOBS += [
        F(f"{o} un256", "pr", kn, 256, 4, False, 2, RW=("unswitch", 8)),
        F(f"{o} un192", "pr", kn, 192, 5, True, 1, RW=("unswitch", 6)),
    ]
    JOBS += [
        F(f"{o} xn256", "un16", kn, 256, 4, False, 2, RW=("unswitch", 16, 16)),
        F(f"{o} xn192", "un16", kn, 192, 5, True, 1, RW=("unswitch", 12, 16)),
    ]
