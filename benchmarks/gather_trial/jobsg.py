def rows(name, BN, S, kn, v, **kw): return (name, v, "dX" if kn else "forward", dict(BLOCK_N=BN, BLOCK_K=64, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, GATED=False, REGISTERS=216, BLOCK_ROWS=128, WDIV=2, PERSISTENT=True) | kw)
def dw(name, BM, S, v, **kw): return (name, v, "dW", dict(BLOCK_M=BM, BLOCK_K=256, STAGES=S, SLOTS=2, GROUP_M=8, EXPERTS=512, REGISTERS=216, NARROW=False, PERSISTENT=True) | kw)
JOBS=[rows("fwd s4",256,4,False,"full"), rows("fwd gather",256,4,False,"full",INDEXED=True,GATHER=True)]
