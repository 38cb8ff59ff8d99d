"""The variants that a plan compiles for a capability, and which of the compiled variants can ship."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ...artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp, Variant
from ...kernels import hopper_w4a16, hopper_w8a8_block, registry, rowops, search
from ...kernels.entry import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import MAX_EXPERTS, MAX_EXPERTS_FALLBACK, Config, Spec, TileRows, reads_in_place, takes_codes_of_x

# Silu in the epilogue: a tile has the gate columns and the up columns of half as many of y.
GATED_COLUMNS = (128, 256)
GATED_CONFIGS = 3

Candidates = Callable[[Op, DType, int], tuple[Config, ...]]


@dataclass(frozen=True, slots=True)
class Family:
    """Variants that can replace each other.

    A product with two names (``Problem.transposed``) has one family.
    """

    op: Op | RowOp
    dtype: DType
    layout: Layout
    fusion: Fusion

    @classmethod
    def of(cls, source: Problem | Variant | Spec | RowOpSpec) -> Family:
        """The family of a problem or a variant."""
        named: Problem | Variant | Spec | RowOpSpec = source
        if isinstance(source.op, Op) and source.layout is Layout.KN:
            named = Problem(source.op, source.dtype, 1, 1, 1, source.layout, source.fusion).canonical
        return cls(named.op, source.dtype, named.layout, source.fusion)

    @property
    def gemm(self) -> Op:
        """The op of a family of problems; ValueError for a row kernel's family."""
        if isinstance(self.op, RowOp):
            raise ValueError(f"{self} is no family of GEMMs")
        return self.op

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value}"
        text += f" w={self.layout.value}" if self.layout is not Layout.NK else ""
        return text + (f" fused={fused(self.fusion)}" if self.fusion else "")


@dataclass(frozen=True, slots=True)
class Pool:
    """The configs to try: ``aligned`` are candidates to choose among, ``fallbacks`` run any N and K.

    With ``new_weights`` the row kernels of quantised weights, which quantise, prepare and restore them, are compiled,
    too.
    """

    aligned: Candidates = search.candidates
    fallbacks: Candidates = search.fallbacks
    new_weights: bool = False

    def candidates(self, family: Family, sm: int, ops: Iterable[Op] = ()) -> tuple[Config, ...]:
        """The aligned candidates of a family, for ``ops`` or else for the family's own op.

        The plain product gets all of them. A family that moves rows gets the first config of each kind and tile size:
        the cost model can hardly tell it from the plain product, and half the candidates suffice. Silu in the epilogue
        gets the first config of each width and tile order. Configs without code are left out.
        """
        lists = (self.aligned(op, family.dtype, sm) for op in (tuple(ops) or (family.gemm,)))
        configs = tuple(dict.fromkeys(itertools.chain.from_iterable(lists)))
        if family.dtype.quantised:
            configs = tuple(config for config in configs if _compiles(family, config, sm))
        if not family.fusion:
            return configs
        configs = tuple(config for config in configs if _compiles(family, config, sm))
        if optional(family):
            gated: dict[tuple[int, int], Config] = {}
            for config in configs:
                if config.block_n in GATED_COLUMNS:
                    gated.setdefault((config.block_n, config.group_m), config)
            return tuple(itertools.islice(gated.values(), GATED_CONFIGS))
        firsts: dict[tuple[object, ...], Config] = {}
        for config in configs:
            schedule = config.schedule if config.schedule.warp_specialized else None
            firsts.setdefault((config.block_m, config.block_n, config.block_k, schedule, config.cache), config)
        return tuple(firsts.values())


def _compiles(family: Family, config: Config, sm: int) -> bool:
    return not registry.refusal(Spec(family.gemm, family.dtype, config, family.layout, family.fusion), sm)


@functools.cache
def fused(fusion: Fusion) -> str:
    """The fusions by name, e.g. ``gather``; empty for none."""
    return "+".join(str(member.name).lower() for member in Fusion if member and member in fusion)


def optional(source: Problem | Variant | Spec | Family) -> bool:
    """True for silu in the epilogue: a layer runs without it if there is no code for it."""
    return Fusion.SILU in source.fusion


def families(problems: Iterable[Problem]) -> dict[Family, list[Problem]]:
    """Group problems by family; both are in the problems' order."""
    by_family: dict[Family, list[Problem]] = {}
    for problem in problems:
        by_family.setdefault(Family.of(problem), []).append(problem)
    return by_family


def named(members: Iterable[Problem]) -> str:
    """Name the problems of a family, e.g. ``dX bf16, forward bf16 w=kn``."""
    return ", ".join(dict.fromkeys(str(Family(p.op, p.dtype, p.layout, p.fusion)) for p in members))


def specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[Spec, ...]:
    """Every variant to compile: the aligned candidates of each family, then its unaligned fallbacks.

    dX that is computed as the forward of w [E, K, N] gets a forward's candidates too, which suit few rows.
    """
    variants: list[Spec] = []
    for family, members in families(problems).items():
        ops = sorted({problem.op for problem in members}, key=lambda op: op is not family.op)  # the family's op first
        aligned = pool.candidates(family, sm, ops)
        rest = pool.fallbacks(family.gemm, family.dtype, sm)
        variants += compilable(family, aligned, rest, [problem.E for problem in members])
    return tuple(dict.fromkeys(variants))


def low_rank_specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[Spec, ...]:
    """The variants that add a low-rank part (LoRA).

    Products of bf16 weights get it plain and gathering; products of prepared weights get it plain, with fitted tiles,
    as their rows are gathered beforehand. There is one variant for each kind of warp-specialised tile, and one for each
    height of the others. No plan has such problems and nothing is measured for them: runtime/dispatch/decide.py selects
    a variant at the call.
    """
    variants: dict[Spec, None] = {}
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
        variants |= dict.fromkeys(compilable(family, firsts.values(), (), [problem.E]))
    return tuple(variants)


