from jobsg import rows, dw
G=dict(INDEXED=True,GATHER=True)
JOBS=[rows("fwd s4",256,4,False,"full"),rows("fwd idx",256,4,False,"full",INDEXED=True),rows("fwd gather",256,4,False,"full",**G),rows("fwd g1",256,4,False,"g1",**G),rows("fwd g2",256,4,False,"g2",**G),rows("fwd g2w1",256,4,False,"g2w1",**G)]
