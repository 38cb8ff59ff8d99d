from jobs20 import crows, prow, pdw, cdw
G=dict(INDEXED=True,GATHER=True,YMAP=True)
S=dict(INDEXED=True,SCATTER=True)
JOBS=[crows(f"fwd {m} sc s4",m,256,4,False,**S) for m in ("now","pj")]+[crows(f"fwd {m} sc 128s6",m,128,6,False,1,**S) for m in ("now","pj")]+[crows(f"fwd {m} g s4",m,256,4,False,**G) for m in ("now","pj")]+[crows(f"dX {m} sc s4",m,256,4,True,**S) for m in ("now","pj")]+[crows(f"fwd {m} s4",m,256,4,False) for m in ("now","pj")]
JOBS+=[prow("fwd pp","now",False),prow("fwd pj pp","pj",False),prow("dX pp","now",True),prow("fwd sc pp","pj",False,**S),prow("dX sc pp","pj",True,**S),pdw("dW pp","now"),pdw("dW pj pp","pj"),pdw("dW ppA","now",ACROSS=True),pdw("dW pj ppA","pj",ACROSS=True)]
