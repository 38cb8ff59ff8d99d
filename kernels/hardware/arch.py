"""The limits of each GPU architecture."""

from __future__ import annotations

from dataclasses import dataclass

KIB = 1024


@dataclass(frozen=True, slots=True)
class SmLimits:
    """What one streaming multiprocessor (SM) of a capability holds.

    From the CUDA C++ Programming Guide, "Technical Specifications per Compute Capability".
    ``shared_per_block_bytes`` is the opt-in maximum; the driver keeps ``shared_reserved_bytes``
    of each resident block for itself.
    """

    sm: int
    shared_per_sm_bytes: int
    shared_per_block_bytes: int
    threads_per_sm: int
    blocks_per_sm: int
    fp32_lanes: int
    registers_per_sm: int = 65536
    registers_per_thread: int = 255
    threads_per_block: int = 1024
    shared_reserved_bytes: int = KIB


LIMITS: dict[int, SmLimits] = {
    row.sm: row
    for row in (
        SmLimits(80, 164 * KIB, 163 * KIB, 2048, 32, fp32_lanes=64),
        SmLimits(86, 100 * KIB, 99 * KIB, 1536, 16, fp32_lanes=128),
        SmLimits(87, 164 * KIB, 163 * KIB, 1536, 16, fp32_lanes=128),
        SmLimits(89, 100 * KIB, 99 * KIB, 1536, 24, fp32_lanes=128),
        SmLimits(90, 228 * KIB, 227 * KIB, 2048, 32, fp32_lanes=128),
        SmLimits(100, 228 * KIB, 227 * KIB, 2048, 32, fp32_lanes=128),
        SmLimits(103, 228 * KIB, 227 * KIB, 2048, 32, fp32_lanes=128),
        SmLimits(120, 100 * KIB, 99 * KIB, 1536, 24, fp32_lanes=128),
        SmLimits(121, 100 * KIB, 99 * KIB, 1536, 24, fp32_lanes=128),
    )
}


def supported() -> tuple[int, ...]:
    """The capabilities that kernels are built for, as 10 * major + minor, ascending."""
    return tuple(sorted(LIMITS))


def limits(sm: int) -> SmLimits:
    """The limits of capability ``sm`` (10 * major + minor).

    Raises
    ------
    LookupError
        if ``sm`` is not in the table; the message lists those that are.
    """
    try:
        return LIMITS[sm]
    except KeyError:
        raise LookupError(f"capability sm_{sm} is not known; supported: {', '.join(map(str, supported()))}") from None
