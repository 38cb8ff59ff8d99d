"""A checked product as steps: row kernels that must run first, then the GEMM's launch.

``resolve`` handles every product of rows, ``resolve_weight`` dW. ``product_kernels.py`` finds the
kernel. Another kind of product has a function there, and its launch's arguments in ``_row_step``.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.records import Fusion, Layout
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ..check.tensors import row_stride
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import local_gpu, platform_supported
from .product_kernels import (
    ProductKernel,
    index_step,
    kernel_for_gated,
    kernel_for_low_rank,
    kernel_for_weight,
    lookup,
    name_of,
    problem_of,
    product_kernel,
    rows_aligned,
    step_of,
)
from .program import Step

if TYPE_CHECKING:
    from ...kernels.activations import Activation
    from ..check.call import Rows
    from ..dispatch.pin import Pin
    from ..dispatch.snapshot import Usable
    from ..driver.launcher import Behind
    from ..driver.rowops import RowOpLauncher
    from ..weights.expert_weights import ExpertWeights

_GATHERED = "rows"  # the operand that rows are gathered into
_CODES = "codes"  # the operand that rows are quantised into


class Scratch(NamedTuple):
    """Memory that a product's steps share, a row for each sorted row."""

    name: str
    columns: int
    dtype: torch.dtype


class Product(NamedTuple):
    """A product of rows: steps, whose operands are the call's tensors by the names of ``Rows`` and ``operands_of``.

    There is also ``scratch``, and with ``in_range`` an operand of that name, which is computed from the index and
    x. ``zeroes`` says that the rows of y that nothing is stored to become zero. ``by_torch`` is
    ``ProductKernel``'s.
    """

    steps: tuple[Step, ...]
    zeroes: bool
    scratch: tuple[Scratch, ...] = ()
    in_range: Callable[[torch.Tensor, torch.Tensor], torch.Tensor] | None = None
    by_torch: Callable[..., torch.Tensor] | None = None


def operands_of(w: torch.Tensor | ExpertWeights) -> dict[str, torch.Tensor | None]:
    """Return the tensors of w that kernels read, by their names in steps."""
    if isinstance(w, torch.Tensor):
        return {"w": w}
    derived = w.is_prepared and not w.always_quantises  # read by kernels with bf16 x
    operands = {"w": w.codes, "w_scale": w.kernel_scale if derived else None, "w_outer": w.outer_scale}
    operands["w_zero"], plain = w.zero, w.plain_scale
    if all(plain is not operand for operand in operands.values()):  # else two operands would be one tensor
        operands["w_plain_scale"] = plain  # the plain scales, in addition to the scales derived for kernels
    return operands


def _plain_scale(w: ExpertWeights) -> str:
    """The name of the operand that is ``w.plain_scale``."""
    operands = operands_of(w)
    return (
        "w_plain_scale"
        if "w_plain_scale" in operands
        else next(name for name, tensor in operands.items() if tensor is w.plain_scale)
    )


def resolve(call: Rows, y: torch.Tensor) -> Product | None:
    """The steps of a product into y; None where no bundle has a kernel for it."""
    w = call.w
    if not isinstance(w, torch.Tensor):
        from .quantised import kernel_for_quantised

        kernel = kernel_for_quantised(call, w, y)
    else:
        kernel = product_kernel(call, y)
    if kernel is None:
        return None
    return _product(kernel, call, call.fusion, row_stride(y, y.shape[1]), call.index_end(y.shape[0]))


def resolve_new(call: Rows, columns: int) -> Product | None:
    """The steps of a plain product of dense weights into new memory; None where no bundle has a kernel for it."""
    kernel = product_kernel(call, None)
    if kernel is None:
        return None
    return _product(kernel, call, Fusion.NONE, columns, 0)._replace(by_torch=kernel.by_torch)


