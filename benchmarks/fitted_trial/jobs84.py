# ruff: noqa
from jobs20 import crows, cdw, prow, pdw


def arow(name, mod, kn, st=4, slots=2, g=8, tokens=256, grain=32, xbox=32, **k):
    return (
        name,
        mod,
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_N=128,
                WDIV=2,
                BLOCK_K=64,
                STAGES=st,
                SLOTS=slots,
                GROUP_M=g,
                EXPERTS=512,
                W_KN=kn,
                INDEXED=False,
                GATHER=False,
                LEVELED=1,
                TOKENS=tokens,
                GRAIN=grain,
                XBOX=xbox,
                XROWS=xbox,
                REGISTERS=216,
            ),
            **k,
        ),
    )


D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        arow(f"{o} ac32", "ac", kn),
        arow(f"{o} ac64", "ac", kn, grain=64, xbox=64),
        arow(f"{o} ac32x64", "ac", kn, xbox=64),
        arow(f"{o} ac32g1", "ac", kn, g=1),
    ]
JOBS1 = JOBS[:1]
