
def p(name, mod, bn, bk, st, stream, pref, experts=512):
    return (name, mod, "forward", dict(PLAIN=True, BLOCK_M=16, BLOCK_N=bn, BLOCK_K=bk, GROUP_M=8, EXPERTS=experts, SCAN=False, PERSISTENT=False, X_TMA=True, W_TMA=True, W_KN=False, INDEXED=False, PRECISION="tf32", WARPS=4, STAGES_=st, STREAM=stream, PREF=pref, ORACLE=mod=="d2"))
JOBS=[]
for cfg in ((128,128,3),(64,128,4),(64,256,3)):
    n="%dx%ds%d"%cfg
    for st in (1,0):
        m=n+("s" if st else "")
        JOBS+=[p(m+" d0","d0",*cfg,st,0), p(m+" pf","d0",*cfg,st,1), p(m+" one","d1",*cfg,st,1), p(m+" orc","d2",*cfg,st,0), p(m+" orcpf","d2",*cfg,st,1)]
