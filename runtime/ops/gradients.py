"""The gradients of a forward (``low_rank.py``) as products: which row is read, which is written, what is multiplied.

With index g[i] of sorted row i, e its expert, t the weights flattened (1 without them):

    y[to(i)] = t[g[i]] * (x[from(i)] @ w[e].T + bias[e])      from(i) = g[i] // topk with permute_x, else i
                                                              to(i)   = g[i] with permute_y, else i
    dx[from(i)] += t[g[i]] * (dy[to(i)] @ w[e])               dw[e] += t[g[i]] * outer(dy[to(i)], x[from(i)])
    dt[g[i]] = dot(dy[to(i)] @ w[e], x[from(i)]) + dot(dy[to(i)], bias[e])
    dbias[e] += t[g[i]] * dy[to(i)]

Beside w there may be an adapter (``low_rank.py``): then u and v are of sorted rows x[from(i)] and dy[to(i)], y's and
dx's products have their low-rank parts, and dB and dA are t * outer(dy[to(i)], u[i]) and t * outer(v[i], x[from(i)]).
Every sum has a fixed order.
"""

from __future__ import annotations

from functools import partial

import torch

from ...artifacts.records import Layout, Op
from ...artifacts.tuples import NamedTuple
from ..check.call import Call, Rows
from ..check.tensors import rows_usable
from ..launch.program import EAGER, EagerExecutor
from . import low_rank
from .low_rank import LowRank, LowRankGradients
from .products import weight

_CHUNK_ELEMENTS = 1 << 24  # elements of float32 temporaries that the routing weights' gradient uses at once
_ONES = 8  # columns of a matrix of ones that sums dy's rows: 16 bytes in bf16


class Beside(NamedTuple):
    """An adapter, and v [M, r] of it."""

    adapter: LowRank
    v: torch.Tensor


class GradY(NamedTuple):
    """dy for the gradients: ``rows`` [y_rows, N] in y's order, and ``sorted`` [M, N] if it is gathered."""

    rows: torch.Tensor
    sorted: torch.Tensor | None

    @classmethod
    def of(cls, call: Call, dy: torch.Tensor, *, gathers: bool) -> GradY:
        """With ``gathers`` dy is gathered into ``sorted`` first: dW is then faster, and dX reads ``sorted``, too."""
        dy = dy if rows_usable(dy) else dy.contiguous()
        if not call.form.permute_y:
            return cls(dy, dy)
        return cls(dy, _gathered(dy, call.fusions.index, dy.shape[0], 1) if gathers else None)

    @property
    def gathered(self) -> torch.Tensor:
        """Return ``sorted``; it must have been gathered."""
        if self.sorted is None:
            raise AssertionError("dy was not gathered")
        return self.sorted


def grad_x(call: Call, dy: GradY, executor: EagerExecutor = EAGER, beside: Beside | None = None) -> torch.Tensor:
    """dx [x_rows, K]: rows that took no part are zero."""
    topk, index = call.form.topk, call.fusions.index
    many = call.x_rows * topk
    if beside is not None and call.form.permute_x and call.fusions.weights is None and many == call.M:
        # Kernels that add a low-rank part don't scatter: rows are scattered afterwards.
        raw = low_rank.product(_rows_of_dx(call, dy, None, moves=False), *beside, executor)
        if index is None:
            raise AssertionError("no index")
        from . import gather_combine

        return gather_combine.combine(raw, executor.call(_places, call.m_sizes, index), topk, executor=executor)
    raw = _grad_rows(call, dy, call.flat_weights(dy.rows), executor, beside)
    if not call.form.permute_x or topk == 1:
        return raw
    return raw.view(call.x_rows, topk, call.K).sum(1)


