from jobsg import rows, dw
JOBS=[]
for kn in (False,True):
    o="dX" if kn else "fwd"
    JOBS+=[rows(f"{o} s4",256,4,kn,"full")]+[rows(f"{o} lead{n}",256,4,kn,f"lead{n}") for n in (1,2)]
    JOBS+=[rows(f"{o} 128",128,6,kn,"full",SLOTS=1)]+[rows(f"{o} 128lead{n}",128,6,kn,f"lead{n}",SLOTS=1) for n in (2,3)]
JOBS+=[dw("dW k32",32,8,"full")]+[dw(f"dW lead{n}",32,8,f"lead{n}") for n in (2,3,4,5)]
JOBS+=[dw("dW s4",64,4,"full"),dw("dW s4lead1",64,4,"lead1"),dw("dW s4lead2",64,4,"lead2")]
