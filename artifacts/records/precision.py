"""What x, w, y and the sums of a product are made of: plain element types, and quantised ones with their scales.

``DType`` is what a problem says, one word for all operands. ``PRECISIONS`` has a row for each of its words and for each
quantised format, where x and w differ: the one place that says how many bits, which scale and which arithmetic.
"""

from __future__ import annotations

import enum

from ..tuples import NamedTuple


class DType(enum.Enum):
    """What a problem says of its operands: a name of ``PRECISIONS``.

    Of the first four all operands are of one type; ``TF32`` is fp32 in memory, multiplied in tf32. Of the others w is
    quantised, y is bf16, and x is, too, before it is quantised for ``FP8_BLOCK`` and ``FP8_CHANNEL``: of these there
    are only the formats that a kernel multiplies.
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

    __hash__ = object.__hash__  # as of Op

    @property
    def itemsize(self) -> int:
        """Bytes of one element of x as a call has it, and of y."""
        return 4 if self in (DType.FP32, DType.TF32) else 2

    @property
    def precision(self) -> Precision:
        """What each operand is made of."""
        return PRECISIONS[self.value]

    @property
    def quantised(self) -> bool:
        """Whether w has scales."""
        return self not in PLAIN_DTYPES

    @property
    def quantises_x(self) -> bool:
        """Whether products read x as codes with scales, too."""
        return self.precision.x.scale is not None

    @property
    def with_x_quantised(self) -> DType | None:
        """The dtype of products that quantise x for the weights of this one, which leaves x as it is; or None."""
        found = _DTYPES.get(self.value.removesuffix("_a16"))
        return found if found is not None and found is not self and found.quantises_x else None


PLAIN_DTYPES = frozenset((DType.BF16, DType.FP16, DType.FP32, DType.TF32))
_DTYPES = {one.value: one for one in DType}
_SCALE_BITS = {"fp32": 32, "bf16": 16, "e8m0": 8, "e4m3": 8}


class Scale(NamedTuple):
    """One number of type ``name`` for each block of ``rows`` x ``columns`` elements; 0 stands for all there are.

    ``name`` is ``fp32``, ``bf16``, ``e8m0`` (2**(code - 127), 255 is NaN) or ``e4m3``. ``zero_bits``: of the zero point
    beside each scale, 0 where there is none. ``outer``: a scale of the scales.
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
    """How an operand lies in memory: ``bits`` an element of type ``name``, and a scale where it is quantised.

    ``name`` is ``bf16``, ``fp16``, ``fp32``, ``e4m3`` (float8_e4m3fn), ``e2m1`` (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign)
    or ``int4`` (0 to 15, less the zero point, which is 8 where none is told).
    """

    name: str
    bits: int
    scale: Scale | None = None

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of ``rows`` x ``columns`` elements and its scales; a row begins at a byte."""
        scales = 0 if self.scale is None else self.scale.nbytes(rows, columns)
        return rows * -(-columns * self.bits // 8) + scales


class Precision(NamedTuple):
    """What the operands of y = x @ w.T are made of, and ``math``, the arithmetic whose rate of the GPU counts."""

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
    """What problems with weights of a format can be of, by its name in ``PRECISIONS``; none where no kernel is for it.

    Where the format's checkpoints have x quantised, too, products that leave it as it is are nearer to what it stands
    for, and faster for few rows: both are among these.
    """
    return tuple(_DTYPES[name] for name in (format, f"{format}_a16") if name in _DTYPES)


def _scaled(elements: Elements, name: str, rows: int, columns: int, **more: int | Scale) -> Elements:
    return elements._replace(scale=Scale(name, rows, columns, **more))  # type: ignore[arg-type]


_BLOCK, _CHANNEL = _scaled(_E4M3, "fp32", 128, 128), _scaled(_E4M3, "fp32", 1, 0)
_NVFP4 = _scaled(_E2M1, "e4m3", 1, 16, outer=Scale("fp32", 0, 0))

# A name without a word for x is what the format's checkpoints say; "_a16" keeps x in bf16 where they would quantise it.
PRECISIONS: dict[str, Precision] = {
    one.name: one
    for one in (
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
