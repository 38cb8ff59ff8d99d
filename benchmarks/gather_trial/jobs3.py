from jobsg import rows, dw
G=dict(INDEXED=True,GATHER=True)
JOBS=[rows("fwd s4",256,4,False,"full"),rows("fwd idx",256,4,False,"full",INDEXED=True),rows("fwd gather",256,4,False,"full",**G),rows("fwd g1",256,4,False,"g1",**G),rows("fwd g3",256,4,False,"g3",**G),rows("fwd g3nf",256,4,False,"g3nf",**G),rows("fwd g3no",256,4,False,"g3no",**G)]
