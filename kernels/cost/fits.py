"""Whether compiled code is worth running on an architecture, by what its cubin takes."""

from __future__ import annotations

from ...artifacts.records.bundle import Variant
from ...artifacts.records.problem import RowOp
from ..hardware.arch import Arch
from .model import Resources, occupancy

# A few registers spilled outside the loop cost next to nothing; more than this many bytes a thread
# means that the loop itself goes through memory.
MAX_SPILL_BYTES = 64


def rejection(variant: Variant, arch: Arch) -> str | None:
    """Why a compiled variant does not ship for an architecture, or None. All figures are the cubin's own.

    A fallback goes only where it can't run at all.
    """
    limits = arch.limits
    if variant.shared_bytes > limits.shared_per_block_bytes:
        return f"{variant.shared_bytes} bytes of shared memory, sm_{arch.sm} has {limits.shared_per_block_bytes}"
    if isinstance(variant.op, RowOp):
        fits = variant.registers * variant.threads <= limits.registers_per_sm
    else:
        fits = occupancy(Resources.of(variant), limits) > 0
    if not fits:
        return (
            f"{variant.registers} registers x {variant.threads} threads, "
            f"sm_{arch.sm} has {limits.registers_per_sm} registers"
        )
    if variant.spill_bytes > MAX_SPILL_BYTES and variant.alignment != 1:
        return f"{variant.spill_bytes} bytes a thread are spilled, at most {MAX_SPILL_BYTES} are accepted"
    return None
