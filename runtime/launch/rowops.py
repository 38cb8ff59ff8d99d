"""Launch the row kernels around the GEMMs from a bundle: found once, launched with plain numbers.

No choice names row kernels: the best one in the bundles runs. If no bundle has a row kernel, the caller uses torch.
"""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

import torch

from ...artifacts.records import DType, RowOp
from ...kernels.entry import ALIGNMENT_BYTES, is_aligned
from ...kernels.rowops import NARROW, USED, WEIGHTED
from ..check import tensors as check_tensors
from ..check.tensors import DTYPES
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import local_gpu, platform_supported
from ..driver.rowops import RowOpLauncher

if TYPE_CHECKING:
    from ..dispatch.snapshot import Snapshot, Usable
    from .gemm import LoadedKernel

_COUNT_BYTES = 4  # bytes of an int32 in ``bounds``

_log = logging.getLogger(__name__)


def launcher(op: RowOp, dtype: DType, device: int, *, aligned: bool) -> RowOpLauncher | None:
    """The launcher of the best kernel for this row operation on ``cuda:device``; None where no usable bundle has one.

    ``aligned``: every pointer and row is a multiple of 16 bytes. The launcher is cached, so only a first call reads
    bundles. Legal in a graph capture.

    Raises
    ------
    CudaError
        if the driver refuses the code.
    """
    snapshot = dispatch_snapshot.snapshot()
    launchers: dict[tuple[RowOp, DType, bool, int], RowOpLauncher | None] = snapshot.passes
    key = (op, dtype, aligned, device)
    if key not in launchers:
        before = snapshot.put_off
        kernel = _kernel(snapshot, op, dtype, device, aligned)
        result = None if kernel is None else RowOpLauncher(kernel.variant, kernel.function, op)
        if snapshot.put_off != before:
            return result
        launchers[key] = result
        if kernel is None:
            twice = op in (RowOp.ACTIVATION_CODES, RowOp.ACTIVATION_ROW_CODES)
            instead = "two passes do" if twice else "torch does"
            _log.info(
                "pretuned: no usable bundle has a kernel for %s %s: %s it; aot build adds it to new ones",
                op.value,
                dtype.value,
                instead,
            )
    return launchers[key]


def for_rows(
    op: RowOp, columns: int, rows: int, *tensors: torch.Tensor, like: torch.Tensor | None = None
) -> RowOpLauncher | None:
    """The launcher for rows of these tensors, or of new ones like ``like``; None also if there are no rows.

    Every tensor is dense, its rows of ``columns`` columns or of twice as many.
    """
    like = tensors[0] if like is None else like
    kind = DTYPES.get(like.dtype)
    if kind is None or not rows or not columns or not check_tensors.on_gpu(like):
        return None
    aligned = is_aligned(ALIGNMENT_BYTES, columns * like.element_size(), *(tensor.data_ptr() for tensor in tensors))
    return launcher(op, kind, like.get_device(), aligned=aligned)


def used(bounds: torch.Tensor | None) -> tuple[int, int]:
    """(byte offset of the last entry of ``bounds``, the number of rows that belong to an expert; the flag USED)."""
    return (0, 0) if bounds is None else (_COUNT_BYTES * (bounds.shape[0] - 1), USED)


def weighing(weights: torch.Tensor | None) -> int:
    """The flags for routing weights, which are float32 or of the kernel's dtype."""
    return 0 if weights is None else WEIGHTED | (0 if weights.dtype is torch.float32 else NARROW)


def _kernel(snapshot: Snapshot, op: RowOp, dtype: DType, device: int, aligned: bool) -> LoadedKernel | None:
    if not platform_supported():
        return None
    from ..dispatch.rowops import ranked  # here, as only a first launch needs them
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        return next(iter(ranked(snapshot, op, dtype, local, aligned=aligned)), None)

    return load_first(snapshot, choose, local, device)
