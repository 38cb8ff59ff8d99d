"""Candidates: a bundle of every variant that a plan's problems may run on, for another machine to measure."""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ...artifacts.errors import CompileError, InputError
from ...artifacts.records import Kernel, Producer, Target, Variant
from ...kernels.arch import arch_of
from ...kernels.cost import rejection
from ..bundle.assemble import combined
from ..bundle.verify import sound
from ..compile.triton import Compiled, Maker, driver_for, kernels_of, producer_of
from ..plan.families import Family, families, named, optional
from ..plan.plan import BuildPlan
from ..plan.targets import target_of
from .incumbents import Carried


class SameCode:
    """An index of variants by their cubin and the problems that they can run."""

    def __init__(self, codes: Sequence[Compiled]) -> None:
        self._places: dict[tuple[Family, bytes], list[tuple[int, int]]] = {}
        for i, code in enumerate(codes):
            key = Family.of(code.variant), code.variant.cubin_sha256
            self._places.setdefault(key, []).append((code.variant.max_experts, i))

    def place(self, variant: Variant) -> int | None:
        """The first variant with equal code that serves as many experts; None if there is none."""
        places = self._places.get((Family.of(variant), variant.cubin_sha256), ())
        return next((i for most, i in places if most >= variant.max_experts), None)


@dataclass(frozen=True, slots=True)
class Candidates:
    """Compiled variants, with the tools and kernels that made them.

    ``carried`` are variants of other bundles, byte for byte: they ship if a choice names them.
    """

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    compiled: tuple[Compiled, ...]
    carried: tuple[Carried, ...] = ()

    @property
    def all_variants(self) -> tuple[Compiled, ...]:
        """All variants to choose from: ``compiled``, then ``carried``."""
        return (*self.compiled, *(carried.code for carried in self.carried))

    @classmethod
    def made_here(cls, sm: int, compiled: tuple[Compiled, ...]) -> Candidates:
        """The candidates that this machine's tools compiled for a capability, or that shipped compiled."""
        makers = [maker or _maker_here(sm) for maker in dict.fromkeys(code.maker for code in compiled)]
        return cls(
            target_of(sm),
            max((maker.min_driver for maker in makers), default=0),
            combined([maker.producer for maker in makers]) if makers else _NOTHING,
            kernels_of(compiled),
            compiled,
        )

    @classmethod
    def of_bundles(cls, sm: int, carried: Sequence[Carried]) -> Candidates:
        """Candidates of other bundles alone, for a machine that can't compile.

        Raises
        ------
        CompileError
            if there are none.
        """
        if not carried:
            raise CompileError(f"sm_{sm}: no bundle here has a variant that could be measured instead")
        first = carried[0]
        return cls(target_of(sm), first.min_driver, first.producer, (), (), tuple(carried))

    def with_others(self, others: Sequence[Carried]) -> Candidates:
        """Add other bundles' variants, except equal code and kernels whose source differs from these candidates'."""
        mine = {(Family.of(code.variant), code.variant.cubin_sha256) for code in self.compiled}
        sources = {(kernel.name, kernel.revision): kernel for kernel in self.kernels}
        more = tuple(
            other
            for other in others
            if (Family.of(other.code.variant), other.code.variant.cubin_sha256) not in mine
            and sources.get((other.kernel.name, other.kernel.revision), other.kernel) == other.kernel
        )
        return replace(self, carried=more)

    def with_codes(self, others: Sequence[Carried]) -> Candidates:
        """Add the missing code of choices taken over, if its kernels' sources are the same."""
        present = SameCode(self.all_variants)
        kernels = (*self.kernels, *(carried.kernel for carried in self.carried))
        sources = {(kernel.name, kernel.revision): kernel for kernel in kernels}
        more = tuple(
            other
            for other in others
            if present.place(other.code.variant) is None
            and sources.get((other.kernel.name, other.kernel.revision), other.kernel) == other.kernel
        )
        return replace(self, carried=(*self.carried, *more))

    def only(self, shas: Container[bytes]) -> Candidates:
        """Keep of ``carried`` only the cubins in ``shas``."""
        return replace(self, carried=tuple(c for c in self.carried if c.code.variant.cubin_sha256 in shas))

    def provenance_of(self, variants: Sequence[Compiled]) -> tuple[int, Producer, tuple[Kernel, ...]]:
        """(least driver, producer, kernels) of some of the variants."""
        ships = {code.variant for code in variants}
        others = [carried for carried in self.carried if carried.code.variant in ships]
        names = {(code.variant.kernel, code.variant.revision) for code in variants}
        kernels = dict.fromkeys((*self.kernels, *sorted((carried.kernel for carried in others), key=_kernel_key)))
        own = [self.producer] if self.compiled else []
        return (
            max([self.min_driver, *(carried.min_driver for carried in others)]),
            combined([*own, *dict.fromkeys(carried.producer for carried in others)]) if others else self.producer,
            tuple(kernel for kernel in kernels if (kernel.name, kernel.revision) in names),
        )


_NOTHING = Producer("none", "none", "none", ())  # for a bundle of carried variants alone


def _maker_here(sm: int) -> Maker:
    producer = producer_of(sm)
    return Maker(driver_for(sm, producer), producer)


def _kernel_key(kernel: Kernel) -> tuple[str, int]:
    return kernel.name, kernel.revision


def read_candidates(path: str | Path, plan: BuildPlan | None = None) -> Candidates:
    """Read a bundle's variants that can ship, all of it checked as by ``aot verify``.

    Raises
    ------
    BundleError
        if it can't be read, is damaged, or has code that this version can't launch.
    InputError
        if its capability is not supported, or it has no variants for a problem of ``plan``.
    """
    bundle = sound(str(path), pruned=True)
    target_of(bundle.target.sm)
    arch = arch_of(bundle.target.sm)
    codes = map(Compiled, bundle.variants, bundle.cubins)
    compiled = tuple(code for code in codes if rejection(code.variant, arch) is None)
    if plan is not None:
        there = {Family.of(code.variant) for code in compiled}
        wanted = families(plan.problems).items()
        missing = [named(members) for family, members in wanted if family not in there and not optional(family)]
        if missing:
            raise InputError(
                f"candidates '{path}': no variants of {', '.join(missing)}: run aot compile for the same --models and "
                "--ops"
            )
    return Candidates(bundle.target, bundle.min_driver, bundle.producer, bundle.kernels, compiled)
