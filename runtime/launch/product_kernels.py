"""The kernels of products: loaded from a bundle, bound for all calls of a kind, and cached in the snapshot.

What decides and loads is imported where it is first needed: most of a runtime's code, and none of a later call's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp, bucket_of
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES, TORCH_GROUPS, is_aligned
from .. import hooks, settings
from ..check.tensors import DTYPES, check_cuda_dtype, row_stride
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import local_gpu, platform_supported, tell_unsupported, tf32_allowed

if TYPE_CHECKING:
    from ..check.call import Rows
    from ..dispatch.pin import Pin
    from ..dispatch.snapshot import Snapshot, Usable
    from ..driver.launcher import ProductLauncher
    from ..driver.rowops import RowOpLauncher
    from .gemm import Fused, LoadedKernel

_MOST_LAUNCHERS = 1 << 14
_FEW_TO_CLEAR = 1024  # rows: a program for each 16 reads the whole index, and 64 programs are half of an H200's SMs
# A warp of each program reads 1,024 entries of the index in 4.7 us during a product (122,880 in 565 to 571 us:
# docs/inside/trials.md, scatter-beside). A product whose matrices have 2^21 elements takes longer for as many rows,
# so does a product with 2^20 and many experts. If most rows of y must be cleared, a warp of each program is too little.
_MOST_TO_CLEAR, _SHORT_TO_CLEAR, _LARGE_MATRIX, _MOST_PER_ROW = 1 << 17, 8192, 1 << 20, 4
_LOW_RANK_DTYPES = (torch.bfloat16,)  # dtypes of shipped kernels: aot/plan/families.py
_UNKNOWN = object()


class ProductKernel(NamedTuple):
    """A kernel for all calls of a kind, and the row kernels that run on x before it.

    ``gather`` gathers rows if the kernel does not; ``quantize`` quantises rows, and gathers them if needed.
    ``by_torch`` is torch's grouped_mm, if that was measured faster: it runs a product into new memory.
    """

    launcher: ProductLauncher
    name: str
    gather: RowOpLauncher | None = None
    quantize: RowOpLauncher | None = None
    by_torch: Callable[..., torch.Tensor] | None = None


def product_kernel(call: Rows, y: torch.Tensor | None) -> ProductKernel | None:
    """Return the kernel for all products like this one, into y or new memory; None if no bundle has one."""
    x, w, m_sizes, fusion = call.x, call.w, call.m_sizes, call.fusion
    if not isinstance(w, torch.Tensor):
        raise AssertionError("quantised weights have kernels of their own")
    E, N, K = call.sizes
    step = index_step(call) if call.uses_index else 1
    aligned = _aligned(call, 0, call.columns, call.columns) if y is None else rows_aligned(call, y)
    device = x.get_device()
    first = bool(call.gather_divisor) and call.may_gather_first(aligned)
    checks = call.bounds is None
    few, beside = may_clear(call, y) if call.zero_tail and call.uses_index and y is not None else (True, True)
    zeroes = call.zero_tail and (few or beside)
    fixed = (
        x.dtype,
        E,
        N,
        K,
        _weight_strides(w),
        call.gather_divisor,
        fusion.value,
        step,
        m_sizes.dtype,
        zeroes,
        few,
        beside,
        first and 1 + checks,
    )
    # (By its value: an enum's hash is a call in Python.)
    key = (
        call.op.value,
        call.layout.value,
        *fixed,
        call.bucket,
        call.spread,
        aligned,
        device,
        call.pin,
        tf32_allowed(x.dtype),
    )

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, x, E, N, K, call.layout, fusion)
        kernel = kernel_of_rows(problem, call, device, aligned=aligned)
        if kernel is None:
            return None
        from .gemm import Fused

        fused = Fused(fusion, step, call.gather_divisor or 1, zeroes, few, beside)
        plain = _gathered_kernel(problem, call, device, checks) if first else None
        plain = None if plain is None or _idles(plain, problem, call) else plain
        product = None if plain is None else after_gather(plain, problem, call, fused)
        product = product or of_rows(kernel, problem, call, fused)
        if aligned and not fusion and call.pin is None and is_by_torch(problem, call.bucket, device):
            return product._replace(by_torch=grouped_mm(x.dtype, local_gpu(device).sm, E))
        return product

    return lookup(key, build)


def may_clear(call: Rows, y: torch.Tensor) -> tuple[bool, bool]:
    """Return (one tile a program, warp-specialised): True if such GEMMs clear rows of y that no index names."""
    rows, M, (_E, N, K) = y.shape[0], call.M, call.sizes
    if not call.scatter or call.index_end(rows) != rows:
        return False, False
    most = max(M, rows)
    hidden = most <= _SHORT_TO_CLEAR or (most <= _MOST_TO_CLEAR and N * K >= _LARGE_MATRIX)
    return most <= _FEW_TO_CLEAR, hidden and rows <= _MOST_PER_ROW * M


def kernel_for_gated(call: Rows) -> ProductKernel | None:
    """The kernel that stores silu(gate) * up of this product into new memory, if one is faster; else None."""
    x, w, m_sizes, index = call.x, call.w, call.m_sizes, call.index
    if not isinstance(w, torch.Tensor):
        return None
    E, N, K = call.sizes
    if call.op is not Op.FORWARD or call.fusion is not Fusion.GATHER or call.zero_tail or N % 2 or index is None:
        return None
    step = index_step(call)
    aligned = _aligned(call, 0, N // 2, N // 2)  # new memory is aligned
    device = x.get_device()
    # (Rows whose index is out of range need no result.)
    first = call._replace(loose=True).may_gather_first(aligned)
    checks = call.bounds is None
    fixed = (
        x.dtype,
        E,
        N,
        K,
        _weight_strides(w),
        call.gather_divisor,
        step,
        m_sizes.dtype,
        call.layout.value,
        first and 1 + checks,
    )
    key = ("gated", *fixed, call.bucket, aligned, device, tf32_allowed(x.dtype))

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, x, E, N, K, call.layout, call.fusion)._replace(fusion=Fusion.SILU | Fusion.GATHER)
        kernel = _gated_kernel(problem, call, device, aligned, call.gather_divisor if first else 0, checks)
        if kernel is None:
            return None
        from .gemm import Fused

        fused = Fused(problem.fusion, step, call.gather_divisor)
        on_load = Fusion.GATHER in kernel.variant.fusion
        return (of_rows if on_load else after_gather)(kernel, problem, call, fused)

    return lookup(key, build)


def may_add_low_part(call: Rows, narrow: torch.Tensor, second: torch.Tensor, y: torch.Tensor) -> bool:
    """True if a kernel that adds a low-rank part can run the call: bf16 operands, rows of whole 16 bytes."""
    moves = call.scatter or call.row_weights is not None or call.spares_rows
    dense = isinstance(call.w, torch.Tensor)
    biased = dense and call.bias is not None and not call.gather_divisor  # kernels without a gather read no bias
    if moves or biased or call.pin is not None:
        return False
    x, size = call.x, call.x.element_size()
    if x.dtype not in _LOW_RANK_DTYPES or narrow.dtype is not x.dtype or second.dtype is not x.dtype:
        return False
    addresses = narrow.data_ptr(), second.data_ptr(), narrow.shape[1] * size
    if not (narrow.is_contiguous() and is_aligned(ALIGNMENT_BYTES, *addresses)):
        return False
    if dense:
        return rows_aligned(call, y)
    pointers = (call.w.codes.data_ptr(), call.w.scale.data_ptr()) if not isinstance(call.w, torch.Tensor) else ()
    strides = (row_stride(tensor, tensor.shape[1]) * size for tensor in (x, y))
    return is_aligned(ALIGNMENT_BYTES, x.data_ptr(), y.data_ptr(), *pointers, *strides)


def kernel_for_low_rank(call: Rows) -> ProductKernel | None:
    """The kernel for a product with a low-rank part (``may_add_low_part``); None where there is none."""
    x, w, m_sizes, low = call.x, call.dense, call.m_sizes, call.low
    if low is None:
        raise AssertionError("a product without a low-rank part")
    (E, N, K), R, device = call.sizes, low.x.shape[1], x.get_device()
    step, zeroes = index_step(call) if call.uses_index else 1, call.zero_tail and not call.uses_index
    fixed = (
        x.dtype,
        E,
        N,
        K,
        R,
        _weight_strides(w),
        call.gather_divisor,
        call.fusion.value,
        step,
        m_sizes.dtype,
        zeroes,
    )
    key = ("low rank", call.op.value, call.layout.value, *fixed, call.bucket, device)

    def build() -> ProductKernel | None:
        problem = problem_of(call.op, x, E, N, K, call.layout, call.fusion)
        kernel = low_rank_kernel(problem, call.bucket, device)
        if kernel is None:
            return None
        from .gemm import Fused

        return of_rows(kernel, problem, call, Fused(call.fusion, step, call.gather_divisor or 1, zeroes))

    return lookup(key, build)


def low_rank_kernel(problem: Problem, M: int, device: int) -> LoadedKernel | None:
    """The variant for a product with a low-rank part, loaded on ``cuda:device``; None if two products do the work.

    Nothing is compiled, and nothing is logged: the product without a low-rank part is an ordinary choice. Strict mode
    uses no candidate kernels, so it always runs two products.
    """
    if not platform_supported() or settings.settings().strict:
        return None
    from ..dispatch.decide import with_low_part
    from .loader import load_first

    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        candidate = with_low_part(snapshot, problem, M, local)
        return None if candidate is None else (candidate.usable, candidate.index)

    return load_first(snapshot, choose, local, device)


def kernel_for_weight(
    dy: torch.Tensor,
    x: torch.Tensor,
    dw: torch.Tensor,
    m_sizes: torch.Tensor,
    pin: Pin | None,
    strict: bool | None,
    bucket: int | None,
) -> ProductKernel | None:
    """The kernel for dW; ``bucket`` is the bucket of rows to choose for, None for the bucket of all rows."""
    E, N, K = dw.shape
    bucket, size = bucket or bucket_of(x.shape[0]), x.element_size()
    pointers = (dy.data_ptr(), x.data_ptr(), dw.data_ptr())
    lengths = (N, K, row_stride(dy, N), row_stride(x, K))
    aligned = is_aligned(ALIGNMENT_BYTES, *pointers, *(s * size for s in lengths))
    device = x.get_device()
    key = ("weight", x.dtype, E, N, K, m_sizes.dtype, strict, bucket, aligned, device, pin, tf32_allowed(x.dtype))

    def build() -> ProductKernel | None:
        problem = problem_of(Op.DW, x, E, N, K, Layout.NK, Fusion.NONE)
        kernel = _kernel(problem, bucket, device, aligned, pin, strict)
        if kernel is None:
            return None
        from . import gemm

        launcher = gemm.product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=step_of(m_sizes))
        return ProductKernel(launcher, name_of(problem, kernel))

    return lookup(key, build)


def of_rows(kernel: LoadedKernel, problem: Problem, call: Rows, fused: Fused) -> ProductKernel:
    """Return a kernel for a product of rows, whose w may be quantised."""
    from ...kernels.spec import gemm_of
    from . import gemm

    view = gemm_of(problem)
    launcher = gemm.product_launcher(
        kernel,
        N=view.columns,
        K=view.reduction,
        E=problem.E,
        m_sizes_step=step_of(call.m_sizes),
        fused=fused,
        strides=_weight_strides(call.w) if isinstance(call.w, torch.Tensor) else None,
        R=0 if call.low is None else call.low.x.shape[1],
    )
    return ProductKernel(launcher, name_of(problem, kernel))


def after_gather(kernel: LoadedKernel, problem: Problem, call: Rows, fused: Fused) -> ProductKernel | None:
    """A kernel that does not gather, after a row kernel that does; None if there is no such row kernel."""
    from . import rowops

    gather = rowops.launcher(RowOp.GATHER, DTYPES[call.x.dtype], call.x.get_device(), aligned=True)
    if gather is None:
        return None
    left = fused._replace(fusion=fused.fusion & ~Fusion.GATHER)
    return of_rows(kernel, problem, call, left)._replace(gather=gather)


def name_of(problem: Problem, kernel: LoadedKernel) -> str:
    return f"{problem}: {kernel.config}"


def lookup(key: tuple[object, ...], build: Callable[[], ProductKernel | None]) -> ProductKernel | None:
    snapshot = dispatch_snapshot.snapshot()
    table = snapshot.launchers
    cached: Any = table.get(key, _UNKNOWN)  # read once: another thread may clear the table
    if cached is _UNKNOWN:
        if len(table) >= _MOST_LAUNCHERS:
            table.clear()
        before = snapshot.put_off
        cached = build()
        if cached is None and hooks.jit_allowed():  # in a graph capture nothing is compiled: the next call asks again
            return None
        if snapshot.put_off != before:  # and nothing is tested
            return cached  # type: ignore[no-any-return]
        table[key] = cached
    product: ProductKernel | None = cached
    return product


def kernel_of_rows(problem: Problem, call: Rows, device: int, *, aligned: bool) -> LoadedKernel | None:
    """The kernel of a product of rows; if few of the rows will be used, one without a program for each tile."""
    kernel: LoadedKernel | None = _kernel(problem, call.bucket, device, aligned, call.pin, None)
    if kernel is None or call.pin is not None or not _idles(kernel, problem, call):
        return kernel
    return _kernel(problem, call.bucket, device, aligned, None, None, persistent=True) or kernel


def _idles(kernel: LoadedKernel, problem: Problem, call: Rows) -> bool:
    """True if a launch would have many programs without work, if only the expected rows come."""
    if call.spread == 1:
        return False
    from ..dispatch.decide import idles  # here, as few calls have expected rows

    return idles(kernel.variant, problem, call.M, call.bucket)


def _kernel(
    problem: Problem,
    M: int,
    device: int,
    aligned: bool,
    pin: Pin | None,
    strict: bool | None,
    *,
    persistent: bool = False,
) -> Any:
    if not platform_supported():
        tell_unsupported()
        return None
    from . import loader

    if pin is not None:
        named = loader.pinned_kernel(pin, problem, device, aligned=aligned)
        if named is not None:
            return named
    demanded = settings.settings().strict if strict is None else strict
    return loader.load_decided(
        dispatch_snapshot.snapshot(),
        problem,
        M,
        local_gpu(device),
        device,
        aligned=aligned,
        strict=demanded,
        persistent=persistent,
    )


def kernel_for(problem: Problem, M: int, device: int, *, aligned: bool, pin: Pin | None = None) -> LoadedKernel | None:
    """The kernel that ``pin`` names, else dispatch's decision, loaded and tested; None if torch has to multiply."""
    return _kernel(problem, M, device, aligned, pin, None)  # type: ignore[no-any-return]


