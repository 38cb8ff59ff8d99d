"""Explains a plan's decisions (gather first, fused silu, quantised x): the kernel that dispatch finds, and why it runs.

The reasons are those of the rule that made the plan, asked again with the bundle's times (``kernels/plans.py``).
"""

from __future__ import annotations

from collections.abc import Sequence

from ...artifacts.records import (
    Choice,
    DType,
    Fusion,
    Layout,
    LocalGpu,
    Problem,
    RowOp,
    Variant,
    bucket_of,
    dtypes_of,
    same_gpu,
)
from ...artifacts.tuples import NamedTuple
from ...kernels import plans as rule
from ...kernels.chips import chip_named
from ...kernels.spec import code_of
from ..dispatch import plans
from ..dispatch.decide import Decision, settle
from ..dispatch.plans import Planned
from ..dispatch.ranking import Candidate, Match, why_not
from ..dispatch.snapshot import Snapshot, Usable


class Ruled(NamedTuple):
    """The candidate that runs the call in place of the ordinary candidate, or None; and why."""

    chosen: Candidate | None
    reason: str


class _Kernels:
    """The choices and variants of one bundle of a snapshot."""

    def __init__(self, snapshot: Snapshot, usable: Usable) -> None:
        self._snapshot, self._bundle = snapshot, usable.bundle
        self.gpus = usable.bundle.gpus

    def find(self, problem: Problem) -> Sequence[Choice]:
        return self._snapshot.find(self._bundle, problem)

    def variant(self, index: int) -> Variant:
        return self._snapshot.variant(self._bundle, index)

    def variants(self, problem: Problem) -> Sequence[tuple[int, Variant]]:
        return self._snapshot.variants(self._bundle, problem)


def rows_first(
    snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, top_k: int, fusion: Fusion, aligned: bool
) -> Ruled | None:
    """The decision of ``plans.rows_first``, and its reason; None if no bundle has a choice for exactly this cell."""
    ran = plans.own(snapshot, problem, M, local, aligned)
    if ran is None:
        return None
    planned = plans.rows_first(snapshot, problem, M, local, top_k=top_k, fusion=fusion, aligned=aligned)
    if aligned and top_k and not plans.can_gather(snapshot, problem, local, top_k, aligned):
        return Ruled(None, "rows are gathered on load: no usable bundle has the row kernel that gathers them")
    by_index = bool(code_of(problem.op, fusion & ~Fusion.GATHER))
    ruling = rule.rows_first(_cell(snapshot, ran, problem), top_k * aligned, checks=False, by_index=by_index)
    return _ruled(snapshot, ran, problem, planned, ruling, local, aligned)


def fused_silu(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, top_k: int, aligned: bool) -> Ruled:
    """The decision of ``plans.fused_silu``, and its reason. ``problem`` has ``Fusion.SILU``."""
    plain = plans.plain_of(problem)
    if snapshot.invariance is not None:
        return Ruled(None, "in the batch-invariant mode h is rounded, as it is in a call with a gradient")
    decided = settle(snapshot, plain, bucket_of(M), local, aligned, False)
    if not isinstance(decided, Decision):
        return Ruled(None, "no bundle has the plain GEMM")
    if decided.chosen.match is not Match.EXACT:
        return Ruled(None, f"the plain GEMM has no time to compare with, as its choice is {decided.reason}")
    planned = plans.fused_silu(snapshot, problem, M, local, aligned=aligned, top_k=top_k)
    at = top_k if plans.can_gather(snapshot, plain, local, top_k, aligned) else 0
    ruling = rule.fused_silu(_cell(snapshot, decided.chosen, plain), at, checks=False)
    return _ruled(snapshot, decided.chosen, plain, planned, ruling, local, aligned)


