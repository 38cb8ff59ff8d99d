from pretuned.artifacts.types import Op
W, F, X = Op.DW, Op.FORWARD, Op.DX
T64 = {"x": (1, 1, 64, 128)}; T32 = {"x": (1, 1, 32, 128)}
A = (64,128,256,8,4,8); A32 = (32,128,256,8,8,8); R = (128,256,64,8,4,8)
JOBS = [
 ("dW s4", W, A), ("dW tall s4", W, A, dict(cluster=1, box=T64)), ("dW wide s4", W, A, dict(cluster=2)),
 ("dW k32", W, A32), ("dW tall k32", W, A32, dict(cluster=1, box=T32)),
 ("dW wide k32", W, A32, dict(cluster=2)),
 ("fwd s4", F, R), ("fwd tall", F, R, dict(cluster=1)), ("fwd wide", F, R, dict(cluster=2)), ("fwd mixed", F, R, dict(cluster=3)),
 ("dX s4", X, R), ("dX tall", X, R, dict(cluster=1)), ("dX wide", X, R, dict(cluster=2)), ("dX mixed", X, R, dict(cluster=3)),
]
A32G = (32,128,256,8,8,16); RG = (128,256,64,8,4,16)
EXTRA = [("dW tall k32 g16", W, A32G, dict(cluster=1, box=T32)), ("fwd wide g16", F, RG, dict(cluster=2)), ("fwd mixed g16", F, RG, dict(cluster=3)), ("dX wide g16", X, RG, dict(cluster=2)), ("dX mixed g16", X, RG, dict(cluster=3))]
JOBS += [(n + " debug", *j, dict(*o, debug=True)) for n, *r in list(JOBS) if len(r) == 3 for j, o in [(r[:2], r[2:])]]
JOBS += EXTRA
