F=dict(block_m=256,block_n=128,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
S=dict(block_m=128,block_n=256,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
JOBS=[(f"{op} {n}",op,c,f,(),dict(GATHER=True) if f==1 else {}) for op in ("forward","dX") for n,c,f in (("f256",F,0),("g256",F,1),("s256",S,0),("gs256",S,1))]
