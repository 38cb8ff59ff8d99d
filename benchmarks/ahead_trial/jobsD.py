import os
sl=os.environ["SLOTS_"]; few=os.environ["FEW"]
JOBS=[]
for st in {"2":(8,4),"4":(6,4),"8":(4,)}[sl]:
    for s in (True,False):
        D=dict(block_m=32,block_n=128,block_k=256,group_m=1,num_warps=8,num_stages=st,tma=True,specialized=True,persistent=True,streamed=s)
        JOBS.append((f"dW sl{sl}st{st}f{few}{'s' if s else 'p'}","dW",D,0,(),{}))
