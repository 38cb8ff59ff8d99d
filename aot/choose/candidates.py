"""Candidates: a bundle of every variant that a plan's problems may run on, for another machine to measure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records.bundle import Kernel, Producer, Variant
from ...artifacts.records.target import Target
from ...kernels.cost.resources import rejection
from ...kernels.hardware.arch import arch_of
from ..bundle.assemble import combined
from ..bundle.verify import sound
from ..compile.triton import Compiled, Maker, driver_for, kernels_of, producer_of
from ..plan.families import Family, families, named, optional
from ..plan.plan import BuildPlan
from ..plan.targets import target_of
from .incumbents import Carried


class SameCode:
    """Where each of some variants is, by its code and what it can run."""

    def __init__(self, every: Sequence[Compiled]) -> None:
        self._places: dict[tuple[Family, bytes], list[tuple[int, int]]] = {}
        for i, one in enumerate(every):
            key = Family.of(one.variant), one.variant.cubin_sha256
            self._places.setdefault(key, []).append((one.variant.max_experts, i))

    def place(self, variant: Variant) -> int | None:
        """The first that is the same code, for as many experts; None if there is none."""
        every = self._places.get((Family.of(variant), variant.cubin_sha256), ())
        return next((i for most, i in every if most >= variant.max_experts), None)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Compiled variants, and what compiled them: all that a bundle takes over from them.

    ``carried`` are beside them, byte for byte those of bundles that are there: they ship where a choice names them.
    """

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    compiled: tuple[Compiled, ...]
    carried: tuple[Carried, ...] = ()

    @property
    def every(self) -> tuple[Compiled, ...]:
        """All that there is to choose from: ``compiled``, then what is carried."""
        return (*self.compiled, *(one.code for one in self.carried))

    @classmethod
    def made_here(cls, sm: int, compiled: tuple[Compiled, ...]) -> Candidates:
        """What this machine's tools have compiled for a capability, or was compiled of the same sources before."""
        makers = [_maker_here(sm) if one is None else one for one in dict.fromkeys(one.maker for one in compiled)]
        return cls(
            target_of(sm),
            max((one.min_driver for one in makers), default=0),
            combined([one.producer for one in makers]) if makers else _NOTHING,
            kernels_of(compiled),
            compiled,
        )

    @classmethod
    def of_bundles(cls, sm: int, carried: Sequence[Carried]) -> Candidates:
        """Those of bundles that are there alone, where nothing can be compiled.

        Raises
        ------
        CompileError
            if there are none.
        """
        if not carried:
            raise CompileError(f"sm_{sm}: no bundle here has a variant that could be measured instead")
        first = carried[0]
        return cls(target_of(sm), first.min_driver, first.producer, (), (), tuple(carried))

    def beside(self, others: Sequence[Carried]) -> Candidates:
        """The same, and what others there are: not what is the same code, nor what is of other sources by one name."""
        mine = {(Family.of(one.variant), one.variant.cubin_sha256) for one in self.compiled}
        sources = {(one.name, one.revision): one for one in self.kernels}
        more = tuple(
            one
            for one in others
            if (Family.of(one.code.variant), one.code.variant.cubin_sha256) not in mine
            and sources.get((one.kernel.name, one.kernel.revision), one.kernel) == one.kernel
        )
        return replace(self, carried=more)

    def with_codes(self, others: Sequence[Carried]) -> Candidates:
        """Return these candidates and the missing code of choices taken over, if its sources are the same."""
        known = SameCode(self.every)
        sources = {(one.name, one.revision): one for one in (*self.kernels, *(one.kernel for one in self.carried))}
        more = tuple(
            one
            for one in others
            if known.place(one.code.variant) is None
            and sources.get((one.kernel.name, one.kernel.revision), one.kernel) == one.kernel
        )
        return replace(self, carried=(*self.carried, *more))

    def only(self, shas: Container[bytes]) -> Candidates:
        """The same, and of what is carried these cubins alone."""
        return replace(self, carried=tuple(one for one in self.carried if one.code.variant.cubin_sha256 in shas))

    def provenance_of(self, variants: Sequence[Compiled]) -> tuple[int, Producer, tuple[Kernel, ...]]:
        """(the least driver, what made them, their kernels) of some of the variants."""
        ships = {one.variant for one in variants}
        others = [one for one in self.carried if one.code.variant in ships]
        names = {(one.variant.kernel, one.variant.revision) for one in variants}
        kernels = dict.fromkeys((*self.kernels, *sorted((one.kernel for one in others), key=_kernel_key)))
        own = [self.producer] if self.compiled else []
        return (
            max([self.min_driver, *(one.min_driver for one in others)]),
            combined([*own, *dict.fromkeys(one.producer for one in others)]) if others else self.producer,
            tuple(kernel for kernel in kernels if (kernel.name, kernel.revision) in names),
        )


_NOTHING = Producer("none", "none", "none", ())  # of no variant: what a bundle holds is then carried


def _maker_here(sm: int) -> Maker:
    producer = producer_of(sm)
    return Maker(driver_for(sm, producer), producer)


def _kernel_key(kernel: Kernel) -> tuple[str, int]:
    return kernel.name, kernel.revision


def read_candidates(path: str | Path, plan: BuildPlan | None = None) -> Candidates:
    """A bundle's variants that can ship, all of it checked as ``aot verify`` does.

    Raises
    ------
    BundleError
        if it can't be read, is damaged, or has code that this version can't launch.
    InputError
        if it is for a capability that is not supported, or has no variants for a problem of ``plan``.
    """
    bundle = sound(str(path), pruned=True)
    target_of(bundle.target.sm)
    arch = arch_of(bundle.target.sm)
    every = map(Compiled, bundle.variants, bundle.cubins)
    compiled = tuple(one for one in every if rejection(one.variant, arch) is None)
    if plan is not None:
        there = {Family.of(one.variant) for one in compiled}
        wanted = families(plan.problems).items()
        missing = [named(members) for family, members in wanted if family not in there and not optional(family)]
        if missing:
            raise InputError(
                f"candidates '{path}': no variants of {', '.join(missing)}: run aot compile for the same --models and "
                "--ops"
            )
    return Candidates(bundle.target, bundle.min_driver, bundle.producer, bundle.kernels, compiled)
