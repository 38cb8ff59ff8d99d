"""One grouped product in bf16: its tensors, the reference, and the calls of pretuned and torch.

forward: y[g] = x[g] @ w[g].T; dX: dx[g] = dy[g] @ w[g]; dW: dw[g] = dy[g].T @ x[g]; rows sorted by expert.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch

from ...runtime import grouped_gemm, grouped_gemm_dW, grouped_gemm_dX

Call: TypeAlias = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """One problem's tensors on one device: x [M, K], w [E, N, K], m_sizes [E], and for a gradient dy [M, N]."""

    x: torch.Tensor
    w: torch.Tensor
    m_sizes: torch.Tensor
    dy: torch.Tensor | None = None

    @property
    def grad(self) -> torch.Tensor:
        """``dy`` of a gradient; AssertionError for a forward."""
        if self.dy is None:
            raise AssertionError("a gradient's inputs have a dy")
        return self.dy


def relative_error(result: torch.Tensor, inputs: Inputs, op: str = "forward") -> float:
    """||result - ref|| / ||ref||, ref in fp32, expert by expert. NaN if anything is not finite.

    forward: y[g] = x[g] @ w[g].T; dX: dx[g] = dy[g] @ w[g]; dW: dw[g] = dy[g].T @ x[g];
    silu: silu(gate) * up of the forward's left and right half of columns.
    """
    wrong = total = torch.zeros((), dtype=torch.float64, device=result.device)  # read once: E may be hundreds
    start = 0
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32, whatever the call under test may use
    for expert, rows in enumerate(inputs.m_sizes.tolist()):
        here = slice(start, start + rows)
        start += rows
        if not rows and op != "dW":
            continue
        if op in ("forward", "silu"):
            want = inputs.x[here].float() @ inputs.w[expert].float().T
            if op == "silu":
                gate, up = want.chunk(2, 1)
                want = torch.nn.functional.silu(gate) * up
        else:
            dy = inputs.grad[here].float()
            want = dy @ inputs.w[expert].float() if op == "dX" else dy.T @ inputs.x[here].float()
        got = result[expert if op == "dW" else here].float()
        wrong = wrong + (got - want).square().sum(dtype=torch.float64)
        total = total + want.square().sum(dtype=torch.float64)
    return float((wrong / total).sqrt()) if total else 0.0


def ours(op: str, inputs: Inputs, w_layout: str = "nk") -> Call:
    """pretuned's public call. With ``kn`` inputs.w is a view of [E, K, N], and dW gives dw as [E, K, N]."""
    w_arg = inputs.w if w_layout == "nk" else inputs.w.transpose(1, 2)
    if op == "forward":
        return partial(grouped_gemm, inputs.x, w_arg, inputs.m_sizes, w_layout=w_layout)
    if op == "dX":
        return partial(grouped_gemm_dX, inputs.grad, w_arg, inputs.m_sizes, w_layout=w_layout)
    return partial(grouped_gemm_dW, inputs.grad, inputs.x, inputs.m_sizes, w_layout=w_layout)


def grouped_mm(op: str, inputs: Inputs) -> Call:
    """A call of torch's grouped_mm."""
    ends = inputs.m_sizes.cumsum(0).to(torch.int32)
    if op == "forward":
        return partial(torch._grouped_mm, inputs.x, inputs.w.transpose(1, 2), offs=ends)
    if op == "dX":
        return partial(torch._grouped_mm, inputs.grad, inputs.w, offs=ends)
    return partial(torch._grouped_mm, inputs.grad.t(), inputs.x, offs=ends)


def matmul_loop(op: str, inputs: Inputs) -> Call:
    """A call of one torch.matmul for each expert with rows, whose numbers are known on the host, into one result."""
    E, N, K = inputs.w.shape
    shape = {"forward": (len(inputs.x), N), "dX": (len(inputs.x), K), "dW": (E, N, K)}[op]
    out = torch.zeros(shape, dtype=inputs.x.dtype, device=inputs.x.device)
    ends = inputs.m_sizes.cumsum(0).tolist()
    spans = [
        (e, slice(end - n, end)) for e, (end, n) in enumerate(zip(ends, inputs.m_sizes.tolist(), strict=True)) if n
    ]

    without = [e for e, n in enumerate(inputs.m_sizes.tolist()) if not n] if op == "dW" else []

    def call() -> torch.Tensor:
        for e in without:
            out[e].zero_()
        for e, rows in spans:
            if op == "forward":
                torch.mm(inputs.x[rows], inputs.w[e].T, out=out[rows])
            elif op == "dX":
                torch.mm(inputs.grad[rows], inputs.w[e], out=out[rows])
            else:
                torch.mm(inputs.grad[rows].T, inputs.x[rows], out=out[e])
        return out

    return call
