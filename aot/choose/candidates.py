"""Candidates: a bundle of every variant that a plan's problems may run on, for another machine to measure."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from ...artifacts.errors import InputError
from ...artifacts.records.bundle import Kernel, Producer
from ...artifacts.records.target import Target
from ..bundle.verify import sound
from ..compile.triton import Compiled, driver_for, kernels_of, producer_of
from ..plan.families import Family, families, named, optional
from ..plan.plan import BuildPlan
from ..plan.targets import target_of


@dataclass(frozen=True, slots=True)
class Candidates:
    """Compiled variants, and what compiled them: all that a bundle takes over from them."""

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    compiled: tuple[Compiled, ...]

    @classmethod
    def made_here(cls, sm: int, compiled: tuple[Compiled, ...]) -> Candidates:
        """What this machine's tools have compiled for a capability."""
        producer = producer_of(sm)
        return cls(target_of(sm), driver_for(sm, producer), producer, kernels_of(compiled), compiled)

    def kernels_of(self, variants: tuple[Compiled, ...]) -> tuple[Kernel, ...]:
        """The kernels of some of the variants."""
        names = {one.variant.kernel for one in variants}
        return tuple(kernel for kernel in self.kernels if kernel.name in names)


def read_candidates(path: str | Path, plan: BuildPlan | None = None) -> Candidates:
    """A bundle's variants, all of them checked as ``aot verify`` does.

    Raises
    ------
    BundleError
        if it can't be read, is damaged, or has code that this version can't launch.
    InputError
        if it has no variants for a problem of ``plan``.
    """
    bundle = sound(str(path))
    compiled = tuple(map(Compiled, bundle.variants, bundle.cubins))
    if plan is not None:
        there = {Family.of(variant) for variant in bundle.variants}
        wanted = families(plan.problems).items()
        missing = [named(members) for family, members in wanted if family not in there and not optional(family)]
        if missing:
            raise InputError(
                f"candidates '{path}': no variants of {', '.join(missing)}: run aot compile for the same --models and "
                "--ops"
            )
    return Candidates(bundle.target, bundle.min_driver, bundle.producer, bundle.kernels, compiled)
