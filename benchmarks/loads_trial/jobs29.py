from jobs20 import pdw, prow, cdw
JOBS=[cdw("dW k32","now",32,8),cdw("dW k32s7x3","pk",32,7,3) ]
for A in (False,True):
    a="A" if A else ""
    JOBS+=[pdw(f"dW{a} pp","now",ACROSS=A), pdw(f"dW{a} s9x2","pk",st=9,slots=2,ACROSS=A), pdw(f"dW{a} s8x3","pk",st=8,slots=3,ACROSS=A)]
JOBS+=[prow("fwd pp","now",False),prow("fwd s4x3","pk",False,st=4,slots=3),prow("fwd s4x2","pk",False,st=4,slots=2)]
