"""The kernel of codes by codes that quantises x itself, against float64 products of the quantised operands.

No bundle for 9.0 has it, which has kernels of its own: the code is compiled here, for this GPU, by the Triton that is
installed, in every form. Any GPU that multiplies e4m3 will do.
"""

from __future__ import annotations

import functools

import pytest
import torch

from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels import reference
from pretuned.kernels.arch import ARCHS, Feature
from pretuned.kernels.portable_w8a8 import CANDIDATES, FALLBACKS
from pretuned.kernels.spec import Config, Schedule, Spec
from pretuned.runtime import ExpertWeights
from pretuned.runtime.driver.device import current_stream, local_gpu
from pretuned.runtime.launch.gemm import Fused, LoadedKernel, load_kernel, product_launcher, words_of
from pretuned.runtime.launch.self_test_problems import trial, trial_place
from pretuned.runtime.weights.row_codes import values_on_load


def _able() -> bool:
    arch = ARCHS.get(local_gpu(0).sm) if torch.cuda.is_available() else None
    return arch is not None and arch.has(Feature.FP8)


pytestmark = pytest.mark.skipif(not _able(), reason="needs a CUDA GPU that multiplies e4m3")
BOTH_DTYPES = pytest.mark.parametrize("dtype", [DType.FP8_BLOCK, DType.FP8_CHANNEL])
TILES = sorted({*CANDIDATES, *FALLBACKS})
SIZES = [(768, 2048), (512, 384), (151, 74), (257, 1096)]  # N, K
COUNTS = [[3, 0, 700, 1, 0, 64, 130, 2], [0, 0, 1, 0, 0, 0, 0, 0], [0] * 8]
E, MOST = 8, 2e-3


@functools.cache
def kernel(dtype: DType, tile: tuple[int, ...], fusion: Fusion, alignment: int) -> LoadedKernel:
    local = local_gpu(0)
    spec = Spec(Op.FORWARD, dtype, Config(*tile, schedule=Schedule.TILE), Layout.STORED, fusion, alignment)
    compiled = compile_variant(spec, local.sm)
    return load_kernel(compiled.variant, compiled.cubin, 0, local.gpu.sm_count)


@BOTH_DTYPES
@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER])
@pytest.mark.parametrize("tile", TILES)
def test_the_runtime_s_own_trial(dtype: DType, tile: tuple[int, ...], fusion: Fusion) -> None:
    """The self-test before a first use on a capability: each form of call, rows of NaN, and memory around y."""
    for alignment in (16, 1) if tile in FALLBACKS else (16,):
        with trial_place(0) as place:
            assert trial(kernel(dtype, tile, fusion, alignment), place) is None


@BOTH_DTYPES
@pytest.mark.parametrize("counts", COUNTS)
@pytest.mark.parametrize(("N", "K"), SIZES)
def test_a_product_of_quantised_operands(dtype: DType, N: int, K: int, counts: list[int]) -> None:
    """Rows of very different sizes, an expert of NaN, every code of w; rows that nobody has stay as they are."""
    generator, M = torch.Generator().manual_seed(N), sum(counts) + 5
    w = ExpertWeights.quantize(torch.randn(E, N, K, generator=generator) / K**0.5, dtype.value).to("cuda")
    codes = torch.randint(0, 256, w.codes.shape, dtype=torch.uint8, generator=generator)
    codes[(codes & 0x7F) == 0x7F] = 0x7E
    w.codes.view(torch.uint8).copy_(codes)
    size = 2.0 ** torch.randint(-20, 20, (M, -(-K // 128)), generator=generator).repeat_interleave(128, 1)[:, :K]
    x = torch.randn(M, K, generator=generator) * (size if dtype is DType.FP8_BLOCK else size[:, :1])
    x[: counts[0]] = float("nan")
    x = x.bfloat16().cuda()
    m_sizes = torch.tensor(counts, dtype=torch.int32, device="cuda")
    want = torch.full((M, N), 3.0, dtype=torch.float64, device="cuda")
    matrices = list(w.dequantize(torch.float32).double())
    reference.rows(values_on_load(x, dtype).double(), matrices, m_sizes, want, M=M, layout=Layout.NK)
    for tile in TILES:
        alignment = 16 if K % 16 == N % 8 == 0 else 1
        if alignment == 1 and tile not in FALLBACKS:
            continue
        launch = product_launcher(
            kernel(dtype, tile, Fusion.NONE, alignment), N=N, K=K, E=E, m_sizes_step=1, fused=Fused(Fusion.NONE, 1, 1)
        )
        scales = words_of(w, launch)
        y = torch.full((M, N), 3.0, dtype=torch.bfloat16, device="cuda")
        for _ in range(2):
            launch(
                y.data_ptr(),
                m_sizes.data_ptr(),
                current_stream(0),
                x=x.data_ptr(),
                stride_x_m=K,
                stride_y_m=N,
                M=M,
                **scales,
            )
        assert torch.equal(y.isnan(), want.isnan())
        rows = ~want.isnan().any(1)
        got, wanted = y[rows].double(), want[rows]
        each = (got - wanted).norm(dim=1) / wanted.norm(dim=1).clamp(min=1e-300)
        assert float(each.max()) < 2 * MOST, tile
        assert float(each.square().mean().sqrt()) < MOST, tile
