"""``ExpertWeights`` as users import it: a bundle's row kernels write and read its codes on a GPU."""

from __future__ import annotations

from ..launch.weights import RowKernels
from ..weights import writing
from ..weights.expert_weights import ExpertWeights

__all__ = ["ExpertWeights"]

writing.kernels = RowKernels()
