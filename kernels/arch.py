"""The table of GPU architectures: features, sizes of an SM, and whose compiled code they run.

Other modules ask ``arch_of(sm).has(Feature.WGMMA)`` and never compare a capability with a number; a test checks that.
``sm`` is 10 * major + minor. ``chips.py`` is the table of products.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping

from ..artifacts.records import Target
from ..artifacts.tuples import NamedTuple

KIB = 1024


class Feature(enum.Enum):
    """A feature that some architectures have and others lack."""

    TMA = "tma"  # one thread's copies of boxes of a tensor, through a descriptor
    WGMMA = "wgmma"  # a warpgroup's products, with operands in shared memory or the left one in registers
    TCGEN05 = "tcgen05"  # one thread's products, with sums in tensor memory
    MMA_ASYNC = "mma_async"  # asynchronous products: WGMMA or TCGEN05
    FP8 = "fp8"  # products of e4m3 and e5m2
    FP4 = "fp4"  # products of e2m1 with a scale for each block
    FAR_TMA = "far_tma"  # with some drivers a small tensor's descriptor may touch memory behind the tensor


class Generation(enum.Enum):
    """A group of architectures with similar performance: cost constants and lists of candidates are kept for each."""

    AMPERE = "ampere"  # sm_80, with HBM
    AMPERE_SMALL = "ampere_small"  # mma.sync on smaller SMs or memories: the other sm_8x, and sm_12x
    HOPPER = "hopper"
    BLACKWELL = "blackwell"  # data centre GPUs: sm_10x


class SmLimits(NamedTuple):
    """The sizes of a streaming multiprocessor (SM) of a capability.

    From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    ``shared_per_block_bytes`` is the opt-in maximum; the driver reserves ``shared_reserved_bytes`` for each resident
    block.
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
    """An architecture that kernels are compiled for."""

    sm: int  # 10 * major + minor, the driver's name of a GPU's capability
    generation: Generation
    limits: SmLimits
    features: frozenset[Feature]
    arch_specific: bool  # code runs on this architecture only; else on later minor revisions, too
    named_to_driver: bool = False  # a driver loads the code only if its minor version is at least the assembler's
    tested: bool = False  # tests/gpu runs on it before each release, fallbacks and row kernels included

    @property
    def target(self) -> Target:
        """The target recorded in bundles for this architecture."""
        return Target(self.sm, self.arch_specific)

    @property
    def name(self) -> str:
        """``sm_89``, or ``sm_90a`` if code runs on this architecture only."""
        return str(self.target)

    def has(self, feature: Feature) -> bool:
        """Return whether the architecture has a feature."""
        return feature in self.features

    def runs_on(self, sm: int) -> bool:
        """Return whether a GPU of capability ``sm`` can load code that is built for this architecture."""
        return self.target.runs_on(sm)

    def __str__(self) -> str:
        return self.name


# Features and sizes that several architectures share.
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

# Capabilities without kernels, and why.
_ABORTS = "Triton's compiler aborts on it (an LLVM error)"
_TORCH = "no kernels are built for it, torch runs there"
REFUSED: Mapping[int, str] = {
    **dict.fromkeys((50, 52, 53, 60, 61, 62, 70, 72, 75, 110), _TORCH),
    **dict.fromkeys((101, 107), _ABORTS),
}

_TORCH_GROUPED_MAJORS = (9, 10)


def supported() -> tuple[int, ...]:
    """Return the capabilities that kernels are built for, as 10 * major + minor, ascending."""
    return tuple(sorted(ARCHS))


def refusal(sm: int) -> str | None:
    """Return why no kernels are built for capability ``sm``, a sentence without its full stop; None if they are."""
    if sm in ARCHS:
        return None
    return f"No kernels are built for sm_{sm} (only {', '.join(map(str, supported()))})"


def arch_of(sm: int) -> Arch:
    """Return the architecture of capability ``sm`` (10 * major + minor).

    Raises
    ------
    LookupError
        if ``sm`` is not in the table; the message lists the capabilities that are.
    """
    try:
        return ARCHS[sm]
    except KeyError:
        raise LookupError(f"capability sm_{sm} is not known; supported: {', '.join(map(str, supported()))}") from None


def limits(sm: int) -> SmLimits:
    """Return the sizes of an SM of capability ``sm``; raises like ``arch_of``."""
    return arch_of(sm).limits


def probes_far(sm: int) -> bool:
    """Return whether capability ``sm`` has ``Feature.FAR_TMA``; False if it is not in the table."""
    return sm in ARCHS and ARCHS[sm].has(Feature.FAR_TMA)


def torch_groups(sm: int) -> bool:
    """Return whether torch has a grouped GEMM of its own for capability ``sm``, which may be missing in the table."""
    return sm // 10 in _TORCH_GROUPED_MAJORS
