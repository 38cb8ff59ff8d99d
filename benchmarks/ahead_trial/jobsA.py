D=dict(num_warps=4,tma=True,group_m=8)
C={"a256":dict(block_m=16,block_n=64,block_k=256,num_stages=3,**D),"b128":dict(block_m=16,block_n=128,block_k=128,num_stages=3,**D),"c128":dict(block_m=16,block_n=64,block_k=128,num_stages=4,**D)}
S={"s128":dict(block_m=128,block_n=128,block_k=64,num_warps=8,num_stages=6,tma=True,specialized=True)}
W={"none":None,"EF":0x12f,"EF14":0x12d,"EF12":0x12b,"EF8":0x127,"EF4":0x123,"U":0x16f,"U8":0x167,"N":0x10f,"NF8":0x117,"L8":0x147,"L2":0x141}
JOBS=[(f"{c} {w}","forward",cfg,0,() if word is None else (("pol","make",(word,)),),{}) for c,cfg in {**C,**S}.items() for w,word in W.items()]
