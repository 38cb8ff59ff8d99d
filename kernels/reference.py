"""The three grouped GEMMs and the activations in plain torch: kernels' results are compared with these.

Slow and exact: 16-bit types are multiplied and summed in fp32 and rounded once. The functions work on any device and
are differentiable, but most read ``m_sizes`` on the host, which synchronises a GPU.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch.nn import functional

from ..artifacts.records import Layout
from .activations import Activation


def activation(h: torch.Tensor, act: Activation, *, gated: bool, interleaved: bool) -> torch.Tensor:
    """Return act(gate) * v(up) of h [..., 2*I], or act(h) of h [..., I] without a gate, in h's dtype.

    Gate and up are h's halves, or its even and odd columns if ``interleaved``. ``Activation`` has the equations. All
    operations are in float32 or wider. silu, gelu and ungated relu2 round each result to h's dtype, other activations
    only the last.
    """
    name = act.name
    if not gated:
        return _act(name, h)
    gate, up = (h[..., ::2], h[..., 1::2]) if interleaved else h.chunk(2, -1)
    if name in ("silu", "gelu", "gelu_tanh"):
        return _act(name, gate) * up
    gate, up = _wide(gate), _wide(up)
    limit = math.inf if act.limit is None else act.limit
    if name == "swiglu":
        gate, up = gate.clamp(max=limit), up.clamp(-limit, limit)
        result = gate * torch.sigmoid(act.alpha * gate) * (up + act.beta)
    elif name == "situ":
        v = up if act.linear_beta is None else act.linear_beta * torch.tanh(up / act.linear_beta)
        result = act.beta * torch.tanh(gate / act.beta) * torch.sigmoid(gate) * v
    elif name == "swiglustep":
        result = functional.silu(gate).clamp(max=limit) * up.clamp(-limit, limit)
    else:
        result = _act(name, gate) * up
    return result.to(h.dtype)


def _act(name: str, h: torch.Tensor) -> torch.Tensor:
    if name == "silu":
        return functional.silu(h)
    if name == "relu2":
        return functional.relu(h).square()
    return functional.gelu(h, approximate="tanh" if name == "gelu_tanh" else "none")


def expert_bounds(m_sizes: torch.Tensor, M: int) -> list[tuple[int, int]]:
    """Return (first row, end row) of each expert: a count below zero is zero, and no expert's rows pass M."""
    counts = m_sizes.detach().to(device="cpu", dtype=torch.int64).clamp(0, M)
    bounds = []
    start = 0
    for count in counts.tolist():
        end = min(start + count, M)
        bounds.append((start, end))
        start = end
    return bounds


