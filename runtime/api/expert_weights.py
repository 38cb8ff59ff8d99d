"""``ExpertWeights`` for users: on a GPU, a bundle's row kernels write and read its codes."""

from __future__ import annotations

from ..launch.weights import RowKernels
from ..weights import writing
from ..weights.expert_weights import ExpertWeights

__all__ = ["ExpertWeights"]

writing.kernels = RowKernels()
