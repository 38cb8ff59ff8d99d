
from jobs10 import dw
from jobs7 import cdw
def s(name,mod,g=8,st=10,sw=True,slots=1,bm=32):
    return (name,mod,"dW",dict(BLOCK_K=192,WDIV=3,BLOCK_M=bm,STAGES=st,SLOTS=slots,GROUP_M=g,EXPERTS=512,NARROW=False,PINGPONG=True,REGISTERS=224,SWAP=sw))
JOBS=[s("dW nw","sw",sw=False),s("dW sw","sw"),s("dW swg1","sw",g=1),s("dW nwg1","sw",g=1,sw=False),s("dW nw64","sw",st=5,bm=64,sw=False),cdw("dW k32","nw",32,8),cdw("dW k32g1","nw",32,8,g=1)]
