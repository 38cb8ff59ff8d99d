"""``preload``: every cubin that a deployment can need, loaded before the first request."""

from __future__ import annotations

import contextlib
import difflib
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..artifacts.errors import InputError, ProblemNotInBundle
from ..artifacts.types import Problem, bucket_of
from . import discover
from .device import current_device, local_gpu
from .discover import View
from .dispatch import naturally_aligned
from .loading import prepare
from .settings import settings

_ROWS = 1 << 20  # prepared for where nobody says: past it, decisions are those of the last bucket
_MOST_ROWS = (1 << 31) - 1


@dataclass(frozen=True, slots=True)
class Preloaded:
    """What ``preload`` did: ``count`` variants stand loaded for ``problems`` problems, ``seconds`` later."""

    count: int
    problems: int
    seconds: float


def preload(
    models: Sequence[str] | None = None,
    problems: Iterable[Problem] | None = None,
    tokens: range | None = None,
    device: int | None = None,
) -> Preloaded:
    """Load every variant that the calls of a deployment can come to; afterwards such calls load nothing.

    Parameters
    ----------
    models
        Names of models that the bundles were built for (``aot inspect`` lists them), in every sharding.
        With neither models nor problems: all problems of all usable bundles.
    problems
        Problems, beside the models' or in their place.
    tokens
        The tokens of one step, e.g. ``range(1, 8193)``. The rows that they make can be as few as one
        (expert parallelism) and as many as tokens * E. All buckets, if None.
    device
        torch's index of the GPU; its current device if None.

    Raises
    ------
    InputError
        for a model that no usable bundle knows; the message names the nearest.
    HostError, CudaError
        if there is no GPU, or the driver refuses the code.
    """
    began = time.perf_counter()
    device = current_device() if device is None else device
    local, snapshot = local_gpu(device), discover.snapshot()
    view = snapshot.view(local, installed=True)
    view.demand_named_files()
    wanted = dict.fromkeys(problems or ())
    if models is not None:
        wanted.update(dict.fromkeys(problems_of(models, view)))
    elif problems is None:
        wanted.update(dict.fromkeys(problem for usable in view.usable for problem in usable.bundle.problems()))
    kernels = set()
    for problem in wanted:
        for bucket in buckets(problem, tokens):
            with contextlib.suppress(ProblemNotInBundle):  # strict mode: the call itself will raise
                kernel = prepare(
                    snapshot, problem, bucket, local, device,
                    aligned=naturally_aligned(problem), strict=settings().strict,
                )  # fmt: skip
                if kernel is not None:
                    kernels.add(kernel.function.handle)
    return Preloaded(len(kernels), len(wanted), time.perf_counter() - began)


def problems_of(names: Sequence[str], view: View) -> list[Problem]:
    """The problems of the models of these names, in every sharding and dtype that the bundles have.

    Raises
    ------
    InputError
        for a name that no bundle knows.
    """
    records = [model for usable in view.usable for model in usable.bundle.models()]
    known = sorted({model.name for model in records})
    for name in names:
        if name not in known:
            near = difflib.get_close_matches(name, known, 3, 0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise InputError(
                f"preload: no usable bundle was built for model {name!r} ({len(known)} models are known){hint}. "
                f"Build it with: aot build --models {name}"
            )
    return [problem for model in records if model.name in names for problem in model.problems]


def buckets(problem: Problem, tokens: range | None) -> list[int]:
    """The buckets that a step of so many tokens can come to: from one row up to ``tokens`` * E."""
    most = _ROWS if tokens is None else min(max(*tokens[:1], *tokens[-1:], 0, 0) * problem.E, _MOST_ROWS)
    return [1 << power for power in range(bucket_of(most).bit_length())] if most else []
