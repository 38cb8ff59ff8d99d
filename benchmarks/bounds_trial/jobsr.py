def rows(name, BN, S, kn, v, **kw): return (name, v, "dX" if kn else "forward", dict(BLOCK_N=BN, BLOCK_K=64, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, GATED=False, REGISTERS=216, BLOCK_ROWS=128, WDIV=2) | kw)
def dw(name, BM, S, v, **kw): return (name, v, "dW", dict(BLOCK_M=BM, BLOCK_K=256, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, REGISTERS=216) | kw)
JOBS=[]
for v in ("full","loads","mma","l2","nostore","loadsl2"):
    JOBS.append(rows(f"fwd {v}",256,4,False,v))
    if v in ("full","loads","mma","nostore"): JOBS.append(dw(f"dW {v}",64,4,v))
