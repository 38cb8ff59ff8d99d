D=dict(block_m=32,block_n=128,block_k=256,group_m=1,num_warps=8,num_stages=8,tma=True,specialized=True,persistent=True,streamed=True)
JOBS=[(f"dW st{n}","dW",D,0,(("pol","swap",(w,)),),{}) for n,w in (("none",None),("U",0x16f),("EF8",0x127),("L",0x14f),("N",0x10f))]
