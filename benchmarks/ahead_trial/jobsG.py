P192=dict(block_m=128,block_n=192,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
P128=dict(block_m=128,block_n=128,block_k=64,num_warps=8,num_stages=6,tma=True,specialized=True,pingpong=True)
F192=dict(block_m=192,block_n=128,block_k=64,num_warps=8,num_stages=5,tma=True,specialized=True,pingpong=True)
JOBS=[(f"forward {n} {fl}","forward",c,6 if fl else 0,(),dict(FLAGS=fl) if fl else {}) for n,c in (("f192",F192),("p128",P128),("p192",P192)) for fl in (0,)]
JOBS+=[(f"forward {n} 6","forward",c,6,(),dict(FLAGS=6)) for n,c in (("f192",F192),("p128",P128),("p192",P192))]
