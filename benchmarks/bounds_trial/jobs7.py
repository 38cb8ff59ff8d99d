from jobsr import rows, dw
JOBS=[dw("dW full",32,8,"full")]
for v in ("new2","new4","new8"): JOBS.append(dw(f"dW {v}",32,8,v,NARROW=False))
JOBS.append(dw("dW narrow",32,8,"new4",NARROW=True,WDIV=2))
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS.append(rows(f"{o} full",256,4,kn,"full"))
    for v in ("new2","new4","new8"): JOBS.append(rows(f"{o} {v}",256,4,kn,v))
    JOBS.append(rows(f"{o} 128full",128,6,kn,"full",SLOTS=1)); JOBS.append(rows(f"{o} 128new4",128,6,kn,"new4",SLOTS=1))
    JOBS.append(rows(f"{o} s3",256,3,kn,"full")); JOBS.append(rows(f"{o} s3new4",256,3,kn,"new4")); JOBS.append(rows(f"{o} s3new2",256,3,kn,"new2"))
