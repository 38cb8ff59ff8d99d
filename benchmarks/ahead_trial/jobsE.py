import os
n=os.environ["TAG"]
D=dict(block_m=32,block_n=128,block_k=256,group_m=1,num_warps=8,num_stages=8,tma=True,specialized=True,persistent=True)
JOBS=[(f"dW {n}","dW",dict(streamed=True,**D),0,(),{})]
if n=="base F": JOBS.append(("dW plain","dW",D,0,(),{}))
