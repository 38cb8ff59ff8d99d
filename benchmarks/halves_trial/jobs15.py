
from jobs9 import rows, dw
N=dict(WDIV=2, GATED=False)
JOBS=[]
for v,k in (("v12",{}),("v13",N),("v14",dict(GATED=False)),("v15",dict(GATED=False))):
    JOBS += [dw(f"dW {v}", 32, 8, v, **k)]
for v,k in (("v12",{}),("v14",N),("v15",N)):
    JOBS += [rows(f"fwd {v}", 256, 4, False, v, **k), rows(f"dX {v}", 256, 4, True, v, **k)]
