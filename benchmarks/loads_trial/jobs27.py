from jobs20 import crows, prow, pdw
G=dict(INDEXED=True,GATHER=True,YMAP=True)
S=dict(INDEXED=True,SCATTER=True)
JOBS=[]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS+=[prow(f"{o} pp","now",kn), crows(f"{o} s4","now",256,4,kn), crows(f"{o} g s4","now",256,4,kn,**G), prow(f"{o} g pp","pi",kn,**G), crows(f"{o} sc s4","now",256,4,kn,**S), prow(f"{o} sc pp","pi",kn,**S)]
JOBS+=[prow("fwd pp2","pi",False)]
