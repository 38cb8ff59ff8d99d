import os
n=os.environ["TAG"]
D=dict(block_m=32,block_n=128,block_k=256,group_m=1,num_warps=8,num_stages=8,tma=True,specialized=True,persistent=True)
JOBS=[(f"dW {n} {w}","dW",dict(streamed=True,**D),0,e,{}) for w,e in (("F",()),)]
if n=="base":
    JOBS+=[("dW plain","dW",D,0,(),{}),("dW g8","dW",dict(D,group_m=8),0,(),{}),("dW g16","dW",dict(D,group_m=16),0,(),{}),("dW s g16","dW",dict(D,group_m=16,streamed=True),0,(),{})]
