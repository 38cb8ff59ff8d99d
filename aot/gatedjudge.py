"""Whether the numbers of a product with silu in its epilogue are right: columns of all rows against the equation.

``judge.py``'s check is of linear forms. Here one column in eight of y is computed anew, silu(gate) * up of the fp32
product (IEEE), one at random of each eight: what a kernel loads, multiplies or stores at once, 8 columns and more,
can't be wrong unseen, at an eighth of the whole product's cost. That every element is finite is looked at, too.
"""

from __future__ import annotations

import torch
from torch.nn import functional

from ..artifacts.records.problem import Fusion, Problem
from ..kernels.contract.spec import gemm_of
from .judge import MAX_ROW_ERROR
from .launches import Tensors

_EACH = 8  # one column of so many is looked at
_GROUP = 8  # columns looked at that are judged together: 64 of y
_CHUNK_ELEMENTS = 1 << 26


class GatedJudge:
    """The reference of one weight: ``judge.error(...)`` of any result of a problem that uses it."""

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
        """The columns of ``result`` that are looked at: float32 [M, columns] in the sorted order of rows."""
        index = on.index if Fusion.GATHER in on.problem.fusion else None
        parts: list[torch.Tensor] = []
        start = 0
        step = max(1, _CHUNK_ELEMENTS // (on.rows.shape[1] + 2 * len(self._columns)))
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
        """The relative error of ``on.result``: NaN where one is not finite, infinite where 64 in a row are off."""
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
