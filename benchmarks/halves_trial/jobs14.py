
from jobs9 import rows, dw
N=dict(WDIV=2, GATED=False)
JOBS=[]
for v,k in (("v12",{}),("v13",N)):
    JOBS += [rows(f"fwd {v}", 256, 4, False, v, **k), rows(f"fwd {v} 128", 128, 6, False, v, **k), rows(f"dX {v}", 256, 4, True, v, **k), rows(f"dX {v} 128", 128, 6, True, v, **k), dw(f"dW {v}", 32, 8, v, **k)]
