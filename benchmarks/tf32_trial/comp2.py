"""comp2.py OUT.pkl: the specialised kernels (of 128 columns: with the layouts of the note in README.md)"""
import pickle, sys
from pretuned.artifacts.types import DType, Op
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config
from pretuned.aot import compile as c
out=[]
for cfg in [(32,128,256,8,4),(32,128,128,8,4),(32,128,128,8,6),(16,128,256,8,8),(64,128,256,8,2),(64,128,128,8,3),(32,128,256,8,3)]:
    spec=Spec(Op.DW,DType.TF32,Config(*cfg,8,True,True,True))
    try: o=c.compile_variant(spec,90)
    except Exception as e: print(cfg,'FAILED',str(e)[:300]); continue
    v=o.variant
    print(cfg,'regs',v.registers,'spill',v.spill_bytes,'shared',v.shared_bytes,flush=True)
    out.append((f"special {cfg}",v,o.cubin))
pickle.dump(out,open(sys.argv[1], 'wb'))
