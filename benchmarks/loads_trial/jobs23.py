from jobs11 import p as p0
def p(name,mod,bn,bk,st,stream,**k):
    j=list(p0(name,mod,bn,bk,st,stream,0)); j[3]=dict(j[3],TURNED=False,**k); return tuple(j)
JOBS=[]
for cfg in ((64,256,3),(64,128,4)):
    for st in (0,1):
        n="%dx%ds%d"%cfg+("s" if st else "")
        G=dict(X_TMA=False,INDEXED=True,GATHER=True)
        JOBS+=[p(n+" plain","now",*cfg,st),p(n+" ptr","now",*cfg,st,X_TMA=False),p(n+" g","now",*cfg,st,**G),p(n+" gB","gB",*cfg,st,**G),p(n+" gC","gC",*cfg,st,**G),p(n+" gD","gD",*cfg,st,**G)]
