"""Each specialised variant of the bundles for this GPU, each whose programs have one tile, each of tf32.

Whatever would be chosen. PRETUNED_BUNDLES names them.
"""

from __future__ import annotations

import os
from collections.abc import Callable

import pytest
import torch

from pretuned.artifacts.bundle_file import BundleFile
from pretuned.artifacts.records import DType, Fusion, Layout, Op
from pretuned.kernels import reference
from pretuned.kernels.spec import Config, Schedule
from pretuned.runtime.check.tensors import DTYPES
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver.device import current_stream, local_gpu
from pretuned.runtime.driver.launcher import Launcher
from pretuned.runtime.launch.gemm import PLAIN, Fused, LoadedKernel, product_launcher
from pretuned.runtime.launch.loader import loaded

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

NAN = float("nan")
MOST = {torch.bfloat16: 4e-3, torch.float16: 5e-4, torch.float32: 1e-3}  # float32: of tf32
HALVES = (DType.BF16, DType.FP16)
# E, N, K and how the rows fall: few tiles, of which those of many rows come first; many; no whole tile.
WEIGHTS = [
    (5, 512, 768),
    (8, 4096, 4096),
    (32, 384, 512),
    (32, 136, 72),
    (33, 512, 512),
    (64, 256, 264),
    (3, 2880, 2880),
]
ROWS = [(8, 768, 512), (5, 136, 400), (33, 2048, 1032), (3, 264, 1000)]  # E, columns, reduction
FALLS = ("random", "one", "equal", "rising")
FLAGS = [
    Fusion.NONE,
    Fusion.GATHER,
    Fusion.SCATTER,
    Fusion.GATHER | Fusion.WEIGHT,
    Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS,
]


def variants(
    op: Op, fusion: Fusion, which: Callable[[Config], bool], dtypes: tuple[DType, ...] = HALVES
) -> list[LoadedKernel]:
    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(0)
    variants: dict[object, tuple[BundleFile, int]] = {}
    for usable in snapshot.view(local, installed=True).usable:
        for i, variant in enumerate(usable.bundle.variants()):
            wanted = variant.op is op and variant.fusion == fusion and variant.dtype in dtypes
            if wanted and which(Config.from_pairs(variant.config)):
                variants.setdefault((variant.config, variant.dtype, variant.layout), (usable.bundle, i))
    if not variants:
        pytest.skip(f"the bundles have no such code of {op.value} {fusion} for this GPU")
    return [loaded(bundle, i, 0, local.gpu.sm_count) for bundle, i in variants.values()]


def specialized(op: Op, fusion: Fusion) -> list[LoadedKernel]:
    return variants(op, fusion, lambda config: config.schedule.warp_specialized)


