
def p(name, mod, BM, BN, BK, W, S, X=True, Wt=True, E=512, pers=False, **kw):
    return (name, mod, "forward", dict(PLAIN=1, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, WARPS=W, STAGES_=S, GROUP_M=8, EXPERTS=E, SCAN=False, PERSISTENT=pers, X_TMA=X, W_TMA=Wt, W_KN=False, INDEXED=False, PRECISION="tf32")|kw)
JOBS=[]
for n,kw in (("", {}),(" first",dict(HINT="first")),(" normal",dict(HINT="normal"))):
    for a in ((16,64,128,4,4),(16,64,256,4,3),(16,128,128,4,3),(32,128,128,4,3)):
        if n==" normal" and a[2]==256: continue
        JOBS.append(p(f"fwd {a[0]}x{a[1]}x{a[2]}s{a[4]}{n}","p4",*a,**kw))
from jobs9 import rows
N=dict(WDIV=2, GATED=False)
for n,kw in (("", {}),(" first",dict(HINT="first"))):
    JOBS.append(rows(f"fwd sp256{n}",256,4,False,"v14",**N,**kw)); JOBS.append(rows(f"fwd sp128{n}",128,6,False,"v14",**N,**kw))
