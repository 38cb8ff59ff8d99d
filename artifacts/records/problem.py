"""A problem is what is computed, but for M: its op, precision, shape and form. Buckets are ranges of M.

Letters, everywhere: E experts, M rows, N output columns, K reduction, T tokens, k = top_k.
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

    __hash__ = object.__hash__  # of a member there is one object; enum's own is slow, and problems are keys everywhere


class RowOp(enum.Enum):
    """One of the passes over rows around the grouped GEMMs: no product, any number of rows and columns.

    - ``GATHER``: out[i] = x[token of row i]
    - ``QUANTIZE``: the same or every row of x, as codes of e4m3 with a scale for each 128 columns
    - ``QUANTIZE_ROWS``: the same with a scale for each row
    - ``ORDER_CODES``: the same as either of rows that arrive as codes
    - ``ACTIVATION``: a[i] = act(h[i])
    - ``ACTIVATION_CODES``: the same as codes, as of QUANTIZE
    - ``ACTIVATION_ROW_CODES``: the same as codes, as of QUANTIZE_ROWS
    - ``ACTIVATION_GRAD``: dh of a's gradient, and what the routing weights take part in
    - ``COMBINE``: out[t] = sum over the slots s of token t of y[t, s]
    - ``CLEAR``: y[r] = 0 for the rows r that no index names; of no dtype, its record says fp32
    - ``SORT_SLOTS``: the slots of all tokens in the order of their experts; of no dtype, its record says fp32
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
    SORT_SLOTS = "sort_slots"


class Layout(enum.Enum):
    """How w lies in memory: ``NK`` is [E, N, K] with K contiguous, ``KN`` is [E, K, N] with N contiguous.

    Of quantised weights ``STORED`` is [E, N, K] with the codes in the checkpoint's own order, and ``NK`` in the one
    that they are put into for the kernels of 9.0 (runtime/weights/order.py); there is no ``KN``.
    """

    NK = "nk"
    KN = "kn"
    STORED = "stored"

    __hash__ = object.__hash__


PLAIN_LAYOUTS = (Layout.NK, Layout.KN)  # of w that is not quantised


class Fusion(enum.Flag):
    """What a kernel does beside the product; the value is what a bundle stores."""

    NONE = 0
    GATHER = 1  # x is [T, K]; a row index picks each row on load
    SCATTER = 2  # y's rows are stored at a row index
    WEIGHT = 4  # each row of y is multiplied by its routing weight
    BIAS = 8  # bias[g] of [E, N] is added to each row
    SILU = 16  # y is [M, N/2]: silu(gate) * up, the product's left and right half of columns
    LOW_RANK = 32  # u[m] @ b[g].T is added to each row, u [M, r] and b [E, N, r]: of r columns, an adapter's

    __hash__ = object.__hash__


class Problem(NamedTuple):
    """What is computed, but for M: the key of a bundle's choices.

    N and K are those of the weight, whatever the op: w is E matrices of N x K (``Layout.NK``).
    ``top_k`` is 0 unless a fusion needs it.
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
        """The same product by its other name, which the same code computes; None where there is none.

        A forward of w [E, K, N] and dX of a w [E, N, K] multiply by the same memory, N of the one being K of the other;
        so do a forward of [E, N, K] and dX of [E, K, N]. dW has no other name, nor has what is of the forward alone
        (``Fusion.SILU``), or has quantised weights.
        """
        if self.op is Op.DW or Fusion.SILU in self.fusion or self.dtype.quantised:
            return None
        op = Op.DX if self.op is Op.FORWARD else Op.FORWARD
        layout = Layout.KN if self.layout is Layout.NK else Layout.NK
        return self._replace(op=op, N=self.K, K=self.N, layout=layout)

    @property
    def canonical(self) -> Problem:
        """The name that has w as [E, N, K], of the two where there are two."""
        return (self.transposed or self) if self.layout is Layout.KN else self

    @property
    def sort_key(self) -> tuple[str, str, int, int, int, str, int, int]:
        """The one order of problems: in a bundle, a plan, a table."""
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
    """The bucket that M rows fall in: the power of two that M is nearest to, by their ratio (1 for M <= 1).

    What is best changes with M's logarithm: of the next larger one's choice the half would be made for twice as many
    rows, of the nearest one's none for more than sqrt 2 times.
    """
    return 1 << (M * M).bit_length() // 2  # 2 log2 M, rounded down, and halved: runtime/api/grouped_gemm.py has it, too


def buckets_between(least: int, most: int) -> tuple[int, ...]:
    """Every bucket from that of ``least`` rows to that of ``most``, ascending."""
    first, last = bucket_of(least), bucket_of(most)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))
