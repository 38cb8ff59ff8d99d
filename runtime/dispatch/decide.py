"""Which variant runs: a problem, its rows and a GPU in, one decision out.

The same bundles and the same GPU give the same decision in every process; the ranking is in
``ranking.py``. Nothing here synchronises with the GPU or tunes; nothing is compiled but after ``allow_jit``.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Hashable
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import ProblemNotInBundle
from ...artifacts.limits import printable
from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Op, Problem, bucket_of
from ...artifacts.tuples import NamedTuple
from ...kernels import registry
from ...kernels.entry import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.spec import code_of
from .. import hooks
from ..locks import lock
from .places import Kind
from .ranking import Candidate, Match, Origin, chosen, modelled
from .snapshot import Rejected, Snapshot, View

if TYPE_CHECKING:
    from .neighbours import Near

_log = logging.getLogger(__name__)
_HALVES = (DType.BF16, DType.FP16)


class Decision(NamedTuple):
    """The variant that runs a problem at a bucket of rows, and why it. (``explain`` also tells the next best.)"""

    problem: Problem
    bucket: int
    aligned: bool
    chosen: Candidate
    reason: str


class Miss(NamedTuple):
    """No bundle can run the problem here: torch does. ``reason`` says why and what to do."""

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
    """The variant for M rows of ``problem`` on ``local``; remembered for M's bucket in the snapshot.

    ``aligned`` says whether every pointer, row stride and row length is a multiple of 16 bytes; ``persistent`` that the
    variant is not to have a program for each tile.

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
        )  # without a lock: it may import packages
        if isinstance(decided, Miss) and hooks.jit_allowed() and not persistent:
            from ..driver import device  # here, so that choosing needs no torch

            if device.capturing():
                return decided  # for now: the next call outside compiles
            decided = _compiled(snapshot, decided, local, strict)
        with lock("decisions"):
            cached = snapshot.decisions.setdefault(key, decided)
        if cached is decided and not (persistent and isinstance(decided, Miss)):  # (then any other runs)
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
    """Decide like ``decide``, but cache, compile and log nothing."""
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            return _decide(snapshot, problem, bucket, local, aligned, strict, persistent)