def starts_specs(problems: Iterable[Problem], sm: int) -> tuple[Spec, ...]:
    """The variants that read codes of x where they arrive, for padded rows: one of each tile.

    No plan has such problems, like those of ``low_rank_specs``; ``decide.py`` selects a variant at the call.
    """
    variants: dict[Spec, None] = {}
    for problem in problems:
        if problem.fusion or not reads_in_place(problem):
            continue
        family = Family.of(problem._replace(fusion=Fusion.STARTS))
        able = [config for config in hopper_w8a8_block.STARTS_CONFIGS if _compiles(family, config, sm)]
        variants |= dict.fromkeys(compilable(family, able, (), [problem.E]))
    return tuple(variants)


def training_specs(problems: Iterable[Problem], sm: int) -> tuple[tuple[Spec, ...], tuple[RowOpSpec, ...]]:
    """The variants of fp8 training with fp8 128x128 block weights: dW of codes, and the row kernels that make codes.

    No plan has such problems, like those of ``starts_specs``.
    """
    able = any(problem.dtype is DType.FP8_BLOCK and problem.layout is Layout.NK for problem in problems)
    return search.of_training(sm) if able else ((), ())


def compilable(family: Family, aligned: Iterable[Config], rest: Iterable[Config], experts: Sequence[int]) -> list[Spec]:
    """A family's variants of these configs that serve some of these numbers of experts, aligned and for any N and K.

    One cubin serves every E up to 512. If a family has a larger E, its variants take any number, except those whose
    code counts at most 512: they serve the smaller E. Silu in the epilogue and prepared weights have no variants for
    any N and K.
    """
    quantised = family.dtype.quantised
    if optional(family) or (quantised and family.layout is not Layout.STORED):
        rest = ()
    enough = MAX_EXPERTS if max(experts) <= MAX_EXPERTS else MAX_EXPERTS_FALLBACK
    variants = []
    for configs, alignment, most in (
        (aligned, ALIGNMENT_BYTES, enough),
        (rest, 1, enough if quantised else MAX_EXPERTS_FALLBACK),
    ):
        for config in configs:
            counted = min(most, registry.limits_of(family.gemm, config, family.dtype).experts)
            if counted >= min(experts):
                form = (family.gemm, family.dtype, config, family.layout, family.fusion)
                variants.append(Spec(*form, alignment, counted))
    return variants


def has_candidates(family: Family, E: int, sm: int, pool: Pool) -> bool:
    """True if some candidate of a family supports E experts."""
    return any(
        registry.limits_of(family.gemm, config, family.dtype).experts >= E for config in pool.candidates(family, sm)
    )


def row_kernel_specs(problems: Iterable[Problem], sm: int, pool: Pool) -> tuple[RowOpSpec, ...]:
    """The row kernels that layers with these problems need, in each dtype, for any shape.

    x is quantised for products that the capability has code for, unless they quantise it themselves.
    """
    needed = [p for p in problems if not p.dtype.quantises_x or pool.candidates(Family.of(p), sm)]
    codes = {problem.dtype for problem in needed if takes_codes_of_x(problem.dtype, problem.layout)}
    dtypes = tuple(dict.fromkeys(problem.dtype for problem in needed))
    of_rows = rowops.specs(dtypes, frozenset(problem.op for problem in needed), of_codes=codes)
    more = (*rowops.weight_specs(dtypes), *training_specs(problems, sm)[1]) if pool.new_weights else ()
    return of_rows + more


def by_code(wanted: Iterable[Spec], sm: int) -> tuple[tuple[Spec, ...], ...]:
    """Group the specs that compile to one and the same cubin; only the first of a group is compiled.

    Pointer variants that gather and those that scatter share a cubin: a launch argument selects which.
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
    """Everything to compile for a capability: one spec of each group of GEMMs that share a cubin, and the row kernels.

    ``low_rank``: see ``unmeasured_specs``.
    """
    gemms = by_code((*specs(problems, sm, pool), *unmeasured_specs(problems, sm, pool, low_rank=low_rank)), sm)
    return (*(group[0] for group in gemms), *row_kernel_specs(problems, sm, pool))


def unmeasured_specs(problems: Sequence[Problem], sm: int, pool: Pool, *, low_rank: bool = False) -> tuple[Spec, ...]:
    """The GEMMs that no plan has: with new weights dW of codes.

    With ``low_rank`` those that add a low-rank part, or read codes of padded rows where they arrive.
    """
    more = (*low_rank_specs(problems, sm, pool), *starts_specs(problems, sm)) if low_rank else ()
    return (*more, *(training_specs(problems, sm)[0] if pool.new_weights else ()))


def ships_unchosen(variant: Variant) -> bool:
    """True for variants that ship although no choice names them: fallbacks, row kernels, and dW of codes."""
    of_codes = variant.op is Op.DW and variant.dtype.quantised
    return variant.alignment == 1 or isinstance(variant.op, RowOp) or of_codes


def serves(variant: Variant, problem: Problem) -> bool:
    """True if ``variant`` can be chosen for ``problem``: same family, alignment and limits, and enough experts."""
    alignment = ALIGNMENT_BYTES if has_aligned_rows(problem) else 1
    same = Family.of(variant) == Family.of(problem)
    able = same and variant.alignment == alignment and variant.max_experts >= problem.E
    return able and registry.beyond(problem, Config.from_pairs(variant.config)) is None


CONFIG_LIMIT = 16  # configs of an op and dtype, in all their families, fallbacks included