def is_by_torch(problem: Problem, M: int, device: int) -> bool:
    """True if dispatch selects torch's grouped_mm for a product on aligned tensors."""
    from ..dispatch.decide import Decision, decide

    strict, local = settings.settings().strict, local_gpu(device)
    decision = decide(dispatch_snapshot.snapshot(), problem, M, local, strict=strict)
    return isinstance(decision, Decision) and decision.chosen.torch_us is not None


def grouped_mm(dtype: torch.dtype, sm: int, E: int) -> Callable[..., torch.Tensor] | None:
    """torch's own grouped GEMM, where it does not synchronise: bf16 on 9.x and 10.x, aligned; else None."""
    from ...kernels.arch import torch_groups  # here, as few calls need it

    if dtype is not torch.bfloat16 or not torch_groups(sm) or E > TORCH_GROUPS:
        return None
    function: Callable[..., torch.Tensor] | None
    function = getattr(torch.nn.functional, "grouped_mm", None) or getattr(torch, "_grouped_mm", None)
    return function


def _gated_kernel(
    problem: Problem, call: Rows, device: int, aligned: bool, top_k: int, checks: bool
) -> LoadedKernel | None:
    if not platform_supported():
        return None
    return gated_kernel(
        dispatch_snapshot.snapshot(), problem, call.bucket, device, aligned=aligned, top_k=top_k, checks=checks
    )


