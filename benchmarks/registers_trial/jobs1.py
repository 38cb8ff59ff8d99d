import os
d=os.environ.get("DIRECT","0")
P192=dict(block_m=128,block_n=192,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
P128=dict(block_m=128,block_n=128,block_k=64,num_warps=8,num_stages=6,tma=True,specialized=True,pingpong=True)
S=dict(block_m=128,block_n=256,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
F192=dict(block_m=192,block_n=128,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
F256=dict(block_m=256,block_n=128,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
L=[("p192",P192),("p128",P128),("s256",S)]
if d=="0": L+= [("f192",F192),("f256",F256)]
JOBS=[(f"{op} {n} d{d}{'' if f==6 else ' plain'}",op,c,f,(),dict(FLAGS=6) if f==6 else {}) for f in (6,0) for op in ("forward","dX")[:1] for n,c in L]
