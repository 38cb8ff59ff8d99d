"""The variants that could run a call, ranked. The ranking of the whole product is stated here, once.

A candidate ranks by, in this order:

1. whether it is of this capability: code built for a binary-compatible one, or compiled by this process, comes after;
2. whether it was chosen for this bucket or one of its neighbours, half or twice the rows, and if not how far from it:
   what was measured for a few rows says nothing of many;
3. ``Origin``: measured on this very GPU, measured on its capability, modelled for its capability,
   built for a binary-compatible one, compiled by this process because nothing else could run;
4. ``Match``: this problem and bucket, this problem at the nearest bucket, the cost model over the
   variants that are there, blended with what was measured around this problem and bucket (``neighbours.py``);
5. if on another GPU of its capability, how like this one that is, by SM count and memory;
6. the place of its bundle, in the order in which places are asked, and in one bundle the order of its GPUs.

So a bundle that PRETUNED_BUNDLES names and that is modelled does not hide what an installed package has measured.

Where no bundle can run a call, the candidates that ship do (``Snapshot.reserve``), in the cost model's order: of them
what a build would not leave out.

In the batch-invariant mode (``Snapshot.invariance``) only variants of one order of sums are candidates for a problem,
in whatever form: ``order_of``. Its choices and runners-up rank as above; where none for this bucket or a neighbour has
the order, it is as if no bundle had the problem. torch runs nothing.

A bundle that was held against what ran before (``Producer.held_against``), or that took over what other bundles have
measured, has a say in the problems and buckets of its measured choices alone: there it names nothing slower, of others
it knows nothing. What it has modelled is chosen anew among all variants, for this very GPU, as it would be without it.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ...artifacts.records import Choice, Fusion, Gpu, LocalGpu, Op, PlanRow, Problem, Source, Variant, gpus_apart
from ...artifacts.tuples import NamedTuple
from ...kernels import arch, registry
from ...kernels.entry import READS_ABI, torch_multiplies
from ...kernels.spec import Config, Schedule, Spec, code_of, config_of, gemm_of
from .. import verdicts
from .places import Kind
from .snapshot import Snapshot, Usable, View

if TYPE_CHECKING:
    from ...kernels.chips import Chip
    from ...kernels.cost_model import Ranker
    from ...kernels.entry import Order
    from .neighbours import Near, Neighbourhood

    _Fitting: TypeAlias = list[tuple[Usable, int, Variant]]
    _Ranked: TypeAlias = tuple[View, _Fitting, Ranker, Chip]


_NEAR = 1  # doublings of the rows
MOST_IDLE = 2048  # programs without a tile: each costs 1 ns or more, as one of a row kernel on an H200
_SMALL = 64  # an N and a K that every kernel can do


class Origin(enum.IntEnum):
    """The source of a candidate's choice, best first."""

    THIS_GPU = 0
    THIS_CAPABILITY = 1
    MODELLED = 2
    COMPATIBLE = 3
    COMPILED = 4


class Match(enum.IntEnum):
    """The match between a candidate's choice and the problem, best first."""

    EXACT = 0
    NEAREST_BUCKET = 1
    COST_MODEL = 2


class Candidate(NamedTuple):
    """A variant that can run the call. ``time_us`` was measured or modelled, as ``source`` says, at ``bucket``.

    ``gpu`` is the one that it was measured on. ``near`` is what was measured around the cell, where that counted.
    ``torch_us`` is torch's time, if torch's grouped_mm was measured faster on this very GPU: torch then runs a plain
    product into new memory. ``plan`` says what runs in its place for which calls, if its choice is for this very cell.
    """

    usable: Usable
    index: int  # type: ignore[assignment]  # (no search in a tuple)
    variant: Variant
    origin: Origin
    match: Match
    source: Source
    bucket: int
    time_us: float
    gpu: Gpu | None
    near: Near | None = None
    torch_us: float | None = None
    plan: tuple[PlanRow, ...] = ()

    @property
    def config(self) -> Config:
        """The variant's config."""
        return Config.from_pairs(self.variant.config)

    @property
    def by_torch(self) -> str:
        """The reason why torch runs the call, in words."""
        return f"torch's grouped_mm, measured faster: {self.torch_us:.1f} us against {self.time_us:.1f} us"