def fallen(E: int, M: int, fall: str) -> torch.Tensor:
    """Rows of each expert, int32 [E], M in all; ties, experts without rows, and all rows in one."""
    if fall == "one":
        return torch.full((E,), 0).scatter(0, torch.tensor(E // 2), M).int()
    if fall == "equal":
        counts = torch.full((E,), M // E)
        counts[-1] += M - M // E * E
        return counts.int()
    if fall == "rising":
        share = torch.arange(E).float() ** 3
        counts = (share / share.sum() * M).int()
        counts[-1] += M - counts.sum()
        return counts
    return torch.bincount(torch.randint(0, E, (M,)).clamp(min=E // 4), minlength=E).int()


def dtype_of(kernel: LoadedKernel) -> torch.dtype:
    if kernel.variant.dtype is DType.TF32:
        return torch.float32
    return next(key for key, value in DTYPES.items() if value is kernel.variant.dtype)


def run(
    launch: Launcher, x: torch.Tensor, w: torch.Tensor, y: torch.Tensor, m_sizes: torch.Tensor, **more: int
) -> None:
    """Launch it on these; M is x's rows where ``more`` does not say."""
    words = {"M": x.shape[0], "stride_x_m": x.stride(0), "stride_y_m": y.stride(0), **more}
    launch(y.data_ptr(), m_sizes.data_ptr(), current_stream(0), x=x.data_ptr(), w=w.data_ptr(), **words)


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Within rounding of float32 sums; NaN, which nothing was stored over, in the same places."""
    assert torch.equal(got.isnan(), want.isnan())
    most = MOST[got.dtype]
    got, want = got.float().nan_to_num(), want.float().nan_to_num()
    assert float((got - want).norm()) <= most * float(want.norm().clamp(min=1e-30))
    if want.numel():  # each element, too, beside what its row's elements are like
        scale = want.square().mean(-1, keepdim=True).sqrt() + want.abs()
        assert bool(((got - want).abs() <= 4 * most * scale + 1e-6).all())


@pytest.mark.parametrize("dtypes", [HALVES, (DType.TF32,)])
@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize(("E", "N", "K"), WEIGHTS)
def test_dw(E: int, N: int, K: int, fall: str, dtypes: tuple[DType, ...]) -> None:
    """Specialised ones, and every one of tf32. Rows that no expert has are not read.

    With many rows an expert and few tiles, those with more rows come first.
    """
    for M in (1, 300, 5000, 300 * E):
        m_sizes = fallen(E, M, fall).cuda()
        for kernel in variants(
            Op.DW, Fusion.NONE, lambda config: config.schedule.warp_specialized or dtypes is not HALVES, dtypes
        ):
            dtype = dtype_of(kernel)
            dy, x = (torch.randn(M + 9, n, device="cuda").to(dtype) for n in (N, K))
            dy[M:] = x[M:] = NAN
            dw = torch.full((E, N, K), NAN, device="cuda", dtype=dtype)
            launch = product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=1)
            for _ in range(2):  # the counter is as it was
                launch(
                    dw.data_ptr(),
                    m_sizes.data_ptr(),
                    current_stream(0),
                    dy=dy.data_ptr(),
                    x=x.data_ptr(),
                    stride_dy_m=N,
                    stride_x_m=K,
                    M=M + 9,
                )
            want = torch.zeros(E, N, K, device="cuda")
            end = 0
            for e, count in enumerate(m_sizes.tolist()):
                want[e] = dy[end : end + count].float().T @ x[end : end + count].float()
                end += count
            near(dw, want)


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize(("E", "N", "K"), [*ROWS, (8, 2880, 192), (64, 384, 64), (5, 200, 4096)])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_plain_rows(op: Op, E: int, N: int, K: int, fall: str) -> None:
    """In the kernel's words: N columns, K the reduction. Rows that no expert has stay as they are."""
    for M in (1, 300, 5000):
        m_sizes = fallen(E, M, fall)
        m_sizes[-1] -= m_sizes[-1] // 2
        m_sizes = m_sizes.cuda()
        for kernel in specialized(op, Fusion.NONE):
            dtype = dtype_of(kernel)
            kn = (kernel.variant.layout is Layout.KN) == (op is Op.FORWARD)
            x = torch.randn(M, K, device="cuda").to(dtype)
            w = torch.randn(E, *((K, N) if kn else (N, K)), device="cuda").to(dtype) * K**-0.5
            y, want = torch.full((M, N), NAN, device="cuda", dtype=dtype), torch.full((M, N), NAN, device="cuda")
            launch = product_launcher(
                kernel,
                N=N,
                K=K,
                E=E,
                m_sizes_step=1,
            )
            for _ in range(2):  # the counter is as it was
                run(launch, x, w, y, m_sizes)
            layout = Layout.KN if kn else Layout.NK
            reference.rows(x.float(), w.float(), m_sizes, want, M=M, layout=layout)
            near(y, want)


@pytest.mark.parametrize("fall", FALLS)
@pytest.mark.parametrize(("E", "N", "K"), ROWS)
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_tf32(op: Op, E: int, N: int, K: int, fall: str) -> None:
    """In the kernel's words, as ``test_plain_rows``: among them those that take w from registers."""
    for M in (1, 300, 5000):
        m_sizes = fallen(E, M, fall)
        m_sizes[-1] -= m_sizes[-1] // 2
        m_sizes = m_sizes.cuda()
        for kernel in variants(op, Fusion.NONE, lambda _config: True, (DType.TF32,)):
            kn = (kernel.variant.layout is Layout.KN) == (op is Op.FORWARD)
            x = torch.randn(M, K, device="cuda")
            w = torch.randn(E, *((K, N) if kn else (N, K)), device="cuda") * K**-0.5
            y, want = torch.full((M, N), NAN, device="cuda"), torch.full((M, N), NAN, device="cuda")
            launch = product_launcher(
                kernel,
                N=N,
                K=K,
                E=E,
                m_sizes_step=1,
            )
            run(launch, x, w, y, m_sizes)
            reference.rows(x, w, m_sizes, want, M=M, layout=Layout.KN if kn else Layout.NK)
            near(y, want)


@pytest.mark.parametrize("dtype", [torch.int32, torch.int64])
@pytest.mark.parametrize("asked", ["less", "more", "odd"])
@pytest.mark.parametrize("E", [1, 5, 33, 128, 129, 300, 512])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_programs_that_find_their_tile(op: Op, E: int, asked: str, dtype: torch.dtype) -> None:
    """Counts that ask for fewer rows than there are, for more, and for less than none or more than 2^31."""
    N, K = 136, 136
    for M, fall in ((1, "one"), (40, "random"), (700, "rising"), (700, "random")):
        m_sizes = fallen(E, M, fall).to(dtype)
        if asked == "less":
            m_sizes[-1] -= m_sizes[-1] // 2
        else:
            m_sizes[E // 3] += 90
        if asked == "odd":
            m_sizes[E // 2] = -7
            m_sizes[-1] = 2**40 + 3 if dtype is torch.int64 else 2**31 - 1
        m_sizes = m_sizes.cuda()
        for kernel in variants(op, Fusion.NONE, lambda config: config.schedule is Schedule.TILE):
            kind = dtype_of(kernel)
            kn = (kernel.variant.layout is Layout.KN) == (op is Op.FORWARD)
            x = torch.randn(M, K, device="cuda").to(kind)
            w = torch.randn(E, *((K, N) if kn else (N, K)), device="cuda").to(kind) * K**-0.5
            y, want = torch.full((M, N), NAN, device="cuda", dtype=kind), torch.full((M, N), NAN, device="cuda")
            launch = product_launcher(
                kernel,
                N=N,
                K=K,
                E=E,
                m_sizes_step=1 + (dtype is torch.int64),
            )
            run(launch, x, w, y, m_sizes)
            reference.rows(x.float(), w.float(), m_sizes, want, M=M, layout=Layout.KN if kn else Layout.NK)
            near(y, want)


@pytest.mark.parametrize(
    ("code", "fusion"),
    [
        *((Fusion.GATHER, fusion) for fusion in FLAGS),
        *((Fusion.SCATTER, fusion) for fusion in FLAGS if Fusion.GATHER not in fusion),
        (Fusion.SCATTER, Fusion.BIAS),
        (Fusion.SCATTER, Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS),
    ],
)
@pytest.mark.parametrize("wrong", [0, 3])
@pytest.mark.parametrize(("E", "N", "K"), ROWS)
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_code_that_moves_rows(op: Op, E: int, N: int, K: int, wrong: int, code: Fusion, fusion: Fusion) -> None:
    """In the kernel's words: N columns, K the reduction. ``wrong`` of the rows have an index that is out of range."""
    top_k = 2
    for T, fall in ((1, "one"), (40, "random"), (900, "rising"), (900, "equal")):
        M = T * top_k
        m_sizes = fallen(E, M, fall).cuda()
        index = torch.randperm(M).to(torch.int64 if T == 40 else torch.int32)
        index[torch.randperm(M)[:wrong]] = torch.tensor([-1, M, 2**31 - 1], dtype=index.dtype)[: min(wrong, M)]
        index = index.cuda()
        step = 2 if index.dtype is torch.int64 else 1
        for kernel in specialized(op, code):
            dtype = dtype_of(kernel)
            divisor = top_k if Fusion.GATHER in fusion else 0
            wide = 8 * (T == 40)  # rows further apart
            x = torch.randn(T if divisor else M, K + wide, device="cuda").to(dtype)[:, :K]
            kn = (kernel.variant.layout is Layout.KN) == (op is Op.FORWARD)
            w = torch.randn(E, *((K, N) if kn else (N, K)), device="cuda").to(dtype) * K**-0.5
            row_weights = torch.rand(M, device="cuda") if Fusion.WEIGHT in fusion else None
            bias = torch.randn(E, N, device="cuda").to(dtype) if Fusion.BIAS in fusion else None
            whole = torch.full((M, N + wide), NAN, device="cuda", dtype=dtype)
            y, want = whole[:, :N], torch.full((M, N), NAN, device="cuda")
            used = index if fusion & (Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT) else None
            end = 0 if used is None else M
            launch = product_launcher(
                kernel,
                N=N,
                K=K,
                E=E,
                m_sizes_step=1,
                fused=Fused(fusion, step, top_k) if fusion else PLAIN,
            )
            extras = {"index": used, "row_weights": row_weights, "bias": bias}
            extra = {name: 0 if tensor is None else tensor.data_ptr() for name, tensor in extras.items()}
            for _ in range(2):
                run(launch, x, w, y, m_sizes, M=M, index_end=end, **extra)
            reference.rows(
                x.float(),
                w.float(),
                m_sizes,
                want,
                M=M,
                layout=Layout.KN if kn else Layout.NK,
                index=used,
                index_end=end,
                gather_divisor=divisor,
                scatter=Fusion.SCATTER in fusion,
                row_weights=row_weights,
                bias=None if bias is None else bias.float(),
            )
            near(y, want)
            assert bool(whole[:, N:].isnan().all())


@pytest.mark.parametrize("wide", [False, True])
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize(("E", "N", "K"), [(8, 768, 512), (5, 136, 400), (300, 264, 136)])
@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
def test_rows_that_no_index_names_are_cleared(op: Op, E: int, N: int, K: int, weighted: bool, wide: bool) -> None:
    """By code of one tile a program, and specialised: some rows belong to no expert, three indices are out of range."""
    for M, more in ((1, 0), (8, 0), (40, 3), (700, 40), (1000, 24), (3000, 5000)):
        m_sizes = fallen(E, M, "random")
        m_sizes[-1] -= m_sizes[-1] // 2
        m_sizes, rows = m_sizes.cuda(), M + more
        index = torch.randperm(rows)[:M].to(torch.int64 if wide else torch.int32)
        index[torch.randperm(M)[:3]] = torch.tensor([-1, rows, 2**31 - 1], dtype=index.dtype)[: min(3, M)]
        index = index.cuda()
        for kernel in variants(
            op, Fusion.SCATTER, lambda config: config.schedule.warp_specialized or config.schedule is Schedule.TILE
        ):
            dtype = dtype_of(kernel)
            x = torch.randn(M, K, device="cuda").to(dtype)
            kn = (kernel.variant.layout is Layout.KN) == (op is Op.FORWARD)
            w = torch.randn(E, *((K, N) if kn else (N, K)), device="cuda").to(dtype) * K**-0.5
            row_weights = torch.rand(rows, device="cuda") + 0.5 if weighted else None
            y, want = torch.full((rows + 16, N), NAN, device="cuda", dtype=dtype), torch.zeros(rows, N, device="cuda")
            fusion = Fusion.SCATTER | Fusion.WEIGHT if weighted else Fusion.SCATTER
            launch = product_launcher(
                kernel,
                N=N,
                K=K,
                E=E,
                m_sizes_step=1,
                fused=Fused(fusion, 1 + wide, 1, zero_tail=True),
            )
            run(
                launch,
                x,
                w,
                y,
                m_sizes,
                index=index.data_ptr(),
                index_end=rows,
                row_weights=0 if row_weights is None else row_weights.data_ptr(),
            )
            reference.rows(
                x.float(),
                w.float(),
                m_sizes,
                want,
                M=M,
                layout=Layout.KN if kn else Layout.NK,
                index=index,
                index_end=rows,
                scatter=True,
                row_weights=row_weights,
            )
            near(y[:rows], want)
            assert bool(y[rows:].isnan().all())
