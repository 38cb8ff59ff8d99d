# ruff: noqa
def crows(name, mod, bn, stages, kn, slots=2, g=8, bk=64, **k):
    return (
        name,
        mod,
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_N=bn,
                WDIV=2,
                BLOCK_K=bk,
                STAGES=stages,
                SLOTS=slots,
                GROUP_M=g,
                EXPERTS=512,
                W_KN=kn,
                INDEXED=False,
                GATHER=False,
                GATED=False,
                PINGPONG=False,
                REGISTERS=216,
            ),
            **k,
        ),
    )


def cdw(name, mod, bm, stages, slots=2, g=8, **k):
    return (
        name,
        mod,
        "dW",
        dict(
            dict(
                BLOCK_K=256,
                WDIV=1,
                BLOCK_M=bm,
                STAGES=stages,
                SLOTS=slots,
                GROUP_M=g,
                EXPERTS=512,
                NARROW=False,
                PINGPONG=False,
                ACROSS=False,
                REGISTERS=216,
            ),
            **k,
        ),
    )


def prow(name, mod, kn, st=5, slots=1, g=8, **k):
    return (
        name,
        mod,
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_N=192,
                WDIV=3,
                BLOCK_K=64,
                STAGES=st,
                SLOTS=slots,
                GROUP_M=g,
                EXPERTS=512,
                W_KN=kn,
                INDEXED=False,
                GATHER=False,
                GATED=False,
                PINGPONG=True,
                REGISTERS=224,
            ),
            **k,
        ),
    )


def pdw(name, mod, g=8, st=10, slots=1, bm=32, **k):
    return (
        name,
        mod,
        "dW",
        dict(
            dict(
                BLOCK_K=192,
                WDIV=3,
                BLOCK_M=bm,
                STAGES=st,
                SLOTS=slots,
                GROUP_M=g,
                EXPERTS=512,
                NARROW=False,
                PINGPONG=True,
                ACROSS=False,
                REGISTERS=224,
            ),
            **k,
        ),
    )


JOBS = [
    cdw("dW k32", "now", 32, 8),
    cdw("dW k32P3", "now", 32, 8, PROMO=3),
    pdw("dW pp", "now"),
    pdw("dW ppA", "now", ACROSS=True),
    pdw("dW wd", "wd", st=7, WIDE=True, BLOCK_ROWS=256),
    pdw("dW wdA", "wd", st=7, WIDE=True, ACROSS=True, BLOCK_ROWS=256),
    cdw("dW pf0", "pf", 32, 8, AHEAD=0),
    cdw("dW pf1", "pf", 32, 8, AHEAD=1),
    pdw("dW ppf0", "pf", AHEAD=0),
]
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        crows(f"{o} s4", "now", 256, 4, kn),
        crows(f"{o} s4P3", "now", 256, 4, kn, PROMO=3),
        crows(f"{o} k32s8", "b32", 256, 8, kn, bk=32, XSW=64, WSW=128 if kn else 64),
        crows(f"{o} 128s6", "now", 128, 6, kn, 1),
        crows(f"{o} 128s6P3", "now", 128, 6, kn, 1, PROMO=3),
        prow(f"{o} pp", "now", kn),
        prow(f"{o} wd", "wd", kn, st=3, slots=2, WIDE=True, BLOCK_ROWS=256),
    ]
