# ruff: noqa
from jobs20 import crows, cdw, prow, pdw
from jobs86 import arow


def aprow(name, kn, tokens=192, st=5, slots=1, g=8, grain=32, deal=0, reg=224, **k):
    return (
        name,
        "ap",
        "dX" if kn else "forward",
        dict(
            dict(
                BLOCK_N=128,
                WDIV=2 if kn else 1,
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
                XROWS=64,
                REGISTERS=reg,
                DEAL=deal,
            ),
            **k,
        ),
    )


D = dict(BLOCK_N=128, WDIV=2, st=6, CLUSTER=0, PARTS=2)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [
        prow(f"{o} 128", "fin2", kn, **D),
        prow(f"{o} pp", "fin2", kn),
        crows(f"{o} s4", "fin2", 256, 4, kn),
        crows(f"{o} 128s6", "fin2", 128, 6, kn, 1),
    ]
    JOBS += [arow(f"{o} acA", "ad", kn, wb=2 if kn else 1)]
    JOBS += [
        aprow(f"{o} ap192", kn),
        aprow(f"{o} ap128", kn, tokens=128, st=6, slots=1),
        aprow(f"{o} ap128d", kn, tokens=128, st=6, slots=1, deal=1),
    ]
