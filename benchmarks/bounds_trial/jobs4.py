from jobsr import rows, dw
JOBS=[dw("dW k32",32,8,"full"), dw("dW half",32,8,"half",WDIV=2),
 dw("dW pp64",64,6,"pp",BLOCK_K=128), dw("dW pp32",32,12,"pp",BLOCK_K=128), dw("dW pp64 g16",64,6,"pp",BLOCK_K=128,GROUP_M=16),dw("dW pp32 g4",32,12,"pp",BLOCK_K=128,GROUP_M=4)]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS += [rows(f"{o} s4",256,4,kn,"full"), rows(f"{o} 128s6",128,6,kn,"full"), rows(f"{o} pp",128,6,kn,"pp"), rows(f"{o} pp g16",128,6,kn,"pp",GROUP_M=16)]