def _wide(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.float() if tensor.dtype in (torch.bfloat16, torch.float16) else tensor


def _columns_last(w: torch.Tensor, layout: Layout) -> torch.Tensor:
    """Return a view of w as E matrices of [N, K], for both layouts."""
    return w if layout is Layout.NK else w.transpose(1, 2)


def _stack(parts: list[torch.Tensor], tail: torch.Tensor) -> torch.Tensor:
    return torch.cat([*parts, tail])


def forward(
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    *,
    layout: Layout = Layout.NK,
    zero_tail: bool = False,
) -> torch.Tensor:
    """Return y[m] = x[m] @ w[g].T for each row m of expert g.

    Parameters
    ----------
    x
        [M, K]: the rows of expert 0, then those of expert 1, and so on.
    w
        [E, N, K], or [E, K, N] with ``Layout.KN``; x's dtype.
    m_sizes
        [E] int32 or int64: rows of each expert. Below zero counts as zero; rows past M don't exist.
    zero_tail
        Whether rows of y past the sum of ``m_sizes`` are zero; otherwise their content is arbitrary.

    Returns
    -------
    torch.Tensor
        y [M, N] in x's dtype.
    """
    M = x.shape[0]
    w = _columns_last(w, layout)
    bounds = expert_bounds(m_sizes, M)
    parts = [(_wide(x[a:b]) @ _wide(w[g]).T).to(x.dtype) for g, (a, b) in enumerate(bounds) if b > a]
    rows = M - (bounds[-1][1] if bounds else 0)
    fresh = x.new_zeros if zero_tail else x.new_empty
    return _stack(parts, fresh((rows, w.shape[1])))


def grad_input(dy: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, *, layout: Layout = Layout.NK) -> torch.Tensor:
    """Return dx[m] = dy[m] @ w[g] for each row m of expert g; rows past the sum of ``m_sizes`` are zero.

    dy [M, N], w [E, N, K] (or [E, K, N] with ``Layout.KN``), m_sizes [E]; dx is [M, K] in dy's dtype.
    """
    M = dy.shape[0]
    w = _columns_last(w, layout)
    bounds = expert_bounds(m_sizes, M)
    parts = [(_wide(dy[a:b]) @ _wide(w[g])).to(dy.dtype) for g, (a, b) in enumerate(bounds) if b > a]
    rows = M - (bounds[-1][1] if bounds else 0)
    return _stack(parts, dy.new_zeros((rows, w.shape[2])))


def grad_weight(
    dy: torch.Tensor, x: torch.Tensor, m_sizes: torch.Tensor, *, layout: Layout = Layout.NK
) -> torch.Tensor:
    """Return dw[g] = dy[rows of g].T @ x[rows of g]; zeros for an expert without rows.

    dy [M, N], x [M, K], m_sizes [E]; dw is [E, N, K] (or [E, K, N] with ``Layout.KN``) in x's dtype.
    """
    N, K = dy.shape[1], x.shape[1]
    bounds = expert_bounds(m_sizes, x.shape[0])
    parts = [(_wide(dy[a:b]).T @ _wide(x[a:b])).to(x.dtype) for a, b in bounds]
    dw = torch.stack(parts) if parts else x.new_zeros((0, N, K))
    return dw if layout is Layout.NK else dw.transpose(1, 2).contiguous()


def expert_of_rows(m_sizes: torch.Tensor, M: int) -> torch.Tensor:
    """Return the expert of each of M sorted rows, [M] int64 on m_sizes' device; E past the sum. No synchronisation."""
    ends = m_sizes.detach().long().clamp(0, M).cumsum(0)
    return torch.searchsorted(ends, torch.arange(M, device=ends.device), right=True)


def rows(
    x: torch.Tensor,
    w: torch.Tensor | Sequence[torch.Tensor],
    m_sizes: torch.Tensor,
    y: torch.Tensor,
    *,
    M: int,
    layout: Layout,
    index: torch.Tensor | None = None,
    index_end: int = 0,
    gather_divisor: int = 0,
    scatter: bool = False,
    row_weights: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    silu: bool = False,
) -> None:
    """Write y[to(m)] = weight(m) * (x[from(m)] @ w[g].T + bias[g]) for each row m of expert g into y.

    from(m) = index[m] // gather_divisor, or m if ``gather_divisor`` is 0; to(m) = index[m] with ``scatter``, else m;
    weight(m) = row_weights[index[m]]. Rows whose index is not in [0, index_end) are left out, and the rows of y that
    nothing is written to stay. With ``silu`` y has N/2 columns: silu(gate) * up of the left and right half of all this,
    rounded once.

    w may be a sequence of E matrices [N, K] (``Layout.NK``). Each is read once, and only for experts with rows.
    """
    if isinstance(w, torch.Tensor):
        w = _columns_last(w, layout)
    for g, (first, end) in enumerate(expert_bounds(m_sizes, M)):
        if end <= first:
            continue
        row = torch.arange(first, end, device=x.device)
        flat = row if index is None else index[first:end].long()
        if index is not None:
            inside = (flat >= 0) & (flat < index_end)
            row, flat = row[inside], flat[inside]
        part = _wide(x[flat // gather_divisor if gather_divisor else row]) @ _wide(w[g]).T
        if bias is not None:
            part = part + bias[g].to(part.dtype)
        if row_weights is not None:
            part = part * row_weights[flat].to(part.dtype)[:, None]
        if silu:
            gate, up = part.chunk(2, 1)
            part = functional.silu(gate) * up
        y[flat if scatter else row] = part.to(y.dtype)


def rows_of(index: torch.Tensor, index_end: int, divisor: int = 1) -> torch.Tensor:
    """Return index // divisor, with 0 for indices outside [0, index_end): rows that can be read, [M] int64."""
    flat = index.long()
    return torch.where((flat >= 0) & (flat < index_end), flat, 0) // divisor


def taking_part(m_sizes: torch.Tensor, index: torch.Tensor | None, index_end: int, M: int) -> torch.Tensor:
    """Return which of M sorted rows belong to an expert and have an index, if given, in [0, index_end): [M] bool."""
    part = torch.arange(M, device=m_sizes.device) < m_sizes.detach().long().clamp(0, M).sum()
    return part if index is None else part & (index >= 0) & (index < index_end)
