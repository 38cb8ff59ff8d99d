from jobs1 import rows as R, dw as W
def crows(name,bn,stages,kn,slots=2,g=8):
    return (name,"cur","dX" if kn else "forward",dict(BLOCK_N=bn,WDIV=2,BLOCK_K=64,STAGES=stages,SLOTS=slots,GROUP_M=g,EXPERTS=512,W_KN=kn,INDEXED=False,GATHER=False,GATED=False,REGISTERS=216))
def cdw(name,bm,stages,slots=2,g=8,narrow=False):
    return (name,"cur","dW",dict(BLOCK_K=256,WDIV=2 if narrow else 1,BLOCK_M=bm,STAGES=stages,SLOTS=slots,GROUP_M=g,EXPERTS=512,NARROW=narrow,REGISTERS=216))
JOBS=[crows("fwd s4",256,4,False), crows("fwd s3",256,3,False), crows("fwd 128",128,6,False,1), R("fwd pp192",3,5,False,reg=224), R("fwd pp192sk",3,5,False,reg=224,skip=True), R("fwd pp192skg16",3,5,False,reg=224,skip=True,g=16), R("fwd pp128",2,6,False,reg=216,skip=True,slots=2),
 crows("dX s4",256,4,True), crows("dX s3",256,3,True), R("dX pp192sk",3,5,True,reg=224,skip=True), R("dX pp128",2,6,True,skip=True,slots=2,reg=216),
 cdw("dW k32",32,8), cdw("dW k32g1",32,8,g=1), cdw("dW narrow",32,8,slots=1,narrow=True), cdw("dW k64",64,4), W("dW pp192",3,5,reg=224), W("dW pp192g1",3,5,reg=224,g=1), W("dW pp192b32",3,10,32,reg=224), W("dW pp192b32g1",3,10,32,reg=224,g=1), W("dW pp128",2,6,slots=2,reg=216), W("dW pp128b32",2,12,32,slots=2,reg=216)]
