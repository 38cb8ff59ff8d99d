# ruff: noqa
from jobs20 import crows, cdw, prow, pdw

A = dict(LIMIT=0, LATE=0, STREAMED=False)
JOBS = [cdw("dW k32", "ws", 32, 8, AHEAD=1, **A), cdw("dW k32g1", "ws", 32, 8, g=1, AHEAD=1, **A)]
JOBS += [
    cdw("dW k32F", "ws", 32, 8, AHEAD=1, SHINT="first", **A),
    cdw("dW k32g1F", "ws", 32, 8, g=1, AHEAD=1, SHINT="first", **A),
]
JOBS += [cdw("dW k32L1", "ws", 32, 8, AHEAD=1, **A | dict(LATE=1))]
for mb in (0, 2, 3, 4, 6):
    JOBS += [cdw(f"dW S{mb}", "ws", 32, 8, g=1, AHEAD=1, SHINT="first", **A | dict(STREAMED=True, LIMIT=mb << 20))]
JOBS += [pdw("dW pp", "ws", **A), pdw("dW ppA", "ws", ACROSS=True, **A)]
JOBS += [pdw("dW ppF", "ws", SHINT="first", **A), pdw("dW ppAF", "ws", ACROSS=True, SHINT="first", **A)]
JOBS += [pdw("dW ppL", "ws", **A | dict(LATE=1)), pdw("dW ppAL", "ws", ACROSS=True, **A | dict(LATE=1))]
