
from jobs11 import p
from jobs13 import d
JOBS=[]
for cfg in ((128,128,3),(64,128,4),(64,256,3)):
    n="%dx%ds%d"%cfg
    for st in (1,0):
        m=n+("s" if st else "")
        JOBS+=[p(m+" d0","d0",*cfg,st,0)]
JOBS+=[p("64x128s4s orc","d2",64,128,4,1,0)]
for st in (1,0):
    z="s" if st else ""
    JOBS+=[d("e1 64x128s8"+z,"e1",16,64,128,8,st), d("e2 64x128s8"+z,"e2",16,64,128,8,st,PREFETCH=0), d("e2p 64x128s8"+z,"e2",16,64,128,8,st,PREFETCH=1),
      d("e2p 64x128s10"+z,"e2",16,64,128,10,st,PREFETCH=1), d("e2p 64x256s5"+z,"e2",16,64,256,5,st,PREFETCH=1), d("e2p 128x128s5"+z,"e2",16,128,128,5,st,PREFETCH=1)]
JOBS+=[d("e2p32 64x128s8","e2",32,64,128,8,0,PREFETCH=1), d("e2p32 128x128s5","e2",32,128,128,5,0,PREFETCH=1), d("e2p64 64x128s6","e2",64,64,128,6,0,PREFETCH=1), d("e2p64 128x128s4","e2",64,128,128,4,0,PREFETCH=1)]
from jobs7 import crows
JOBS+=[crows("sp 128x128s6","nw",128,6,False,1)]
