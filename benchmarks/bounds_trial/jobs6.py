from jobsr import rows, dw
JOBS=[]
for v in ("full","early","peel","peelearly"):
    JOBS += [dw(f"dW {v}",32,8,v), rows(f"fwd {v}",256,4,False,v), rows(f"dX {v}",256,4,True,v)]
