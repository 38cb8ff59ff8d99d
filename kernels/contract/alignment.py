"""What aligned code asks of the memory that it reads and stores to."""

from __future__ import annotations

from ...artifacts.records.problem import Problem

ALIGNMENT_BYTES = 16  # of every pointer, row stride and row length


def is_aligned(alignment: int, *values_bytes: int) -> bool:
    """Whether every pointer, row stride and row length, in bytes, keeps to ``alignment``."""
    mixed = 0
    for value in values_bytes:
        mixed |= value
    return mixed % alignment == 0


def has_aligned_rows(problem: Problem) -> bool:
    """Whether both row lengths of the weight, N and K, are multiples of 16 bytes."""
    return is_aligned(ALIGNMENT_BYTES, problem.N * problem.dtype.itemsize, problem.K * problem.dtype.itemsize)
