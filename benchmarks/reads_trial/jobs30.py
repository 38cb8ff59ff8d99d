# ruff: noqa
from jobs20 import cdw

JOBS = [cdw("dW base", "cur", 32, 8, g=1)]
for G in (2, 4, 8, 16, 32):
    JOBS += [
        cdw(f"dW b{G}F", "pb", 32, 8, g=1, AHEAD=G, LASTP=False, BOTH="F"),
        cdw(f"dW b{G}lF", "pb", 32, 8, g=1, AHEAD=G, LASTP=True, BOTH="F"),
        cdw(f"dW b{G}LF", "pb", 32, 8, g=1, AHEAD=G, LASTP=False, BOTH="LF"),
    ]
JOBS += [cdw("dW b8", "pb", 32, 8, g=1, AHEAD=8, LASTP=False), cdw("dW F", "cur", 32, 8, g=1, BOTH="F")]
