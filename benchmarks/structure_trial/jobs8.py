from jobs5 import p
from jobs7 import JOBS as J7
C=((16,64,128,4,3),(16,64,128,4,4),(16,64,256,4,3),(16,128,128,4,3))
JOBS=[p(f"fwd {m} {BM}x{BN}x{BK} w{W} s{S}", m, BM, BN, BK, W, S) for BM, BN, BK, W, S in C for m in ("p1","p3")]
JOBS+=[p("fwd p1 128x256 pers", "p1", 128,256,64,8,3,pers=True), p("fwd p3 128x256 pers", "p3", 128,256,64,8,3,pers=True)]
