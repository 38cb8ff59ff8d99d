"""Products with quantised weights by torch: w dequantised expert by expert, x quantised where the format says so.

y = dequantised(quantised(x)) @ dequantised(w).T in float32 where x is quantised, too; else w is rounded to x's dtype.
A gradient never quantises dy.
"""

from __future__ import annotations

import functools
import logging

import torch

from ...artifacts.errors import ProblemNotInBundle
from ...artifacts.records import Op
from .. import settings
from ..check.call import Rows
from ..weights.dequantised import Dequantised
from ..weights.expert_weights import ExpertWeights

_log = logging.getLogger(__name__)


def operands(call: Rows, weights: ExpertWeights) -> tuple[torch.Tensor, Dequantised]:
    """x, and each matrix transposed: y = x @ matrix.T."""
    scale = weights.precision.x.scale
    if call.op is not Op.FORWARD:
        return call.x, Dequantised(weights, call.x.dtype, transposed=True)
    if scale is None:
        return call.x, Dequantised(weights, call.x.dtype, transposed=False)
    if call.x_scale is not None:
        from ..weights.quantized_rows import values

        return values(call.x, call.x_scale), Dequantised(weights, torch.float32, transposed=False)
    from ..weights.codes import quantise_rows

    return quantise_rows(call.x, scale), Dequantised(weights, torch.float32, transposed=False)


def no_kernel(format: str) -> None:
    """Log once that torch multiplies with weights of this format on a GPU."""
    if settings.settings().strict:
        raise ProblemNotInBundle(
            f"PRETUNED_STRICT: no bundle has a kernel for {format} weights. Dequantise them "
            "(ExpertWeights.dequantize), or unset PRETUNED_STRICT"
        )
    if torch.cuda.is_current_stream_capturing():
        raise ProblemNotInBundle(
            f"no bundle has a kernel for {format} weights, and torch's loop over the experts has to read m_sizes on "
            "the host, which a CUDA graph capture forbids. Capture without this call, or dequantise them "
            "(ExpertWeights.dequantize)"
        )
    _tell(format)


@functools.cache
def _tell(format: str) -> None:
    _log.warning(
        "pretuned: no bundle has a kernel for %s weights: torch dequantises them, expert by expert, in every call",
        format,
    )
