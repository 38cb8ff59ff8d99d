"""Merge several bundles of one capability: the best claim for each problem, bucket and GPU, and all that it needs.

A claim is a bundle's choice for a problem and bucket. The first rule that tells two claims apart decides:

1. a measured claim beats a modelled one, whatever its age;
2. the kernel of the later revision (counted from the latest revision of that kernel in any input);
3. modelled by different versions of pretuned: the later version, whose cost model is better;
4. the lower time: both are of one GPU or one cost model, so comparable;
5. the later Triton, then the order of variants, runners-up and drivers, which has no meaning but is always the same.

Claims measured on different GPUs don't compete: each GPU keeps its own. GPUs are equal if their name, SM count and
memory (to 2 %) are. The order of the inputs decides nothing. A claim keeps its own runner-up. Everything else is a
union: models, problems, buckets, GPUs. Unaligned fallbacks ship in their latest revision; variants that no claim names
are dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.errors import BundleTooNew, BundleTooOld, InputError, TargetMismatch
from ...artifacts.records import Bundle, DType, Gpu, Kernel, Op, Problem, RowOp, Source
from ...kernels.entry import LAUNCH_ABI
from ..plan.families import CONFIG_LIMIT, Family, optional, ships_unchosen
from .assemble import BundleChoice, Provenance, VariantTable, assemble, combined, gpu_key, united, version


class Reason(enum.Enum):
    """The rule that decided between two claims, in the order of the rules."""

    MEASURED = "measured beats modelled"
    REVISION = "later kernel revision"
    COST_MODEL = "later cost model"
    TIME = "lower time"
    TIE = "equal: later Triton, or by the variants' order"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A cell where two bundles disagree for one GPU; ``kept`` and ``dropped`` are numbers of bundles."""

    problem: Problem
    bucket: int
    reason: Reason
    kept: int
    dropped: int
    winner: BundleChoice
    loser: BundleChoice


@dataclass(frozen=True, slots=True)
class TooMany:
    """An op and dtype with more configs than a build ships."""

    op: Op | RowOp
    dtype: DType
    configs: int


@dataclass(frozen=True, slots=True)
class Merged:
    """The result of a merge: the bundle, each cell with a conflict, and counts of the inputs.

    ``taken[i]`` choices come from input i. ``agreed`` choices were equal (except runners-up) in all of several bundles.
    ``unused`` variants of the inputs do not ship.
    """

    bundle: Bundle
    codes: VariantTable
    conflicts: tuple[Conflict, ...]
    taken: tuple[int, ...]
    agreed: int
    unused: int
    too_many: tuple[TooMany, ...]
    notes: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Input:
    """A bundle with its ranks: the lower number is preferred."""

    number: int
    bundle: Bundle
    version_rank: int
    triton_rank: int


_NO_GPU = -1  # the GPU index of choices that the cost model made
Key = tuple[int, int, int, int, int, tuple[int, ...], tuple[str, int, int, int]]


