"""``ExpertWeights``, with the row kernels that write them on a GPU."""

from __future__ import annotations

from ..launch import weights as _weights  # it registers its kernels
from ..weights.expert_weights import ExpertWeights

__all__ = ["ExpertWeights"]

_ = _weights
