from jobsr import rows, dw
JOBS=[dw("dW k32",32,8,"full"), dw("dW half",32,8,"half",WDIV=2), dw("dW skew",32,8,"skew"), dw("dW skewsl1",32,8,"skew",SLOTS=1),
 dw("dW s4skew",64,4,"skew")]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS += [rows(f"{o} s4",256,4,kn,"full"), rows(f"{o} s3",256,3,kn,"full"), rows(f"{o} skew",256,4,kn,"skew"), rows(f"{o} s4sl1",256,4,kn,"full",SLOTS=1)]