def _gathered_kernel(problem: Problem, call: Rows, device: int, checks: bool) -> LoadedKernel | None:
    if not platform_supported():
        return None
    from . import gather

    return gather.kernel(
        dispatch_snapshot.snapshot(),
        problem,
        call.bucket,
        device,
        top_k=call.gather_divisor,
        fusion=call.fusion,
        checks=checks,
    )


def problem_of(
    op: Op, x: torch.Tensor, E: int, N: int, K: int, layout: Layout, fusion: Fusion, quantised: DType | None = None
) -> Problem:
    """The problem of a checked CUDA product; fp32 is tf32 where torch allows it and a bundle has it.

    ``quantised`` is what kernels read of quantised weights.
    """
    from ...kernels.spec import code_of

    code = code_of(op, fusion)
    if quantised is not None:
        return Problem(op, quantised, E, N, K, layout, code)
    dtype = check_cuda_dtype(x)
    if tf32_allowed(x.dtype):
        tf32 = Problem(op, DType.TF32, E, N, K, layout, code)
        if dispatch_snapshot.snapshot().serves(tf32, local_gpu(x.get_device())):
            return tf32
    return Problem(op, dtype, E, N, K, layout, code)


def rows_aligned(call: Rows, y: torch.Tensor) -> bool:
    """True if all operands are aligned to 16 bytes, and w's rows and experts don't overlap."""
    return _aligned(call, y.data_ptr(), y.shape[1], row_stride(y, y.shape[1]))


