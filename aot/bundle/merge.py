"""Several bundles of one capability -> one: the best claim for each problem, bucket and GPU, and what it needs.

Which claim wins, by the first of these that tells them apart:

1. a measured one beats a modelled one: measured code is known, whatever its age;
2. the kernel of the later revision (counted from the latest revision of that kernel in any input);
3. modelled by different versions of pretuned: the later one's, as its cost model knows more;
4. the lower time: one GPU, or one cost model, and so comparable;
5. the later Triton, then the order of variants, runners-up and drivers: no meaning, but always the same, as two
   claims that are equal in all this are one.

Claims that were measured on different GPUs are no rivals: each GPU keeps its own. A GPU is one by its name, SM count
and memory (to 2 %). The order of the inputs decides nothing. A claim keeps its own runner-up. Everything else is a
union: models, problems, buckets, GPUs; unaligned fallbacks ship in their latest revision; variants that no claim names
are dropped.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.errors import BundleTooNew, BundleTooOld, InputError, TargetMismatch
from ...artifacts.records.bundle import Bundle, Kernel, Source
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Op, Problem, RowOp
from ...artifacts.records.target import Gpu
from ...kernels.contract.words import LAUNCH_ABI
from ..plan.families import CONFIG_LIMIT, Family, optional, ships_unchosen
from .assemble import (
    BundleChoice,
    Provenance,
    VariantTable,
    assemble,
    combined,
    gpu_key,
    united,
    version,
)


class Reason(enum.Enum):
    """What decided between two claims, in the order in which it is asked."""

    MEASURED = "measured beats modelled"
    REVISION = "later kernel revision"
    COST_MODEL = "later cost model"
    TIME = "lower time"
    TIE = "equal: later Triton, or by the variants' order"


@dataclass(frozen=True, slots=True)
class Conflict:
    """A cell that two bundles see differently on one GPU: ``kept`` and ``dropped`` are numbers of bundles."""

    problem: Problem
    bucket: int
    reason: Reason
    kept: int
    dropped: int
    winner: BundleChoice
    loser: BundleChoice


@dataclass(frozen=True, slots=True)
class TooMany:
    """An op and dtype that ships more configs than one build would."""

    op: Op | RowOp
    dtype: DType
    configs: int


@dataclass(frozen=True, slots=True)
class Merged:
    """A merge: the bundle, each cell that was in doubt, and what the inputs held.

    ``taken[i]`` choices come from input i. ``agreed`` choices were the same (but for runners-up) in all of several
    bundles. ``unused`` variants of the inputs ship no more.
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
    """A bundle and its ranks: the lower number is preferred."""

    number: int
    bundle: Bundle
    version_rank: int
    triton_rank: int


_NO_GPU = -1  # the number of what is modelled
Key = tuple[int, int, int, int, int, tuple[int, ...], tuple[str, int, int, int]]


def merge(bundles: Mapping[str, Bundle]) -> Merged:
    """One bundle of all; the keys name them in messages.

    Raises
    ------
    TargetMismatch
        if they are for different capabilities.
    BundleTooOld, BundleTooNew
        if a variant's launch ABI is not the one that this version writes.
    InputError
        if there are fewer than two, or two call different sources one revision of a kernel.
    """
    if len(bundles) < 2:
        raise InputError(f"{len(bundles)} bundle given, wanted two or more different ones to merge")
    _check(bundles)
    every = list(bundles.values())
    codes = VariantTable(every)
    inputs = _ranked(every)
    revisions: dict[str, int] = {}
    for code in codes.codes:
        name = code.variant.kernel
        revisions[name] = max(revisions.get(name, 0), code.variant.revision)
    behind = [revisions[code.variant.kernel] - code.variant.revision for code in codes.codes]
    gpus = _numbered([gpu for one in every for gpu in one.gpus])

    found: dict[tuple[Problem, int], dict[int, list[tuple[Key, _Input, BundleChoice]]]] = {}
    for one in inputs:
        for problem, row in one.bundle.choices.items():
            for choice in row:
                claim = codes.claim(one.bundle, choice)
                gpu = _NO_GPU if claim.gpu is None else gpus[claim.gpu]
                cell = found.setdefault((problem, choice.bucket), {})
                cell.setdefault(gpu, []).append((_key(one, claim, behind), one, claim))

    winners: dict[Problem, list[BundleChoice]] = {}
    conflicts: list[Conflict] = []
    taken = [0] * len(inputs)
    agreed = 0
    for (problem, bucket), cell in found.items():
        modelled = cell.pop(_NO_GPU, [])
        cell.setdefault(min(cell, default=_NO_GPU), []).extend(modelled)  # beside what was measured they lose
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
            every[0].target,
            max(one.min_driver for one in every),
            combined([one.producer for one in every]),
            tuple({kernel: None for one in every for kernel in one.kernels}),
            united(model for one in every for model in one.models),
        ),
        codes,
        winners,
        _fallbacks(inputs, codes, behind),
    )
    too_many = _too_many(bundle)
    return Merged(
        bundle,
        codes,
        tuple(sorted(conflicts, key=lambda one: (one.problem.sort_key, one.bucket, one.dropped))),
        tuple(taken),
        agreed,
        len(codes.codes) - len(bundle.variants),
        too_many,
        _notes(every, conflicts, too_many),
    )


