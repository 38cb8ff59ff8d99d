import os
P192=dict(block_m=128,block_n=192,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
P128=dict(block_m=128,block_n=128,block_k=64,num_warps=8,num_stages=6,tma=True,specialized=True,pingpong=True)
F192=dict(block_m=192,block_n=128,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
F256=dict(block_m=256,block_n=128,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
S=dict(block_m=128,block_n=256,block_k=64,num_warps=8,num_stages=4,tma=True,specialized=True)
L=dict(p192=P192,p128=P128,f192=F192,f256=F256,s256=S)
t=os.environ["TAG"]
JOBS=[(f"forward {n} {t}","forward",c,6,(),dict(FLAGS=22)) for n,c in L.items()]
if t=="old": JOBS+=[(f"forward {n} plain","forward",c,0,(),{}) for n,c in L.items()]
