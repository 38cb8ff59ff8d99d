# ruff: noqa
from jobs20 import crows, cdw, prow, pdw


def A(ahead=0, **k):
    return k


def cr(name, kn, parts, cluster, st, g=8, bk=64):
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
            CLUSTER=cluster,
            REGISTERS=224,
        ),
    )


def cw(name, parts, cluster, st, g=8, bm=32):
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
            CLUSTER=cluster,
            REGISTERS=224,
        ),
    )


JOBS = [
    cw("dW 128s", 2, 0, 12),
    cw("dW 128c", 2, 1, 12),
    cw("dW 128cd", 2, 2, 12),
    cw("dW 128c64", 2, 1, 6, bm=64),
    cw("dW 128cd64", 2, 2, 6, bm=64),
    cw("dW 192c", 3, 1, 10),
    cw("dW 192cd", 3, 2, 10),
]
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        cr(f"{o} 128s", kn, 2, 0, 6),
        cr(f"{o} 128c", kn, 2, 1, 6),
        cr(f"{o} 128cd", kn, 2, 2, 6),
        cr(f"{o} 192c", kn, 3, 1, 5),
        cr(f"{o} 192cd", kn, 3, 2, 5),
    ]
JOBS += [
    cdw("dW k32", "cur", 32, 8, AHEAD=1, STREAMED=False),
    pdw("dW pp", "cur", AHEAD=1, STREAMED=False),
    pdw("dW ppA", "cur", ACROSS=True, AHEAD=1, STREAMED=False),
]
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [crows(f"{o} s4", "cur", 256, 4, kn), crows(f"{o} 128s6", "cur", 128, 6, kn, 1), prow(f"{o} pp", "cur", kn)]
