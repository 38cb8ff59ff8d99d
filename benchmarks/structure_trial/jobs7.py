
from jobs3 import rows as r3, dw as d3
def rows(name, BN, S, kn, **kw): return (name, "v4", "dX" if kn else "forward", dict(BLOCK_N=BN, BLOCK_K=64, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, REGISTERS=216, BLOCK_ROWS=128) | kw)
def dw(name, BM, S, **kw): return (name, "v4", "dW", dict(BLOCK_M=BM, BLOCK_K=256, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, REGISTERS=216) | kw)
JOBS = [r3("fwd v3", 256, 64, 4, False), rows("fwd v4", 256, 4, False), rows("fwd v4 128", 128, 6, False), rows("fwd v4 scatter", 256, 4, False, INDEXED=True), rows("fwd v4 gather", 256, 4, False, INDEXED=True, GATHER=True, SLOTS=1), rows("dX v4", 256, 4, True),rows("dX v4 128", 128, 6, True), d3("dW v3", 32, 256, 8), dw("dW v4", 32, 8), dw("dW v4 64", 64, 4)]
