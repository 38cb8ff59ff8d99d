# ruff: noqa
from jobs20 import crows, cdw, prow, pdw


def cr(name, kn, parts, dyn, st, g=8, bk=64):
    return (
        name,
        "cp",
        "dX" if kn else "forward",
        dict(
            BLOCK_N=64 * parts,
            WDIV=parts,
            BLOCK_K=bk,
            STAGES=st,
            SLOTS=1,
            GROUP_M=g,
            EXPERTS=512,
            W_KN=kn,
            INDEXED=False,
            GATHER=False,
            PARTS=parts,
            CLUSTER=0,
            DYN=dyn,
            REGISTERS=224,
        ),
    )


def cw(name, parts, dyn, st, g=8, bm=32):
    return (
        name,
        "cp",
        "dW",
        dict(
            BLOCK_K=64 * parts,
            WDIV=parts,
            BLOCK_M=bm,
            STAGES=st,
            SLOTS=1,
            GROUP_M=g,
            EXPERTS=512,
            PARTS=parts,
            CLUSTER=0,
            DYN=dyn,
            REGISTERS=224,
        ),
    )


JOBS = [
    cw("dW 128s", 2, False, 12),
    cw("dW 128d", 2, True, 12),
    cw("dW 128s64", 2, False, 6, bm=64),
    cw("dW 128d64", 2, True, 6, bm=64),
    cw("dW 192s", 3, False, 10),
    cw("dW 128s1", 2, False, 12, g=1),
    cdw("dW k32", "cur", 32, 8, AHEAD=1, STREAMED=False),
    pdw("dW pp", "cur", AHEAD=1, STREAMED=False),
    pdw("dW ppA", "cur", ACROSS=True, AHEAD=1, STREAMED=False),
    cdw("dW k32s", "st", 32, 8, AHEAD=1, STREAMED=False),
    pdw("dW ppAs", "st", ACROSS=True, AHEAD=1, STREAMED=False),
]
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        cr(f"{o} 128s", kn, 2, False, 6),
        cr(f"{o} 128d", kn, 2, True, 6),
        cr(f"{o} 192s", kn, 3, False, 5),
        cr(f"{o} 128s4", kn, 2, False, 6, g=4),
        cr(f"{o} 128s16", kn, 2, False, 6, g=16),
        cr(f"{o} 128s1", kn, 2, False, 6, g=1),
        cr(f"{o} 128s128", kn, 2, False, 3, bk=128),
        crows(f"{o} s4", "cur", 256, 4, kn),
        crows(f"{o} 128s6", "cur", 128, 6, kn, 1),
        prow(f"{o} pp", "cur", kn),
        crows(f"{o} s4s", "st", 256, 4, kn),
        crows(f"{o} 128s6s", "st", 128, 6, kn, 1),
    ]
