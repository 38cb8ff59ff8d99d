"""The calls: ``grouped_gemm`` on tensors.

The first call of a kind checks its tensors, chooses a variant and loads it; the launcher is then kept
under a key of everything that decided that. Later calls of the kind read the key, allocate y and launch.
A call on the very operands of an earlier one (``recent.py``) does not even need the key.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Callable
from typing import Any, TypeAlias

import torch

from ..artifacts.types import DType, Op, Problem
from ..kernels.abi import gemm_of
from . import discover, fallback, inputs, recent, settings
from .device import local_gpu, platform_name, platform_supported
from .launch import Launcher, row_launcher
from .loading import prepare

_Key: TypeAlias = "tuple[object, ...]"
_Calls: TypeAlias = "dict[_Key, tuple[Launcher, int, recent.Guards]]"

_MOST_CALLS = 1 << 16

_log = logging.getLogger(__name__)
# Both are replaced by ``reload``: a call under way keeps those that it began with, and reads _recent first, so that
# nothing chosen before goes into a table from after.
_calls: _Calls = {}
_recent: recent.Table = {}
_FLOAT32 = torch.float32
_C: Any = torch._C


def _empty_on_current(size: tuple[int, int], stride: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty_strided(size, stride, dtype=dtype, device="cuda")


# What torch's own compiled code allocates with: half the host time of torch.empty_strided.
_empty: Callable[[tuple[int, int], tuple[int, int], torch.dtype], torch.Tensor] = getattr(
    getattr(getattr(_C, "_dynamo", None), "guards", None), "_empty_strided_cuda", _empty_on_current
)


def _stream_of(device: int) -> int:
    return torch.cuda.current_stream(device).cuda_stream


_stream: Callable[[int], int] = getattr(_C, "_cuda_getCurrentRawStream", _stream_of)


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    *,
    w_layout: str = "nk",
    out: torch.Tensor | None = None,
    zero_tail: bool = False,
) -> torch.Tensor:
    """y[m] = x[m] @ w[g].T for every row m of expert g: one GEMM per expert, in one launch.

    The rows of x are sorted by expert: the first ``m_sizes[0]`` belong to expert 0, and so on.

    Parameters
    ----------
    x
        [M, K] bfloat16, float16 or float32. Rows may have any stride; rows that are not contiguous
        themselves are copied. M = 0 returns an empty y and launches nothing.
    w
        [E, N, K] in x's dtype, or [E, K, N] with ``w_layout="kn"``; also flattened, [E*N, K] or
        [E*K, N]. Its last dimension must be contiguous, the others may have any stride; never copied.
    m_sizes
        [E] int32 or int64, contiguous: the rows of each expert, zero for none. Never read on the host:
        a count below zero counts as zero, and nothing is read or written past row M.
    out
        [M, N] to write y to, in x's dtype; its rows must be contiguous.
    zero_tail
        Whether rows of y past the sum of ``m_sizes`` are zeroed; otherwise they are left unwritten.

    Returns
    -------
    torch.Tensor
        y [M, N] in x's dtype, summed in fp32. float32 is IEEE, unless torch allows tf32 for CUDA
        matmuls and a bundle has tf32 kernels. The same inputs give the same bits.

    Raises
    ------
    InputError
        for a tensor that can't be used, or that requires grad on CUDA (there the call has no gradient).
    ProblemNotInBundle
        with PRETUNED_STRICT=1, where no bundle has a choice for this shape on this capability.
    TargetMismatch, DriverTooOld, BundleError
        for a bundle file named in PRETUNED_BUNDLES that this GPU can't use.

    Notes
    -----
    On CUDA the kernel comes from the best bundle found, see ``explain``; without one, torch computes
    it, with one warning. On other devices it is a torch reference, differentiable and slow.
    """
    try:
        entry = _recent.get((x.data_ptr(), w.data_ptr(), x.shape[0], w_layout))
        if entry is not None and (out is not None or zero_tail or not entry[0](x, w, m_sizes)):
            entry = None
    except (AttributeError, TypeError, IndexError, RuntimeError):  # no usable tensors: the checks will say which
        entry = None
    if entry is None:
        return _known(x, w, m_sizes, w_layout, out, zero_tail)
    _, still, start, prepared, size, stride, dtype, device = entry
    if still is not None and not still():
        return _known(x, w, m_sizes, w_layout, out, zero_tail)
    y = _empty(size, stride, dtype)
    start(prepared, y.data_ptr(), m_sizes.data_ptr(), _stream(device))
    return y


grouped_gemm_forward = grouped_gemm


def reload() -> None:
    """Read the environment and all places again: bundles that were added since are found.

    Calls under way finish with what they began with; code that was loaded stays loaded.
    """
    global _calls, _recent
    settings.forget()
    discover.forget()
    _calls = {}
    _recent = {}


def problem_of(call: inputs.RowGemm, device: int) -> Problem:
    """The problem that a checked CUDA call is; fp32 is tf32 where torch allows it and a bundle has it."""
    dtype = inputs.check_cuda_dtype(call.x)
    problem = Problem(Op.FORWARD, dtype, call.E, call.N, call.K, call.layout)
    if dtype is DType.FP32 and _tf32_allowed():
        tf32 = Problem(Op.FORWARD, DType.TF32, call.E, call.N, call.K, call.layout)
        if discover.snapshot().serves(tf32, local_gpu(device)):
            return tf32
    return problem


def _known(
    x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, w_layout: str, out: torch.Tensor | None, zero_tail: bool
) -> torch.Tensor:  # fmt: skip
    """A call of a kind that was met before, or else the first."""
    table = _recent
    try:
        device = x.get_device()
        M, K = x.shape
        stride_x_m, unit = x.stride()
        x_at, w_at, dtype = x.data_ptr(), w.data_ptr(), x.dtype
        if M == 1:
            stride_x_m = K
        key: _Key = (
            device, dtype, K, unit, stride_x_m >= K, stride_x_m & 7, (M - 1).bit_length(), (x_at | w_at) & 15,
            w.dtype, w.shape, w.stride(), w.get_device(), w_layout,
            m_sizes.dtype, m_sizes.shape, m_sizes.is_contiguous(), m_sizes.get_device(),
            dtype is _FLOAT32 and _tf32_allowed(),
        )  # fmt: skip
        if out is not None:
            stride_y_m = out.stride(0)
            key += (out.dtype, out.shape, out.stride(), out.get_device(), out.data_ptr() & 15, out.requires_grad)
        known = _calls.get(key) if M and not zero_tail else None
    except (AttributeError, TypeError, ValueError, IndexError, RuntimeError):
        return _first(x, w, m_sizes, w_layout, out, zero_tail, None)
    grad = x.requires_grad or w.requires_grad
    if known is None or (grad and torch.is_grad_enabled()) or _C._cuda_getDevice() != device:
        return _first(x, w, m_sizes, w_layout, out, zero_tail, key)
    launcher, N, guards = known
    if out is not None:
        prepared = launcher.prepare(x_at, w_at, stride_x_m, stride_y_m, M)
        launcher.start(prepared, out.data_ptr(), m_sizes.data_ptr(), _stream(device))
        return out
    y = _empty((M, N), (N, 1), dtype)
    prepared = launcher.prepare(x_at, w_at, stride_x_m, N, M)
    launcher.start(prepared, y.data_ptr(), m_sizes.data_ptr(), _stream(device))
    same = guards.of(x, w, m_sizes)
    if same is not None:
        still = _condition(device, grad, dtype)
        entry = same, still, launcher.start, prepared, (M, N), (N, 1), dtype, device
        recent.remember(table, (x_at, w_at, M, w_layout), entry)
    return y


def _condition(device: int, grad: bool, dtype: torch.dtype) -> Callable[[], bool] | None:
    """What beside its operands must still hold where a call is repeated; None where nothing can change."""
    alone = torch.cuda.device_count() == 1
    if alone and not grad and dtype is not _FLOAT32:
        return None
    tf32 = _tf32_allowed()

    def still() -> bool:
        if grad and torch.is_grad_enabled():
            return False
        return (alone or _C._cuda_getDevice() == device) and (dtype is not _FLOAT32 or _tf32_allowed() == tf32)

    return still


def _first(
    x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, w_layout: str,
    out: torch.Tensor | None, zero_tail: bool, key: _Key | None,
) -> torch.Tensor:  # fmt: skip
    """A call with every check: the first of its kind, and all those that ``grouped_gemm`` has no short way for."""
    calls = _calls
    call = inputs.check(x, w, m_sizes, w_layout)
    if out is not None:
        inputs.check_out(out, call)
    if call.x.device.type != "cuda":
        return fallback.on_host(call.x, call.w, call.m_sizes, call.layout, out, zero_tail)
    inputs.check_cuda_dtype(call.x)
    inputs.check_no_gradient(x, w)
    with torch.cuda.device(call.x.device):
        y = call.x.new_empty((call.M, call.N)) if out is None else out
        if zero_tail or not call.K:  # a sum over nothing is zero
            y.zero_()
        if not (call.M and call.N and call.K and call.E):
            return y
        stride_y_m = y.stride(0) if call.M > 1 else call.N
        known = calls.get(key) if key is not None and call.x is x else None
        device, aligned = call.x.get_device(), call.aligned(out)
        launch = known[0] if known is not None else _launcher(call, device, aligned)
        if launch is None:
            sm = local_gpu(device).sm
            fallback.on_cuda(call.x, call.w, call.m_sizes, y, call.layout, sm=sm, aligned=aligned)
            return y
        launch(
            call.x.data_ptr(), call.w.data_ptr(), y.data_ptr(), call.m_sizes.data_ptr(),
            call.stride_x_m, stride_y_m, call.M, _stream(device),
        )  # fmt: skip
        lasting = key is not None and call.x is x and not y.requires_grad
        if key is not None and lasting and len(calls) < _MOST_CALLS:
            calls[key] = launch, call.N, recent.Guards()
    return y


def _launcher(call: inputs.RowGemm, device: int, aligned: bool) -> Launcher | None:
    """The launcher of the variant that dispatch decides on, or None where torch has to run the call."""
    if not platform_supported():
        _unsupported()
        return None
    problem = problem_of(call, device)
    strict = settings.settings().strict
    kernel = prepare(discover.snapshot(), problem, call.M, local_gpu(device), device, aligned=aligned, strict=strict)
    if kernel is None:
        return None
    gemm = gemm_of(problem)
    return row_launcher(
        kernel, columns=gemm.columns, reduction=gemm.reduction, E=call.E, w_kn=gemm.w_kn,
        stride_w_e=call.stride_w_e, stride_w_row=call.stride_w_row, m_sizes_step=call.m_sizes_step,
    )  # fmt: skip


@functools.cache
def _unsupported() -> None:
    _log.warning("pretuned: bundles run on linux x86_64, this is %s: grouped GEMM runs on torch", platform_name())


def _tf32_allowed() -> bool:
    """Whether the user lets torch multiply float32 matrices in tf32 on CUDA."""
    matmul = torch.backends.cuda.matmul
    precision = getattr(matmul, "fp32_precision", None)  # the newer setting also answers for the older ones
    return bool(matmul.allow_tf32) if precision is None else precision == "tf32"
