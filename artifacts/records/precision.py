"""What x, w, y and the sums of a product are made of."""

from __future__ import annotations

import enum


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
