"""Other code for a product, held against the choice that dispatch makes: what one bundle says of both, no more.

Times of two bundles, two GPUs or two sources are never compared.
"""

from __future__ import annotations

from dataclasses import replace

from ...artifacts.records.problem import Problem
from ...artifacts.records.target import LocalGpu, same_gpu
from .decide import Decision, settle
from .ranking import Candidate, Match, why_not
from .snapshot import Snapshot


def own(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool) -> Candidate | str:
    """What runs the problem without a rival, if a choice for this very problem and bucket does; else why not."""
    decided = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(decided, Decision):
        return "no bundle has the plain GEMM"
    if decided.chosen.match is not Match.EXACT:
        return f"the plain GEMM has no time to compare with, as its choice is {decided.reason}"
    return decided.chosen


def rival(
    snapshot: Snapshot, ran: Candidate, problem: Problem, bucket: int, local: LocalGpu, aligned: bool
) -> Candidate | str:
    """The choice of the same bundle for another form of the product whose time compares with ``ran``'s."""
    bundle = ran.usable.bundle
    there = [one for one in snapshot.find(bundle, problem) if one.bucket == bucket]
    if not there:
        return f"{ran.usable.path.name} has no choice for it at M near {bucket}"
    choice = next((one for one in there if same_gpu(one.measured_on(bundle.gpus), ran.gpu)), None)
    if choice is None:
        return "its time and the plain GEMM's are not from one source"
    variant = snapshot.variant(bundle, choice.variant)
    lacking = why_not(variant, problem, local, aligned=aligned)
    if lacking is not None:
        return f"its variant can't run here: {lacking}"
    return Candidate(
        ran.usable,
        choice.variant,
        variant,
        ran.origin,
        Match.EXACT,
        choice.source,
        bucket,
        choice.time_ns / 1e3,
        choice.measured_on(bundle.gpus),
    )


def second(snapshot: Snapshot, first: Candidate, problem: Problem, local: LocalGpu, aligned: bool) -> Candidate | None:
    """The runner-up of the choice that ``first``, a ``rival``, is; None where there is none that can run."""
    bundle = first.usable.bundle
    there = (one for one in snapshot.find(bundle, problem) if one.bucket == first.bucket)
    choice = next(one for one in there if one.measured_on(bundle.gpus) == first.gpu)
    if choice.runner_up is None or choice.runner_up_ns is None:
        return None
    variant = snapshot.variant(bundle, choice.runner_up)
    if why_not(variant, problem, local, aligned=aligned) is not None:
        return None
    return replace(first, index=choice.runner_up, variant=variant, time_us=choice.runner_up_ns / 1e3)