def merge(bundles: Mapping[str, Bundle]) -> Merged:
    """Merge bundles; the keys name them in messages.

    Raises
    ------
    TargetMismatch
        if they are for different capabilities.
    BundleTooOld, BundleTooNew
        if a variant's launch ABI is not this version's.
    InputError
        if there are fewer than two, or two have different sources for one revision of a kernel.
    """
    if len(bundles) < 2:
        raise InputError(f"{len(bundles)} bundle given, wanted two or more different ones to merge")
    _check(bundles)
    all_bundles = list(bundles.values())
    codes = VariantTable(all_bundles)
    inputs = _ranked(all_bundles)
    revisions: dict[str, int] = {}
    for code in codes.codes:
        name = code.variant.kernel
        revisions[name] = max(revisions.get(name, 0), code.variant.revision)
    behind = [revisions[code.variant.kernel] - code.variant.revision for code in codes.codes]
    gpus = _numbered([gpu for bundle in all_bundles for gpu in bundle.gpus])

    cells: dict[tuple[Problem, int], dict[int, list[tuple[Key, _Input, BundleChoice]]]] = {}
    for source in inputs:
        for problem, row in source.bundle.choices.items():
            for choice in row:
                claim = codes.claim(source.bundle, choice)
                gpu = _NO_GPU if claim.gpu is None else gpus[claim.gpu]
                cell = cells.setdefault((problem, choice.bucket), {})
                cell.setdefault(gpu, []).append((_key(source, claim, behind), source, claim))

    winners: dict[Problem, list[BundleChoice]] = {}
    conflicts: list[Conflict] = []
    taken = [0] * len(inputs)
    agreed = 0
    for (problem, bucket), cell in cells.items():
        modelled = cell.pop(_NO_GPU, [])
        cell.setdefault(min(cell, default=_NO_GPU), []).extend(modelled)  # modelled claims lose to measured claims
        for rivals in cell.values():
            rivals.sort(key=lambda entry: entry[0])
            best_key, best, winner = rivals[0]
            winners.setdefault(problem, []).append(winner)
            taken[best.number] += 1
            others = [entry for entry in rivals[1:] if _seen(entry[2]) != _seen(winner)]
            agreed += len(rivals) > 1 and not others
            for key, other, loser in others:
                reason = _reason(best_key, key)
                conflicts.append(Conflict(problem, bucket, reason, best.number, other.number, winner, loser))
    bundle = assemble(
        Provenance(
            all_bundles[0].target,
            max(bundle.min_driver for bundle in all_bundles),
            combined([bundle.producer for bundle in all_bundles]),
            tuple({kernel: None for bundle in all_bundles for kernel in bundle.kernels}),
            united(model for bundle in all_bundles for model in bundle.models),
        ),
        codes,
        winners,
        _fallbacks(inputs, codes, behind),
    )
    too_many = _too_many(bundle)
    return Merged(
        bundle,
        codes,
        tuple(sorted(conflicts, key=lambda conflict: (conflict.problem.sort_key, conflict.bucket, conflict.dropped))),
        tuple(taken),
        agreed,
        len(codes.codes) - len(bundle.variants),
        too_many,
        _notes(all_bundles, conflicts, too_many),
    )


def _seen(claim: BundleChoice) -> tuple[object, ...]:
    """The parts of a claim that must be equal for two bundles to agree: all but the runner-up."""
    return (claim.variant, claim.source, claim.time_ns, claim.gpu, claim.torch_ns)


def _check(bundles: Mapping[str, Bundle]) -> None:
    first_path, first = next(iter(bundles.items()))
    sources: dict[tuple[str, int], tuple[Kernel, str]] = {}
    for path, bundle in bundles.items():
        if bundle.target != first.target:
            raise TargetMismatch(
                f"bundle {path!r} is for {bundle.target}, {first_path!r} for {first.target}: "
                "merge those of one capability; the runtime takes several bundles side by side"
            )
        for i, variant in enumerate(bundle.variants):
            if variant.abi != LAUNCH_ABI:
                kind = BundleTooOld if variant.abi < LAUNCH_ABI else BundleTooNew
                todo = "Build it again with aot build" if variant.abi < LAUNCH_ABI else "Upgrade pretuned"
                raise kind(
                    f"bundle {path!r}, variant {i}: launch ABI {variant.abi}, this version writes {LAUNCH_ABI}. {todo}"
                )
        for kernel in bundle.kernels:
            first_kernel, where = sources.setdefault((kernel.name, kernel.revision), (kernel, path))
            if first_kernel != kernel:
                raise InputError(
                    f"bundle {path!r}: kernel {kernel.name} of revision {kernel.revision} has the source "
                    f"{kernel.source_sha256.hex()[:12]}, in {where!r} it is {first_kernel.source_sha256.hex()[:12]}. "
                    "One of them was built from changed sources: build it again"
                )