def grad_x_and_weights(
    call: Call, dy: GradY, x: torch.Tensor, beside: Beside | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """dx [x_rows, K], and the gradient of topk_weights [T, topk] in their dtype."""
    from ...kernels import reference

    weights, index = call.fusions.weights, call.fusions.index
    flat = call.flat_weights(dy.rows)
    if weights is None or flat is None or index is None:
        raise AssertionError("no weights")
    T, topk = weights.shape
    if not T:  # no row takes part
        return grad_x(call, dy), torch.zeros_like(weights)
    raw = _grad_rows(call, dy, None, EAGER, beside)
    part = reference.taking_part(call.m_sizes, index, T * topk, call.M)
    index = reference.rows_of(index, T * topk)
    if call.form.permute_x:  # already in token order; rows that take no part may hold anything
        taken = _to_flat(part, part, index, T * topk)
        dots = torch.where(taken, _dots(raw.view(T, topk, call.K), x[:, None, :]).view(-1), 0)
        dx = _weighted(raw.view(T, topk, call.K), torch.where(taken, flat, 0).view(T, topk, 1), slots=True)
    else:
        dots = _to_flat(_dots(raw, x), part, index, T * topk)
        dx = _weighted(raw, torch.where(part, flat[index], 0)[:, None], slots=False)
    bias = call.fusions.bias
    if bias is not None and len(bias):
        dy_rows = dy.rows.index_select(0, index) if dy.sorted is None else dy.sorted
        expert = reference.expert_of_rows(call.m_sizes, call.M).clamp_(max=bias.shape[0] - 1)
        dots = dots + _to_flat(_dots(dy_rows, bias.detach()[expert]), part, index, T * topk)
    return dx, dots.view(T, topk).to(weights.dtype)


def grad_w_and_bias(
    call: Call, dy: GradY, x: torch.Tensor | None, *, bias: bool, executor: EagerExecutor = EAGER
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """dw in w's layout, dense (with x, ``sorted_x``), and dbias [E, N]: dW with ones for x. Without rows it is zero.

    Rows whose index is out of range are zero in the gathered operand. The sorted operand must be finite there: masking
    it would cost every call a launch.
    """
    form, index, flat = call.form, call.fusions.index, call.flat_weights(dy.rows)
    rows_dy = _scaled(call, dy.gathered, flat)
    dw = dbias = None
    if x is not None:
        if call.of_dx is not None:
            from .fp8_products import Picked, grad_weight  # here, as few calls have a precision

            dtype, bucket = call.of_dx.dtype, form.bucket
            dw = grad_weight(Picked(rows_dy), Picked(x), call.m_sizes, form.layout, dtype, bucket, executor)
        else:
            dw = weight(
                rows_dy, x, call.m_sizes, layout=form.layout, pin=form.pin_dw, bucket=form.bucket, executor=executor
            )
    if bias:
        ones = rows_dy.new_ones((call.M, _ONES))
        if form.permute_x and flat is None and index is not None:  # else rows that take no part are zero in dy already
            ones.masked_fill_(((index < 0) | (index >= call.x_rows * form.topk))[:, None], 0)
        dbias = weight(rows_dy, ones, call.m_sizes, strict=False, bucket=form.bucket)[:, :, 0].contiguous()
    return dw, dbias


def grad_adapter(
    call: Call, dy: GradY, x: torch.Tensor, beside: Beside, u: torch.Tensor, executor: EagerExecutor = EAGER
) -> LowRankGradients:
    """dA [E, r, K] and dB [E, N, r]; x is sorted (``sorted_x``), and u [M, r] is x @ A.T from the forward."""
    flat, bucket = call.flat_weights(dy.rows), call.form.bucket
    dB = weight(dy.gathered, _scaled(call, u, flat), call.m_sizes, bucket=bucket, executor=executor)
    return LowRankGradients(
        weight(_scaled(call, beside.v, flat), x, call.m_sizes, bucket=bucket, executor=executor), dB
    )


def sorted_x(call: Call, x: torch.Tensor, executor: EagerExecutor = EAGER) -> torch.Tensor:
    """The rows of x [M, K] in the sorted order; rows with an index out of range are zero."""
    form, index = call.form, call.fusions.index
    if not form.permute_x or index is None:
        return x
    return executor.call(partial(_rows_of_tokens, topk=form.topk), x, index)  # type: ignore[no-any-return]


def _rows_of_tokens(x: torch.Tensor, index: torch.Tensor, topk: int) -> torch.Tensor:
    return _gathered(x, index, x.shape[0] * topk, topk)


def _scaled(call: Call, rows: torch.Tensor, flat: torch.Tensor | None) -> torch.Tensor:
    """Sorted rows times their weights, in float32 or wider and rounded once."""
    if flat is None or call.fusions.index is None:
        return rows
    scale = _gathered(flat[:, None], call.fusions.index, flat.numel(), 1)
    return torch.mul(rows, scale, out=torch.empty_like(rows))


def _rows_of_dx(
    call: Call, dy: GradY, flat: torch.Tensor | None, *, moves: bool, executor: EagerExecutor = EAGER
) -> Rows:
    """dy @ w, into token order if it ``moves``."""
    form = call.form
    dy_rows, divisor = (dy.rows, 1) if dy.sorted is None else (dy.sorted, 0)
    used = call.fusions.index if moves or divisor or flat is not None else None
    op, w, layout = Op.DX, call.w, form.layout
    if call.of_dx is not None:
        op, dy_rows, w, layout = Op.FORWARD, dy_rows.contiguous(), call.of_dx.weights(executor), Layout.NK
    return Rows(
        op,
        dy_rows,
        w,
        call.m_sizes,
        layout,
        call.M,
        used,
        divisor,
        moves,
        flat,
        None,
        form.pin_dx,
        zero_tail=moves or not form.permute_x,
        expected=form.bucket,
    )


def _grad_rows(
    call: Call, dy: GradY, flat: torch.Tensor | None, executor: EagerExecutor, beside: Beside | None = None
) -> torch.Tensor:
    """dy @ w row by row: in the sorted order [M, K], or with permute_x in token order [T*topk, K]; others zero."""
    moves = call.form.permute_x
    adapter, v = beside or (None, None)
    many = call.x_rows * call.form.topk if moves else call.M
    of_dx = _rows_of_dx(call, dy, flat, moves=moves, executor=executor)
    return low_rank.product(of_dx, adapter, v, executor, many=many)


def _places(m_sizes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    """int32 [M]: the sorted row of each of M slots, -1 for a slot that takes no part; index [M]."""
    from ...kernels import reference

    M = index.shape[0]
    rows = torch.arange(1, M + 1, dtype=torch.int32, device=index.device)
    part = reference.taking_part(m_sizes, index, M, M)
    return _to_flat(rows, part, reference.rows_of(index, M), M) - 1


def _gathered(tensor: torch.Tensor, index: torch.Tensor | None, index_end: int, divisor: int) -> torch.Tensor:
    """tensor[index // divisor], zero where the index is outside [0, index_end)."""
    if index is None:
        raise AssertionError("no index")
    if not tensor.shape[0]:
        return tensor.new_zeros((index.shape[0], tensor.shape[1]))
    inside = (index >= 0) & (index < index_end)
    if divisor > 1:  # rows are read several times: index a row of zeros, as masking the larger result takes longer
        tensor = torch.cat([tensor, tensor.new_zeros(1, tensor.shape[1])])
        return tensor.index_select(0, torch.where(inside, index.long() // divisor, tensor.shape[0] - 1))
    return tensor.index_select(0, torch.where(inside, index.long(), 0)).masked_fill_(~inside[:, None], 0)


def _dots(left: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
    """The dot products along the last dimension, summed in float32 or wider, some rows at a time.

    Products of bfloat16 are rounded to it: as much as the factors, for a third of the memory traffic.
    """
    wide = torch.promote_types(left.dtype, torch.float32)
    if left.dtype is right.dtype is torch.bfloat16:
        return (left * right).sum(-1, dtype=wide)
    step = max(1, _CHUNK_ELEMENTS // max(1, left[:1].numel()))
    pairs = zip(torch.split(left, step), torch.split(right, step), strict=True)
    return torch.cat([(a.to(wide) * b.to(wide)).sum(-1) for a, b in pairs])


def _weighted(raw: torch.Tensor, weights: torch.Tensor, *, slots: bool) -> torch.Tensor:
    """raw times weights, summed over dimension 1 with ``slots``, in float32 or wider and rounded once."""
    if not slots:
        return torch.mul(raw, weights, out=torch.empty_like(raw))
    step = max(1, _CHUNK_ELEMENTS // max(1, raw[:1].numel()))
    pairs = zip(torch.split(raw, step), torch.split(weights, step), strict=True)
    return torch.cat([(a * b).sum(1).to(raw.dtype) for a, b in pairs])


def _to_flat(values: torch.Tensor, part: torch.Tensor, index: torch.Tensor, many: int) -> torch.Tensor:
    """[many] with values[i] at index[i] for the rows that take part, zero elsewhere."""
    target = torch.where(part, index, many)  # an extra entry takes the other rows
    return values.new_zeros(many + 1).index_copy_(0, target, values.masked_fill(~part, 0))[:many]
