"""Quantised weights as plain matrices, one at a time, for torch to multiply with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import overload

import torch

from .expert_weights import ExpertWeights


class Dequantised(Sequence[torch.Tensor]):
    """E matrices [N, K] in ``dtype``, or [K, N] with ``transposed``. Each is computed when read, and not cached."""

    def __init__(self, weights: ExpertWeights, dtype: torch.dtype, *, transposed: bool) -> None:
        self._weights, self._dtype, self._transposed = weights, dtype, transposed

    def __len__(self) -> int:
        return self._weights.shape[0]

    @overload
    def __getitem__(self, expert: int) -> torch.Tensor: ...
    @overload
    def __getitem__(self, expert: slice) -> Sequence[torch.Tensor]: ...
    def __getitem__(self, expert: int | slice) -> torch.Tensor | Sequence[torch.Tensor]:
        if isinstance(expert, slice):
            return [self[index] for index in range(len(self))[expert]]
        w = self._weights.dequantize(self._dtype, range(len(self))[expert])
        return w.T if self._transposed else w
