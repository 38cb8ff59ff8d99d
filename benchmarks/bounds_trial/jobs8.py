from jobsr import rows, dw
JOBS=[]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS += [rows(f"{o} 128peel sl1",128,6,kn,"peel",SLOTS=1), rows(f"{o} 128early sl1",128,6,kn,"early",SLOTS=1), rows(f"{o} 128new2 sl2",128,6,kn,"new2",SLOTS=2), rows(f"{o} 128new4 sl1",128,6,kn,"new4",SLOTS=1)]
