def rows(name, mod, BN, BK, S, kn, g=8, slots=0, width=0, parts=None, **kw):
    c = dict(BLOCK_N=BN, BLOCK_K=BK, STAGES=S, PARTS=parts or 1, GROUP_M=g, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, REGISTERS=216)
    if mod != "v1": c |= dict(SLOTS=slots, WIDTH_=width)
    return (name, mod, "dX" if kn else "forward", c | kw)
def dw(name, mod, BM, BK, S, g=8, slots=0, width=0, parts=None, **kw):
    c = dict(BLOCK_M=BM, BLOCK_K=BK, STAGES=S, PARTS=parts or 1, GROUP_M=g, EXPERTS=512, REGISTERS=216)
    if mod != "v1": c |= dict(SLOTS=slots, WIDTH_=width)
    return (name, mod, "dW", c | kw)
JOBS = []
for kn in (False, True):
    o = "dX" if kn else "fwd"
    JOBS += [rows(f"{o} v1 256 s4", "v1", 256, 64, 4, kn, parts=4), rows(f"{o} v1 256 s3", "v1", 256, 64, 3, kn, parts=1),
             rows(f"{o} v1 128 s6", "v1", 128, 64, 6, kn, parts=2),
             rows(f"{o} v2 256 s4 2x64", "v2", 256, 64, 4, kn, slots=2, width=64),
             rows(f"{o} v2 256 s3 4x64", "v2", 256, 64, 3, kn, slots=4, width=64),
             rows(f"{o} v2 256 s3 1x256", "v2", 256, 64, 3, kn, slots=1, width=256),
             rows(f"{o} v2 128 s6 2x64", "v2", 128, 64, 6, kn, slots=2, width=64),
             rows(f"{o} v2 256 s4 ptr", "v2", 256, 64, 4, kn, slots=0, width=64, parts=4),
             ]
JOBS += [dw("dW v1 32 s8", "v1", 32, 256, 8, parts=4), dw("dW v1 64 s4", "v1", 64, 256, 4, parts=4),dw("dW v1 32 s6", "v1", 32, 256, 6, parts=1),
         dw("dW v2 32 s8 2x64", "v2", 32, 256, 8, slots=2, width=64), dw("dW v2 32 s6 4x64", "v2", 32, 256, 6, slots=4, width=64),
         dw("dW v2 64 s4 2x64", "v2", 64, 256, 4, slots=2, width=64), dw("dW v2 64 s3 4x64", "v2", 64, 256, 3, slots=4, width=64),
         dw("dW v2 32 s8 2x64 g1", "v2", 32, 256, 8, slots=2, width=64, g=1)]
