from jobs9 import rows, dw
N=dict(WDIV=2, GATED=False)
JOBS=[]
for v,k in (("v12",{}),("v13",N)):
    JOBS += [rows(f"fwd {v}", 256, 4, False, v, **k), rows(f"fwd {v} scatter", 256, 4, False, v, INDEXED=True, **k), rows(f"fwd {v} scatter128", 128, 6, False, v, INDEXED=True, **k), rows(f"fwd {v} gather", 256, 4, False, v, INDEXED=True, GATHER=True, **k), rows(f"fwd {v} gather128", 128, 6, False, v, INDEXED=True, GATHER=True, **k)]
