"""Launch one variant on one problem's tensors with the runtime's own launcher: the code that runs is measured."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...artifacts.records import DType, Fusion, Op, Problem
from ...runtime.launch import gemm as launch_gemm
from ...runtime.weights.expert_weights import ExpertWeights
from ...runtime.weights.row_codes import values_of_rows, values_on_load

TORCH = {dtype: torch.bfloat16 for dtype in DType if dtype.quantised} | {
    DType.BF16: torch.bfloat16,
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
}  # dtype of x and y


@dataclass(frozen=True, slots=True)
class Tensors:
    """The tensors of a problem with M rows, all contiguous.

    ``rows`` is x of the forward, [M, K] (or [T, K] if gathered), else dy, [M, N]. ``weights`` is w in
    ``problem.layout``, or quantised weights, or x [M, K] for dW. ``result`` is y, dx or dw; with silu it is [M, N/2].
    ``index``, int32 [M], names the moved rows; x's row is ``index // top_k``. ``row_weights``, float32 [M] by index,
    multiply the rows. ``codes`` are quantised ``rows``, for products that read them so
    (``runtime/weights/row_codes.py``).
    """

    problem: Problem
    M: int
    rows: torch.Tensor
    weights: torch.Tensor | ExpertWeights
    result: torch.Tensor
    index: torch.Tensor | None = None
    top_k: int = 1
    row_weights: torch.Tensor | None = None
    codes: tuple[torch.Tensor, torch.Tensor] | None = None

    def read(self, here: slice | torch.Tensor) -> torch.Tensor:
        """Some of ``rows`` as the product reads them: quantised, if it quantises them."""
        if self.codes is not None and isinstance(here, slice):
            return values_of_rows(*self.codes, here)
        rows = self.rows[here]
        return values_on_load(rows, self.problem.dtype) if self.problem.dtype.quantises_x else rows

    @property
    def dense(self) -> torch.Tensor:
        """``weights`` if they are a plain tensor, else AssertionError."""
        if not isinstance(self.weights, torch.Tensor):
            raise AssertionError(f"{self.problem} has quantised weights")
        return self.weights


def caller(kernel: launch_gemm.LoadedKernel, on: Tensors, m_sizes: torch.Tensor) -> Callable[[], None]:
    """Return a function that launches ``kernel`` on the current stream; ``m_sizes`` is int32 [E]."""
    problem = on.problem
    words: dict[str, int] = {}
    fused = launch_gemm.PLAIN
    if on.index is not None:
        fusion, weights = problem.fusion, 0
        if on.row_weights is not None:
            fusion, weights = fusion | Fusion.WEIGHT, on.row_weights.data_ptr()
        fused = launch_gemm.Fused(fusion, 1, on.top_k if Fusion.GATHER in fusion else 1)
        words = {"index": on.index.data_ptr(), "row_weights": weights, "index_end": on.M}
    w = on.weights
    strides = None if isinstance(w, ExpertWeights) else (on.result if problem.op is Op.DW else w).stride()[:2]
    N, K = (problem.K, problem.N) if problem.op is Op.DX else (problem.N, problem.K)
    launch = launch_gemm.product_launcher(kernel, N=N, K=K, E=problem.E, strides=strides, m_sizes_step=1, fused=fused)
    if problem.op is Op.DW:
        words |= {"dy": on.rows.data_ptr(), "stride_dy_m": on.rows.stride(0)}
        words |= {"x": on.dense.data_ptr(), "stride_x_m": on.dense.stride(0)}
    else:
        x, x_scale = on.codes or (on.rows, None)
        words |= {"x": x.data_ptr(), "stride_x_m": x.stride(0), "stride_y_m": on.result.stride(0)}
        words |= {} if x_scale is None else {"x_scale": x_scale.data_ptr()}
        words |= launch_gemm.words_of(w, launch) if isinstance(w, ExpertWeights) else {"w": w.data_ptr()}
    addresses = on.result.data_ptr(), m_sizes.data_ptr()

    def call() -> None:
        launch(*addresses, torch.cuda.current_stream().cuda_stream, M=on.M, **words)

    return call


def torch_caller(on: Tensors, m_sizes: torch.Tensor) -> Callable[[], object]:
    """Return a call of torch's grouped_mm on these tensors, for plain problems with w [E, N, K]."""
    w = on.weights
    if isinstance(w, ExpertWeights):
        raise AssertionError(f"torch has no call for {on.problem}")
    ends = m_sizes.cumsum(0).to(torch.int32)
    left, right = {Op.FORWARD: (on.rows, w.transpose(-1, -2)), Op.DX: (on.rows, w), Op.DW: (on.rows.t(), w)}[
        on.problem.op
    ]
    return lambda: torch._grouped_mm(left, right, offs=ends)
