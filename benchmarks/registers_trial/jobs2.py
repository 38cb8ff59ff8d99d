import os
d=os.environ.get("DIRECT","0")
from jobs1 import *
L=[("f192",F192),("f256",F256)] + ([("p128",P128)] if d!="2" else [])
JOBS=[(f"{op} {n} d{d}{'' if f==6 else ' plain'}",op,c,f,(),dict(FLAGS=6) if f==6 else {}) for f in (6,0) if f==6 or d=="0" for op in ("forward","dX")[:1] for n,c in L]