def _aligned(call: Rows, y: int, columns: int, stride_y: int) -> bool:
    """``rows_aligned``, with y given by its address, its columns and its rows' stride."""
    x, w, size = call.x, call.w, call.x.element_size()
    if not isinstance(w, torch.Tensor):
        return False
    stride_w_e, stride_w_row = _weight_strides(w)
    lengths = (x.shape[1], columns, row_stride(x, x.shape[1]), stride_y, stride_w_e, stride_w_row)
    apart_in_memory = stride_w_row >= w.shape[2] and stride_w_e >= w.shape[1] * w.shape[2]
    pointers = (x.data_ptr(), w.data_ptr(), y)
    return apart_in_memory and is_aligned(ALIGNMENT_BYTES, *pointers, *(s * size for s in lengths))


def _weight_strides(w: torch.Tensor) -> tuple[int, int]:
    """Elements from expert to expert and from row to row; a dimension of size one has the usual stride."""
    E, first, second = w.shape
    return (w.stride(0) if E > 1 else first * second), (w.stride(1) if first > 1 else second)


def index_step(call: Rows) -> int:
    """Return the number of int32 words of an entry of the index."""
    return 2 if call.index is not None and call.index.dtype is torch.int64 else 1


def step_of(m_sizes: torch.Tensor) -> int:
    return 2 if m_sizes.dtype is torch.int64 else 1


def gated_kernel(
    snapshot: Snapshot, problem: Problem, M: int, device: int, *, aligned: bool, top_k: int = 1, checks: bool = False
) -> LoadedKernel | None:
    """The variant with silu in its epilogue, loaded on ``cuda:device``; None where the plain product is to run.

    Nothing is compiled, and nothing is logged: the plain product is an ordinary choice.
    """
    from ..dispatch.plans import fused_silu
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        return fused_silu(snapshot, problem, M, local, aligned=aligned, top_k=top_k, checks=checks)

    return load_first(snapshot, choose, local, device)
