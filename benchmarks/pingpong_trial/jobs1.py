
def rows(name, parts, stages, kn, g=8, slots=1, skip=False, mod="pp", reg=232, bk=64):
    return (name, mod, "dX" if kn else "forward", dict(PARTS=parts, BLOCK_N=64*parts, WDIV=parts, BLOCK_K=bk, STAGES=stages, SLOTS=slots, GROUP_M=g, EXPERTS=512, W_KN=kn, INDEXED=False, GATHER=False, REGISTERS=reg, SKIP=skip))
def dw(name, parts, stages, bm=64, g=8, slots=1, skip=False, mod="pp", reg=232):
    return (name, mod, "dW", dict(PARTS=parts, BLOCK_K=64*parts, WDIV=parts, BLOCK_M=bm, STAGES=stages, SLOTS=slots, GROUP_M=g, EXPERTS=512, REGISTERS=reg, SKIP=skip))
JOBS=[rows("fwd pp192",3,5,False), rows("fwd pp192 skip",3,5,False,skip=True), rows("dX pp192",3,5,True), rows("dX pp192 skip",3,5,True,skip=True), dw("dW pp192",3,5), dw("dW pp192 bm32",3,10,32), dw("dW pp128",2,6,slots=2)]