def _ranked(bundles: Sequence[Bundle]) -> list[_Input]:
    versions = [version(bundle.producer.pretuned) for bundle in bundles]
    tritons = [version(bundle.producer.triton) for bundle in bundles]
    newest, newest_triton = sorted(set(versions), reverse=True), sorted(set(tritons), reverse=True)
    return [
        _Input(i, bundle, newest.index(versions[i]), newest_triton.index(tritons[i]))
        for i, bundle in enumerate(bundles)
    ]


def _numbered(gpus: Iterable[Gpu]) -> dict[Gpu, int]:
    """Number the GPUs; entries of one GPU model share a number."""
    groups: list[list[Gpu]] = []
    for gpu in sorted(set(gpus), key=gpu_key):
        if groups and groups[-1][0].is_like(gpu):
            groups[-1].append(gpu)
        else:
            groups.append([gpu])
    return {gpu: number for number, group in enumerate(groups) for gpu in group}


def _key(source: _Input, claim: BundleChoice, behind: Sequence[int]) -> Key:
    measured = claim.gpu is not None
    rank = 0 if measured else source.version_rank
    tied = claim.variant, *((-1, -1) if claim.runner_up is None else (claim.runner_up, claim.runner_up_ns or 0))
    gpu = ("", 0, 0, 0) if claim.gpu is None else gpu_key(claim.gpu)
    return (not measured, behind[claim.variant], rank, claim.torch_ns or claim.time_ns, source.triton_rank, tied, gpu)


def _reason(winner: Key, loser: Key) -> Reason:
    order = (Reason.MEASURED, Reason.REVISION, Reason.COST_MODEL, Reason.TIME)
    for reason, mine, other in zip(order, winner, loser, strict=False):
        if mine != other:
            return reason
    return Reason.TIE


def _fallbacks(inputs: Sequence[_Input], codes: VariantTable, behind: Sequence[int]) -> list[int]:
    """The fallbacks and row kernels of the latest revision in each family: one for a config, from the latest Triton."""
    best: dict[tuple[Family, int, object], tuple[tuple[int, int, bytes], int]] = {}
    least: dict[tuple[Family, int], int] = {}
    for source in inputs:
        for place in codes.places(source.bundle):
            variant = codes[place]
            if ships_unchosen(variant):
                family = (Family.of(variant), variant.max_experts)
                least[family] = min(behind[place], least.get(family, behind[place]))
                key = (behind[place], source.triton_rank, variant.cubin_sha256)
                name = (*family, (variant.kernel, variant.alignment, variant.config))
                best[name] = min((key, place), best.get(name, (key, place)))
    return [place for (family, experts, _), (key, place) in best.items() if key[0] == least[family, experts]]


def _too_many(bundle: Bundle) -> tuple[TooMany, ...]:
    configs: dict[tuple[Op | RowOp, DType], set[object]] = {}
    for variant in (variant for variant in bundle.variants if not optional(variant)):
        configs.setdefault((Family.of(variant).op, variant.dtype), set()).add(variant.config)
    return tuple(TooMany(*group, len(members)) for group, members in configs.items() if len(members) > CONFIG_LIMIT)


def _notes(bundles: Sequence[Bundle], conflicts: Sequence[Conflict], too_many: Sequence[TooMany]) -> tuple[str, ...]:
    notes = []
    if any(conflict.loser.source is Source.MEASURED for conflict in conflicts if conflict.reason is Reason.REVISION):
        notes.append("times of an earlier kernel revision gave way to those of a later one")
    if len({bundle.producer.compile_options for bundle in bundles}) > 1:
        notes.append("the bundles were compiled with different options: only those that all share are recorded")
    notes += [
        f"{group.op.value} {group.dtype.value} ships {group.configs} configs, a build at most "
        f"{CONFIG_LIMIT}: all are kept, as each is a choice, a runner-up or a fallback"
        for group in too_many
    ]
    return tuple(notes)
