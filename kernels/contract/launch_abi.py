"""The launch ABI: the meaning of each argument of a kernel, on which compiler and launcher agree.

The names in a variant's ``arguments`` by launch ABI 1:

=======================  =====================================================================
``x w y dy dw``          a device pointer, or a TMA descriptor by value (kind ``desc2`` ...)
``m_sizes index``        device pointers to 32-bit words: counts [E], and an index for each row
``row_weights bias``     device pointers: float32 weights by index, bias [E, N] in the dtype
``M N K E``              int32: rows, the result's columns, the reduction, experts; for dW N and K are dw's; with
                         ``Fusion.SILU`` N is the columns of gate and up together, and y has half as many
``stride_x_m`` ...       int64, in elements: row strides of x, y, dy; expert and row stride of w, dw
``m_sizes_step``         int32: 1 for int32 counts, 2 for int64 counts; ``index_step`` likewise
``index_end``            int32: rows whose index is below 0, or this or more, are left out
``x_divisor``            int32: an index names x's row ``index // x_divisor``
``flags``                int32: values of artifacts.records.problem.Fusion below 16 (``SILU`` and ``LOW_RANK`` are
                         variants of their own, no flags), and ``ZERO_TAIL``
``counter``              device pointer to an int32 that is zero before and after the launch
``dy_at x_at``           device pointers to dy and x, whose names are descriptors: for dW with ``Cache.EVICT_FIRST``
``low_x low_w``          with ``Fusion.LOW_RANK``: u [M, R] of sorted rows and b [E, N, R], or [E, R, N] if w's columns
                         are contiguous; dense; device pointers or TMA descriptors. ``R`` int32: the rank
``y_map``                y again, as a TMA descriptor of ragged rows through which a specialised kernel stores
=======================  =====================================================================

Pointers that ``flags`` does not need are null. dX runs the forward's kernel with dy as x and dx as y (see ``gemm_of``).
After the named arguments all kernels take two more pointers, Triton's global and profile scratch. A descriptor of rank
r is passed as 128 bytes, then r int32 sizes, then r int64 strides; dW's describe ragged rows, see ``RAGGED_SIZES``.
"""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem

TORCH_GROUPS = 1024  # the most experts that torch's grouped_mm supports
ALIGNMENT_BYTES = 16  # of all pointers, row strides and row lengths of aligned variants
LAUNCH_ABI = 1
READS_ABI = (1, 1)  # the first and last launch ABI that this runtime can launch

ZERO_TAIL = 16  # a flag: zero the rows of y that belong to no expert; with SCATTER, those that no index entry names
CLEARER_ROWS = 16  # rows that a program zeroes: there are ``cdiv(index_end, CLEARER_ROWS)`` more programs
# Element types of pointers by Triton's names, "" for the dtype. A kernel's entry adds its own, or replaces these.
POINTEES = dict.fromkeys(("x", "w", "y", "dy", "dw", "dy_at", "x_at", "bias", "low_x", "low_w"), "") | {
    "m_sizes": "*i32",
    "index": "*i32",
    "counter": "*i32",
    "row_weights": "*fp32",
    "w_outer": "*fp32",
    "w_scale": "*fp32",
    "x_scale": "*fp32",
}
FLAGS = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS  # the fusions that ``flags`` contains

# A descriptor of ragged rows is [.., .., rows, columns] with these sizes and the strides of ``ragged_strides``:
# the address of (2^30, end, 2^30 - count + row, column) is that of row ``end - count + row``, because 2^30 times
# the first stride is a multiple of 2^64 minus the row stride. Past the expert's end TMA reads zeros.
RAGGED_SIZES = (0x7FFF0000, 0x7FFF0000, 1 << 30)


def parameter_bytes(arguments: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
    """Return the size in bytes of each parameter for these (name, kind), Triton's own two pointers included."""
    sizes: list[int] = []
    for _, kind in arguments:
        if kind.startswith("desc"):
            rank = int(kind[4:])
            sizes += [128, *[4] * rank, *[8] * rank]
        else:
            sizes.append(4 if kind == "i32" else 8)
    return (*sizes, 8, 8)


def ragged_strides(row_stride: int) -> tuple[int, int, int]:
    """Return the strides, in elements, of a ragged descriptor's first three dimensions."""
    return (1 << 34) - row_stride, row_stride, row_stride


def is_aligned(alignment: int, *values_bytes: int) -> bool:
    """Return whether all values, pointers and lengths in bytes, are multiples of ``alignment``, a power of two."""
    mixed = 0
    for value in values_bytes:
        mixed |= value
    return mixed % alignment == 0


def has_aligned_rows(problem: Problem) -> bool:
    """Return whether rows of N and of K elements, and a row of w's codes, are multiples of 16 bytes."""
    size, codes = problem.dtype.itemsize, problem.K * problem.dtype.precision.w.bits // 8
    return is_aligned(ALIGNMENT_BYTES, problem.N * size, problem.K * size, codes)


def torch_multiplies(problem: Problem) -> bool:
    """Return whether torch's grouped_mm supports a problem: forward or dX, no fusion, bf16, aligned rows."""
    plain = problem.op is not Op.DW and problem.dtype is DType.BF16 and not problem.fusion
    return plain and problem.E <= TORCH_GROUPS and has_aligned_rows(problem)


def slow_rows(problem: Problem) -> str | None:
    """Return a warning if rows of w begin at odd multiples of 16 bytes, which is slow; else None.

    In bf16 and fp16 they do if K is an odd multiple of 8. An H100 at 8,192 tokens, E=32, N=2048
    (benchmarks/results/unknown-h100-odd-k.journal.xz): K=1000 takes 1.5 times as long as K=1024 in the forward, 1.1 in
    dX, 1.3 in dW.
    """
    name, row = ("N", problem.N) if problem.layout is Layout.KN else ("K", problem.K)
    if problem.dtype.quantised or row * problem.dtype.itemsize % (2 * ALIGNMENT_BYTES) != ALIGNMENT_BYTES:
        return None
    step = 2 * ALIGNMENT_BYTES // problem.dtype.itemsize
    return (
        f"with {name}={row}, rows of w begin at odd multiples of {ALIGNMENT_BYTES} bytes: every kernel takes up to 1.5 "
        f"times as long, and torch's may be faster for thousands of rows. Pad {name} with zeros to a multiple of {step}"
    )
