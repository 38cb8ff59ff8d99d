from jobs23 import p
JOBS=[]
for cfg in ((64,256,3),(64,128,4),(128,128,3)):
    for st in (1,0):
        n="%dx%ds%d"%cfg+("s" if st else "")
        G=dict(X_TMA=False,INDEXED=True,GATHER=True)
        JOBS+=[p(n+" plain","now",*cfg,st),p(n+" g","now",*cfg,st,**G)]
        JOBS+=[p(n+" "+h,h,*cfg,st,**G) for h in ("h5","h6","h7")]
