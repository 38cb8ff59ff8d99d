def row(name,mod,kn,g=8): return (name,mod,"dX" if kn else "forward",dict(BLOCK_N=192,WDIV=3,BLOCK_K=64,STAGES=5,SLOTS=1,GROUP_M=g,EXPERTS=512,W_KN=kn,INDEXED=False,GATHER=False,GATED=False,PINGPONG=True,REGISTERS=224))
def dw(name,mod,g=8): return (name,mod,"dW",dict(BLOCK_K=192,WDIV=3,BLOCK_M=32,STAGES=10,SLOTS=1,GROUP_M=g,EXPERTS=512,NARROW=False,PINGPONG=True,REGISTERS=224))
from jobs7 import crows, cdw
JOBS=[f for m in ("nw","n1","n2") for f in (row("fwd "+m,m,False),row("dX "+m,m,True),dw("dW "+m,m))]+[crows("fwd s4","nw",256,4,False),crows("dX s4","nw",256,4,True),cdw("dW k32","nw",32,8)]
