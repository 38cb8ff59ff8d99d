"""The one table of GPU architectures: what each can do, what its SMs hold, and whose compiled code it runs.

Code asks the row (``arch_of(sm).has(Feature.WGMMA)``), and compares no capability with a number: a test looks for that.
``sm``, 10 * major + minor, is what callers hand on. ``chips.py`` is the table of products.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from ...artifacts.records.target import Target
from ...artifacts.tuples import NamedTuple

KIB = 1024


class Feature(enum.Enum):
    """What an architecture can do and not all of them can."""

    TMA = "tma"  # copies of boxes of a tensor, asked for by one thread through a descriptor
    WGMMA = "wgmma"  # a warpgroup's products, with operands in shared memory or the left one in registers
    TCGEN05 = "tcgen05"  # one thread's products, with sums in memory of their own
    MMA_ASYNC = "mma_async"  # products that go on while the threads that asked for them do other work: the two above
    FP8 = "fp8"  # products of e4m3 and e5m2
    FP4 = "fp4"  # products of e2m1 with a scale for each block
    FAR_TMA = (
        "far_tma"  # a descriptor of little memory may touch what lies behind it, with a driver that has this fault
    )


class Generation(enum.Enum):
    """Whose kernels perform alike: the cost model's constants and the search's lists are kept by it."""

    AMPERE = "ampere"  # with an HBM GPU's SMs: 8.0
    AMPERE_SMALL = "ampere_small"  # mma.sync on smaller SMs or memories: the other 8.x, and 12.x
    HOPPER = "hopper"
    BLACKWELL = "blackwell"  # with a data centre's SMs: 10.x


class SmLimits(NamedTuple):
    """What one streaming multiprocessor (SM) of a capability holds.

    From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    ``shared_per_block_bytes`` is the opt-in maximum; the driver keeps ``shared_reserved_bytes``
    of each resident block for itself.
    """

    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    fp32_lanes: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    shared_reserved_bytes: int = KIB


class Arch(NamedTuple):
    """One architecture, as CUDA's compiler names it: ``sm_90a``."""

    sm: int  # 10 * major + minor: what the driver says of a GPU
    generation: Generation
    limits: SmLimits
    features: frozenset[Feature]
    arch_specific: bool  # compiled for this one architecture, with all it has; else later minor revisions run it too
    named_to_driver: bool = False  # no driver loads the code that is older, in minor version, than what assembled it
    tested: bool = False  # tests/gpu runs here before each release, fallbacks and passes over rows included

    @property
    def target(self) -> Target:
        """What code that is built for this architecture says that it is for."""
        return Target(self.sm, self.arch_specific)

    @property
    def name(self) -> str:
        """``sm_89``, or ``sm_90a`` where code is for this one alone."""
        return str(self.target)

    def has(self, feature: Feature) -> bool:
        """Whether it can do this."""
        return feature in self.features

    def runs_on(self, sm: int) -> bool:
        """Whether a GPU of capability ``sm`` can load code that is built for this architecture."""
        return self.target.runs_on(sm)

    def __str__(self) -> str:
        return self.name


# What the architectures of one design have in common.
_HOPPER = frozenset({Feature.TMA, Feature.WGMMA, Feature.MMA_ASYNC, Feature.FP8})
_BLACKWELL = frozenset({Feature.TMA, Feature.TCGEN05, Feature.MMA_ASYNC, Feature.FP8, Feature.FP4, Feature.FAR_TMA})
_RTX_BLACKWELL = frozenset({Feature.TMA, Feature.FP8, Feature.FP4, Feature.FAR_TMA})
_SMALL_SM = SmLimits(100 * KIB, 99 * KIB, 1536, 24, fp32_lanes=128)  # of Ada, and of RTX Blackwell
_LARGE_SM = SmLimits(228 * KIB, 227 * KIB, 2048, 32, fp32_lanes=128)  # of Hopper, and of Blackwell


def _ampere(sm: int, generation: Generation, limits: SmLimits, *features: Feature) -> Arch:
    return Arch(sm, generation, limits, frozenset(features), arch_specific=False)


def _blackwell(sm: int, generation: Generation, limits: SmLimits, features: frozenset[Feature]) -> Arch:
    return Arch(sm, generation, limits, features, arch_specific=True, named_to_driver=True)


ARCHS: Mapping[int, Arch] = {
    row.sm: row
    for row in (
        _ampere(80, Generation.AMPERE, SmLimits(164 * KIB, 163 * KIB, 2048, 32, fp32_lanes=64)),
        _ampere(86, Generation.AMPERE_SMALL, SmLimits(100 * KIB, 99 * KIB, 1536, 16, fp32_lanes=128)),
        _ampere(87, Generation.AMPERE_SMALL, SmLimits(164 * KIB, 163 * KIB, 1536, 16, fp32_lanes=128)),
        _ampere(89, Generation.AMPERE_SMALL, _SMALL_SM, Feature.FP8),
        Arch(90, Generation.HOPPER, _LARGE_SM, _HOPPER, arch_specific=True, tested=True),
        _blackwell(100, Generation.BLACKWELL, _LARGE_SM, _BLACKWELL),
        _blackwell(103, Generation.BLACKWELL, _LARGE_SM, _BLACKWELL),
        _blackwell(120, Generation.AMPERE_SMALL, _SMALL_SM, _RTX_BLACKWELL),
        _blackwell(121, Generation.AMPERE_SMALL, _SMALL_SM, _RTX_BLACKWELL),
    )
}

# What looks supported and is not, and why.
_ABORTS = "Triton's compiler aborts on it (an LLVM error)"
_TORCH = "no kernels are built for it, torch runs there"
REFUSED: Mapping[int, str] = {
    **dict.fromkeys((50, 52, 53, 60, 61, 62, 70, 72, 75, 110), _TORCH),
    **dict.fromkeys((101, 107), _ABORTS),
}

_TORCH_GROUPED_MAJORS = (9, 10)


def supported() -> tuple[int, ...]:
    """The capabilities that kernels are built for, as 10 * major + minor, ascending."""
    return tuple(sorted(ARCHS))


def refusal(sm: int) -> str | None:
    """Why nothing can be built for capability ``sm``, a sentence without its full stop; None where it can."""
    if sm in ARCHS:
        return None
    return f"No kernels are built for sm_{sm} (only {', '.join(map(str, supported()))})"


def arch_of(sm: int) -> Arch:
    """The architecture of capability ``sm`` (10 * major + minor).

    Raises
    ------
    LookupError
        if ``sm`` is not in the table; the message lists those that are.
    """
    try:
        return ARCHS[sm]
    except KeyError:
        raise LookupError(f"capability sm_{sm} is not known; supported: {', '.join(map(str, supported()))}") from None


def limits(sm: int) -> SmLimits:
    """What an SM of capability ``sm`` holds; raises as ``arch_of``."""
    return arch_of(sm).limits


def probes_far(sm: int) -> bool:
    """Whether capability ``sm`` has ``Feature.FAR_TMA``; one that is not of this table has not."""
    return sm in ARCHS and ARCHS[sm].has(Feature.FAR_TMA)


def torch_groups(sm: int) -> bool:
    """Whether torch has a grouped GEMM of its own for capability ``sm``, of this table or not: by its major number."""
    return sm // 10 in _TORCH_GROUPED_MAJORS
