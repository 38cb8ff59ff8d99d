"""Which variants a plan asks to compile for a capability, and which of the compiled ones can ship."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...artifacts.records.bundle import Variant
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem, RowOp
from ...kernels import hopper_w4a16, registry, rowops, search
from ...kernels.contract.config import Config, TileRows
from ...kernels.contract.spec import MAX_EXPERTS, MAX_EXPERTS_FALLBACK, Spec, takes_codes_of_x
from ...kernels.contract.words import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.rowops import RowOpSpec

# Silu in the epilogue: a tile has the gate columns and the up columns of half as many of y.
GATED_COLUMNS = (128, 256)
GATED_CONFIGS = 3

Candidates = Callable[[Op, DType, int], tuple[Config, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """What variants can stand in for each other.

    A product that has two names (``Problem.transposed``) has one family.
    """

    op: Op | RowOp
    dtype: DType
    layout: Layout
    fusion: Fusion

    @classmethod
    def of(cls, one: Problem | Variant | Spec | RowOpSpec) -> Family:
        """The family of a problem, or of a variant."""
        named: Problem | Variant | Spec | RowOpSpec = one
        if isinstance(one.op, Op) and one.layout is Layout.KN:
            named = Problem(one.op, one.dtype, 1, 1, 1, one.layout, one.fusion).canonical
        return cls(named.op, one.dtype, named.layout, one.fusion)

    @property
    def gemm(self) -> Op:
        """The op, of a family of problems."""
        if isinstance(self.op, RowOp):
            raise ValueError(f"{self} is no family of GEMMs")
        return self.op

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value}"
        text += f" w={self.layout.value}" if self.layout is not Layout.NK else ""
        return text + (f" fused={fused(self.fusion)}" if self.fusion else "")


@dataclass(frozen=True, slots=True)
class Pool:
    """Where the candidates come from: ``aligned`` to choose among, ``fallbacks`` so that any N and K run."""

    aligned: Candidates = search.candidates
    fallbacks: Candidates = search.fallbacks

    def candidates(self, family: Family, sm: int, ops: Iterable[Op] = ()) -> tuple[Config, ...]:
        """The aligned candidates of a family: all, or where rows are moved the first of each kind and tile size.

        Those of all of ``ops``, or else of the family's own. The cost model tells forms that move rows from the plain
        one by little: half the candidates do. Of silu in the epilogue it is the first of each width and order of tiles.
        None has a config that its form has no code for.
        """
        lists = (self.aligned(op, family.dtype, sm) for op in (tuple(ops) or (family.gemm,)))
        every = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
        if family.dtype.quantised:
            every = tuple(one for one in every if _compiles(family, one, sm))
        if not family.fusion:
            return every
        every = tuple(one for one in every if _compiles(family, one, sm))
        if optional(family):
            gated: dict[tuple[int, int], Config] = {}
            for config in every:
                if config.block_n in GATED_COLUMNS:
                    gated.setdefault((config.block_n, config.group_m), config)
            return tuple(itertools.islice(gated.values(), GATED_CONFIGS))
        firsts: dict[tuple[object, ...], Config] = {}
        for config in every:
            schedule = config.schedule if config.schedule.warp_specialized else None
            firsts.setdefault((config.block_m, config.block_n, config.block_k, schedule, config.cache), config)
        return tuple(firsts.values())


def _compiles(family: Family, config: Config, sm: int) -> bool:
    return not registry.refusal(Spec(family.gemm, family.dtype, config, family.layout, family.fusion), sm)


@functools.cache
def fused(fusion: Fusion) -> str:
    """What a variant does beside the product, e.g. ``gather``; empty for nothing."""
    return "+".join(str(one.name).lower() for one in Fusion if one and one in fusion)


def optional(one: Problem | Variant | Spec | Family) -> bool:
    """Whether the form is one that a layer does without where there is no code for it: silu in the epilogue."""
    return Fusion.SILU in one.fusion


def families(problems: Iterable[Problem]) -> dict[Family, list[Problem]]:
    """The problems by family, both in the problems' order."""
    found: dict[Family, list[Problem]] = {}
    for problem in problems:
        found.setdefault(Family.of(problem), []).append(problem)
    return found


def named(members: Iterable[Problem]) -> str:
    """What the problems of a family are called, e.g. ``dX bf16, forward bf16 w=kn``."""
    return ", ".join(dict.fromkeys(str(Family(one.op, one.dtype, one.layout, one.fusion)) for one in members))


def specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[Spec, ...]:
    """Every variant to compile: the aligned candidates of each family, then its unaligned fallbacks.

    What is named dX and is the forward of w [E, K, N] has the candidates of a forward, too, which are for few rows.
    """
    found: list[Spec] = []
    for family, members in families(problems).items():
        ops = sorted({problem.op for problem in members}, key=lambda op: op is not family.op)  # its own first
        aligned = pool.candidates(family, sm, ops)
        rest = pool.fallbacks(family.gemm, family.dtype, sm)
        found += compilable(family, aligned, rest, [problem.E for problem in members])
    return tuple(dict.fromkeys(found))


