"""Where code runs: the capability that it was compiled for, and a GPU."""

from __future__ import annotations

import math

from ..tuples import NamedTuple

_TEGRA = 87


class Target(NamedTuple):
    """The capability a cubin was compiled for.

    ``sm`` is 10 * major + minor. From 9.0 up Triton compiles for ``sm_90a`` and the like:
    ``arch_specific`` code, which runs on exactly that capability. Other code also runs on
    later minor revisions of the same major one; but for Tegra's (Orin, 8.7): its code and that of other
    GPUs are not compatible (CUDA C++ Programming Guide, Binary Compatibility).
    """

    sm: int
    arch_specific: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}{'a' if self.arch_specific else ''}"

    def runs_on(self, sm: int) -> bool:
        """Whether a GPU of capability ``sm`` can load this code."""
        if self.arch_specific or _TEGRA in (sm, self.sm):
            return sm == self.sm
        return sm // 10 == self.sm // 10 and sm >= self.sm


class Gpu(NamedTuple):
    """The GPU a time was measured on. The driver is recorded, and is no part of the identity."""

    name: str
    sm_count: int
    memory_mib: int
    driver: int

    def is_like(self, other: Gpu) -> bool:
        """Whether times of one hold for the other: name, SM count, memory (to 2 %: drivers reserve differently)."""
        near = abs(self.memory_mib - other.memory_mib) * 50 <= max(self.memory_mib, other.memory_mib)
        return (self.name, self.sm_count) == (other.name, other.sm_count) and near


def same_gpu(one: Gpu | None, other: Gpu | None) -> bool:
    """Whether times of one bundle compare: measured on one GPU, or (None) both the cost model's."""
    return one is other if one is None or other is None else one.is_like(other)


def gpus_apart(one: Gpu, other: Gpu) -> float:
    """How unlike two GPUs of one capability are, in doublings of SMs and of memory."""
    return abs(math.log2(one.sm_count / other.sm_count)) + abs(math.log2(one.memory_mib / other.memory_mib))


class LocalGpu(NamedTuple):
    """A GPU that code is to run on. ``sm`` is 10 * major + minor.

    A made-up one stands for a capability where there is no GPU (``explain(..., sm=90)``): its name is
    empty, so nothing counts as measured on it, and driver 0 means unknown.
    """

    sm: int
    gpu: Gpu

    def __str__(self) -> str:
        if not self.gpu.name:
            return f"any GPU of capability {self.sm // 10}.{self.sm % 10}"
        return f"{self.gpu.name} ({self.sm // 10}.{self.sm % 10}, {self.gpu.sm_count} SMs, {self.gpu.memory_mib} MiB)"


def cuda_version(number: int) -> str:
    """``12.8`` of 12080, as cuDriverGetVersion counts."""
    return f"{number // 1000}.{number % 1000 // 10}"