def with_low_part(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu) -> Candidate | None:
    """The variant for M rows of aligned ``problem``, one with ``Fusion.LOW_RANK``, or None: two products then.

    No bundle has such choices. It is the config that runs the product without the low-rank part, if the candidates that
    ship have it, else the first by the cost model.
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
    """The variant for M rows of ``problem``, with ``Fusion.STARTS``: codes of x where they arrive; or None.

    None where by the cost model another way takes less: rows listed, their codes ordered, and the product that stores
    by an index. No bundle has such choices, so both times are modelled.
    """
    if strict:  # which takes nothing of the candidates
        return None
    bucket, by_index = bucket_of(M), problem._replace(fusion=Fusion.SCATTER)
    while True:  # each turn drops a bundle
        with contextlib.suppress(Rejected):
            candidates: list[Candidate] = []
            for view in (snapshot.view(local, installed=True), snapshot.reserve(local)):
                candidates = candidates or modelled(snapshot, problem, bucket, local, view, aligned=True, most=1)
            ran = settle(snapshot, by_index, bucket, local, aligned=True, strict=False)
            if not candidates or isinstance(ran, Miss):
                return next(iter(candidates), None)
            from ...kernels.chips import chip_of
            from ...kernels.cost_model import in_place_is_faster

            variants = candidates[0].variant, ran.chosen.variant
            pays = in_place_is_faster(problem, bucket, *variants, chip_of(local.gpu, local.sm))
            return candidates[0] if pays else None


def whole_columns(problem: Problem) -> int:
    """N, up to whole 16 bytes of a row of y."""
    each = ALIGNMENT_BYTES // problem.dtype.itemsize
    return -(-problem.N // each) * each


def with_wide_rows(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu) -> Candidate | None:
    """The variant for M rows of y that lie ``whole_columns`` apart; None where rows are whole, or nothing does it.

    It is one for aligned rows of so many columns, whose w comes through a descriptor: that has w's own N, past which
    TMA reads zeros. Code that reads w through pointers would go on into the next expert, and past the last one.
    """
    able = problem.op is Op.FORWARD and problem.layout is Layout.NK and not problem.fusion
    wide = problem._replace(N=whole_columns(problem))
    if not able or problem.dtype not in _HALVES or wide == problem or not has_aligned_rows(wide):
        return None
    bucket = bucket_of(M)
    ran = settle(snapshot, wide, bucket, local, aligned=True, strict=False)
    if isinstance(ran, Decision) and _clips_w(ran.chosen):
        return ran.chosen._replace(torch_us=None)  # which has no such rows
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            candidates = modelled(snapshot, wide, bucket, local, snapshot.view(local, installed=True), aligned=True)
            return next(filter(_clips_w, candidates), None)


def _clips_w(candidate: Candidate) -> bool:
    return any(tensor_map.argument == "w" for tensor_map in candidate.variant.tensor_maps)


def _compiled(snapshot: Snapshot, missed: Miss, local: LocalGpu, strict: bool) -> Decision | Miss:
    """The decision over what the compiler makes now, or the miss and why there is nothing."""
    from .compiled import compiled  # here, as it is asked after ``allow_jit`` alone

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
    """True if no later place can have a better choice: this one was measured on this GPU, for this bucket."""
    if not candidates:
        return False
    best = candidates[0]
    native = best.usable.bundle.target.sm == local.sm
    return native and best.match is Match.EXACT and best.origin is Origin.THIS_GPU


def _has_choice(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, view: View) -> bool:
    """True if a bundle for this capability was built for this product and bucket, with whatever fusions.

    Bundles are built for the fusions that a layer uses. Other fusions of the product, like a bias on the plain first
    GEMM, run the same variants, chosen by the cost model.
    """
    return any(
        choice.bucket == bucket
        for usable in view.usable
        if usable.bundle.target.sm == local.sm and usable.place.kind is not Kind.PROCESS
        for form in forms_of(problem)
        for choice in snapshot.find(usable.bundle, form)
    )


def forms_of(problem: Problem) -> tuple[Problem, ...]:
    """The problem, then its product in the other forms that there is code for."""
    if problem.op is Op.DW:
        return (problem,)
    others: tuple[Fusion, ...] = (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
    others += (Fusion.SILU, Fusion.SILU | Fusion.GATHER) if problem.op is Op.FORWARD else ()
    return (problem, *(problem._replace(fusion=fusion, top_k=0) for fusion in others if fusion is not problem.fusion))


def reason(candidate: Candidate, problem: Problem, bucket: int, local: LocalGpu) -> str:
    """The reason for a candidate's rank for ``problem``, in words."""
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
    """Why no bundle can run it."""
    if not local.sm:
        return f"no bundle runs on {local}: it is of no CUDA capability"
    if not view.usable:
        skipped = f" ({len(view.skipped)} found and skipped, see python -m pretuned.runtime)" if view.skipped else ""
        return f"no usable bundle for {local}{skipped}"
    return f"no variant in {len(view.usable)} bundle(s) can run {problem} on {local}"


def _miss_text(problem: Problem, bucket: int, local: LocalGpu, view: View) -> str:
    """The reason of a miss, and what to do."""
    from .hints import remedy  # here, as most calls have a choice

    why = miss_reason(problem, local, view)
    return f"{why}. {remedy(problem, bucket, local.sm, view)}" if local.sm else why


def _strict_text(problem: Problem, bucket: int, local: LocalGpu, view: View) -> str:
    from .hints import nearest_shapes, remedy  # here, as most calls have a choice

    near = nearest_shapes(problem, local, view)
    have = f"The nearest there are: {'; '.join(near)}" if near else "No usable bundle has a problem of this kind"
    return (
        f"PRETUNED_STRICT: no choice for {problem} at M near {bucket} on {local}. {have}. "
        f"{remedy(problem, bucket, local.sm, view)}"
    )


def _tell(snapshot: Snapshot, outcome: Decision | Miss, local: LocalGpu) -> None:
    """Log an outcome once: the better the choice, the quieter."""
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
        from .hints import remedy  # here, as most calls have a choice

        _log.info(
            "pretuned: no measured choice for %s at M near %d on %s; using %s of %s, %s. %s",
            *what,
            remedy(outcome.problem, outcome.bucket, local.sm, snapshot.view(local, installed=True)),
        )
