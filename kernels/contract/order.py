"""In which order a kernel sums K: what decides whether two variants give the same bits for the same operands."""

from __future__ import annotations

from ...artifacts.tuples import NamedTuple
from ..hardware.arch import Arch, Feature
from .spec import Spec

# Instructions whose own sums over K are not known to agree have different names.
# On sm_90 wgmma and mma.sync of 16-bit operands agree: one bit pattern of all shipped forwards on an H100 (issue 71).
WIDE_OR_NARROW, WIDE, WIDE_FROM_REGISTERS, TENSOR_MEMORY, NARROW, LANES = (
    "wgmma or mma.sync",
    "wgmma",
    "wgmma from registers",
    "tcgen05",
    "mma.sync",
    "fma",
)
PREPARED = "prepared codes"  # the operands of kernels that are faster than those for the checkpoint layout
_PREFERENCE = (WIDE_OR_NARROW, TENSOR_MEMORY, WIDE, WIDE_FROM_REGISTERS, NARROW, LANES)
_ROWS_OF_WGMMA, _WARPS_OF_WGMMA = 64, 4


class Order(NamedTuple):
    """How one element of a product is summed. Variants whose orders are equal give equal bits.

    Which rows share a tile, how many warps and stages there are, and which rows are loaded together is no part of it.
    """

    operands: str  # what the instructions multiply
    instruction: str  # one of the names above
    step: int  # of K, that one instruction sums; the next one's sum is added to its result, K ascending
    accumulators: int = 1  # that share out K; their sums are added at the end
    share: int = 0  # of K, that one of several accumulators has before it is another's turn
    partial: int = 0  # of K, after which the tensor cores' sum is added to one in registers; 0: never
    kept: str = "fp32"  # the type of the sum in registers
    low_rank: bool = False  # the product with an adapter's columns follows in the same accumulator
    rounds: bool = True  # the sum, with bias and weight, is rounded to y's dtype before anything else is done with it

    @property
    def preference(self) -> tuple[object, ...]:
        """Ascending: of orders that a problem has variants of, the batch-invariant mode takes the first.

        Code of one accumulator has tiles for any number of rows, code that shares out K for few rows alone.
        """
        exact = not self.rounds, self.accumulators, self.kept != "fp32"
        return (*exact, not self.operands.startswith(PREPARED), _PREFERENCE.index(self.instruction), *map(str, self))

    def __str__(self) -> str:
        words = [f"{self.operands} by {self.instruction}, {self.step} of K at a time"]
        if self.accumulators > 1:
            words.append(f"K shared out between {self.accumulators} sums, {self.share} at a time")
        if self.partial:
            words.append(f"sums of {self.partial} of K added in {self.kept}")
        words += ["then an adapter's columns"] if self.low_rank else []
        words += [] if self.rounds else ["not rounded before the activation"]
        return "; ".join(words)


def wide(spec: Spec, arch: Arch) -> bool:
    """Whether Triton takes a warpgroup's instructions for a dot of such a tile, where an architecture has them."""
    c = spec.config
    return arch.has(Feature.MMA_ASYNC) and c.block_m >= _ROWS_OF_WGMMA and c.num_warps >= _WARPS_OF_WGMMA


def instruction(spec: Spec, arch: Arch, *, agree: bool = False) -> str:
    """The tensor cores' instruction of a dot of Triton's; ``agree``: of operands for which sm_90's are known to agree.

    Ampere, Ada and sm_120 have mma.sync alone. Of Blackwell's two nobody knows whether they agree.
    """
    if agree and arch.has(Feature.WGMMA):
        return WIDE_OR_NARROW
    if not wide(spec, arch):
        return NARROW
    return WIDE if arch.has(Feature.WGMMA) else TENSOR_MEMORY
