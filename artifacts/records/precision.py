"""Element types of x, w and y: plain dtypes, and quantised formats with their scales.

A problem has a ``DType``, one word for all operands. ``PRECISIONS`` maps that word to the types of x, w and y, their
bits and scales, and the arithmetic: ``DType.MXFP4.precision.w`` is e2m1 of 4 bits with an e8m0 scale for 32 elements.
"""

from __future__ import annotations

import enum

from ..tuples import NamedTuple


class DType(enum.Enum):
    """The dtype of a problem's operands: a name in ``PRECISIONS``.

    With the first four, x, w and y have one type; ``TF32`` is fp32 in memory, multiplied in tf32. With the others w is
    quantised, x and y are bf16, and ``FP8_BLOCK`` and ``FP8_CHANNEL`` quantise x before they multiply. Only formats
    with a kernel are members.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    TF32 = "tf32"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT4_G32 = "int4_g32"
    INT4_G64 = "int4_g64"
    INT4_G128 = "int4_g128"
    INT4_G32_ZP = "int4_g32_zp"
    INT4_G64_ZP = "int4_g64_zp"
    INT4_G128_ZP = "int4_g128_zp"
    FP8_BLOCK = "fp8_block"
    FP8_BLOCK_A16 = "fp8_block_a16"
    FP8_CHANNEL = "fp8_channel"
    FP8_CHANNEL_A16 = "fp8_channel_a16"

    __hash__ = object.__hash__  # see Op

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a call's x, and of y."""
        return 4 if self in (DType.FP32, DType.TF32) else 2

    @property
    def precision(self) -> Precision:
        """The types of x, w and y."""
        return PRECISIONS[self.value]

    @property
    def quantised(self) -> bool:
        """Whether w has scales."""
        return self not in PLAIN_DTYPES

    @property
    def quantises_x(self) -> bool:
        """Whether products read x as quantised codes with scales."""
        return self.precision.x.scale is not None

    @property
    def with_x_quantised(self) -> DType | None:
        """The dtype with the same weights and quantised x, for a dtype that keeps x in bf16; None if there is none."""
        dtype = _DTYPES.get(self.value.removesuffix("_a16"))
        return dtype if dtype is not None and dtype is not self and dtype.quantises_x else None


PLAIN_DTYPES = frozenset((DType.BF16, DType.FP16, DType.FP32, DType.TF32))
_DTYPES = {dtype.value: dtype for dtype in DType}
_SCALE_BITS = {"fp32": 32, "bf16": 16, "e8m0": 8, "e4m3": 8}


class Scale(NamedTuple):
    """A scale of type ``name`` for each block of ``rows`` x ``columns`` elements; 0 means all rows or columns.

    ``name`` is ``fp32``, ``bf16``, ``e8m0`` (2**(code - 127), 255 is NaN) or ``e4m3``. ``zero_bits`` are the bits of
    the zero point of each block, 0 without zero points. ``outer`` is a scale of the scales.
    """

    name: str
    rows: int
    columns: int
    zero_bits: int = 0
    outer: Scale | None = None

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of all scales and zero points of a matrix of ``rows`` x ``columns`` elements."""
        blocks = -(-rows // (self.rows or rows or 1)) * -(-columns // (self.columns or columns or 1))
        own = blocks * (_SCALE_BITS[self.name] + self.zero_bits) // 8
        return own + (0 if self.outer is None else self.outer.nbytes(rows, columns))


class Elements(NamedTuple):
    """An operand's element type ``name``, bits of an element, and scale if it is quantised.

    ``name`` is ``bf16``, ``fp16``, ``fp32``, ``e4m3`` (float8_e4m3fn), ``e2m1`` (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign)
    or ``int4`` (0 to 15, minus the zero point; 8 if the format has no zero points).
    """

    name: str
    bits: int
    scale: Scale | None = None

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of ``rows`` x ``columns`` elements and its scales; a row begins at a byte."""
        scales = 0 if self.scale is None else self.scale.nbytes(rows, columns)
        return rows * -(-columns * self.bits // 8) + scales


class Precision(NamedTuple):
    """Types of the operands of y = x @ w.T. ``math`` names the arithmetic whose peak rate limits the product."""

    name: str
    x: Elements
    w: Elements
    y: Elements
    math: str

    @property
    def quantised(self) -> bool:
        """Whether w has scales."""
        return self.w.scale is not None

    def w_bytes(self, N: int, K: int) -> int:
        """Bytes of one expert's matrix of w, [N, K], with its scales."""
        return self.w.nbytes(N, K)


_BF16, _FP16, _FP32 = Elements("bf16", 16), Elements("fp16", 16), Elements("fp32", 32)
_E4M3, _E2M1, _INT4 = Elements("e4m3", 8), Elements("e2m1", 4), Elements("int4", 4)


def dtypes_of(format: str) -> tuple[DType, ...]:
    """Return the dtypes of problems with weights of a format, () if no kernel supports it.

    fp8_block gives FP8_BLOCK, which quantises x like its checkpoints ask, and FP8_BLOCK_A16, which keeps x in bf16:
    that is more exact, and faster for few rows.
    """
    return tuple(_DTYPES[name] for name in (format, f"{format}_a16") if name in _DTYPES)


def _scaled(elements: Elements, name: str, rows: int, columns: int, **more: int | Scale) -> Elements:
    return elements._replace(scale=Scale(name, rows, columns, **more))  # type: ignore[arg-type]


_BLOCK, _CHANNEL = _scaled(_E4M3, "fp32", 128, 128), _scaled(_E4M3, "fp32", 1, 0)
_NVFP4 = _scaled(_E2M1, "e4m3", 1, 16, outer=Scale("fp32", 0, 0))

# "_a16" keeps x in bf16 for formats whose checkpoints ask to quantise it.
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("bf16", _BF16, _BF16, _BF16, "bf16"),
        Precision("fp16", _FP16, _FP16, _FP16, "fp16"),
        Precision("fp32", _FP32, _FP32, _FP32, "fp32"),
        Precision("tf32", _FP32, _FP32, _FP32, "tf32"),
        Precision("fp8_block", _scaled(_E4M3, "fp32", 1, 128), _BLOCK, _BF16, "fp8"),  # DeepSeek-V3, Qwen3-FP8
        Precision("fp8_block_a16", _BF16, _BLOCK, _BF16, "bf16"),
        Precision("fp8_channel", _scaled(_E4M3, "fp32", 1, 0), _CHANNEL, _BF16, "fp8"),  # compressed-tensors' dynamic
        Precision("fp8_channel_a16", _BF16, _CHANNEL, _BF16, "bf16"),
        Precision("mxfp4", _BF16, _scaled(_E2M1, "e8m0", 1, 32), _BF16, "bf16"),  # gpt-oss
        Precision("mxfp8", _BF16, _scaled(_E4M3, "e8m0", 1, 32), _BF16, "bf16"),  # MiniMax-M3-MXFP8
        Precision("nvfp4", _BF16, _NVFP4, _BF16, "bf16"),
        *(
            Precision(f"int4_g{g}{zero}", _BF16, _scaled(_INT4, "bf16", 1, g, zero_bits=bits), _BF16, "bf16")
            for g in (32, 64, 128)
            for zero, bits in (("", 0), ("_zp", 8))  # "_zp": each group has a zero point of its own (AWQ)
        ),
    )
}
