from jobsr import rows, dw
JOBS=[]
for g in (8,1,4,16): JOBS.append(dw(f"dW k32 g{g}",32,8,"full",GROUP_M=g))
JOBS.append(dw("dW k32 s6sl4",32,6,"full",SLOTS=4))
JOBS.append(dw("dW k32 s6 batch",32,6,"batch",SLOTS=4))
JOBS.append(dw("dW s3 batch",64,3,"batch",SLOTS=4))
JOBS.append(dw("dW k32 s8sl1",32,8,"full",SLOTS=1))
for kn in (False,True):
    o="dX" if kn else "fwd"
    for g in (8,1,2,4,16): JOBS.append(rows(f"{o} g{g}",256,4,kn,"full",GROUP_M=g))
    JOBS.append(rows(f"{o} s3 batch",256,3,kn,"batch",SLOTS=4))
    JOBS.append(rows(f"{o} k32 s6 batch",256,6,kn,"batch",SLOTS=4,BLOCK_K=32))
JOBS=[j for j in JOBS if "k32 s6 batch" not in j[0] or j[0].startswith("dW")]
JOBS.append(dw("dW k32 half",32,8,"half",WDIV=2))
JOBS.append(dw("dW k32 halfbatch",32,6,"halfbatch",WDIV=2,SLOTS=4))
JOBS.append(dw("dW k32 skew",32,8,"skew"))
JOBS.append(dw("dW k32 skewbatch",32,6,"skewbatch",SLOTS=4))
JOBS.append(rows("fwd skew",256,4,False,"skew"))
JOBS.append(rows("dX skew",256,4,True,"skew"))
