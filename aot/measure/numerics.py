"""Check a variant's results: every element against the equation, without a second GEMM.

Freivalds' check (``NumericsCheck``). For a vector r of random signs, ``y @ r`` must be ``x @ (w[g].T @ r)``, which
costs M * (N + K) instead of M * N * K operations. The expectation of ||(y - ref) @ r||^2 over r is ||y - ref||^2
(Frobenius), so this estimates the usual error. All sums are fp32 (IEEE).
R. Freivalds, "Probabilistic machines can use less running time", IFIP Congress 1977.

The check is for linear results. For silu in the epilogue (``GatedNumericsCheck``) a random column of each eight of y is
computed again, as silu(gate) * up of the fp32 product (IEEE). Kernels load, multiply and store at least 8 columns at
once, so this finds their errors at an eighth of the product's cost. All elements must be finite too.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch.nn import functional

from ...artifacts.records import Fusion, Op, Problem
from ...kernels.spec import gemm_of
from ...runtime.weights.dequantised import Dequantised
from ...runtime.weights.expert_weights import ExpertWeights
from .calls import Tensors

MAX_ROW_ERROR = 0.1  # of one row, over the root mean square of all: a wrong row has about 1
# With one vector, rounding makes a row that is nearly orthogonal to it look wrong. Many rows average that out; for a
# single row, like one expert's in dW, eight vectors do.
_VECTORS = 8
_MANY_ROWS = 256
_CHUNK_ELEMENTS = 1 << 26


class NumericsCheck:
    """The reference of one weight, for the results of all problems that use it: Freivalds' check."""

    def __init__(
        self,
        problem: Problem,
        weights: Sequence[torch.Tensor] | torch.Tensor | ExpertWeights | None,
        device: torch.device,
    ) -> None:
        g = torch.Generator(device).manual_seed(3)
        columns = problem.K if problem.op is Op.DW else gemm_of(problem).columns
        self._signs = torch.randint(0, 2, (columns, _VECTORS), generator=g, device=device).float() * 2 - 1
        self._w_kn = problem.op is not Op.DW and gemm_of(problem).w_kn
        self._projected = torch.empty(0, device=device)  # [E, reduction, vectors]
        if weights is not None:
            if isinstance(weights, ExpertWeights):
                weights = Dequantised(weights, torch.float32, transposed=False)
            parts = [(w if self._w_kn else w.T).float() @ self._signs for w in weights]
            self._projected = torch.stack(parts)

    def reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        """The expected ``result @ signs``: [M, vectors] in the sorted order of rows, or for dW [E, N, vectors]."""
        if on.problem.op is Op.DW:
            return self._weight_reference(on, counts)
        vectors = 1 if on.M > _MANY_ROWS else _VECTORS
        expert = torch.repeat_interleave(
            torch.arange(len(counts), device=on.rows.device), torch.tensor(counts, device=on.rows.device)
        )
        gathered = Fusion.GATHER in on.problem.fusion
        width = on.rows.shape[1] * vectors
        parts = []
        for here in _chunks(on.M, width):
            rows = on.read(on.index[here].long() // on.top_k if gathered and on.index is not None else here)
            parts.append(torch.einsum("mk,mkv->mv", rows.float(), self._projected[expert[here], :, :vectors]))
        return torch.cat(parts)

    def _weight_reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        dy, x, start, parts = on.rows, on.dense, 0, []
        for count in counts:
            total = torch.zeros(dy.shape[1], _VECTORS, device=dy.device)
            for here in _chunks(count, dy.shape[1] + x.shape[1], start):
                total += dy[here].float().T @ (x[here].float() @ self._signs)
            parts.append(total)
            start += count
        return torch.stack(parts)

    def error(self, on: Tensors, reference: torch.Tensor) -> float:
        """The relative error of ``on.result``: NaN if an element is not finite, infinite if a single row is wrong."""
        signs = self._signs[:, : reference.shape[-1]]
        flat = on.result.reshape(-1, on.result.shape[-1])
        got = torch.cat([flat[here].float() @ signs for here in _chunks(flat.shape[0], flat.shape[1])])
        if on.index is not None and Fusion.SCATTER in on.problem.fusion:
            got = got[on.index.long()]
            if on.row_weights is not None:
                got = got / on.row_weights[on.index.long(), None]
        off = got.reshape(reference.shape) - reference
        total = reference.square().sum(dtype=torch.float64).sqrt()
        relative = float(off.square().sum(dtype=torch.float64).sqrt() / total)
        per_expert = reference if on.problem.op is Op.DW else reference[None]
        scale = per_expert.square().mean(dim=(1, 2)).sqrt()  # experts without rows: any error is too much
        worst = (off if on.problem.op is Op.DW else off[None]).abs().amax(dim=(1, 2))
        within = bool((worst <= MAX_ROW_ERROR * scale).all())
        return relative if within or relative != relative else float("inf")


def _chunks(rows: int, width: int, start: int = 0) -> list[slice]:
    """Slices of rows of limited size."""
    step = max(1, _CHUNK_ELEMENTS // max(1, width))
    return [slice(start + at, start + min(at + step, rows)) for at in range(0, rows, step)]


_EACH = 8  # one column of so many is checked
_GROUP = 8  # checked columns that are summed: 64 of y
_GATED_CHUNK_ELEMENTS = 1 << 26


class GatedNumericsCheck:
    """The reference of one weight for products with silu in the epilogue: one column in eight of y."""

    def __init__(self, problem: Problem, weights: torch.Tensor) -> None:
        gemm = gemm_of(problem)
        half, device = gemm.columns // 2, weights.device
        g = torch.Generator(device).manual_seed(3)
        groups = torch.arange(0, half, _EACH, device=device)
        picked = groups + torch.randint(0, _EACH, groups.shape, generator=g, device=device)
        self._columns = picked.clamp(max=half - 1)
        both = torch.cat([self._columns, half + self._columns])
        self._w = weights.index_select(2 if gemm.w_kn else 1, both)
        self._w_kn = gemm.w_kn

    def reference(self, on: Tensors, counts: list[int]) -> torch.Tensor:
        """The checked columns of ``result``: float32 [M, columns] in the sorted order of rows."""
        index = on.index if Fusion.GATHER in on.problem.fusion else None
        parts: list[torch.Tensor] = []
        start = 0
        step = max(1, _GATED_CHUNK_ELEMENTS // (on.rows.shape[1] + 2 * len(self._columns)))
        for w, count in zip(self._w, counts, strict=True):
            matrix = (w if self._w_kn else w.T).float()
            for first in range(start, start + count, step):
                here = slice(first, min(first + step, start + count))
                rows = on.rows[here] if index is None else on.rows[index[here].long() // on.top_k]
                gate, up = (rows.float() @ matrix).chunk(2, 1)
                parts.append(functional.silu(gate) * up)
            start += count
        return torch.cat(parts)

    def error(self, on: Tensors, reference: torch.Tensor) -> float:
        """The relative error of ``on.result``: NaN if not all is finite, infinite if 64 columns of a row are wrong."""
        got = on.result[: len(reference), self._columns].float()
        off = (got - reference).square()
        total = reference.square().sum(dtype=torch.float64).sqrt()
        relative = float(off.sum(dtype=torch.float64).sqrt() / total)
        if not bool(torch.isfinite(on.result).all()):
            return float("nan")
        short = -off.shape[1] % _GROUP
        groups = functional.pad(off, (0, short)).view(len(off), -1, _GROUP).sum(2)
        scale = reference.square().mean()
        within = bool((groups <= _GROUP * MAX_ROW_ERROR**2 * scale).all())
        return relative if within or relative != relative else float("inf")
