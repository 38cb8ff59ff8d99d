"""A process that launches variants of a bundle through whatever libcuda it finds: BUNDLE INDEX ..."""

from __future__ import annotations

import ctypes
import sys

import torch

from pretuned.artifacts.bundle_file import BundleFile, open_bundle
from pretuned.artifacts.records import Op
from pretuned.kernels.entry import parameter_bytes
from pretuned.runtime.driver import cuda
from pretuned.runtime.launch.gemm import load_kernel, product_launcher

M, N, K, E = 300, 1536, 2048, 8
FIRST, SECOND, RESULT, M_SIZES, STREAM = (0x7F00_0000_0000 + (i << 32) for i in range(1, 6))
STRIDES = K + 8, N + 16  # of the rows of x (or dy), and of y (or x)


def main(path: str, *indices: int) -> None:
    torch.cuda.is_current_stream_capturing = lambda: False  # torch without CUDA has none
    assert cuda.driver_version() == 13010
    assert cuda.properties(0) == cuda.Properties("Stub 0", 90, 132, 141 << 30)
    with open_bundle(path) as bundle:
        for index in indices:
            launch(bundle, index)


def launch(bundle: BundleFile, index: int) -> None:
    """Load it and launch it once."""
    print(f'{{"call": "variant", "index": {index}}}', flush=True)
    variant = bundle.variant(index)
    kernel = load_kernel(variant, bundle.cubin(index), 0, 132)
    sizes = parameter_bytes(variant.arguments)
    cuda.library().stub_parameters(len(sizes), (ctypes.c_int * len(sizes))(*sizes))
    launcher = product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=2)
    names = ("dy", "x", "stride_dy_m", "stride_x_m") if variant.op is Op.DW else ("x", "w", "stride_x_m", "stride_y_m")
    launcher(RESULT, M_SIZES, STREAM, M=M, **dict(zip(names, (FIRST, SECOND, *STRIDES), strict=True)))


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:]))