def chosen(
    snapshot: Snapshot,
    problem: Problem,
    bucket: int,
    local: LocalGpu,
    view: View,
    *,
    aligned: bool,
    most: int,
    persistent: bool = False,
) -> list[Candidate]:
    """The best ``most`` candidates that the bundles' own choices name, runners-up included, best first.

    With ``persistent`` none has a program for each tile.
    """
    candidates: list[Candidate] = []
    seen: set[tuple[int, int]] = set()  # a variant counts once, by its best claim
    for claim in _claims(snapshot, problem, local, view).ranked(bucket, near=is_invariant(snapshot, problem)):
        if len(candidates) == most:
            break
        usable, choice, index = claim.usable, claim.choice, claim.variant
        if (usable.order, index) in seen:
            continue
        seen.add((usable.order, index))
        variant = snapshot.variant(usable.bundle, index)
        if persistent and by_tile(variant):
            continue
        if why_not(variant, problem, local, aligned=aligned) is None and in_order(
            snapshot, usable, variant, problem, local
        ):
            match = Match.EXACT if choice.bucket == bucket else Match.NEAREST_BUCKET
            here = claim.origin is Origin.THIS_GPU and match is Match.EXACT and index == choice.variant
            may = here and aligned and torch_runs(problem, local.sm) and snapshot.invariance is None
            torch_ns = choice.torch_ns if may else None
            candidates.append(
                Candidate(
                    usable,
                    index,
                    variant,
                    claim.origin,
                    match,
                    choice.source,
                    choice.bucket,
                    claim.time_ns / 1e3,
                    choice.measured_on(usable.bundle.gpus),
                    torch_us=None if torch_ns is None else torch_ns / 1e3,
                    plan=choice.plan if match is Match.EXACT else (),
                )
            )
    return candidates


def is_invariant(snapshot: Snapshot, problem: Problem) -> bool:
    """True if all calls of a problem must sum in one order. Never for dW, which sums over the rows of a batch."""
    return snapshot.invariance is not None and problem.op is not Op.DW


def in_order(snapshot: Snapshot, usable: Usable, variant: Variant, problem: Problem, local: LocalGpu) -> bool:
    """True if the variant sums in the order that the batch-invariant mode prescribes; always True in other modes."""
    if not is_invariant(snapshot, problem):
        return True
    return summed(usable, variant, problem) == order_of(snapshot, problem, local)


