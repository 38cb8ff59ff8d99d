from jobsg import rows, dw
G=dict(INDEXED=True,GATHER=True)
JOBS=[rows("fwd s4",256,4,False,"full"),rows("fwd idx",256,4,False,"full",INDEXED=True),rows("fwd gather",256,4,False,"full",**G),rows("fwd g4",256,4,False,"g4",**G,YMAP=1),rows("fwd g5",256,4,False,"g5",**G,YMAP=1),
 rows("dX s4",256,4,True,"full"),rows("dX gather",256,4,True,"full",**G),rows("dX g4",256,4,True,"g4",**G,YMAP=1),rows("dX g5",256,4,True,"g5",**G,YMAP=1),
 dw("dW k32",32,8,"full"), dw("dW lpt",32,8,"g5")]
