"""Which variant runs: a problem, its rows and a GPU in, one decision out.

Equal bundles and equal GPUs give equal decisions in every process. Nothing here synchronises with the GPU or tunes, and
code is compiled only after ``allow_jit``.

A candidate ranks by, in this order:

1. whether it is of this capability: code built for a binary-compatible one, or compiled by this process, comes after;
2. whether it was chosen for this bucket or one of its neighbours (half or twice the rows), and if not, how far from it:
   a time for few rows says nothing about many;
3. ``Origin``: measured on this very GPU, measured on its capability, modelled for its capability,
   built for a binary-compatible one, compiled by this process because nothing else could run;
4. ``Match``: a choice for this problem and bucket, a choice for this problem at the nearest bucket, the cost model over
   all variants, blended with the times measured around this problem and bucket (``neighbours.py``);
5. if measured on another GPU of this capability, how similar that GPU is, by SM count and memory;
6. the position of its bundle in the bundle search path, and in one bundle the order of its GPUs.

So a modelled choice in a bundle of PRETUNED_BUNDLES does not hide a measured choice of an installed package.

If no bundle can run a call, the shipped candidates do (``Snapshot.reserve``), in the cost model's order, except those
that a build would reject.

In the batch-invariant mode (``Snapshot.invariance``) only variants of one order of sums are candidates for a problem,
whatever its fusions (``order_of``). Choices and runners-up rank as above. If none for this bucket or a neighbour has
the order, the cost model chooses, as if no bundle had the problem. torch runs nothing.

If a build compared its bundle with other bundles (``Producer.held_against``), or merged their measured choices, only
the bundle's measured choices count, for their own problems and buckets: there none is slower than the others' choices.
Its modelled choices are ignored: the cost model chooses anew among all variants, for this very GPU.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import math
from collections.abc import Hashable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, TypeAlias

from ...artifacts.errors import ProblemNotInBundle
from ...artifacts.limits import printable
from ...artifacts.records import (
    Choice,
    DType,
    Fusion,
    Gpu,
    Layout,
    LocalGpu,
    Op,
    PlanRow,
    Problem,
    Source,
    Variant,
    bucket_of,
    gpus_apart,
)
from ...artifacts.tuples import NamedTuple
from ...kernels import arch, registry
from ...kernels.entry import ALIGNMENT_BYTES, READS_ABI, has_aligned_rows, torch_multiplies
from ...kernels.spec import Config, Schedule, Spec, code_of, config_of, gemm_of
from .. import hooks, self_test_results
from ..settings import lock
from .places import Kind
from .snapshot import Rejected, Snapshot, Usable, View

if TYPE_CHECKING:
    from ...kernels.chips import Chip
    from ...kernels.cost_model import Ranker
    from ...kernels.entry import Order
    from .neighbours import Near, Neighbourhood

    _Fitting: TypeAlias = list[tuple[Usable, int, Variant]]
    _Ranked: TypeAlias = tuple[View, _Fitting, Ranker, Chip]


_log = logging.getLogger(__name__)
_HALVES = (DType.BF16, DType.FP16)
_NEAR = 1  # distance to a neighbouring bucket, in doublings of the rows
MOST_IDLE = 2048  # programs without a tile: each costs 1 ns or more, measured for row kernels on an H200
_SMALL = 64  # N and K that every kernel supports


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

    ``gpu`` is the GPU of the measurement. ``near`` is the estimate from measured cells around this one, if it decided
    the rank. ``torch_us`` is the time of torch's grouped_mm, if it was measured faster on this very GPU: torch then
    runs plain products without ``out``. ``plan`` names the variants that run special calls instead of this one, if the
    choice is for this very cell.
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
        """The reason why torch runs the call, for messages."""
        return f"torch's grouped_mm, measured faster: {self.torch_us:.1f} us against {self.time_us:.1f} us"


class Decision(NamedTuple):
    """The variant that runs a problem at a bucket of rows, and why. (``explain`` also reports the next best.)"""

    problem: Problem
    bucket: int
    aligned: bool
    chosen: Candidate
    reason: str


class Miss(NamedTuple):
    """The decision that no bundle can run the problem here, so that torch does. ``reason`` says why and what to do."""

    problem: Problem
    bucket: int
    aligned: bool
    reason: str


def decide(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    aligned: bool = True,
    strict: bool = False,
    persistent: bool = False,
) -> Decision | Miss:
    """The variant for M rows of ``problem`` on the GPU ``local``; the snapshot caches it for M's bucket.

    ``aligned`` says whether every pointer, row stride and row length is a multiple of 16 bytes. With ``persistent`` the
    variant must not have a program for each tile.

    Raises
    ------
    ProblemNotInBundle
        if ``strict`` and there is no choice for this problem and bucket on this capability.
    TargetMismatch, DriverTooOld, BundleError
        for a file that PRETUNED_BUNDLES names and that can't be used.
    """
    bucket = bucket_of(M)
    key = (problem, bucket, aligned, local, strict, persistent)
    cached: Decision | Miss | None = snapshot.decisions.get(key)
    if cached is None:
        decided = settle(
            snapshot, problem, bucket, local, aligned, strict, persistent
        )  # without holding a lock: this may import packages
        if isinstance(decided, Miss) and hooks.jit_allowed() and not persistent:
            from ..driver import device  # imported here: other decisions need no torch

            if device.capturing():
                return decided  # not cached: the next call outside a graph capture compiles
            decided = _compiled(snapshot, decided, local, strict)
        with lock("decisions"):
            cached = snapshot.decisions.setdefault(key, decided)
        # A persistent miss is not logged: a variant with a program for each tile then runs.
        if cached is decided and not (persistent and isinstance(decided, Miss)):
            _tell(snapshot, decided, local)
    return cached


def settle(
    snapshot: Snapshot,
    problem: Problem,
    bucket: int,
    local: LocalGpu,
    aligned: bool,
    strict: bool,
    persistent: bool = False,
) -> Decision | Miss:
    """Decide as ``decide`` does, but cache, compile and log nothing."""
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            return _decide(snapshot, problem, bucket, local, aligned, strict, persistent)


def with_low_part(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu) -> Candidate | None:
    """Return a variant with ``Fusion.LOW_RANK`` for M rows of aligned ``problem``; None if separate products run.

    No bundle has choices with this fusion. The variant is the shipped candidate with the config that runs the product
    without the low-rank part; if there is none, the cost model's first.
    """
    bucket = bucket_of(M)
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            candidates = modelled(snapshot, problem, bucket, local, snapshot.reserve(local), aligned=True)
            if not candidates:
                return None
            plain = problem._replace(fusion=code_of(problem.op, problem.fusion & ~Fusion.LOW_RANK))
            without = settle(snapshot, plain, bucket, local, aligned=True, strict=False)
            config = None if isinstance(without, Miss) else without.chosen.config
            return next((candidate for candidate in candidates if candidate.config == config), candidates[0])


def in_place(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, strict: bool = False
) -> Candidate | None:
    """The variant for M rows of ``problem`` with ``Fusion.STARTS``, which reads x's codes where they arrive; or None.

    None if the cost model says that another way is faster: list the rows, sort their codes, and run the product that
    scatters. No bundle has choices with this fusion, so both times are modelled.
    """
    if strict:  # strict mode uses no shipped candidates
        return None
    bucket, by_index = bucket_of(M), problem._replace(fusion=Fusion.SCATTER)
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            candidates = _fastest_modelled(snapshot, problem, bucket, local)
            ran = settle(snapshot, by_index, bucket, local, aligned=True, strict=False)
            if not candidates or isinstance(ran, Miss):
                return next(iter(candidates), None)
            from ...kernels.chips import chip_of
            from ...kernels.cost_model import in_place_is_faster

            variants = candidates[0].variant, ran.chosen.variant
            pays = in_place_is_faster(problem, bucket, *variants, chip_of(local.gpu, local.sm))
            return candidates[0] if pays else None


def dW_of_codes(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu) -> Candidate | None:
    """Return the cost model's first variant for dW of codes of M rows; None if there is none: then torch runs dW.

    No bundle has choices for dW of codes.
    """
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            return next(iter(_fastest_modelled(snapshot, problem, bucket_of(M), local)), None)


def _fastest_modelled(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu) -> list[Candidate]:
    """The cost model's first variant in the bundles; if they have none, in the shipped candidates, unpacked then."""
    candidates = modelled(snapshot, problem, bucket, local, snapshot.view(local, installed=True), aligned=True, most=1)
    return candidates or modelled(snapshot, problem, bucket, local, snapshot.reserve(local), aligned=True, most=1)


