"""The capability that code was compiled for, and GPUs: those of measured times, and the one in this machine."""

from __future__ import annotations

import math

from ..tuples import NamedTuple

_TEGRA = 87


class Target(NamedTuple):
    """The capability that a cubin was compiled for. ``sm`` is 10 * major + minor.

    From sm_90 on Triton compiles ``arch_specific`` code, e.g. for ``sm_90a``, which runs on exactly that capability.
    Other code also runs on later minor revisions of its major revision. Tegra (Orin, sm_87) is the exception: its
    code and that of other GPUs are not compatible (CUDA C++ Programming Guide, Binary Compatibility).
    """

    sm: int
    arch_specific: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}{'a' if self.arch_specific else ''}"

    def runs_on(self, sm: int) -> bool:
        """Return whether a GPU of capability ``sm`` can load this code."""
        if self.arch_specific or _TEGRA in (sm, self.sm):
            return sm == self.sm
        return sm // 10 == self.sm // 10 and sm >= self.sm


class Gpu(NamedTuple):
    """A GPU that times were measured on. The driver is recorded but not compared by ``is_like``."""

    name: str
    sm_count: int
    memory_mib: int
    driver: int

    def is_like(self, other: Gpu) -> bool:
        """Return whether times on one GPU hold for the other: equal name and SM count, memory within 2 %.

        Drivers reserve different amounts of memory.
        """
        near = abs(self.memory_mib - other.memory_mib) * 50 <= max(self.memory_mib, other.memory_mib)
        return (self.name, self.sm_count) == (other.name, other.sm_count) and near


def same_gpu(a: Gpu | None, b: Gpu | None) -> bool:
    """Return whether two times can be compared: measured on like GPUs, or both modelled (None)."""
    return a is b if a is None or b is None else a.is_like(b)


def gpus_apart(a: Gpu, b: Gpu) -> float:
    """Return the distance of two GPUs of one capability, in doublings of SMs plus doublings of memory."""
    return abs(math.log2(a.sm_count / b.sm_count)) + abs(math.log2(a.memory_mib / b.memory_mib))


class LocalGpu(NamedTuple):
    """A GPU that calls run on. ``sm`` is 10 * major + minor.

    Without a GPU (``explain(..., sm=90)``) the name is empty, so that no time counts as measured on it, and the driver
    is 0, which means unknown.
    """

    sm: int
    gpu: Gpu

    def __str__(self) -> str:
        if not self.gpu.name:
            return f"any GPU of capability {self.sm // 10}.{self.sm % 10}"
        return f"{self.gpu.name} ({self.sm // 10}.{self.sm % 10}, {self.gpu.sm_count} SMs, {self.gpu.memory_mib} MiB)"


def cuda_version(number: int) -> str:
    """Return "12.8" for 12080, a version in cuDriverGetVersion's numbers."""
    return f"{number // 1000}.{number % 1000 // 10}"
