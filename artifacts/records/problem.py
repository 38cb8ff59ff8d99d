"""Problems: a grouped GEMM's op, dtype, shape and fusion without its number of rows M. Buckets are ranges of M.

Letters in all modules: E experts, M rows, N output columns, K reduction, T tokens, k = top_k.
"""

from __future__ import annotations

import enum

from ..tuples import NamedTuple
from .precision import DType


class Op(enum.Enum):
    """One of the three grouped GEMMs of an MoE layer.

    - ``FORWARD``: y[g] = x[g] @ w[g].T
    - ``DX``: dx[g] = dy[g] @ w[g]
    - ``DW``: dw[g] = dy[g].T @ x[g]
    """

    FORWARD = "forward"
    DX = "dX"
    DW = "dW"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is slow, and problems are keys everywhere


class RowOp(enum.Enum):
    """A row kernel of an MoE layer: it works on any number of rows and columns around the grouped GEMMs.

    - ``GATHER``: out[i] = x[token of row i]
    - ``QUANTIZE``: all or gathered rows of x as e4m3 codes, with a scale for each 128 columns
    - ``QUANTIZE_ROWS``: all or gathered rows of x as e4m3 codes, with a scale for each row
    - ``ORDER_CODES``: all or gathered rows of codes and scales, as QUANTIZE and QUANTIZE_ROWS write them
    - ``ACTIVATION``: a[i] = act(h[i])
    - ``ACTIVATION_CODES``: ACTIVATION, then QUANTIZE
    - ``ACTIVATION_ROW_CODES``: ACTIVATION, then QUANTIZE_ROWS
    - ``ACTIVATION_GRAD``: dh from the gradient of a, and the routing weights' gradient
    - ``COMBINE``: out[t] = sum over the slots s of token t of y[t, s]
    - ``CLEAR``: y[r] = 0 for the rows r that no index names; for any dtype, its record says fp32
    - ``PLACE_ROWS``: list the rows of experts that lie apart, expert by expert; it has no dtype, its record says fp32
    - ``SORT_SLOTS``: sort the slots of all tokens by expert; it has no dtype, its record says fp32
    - ``QUANTIZE_WEIGHTS``: codes and scales of w; the record's dtype is the format, without ``_a16``
    - ``DEQUANTIZE_WEIGHTS``: w of these
    - ``MOVE_CODES``: codes from the checkpoint's layout to the prepared one, or back; its record says the format of
      these elements that comes first
    - ``LARGEST_WEIGHT``: the largest |w| of each 8 rows; its record says fp32
    """

    GATHER = "gather"
    QUANTIZE = "quantize"
    QUANTIZE_ROWS = "quantize_rows"
    ORDER_CODES = "order_codes"
    ACTIVATION = "activation"
    ACTIVATION_CODES = "activation_codes"
    ACTIVATION_ROW_CODES = "activation_row_codes"
    ACTIVATION_GRAD = "activation_grad"
    COMBINE = "combine"
    CLEAR = "clear"
    PLACE_ROWS = "place_rows"
    SORT_SLOTS = "sort_slots"
    QUANTIZE_WEIGHTS = "quantize_weights"
    DEQUANTIZE_WEIGHTS = "dequantize_weights"
    MOVE_CODES = "move_codes"
    LARGEST_WEIGHT = "largest_weight"


class Layout(enum.Enum):
    """The memory layout of w: ``NK`` is [E, N, K] with K contiguous, ``KN`` is [E, K, N] with N contiguous.

    Quantised weights are [E, N, K]. ``STORED`` is the checkpoint's order of codes; ``NK`` are prepared weights, in the
    order that the kernels for H100/H200 (sm_90) read (runtime/weights/order.py). There is no ``KN``.
    """

    NK = "nk"
    KN = "kn"
    STORED = "stored"

    __hash__ = object.__hash__


PLAIN_LAYOUTS = (Layout.NK, Layout.KN)  # of w that is not quantised


class Fusion(enum.Flag):
    """Work that a kernel does in addition to the product. A bundle stores the flags' value."""

    NONE = 0
    GATHER = 1  # x is [T, K]; a row index picks each row on load
    SCATTER = 2  # y's rows are stored at a row index
    WEIGHT = 4  # each row of y is multiplied by its routing weight
    BIAS = 8  # bias[g] of [E, N] is added to each row
    SILU = 16  # y is [M, N/2]: silu(gate) * up of the product's left and right half of columns
    LOW_RANK = 32  # a LoRA adapter of rank r: u[m] @ b[g].T is added to each row, u [M, r] and b [E, N, r]

    __hash__ = object.__hash__


class Problem(NamedTuple):
    """A grouped GEMM without its number of rows M: the key of a bundle's choices.

    N and K are the weight's for all ops: w is E matrices of N x K. ``top_k`` is 0 unless a fusion needs it.
    """

    op: Op
    dtype: DType
    E: int
    N: int
    K: int
    layout: Layout = Layout.NK
    fusion: Fusion = Fusion.NONE
    top_k: int = 0

    @property
    def transposed(self) -> Problem | None:
        """The equal problem of the other op and layout, which the same kernels compute; None if there is none.

        forward with w [E, N, K] equals dX with w [E, K, N], and forward with w [E, K, N] equals dX with w [E, N, K]:
        the memory is the same, N and K swap their names. dW, ``Fusion.SILU`` and quantised weights have no such pair.
        """
        if self.op is Op.DW or Fusion.SILU in self.fusion or self.dtype.quantised:
            return None
        op = Op.DX if self.op is Op.FORWARD else Op.FORWARD
        layout = Layout.KN if self.layout is Layout.NK else Layout.NK
        return self._replace(op=op, N=self.K, K=self.N, layout=layout)

    @property
    def canonical(self) -> Problem:
        """The problem, or its ``transposed`` if that is the one with w as [E, N, K]."""
        return (self.transposed or self) if self.layout is Layout.KN else self

    @property
    def sort_key(self) -> tuple[str, str, int, int, int, str, int, int]:
        """The order of problems in bundles and tables."""
        return (
            self.op.value,
            self.dtype.value,
            self.E,
            self.N,
            self.K,
            self.layout.value,
            self.fusion.value,
            self.top_k,
        )

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} E={self.E} N={self.N} K={self.K}"
        if self.layout is not Layout.NK:
            text += f" w={self.layout.value}"
        if self.fusion:
            text += f" fused={'+'.join(str(f.name).lower() for f in Fusion if f and f in self.fusion)}"
        return text + (f" k={self.top_k}" if self.top_k else "")


def bucket_of(M: int) -> int:
    """Return the bucket of M rows: the power of two with the ratio nearest to 1; 1 for M <= 1.

    The best kernel depends on M's logarithm. With the nearest power of two, M differs from its bucket by at most
    sqrt(2); with the next larger power it would differ by up to 2.
    """
    return 1 << (M * M).bit_length() // 2  # 2 log2 M, rounded down, and halved: runtime/api/grouped_gemm.py has it, too


def buckets_between(least: int, most: int) -> tuple[int, ...]:
    """Return all buckets from that of ``least`` rows to that of ``most`` rows, ascending."""
    first, last = bucket_of(least), bucket_of(most)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))
