
from jobs3 import rows, dw
def p(name, mod, BM, BN, BK, W, S, X=True, Wt=True, E=512, pers=False):
    return (name, mod, "forward", dict(PLAIN=1, BLOCK_M=BM, BLOCK_N=BN, BLOCK_K=BK, WARPS=W, STAGES_=S, GROUP_M=8, EXPERTS=E, SCAN=False, PERSISTENT=pers, X_TMA=X, W_TMA=Wt, W_KN=False, INDEXED=False, PRECISION="tf32"))
JOBS = []
for mod, E in (("p1", 512), ("p2", 512), ("p2", 128)):
    JOBS += [p(f"fwd {mod} e{E} {BM}x{BN}x{BK} w{W} s{S}", mod, BM, BN, BK, W, S, E=E) for BM, BN, BK, W, S in ((16,64,128,4,3),(16,64,128,4,4),(16,64,256,4,3),(16,128,128,4,3))]
JOBS += [p("fwd p2 e128 16x32x256 w4 s3", "p2", 16,32,256,4,3,E=128), p("fwd p2 e128 16x32x256 w4 s4", "p2", 16,32,256,4,4,E=128), p("fwd p2 e128 16x64x128 w4 s6", "p2", 16,64,128,4,6,E=128), p("fwd p2 e128 16x64x128 w8 s4", "p2", 16,64,128,8,4,E=128),
  p("fwd p2 e128 16x32x128 w4 s4", "p2", 16,32,128,4,4,E=128), p("fwd p2 e128 ptr 16x64x128 w4 s4", "p2", 16,64,128,4,4,X=False,Wt=False,E=128), p("fwd p2 e128 xptr 16x64x128 w4 s4", "p2", 16,64,128,4,4,X=False,E=128), p("fwd p2 e128 16x64x256 w8 s3", "p2", 16,64,256,8,3,E=128)]
