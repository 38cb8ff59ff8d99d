"""Other code for a product, held against the choice that dispatch makes: what one bundle says of both, no more.

Times of two bundles, two GPUs or two sources are never compared.
"""

from __future__ import annotations

from dataclasses import replace

from ...artifacts.records.bundle import Choice, Source
from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu, LocalGpu
from .decide import Decision, settle
from .ranking import Candidate, Match, why_not
from .snapshot import Snapshot


def own(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool) -> Candidate | str:
    """What runs the problem without a rival, if a choice for this very problem and bucket does; else why not."""
    decided = settle(snapshot, problem, bucket, local, aligned, False)
    if not isinstance(decided, Decision):
        return "no bundle runs the product itself"
    if decided.chosen.match is not Match.EXACT:
        return f"the product's own choice is {decided.reason}: there is nothing to compare times with"
    return decided.chosen


def rival(
    snapshot: Snapshot, ran: Candidate, problem: Problem, bucket: int, local: LocalGpu, aligned: bool
) -> Candidate | str:
    """The choice of the same bundle for another form of the product, if its time compares with ``ran``'s."""
    bundle = ran.usable.bundle
    choice = next((one for one in snapshot.find(bundle, problem) if one.bucket == bucket), None)
    if choice is None:
        return f"{ran.usable.path.name} has no choice for it at M near {bucket}"
    variant = snapshot.variant(bundle, choice.variant)
    lacking = why_not(variant, problem, local, aligned=aligned)
    if lacking is not None:
        return f"its variant can't run here: {lacking}"
    gpu = None if choice.gpu is None else bundle.gpus[choice.gpu]
    if not _comparable(choice, gpu, ran):
        return "its time and the product's are not of one source"
    return Candidate(
        ran.usable, choice.variant, variant, ran.origin, Match.EXACT, choice.source, bucket, choice.time_ns / 1e3, gpu
    )


def second(
    snapshot: Snapshot, first: Candidate, problem: Problem, local: LocalGpu, aligned: bool
) -> Candidate | None:  # fmt: skip
    """The runner-up of the choice that ``first``, a ``rival``, is; None where there is none that can run."""
    choice = next(one for one in snapshot.find(first.usable.bundle, problem) if one.bucket == first.bucket)
    if choice.runner_up is None or choice.runner_up_ns is None:
        return None
    variant = snapshot.variant(first.usable.bundle, choice.runner_up)
    if why_not(variant, problem, local, aligned=aligned) is not None:
        return None
    return replace(first, index=choice.runner_up, variant=variant, time_us=choice.runner_up_ns / 1e3)


def _comparable(choice: Choice, gpu: Gpu | None, ran: Candidate) -> bool:
    """Whether the two times are of one source: one GPU, or one cost model."""
    if choice.source is not ran.source:
        return False
    if choice.source is Source.MODELLED:
        return True
    return gpu is not None and ran.gpu is not None and gpu.is_like(ran.gpu)