def low_rank_specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[Spec, ...]:
    """The variants that add a low-rank part to the products of bf16 weights, plain and gathering: LoRA's.

    And to those of codes in order, plain, with fitted tiles: rows are gathered for these beforehand.

    Of each kind of tile the first that is warp-specialised, and of the others the first of each height. No plan has
    such problems, and nothing is measured of them: which one runs is chosen when it is called (``decide.py``).
    """
    found: dict[Spec, None] = {}
    for problem in problems:
        coded = problem.dtype in hopper_w4a16.DTYPES and problem.layout is Layout.NK
        forms = (Fusion.NONE,) if coded else (Fusion.NONE, Fusion.GATHER)
        if problem.op is Op.DW or problem.fusion not in forms or not (coded or problem.dtype is DType.BF16):
            continue
        form: Fusion = problem.fusion
        family = Family.of(problem._replace(fusion=form | Fusion.LOW_RANK))
        firsts: dict[tuple[object, ...], Config] = {}
        for config in pool.candidates(family, sm, (problem.op,)):
            if coded and config.rows is not TileRows.FITTED:
                continue
            own = config.schedule.warp_specialized
            kind = (config.schedule, config.rows, config.block_m, config.block_n) if own else (config.block_m,)
            firsts.setdefault(kind, config)
        found |= dict.fromkeys(compilable(family, firsts.values(), (), [problem.E]))
    return tuple(found)


def compilable(family: Family, aligned: Iterable[Config], rest: Iterable[Config], experts: Sequence[int]) -> list[Spec]:
    """A family's variants of these configs, aligned and for any N and K, that serve some of these numbers of experts.

    One cubin serves every E up to 512. Where a family has a larger one, its variants take any number, but for
    those whose code counts 512 at most: they serve the others. Silu in the epilogue has no code for any N and K, nor
    have codes that are put in order: those of other N and K are not.
    """
    quantised = family.dtype.quantised
    if optional(family) or (quantised and family.layout is not Layout.STORED):
        rest = ()
    enough = MAX_EXPERTS if max(experts) <= MAX_EXPERTS else MAX_EXPERTS_FALLBACK
    found = []
    for configs, alignment, most in (
        (aligned, ALIGNMENT_BYTES, enough),
        (rest, 1, enough if quantised else MAX_EXPERTS_FALLBACK),
    ):
        for config in configs:
            counted = min(most, registry.limits_of(family.gemm, config, family.dtype).experts)
            if counted >= min(experts):
                form = (family.gemm, family.dtype, config, family.layout, family.fusion)
                found.append(Spec(*form, alignment, counted))
    return found


def has_candidates(family: Family, E: int, sm: int, pool: Pool) -> bool:
    """Whether some candidate of a family counts that many experts."""
    return any(
        registry.limits_of(family.gemm, config, family.dtype).experts >= E for config in pool.candidates(family, sm)
    )


def pass_specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[RowOpSpec, ...]:
    """The passes over rows that go with these problems: a layer of theirs needs them in each dtype, for any shape.

    x is quantised for products that the capability has code for, and that do not quantise it themselves.
    """
    every = [one for one in problems if not one.dtype.quantises_x or pool.candidates(Family.of(one), sm)]
    codes = {one.dtype for one in every if takes_codes_of_x(one.dtype, one.layout)}
    dtypes = tuple(dict.fromkeys(one.dtype for one in every))
    return rowops.specs(dtypes, frozenset(one.op for one in every), of_codes=codes)


def by_code(wanted: Iterable[Spec], sm: int) -> tuple[tuple[Spec, ...], ...]:
    """The specs in groups that are one and the same cubin: only the first of each is compiled.

    Pointer variants that gather are those that scatter, told so when they are launched.
    """
    groups: dict[object, list[Spec]] = {}
    for spec in wanted:
        made_of = (
            registry.arguments(spec),
            registry.boxes(spec),
            registry.constants(spec, sm),
            registry.divisibility(spec),
        )
        groups.setdefault((registry.entry_of(spec).name, spec.dtype, spec.config, repr(made_of)), []).append(spec)
    return tuple(map(tuple, groups.values()))


def to_compile(
    problems: Sequence[Problem], sm: int, pool: Pool, *, low_rank: bool = False
) -> tuple[Spec | RowOpSpec, ...]:
    """What a capability's candidates are made of: one of each group of GEMMs that share a cubin, and the passes.

    With ``low_rank`` also what adds a low-rank part.
    """
    more = low_rank_specs(problems, sm, pool) if low_rank else ()
    gemms = by_code((*specs(problems, sm, pool), *more), sm)
    return (*(group[0] for group in gemms), *pass_specs(problems, sm, pool))


def ships_unchosen(variant: Variant) -> bool:
    """Whether a variant ships although no choice names it: a fallback, for any N and K, or a pass over rows."""
    return variant.alignment == 1 or isinstance(variant.op, RowOp)


def serves(variant: Variant, problem: Problem) -> bool:
    """Whether ``problem`` is one that ``variant`` is chosen for: its family, its class of E, its alignment."""
    alignment = ALIGNMENT_BYTES if has_aligned_rows(problem) else 1
    same = Family.of(variant) == Family.of(problem)
    able = same and variant.alignment == alignment and variant.max_experts >= problem.E
    return able and registry.beyond(problem, Config.from_pairs(variant.config)) is None


CONFIG_LIMIT = 16  # of an op and dtype, in all their families, fallbacks included
