"""The forward of a call, and the low-rank part of a product: y[i] += s * (x[i] @ A[e].T) @ B[e].T, and its gradients.

With u[i] = s * x[i] @ A[e].T and v[i] = s * dy[i] @ B[e], which have r columns:

    y[i] += u[i] @ B[e].T        dB[e] = sum of outer(dy[i], u[i])
    dx[i] += v[i] @ A[e]         dA[e] = sum of outer(v[i], x[i])

w is read as it is, never copied; A and B are small. api/lora.py checks them.
"""

from __future__ import annotations

from functools import partial

import torch

from ...artifacts.records import Layout, Op
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import ALIGNMENT_BYTES
from ..check import tensors
from ..check.call import Call, Rows, flat, wide_of
from ..launch.program import EAGER, EagerExecutor
from .products import new_rows, rows, wide_rows, with_low_part


class Lora(NamedTuple):
    """The adapter of one product: y[i] += scale * (x[i] @ A[e].T) @ B[e].T for every row i of expert e.

    ``A`` is [E, r, K] and ``B`` [E, N, r], r from 1 to 256, in x's dtype or another floating-point one, to which they
    are cast; [1, r, K] and [1, N, r] are one adapter for all experts. ``scale`` is a number (PEFT's lora_alpha / r).
    Both are differentiable. With ``dropout`` p, A reads dropout(x, p), drawn anew in each call (0 in evaluation).
    """

    A: torch.Tensor
    B: torch.Tensor
    scale: float = 1.0
    dropout: float = 0.0


class LowRank(NamedTuple):
    """A [E, r, K], B [E, N, r] in the product's dtype, and the scale s."""

    A: torch.Tensor
    B: torch.Tensor
    scale: float


class Adapters(NamedTuple):
    """The adapters of a layer's two products."""

    first: LowRank | None
    second: LowRank | None


class LowRankGradients(NamedTuple):
    """dA [E, r, K] and dB [E, N, r]."""

    A: torch.Tensor
    B: torch.Tensor


def adapters_given(lora: object) -> tuple[Lora | None, Lora | None]:
    if lora is None:
        return None, None
    pair = isinstance(lora, (tuple, list)) and len(lora) == 2 and not isinstance(lora, Lora)
    if not pair or not all(adapter is None or isinstance(adapter, Lora) for adapter in lora):  # type: ignore[attr-defined]
        got = f"({', '.join(type(adapter).__name__ for adapter in lora)})" if pair else f"a {type(lora).__name__}"  # type: ignore[attr-defined]
        tensors.bad("lora", got, "(of the first product, of the second), each a Lora or None", "moe_mlp")
    return lora[0], lora[1]  # type: ignore[index]


def scales_of(lora: tuple[Lora | None, Lora | None]) -> tuple[object, ...]:
    """The parts of a plan's key that come from these adapters, except their tensors.

    Raises
    ------
    TypeError
        if they are no adapters; the checks later name the fault.
    """
    if (
        type(lora) is not tuple
        or len(lora) != 2
        or any(adapter is not None and type(adapter) is not Lora for adapter in lora)
    ):
        raise TypeError("no adapters")
    if any(adapter is not None and (type(adapter.dropout) not in (float, int) or adapter.dropout) for adapter in lora):
        raise TypeError("no plan draws numbers")
    for matrix in (each for adapter in lora if adapter is not None for each in adapter[:2]):
        if matrix.dim() != 3 or not matrix.dtype.is_floating_point:
            raise TypeError("no matrices")
    return tuple(None if adapter is None else (type(adapter.scale), adapter.scale) for adapter in lora)


def as_used(lora: Lora, dtype: torch.dtype, E: int) -> LowRank:
    """Return an adapter in the dtype and layout that products read.

    Raises
    ------
    ValueError
        if A and B have different ranks, which padding to a common rank would hide.
    """
    if lora.A.shape[1] != lora.B.shape[2]:
        raise ValueError("A and B are of different ranks")
    return LowRank(as_read(lora.A, dtype, E, 1), as_read(lora.B, dtype, E, 2), lora.scale)


