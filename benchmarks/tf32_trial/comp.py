"""comp.py OUT.pkl: the plain kernel, and with rows mixed (mixed.patch)"""
import pickle, sys
from pretuned.artifacts.types import DType, Op
from pretuned.kernels import abi
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config
from pretuned.aot import compile as c
orig = abi.constants
mixed = False
abi.constants = lambda s, *a: orig(s,*a) | ({"MIXED": True} if mixed else {})
out=[]
C=[(32,64,128,2,3),(32,64,128,2,4),(16,64,128,2,4),(16,64,128,2,6),(64,64,128,2,3),(32,64,64,2,4),(32,128,64,2,3),(32,128,64,2,4),(32,32,128,2,4),(16,32,256,4,4),(32,32,256,4,3),(32,64,64,1,4),(32,32,128,4,4),(32,64,256,2,2)]
for mixed in (False, True):
  for cfg in C:
    if not mixed and cfg not in ((32,64,128,2,3),(32,128,64,2,3),(16,32,256,4,4),(32,64,64,2,4)): continue
    spec=Spec(Op.DW,DType.TF32,Config(*cfg,8,True,True))
    try: o=c.compile_variant(spec,90)
    except Exception as e: print(cfg,mixed,'FAILED',str(e)[:300]); continue
    v=o.variant
    print(cfg,mixed,'regs',v.registers,'spill',v.spill_bytes,'shared',v.shared_bytes,flush=True)
    out.append((f"{'mixed' if mixed else 'plain'} {cfg}",v,o.cubin))
pickle.dump(out,open(sys.argv[1], 'wb'))
