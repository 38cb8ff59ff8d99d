"""Stands in for quack.gemm where QuACK's compiler isn't: launches what QuACK 0.6.5 compiled elsewhere (kernels/*.so).

The arguments are those that quack.gemm's run_gemm_plan hands to a compiled kernel: (A, B, D, C, EpilogueArguments,
TileSchedulerOptions, VarlenArguments, SFA, SFB).
"""

import ctypes
from functools import lru_cache
from pathlib import Path
from types import SimpleNamespace

import torch

if torch.cuda.is_available():
    ctypes.CDLL("libcudart.so.13", ctypes.RTLD_GLOBAL)  # torch's own, loaded already; its symbols for the kernels
import tvm_ffi

KERNELS = Path(__file__).with_name("kernels")


@lru_cache(None)
def kernel(name: str):
    path = KERNELS / f"{name}.so"
    if not path.exists():
        raise FileNotFoundError(f"{path}: not compiled before; leave out --more, or compile it")
    return tvm_ffi.load_module(str(path))["func"]


@lru_cache(None)
def active_clusters(size: int) -> int:
    return torch.cuda.get_device_properties(0).multi_processor_count // size  # 1 or 2: a pair of SMs is one TPC


def gemm(A, B, D, C, counter, tile_M, tile_N, cluster_M, cluster_N, *, tile_K=None, pingpong, persistent,
         is_dynamic_persistent, cu_seqlens_m=None, cu_seqlens_k=None):
    assert C is None and persistent and cluster_M * cluster_N <= 2
    op = "dW" if cu_seqlens_k is not None else ("forward" if B.stride(-1) == 1 else "dX")
    name = (f"{op}-{tile_M}x{tile_N}{'pp' if pingpong else 'co'}{cluster_M}{cluster_N}"
            f"{'d' if is_dynamic_persistent else ''}{f'k{tile_K}' if tile_K else ''}")
    epilogue = (None,) * 12
    scheduler = (active_clusters(cluster_M * cluster_N), None, 8,
                 counter.data_ptr() if is_dynamic_persistent else None, None, None)
    kernel(name)(A, B, D, None, epilogue, scheduler, (cu_seqlens_m, cu_seqlens_k, None, None), None, None)


_compile_gemm = SimpleNamespace(cache_info=lambda: kernel.cache_info())
