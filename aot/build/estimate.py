"""Estimate the variants, time and size of a build, without building."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ...artifacts.errors import HostError
from ...kernels.arch import Feature, arch_of
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from ..compile.cache import CompileCache
from ..compile.pool import default_workers
from ..compile.shipped import Shipped
from ..plan.families import Pool, families, to_compile
from ..plan.plan import BuildPlan, planned_on

# CPU seconds of a variant with its assembler, measured with Triton 3.7 on two busy server cores.
_VARIANT_S = 0.7
_SPECIALIZED_S = 2.1
_PASS_S = 0.4
_START_S = 1.5  # the workers import Triton
_TAKE_S = 1.5  # start, and read the shipped candidates of a capability
_PROBLEM_S = 0.01  # ranking and selecting, for a problem and capability
_CUBIN_BYTES = 37_000
_TMA_CUBIN_BYTES = 50_000  # sm_90 and later
_PASS_BYTES = 17_000
_CHOICE_BYTES = 24
_SHIPPED = 7  # typical number of variants that ship for an op, dtype, layout and fusion; fewer if there are few shapes


@dataclass(frozen=True, slots=True)
class Estimate:
    """The estimate for one capability: ``shipped`` variants come compiled, ``variants`` are to be compiled.

    ``cached`` of them are in the compile cache; None if no Triton is installed to tell.
    """

    sm: int
    problems: int
    choices: int
    shipped: int
    variants: int
    cached: int | None
    seconds: float
    size_bytes: int

    def to_dict(self) -> dict[str, object]:
        """The estimate as plain values for JSON."""
        return {
            "sm": self.sm,
            "problems": self.problems,
            "choices": self.choices,
            "shipped": self.shipped,
            "variants": self.variants,
            "cached": self.cached,
            "expected_seconds": round(self.seconds, 1),
            "expected_size_bytes": self.size_bytes,
        }


def estimate(
    plan: BuildPlan,
    sms: Sequence[int],
    cache: CompileCache | None,
    workers: int | None = None,
    shipped: Callable[[int], Shipped] = Shipped.found,
) -> list[Estimate]:
    """Estimate each capability; the times add up, as the capabilities share the workers."""
    estimates = []
    for sm in sms:
        here = planned_on(plan, (sm,))
        wanted = to_compile(here.problems, sm, Pool())
        passes = sum(isinstance(spec, RowOpSpec) for spec in wanted)
        count = len(families(here.problems))
        there = shipped(sm)
        needed = [spec for spec in wanted if not there.has(spec, sm)]
        fresh = _fresh(needed, sm, cache)
        cached = None if fresh is None else len(needed) - len(fresh)
        fresh = needed if fresh is None else fresh
        seconds = sum(map(_cpu_s, fresh)) / (workers or default_workers()) + _PROBLEM_S * len(here.problems)
        seconds += _TAKE_S + (_START_S if fresh and sm == sms[0] else 0.0)
        size = count * _SHIPPED * (_TMA_CUBIN_BYTES if arch_of(sm).has(Feature.TMA) else _CUBIN_BYTES)
        size += passes * _PASS_BYTES + here.choices * _CHOICE_BYTES
        estimates.append(
            Estimate(
                sm, len(here.problems), here.choices, len(wanted) - len(needed), len(needed), cached, seconds, size
            )
        )
    return estimates


def _fresh(
    wanted: Sequence[Spec | RowOpSpec], sm: int, cache: CompileCache | None
) -> Sequence[Spec | RowOpSpec] | None:
    """The variants that are not cached; None if no Triton is installed to tell."""
    if cache is None:
        return wanted
    try:
        return [spec for spec in wanted if not cache.has(spec, sm)]
    except HostError:
        return None


def _cpu_s(spec: Spec | RowOpSpec) -> float:
    """CPU seconds to compile a variant."""
    if isinstance(spec, RowOpSpec):
        return _PASS_S
    return _SPECIALIZED_S if spec.config.schedule.warp_specialized else _VARIANT_S
