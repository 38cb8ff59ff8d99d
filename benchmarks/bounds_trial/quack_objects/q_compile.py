"""Fills a cache that Python 3.12 reads, from another Python: QuACK's fingerprint names the version."""
import runpy, sys, types
sys.path.insert(0, "ROOT/benchmarks")
import os
os.environ.setdefault("QUACK_ARCH", "90"); os.environ.setdefault("CUTE_DSL_ARCH", "sm_90a")
import quack.cache.jit as jit
real = jit.sys
jit.sys = types.SimpleNamespace(version_info=types.SimpleNamespace(major=3, minor=12))
print("fingerprint for 3.12:", jit._compute_source_fingerprint())
jit.sys = real
sys.argv = ["beside_quack.py", "--compile", *sys.argv[1:]]
runpy.run_path("ROOT/benchmarks/beside_quack.py", run_name="__main__")
mods = [m for m in ("einops","google.protobuf","torch_c_dlpack_ext","iket","jax") if m in sys.modules]
print("imported:", mods)
