"""Make the inputs of a measurement: routing, weights, activations.

Weights are N(0, 0.05), activations N(0, 1), the rows sorted by expert.

A variant is launched on them by the runtime's own launcher: the code that runs is measured.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from ...artifacts.records import PRECISIONS, DType, Fusion, Op, Problem
from ...runtime.launch import gemm as launch_gemm
from ...runtime.weights.expert_weights import ExpertWeights, checked
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


SKEW = 0.3
MAX_ERROR = 1e-2


def routed_rows(
    E: int, top_k: int, T: int, seed: int = 0, device: str | torch.device = "cpu", skew: float = SKEW
) -> torch.Tensor:
    """Rows of each expert, int32 [E], for T tokens: skewed by rank (exponent ``skew``), some experts empty.

    With ``skew`` 0 every expert is equally likely, and none is left out.
    """
    g = torch.Generator().manual_seed(seed * 7919 + T * 31 + E)
    rank = (torch.randperm(E, generator=g) + 1).to(device)
    if torch.device(device).type != "cpu":
        g = torch.Generator(device).manual_seed(seed * 7919 + T * 31 + E)
    logits = torch.randn(T, E, generator=g, device=device) - skew * torch.log(rank.float())
    none = (E // 32 if E >= 32 else int(E >= 16)) if skew else 0
    if none:
        logits[:, rank > E - none] = -50.0
    chosen = logits.softmax(-1).topk(top_k, -1).indices
    return torch.bincount(chosen.flatten(), minlength=E).to(torch.int32)


def measured_routings(E: int, M: int, device: str | torch.device = "cpu") -> tuple[torch.Tensor, ...]:
    """Rows of each expert, int32 [E], M in all, for each of ``records.ROUTINGS`` in order.

    Both are random. Exactly even rows are a poor model of even routing: M and E are mostly powers of two, so each
    expert would have, say, 128 rows and fill a tile of 128, while in real routing half the experts need two tiles.
    """
    top_k = top_k_of(E, M)
    return tuple(routed_rows(E, top_k, M // top_k, seed, device, skew) for seed, skew in enumerate((SKEW, 0.0)))


def top_k_of(E: int, M: int) -> int:
    """A usual number of experts a token: 8, but at most E/4, and a divisor of M."""
    k = 8
    while k > 1 and (k * 4 > E or M % k):
        k //= 2
    return k


def weights(
    E: int, N: int, K: int, dtype: torch.dtype, device: str | torch.device = "cuda", into: torch.Tensor | None = None
) -> torch.Tensor:
    """w [E, N, K] ~ N(0, 0.05), made expert by expert: DeepSeek-V3's is 15 GB. ``into`` [>= E*N*K] holds it."""
    g = torch.Generator(device).manual_seed(1)
    flat = torch.empty(E * N * K, dtype=dtype, device=device) if into is None else into[: E * N * K]
    w = flat.view(E, N, K)
    for matrix in w:
        matrix.copy_(torch.randn(N, K, generator=g, device=device) * 0.05)
    return w


_E8M0 = {"e2m1": (119, 124), "e4m3": (114, 117)}  # scales of 2**-8 to 2**-4, and of 2**-13 to 2**-11
_WIDTHS = {"int4": (1e-2, 5e-3), "e4m3": (5e-4, 2e-4)}  # the range of other scales: its width, its least number


def quantised_weights(
    E: int, N: int, K: int, dtype: DType, device: str | torch.device = "cuda", *, prepared: bool = True
) -> ExpertWeights:
    """Weights of a quantised format with equally likely codes, about 0.05 wide, prepared or not."""
    g = torch.Generator(device).manual_seed(1)

    def drawn(*shape: int, low: int, high: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, device=device, generator=g)

    elements = dtype.precision.w
    scale, eight = elements.scale, elements.bits == 8
    if scale is None:
        raise AssertionError(f"{dtype.value} has no scale")
    codes = torch.empty(E, N, K if eight else K // 2, dtype=torch.uint8, device=device)
    for matrix_codes in codes:
        if eight:  # every code except the two NaNs
            matrix_codes.copy_(drawn(N, K, low=0, high=127) | drawn(N, K, low=0, high=2) << 7)
        else:
            matrix_codes.copy_(drawn(N, K // 2, low=0, high=256))
    blocks = (E, -(-N // scale.rows), -(-K // scale.columns)) if scale.columns else (E, N)
    zero = outer = None
    if scale.name == "e8m0":
        low, high = _E8M0[elements.name]
        scales = drawn(*blocks, low=low, high=high)
    elif scale.name == "e4m3":
        scales = drawn(*blocks, low=0x30, high=0x50).view(torch.float8_e4m3fn)
        outer = torch.full((E,), 5e-3, device=device)
    else:
        width, least = _WIDTHS[elements.name]
        scales = torch.rand(blocks, generator=g, device=device) * width + least
        scales = scales.to(torch.bfloat16) if scale.name == "bf16" else scales
        zero = drawn(*blocks, low=6, high=11) if scale.zero_bits else None
    if eight:
        codes = codes.view(torch.float8_e4m3fn)
    format = next(name for name in (f"{dtype.value}_a16", dtype.value) if name in PRECISIONS)  # x stays in bf16
    experts_w = checked(ExpertWeights(format, codes, scales, zero, outer))
    return experts_w.prepare() if prepared else experts_w


def activations(M: int, K: int, dtype: torch.dtype, device: str | torch.device = "cuda") -> torch.Tensor:
    """x [M, K] ~ N(0, 1)."""
    return torch.randn(M, K, generator=torch.Generator(device).manual_seed(2), device=device).to(dtype)
