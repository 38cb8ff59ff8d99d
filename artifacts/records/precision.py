"""What x, w, y and the sums of a product are made of: plain element types, and quantised ones with their scales.

``DType`` is what a problem says, one word for all operands. ``PRECISIONS`` has a row for each of its words and for each
quantised format, where x and w differ: the one place that says how many bits, which scale and which arithmetic.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass, replace


class DType(enum.Enum):
    """Element type of the operands and the result; ``TF32`` is fp32 in memory, multiplied in tf32."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    TF32 = "tf32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory."""
        return 2 if self in (DType.BF16, DType.FP16) else 4


_SCALE_BITS = {"fp32": 32, "bf16": 16, "e8m0": 8, "e4m3": 8}


@dataclass(frozen=True, slots=True)
class Scale:
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


@dataclass(frozen=True, slots=True)
class Elements:
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


@dataclass(frozen=True, slots=True)
class Precision:
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


def _scaled(elements: Elements, name: str, rows: int, columns: int, **more: int | Scale) -> Elements:
    return replace(elements, scale=Scale(name, rows, columns, **more))  # type: ignore[arg-type]


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
        Precision("nvfp4", _BF16, _NVFP4, _BF16, "bf16"),
        *(
            Precision(f"int4_g{g}{zero}", _BF16, _scaled(_INT4, "bf16", 1, g, zero_bits=bits), _BF16, "bf16")
            for g in (32, 64, 128)
            for zero, bits in (("", 0), ("_zp", 8))  # "_zp": each group has a zero point of its own (AWQ)
        ),
    )
}