def as_read(matrix: torch.Tensor, dtype: torch.dtype, E: int, of_r: int) -> torch.Tensor:
    """A or B of E experts in ``dtype``, with contiguous rows; a single matrix is expanded to all experts.

    Dimension ``of_r`` is padded with zeros to whole 16 bytes, as kernels read rows. Zeros change no product.
    """
    # (Each check avoids a view, which autograd would record.)
    if matrix.dtype is not dtype:
        matrix = matrix.to(dtype, memory_format=torch.contiguous_format)  # one copy for dtype and PEFT's strides
    if more := -matrix.shape[of_r] % (ALIGNMENT_BYTES // dtype.itemsize):
        matrix = torch.nn.functional.pad(matrix, (0, more) if of_r == 2 else (0, 0, 0, more))
    if matrix.stride(2) != 1 and matrix.shape[2] != 1:
        matrix = matrix.contiguous()
    return matrix.expand(E, -1, -1) if matrix.shape[0] == 1 and E != 1 else matrix


def narrowed(
    adapter: LowRank,
    x: torch.Tensor,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None = None,
    top_k: int = 0,
    bounds: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    bucket: int | None = None,
) -> torch.Tensor:
    """u [M, r] of sorted rows x [M, K]; with ``index`` [M], of rows x[index // top_k].

    Without ``bounds`` (``routing.Routing``) the rows of an index out of range are zero, which B's gradient reads.
    ``bucket``: as ``Rows.expected``.
    """
    M = x.shape[0] if index is None else index.shape[0]
    call = Rows(Op.FORWARD, x, adapter.A, m_sizes, Layout.NK, M, index, top_k, bounds=bounds, expected=bucket)
    u = executor.new(x, (M, adapter.A.shape[1]))
    if index is not None and bounds is None:
        u = executor.call(_zero, u)
    return _scaled(rows(call, u, executor), adapter, executor)


def product(
    call: Rows,
    adapter: LowRank | None,
    narrow: torch.Tensor | None,
    executor: EagerExecutor = EAGER,
    y: torch.Tensor | None = None,
    many: int | None = None,
) -> torch.Tensor:
    """The product plus its low-rank part: u @ B.T in the forward, v @ A in dX. ``narrow`` [M, r] is u or v.

    One kernel computes both, with r more columns in its reduction. If there is none, the low-rank part is a product of
    its own, which is added. The result is written to ``y``, or to new memory of ``many`` rows (default M).
    """
    many = call.M if many is None else many
    keeps = y is not None and not call.loose  # rows of y that no row is stored to keep their contents
    if adapter is None or narrow is None:
        return new_rows(call, many, executor) if y is None else rows(call, y, executor)
    y = executor.new(call.x, (many, call.columns), per=int(many == call.M)) if y is None else y
    second = adapter.B if call.op is Op.FORWARD else adapter.A
    if with_low_part(call, narrow, second, y, executor):
        return y
    y = rows(call, y, executor)
    zeroes, expected = call.zero_tail or keeps, call.expected
    beside = Rows(call.op, narrow, second, call.m_sizes, Layout.NK, call.M, zero_tail=zeroes, expected=expected)
    if call.scatter or call.row_weights is not None:
        beside = beside._replace(index=call.index, scatter=call.scatter, row_weights=call.row_weights)
    executor.call(_add, y, rows(beside, executor.new(y, tuple(y.shape), per=int(y.shape[0] == call.M)), executor))
    return y


def narrowed_gradient(
    adapter: LowRank,
    dy: torch.Tensor,
    m_sizes: torch.Tensor,
    executor: EagerExecutor = EAGER,
    bucket: int | None = None,
) -> torch.Tensor:
    """v [M, r] of dy [M, N]. ``bucket``: as ``Rows.expected``."""
    M = dy.shape[0]
    call = Rows(Op.DX, dy, adapter.B, m_sizes, Layout.NK, M, expected=bucket)
    return _scaled(rows(call, executor.new(dy, (M, adapter.B.shape[2])), executor), adapter, executor)


def _scaled(narrow: torch.Tensor, adapter: LowRank, executor: EagerExecutor) -> torch.Tensor:
    return narrow if adapter.scale == 1 else executor.call(partial(_times, scale=adapter.scale), narrow)


# Torch's part of a low-rank product, in place. These functions hold no tensor: a program passes all tensors
# (``EagerExecutor.call``).


def _zero(u: torch.Tensor) -> torch.Tensor:
    return u.zero_()


def _add(y: torch.Tensor, more: torch.Tensor) -> torch.Tensor:
    return y.add_(more)


def _times(narrow: torch.Tensor, scale: float) -> torch.Tensor:
    return narrow.mul_(scale)


def forward(
    call: Call,
    x: torch.Tensor,
    out: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    x_scale: torch.Tensor | None = None,
) -> torch.Tensor:
    """y [y_rows, N]. Rows that are not stored to are zero with permute_y or zero_tail, else unchanged.

    x are codes with ``x_scale`` (``Rows``).
    """
    return with_adapter(call, x, None, out, executor, x_scale)[0]


def with_adapter(
    call: Call,
    x: torch.Tensor,
    adapter: LowRank | None,
    out: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    x_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The forward with an adapter's part, and u [M, r] for the gradients."""
    u = None
    if adapter is not None:
        index = call.fusions.index if call.form.permute_x else None
        u = narrowed(adapter, x, call.m_sizes, index, call.x_divisor, executor=executor, bucket=call.form.bucket)
    forward_call = forward_rows(call, x, executor)
    if x_scale is not None:
        forward_call = forward_call._replace(x_scale=x_scale)
    if out is not None and forward_call.loose:
        forward_call = forward_call._replace(loose=False)
    if adapter is not None:
        return product(forward_call, adapter, u, executor, out, call.y_rows), u
    if out is not None:
        return rows(forward_call, out, executor), None
    wide = wide_rows(forward_call, executor)
    return (new_rows(forward_call, call.y_rows, executor) if wide is None else wide), None


def forward_rows(call: Call, x: torch.Tensor, executor: EagerExecutor = EAGER) -> Rows:
    """The forward as a product, into a new y."""
    form, bias = call.form, call.fusions.bias
    zeros = form.permute_y or form.zero_tail
    weights = call.fusions.weights
    if weights is not None and weights.dtype is not (wide := wide_of(x)):
        weights = executor.call(partial(flat, wide=wide), weights)
    elif weights is not None:
        weights = flat(weights, wide)
    return Rows(
        Op.FORWARD,
        x,
        call.w,
        call.m_sizes,
        form.layout,
        call.M,
        call.fusions.index,
        form.topk if form.permute_x else 0,
        form.permute_y,
        weights,
        None if bias is None else bias.detach().contiguous(),
        form.pin_forward,
        zero_tail=zeros,
        loose=not zeros,
        expected=form.bucket,
    )
