"""A variant's use of an SM (registers, shared memory), its occupancy, and functions that join times."""

from __future__ import annotations

import math
from dataclasses import dataclass

from ...artifacts.records.bundle import Variant
from ...artifacts.records.problem import RowOp
from ..contract.config import Config
from ..contract.spec import MAX_EXPERTS
from ..hardware.arch import Arch, SmLimits

# A few registers spilled outside the loop cost almost nothing. With more bytes a thread the loop itself spills.
MAX_SPILL_BYTES = 64


@dataclass(frozen=True, slots=True)
class Resources:
    """A variant's config, and the resources that its cubin uses."""

    config: Config
    threads: int
    shared_bytes: int
    registers: int
    alignment: int = 16
    max_experts: int = MAX_EXPERTS

    @classmethod
    def of(cls, variant: Variant) -> Resources:
        """Return the resources of a variant in a bundle."""
        config = Config.from_pairs(variant.config)
        return cls(
            config, variant.threads, variant.shared_bytes, variant.registers, variant.alignment, variant.max_experts
        )


def occupancy(resources: Resources, sm_limits: SmLimits) -> int:
    """Return how many programs fit an SM at once; 0 if none.

    The limits are shared memory (plus the driver's share), registers (in units of 256 a warp, a quarter of the file for
    each scheduler), threads and blocks.
    """
    if resources.threads > sm_limits.threads_per_block or resources.shared_bytes > sm_limits.shared_per_block_bytes:
        return 0
    warps = max(1, -(-resources.threads // 32))
    registers_per_warp = max(1, -(-resources.registers * 32 // 256)) * 256
    by_registers = 4 * (sm_limits.registers_per_sm // 4 // registers_per_warp) // warps
    shared = -(-resources.shared_bytes // 128) * 128 + sm_limits.shared_reserved_bytes
    by_shared = sm_limits.shared_per_sm_bytes // shared
    return min(by_registers, by_shared, sm_limits.threads_per_sm // (warps * 32), sm_limits.blocks_per_sm)


def rejection(variant: Variant, arch: Arch) -> str | None:
    """Return why a compiled variant is dropped for an architecture, None if it ships. All figures are the cubin's.

    A fallback (alignment 1) is dropped only if it can't run.
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


def mean_waves(count: float, spread: float, saved: float = 0.0) -> float:
    """Return the mean of ceil over [count - spread, count + spread]; a last wave at most half full saves ``saved``."""
    high = count + spread
    if high <= 1.0 and not saved:
        return 1.0
    low = count - spread if count > spread else 0.0
    if high - low < 1e-9:
        low = 0.999 * high
    return max(1.0 - saved, (_ceil_area(high, saved) - _ceil_area(low, saved)) / (high - low))


def _ceil_area(count: float, saved: float) -> float:
    """Return the integral of ceil from 0 to ``count``, minus ``saved`` in the first half of each unit."""
    whole = int(count)
    area = (whole + 1.0) * (count - 0.5 * whole)
    return area - saved * (0.5 * whole + min(0.5, count - whole)) if saved else area


def handed_out(per_slot: float) -> tuple[float, float]:
    """Return (waves, share of the memory's rate in use) if programs take tiles when they become free.

    The last wave counts half.
    """
    if per_slot <= 1.0:
        return 1.0, max(0.25, min(1.0, 1.3 * per_slot))
    return 0.5 * (math.ceil(per_slot) + per_slot), 1.0


def join(a: float, b: float, norm: float) -> float:
    """Return the p-norm of two times: near the larger, and 2^(1/norm) times either if both are equal."""
    low, high = (a, b) if a < b else (b, a)
    joined: float = high * (1.0 + (low / high) ** norm) ** (1.0 / norm)
    return joined