def quantised_x(
    snapshot: Snapshot, problem: Problem, other: DType, M: int, local: LocalGpu, *, top_k: int, aligned: bool
) -> Ruled:
    """The decision of ``plans.quantised_x``, and its reason. ``other``: the dtype of ``problem`` with bf16 x."""
    if (lacking := plans.lacks_for_codes(snapshot, problem, local)) is not None:
        return Ruled(None, lacking)
    bucket, plain = bucket_of(M), problem._replace(dtype=other)
    if snapshot.invariance is not None:
        return _always_or_never(snapshot, problem, plain, bucket, local, aligned)
    planned = plans.quantised_x(snapshot, problem, other, M, local, top_k=top_k, aligned=aligned)
    decided = settle(snapshot, plain, bucket, local, aligned, False)
    if isinstance(decided, Decision) and decided.chosen.match is Match.EXACT:
        ruling = rule.quantised_x(_cell(snapshot, decided.chosen, plain), top_k)
        return _ruled(snapshot, decided.chosen, plain, planned, ruling, local, aligned)
    coded = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(coded, Decision):
        lacks = "x stays bf16: for the GEMM with quantised x, no bundle has it"
        return Ruled(None, lacks if isinstance(decided, Decision) else "no bundle has this GEMM")
    if not isinstance(decided, Decision):
        return Ruled(coded.chosen, "x is quantised: no bundle has the GEMM with bf16 x")
    if (coded.chosen.match, decided.chosen.match) != (Match.COST_MODEL, Match.COST_MODEL):
        why = "its time and the time with bf16 x are not from one source"
        return Ruled(None, f"x stays bf16: for the GEMM with quantised x, {why}")
    chip, times = chip_named(local.gpu.name), (coded.chosen.time_us, decided.chosen.time_us)
    _, why = rule.quantised_is_faster(problem, bucket, *times, coded.chosen.source, top_k, chip)
    return Ruled(None if planned is None else coded.chosen, why)


def _always_or_never(
    snapshot: Snapshot, problem: Problem, plain: Problem, bucket: int, local: LocalGpu, aligned: bool
) -> Ruled:
    """The batch-invariant mode's decision on quantised x, for any number of rows."""
    if not plans.always_quantises(snapshot, plain, local):
        return Ruled(None, "in the batch-invariant mode x stays bf16 at any number of rows (quantize_x=False)")
    coded = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(coded, Decision):
        return Ruled(None, f"x stays bf16: {coded.reason}")
    return Ruled(coded.chosen, "in the batch-invariant mode x is quantised at any number of rows (quantize_x=True)")


def of_codes(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, top_k: int, aligned: bool) -> Ruled:
    """The kernel for x that arrives as codes, as ``plans.of_codes`` decides; or why there is none."""
    *_, other = dtypes_of(problem.dtype.value)
    if problem.layout is not Layout.NK or not problem.dtype.quantises_x:
        return Ruled(None, "w is in the checkpoint's layout: prepare it")
    if not aligned:
        return Ruled(None, "x, y or w, or a row of them, does not begin at a multiple of 16 bytes")
    lacking = plans.lacks_for_codes(snapshot, problem, local, RowOp.ORDER_CODES)
    planned = plans.of_codes(snapshot, problem, other, M, local, top_k=top_k)
    if planned is None:
        return Ruled(None, (lacking or "no bundle has this GEMM").removeprefix("x stays bf16: "))
    ruled = quantised_x(snapshot, problem, other, M, local, top_k=top_k, aligned=True)
    if ruled.chosen is not None:
        return ruled._replace(reason=f"x arrives as codes, by the variant of a call that quantises it: {ruled.reason}")
    coded = settle(snapshot, problem, bucket_of(M), local, True, False)
    if not isinstance(coded, Decision):
        raise AssertionError(f"{problem}: a variant without a decision")
    return Ruled(coded.chosen, f"x arrives as codes: {coded.reason}")


def _cell(snapshot: Snapshot, ran: Candidate, problem: Problem) -> rule.Cell:
    """The choice that names a candidate."""
    kernels, gpus = _Kernels(snapshot, ran.usable), ran.usable.bundle.gpus
    choice = next(
        choice
        for choice in kernels.find(problem)
        if choice.bucket == ran.bucket and same_gpu(choice.measured_on(gpus), ran.gpu)
    )
    return rule.Cell.of(kernels, problem, choice, ran.usable.bundle.target.sm)


def _ruled(
    snapshot: Snapshot,
    ran: Candidate,
    problem: Problem,
    planned: Planned | None,
    ruling: rule.Ruling,
    local: LocalGpu,
    aligned: bool,
) -> Ruled:
    """The kernel that dispatch finds, and the rule's words for it."""
    bundle = ran.usable.bundle
    if planned is None:
        if ruling.variant is None:
            return Ruled(None, ruling.reason)
        variant = snapshot.variant(bundle, ruling.variant)
        asked = problem._replace(dtype=variant.dtype, fusion=variant.fusion, top_k=0)
        lacking = why_not(variant, asked, local, aligned=aligned)
        why = "the bundle's plan is not to" if lacking is None else f"its variant can't run here: {lacking}"
        return Ruled(None, f"{why}. By its times, {ruling.reason}")
    as_planned = ruling.variant == planned.variant
    return Ruled(
        ran._replace(
            index=planned.variant,
            variant=snapshot.variant(bundle, planned.variant),
            time_us=ruling.gemm_us if as_planned else ran.time_us,
            torch_us=None,
            plan=(),
        ),
        ruling.reason if as_planned else f"the bundle's plan. By its times, {ruling.reason}",
    )
