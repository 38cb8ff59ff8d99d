from jobsr import rows, dw
JOBS=[dw("dW k32",32,8,"full"), dw("dW half",32,8,"half",WDIV=2), dw("dW smemonly",32,8,"smemonly"), dw("dW samebox",32,8,"samebox"), dw("dW nostore",32,8,"nostore"), dw("dW sfirst",32,8,"full",SHINT="first"), dw("dW snormal",32,8,"full",SHINT="normal")]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS += [rows(f"{o} s4",256,4,kn,"full"), rows(f"{o} sfirst",256,4,kn,"full",SHINT="first"), rows(f"{o} s3",256,3,kn,"full"), rows(f"{o} s3sfirst",256,3,kn,"full",SHINT="first")]
