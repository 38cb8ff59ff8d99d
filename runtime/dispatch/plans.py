"""Finds the variant that runs a special call in place of the choice's own variant, by the bundle's plan for the cell.

The bundle's builder wrote the plan (``kernels/plans.py`` has the rule), so no times are compared here. Only for
quantised weights without a choice in any bundle, the cost model decides now. If a plan's variant can't run here, or no
usable bundle has the row kernel that it needs, the choice's own variant runs the call.
"""

from __future__ import annotations

import contextlib

from ...artifacts.records import DType, Fusion, LocalGpu, Problem, RowOp, Way, bucket_of, planned
from ...artifacts.tuples import NamedTuple
from ...kernels.arch import ARCHS, Feature
from ...kernels.registry import has_code
from ...kernels.rowops import CODE_OPS, dtype_of
from ...kernels.spec import code_of, takes_codes_of_x
from . import rowops
from .decide import Candidate, Decision, Match, in_order, settle, why_not
from .snapshot import Rejected, Snapshot, Usable


class Planned(NamedTuple):
    """A variant of a bundle, by its index."""

    usable: Usable
    variant: int


def rows_first(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    top_k: int,
    fusion: Fusion = Fusion.GATHER,
    aligned: bool = True,
    checks: bool = False,
) -> Planned | None:
    """The variant for M rows that a row kernel gathers first; None if the choice for ``problem`` gathers them on load.

    ``fusion`` has all fusions of the call. ``top_k`` sorted rows read each row of x; it is 0 if x can't be gathered
    first. With ``checks`` the index must first be brought into range.
    """
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            ran = own(snapshot, problem, M, local, aligned)
            if ran is None or not can_gather(snapshot, problem, local, top_k, aligned):
                return None
            by_index = bool(code_of(problem.op, fusion & ~Fusion.GATHER))
            way = Way.ROWS_FIRST_BY_INDEX if by_index else Way.ROWS_FIRST
            return _instead(snapshot, ran, problem, way, top_k, local, aligned, checks)


def fused_silu(
    snapshot: Snapshot,
    problem: Problem,
    M: int,
    local: LocalGpu,
    *,
    aligned: bool,
    top_k: int = 1,
    checks: bool = False,
) -> Planned | None:
    """The variant with silu in its epilogue for M rows of ``problem``; None if the activation runs after the product.

    ``problem`` has ``Fusion.SILU``. If the call gathers and the returned variant does not, a row kernel gathers the
    rows first. ``top_k`` and ``checks`` are as in ``rows_first``.
    """
    plain = plain_of(problem)
    if snapshot.invariance is not None:  # the fused kernel does not round h, but calls with a gradient do
        return None
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            ran = own(snapshot, plain, M, local, aligned)
            if ran is None:
                return None
            at = top_k if can_gather(snapshot, plain, local, top_k, aligned) else 0
            return _instead(snapshot, ran, plain, Way.FUSED_SILU, at, local, aligned, checks)


def quantised_x(
    snapshot: Snapshot, problem: Problem, other: DType, M: int, local: LocalGpu, *, top_k: int, aligned: bool = True
) -> Planned | None:
    """The variant for M rows of ``problem``, which quantises x; None if the product in ``other`` runs, with bf16 x.

    ``top_k`` sorted rows read each row of x if a row kernel gathers them; it is 0 if none does.
    """
    bucket, plain = bucket_of(M), problem._replace(dtype=other)
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            if lacks_for_codes(snapshot, problem, local) is not None:
                return None
            if snapshot.invariance is not None:
                if not always_quantises(snapshot, plain, local):
                    return None
                coded = settle(snapshot, problem, bucket, local, aligned, False)
                return Planned(coded.chosen.usable, coded.chosen.index) if isinstance(coded, Decision) else None
            ran = settle(snapshot, plain, bucket, local, aligned, False)
            if isinstance(ran, Decision) and ran.chosen.match is Match.EXACT:
                return _instead(snapshot, ran.chosen, plain, Way.QUANTISED_X, top_k, local, aligned, False)
            coded = settle(snapshot, problem, bucket, local, aligned, False)
            if not isinstance(coded, Decision):
                return None
            chosen = coded.chosen
            if isinstance(ran, Decision) and not modelled_is_faster(chosen, ran.chosen, problem, bucket, local, top_k):
                return None
            return Planned(chosen.usable, chosen.index)


def always_quantises(snapshot: Snapshot, plain: Problem, local: LocalGpu) -> bool:
    """True if the batch-invariant mode quantises x in every call, False if in none.

    It quantises if the mode says so (``quantize_x``), or if no kernel runs ``plain``, the problem with bf16 x.
    """
    asked = snapshot.invariance is not None and snapshot.invariance.quantize_x
    return asked or not snapshot.serves(plain, local)


