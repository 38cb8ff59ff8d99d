
def t(name, mod, bm, bn, bk, w, st, turned, **k):
    return (name, mod, "dX", dict(PLAIN=True, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP_M=8, EXPERTS=512, SCAN=False, PERSISTENT=True, X_TMA=True, W_TMA=True, W_KN=True, INDEXED=False, PRECISION="tf32", WARPS=w, STAGES_=st, EL="fp32", TURNED=turned))
JOBS=[t("ship 64x64x32","x1",64,64,32,2,3,False)]
for bm,bn,bk,w,st in ((128,128,32,4,4),(128,128,32,8,4),(256,128,32,8,3),(128,64,32,4,4),(64,128,32,4,4),(256,64,32,4,4)):
    JOBS.append(t(f"turned {bm}x{bn}x{bk}w{w}s{st}","x1",bm,bn,bk,w,st,True))
