"""What a build would compile, take and weigh, without building."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..artifacts.errors import HostError
from ..kernels.abi import Spec
from ..kernels.passes import PassSpec
from .compilecache import CompileCache
from .plan import Plan, planned_on
from .variants import Space, by_code, families, pass_specs, specs
from .workers import default_workers

# Seen on two 2024 server cores with Triton 3.7: 374 variants of all ops took 161 s of CPU in all.
_VARIANT_S = 0.43
_START_S = 1.5  # the workers import Triton
_PROBLEM_S = 0.003  # ranking and selecting, for a problem and capability
_CUBIN_BYTES = 37_000
_PASS_BYTES = 14_000
_CHOICE_BYTES = 24
_SHIPPED = 7  # variants of a family: fewer where few shapes are asked for


@dataclass(frozen=True, slots=True)
class Estimate:
    """One capability. ``variants`` are those to compile; ``cached`` is None where no Triton is installed to tell."""

    sm: int
    problems: int
    choices: int
    variants: int
    cached: int | None
    seconds: float
    size_bytes: int

    def to_dict(self) -> dict[str, object]:
        """For JSON."""
        return {
            "sm": self.sm,
            "problems": self.problems,
            "choices": self.choices,
            "variants": self.variants,
            "cached": self.cached,
            "expected_seconds": round(self.seconds, 1),
            "expected_size_bytes": self.size_bytes,
        }


def estimate(plan: Plan, sms: Sequence[int], cache: CompileCache | None, workers: int | None = None) -> list[Estimate]:
    """An estimate per capability; the times add up, as the capabilities share the workers."""
    found = []
    for sm in sms:
        here = planned_on(plan, (sm,))
        beside = pass_specs(here.problems)
        wanted: list[Spec | PassSpec] = [group[0] for group in by_code(specs(here.problems, sm, Space()), sm)]
        wanted += beside
        count = len(families(here.problems))
        cached = _cached(wanted, sm, cache)
        fresh = len(wanted) - (cached or 0)
        seconds = fresh * _VARIANT_S / (workers or default_workers()) + _PROBLEM_S * len(here.problems)
        seconds += _START_S if fresh and sm == sms[0] else 0.0
        size = count * _SHIPPED * _CUBIN_BYTES + len(beside) * _PASS_BYTES + here.choices * _CHOICE_BYTES
        found.append(Estimate(sm, len(here.problems), here.choices, len(wanted), cached, seconds, round(size)))
    return found


def _cached(wanted: Sequence[Spec | PassSpec], sm: int, cache: CompileCache | None) -> int | None:
    if cache is None:
        return 0
    try:
        return sum(cache.has(spec, sm) for spec in wanted)
    except HostError:
        return None