def whole_columns(problem: Problem) -> int:
    """N, rounded up so that a row of y is a multiple of 16 bytes."""
    each = ALIGNMENT_BYTES // problem.dtype.itemsize
    return -(-problem.N // each) * each


def with_wide_rows(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu) -> Candidate | None:
    """The variant that stores M rows of y ``whole_columns`` apart; None if N is aligned already, or no variant fits.

    The variant is for aligned rows of ``whole_columns`` columns, and reads w by a TMA descriptor with w's own N, past
    which TMA reads zeros. A kernel that reads w by pointers would read into the next expert, and past the last one.
    """
    able = problem.op is Op.FORWARD and problem.layout is Layout.NK and not problem.fusion
    wide = problem._replace(N=whole_columns(problem))
    if not able or problem.dtype not in _HALVES or wide == problem or not has_aligned_rows(wide):
        return None
    bucket = bucket_of(M)
    ran = settle(snapshot, wide, bucket, local, aligned=True, strict=False)
    if isinstance(ran, Decision) and _clips_w(ran.chosen):
        return ran.chosen._replace(torch_us=None)  # torch does not support these rows
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            candidates = modelled(snapshot, wide, bucket, local, snapshot.view(local, installed=True), aligned=True)
            return next(filter(_clips_w, candidates), None)


def _clips_w(candidate: Candidate) -> bool:
    return any(tensor_map.argument == "w" for tensor_map in candidate.variant.tensor_maps)


def _compiled(snapshot: Snapshot, missed: Miss, local: LocalGpu, strict: bool) -> Decision | Miss:
    """The decision for a kernel that is compiled now; or a miss, with the compiler's reason."""
    from .compiled import compiled  # imported here: only calls after ``allow_jit`` need it

    bundle = compiled(missed.problem, local)
    if isinstance(bundle, str):
        return missed._replace(reason=f"{missed.reason} (allow_jit: {bundle})")
    snapshot.add(bundle)
    return settle(snapshot, missed.problem, missed.bucket, local, missed.aligned, strict)


def _decide(
    snapshot: Snapshot,
    problem: Problem,
    bucket: int,
    local: LocalGpu,
    aligned: bool,
    strict: bool,
    persistent: bool,
) -> Decision | Miss:
    how: dict[str, Any] = {"aligned": aligned, "most": 1, "persistent": persistent}
    view = snapshot.view(local, installed=False)
    view.demand_named_files()
    candidates = chosen(snapshot, problem, bucket, local, view, **how) if view.usable else []
    if not _is_unbeatable(candidates, local):
        view = snapshot.nearer_view(local, registry.names_for(problem.dtype))
        candidates = chosen(snapshot, problem, bucket, local, view, **how)
    if not _is_unbeatable(candidates, local):
        view = snapshot.view(local, installed=True)
        candidates = chosen(snapshot, problem, bucket, local, view, **how)
        if not candidates or candidates[0].origin >= Origin.COMPATIBLE:
            candidates += modelled(snapshot, problem, bucket, local, view, **how)
            candidates.sort(key=lambda candidate: (candidate.origin, candidate.match))
        if strict and not (candidates and _has_choice(snapshot, problem, bucket, local, view)):
            raise ProblemNotInBundle(_strict_text(problem, bucket, local, view))
    candidates = candidates or modelled(snapshot, problem, bucket, local, snapshot.reserve(local), **how)
    if not candidates:
        return Miss(problem, bucket, aligned, _miss_text(problem, bucket, local, view))
    by_torch = "" if candidates[0].torch_us is None else f"; {candidates[0].by_torch}"
    return Decision(problem, bucket, aligned, candidates[0], reason(candidates[0], problem, bucket, local) + by_torch)


def _is_unbeatable(candidates: list[Candidate], local: LocalGpu) -> bool:
    """True if no later bundle can have a better choice: the first one was measured on this GPU, for this bucket."""
    if not candidates:
        return False
    best = candidates[0]
    native = best.usable.bundle.target.sm == local.sm
    return native and best.match is Match.EXACT and best.origin is Origin.THIS_GPU


def _has_choice(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, view: View) -> bool:
    """True if a bundle for this capability was built for this product and bucket, with whatever fusions.

    Bundles have choices for the fusions that a layer uses. Other fusions of the product, like a bias on the plain first
    GEMM, run the bundle's variants, too, chosen by the cost model.
    """
    return any(
        choice.bucket == bucket
        for usable in view.usable
        if usable.bundle.target.sm == local.sm and usable.place.kind is not Kind.PROCESS
        for form in forms_of(problem)
        for choice in snapshot.find(usable.bundle, form)
    )


def forms_of(problem: Problem) -> tuple[Problem, ...]:
    """Return the problem, then its product with every other set of fusions that kernels support."""
    if problem.op is Op.DW:
        return (problem,)
    others: tuple[Fusion, ...] = (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
    others += (Fusion.SILU, Fusion.SILU | Fusion.GATHER) if problem.op is Op.FORWARD else ()
    return (problem, *(problem._replace(fusion=fusion, top_k=0) for fusion in others if fusion is not problem.fusion))


def reason(candidate: Candidate, problem: Problem, bucket: int, local: LocalGpu) -> str:
    """Return the reason for a candidate's rank for ``problem``, for messages."""
    why = _standing(candidate, bucket, local)
    code_of_another = candidate.variant.layout is not problem.layout
    own = candidate.match is not Match.COST_MODEL and candidate.usable.bundle.find(problem)
    return f"{why} (as {problem.transposed}, which is the same GEMM)" if code_of_another and not own else why


def _standing(candidate: Candidate, bucket: int, local: LocalGpu) -> str:
    target = candidate.usable.bundle.target
    if candidate.match is Match.COST_MODEL:
        what = "the cost model's choice among the bundles' variants: no bundle has this problem"
        if candidate.near is not None:
            what = f"{_nearness(candidate.near, local)}: no bundle has this problem"
        if candidate.origin is Origin.COMPILED:
            return "compiled now by Triton, the cost model's choice: no bundle has a variant that can run it"
        if candidate.usable.place.kind is Kind.CANDIDATES:
            what = "the cost model's choice among the shipped candidates: no bundle has a kernel that can run it"
        compatible = candidate.origin is Origin.COMPATIBLE
        return f"{what} (code for {target}, which sm_{local.sm} runs)" if compatible else what
    what = {
        Origin.THIS_GPU: "measured on this GPU",
        Origin.THIS_CAPABILITY: f"measured on {candidate.gpu.name if candidate.gpu else '?'}, of this capability",
        Origin.MODELLED: "modelled for this capability, measured nowhere",
        Origin.COMPATIBLE: f"built for {target}, which sm_{local.sm} runs",
        Origin.COMPILED: "compiled now by Triton, as no bundle has a variant that can run it; modelled",
    }[candidate.origin]
    if candidate.match is Match.EXACT:
        return f"{what}, for this problem and M near {bucket}"
    return f"{what}, for this problem at M near {candidate.bucket}, the nearest to {bucket}"


def _nearness(near: Near, local: LocalGpu) -> str:
    nearest, count = near.nearest, near.shapes
    where = "this GPU" if near.gpu.is_like(local.gpu) else near.gpu.name
    shapes = f"{count} measured shapes near it, the nearest" if count > 1 else "the measured shape nearest to it,"
    return f"like {shapes} E={nearest.E} N={nearest.N} K={nearest.K} on {where}"


def miss_reason(problem: Problem, local: LocalGpu, view: View) -> str:
    """Why no bundle can run the problem."""
    if not local.sm:
        return f"no bundle runs on {local}: it is of no CUDA capability"
    if not view.usable:
        skipped = f" ({len(view.skipped)} found and skipped, see python -m pretuned.runtime)" if view.skipped else ""
        return f"no usable bundle for {local}{skipped}"
    return f"no variant in {len(view.usable)} bundle(s) can run {problem} on {local}"


def _miss_text(problem: Problem, bucket: int, local: LocalGpu, view: View) -> str:
    """The reason of a miss, and what to do."""
    from .hints import remedy  # imported here: most calls have a choice

    why = miss_reason(problem, local, view)
    return f"{why}. {remedy(problem, bucket, local.sm, view)}" if local.sm else why


def _strict_text(problem: Problem, bucket: int, local: LocalGpu, view: View) -> str:
    from .hints import nearest_shapes, remedy  # imported here: most calls have a choice

    near = nearest_shapes(problem, local, view)
    have = f"The nearest there are: {'; '.join(near)}" if near else "No usable bundle has a problem of this kind"
    return (
        f"PRETUNED_STRICT: no choice for {problem} at M near {bucket} on {local}. {have}. "
        f"{remedy(problem, bucket, local.sm, view)}"
    )


def _tell(snapshot: Snapshot, outcome: Decision | Miss, local: LocalGpu) -> None:
    """Log a decision or miss once, at a lower level the better the choice is."""
    if isinstance(outcome, Miss):
        nothing = not snapshot.view(local, installed=True).usable
        topic: Hashable = (local, None if nothing else outcome.problem)
        if topic not in snapshot.logged:
            snapshot.logged.add(topic)
            _log.warning("pretuned: grouped GEMM runs on torch: %s", outcome.reason)
        return
    best = outcome.chosen
    ideal = best.origin is Origin.THIS_GPU and best.match is Match.EXACT
    if not _log.isEnabledFor(logging.DEBUG if ideal else logging.INFO):
        return
    name = printable(best.usable.path.name)
    what = (outcome.problem, outcome.bucket, local.gpu.name, best.config, name, outcome.reason)
    if ideal:
        _log.debug("pretuned: %s at M near %d on %s: using %s of %s, %s", *what)
    else:
        from .hints import remedy  # imported here: most calls have a choice

        _log.info(
            "pretuned: no measured choice for %s at M near %d on %s; using %s of %s, %s. %s",
            *what,
            remedy(outcome.problem, outcome.bucket, local.sm, snapshot.view(local, installed=True)),
        )


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
    """The best ``most`` candidates of the bundles' choices for the problem, runners-up included, best first.

    With ``persistent`` no candidate has a program for each tile.
    """
    candidates: list[Candidate] = []
    seen: set[tuple[int, int]] = set()  # a variant counts once, with its best rank
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
    """The order in which every call of a problem sums in the batch-invariant mode; None if no variant runs it.

    It is the preferred order (``Order.preference``) among all variants of the product, whatever their fusions. If no
    variant with the problem's own fusions has it, it is the preferred order among these: for quantised w, only a
    portable kernel has dX with a gather or scatter. The order depends on which variants there are, not on rows or
    times, so GPUs of one capability, shards of one model and builds of a bundle agree on it.
    """
    code, low = code_of(problem.op, problem.fusion & ~Fusion.SILU), problem.fusion & Fusion.LOW_RANK
    asked, view = problem._replace(fusion=code, top_k=0), snapshot.view(local, installed=True)
    key = ("order", id(view), asked, local)
    if key not in snapshot.rankers:
        forms = [Fusion.NONE, Fusion.GATHER] if low else [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER]
        forms += [code] if Fusion.STARTS in code else []
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
    """The summation orders of the variants that can run a problem on aligned tensors; of shipped candidates, too."""
    return {
        summed(usable, variant, problem)
        for usable in (snapshot.reserve(local).usable if reserve else snapshot.having(problem, local))
        for _, variant in snapshot.variants(usable.bundle, problem)
        if why_not(variant, problem, local, aligned=True) is None
    }


def summed(usable: Usable, variant: Variant, problem: Problem) -> Order:
    """Return the order in which a variant sums K of a problem."""
    config = Config.from_pairs(variant.config)
    spec = Spec(variant.op, variant.dtype, config, variant.layout, variant.fusion, variant.alignment)  # type: ignore[arg-type]
    return registry.order_of(spec, usable.bundle.target.sm, gemm_of(problem).reduction)


def by_tile(variant: Variant) -> bool:
    """True if the variant's launches have a program for each tile of all M rows, also of rows that no expert has."""
    config = config_of(variant.config)
    return config is not None and config.schedule is Schedule.TILE


def idles(variant: Variant, problem: Problem, M: int, bucket: int) -> bool:
    """True if a launch for M rows would have many programs without work if experts have only ``bucket`` rows.

    This happens in calls with ``expected_rows``: their grids are for all M rows.
    """
    if bucket >= M or not by_tile(variant):
        return False
    columns, config = gemm_of(problem).columns, Config.from_pairs(variant.config)
    most, likely = (registry.most_tiles(rows, problem.E, columns, config) for rows in (M, bucket))
    return most - likely > MOST_IDLE


def torch_runs(problem: Problem, sm: int) -> bool:
    """True if torch's grouped_mm can compute a problem on a capability without a synchronisation."""
    return arch.torch_groups(sm) and torch_multiplies(problem)


class _RankedChoice(NamedTuple):
    """A bundle's choice, or its runner-up, with all that ranks it."""

    origin: Origin
    usable: Usable
    choice: Choice
    variant: int
    time_ns: int
    apart: float


class _RankedChoices(NamedTuple):
    """All ranked choices for a problem, by origin (best first) and bucket."""

    view: View
    by_origin: dict[Origin, dict[int, list[_RankedChoice]]]

    def ranked(self, bucket: int, *, near: bool) -> Iterator[_RankedChoice]:
        """Yield all ranked choices, best first for this bucket; with ``near`` only those of it and its neighbours."""

        def rank(place: tuple[Origin, int]) -> tuple[int, ...]:
            origin, other = place
            steps = abs(other.bit_length() - bucket.bit_length())
            # Of two equally near buckets, take the larger: large tiles lose less on few rows than small tiles on many.
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
    """The bundles' choices for a problem, ranked for this GPU; cached by the snapshot."""
    key = (id(view), problem, local)
    cached: _RankedChoices | None = snapshot.rankers.get(key)
    if cached is None:
        by_origin: dict[Origin, dict[int, list[_RankedChoice]]] = {}
        for usable in view.usable:
            choices = snapshot.find(usable.bundle, problem)
            if not choices:  # most new shapes have none: skip the comparison of GPUs
                continue
            apart = [gpus_apart(gpu, local.gpu) for gpu in usable.bundle.gpus]
            here = {number for number, gpu in enumerate(usable.bundle.gpus) if gpu.is_like(local.gpu)}
            native = usable.bundle.target.sm == local.sm
            for choice in choices:
                origin = _origin(choice, here, native, usable)
                far = apart[choice.gpu] if origin is Origin.THIS_CAPABILITY and choice.gpu is not None else 0.0
                there = by_origin.setdefault(origin, {}).setdefault(choice.bucket, [])
                # A choice comes before its runner-up, even if that took less time: the builder took the lead as noise.
                there.append(_RankedChoice(origin, usable, choice, choice.variant, choice.time_ns, far))
                if choice.runner_up is not None:
                    there.append(_RankedChoice(origin, usable, choice, choice.runner_up, choice.runner_up_ns or 0, far))
        for claims in by_origin.get(Origin.THIS_CAPABILITY, {}).values():
            claims.sort(key=lambda claim: claim.apart)  # stable: ties stay in bundle order
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
    """The best ``most`` candidates by the cost model, of all variants that can run the problem.

    With ``persistent`` no candidate has a program for each tile.
    """
    if local.sm not in arch.ARCHS:
        return []
    from .neighbours import blended, neighbourhood  # imported here: most calls are answered by a choice of a bundle

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
    # All variants of one origin compete; the bundle's place in the search path only breaks ties.
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
    if self_test_results.is_wrong(variant, local):
        return "its test on this GPU failed, or could not be made in this process"
    target = arch.ARCHS.get(local.sm)
    if target is not None and variant.shared_bytes > (most := target.limits.shared_per_block_bytes):
        return f"it needs {variant.shared_bytes} bytes of shared memory, sm_{local.sm} has {most}"
    return None


def _ranked(snapshot: Snapshot, problem: Problem, local: LocalGpu, view: View, aligned: bool) -> _Ranked:
    """The variants that can run small problems of this kind, and a ranker of them; cached by the snapshot."""
    key = (id(view), problem.op, problem.dtype, problem.layout, problem.fusion, aligned, local)
    cached: _Ranked | None = snapshot.rankers.get(key)
    if cached is None:
        from ...kernels import chips
        from ...kernels.cost import Resources
        from ...kernels.cost_model import Ranker  # imported here: most calls are answered by a choice of a bundle

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
    if Fusion.SILU in variant.fusion:  # silu in the epilogue needs measured times, and candidates have none
        return False
    from ...kernels.cost import rejection  # imported here: most processes have a bundle for all that they call

    return rejection(variant, arch.arch_of(usable.bundle.target.sm)) is None


def _origin(choice: Choice, here: set[int], native: bool, usable: Usable) -> Origin:
    if choice.source is Source.MEASURED and choice.gpu in here:
        return Origin.THIS_GPU
    if usable.place.kind is Kind.PROCESS:
        return Origin.COMPILED
    if not native:
        return Origin.COMPATIBLE
    return Origin.THIS_CAPABILITY if choice.source is Source.MEASURED else Origin.MODELLED
