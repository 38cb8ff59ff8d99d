"""The contract of compiler and launcher, in plain Python: what a variant is, its arguments, its grid.

The names in a variant's ``arguments`` are the words of launch ABI 1:

=======================  =====================================================================
``x w y dy dw``          a device pointer, or a TMA descriptor by value (kind ``desc2`` ...)
``m_sizes index``        device pointers to 32-bit words: counts [E], and one index of each row
``row_weights bias``     device pointers: float32 weights by index, bias [E, N] in the dtype
``M N K E``              int32: rows, the result's columns, the reduction, experts; of dW: dw's N and K; of
                         code with ``Fusion.SILU`` N is w's columns, gate and up, and y has half as many
``stride_x_m`` ...       int64, in elements: row strides of x, y, dy; expert and row stride of w, dw
``m_sizes_step``         int32: 1 for int32 counts, 2 for int64 counts; ``index_step`` likewise
``index_end``            int32: indices from here on, and below 0, take no part
``x_divisor``            int32: x's row of an index is ``index // x_divisor``
``flags``                int32: the fusions of the call, values of artifacts.types.Fusion below 16 (``Fusion.SILU`` and
                         ``LOW_RANK`` are code of their own, no flags), and ``ZERO_TAIL``
``counter``              device pointer to an int32 that is zero before and after the launch
``dy_at x_at``           device pointers to dy and x, which are descriptors: of streamed code of dW
``low_x low_w``          of code with ``Fusion.LOW_RANK``: u [M, R] of sorted rows and b [E, N, R] (with w's columns
                         contiguous [E, R, N]), dense; device pointers, or TMA descriptors. ``R`` int32: their columns
``y_map``                y again, as a TMA descriptor of ragged rows that a specialised kernel stores through
=======================  =====================================================================

Pointers that ``flags`` has no use for are null. dX runs the forward's kernel: its x is dy, its y is dx
(see ``gemm_of``). After the named arguments every kernel takes two more pointers, Triton's global and
profile scratch. A descriptor of rank r is passed as 128 bytes, then r int32 sizes, then r int64 strides;
of dW it describes ragged rows, see ``RAGGED_SIZES``.
"""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem

TORCH_GROUPS = 1024  # the most experts that torch's grouped_mm takes
ALIGNMENT_BYTES = 16  # of every pointer, row stride and row length of aligned code
LAUNCH_ABI = 1
READS_ABI = (1, 1)  # the first and last launch ABI that this runtime can launch

ZERO_TAIL = 16  # a flag: rows that belong to no expert are set to zero; with SCATTER, those that no row goes to
CLEARER_ROWS = 16  # of them, for a program: ``cdiv(index_end, CLEARER_ROWS)`` more programs
# What pointers point at in Triton's words, "" for the dtype; a kernel's entry may say otherwise, and has to of others.
POINTEES = dict.fromkeys(("x", "w", "y", "dy", "dw", "dy_at", "x_at", "bias", "low_x", "low_w"), "") | {
    "m_sizes": "*i32",
    "index": "*i32",
    "counter": "*i32",
    "row_weights": "*fp32",
    "w_outer": "*fp32",
    "w_scale": "*fp32",
    "x_scale": "*fp32",
}
FLAGS = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS  # the fusions that ``flags`` tells a kernel of

# A descriptor of ragged rows is [.., .., rows, columns] with these sizes and the strides of ``ragged_strides``:
# the address of (2^30, end, 2^30 - count + row, column) is that of row ``end - count + row``, because 2^30 times
# the first stride is a multiple of 2^64 but for the row stride. Past the expert's end TMA reads zeros.
RAGGED_SIZES = (0x7FFF0000, 0x7FFF0000, 1 << 30)


def parameter_bytes(arguments: tuple[tuple[str, str], ...]) -> tuple[int, ...]:
    """The size in bytes of each parameter of a kernel with these (name, kind), Triton's own two pointers included."""
    found: list[int] = []
    for _, kind in arguments:
        if kind.startswith("desc"):
            rank = int(kind[4:])
            found += [128, *[4] * rank, *[8] * rank]
        else:
            found.append(4 if kind == "i32" else 8)
    return (*found, 8, 8)


def ragged_strides(row_stride: int) -> tuple[int, int, int]:
    """The strides, in elements, of a ragged descriptor's first three dimensions."""
    return (1 << 34) - row_stride, row_stride, row_stride


def is_aligned(alignment: int, *values_bytes: int) -> bool:
    """Whether every pointer, row stride and row length, in bytes, keeps to ``alignment``."""
    mixed = 0
    for value in values_bytes:
        mixed |= value
    return mixed % alignment == 0


def has_aligned_rows(problem: Problem) -> bool:
    """Whether both row lengths of the weight, N and K, are multiples of 16 bytes, and a row of its codes is."""
    size, codes = problem.dtype.itemsize, problem.K * problem.dtype.precision.w.bits // 8
    return is_aligned(ALIGNMENT_BYTES, problem.N * size, problem.K * size, codes)


def torch_multiplies(problem: Problem) -> bool:
    """Whether torch's grouped_mm computes a product of rows: plain, bf16, rows of whole 16 bytes."""
    plain = problem.op is not Op.DW and problem.dtype is DType.BF16 and not problem.fusion
    return plain and problem.E <= TORCH_GROUPS and has_aligned_rows(problem)


def slow_rows(problem: Problem) -> str | None:
    """What rows of w that begin at odd multiples of 16 bytes cost, in words; None for other rows.

    bf16 and fp16 have them if K is an odd multiple of 8. benchmarks/results/unknown-h100-odd-k.journal.xz, an H100 at
    8,192 tokens, E=32, N=2048: K=1000 takes 1.5 times as long as K=1024 in the forward, 1.1 in dX, 1.3 in dW.
    """
    name, row = ("N", problem.N) if problem.layout is Layout.KN else ("K", problem.K)
    if problem.dtype.quantised or row * problem.dtype.itemsize % (2 * ALIGNMENT_BYTES) != ALIGNMENT_BYTES:
        return None
    step = 2 * ALIGNMENT_BYTES // problem.dtype.itemsize
    return (
        f"with {name}={row}, rows of w begin at odd multiples of {ALIGNMENT_BYTES} bytes: every kernel takes up to 1.5 "
        f"times as long, and torch's may be faster for thousands of rows. Pad {name} with zeros to a multiple of {step}"
    )
