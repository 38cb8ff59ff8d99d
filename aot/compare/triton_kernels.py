"""triton_kernels' matmul_ogs as calls on rows sorted by expert."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from .products import Call, Inputs

ROWS_A_STEP = 64  # of dW


class TritonKernels:
    """triton_kernels' matmul_ogs, from the package of that name on Python's path."""

    def __init__(self) -> None:
        self.ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        self.metadata: Any = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata

    def triton_kernels(self, op: str, inputs: Inputs) -> Call:
        """A call of y[g] = x[g] @ w[g].T, dx[g] = dy[g] @ w[g] or dw[g] = dy[g].T @ x[g] by matmul_ogs."""
        if op == "dW":
            return self._weight(inputs, inputs.grad)
        rows, w = (inputs.x, inputs.w.transpose(1, 2)) if op == "forward" else (inputs.grad, inputs.w)
        routing = self.ogs.RoutingData(
            None, inputs.m_sizes, len(w), 1, expt_data=self.metadata(inputs.m_sizes, len(rows))
        )
        return lambda: self.ogs.matmul_ogs(rows, w, None, routing)

    def _weight(self, inputs: Inputs, dy: torch.Tensor) -> Call:
        """A call of dw, on rows of both operands that are padded beforehand."""
        m_sizes, left, right = inputs.m_sizes, padded(dy, inputs.m_sizes), padded(inputs.x, inputs.m_sizes)
        base = self.ogs.RoutingData(None, m_sizes, len(m_sizes), 1, expt_data=self.metadata(m_sizes, len(dy)))
        inner = self.ogs.InnerRoutingData(base, ROWS_A_STEP, x_is_padded=True, w_is_padded=True)
        return lambda: self.ogs.matmul_ogs(left.t(), right, None, inner_routing_data=inner)


def padded(rows: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
    """Each expert's rows, padded with zeros to whole steps."""
    whole = (m_sizes.long() + ROWS_A_STEP - 1) // ROWS_A_STEP * ROWS_A_STEP
    shift = (whole.cumsum(0) - whole) - (m_sizes.long().cumsum(0) - m_sizes)
    out = rows.new_zeros(int(whole.sum()), rows.shape[1])
    out[torch.arange(len(rows), device=rows.device) + torch.repeat_interleave(shift, m_sizes.long())] = rows
    return out
