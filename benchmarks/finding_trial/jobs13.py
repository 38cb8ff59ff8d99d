
from jobs11 import p
def d(name, mod, bm, bn, bk, st, stream, experts=512, **more):
    return (name, mod, "forward", dict(BLOCK_M=bm, BLOCK_ROWS=bm, XROWS=bm, BLOCK_N=bn, BLOCK_K=bk, STAGES=st, EXPERTS=experts, W_KN=False, INDEXED=False, GATHER=False, NOMAP=True, STREAM=stream, **more))
JOBS=[]
for cfg in ((128,128,3),(64,128,4),(64,256,3)):
    n="%dx%ds%d"%cfg
    for st in (1,0):
        m=n+("s" if st else "")
        JOBS+=[p(m+" d0","d0",*cfg,st,0), p(m+" orc","d2",*cfg,st,0)]
for st in (1,0):
    for bn,bk,s in ((128,64,10),(128,128,5),(64,128,8),(64,64,16)):
        JOBS.append(d(f"e1 {bn}x{bk}s{s}"+("s" if st else ""),"e1",16,bn,bk,s,st))
