# ruff: noqa
def F(name, mod, kn, bm, st, pp, slots, flags=0, reg=None, **k):
    return (
        name,
        mod + ".fitted",
        "rows_fitted",
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_M=bm,
                BLOCK_N=128,
                BLOCK_ROWS=bm,
                BLOCK_K=64,
                STAGES=st,
                SLOTS=slots,
                GROUP_M=8,
                EXPERTS=512,
                W_KN=kn,
                PINGPONG=pp,
                REGISTERS=reg or (224 if pp else 216),
                WCOLS=64 if kn else 128,
                YMAP=True,
                RW="fit",
                FLAGS=flags,
            ),
            **k,
        ),
    )


def S(name, mod, kn, bn, st, pp, slots, indexed=False, flags=0, reg=None, **k):
    return (
        name,
        mod + ".specialized",
        "rows_specialized",
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_N=bn,
                BLOCK_K=64,
                STAGES=st,
                SLOTS=slots,
                GROUP_M=8,
                EXPERTS=512,
                W_KN=kn,
                INDEXED=indexed,
                GATHER=False,
                GATED=False,
                PINGPONG=pp,
                REGISTERS=reg or (224 if pp else 216),
                WCOLS=64 if pp else bn // 2,
                YMAP=not indexed,
                RW="cut" if bn == 192 else None,
                FLAGS=flags,
            ),
            **k,
        ),
    )


JOBS = []
for kn in (False, True):
    o = "dX" if kn else "forward"
    JOBS += [F(f"{o} f256", "base", kn, 256, 4, False, 2), F(f"{o} fp192", "base", kn, 192, 5, True, 1)]
    JOBS += [F(f"{o} m256", "fs", kn, 256, 4, False, 2), F(f"{o} mp192", "fs", kn, 192, 5, True, 1)]
    JOBS += [F(f"{o} m256 S", "fs", kn, 256, 4, False, 2, 2), F(f"{o} mp192 S", "fs", kn, 192, 5, True, 1, 2)]
    JOBS += [F(f"{o} m256 SW", "fs", kn, 256, 4, False, 2, 6), F(f"{o} mp192 SW", "fs", kn, 192, 5, True, 1, 6)]
    for bn, st, pp, sl in ((128, 6, True, 1), (192, 5, True, 1), (128, 6, False, 1), (256, 4, False, 2)):
        n = f"{'p' if pp else 's'}{bn}"
        JOBS += [
            S(f"{o} {n}", "base", kn, bn, st, pp, sl),
            S(f"{o} {n} S", "base", kn, bn, st, pp, 1 if bn == 192 else 2, True, 2),
            S(f"{o} {n} SW", "base", kn, bn, st, pp, 1 if bn == 192 else 2, True, 6),
        ]
