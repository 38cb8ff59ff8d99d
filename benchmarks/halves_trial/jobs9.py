
def rows(name, BN, S, kn, v="v5", **kw): return (name, v, "dX" if kn else "forward", dict(BLOCK_N=BN, BLOCK_K=64, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, REGISTERS=216, BLOCK_ROWS=128) | kw)
def dw(name, BM, S, v="v5", **kw): return (name, v, "dW", dict(BLOCK_M=BM, BLOCK_K=256, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, REGISTERS=216) | kw)
JOBS = []
for v in ("v4", "v5"):
    JOBS += [rows(f"fwd {v}", 256, 4, False, v), rows(f"fwd {v} scatter", 256, 4, False, v, INDEXED=True), rows(f"fwd {v} gather", 256, 4, False, v, INDEXED=True, GATHER=True), rows(f"fwd {v} gather 128", 128, 6, False, v, INDEXED=True, GATHER=True), rows(f"dX {v}", 256, 4, True, v), rows(f"dX {v} 128", 128, 6, True, v), dw(f"dW {v}", 32, 8, v), dw(f"dW {v} g1", 32, 8, v, GROUP_M=1)]
JOBS += [rows("fwd v5 gather r208", 256, 4, False, "v5", INDEXED=True, GATHER=True, REGISTERS=208)]
