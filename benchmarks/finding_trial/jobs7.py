def crows(name,mod,bn,stages,kn,slots=2,g=8):
    return (name,mod,"dX" if kn else "forward",dict(BLOCK_N=bn,WDIV=2,BLOCK_K=64,STAGES=stages,SLOTS=slots,GROUP_M=g,EXPERTS=512,W_KN=kn,INDEXED=False,GATHER=False,GATED=False,PINGPONG=False,REGISTERS=216))
def cdw(name,mod,bm,stages,slots=2,g=8,narrow=False):
    return (name,mod,"dW",dict(BLOCK_K=256,WDIV=2 if narrow else 1,BLOCK_M=bm,STAGES=stages,SLOTS=slots,GROUP_M=g,EXPERTS=512,NARROW=narrow,PINGPONG=False,REGISTERS=216))
JOBS=[f for q in ("q2","q4","q8") for f in (cdw("dW "+q,q,32,8),cdw("dW g1"+q,q,32,8,g=1),crows("fwd "+q,q,256,4,False),crows("fwd 128"+q,q,128,6,False,1),crows("dX "+q,q,256,4,True))]
