from jobs11 import p
JOBS=[]
for cfg in ((64,256,3),(64,128,4)):
    n="%dx%ds%d"%cfg
    for st in (0,1):
        for P in (2,3,0):
            j=list(p(f"{n}{'s' if st else ''}P{P}","now",*cfg,st,0)); j[3]=dict(j[3],PROMO=P); JOBS.append(tuple(j))
