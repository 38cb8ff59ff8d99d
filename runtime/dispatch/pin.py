"""A kernel that the caller names, in place of dispatch's own decision: ``kernel_config_fwd`` and its kin."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING, TypeAlias

from ...artifacts.errors import InputError
from ...artifacts.records import Fusion, Op, Problem
from ...artifacts.tuples import NamedTuple
from .snapshot import Rejected, Snapshot, Usable

if TYPE_CHECKING:
    from ...artifacts.records import Choice, LocalGpu
    from ...kernels.spec import Config


class Preference(NamedTuple):
    """The preferred config for one GEMM, by the call's fusions.

    If no usable bundle has the config for a call, or the config is None, the bundles' own choice runs.
    """

    configs: tuple[tuple[Fusion, Config], ...] = ()

    @property
    def config(self) -> Config | None:
        """The config for a call without fusions."""
        return self.of(Fusion.NONE)

    def of(self, fusion: Fusion) -> Config | None:
        """The config for a call with this fusion."""
        return dict(self.configs).get(fusion)


NOTHING = Preference()


class KernelPair(NamedTuple):
    """The preferred configs of a layer's first and second GEMM, for one op; ``is_first_gemm`` selects."""

    op: Op
    first: Preference = NOTHING
    second: Preference = NOTHING

    def of(self, *, is_first_gemm: bool) -> Preference:
        """The preference of the first or the second GEMM."""
        return self.first if is_first_gemm else self.second


Pin: TypeAlias = "Config | Choice | Preference"

_SHOWN = 3


_OPS = {"kernel_config_fwd": Op.FORWARD, "kernel_config_bwd_dX": Op.DX, "kernel_config_bwd_dW": Op.DW}


def check_pin(name: str, pin: object, *, is_first_gemm: bool = True) -> Pin | None:
    """Return ``pin`` if it can name a variant; of a KernelPair, the preference of the first or second GEMM.

    Raises
    ------
    InputError
        for anything but None, a Config, a Choice, or a KernelPair (or half of one) of this op.
    """
    if pin is None:
        return None
    from ...artifacts.records import Choice
    from ...kernels.spec import Config

    if isinstance(pin, KernelPair):
        if pin.op is not _OPS[name]:
            raise InputError(f"grouped_gemm: {name} is a KernelPair of {pin.op.value}, wanted {_OPS[name].value}'s")
        return pin.of(is_first_gemm=is_first_gemm)
    if isinstance(pin, (Config, Choice, Preference)):
        return pin
    raise InputError(
        f"grouped_gemm: {name} is a {type(pin).__name__}, wanted a pretuned.kernels.spec.Config or "
        "a pretuned.artifacts.records.Choice that an open bundle has, a KernelPair of "
        "get_or_autotune_moe_kernels, or None for the bundles' own choice"
    )


def preferred(
    snapshot: Snapshot, pin: Preference, problem: Problem, local: LocalGpu, *, aligned: bool
) -> Config | None:
    """The preferred config for a call with the problem's fusions, if a usable bundle has it; else None."""
    config = pin.of(problem.fusion)
    while config is not None:  # search again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            there = {candidate for candidate, *_ in _configs(snapshot, problem, local, aligned)}
            return config if config in there else None
    return None


def nearest(
    snapshot: Snapshot, knobs: Mapping[str, int], problem: Problem, local: LocalGpu, *, aligned: bool
) -> Config | None:
    """The config nearest to the preferred knobs, of all variants that can run the problem; None if there are none.

    ``knobs`` has values of some of a config's knobs by name; the others may be anything.
    """
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            there = sorted({candidate for candidate, *_ in _configs(snapshot, problem, local, aligned)})
            return min(there, key=lambda candidate: _distance(candidate, knobs), default=None)


def find(
    snapshot: Snapshot, pin: Config | Choice, problem: Problem, local: LocalGpu, *, aligned: bool
) -> tuple[Usable, int]:
    """The first usable bundle with the pinned variant, and the variant's index there; InputError if there is none."""
    from ...artifacts.records import Choice

    there = list(_configs(snapshot, problem, local, aligned))
    if isinstance(pin, Choice):
        for usable in snapshot.view(local, installed=True).usable:
            runs_here = any(other is usable and index == pin.variant for _config, other, index in there)
            if runs_here and pin in snapshot.find(usable.bundle, problem):
                return usable, pin.variant
        raise InputError(
            f"grouped_gemm: no usable bundle has the choice {pin} for {problem}, or its variant can't run here. "
            f"Its choices are those of BundleFile.find(problem), or of problem.transposed's; {_listed(there, None)}"
        )
    for config, usable, index in there:
        if config == pin:
            return usable, index
    raise InputError(
        f"grouped_gemm: no usable bundle has a variant {pin} that can run {problem} on {local}; {_listed(there, pin)}"
    )


def _configs(
    snapshot: Snapshot, problem: Problem, local: LocalGpu, aligned: bool
) -> Iterator[tuple[Config, Usable, int]]:
    from ...kernels.spec import Config
    from .decide import in_order, why_not

    for usable in snapshot.having(problem, local):
        for index, variant in snapshot.variants(usable.bundle, problem):
            able = why_not(variant, problem, local, aligned=aligned) is None
            if able and in_order(snapshot, usable, variant, problem, local):
                yield Config.from_pairs(variant.config), usable, index


def _listed(there: list[tuple[Config, Usable, int]], near: Config | None) -> str:
    from ...kernels.spec import FIELDS

    configs = sorted({config for config, *_ in there})
    if not configs:
        return "there are none for this kind of problem. Build some with `aot build`"
    if near is not None:
        wish = {name: getattr(near, name) for name in FIELDS}
        configs.sort(key=lambda config: (_distance(config, wish), config))
    return f"the nearest of {len(configs)}: {'; '.join(map(str, configs[:_SHOWN]))}"


def _distance(config: Config, knobs: Mapping[str, int]) -> float:
    """The distance from a config to preferred knobs, in doublings; a different knob that is no number counts as one."""
    from ...kernels.spec import RANGES

    apart = (
        abs(math.log2(getattr(config, name) / wanted)) if name in RANGES else float(getattr(config, name) != wanted)
        for name, wanted in knobs.items()
    )
    return math.fsum(apart)
