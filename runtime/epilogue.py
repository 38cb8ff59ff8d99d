"""Whether silu(gate) * up is computed in the first product's epilogue, where a layer keeps no h for a gradient.

The code for it (``Fusion.SILU``) stores half of the columns and saves the pass over h, but its product alone is about
2 % slower than the plain one (H200), and has no small tiles. So it runs only where one bundle says of both, for this
very problem and bucket, that it takes less time:

- measured, on one GPU: the fused product takes no longer than the plain product's choice and the least that the pass
  takes beside it. That is 3/4 of the time in which the GPU's memory, at its published rate, moves h and the result
  once: of the passes timed on an H200 at 1024 tokens and more the quickest, which finds h in L2, took 0.86 of it
  (benchmarks/results/trials/activation-in-the-epilogue.json). It is zero for a GPU whose rate is not known;
- modelled: its estimate is not above the plain product's, and an expert has 64 rows, half of a tile, in the mean: there
  every trial on an H200 won, with 8 it lost, and the cost model does not tell the two kinds of tiles apart so well.

Else the layer runs the plain product and the pass, as it does with a bias, another activation or a gradient.
"""

from __future__ import annotations

import contextlib
from dataclasses import replace
from typing import NamedTuple

from ..artifacts.errors import BundleError
from ..artifacts.types import Choice, Fusion, Gpu, Problem, Source, bucket_of
from ..kernels import chips
from ..kernels.abi import code_of, result_columns
from .candidates import Candidate, Match, same_gpu, why_not
from .device import LocalGpu, local_gpu
from .discover import Rejected, Snapshot
from .dispatch import Decision, settle
from .launch import LoadedKernel
from .loading import loaded

_MODELLED_ROWS = 64  # of an expert
_PASS_SHARE = 0.75  # of the time in which the memory moves what the pass moves


class Verdict(NamedTuple):
    """The variant with silu in its epilogue that runs, or None for the plain product and a pass; and why."""

    chosen: Candidate | None
    reason: str


def verdict(snapshot: Snapshot, problem: Problem, M: int, local: LocalGpu, *, aligned: bool) -> Verdict:
    """Which of the two runs M rows of ``problem``, one with ``Fusion.SILU``; the module says by what rule."""
    while True:  # each turn drops a bundle
        with contextlib.suppress(Rejected):
            return _verdict(snapshot, problem, bucket_of(M), local, aligned)


def kernel(snapshot: Snapshot, problem: Problem, M: int, device: int, *, aligned: bool) -> LoadedKernel | None:
    """The variant that ``verdict`` names, loaded on ``cuda:device``; None where the plain product is to run.

    Nothing is compiled, and nothing is logged: the plain product is an ordinary choice.
    """
    local = local_gpu(device)
    while True:  # each turn drops a bundle
        chosen = verdict(snapshot, problem, M, local, aligned=aligned).chosen
        if chosen is None:
            return None
        try:
            return loaded(chosen.usable.bundle, chosen.index, device, local.gpu.sm_count)
        except BundleError as error:
            snapshot.reject(chosen.usable.bundle, error)


def plain_of(problem: Problem) -> Problem:
    """The product without silu."""
    return replace(problem, fusion=code_of(problem.op, problem.fusion & ~Fusion.SILU))


def least_pass_us(problem: Problem, M: int, gpu: Gpu) -> float:
    """What the pass that silu in the epilogue saves takes at least, on a GPU that it was measured on; 0 if unknown.

    It reads h [M, N] and writes [M, N/2].
    """
    chip = chips.chip_named(gpu.name)
    if chip is None:
        return 0.0
    moved_bytes = M * (problem.N + result_columns(problem.N, problem.fusion)) * problem.dtype.itemsize
    return _PASS_SHARE * moved_bytes / chip.bandwidth_gbs * 1e-3


def _verdict(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu, aligned: bool) -> Verdict:
    plain = settle(snapshot, plain_of(problem), bucket, local, aligned, False)
    if not isinstance(plain, Decision):
        return Verdict(None, "no bundle runs the product itself")
    ran = plain.chosen
    if ran.match is not Match.EXACT:
        return Verdict(None, f"the product's own choice is {plain.reason}: there is nothing to compare times with")
    bundle = ran.usable.bundle
    choice = next((one for one in snapshot.find(bundle, problem) if one.bucket == bucket), None)
    if choice is None:
        return Verdict(None, f"{ran.usable.path.name} has no choice for it at M <= {bucket}")
    variant = snapshot.variant(bundle, choice.variant)
    lacking = why_not(variant, problem, local, aligned=aligned)
    if lacking is not None:
        return Verdict(None, f"its variant can't run here: {lacking}")
    gpu = None if choice.gpu is None else bundle.gpus[choice.gpu]
    if not _comparable(choice, gpu, ran):
        return Verdict(None, "its time and the product's are not of one source")
    if gpu is None and bucket < _MODELLED_ROWS * problem.E:
        return Verdict(None, f"its time is modelled, and {bucket} rows are fewer than {_MODELLED_ROWS} an expert")
    time_us = choice.time_ns / 1e3
    saved_us = 0.0 if gpu is None else least_pass_us(problem, bucket, gpu)
    times = f"{time_us:.1f} us {choice.source.value}, the product {ran.time_us:.1f} us"
    times += f" and the pass {saved_us:.1f} us at least" if saved_us else ""
    if time_us > ran.time_us + saved_us:
        return Verdict(None, f"it is slower: {times}")
    fused = Candidate(
        ran.usable, choice.variant, variant, ran.origin, Match.EXACT, choice.source, bucket, time_us, gpu
    )  # fmt: skip
    return Verdict(fused, f"silu in the epilogue is faster at M <= {bucket}: {times}")


def _comparable(choice: Choice, gpu: Gpu | None, ran: Candidate) -> bool:
    """Whether the two times are of one source: one GPU, or one cost model."""
    if choice.source is not ran.source:
        return False
    if choice.source is Source.MODELLED:
        return True
    return gpu is not None and ran.gpu is not None and same_gpu(gpu, ran.gpu)
