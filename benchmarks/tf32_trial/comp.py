import sys, os, re, subprocess, tempfile, pickle, hashlib, importlib, types
sys.path.insert(0,'/tmp/mypy_L')
from dataclasses import replace
from pathlib import Path
from pretuned.aot import compile as AC
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config
from pretuned.artifacts.types import Op, DType
import triton
PTXAS=Path(triton.__file__).parent/'backends/nvidia/bin/ptxas'
from triton.backends.compiler import GPUTarget
orig=triton.compile
MODE='tma'
def patched(source, target=None, options=None):
    if MODE.startswith('p80'):
        k=orig(source,target=GPUTarget('cuda',80,32),options=options)
        ptx=k.asm['ptx']; ptx=re.sub(r'\.target sm_80\b','.target sm_90a',ptx); 
        with tempfile.TemporaryDirectory() as d:
            p=Path(d)/'a.ptx'; p.write_text(ptx); o=Path(d)/'a.cubin'
            r=subprocess.run([PTXAS,'-lineinfo' if 0 else '-v','--gpu-name=sm_90a',str(p),'-o',str(o)],capture_output=True,text=True)
            assert r.returncode==0,r.stderr
            cubin=o.read_bytes()
        class K: pass
        out=K(); out.asm={'cubin':cubin,'ptx':ptx}; out.metadata=k.metadata
        return out
    return orig(source,target=target,options=options)
triton.compile=patched
import pretuned.kernels.grad_weight as G
src=Path('/work/main/kernels/grad_weight.py').read_text()
d3=src.replace("acc = tl.zeros((BLOCK_N, BLOCK_K), tl.float32)","acc = tl.zeros((1, BLOCK_N, BLOCK_K), tl.float32)")
d3=d3.replace("acc = tl.dot(tl.trans(dy_tile), x_tile, acc, input_precision=PRECISION)","acc = tl.dot(tl.trans(dy_tile).reshape(1, BLOCK_N, BLOCK_M), x_tile.reshape(1, BLOCK_M, BLOCK_K), acc, input_precision=PRECISION)")
d3=d3.replace("        address = dw +","        acc = acc.reshape(BLOCK_N, BLOCK_K)\n        address = dw +").replace("from .tiles","from pretuned.kernels.tiles")
Path('/tmp/tf/gw3.py').write_text(d3)
sys.path.insert(0,'/tmp/tf'); import gw3
orig_weight=G.weight
jobs=[]
for t in [(32,64,128,2,3),]: jobs.append(('tma',t,True))
for t in [(32,64,128,2,3),(32,128,128,4,3),(16,128,128,4,4),(32,128,128,4,4),(32,128,256,8,3),(16,128,256,8,4),(32,256,128,8,3),(32,64,64,2,4),(32,128,64,4,3),(32,64,128,4,3),(16,256,128,8,4),(32,128,128,8,3),(64,128,128,4,2),(16,64,128,2,4)]: jobs.append(('p80',t,False))
for t in [(32,128,128,4,3),(32,128,256,8,3),(16,128,256,8,4),(32,64,128,2,3),(32,256,128,8,3),(16,128,128,4,4)]: jobs.append(('3d',t,True))
for t in [(32,128,128,4,3),(32,64,128,2,3)]: jobs.append(('3dp',t,False))
out=[]
for mode,t,tma in jobs:
    MODE=mode
    G.weight=gw3.weight if mode.startswith('3d') else orig_weight
    spec=Spec(Op.DW,DType.TF32,Config(*t,8,tma=tma,persistent=True))
    try:
        c=AC.compile_variant(spec,90)
    except Exception as e:
        print(mode,t,'FAILED',str(e)[:200]); continue
    ptx=''
    v=c.variant
    print(mode,t,'regs',v.registers,'spill',v.spill_bytes,'smem',v.shared_bytes,flush=True)
    out.append((f"{mode} {t}",v,c.cubin))
pickle.dump(out,open('/tmp/tf/jobs.pkl','wb')); print(len(out))