def resolve_wide(call: Rows) -> tuple[Product, int] | None:
    """The steps of a plain forward into rows of y that are padded to whole 16 bytes, and the padded number of columns.

    None if rows are whole without padding, or other operands are not aligned, or no bundle has such code
    (``decide.with_wide_rows``). If a choice is required for the problem, it must exist.
    """
    x, w, (E, N, K) = call.x, call.w, call.sizes
    size = x.element_size()
    if not isinstance(w, torch.Tensor) or call.layout is not Layout.NK or is_aligned(ALIGNMENT_BYTES, N * size):
        return None
    if call.fusion or call.pin is not None:
        return None
    device, wide = x.get_device(), -(-N * size // ALIGNMENT_BYTES) * ALIGNMENT_BYTES // size
    if not platform_supported() or not rows_aligned(call, x.new_empty((0, wide))):
        return None

    def build() -> ProductKernel | None:
        from .. import settings
        from ..dispatch.decide import decide, with_wide_rows  # here, as few calls have such rows
        from .gemm import product_launcher
        from .loader import load_first

        problem, local = problem_of(call.op, x, E, N, K, call.layout, call.fusion), local_gpu(device)
        snapshot = dispatch_snapshot.snapshot()
        if settings.settings().strict:
            decide(snapshot, problem, call.bucket, local, aligned=False, strict=True)

        def choose() -> tuple[Usable, int] | None:
            chosen = with_wide_rows(snapshot, problem, call.bucket, local)
            return None if chosen is None else (chosen.usable, chosen.index)

        kernel = load_first(snapshot, choose, local, device)
        if kernel is None:
            return None
        strides = w.stride(0) if E > 1 else N * K, w.stride(1) if N > 1 else K
        launcher = product_launcher(
            kernel, N=wide, w_rows=N, K=K, E=E, strides=strides, m_sizes_step=step_of(call.m_sizes)
        )
        return ProductKernel(launcher, f"{name_of(problem, kernel)}, rows of {wide} columns")

    key = ("wide rows", x.dtype, E, N, K, w.stride(), call.m_sizes.dtype, call.bucket, device)
    kernel = lookup(key, build)
    return None if kernel is None else (_product(kernel, call, Fusion.NONE, wide, 0), wide)


def resolve_gated(call: Rows) -> Product | None:
    """The steps that store silu(gate) * up of this product into a new [M, N/2].

    None where no bundle has a kernel that pays (``dispatch/plans.py``), and for a call with any fusion except a gather.
    """
    kernel = kernel_for_gated(call)
    columns = call.sizes[1] // 2
    return None if kernel is None else _product(kernel, call, call.fusion | Fusion.SILU, columns, call.index_end(0))


def resolve_activated(call: Rows, act: tuple[int, Activation], y: torch.Tensor | None = None) -> Product | None:
    """The steps of a product of act(x) into dense y [M, N], or new memory, by the row kernel that quantises act(x).

    ``act`` is (the activation's flags, the activation). None where x is not to be quantised, or no bundle has the row
    kernel.
    """
    w = call.w
    if isinstance(w, torch.Tensor):
        return None
    from . import rowops
    from .quantised import activation_step, kernel_for_activated

    kernel = kernel_for_activated(call, w, y)
    if kernel is None or kernel.quantize is None:
        return None
    _, N, K = call.sizes
    before = activation_step(kernel.quantize, K, act, rowops.used(call.bounds))
    return _of_codes(kernel, before, call, call.fusion, (N, call.index_end(call.M)))


def resolve_made_codes(call: Rows) -> Step | None:
    """The step of a product of rows whose codes are in the operand ``codes``, into new memory.

    ``call.x`` are rows of as many columns as the codes have. None where x is not to be quantised.
    """
    from .quantised import kernel_for_quantised

    w, (_, N, K) = call.w, call.sizes
    if isinstance(w, torch.Tensor):
        return None
    call = call._replace(x=call.x.new_empty((1, K)))
    kernel = kernel_for_quantised(call, w, call.x.new_empty((1, N)))
    if kernel is None or kernel.quantize is None:
        return None
    return _codes_step(kernel, call, call.fusion, (N, call.index_end(call.M)))


def resolve_in_place(call: Rows, y: torch.Tensor | None) -> Product | None:
    """The step of a product of codes at ``call.starts`` into y, or new memory; None if other steps must run it."""
    from .quantised import kernel_for_starts, starts_words

    if isinstance(call.w, torch.Tensor) or call.starts is None or call.x_scale is None:
        return None
    first, _, packs = call.starts
    stride_y = call.columns if y is None else row_stride(y, call.columns)
    kernel = kernel_for_starts(call, call.w, y, stride_y)
    if kernel is None:
        return None
    step = Step.of(
        kernel.launcher,
        kernel.name,
        {"w_scale": _plain_scale(call.w)} if kernel.launcher.plain_scales else {},
        absent=tuple([name for name, there in (("starts", first is not None), ("bounds", packs)) if not there]),
        scales=False,
        stride_y_m=stride_y,
        **starts_words(call.starts, call.x_scale),
    )
    return Product((step,), zeroes=False)


def resolve_low_rank(call: Rows, y: torch.Tensor) -> Product | None:
    """The steps of a product with a low-rank part into y; None where there is no code for it."""
    w = call.w
    if not isinstance(w, torch.Tensor):
        from .quantised import low_rank_of_quantised

        kernel = low_rank_of_quantised(call, w)
    else:
        kernel = kernel_for_low_rank(call)
    return None if kernel is None else _product(kernel, call, call.fusion, row_stride(y, y.shape[1]), call.index_end(0))


def resolve_weight(
    dy: torch.Tensor,
    x: torch.Tensor,
    dw: torch.Tensor,
    m_sizes: torch.Tensor,
    pin: Pin | None = None,
    strict: bool | None = None,
    bucket: int | None = None,
) -> Step | None:
    """Return the launch of dw [E, N, K]; None if no bundle has a kernel. ``bucket``: see ``kernel_for_weight``."""
    kernel = kernel_for_weight(dy, x, dw, m_sizes, pin, strict, bucket)
    if kernel is None:
        return None
    return Step.of(
        kernel.launcher, kernel.name, stride_dy_m=row_stride(dy, dy.shape[1]), stride_x_m=row_stride(x, x.shape[1])
    )


def _product(kernel: ProductKernel, call: Rows, fusion: Fusion, stride_y: int, index_end: int) -> Product:
    """The steps of a product; ``fusion`` is in the kernel's terms."""
    x, zeroes = call.x, kernel.launcher.zeroes
    if kernel.quantize is not None:
        return _quantised_product(kernel, kernel.quantize, call, fusion, (stride_y, index_end))
    if kernel.gather is None:
        index = "index" if call.uses_index else ""
        stride_x = row_stride(x, x.shape[1])
        step = _row_step(kernel, call, {"index": index}, (stride_x, stride_y, index_end if fusion else None))
        return Product((step,), zeroes)
    from ..driver.launcher import repeats_rows
    from . import gather as launch_gather  # here, as most calls gather no rows first
    from . import rowops

    left, checks = fusion & ~(Fusion.GATHER | Fusion.SILU), call.bounds is None
    index = "index" if left & (Fusion.SCATTER | Fusion.WEIGHT) else ""
    if x.shape[0] == 1 and call.gather_divisor == call.M and repeats_rows(x.get_device()):
        # All rows belong to one token, also in any call with about M rows: two tokens have twice as many.
        return Product((_row_step(kernel, call, {"index": index}, (0, stride_y, index_end if left else None)),), zeroes)
    gather = launch_gather.step(
        kernel.gather,
        x,
        top_k=call.gather_divisor,
        M=call.M,
        index_step=index_step(call),
        used=rowops.used(call.bounds),
        index="in_range" if checks else "index",
        expected=call.expected,
    )
    step = _row_step(
        kernel, call, {"x": _GATHERED, "index": index}, (x.shape[1], stride_y, index_end if left else None)
    )
    in_range = partial(launch_gather.in_range, divisor=call.gather_divisor) if checks else None
    return Product((gather, step), zeroes, (Scratch(_GATHERED, x.shape[1], x.dtype),), in_range)


def _quantised_product(
    kernel: ProductKernel, quantize: RowOpLauncher, call: Rows, fusion: Fusion, words: tuple[int, int]
) -> Product:
    """The row kernel ``quantize`` (quantises x, or orders its codes), then the GEMM. ``words``: see ``_of_codes``."""
    from . import gather as launch_gather
    from . import rowops
    from .quantised import order_step, quantize_step

    picks = bool(call.gather_divisor)
    checks = picks and call.bounds is None
    how: dict[str, Any] = {
        "top_k": call.gather_divisor,
        "index_step": index_step(call),
        "used": rowops.used(call.bounds),
        "index": "in_range" if checks else "index" if picks else "",
    }
    if call.x_scale is None:
        before = quantize_step(quantize, call.x, **how)
    else:
        before = order_step(quantize, call.x, call.x_scale, **how)
    in_range = partial(launch_gather.in_range, divisor=call.gather_divisor) if checks else None
    left = fusion & ~Fusion.GATHER
    return _of_codes(kernel, before, call, left, words)._replace(in_range=in_range)


def _of_codes(kernel: ProductKernel, before: Step, call: Rows, left: Fusion, words: tuple[int, int]) -> Product:
    """The step ``before``, which makes x's codes and gathers rows if the call does, then the GEMM: see _codes_step."""
    from .quantised import bytes_of_row

    step, scratch = _codes_step(kernel, call, left, words), Scratch(_CODES, bytes_of_row(call.sizes[2]), torch.uint8)
    return Product((before, step), kernel.launcher.zeroes, (scratch,))


def _codes_step(kernel: ProductKernel, call: Rows, left: Fusion, words: tuple[int, int]) -> Step:
    """The GEMM of codes of x. ``left``: its other fusions; ``words``: the stride of y's rows, index_end."""
    (stride_y, end), (_, _, K) = words, call.sizes
    index = "index" if left & (Fusion.SCATTER | Fusion.WEIGHT) else ""
    operands, behind = {"x": _CODES, "x_scale": _CODES, "index": index}, (("x_scale", 0, K),)
    return _row_step(kernel, call, operands, (K, stride_y, end if left else None), behind)


def _row_step(
    kernel: ProductKernel,
    call: Rows,
    operands: dict[str, str],
    words: tuple[int, int, int | None],
    behind: Behind = (),
) -> Step:
    """The launch of a forward or dX.

    ``operands`` maps the kernel's names to the program's operands. ``words`` is (row stride of x, row stride of y,
    index_end), the last None if no fusion reads the index. ``behind``: see ``Launcher.bind``.
    """
    stride_x, stride_y, end = words
    if not isinstance(call.w, torch.Tensor) and kernel.launcher.plain_scales:
        operands = operands | {"w_scale": _plain_scale(call.w)}
    there = {"index": operands["index"], "row_weights": call.row_weights is not None, "bias": call.bias is not None}
    return Step.of(
        kernel.launcher,
        kernel.name,
        operands,
        absent=tuple([name for name, present in there.items() if not present]),
        scales=end == call.M or not end,
        behind=behind,
        stride_x_m=stride_x,
        stride_y_m=stride_y,
        index_end=end or 0,
        all_rows=end == call.M,
    )
