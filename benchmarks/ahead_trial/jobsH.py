import os
P128=dict(block_m=128,block_n=128,block_k=64,num_warps=8,num_stages=6,tma=True,specialized=True,pingpong=True)
F192=dict(block_m=192,block_n=128,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
t=os.environ["TAG"]
JOBS=[(f"forward {n} {t}","forward",c,6,(),dict(FLAGS=22)) for n,c in (("f192",F192),("p128",P128))]