def _seen(claim: BundleChoice) -> tuple[object, ...]:
    """What a claim says of its variant: two that differ in their runners-up alone agree."""
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
            known, where = sources.setdefault((kernel.name, kernel.revision), (kernel, path))
            if known != kernel:
                raise InputError(
                    f"bundle {path!r}: kernel {kernel.name} of revision {kernel.revision} has the source "
                    f"{kernel.source_sha256.hex()[:12]}, in {where!r} it is {known.source_sha256.hex()[:12]}. One of "
                    "them was built from changed sources: build it again"
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
    """Each GPU's number: one for all entries that are the same GPU."""
    groups: list[list[Gpu]] = []
    for gpu in sorted(set(gpus), key=gpu_key):
        if groups and groups[-1][0].is_like(gpu):
            groups[-1].append(gpu)
        else:
            groups.append([gpu])
    return {gpu: number for number, group in enumerate(groups) for gpu in group}


def _key(one: _Input, claim: BundleChoice, behind: Sequence[int]) -> Key:
    measured = claim.gpu is not None
    rank = 0 if measured else one.version_rank
    tied = claim.variant, *((-1, -1) if claim.runner_up is None else (claim.runner_up, claim.runner_up_ns or 0))
    gpu = ("", 0, 0, 0) if claim.gpu is None else gpu_key(claim.gpu)
    return (not measured, behind[claim.variant], rank, claim.torch_ns or claim.time_ns, one.triton_rank, tied, gpu)


def _reason(winner: Key, loser: Key) -> Reason:
    order = (Reason.MEASURED, Reason.REVISION, Reason.COST_MODEL, Reason.TIME)
    for reason, mine, other in zip(order, winner, loser, strict=False):
        if mine != other:
            return reason
    return Reason.TIE


def _fallbacks(inputs: Sequence[_Input], codes: VariantTable, behind: Sequence[int]) -> list[int]:
    """Of each family the fallbacks (or passes) of the latest revision, one of each config: from the later Triton."""
    best: dict[tuple[Family, int, object], tuple[tuple[int, int, bytes], int]] = {}
    least: dict[tuple[Family, int], int] = {}
    for one in inputs:
        for place in codes.places(one.bundle):
            variant = codes[place]
            if ships_unchosen(variant):
                family = (Family.of(variant), variant.max_experts)
                least[family] = min(behind[place], least.get(family, behind[place]))
                key = (behind[place], one.triton_rank, variant.cubin_sha256)
                name = (*family, (variant.kernel, variant.alignment, variant.config))
                best[name] = min((key, place), best.get(name, (key, place)))
    return [place for (family, experts, _), (key, place) in best.items() if key[0] == least[family, experts]]


def _too_many(bundle: Bundle) -> tuple[TooMany, ...]:
    configs: dict[tuple[Op | RowOp, DType], set[object]] = {}
    for one in (variant for variant in bundle.variants if not optional(variant)):
        configs.setdefault((Family.of(one).op, one.dtype), set()).add(one.config)
    return tuple(TooMany(*group, len(found)) for group, found in configs.items() if len(found) > CONFIG_LIMIT)


def _notes(bundles: Sequence[Bundle], conflicts: Sequence[Conflict], too_many: Sequence[TooMany]) -> tuple[str, ...]:
    notes = []
    if any(one.loser.source is Source.MEASURED for one in conflicts if one.reason is Reason.REVISION):
        notes.append("times of an earlier kernel revision gave way to those of a later one")
    if len({bundle.producer.compile_options for bundle in bundles}) > 1:
        notes.append("the bundles were compiled with different options: only those that all share are recorded")
    notes += [
        f"{one.op.value} {one.dtype.value} ships {one.configs} configs, a build at most "
        f"{CONFIG_LIMIT}: all are kept, as each is a choice, a runner-up or a fallback"
        for one in too_many
    ]
    return tuple(notes)
