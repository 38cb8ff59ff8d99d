
from jobs16 import t as tx
def t(name, mod, bm, bn, bk, w, st, turned):
    return (name, mod, "dW", dict(PLAIN=True, BLOCK_M=bm, BLOCK_N=bn, BLOCK_K=bk, GROUP_M=8, EXPERTS=512, SCAN=False, PERSISTENT=True, TMA=True, PRECISION="tf32", WARPS=w, STAGES_=st, EL="fp32", TURNED=turned))
JOBS=[t("ship 32x64x128w2","x1",32,64,128,2,3,False),t("ship 32x64x64w2","x1",32,64,64,2,4,False)]
for bm,bn,bk,w,st in ((32,128,128,4,3),(32,128,128,8,4),(32,128,256,8,3),(32,256,128,8,3),(32,64,128,4,4),(32,128,64,4,4),(64,128,128,8,3)):
    JOBS.append(t(f"turned {bm}x{bn}x{bk}w{w}s{st}","x1",bm,bn,bk,w,st,True))
JOBS+=[tx(f"turned {bm}x{bn}x{bk}w{w}s{st}","x1",bm,bn,bk,w,st,True) for bm,bn,bk,w,st in ((128,128,32,4,3),(128,128,32,4,2),(256,64,32,4,3),(64,256,32,4,3))]
