from jobs11 import p
JOBS=[]
for cfg in ((128,128,3),(64,128,4),(64,256,3)):
    n="%dx%ds%d"%cfg
    for st in (1,0):
        m=n+("s" if st else "")
        JOBS+=[p(m+" d0","d0",*cfg,st,0), p(m+" d3","d3",*cfg,st,0), p(m+" d4","d4",*cfg,st,0), p(m+" orc","d2",*cfg,st,0)]
