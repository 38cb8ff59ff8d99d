from jobs23 import p
JOBS=[]
for cfg in ((64,256,3),(64,128,4)):
        n="%dx%ds%d"%cfg
        G=dict(X_TMA=False,INDEXED=True,GATHER=True)
        JOBS+=[p(n+" plain","now",*cfg,0),p(n+" g","now",*cfg,0,**G), p(n+" plain8","h8",*cfg,0),p(n+" h5","h5",*cfg,0,**G),p(n+" h8","h8",*cfg,0,**G)]