def order_of(snapshot: Snapshot, problem: Problem, local: LocalGpu) -> Order | None:
    """The order in which every call of a problem sums in the batch-invariant mode; None where nothing runs it.

    It is the first by preference (``Order.preference``) of all forms, and of a form without such code its own first:
    quantised w has dX that moves rows by a portable kernel alone. It depends on no rows and no times, but only on which
    variants there are. So GPUs of one capability, shards of one model and builds of a bundle agree on it.
    """
    code, low = code_of(problem.op, problem.fusion & ~Fusion.SILU), problem.fusion & Fusion.LOW_RANK
    asked, view = problem._replace(fusion=code, top_k=0), snapshot.view(local, installed=True)
    key = ("order", id(view), asked, local)
    if key not in snapshot.rankers:
        forms = (Fusion.NONE, Fusion.GATHER) if low else (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
        forms += (code,) if Fusion.STARTS in code else ()
        by_form = {form | low: _orders(snapshot, problem._replace(fusion=form | low, top_k=0), local) for form in forms}
        first = min((order for orders in by_form.values() for order in orders), key=_preference, default=None)
        own = by_form[code]
        if first not in own:
            own |= _orders(snapshot, asked, local, reserve=True) & {first}
        snapshot.rankers[key] = view, min(own, key=_preference, default=None)
    order: Order | None = snapshot.rankers[key][1]
    return order


def _preference(order: Order) -> tuple[object, ...]:
    return order.preference


def _orders(snapshot: Snapshot, problem: Problem, local: LocalGpu, *, reserve: bool = False) -> set[Order]:
    """The orders of the variants that can run a problem on aligned tensors: the bundles', or the candidates'."""
    return {
        summed(usable, variant, problem)
        for usable in (snapshot.reserve(local).usable if reserve else snapshot.having(problem, local))
        for _, variant in snapshot.variants(usable.bundle, problem)
        if why_not(variant, problem, local, aligned=True) is None
    }


def summed(usable: Usable, variant: Variant, problem: Problem) -> Order:
    """The order in which a variant that can run a problem sums K."""
    config = Config.from_pairs(variant.config)
    spec = Spec(variant.op, variant.dtype, config, variant.layout, variant.fusion, variant.alignment)  # type: ignore[arg-type]
    return registry.order_of(spec, usable.bundle.target.sm, gemm_of(problem).reduction)


def by_tile(variant: Variant) -> bool:
    """True if a launch has one program for each tile of all rows that the memory has room for."""
    config = config_of(variant.config)
    return config is not None and config.schedule is Schedule.TILE


def idles(variant: Variant, problem: Problem, M: int, bucket: int) -> bool:
    """True if a launch for M rows would have many programs without work, if only ``bucket`` rows come.

    That is so in calls with ``expected_rows``: memory and grids have room for all M rows.
    """
    if bucket >= M or not by_tile(variant):
        return False
    columns, config = gemm_of(problem).columns, Config.from_pairs(variant.config)
    most, likely = (registry.most_tiles(rows, problem.E, columns, config) for rows in (M, bucket))
    return most - likely > MOST_IDLE


def torch_runs(problem: Problem, sm: int) -> bool:
    """Whether torch's grouped_mm can compute a problem on a capability without a synchronisation."""
    return arch.torch_groups(sm) and torch_multiplies(problem)


class _RankedChoice(NamedTuple):
    """A choice's claim for its variant, or for its runner-up."""

    origin: Origin
    usable: Usable
    choice: Choice
    variant: int
    time_ns: int
    apart: float


class _RankedChoices(NamedTuple):
    """Every claim on a problem: the origins that there are, best first, and of each its claims by bucket."""

    view: View
    by_origin: dict[Origin, dict[int, list[_RankedChoice]]]

    def ranked(self, bucket: int, *, near: bool) -> Iterator[_RankedChoice]:
        """All of them, best first for this bucket; with ``near`` those of it and its neighbours alone."""

        def rank(place: tuple[Origin, int]) -> tuple[int, ...]:
            origin, other = place
            steps = abs(other.bit_length() - bucket.bit_length())
            # Of two equally near buckets the larger: its tiles lose less on few rows than small ones on many.
            return origin >= Origin.COMPATIBLE, steps if steps > _NEAR else 0, origin, steps, -other

        places = ((origin, other) for origin, by_bucket in self.by_origin.items() for other in by_bucket)
        for origin, other in sorted(places, key=rank):
            if near and abs(other.bit_length() - bucket.bit_length()) > _NEAR:
                continue
            for claim in self.by_origin[origin][other]:
                own = other == bucket and origin is not Origin.MODELLED
                if own or not claim.usable.bundle.producer.held_against:
                    yield claim


def _claims(snapshot: Snapshot, problem: Problem, local: LocalGpu, view: View) -> _RankedChoices:
    """The claims of the bundles' choices, kept by the snapshot."""
    key = (id(view), problem, local)
    cached: _RankedChoices | None = snapshot.rankers.get(key)
    if cached is None:
        by_origin: dict[Origin, dict[int, list[_RankedChoice]]] = {}
        for usable in view.usable:
            choices = snapshot.find(usable.bundle, problem)
            if not choices:  # as of most new shapes: skip what is about GPUs
                continue
            apart = [gpus_apart(gpu, local.gpu) for gpu in usable.bundle.gpus]
            here = {number for number, gpu in enumerate(usable.bundle.gpus) if gpu.is_like(local.gpu)}
            native = usable.bundle.target.sm == local.sm
            for choice in choices:
                origin = _origin(choice, here, native, usable)
                far = apart[choice.gpu] if origin is Origin.THIS_CAPABILITY and choice.gpu is not None else 0.0
                there = by_origin.setdefault(origin, {}).setdefault(choice.bucket, [])
                # A choice comes before its runner-up, whose time may be less: the builder knows such a lead from noise.
                there.append(_RankedChoice(origin, usable, choice, choice.variant, choice.time_ns, far))
                if choice.runner_up is not None:
                    there.append(_RankedChoice(origin, usable, choice, choice.runner_up, choice.runner_up_ns or 0, far))
        for claims in by_origin.get(Origin.THIS_CAPABILITY, {}).values():
            claims.sort(key=lambda claim: claim.apart)  # else they stay as they are: by their bundles, and by GPUs
        cached = snapshot.rankers[key] = _RankedChoices(view, by_origin)
    return cached


def modelled(
    snapshot: Snapshot,
    problem: Problem,
    bucket: int,
    local: LocalGpu,
    view: View,
    *,
    aligned: bool,
    most: int | None = None,
    persistent: bool = False,
) -> list[Candidate]:
    """The candidates by the cost model: every variant that fits, whatever it was chosen for; the best ``most`` of them.

    With ``persistent`` none has a program for each tile.
    """
    if local.sm not in arch.ARCHS:
        return []
    from .neighbours import blended, neighbourhood  # here, as most calls are answered by a choice of a bundle

    _, fitting, ranker, chip = _ranked(snapshot, problem, local, view, aligned)
    measured = neighbourhood(snapshot, local, view)
    around = measured.near(problem, bucket, aligned=aligned)
    able = [
        at
        for at, (usable, _, variant) in enumerate(fitting)
        if in_order(snapshot, usable, variant, problem, local) and not (persistent and by_tile(variant))
    ]
    numbers = _numbers(snapshot, fitting, measured) if around is not None else {}
    some = [at for at in able if numbers[at][0] in around.won and _is_able(fitting[at][2], problem)] if around else []
    if not some or most is None:  # to estimate the others takes longer than all the rest
        some = [at for at in able if _is_able(fitting[at][2], problem)]
    estimates = [
        estimate for estimate in ranker.estimates(problem.canonical, bucket, some) if math.isfinite(estimate[0])
    ]
    if around is not None:
        estimates = blended(around, problem, bucket, chip, estimates, numbers)
    entries = []
    for time_us, at in estimates:
        usable, index, _ = fitting[at]
        origin = Origin.MODELLED if usable.bundle.target.sm == local.sm else Origin.COMPATIBLE
        origin = Origin.COMPILED if usable.place.kind is Kind.PROCESS else origin
        entries.append((origin, time_us, usable.order, index, at))
    # All variants of one origin compete: the place only breaks ties.
    return [
        Candidate(
            fitting[at][0],
            index,
            fitting[at][2],
            origin,
            Match.COST_MODEL,
            Source.MODELLED,
            bucket,
            time_us,
            None,
            around if around is not None and numbers[at][0] in around.won else None,
        )
        for origin, time_us, _, index, at in sorted(entries)[:most]
    ]


def _numbers(snapshot: Snapshot, fitting: _Fitting, measured: Neighbourhood) -> Mapping[int, tuple[int, Config]]:
    """The number and config of each variant of a list that ``_ranked`` keeps."""
    key = ("numbers", id(fitting))
    cached: dict[int, tuple[int, Config]] | None = snapshot.rankers.get(key)
    if cached is None:
        cached = {at: measured.numbered(variant) for at, (*_, variant) in enumerate(fitting)}
        snapshot.rankers[key] = cached
    return cached


def _is_able(variant: Variant, problem: Problem) -> bool:
    """True if the variant supports this problem's number of experts and its sizes."""
    config = config_of(variant.config)
    return config is not None and variant.max_experts >= problem.E and not registry.beyond(problem, config)


def why_not(variant: Variant, problem: Problem, local: LocalGpu, *, aligned: bool) -> str | None:
    """Why this variant can't run the call, or None."""
    first, last = READS_ABI
    if not first <= variant.abi <= last:
        return f"its launch ABI is {variant.abi}, this version launches {first}-{last}"
    config = config_of(variant.config)
    if config is None:
        return "its config is not one that this version knows"
    spec = Spec(problem.op, problem.dtype, config, variant.layout, variant.fusion)
    refused = registry.refusal(spec) or registry.beyond(problem, config)
    if refused:
        return refused
    if variant.alignment > 1 and not aligned:
        return f"it needs {variant.alignment}-byte alignment"
    if variant.max_experts < problem.E:
        return f"it takes {variant.max_experts} experts at most"
    if verdicts.is_wrong(variant, local):
        return "its test on this GPU failed, or could not be made in this process"
    target = arch.ARCHS.get(local.sm)
    if target is not None and variant.shared_bytes > (most := target.limits.shared_per_block_bytes):
        return f"it needs {variant.shared_bytes} bytes of shared memory, sm_{local.sm} has {most}"
    return None


def _ranked(snapshot: Snapshot, problem: Problem, local: LocalGpu, view: View, aligned: bool) -> _Ranked:
    """The variants that can run small problems of this kind, and a ranker of them, kept by the snapshot."""
    key = (id(view), problem.op, problem.dtype, problem.layout, problem.fusion, aligned, local)
    cached: _Ranked | None = snapshot.rankers.get(key)
    if cached is None:
        from ...kernels import chips
        from ...kernels.cost import Resources
        from ...kernels.cost_model import Ranker  # here, as most calls are answered by a choice of a bundle

        kind = problem._replace(E=1, N=_SMALL, K=_SMALL)
        variants = [
            (usable, index, variant)
            for usable in view.usable
            for index, variant in snapshot.variants(usable.bundle, problem)
            if why_not(variant, kind, local, aligned=aligned) is None and _fits(usable, variant)
        ]
        fitting = [entry for entry in variants if entry[0].speaks_of_others] or variants
        resources = [Resources.of(variant) for *_, variant in fitting]
        op, chip = problem.canonical.op, chips.chip_of(local.gpu, local.sm)
        cached = view, fitting, Ranker(resources, op, problem.dtype, chip), chip
        snapshot.rankers[key] = cached
    return cached


def _fits(usable: Usable, variant: Variant) -> bool:
    """True if a shipped candidate may be chosen: not if ``aot build`` rejects it, or if it needs measured times."""
    if usable.place.kind is not Kind.CANDIDATES:
        return True
    if Fusion.SILU in variant.fusion:  # it runs where times say so, and candidates have no times
        return False
    from ...kernels.cost import rejection  # here, as most processes have a bundle for all that they call

    return rejection(variant, arch.arch_of(usable.bundle.target.sm)) is None


def _origin(choice: Choice, here: set[int], native: bool, usable: Usable) -> Origin:
    if choice.source is Source.MEASURED and choice.gpu in here:
        return Origin.THIS_GPU
    if usable.place.kind is Kind.PROCESS:
        return Origin.COMPILED
    if not native:
        return Origin.COMPATIBLE
    return Origin.THIS_CAPABILITY if choice.source is Source.MEASURED else Origin.MODELLED
