"""Links every compiled kernel of QuACK's cache into a library of its own: OUT/<op>-<config>.so."""
import os, subprocess, sys
from pathlib import Path
from unittest import mock
os.environ["QUACK_ARCH"] = "90"; os.environ["CUTE_DSL_ARCH"] = "sm_90a"
sys.path.insert(0, "ROOT/benchmarks")
import torch
import beside_quack as b
from quack_configs import Config
import quack.gemm as module, quack.cache.jit as jit
out = Path(sys.argv[1]); out.mkdir(parents=True, exist_ok=True)
cache = next(Path("WORK/q_cache312").iterdir())
E, N, K, M = 4, 256, 256, 64
inputs = b.method.Inputs(torch.empty(M, K, dtype=torch.bfloat16), torch.empty(E, N, K, dtype=torch.bfloat16),
    torch.full((E,), M // E, dtype=torch.int32), torch.empty(M, N, dtype=torch.bfloat16))
o, counter = torch.empty(E * N * K, dtype=torch.bfloat16), torch.zeros(1, dtype=torch.int32)
wanted = [(op, Config.parse(t)) for op, ts in b.SMOKE for t in ts]
for (_, _, op, _), configs in b.plan(",".join(m[0] for m in b.MODELS), b.OPS, (1024, 8192), 20).items():
    wanted += [(op, c) for c in configs]
shas = []
stub = out / "stub.c"
stub.write_text('''#include <stdio.h>
int CuteDSLRT_TVMFFISetRaisedCudaError(int code) { fprintf(stderr, "cuda error %d in a kernel of QuACK\\n", code); extern void TVMFFIErrorSetRaisedFromCStr(const char*, const char*); TVMFFIErrorSetRaisedFromCStr("RuntimeError", "cuda error, see stderr"); return code; }
''')
a = "WORK/q_site311/nvidia_cutlass_dsl/cu13/lib/libcuda_dialect_runtime_static.a"
with mock.patch.multiple(module, get_max_active_clusters=lambda *_, **__: 1, run_gemm_plan=lambda *_, **__: None,
                         _compile_gemm=lambda *args: shas.append(jit._key_to_hash(("_compile_gemm",) + args))):
    for op, c in dict.fromkeys(wanted):
        b.quack_call(module, c, op, inputs, o, counter)()
        obj = cache / f"{shas[-1]}.o"
        assert obj.exists(), (op, c, shas[-1])
        subprocess.run(["gcc", "-shared", "-fPIC", "-O2", "-o", str(out / f"{op}-{c}.so"), str(obj), str(stub), a], check=True)
stub.unlink()
print(len(shas), "libraries;", len(set(shas)), "distinct")
