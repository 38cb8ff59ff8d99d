from jobsg import rows, dw
G=dict(INDEXED=True,GATHER=True)
JOBS=[rows("fwd s4",256,4,False,"full"),rows("fwd idx",256,4,False,"full",INDEXED=True),rows("fwd gather",256,4,False,"full",**G),rows("fwd g3",256,4,False,"g3",**G),rows("fwd g4",256,4,False,"g4",**G,YMAP=1),
 rows("fwd 128",128,6,False,"full",SLOTS=1),rows("fwd g128",128,6,False,"full",**G,SLOTS=1),rows("fwd g3128",128,6,False,"g3",**G,SLOTS=1),rows("fwd g4128",128,6,False,"g4",**G,YMAP=1,SLOTS=1),
 dw("dW k32",32,8,"full"), dw("dW lpt",32,8,"lpt"), dw("dW k32g1",32,8,"full",GROUP_M=1), dw("dW lptg1",32,8,"lpt",GROUP_M=1),
 rows("dX s4",256,4,True,"full"),rows("dX gather",256,4,True,"full",**G),rows("dX g3",256,4,True,"g3",**G),rows("dX g4",256,4,True,"g4",**G,YMAP=1)]