def of_codes(
    snapshot: Snapshot,
    problem: Problem,
    other: DType,
    M: int,
    local: LocalGpu,
    *,
    top_k: int,
    op: RowOp | None = RowOp.ORDER_CODES,
) -> Planned | None:
    """The variant for M rows of ``problem`` whose x arrives as codes; None if no usable bundle has one.

    The variant is that of ``quantised_x``, if there is one, else the best for codes. ``op`` is the row kernel that
    provides the codes; None means that x is bf16 and must be quantised.
    """
    if lacks_for_codes(snapshot, problem, local, op) is not None:
        return None
    planned = quantised_x(snapshot, problem, other, M, local, top_k=top_k)
    while planned is None:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            coded = settle(snapshot, problem, bucket_of(M), local, True, False)
            return Planned(coded.chosen.usable, coded.chosen.index) if isinstance(coded, Decision) else None
    return planned


def own(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, aligned: bool) -> Candidate | None:
    """The candidate that runs the problem, if a choice for this very cell names it."""
    decided = settle(snapshot, problem, bucket_of(M), local, aligned, False)
    return decided.chosen if isinstance(decided, Decision) and decided.chosen.match is Match.EXACT else None


def plain_of(problem: Problem) -> Problem:
    """The problem without silu in the epilogue."""
    return problem._replace(fusion=code_of(problem.op, problem.fusion & ~Fusion.SILU))


def never_on_load(problem: Problem) -> bool:
    """True if no kernel for the problem can gather rows as it loads them; none can for quantised weights."""
    return problem.dtype.quantised


def can_gather(snapshot: Snapshot, problem: Problem, local: LocalGpu, top_k: int, aligned: bool) -> bool:
    """True if a row kernel can gather rows of x before the GEMM."""
    if not top_k or not aligned:
        return False
    return bool(rowops.ranked(snapshot, RowOp.GATHER, dtype_of(problem.dtype), local, aligned=True))


def lacks_for_codes(snapshot: Snapshot, problem: Problem, local: LocalGpu, op: RowOp | None = None) -> str | None:
    """Why no kernel on this GPU can run the problem with quantised x, for messages; None if one can.

    ``op`` is the row kernel that provides x's codes; None means the row kernel that quantises bf16 x.
    """
    target = ARCHS.get(local.sm)
    if target is not None and not has_code(problem.op, problem.dtype, local.sm, problem.layout):
        if not target.has(Feature.FP8):
            return f"x stays bf16: {target} has no products of e4m3, so w becomes bf16"
        return f"x stays bf16: no kernel for {target} multiplies codes by codes of such w"
    if not takes_codes_of_x(problem.dtype, problem.layout):
        served = snapshot.serves(problem, local)
        return None if served else "x stays bf16: no bundle has the GEMM with quantised x"
    op = op or CODE_OPS[problem.dtype].quantize
    if not rowops.ranked(snapshot, op, dtype_of(problem.dtype), local, aligned=True):
        does = "orders its codes" if op is RowOp.ORDER_CODES else "quantises it"
        return f"x stays bf16: no usable bundle has the row kernel that {does}"
    return None


def modelled_is_faster(
    coded: Candidate, ran: Candidate, problem: Problem, bucket: int, local: LocalGpu, top_k: int
) -> bool:
    """True if the cost model says that quantised x is faster; False if it did not choose both kernels."""
    if (coded.match, ran.match) != (Match.COST_MODEL, Match.COST_MODEL):
        return False
    from ...kernels.chips import chip_named
    from ...kernels.plans import quantised_is_faster  # imported here: bundles have plans for what they were built for

    chip = chip_named(local.gpu.name)
    faster, _ = quantised_is_faster(problem, bucket, coded.time_us, ran.time_us, coded.source, top_k, chip)
    return faster


def _instead(
    snapshot: Snapshot,
    ran: Candidate,
    problem: Problem,
    way: Way,
    top_k: int,
    local: LocalGpu,
    aligned: bool,
    checks: bool,
) -> Planned | None:
    """The variant that the candidate's plan names for the call; None if there is none, or it can't run here."""
    index = planned(ran.plan, way, top_k, checks=checks)
    if index is None:
        return None
    variant = snapshot.variant(ran.usable.bundle, index)
    asked = problem._replace(dtype=variant.dtype, fusion=variant.fusion, top_k=0)
    able = why_not(variant, asked, local, aligned=aligned) is None and in_order(
        snapshot, ran.usable, variant, asked, local
    )
    return Planned(ran.usable, index) if able else None
