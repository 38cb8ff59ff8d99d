"""The calls: ``grouped_gemm`` on tensors.

The first call of a kind checks its tensors, chooses a variant and loads it; the launcher is then kept
under a key of everything that decided that. Later calls of the kind read the key, allocate y and launch.
A call on the very operands of an earlier one (``guard.py``) does not even need the key.

What only calls without such a short way need is imported by the first of them.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import ModuleType
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.records.problem import Op
from .. import current
from ..check import tensors
from ..check.operands import Rows
from ..driver.device import current_stream, device_is_current, empty, local_gpu, on, only_device, tf32_allowed
from ..replay import guard
from ..weights.expert_weights import ExpertWeights
from .lora import Lora, scales_of

if TYPE_CHECKING:
    from ..dispatch.pin import KernelPair, Pin
    from ..dispatch.snapshot import Snapshot
    from ..driver.launcher import ProductLauncher

_Key: TypeAlias = "tuple[object, ...]"
# N; the columns from one row of a new y to the next; the bytes from w's first to its last
_Calls: TypeAlias = "dict[_Key, tuple[ProductLauncher, int, int, int]]"

_MOST_CALLS = 1 << 16

_FLOAT32 = torch.float32
_UNUSABLE = tensors.UNUSABLE
_tracing = torch.compiler.is_dynamo_compiling
_duals = tensors.duals
_written = torch.autograd.graph.increment_version  # a launch that autograd doesn't see changed this tensor


def grouped_gemm(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    topk: int = 1,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_fwd: Pin | KernelPair | None = None,
    kernel_config_bwd_dX: Pin | KernelPair | None = None,
    kernel_config_bwd_dW: Pin | KernelPair | None = None,
    autotune: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
    *,
    w_layout: str = "nk",
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    zero_tail: bool = False,
    lora: Lora | None = None,
) -> torch.Tensor:
    """y[to(i)] = t(i) * (x[from(i)] @ w[e].T + bias[e]) for every sorted row i of expert e, in one launch.

    Rows are sorted by expert: the first ``m_sizes[0]`` belong to expert 0, and so on. Which row of x each row of y
    comes from, with g = gather_indices:

        form       x                       y
        plain      [M, K], row i           [M, N], row i
        permute_x  [T, K], row g[i]//topk  [M, N], row i
        permute_y  [M, K], row i           [T*topk, N], row g[i]; other rows are zero
        both       [T, K], row g[i]//topk  [T*topk, N], row g[i]; other rows are zero

    t(i) = topk_weights.flatten()[g[i]] with ``fuse_mul_post``, else 1. Differentiable in x, w, topk_weights and bias.

    Parameters
    ----------
    x
        [M, K] or [T, K] bfloat16, float16 or float32 (float64 too where there is no CUDA). Rows may have any stride;
        rows that are not contiguous themselves are copied. M = 0 returns an empty y and launches nothing.
    w
        [E, N, K] in x's dtype, or [E, K, N] with ``w_layout="kn"``; also flattened, [E*N, K] or
        [E*K, N]. Its last dimension must be contiguous, the others may have any stride; never copied.
        Or ``ExpertWeights`` of E matrices [N, K], quantised: they are frozen, and get no gradient.
    m_sizes
        [E] int32 or int64, contiguous: the rows of each expert, zero for none. Never read on the host:
        a count below zero counts as zero, and nothing is read or written past row M.
    topk
        Experts of each token; only the fused forms ask for it.
    gather_indices
        [M] int32 or int64: row i is slot g[i] % topk of token g[i] // topk. Each index once at most; rows whose
        index is outside [0, T*topk) take no part (in a backward, dy, or x with ``permute_y``, has to be finite there).
        They may pad an expert, so that M is more than T*topk. No index is read on the host, so none is checked.
        (Kernels read the low 32 bits of an int64 index: none below -2^31 or from 2^31 on may be passed.)
        T is x's rows with ``permute_x``, else those of topk_weights, else those of ``out``, else M, divided by topk.
    topk_weights
        [T, topk], multiplied in float32; with ``fuse_mul_post``.
    kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW
        A Config, or a Choice, that an open bundle has for this kind of problem: it runs instead of the best one.
        Or what ``pretuned.aot.get_or_autotune_moe_kernels`` returned: ``is_first_gemm`` picks one of the two. With
        ExpertWeights nothing else.
    autotune
        Tune first where nothing was measured on this GPU. Needs the tuner that ``import pretuned.aot`` registers.
    is_first_gemm
        Picks from a ``kernel_config`` for both GEMMs, and changes nothing else; False with ``permute_x`` is
        refused, for the second GEMM's rows are sorted already.
    dX_only, dW_only
        Compute the gradient of x, or of w, alone.
    bias
        [E, N] in x's dtype.
    out
        [M, N] (or [T*topk, N]) to write y to, in x's dtype; its rows must be contiguous, and it has no gradient. It may
        not be memory of another tensor of the call (columns of one matrix side by side are apart). Whether m_sizes'
        is looked at where a plain call on CUDA is the first of its kind.
    zero_tail
        Whether rows of y past the sum of ``m_sizes`` are zeroed; otherwise they are left unwritten. Their dx is zero.
    lora
        An adapter, whose product joins w's before the weights and beside the bias:
        y[to(i)] = t(i) * (x[from(i)] @ w[e].T + scale * (x[from(i)] @ A[e].T) @ B[e].T + bias[e]). Not with dX_only or
        dW_only: what requires a gradient tells which are computed.

    Returns
    -------
    torch.Tensor
        y in x's dtype, summed in fp32. float32 is IEEE, unless torch allows tf32 for CUDA matmuls and a bundle
        has tf32 kernels. The same inputs give the same bits, in the gradients too. Where N is no multiple of 16
        bytes rows of a new y may lie further apart than N: y is then not contiguous.

    Raises
    ------
    InputError
        for a tensor that can't be used, or parameters that make no sense together.
    ProblemNotInBundle
        with PRETUNED_STRICT=1, where no bundle has a choice for this shape on this capability.
    TargetMismatch, DriverTooOld, BundleError
        for a bundle file named in PRETUNED_BUNDLES that this GPU can't use.

    Notes
    -----
    On CUDA the kernel comes from the best bundle found, see ``explain``; without one, torch computes
    it, with one warning. On other devices it is a torch reference, slow. In a torch.autocast region float32
    x, w and bias are cast. torch.compile and torch.export see one operator. A gradient can't be differentiated again.
    """
    if lora is not None:
        if dX_only or dW_only:
            raise InputError(
                "grouped_gemm: dX_only or dW_only with lora: requires_grad decides which gradients are "
                "computed. Leave it out, and call w.requires_grad_(False)"
            )
        if isinstance(lora, Lora) and lora.dropout:
            from .adapted import dropped

            moves = {
                "topk": topk,
                "gather_indices": gather_indices,
                "permute_x": permute_x,
                "permute_y": permute_y,
                "topk_weights": topk_weights,
                "fuse_mul_post": fuse_mul_post,
                "zero_tail": zero_tail,
            }
            rest = {
                "kernel_config_fwd": kernel_config_fwd,
                "kernel_config_bwd_dX": kernel_config_bwd_dX,
                "kernel_config_bwd_dW": kernel_config_bwd_dW,
                "autotune": autotune,
                "is_first_gemm": is_first_gemm,
                "w_layout": w_layout,
                "bias": bias,
                "out": out,
            }
            return dropped(grouped_gemm, x, w, m_sizes, lora, moves, rest)
    tracing = _tracing()
    if not tracing and _duals._current_level >= 0:
        tensors.no_tangents("grouped_gemm", x, w, topk_weights, bias, *(lora[:2] if isinstance(lora, Lora) else ()))
    # (Quantised weights have no one address: they are unusable here, and go the long way.)
    dense: torch.Tensor = w  # type: ignore[assignment]
    more = (
        permute_x
        or permute_y
        or fuse_mul_post
        or autotune
        or gather_indices is not None
        or bias is not None
        or topk_weights is not None
        or kernel_config_fwd is not None
        or lora is not None
    )
    # First: a call under way keeps the tables that it began with, so that nothing chosen before a ``reload`` goes into
    # one from after.
    snapshot: Snapshot | None = None if tracing else current.snapshot
    y: torch.Tensor | None
    if not more and not zero_tail and snapshot is not None:
        try:
            if out is None:
                again = snapshot.recent.get((x.data_ptr(), dense.data_ptr(), w_layout))
            else:
                again = snapshot.recent.get((x.data_ptr(), dense.data_ptr(), w_layout, out.data_ptr()))
        except _UNUSABLE:
            again = None
        if again is not None:
            y = again(x, dense, m_sizes) if out is None else again(x, dense, m_sizes, out)
            if y is not None:
                if out is not None:
                    _written(out)
                return y
    whole = not tracing and (more or tensors.is_whole(x, w))
    keep = None
    if (
        whole
        and out is None
        and not (
            autotune
            or kernel_config_fwd is not None
            or kernel_config_bwd_dX is not None
            or kernel_config_bwd_dW is not None
        )
    ):
        try:
            operands = (
                dense.data_ptr() if type(w) is not ExpertWeights else guard.key_of(w),
                x.numel(),
                topk,
                permute_x,
                permute_y,
                fuse_mul_post,
                dX_only,
                dW_only,
                w_layout,
                zero_tail,
                is_first_gemm,
                topk_weights is None,
                bias is None,
                gather_indices is None,
                None if lora is None else scales_of((lora, None)),
            )
            if snapshot is None and tensors.on_gpu(x):
                snapshot = _later().snapshot.snapshot()
            plan = None if snapshot is None else snapshot.plans.get(operands)
        except _UNUSABLE:
            snapshot = plan = None
        if snapshot is not None:
            if plan is not None:
                y = plan(x, w, m_sizes, topk_weights, bias, gather_indices, lora)
                if y is not None:
                    return y
            keep = snapshot.plans, operands
    if tracing or tensors.jit_state() is not None:  # (what came before replays nothing that this traces)
        from .torch_library import traced

        return traced(
            x,
            w,
            m_sizes,
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            bias=bias,
            topk=topk,
            permute_x=permute_x,
            permute_y=permute_y,
            fuse_mul_post=fuse_mul_post,
            w_layout=w_layout,
            zero_tail=zero_tail,
            dX_only=dX_only,
            dW_only=dW_only,
            untraceable=out is not None
            or autotune
            or kernel_config_fwd is not None
            or kernel_config_bwd_dX is not None
            or kernel_config_bwd_dW is not None,
            lora=lora,
        )
    if whole:
        later = _later()
        form = later.form.form_of(
            w_layout=w_layout,
            topk=topk,
            permute_x=permute_x,
            permute_y=permute_y,
            zero_tail=zero_tail,
            is_first_gemm=is_first_gemm,
            dX_only=dX_only,
            dW_only=dW_only,
            autotune=autotune,
            kernel_config_fwd=kernel_config_fwd,
            kernel_config_bwd_dX=kernel_config_bwd_dX,
            kernel_config_bwd_dW=kernel_config_bwd_dW,
        )
        return later.call.run(  # type: ignore[no-any-return]
            x,
            w,
            m_sizes,
            form,
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            fuse_mul_post=fuse_mul_post,
            bias=bias,
            out=out,
            keep=keep,
            lora=lora,
        )
    y = _known(x, dense, m_sizes, w_layout, out, zero_tail, snapshot)
    if out is not None:
        _written(out)
    return y


def _known(
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    w_layout: str,
    out: torch.Tensor | None,
    zero_tail: bool,
    snapshot: Snapshot | None,
) -> torch.Tensor:
    """A call of a kind that was met before, or else the first."""
    snapshot = _later().snapshot.snapshot() if snapshot is None else snapshot
    table: guard.Table = snapshot.recent
    known_calls: _Calls = snapshot.calls
    try:
        device = x.get_device()
        M, K = x.shape
        stride_x_m, unit = x.stride()
        x_at, w_at, dtype = x.data_ptr(), w.data_ptr(), x.dtype
        if M == 1:
            stride_x_m = K
        # (The rows go by buckets, as bucket_of has them.)
        key: _Key = (
            device,
            dtype,
            K,
            unit,
            stride_x_m >= K,
            stride_x_m & 7,
            (M * M).bit_length() // 2,
            (x_at | w_at) & 15,
            w.dtype,
            w.shape,
            w.stride(),
            w.get_device(),
            w_layout,
            m_sizes.__class__,
            m_sizes.dtype,
            m_sizes.shape,
            m_sizes.is_contiguous(),
            m_sizes.get_device(),
            dtype is _FLOAT32 and tf32_allowed(dtype),
        )
        if out is not None:
            stride_y_m, y_at = out.stride(0), out.data_ptr()
            key += (out.dtype, out.shape, out.stride(), out.get_device(), y_at & 15, out.requires_grad)
        known = known_calls.get(key) if M and not zero_tail else None
        operands: guard.Key = (x_at, w_at, w_layout) if out is None else (x_at, w_at, w_layout, y_at)
        again = None if known is None else table.get((operands, M))
    except _UNUSABLE:
        return _first(x, w, m_sizes, w_layout, out, zero_tail, known_calls, None)
    if again is not None:
        y = again(x, w, m_sizes) if out is None else again(x, w, m_sizes, out)
        if y is not None:
            table[operands] = again
            return y
    grad = x.requires_grad or w.requires_grad
    if known is None or (grad and torch.is_grad_enabled()) or not device_is_current(device):
        return _first(x, w, m_sizes, w_layout, out, zero_tail, known_calls, key)
    launcher, N, wide, w_bytes = known
    new = empty if wide == N else _filled_up
    if M == 1:
        stride_y_m = N
    if out is None:
        y, stride_y_m = new((M, N), (wide, 1), dtype), wide
    else:
        y, size = out, dtype.itemsize
        end = y_at + (M * stride_y_m if M > 1 else N) * size
        if (w_at < end and y_at < w_at + w_bytes) or (x_at < end and y_at < x_at + M * stride_x_m * size):
            tensors.check_apart(out, x=x, w=w)
    packed = launcher.pack(x=x_at, w=w_at, stride_x_m=stride_x_m, stride_y_m=stride_y_m, M=M)
    launcher.start(packed, y.data_ptr(), m_sizes.data_ptr(), current_stream(device))
    same = guard.guard(x, w, m_sizes) if out is None else guard.guard(x, w, m_sizes, out)
    if same is not None:
        shape = ((M, N), (wide, 1), dtype) if out is None else None
        still = _condition(device, grad, dtype)
        guard.remember(table, operands, M, launcher.repeater(packed, same, still, new, shape, current_stream))
    return y


def _filled_up(size: tuple[int, int], strides: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """New rows that are longer in memory than they are told, the last one too."""
    return empty((size[0], strides[0]), strides, dtype)[:, : size[1]]


def _condition(device: int, grad: bool, dtype: torch.dtype) -> Callable[[], bool] | None:
    """What beside its operands must still hold where a call is repeated; None where nothing can change."""
    alone = only_device()
    if alone and not grad and dtype is not _FLOAT32:
        return None
    tf32 = tf32_allowed(dtype)

    def still() -> bool:
        if grad and torch.is_grad_enabled():
            return False
        if dtype is _FLOAT32 and (tf32_allowed(dtype) != tf32 or torch.is_autocast_enabled("cuda")):
            return False
        return alone or device_is_current(device)

    return still


class _Later(NamedTuple):
    """The modules that only calls without a short way need."""

    form: ModuleType
    snapshot: ModuleType
    products: ModuleType
    ready: ModuleType
    torch_fallback: ModuleType
    call: ModuleType


@functools.cache
def _later() -> _Later:
    """Imported by the first such call, and kept: an import statement takes a microsecond each time."""
    from ..check import form
    from ..dispatch import snapshot
    from ..launch import products, ready
    from ..ops import torch_fallback
    from . import call

    return _Later(form, snapshot, products, ready, torch_fallback, call)


def _first(
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    w_layout: str,
    out: torch.Tensor | None,
    zero_tail: bool,
    known_calls: _Calls,
    key: _Key | None,
) -> torch.Tensor:
    """A call with every check: the first of its kind, and all those that ``grouped_gemm`` has no short way for."""
    later = _later()
    call = tensors.check(x, w, m_sizes, w_layout)
    if out is not None:
        tensors.check_out(out, call)
    tensors.check_cuda_dtype(call.x)
    counts = tensors.in_memory("m_sizes", m_sizes)
    device = call.x.get_device()
    with on(device):
        some = call.M and call.N and call.K and call.E
        known = known_calls.get(key) if key is not None and call.x is x and some else None
        product = Rows(Op.FORWARD, call.x, call.w, counts, call.layout, call.M)
        ready, wide = None, call.N if known is None else known[2]
        if known is None and some and out is None:
            ready, wide = later.products.ready_for_wide_rows(product) or (None, wide)
        if known is None and ready is None and some:
            ready = later.ready.ready_for(product, out)
        if ready is not None and ready.by_torch is not None and out is None:
            return later.torch_fallback.into_new(  # type: ignore[no-any-return]
                call.x, call.w, counts, grouped=ready.by_torch, layout=call.layout, zero_tail=zero_tail
            )
        new = empty if wide == call.N else _filled_up
        y = new((call.M, call.N), (wide, 1), call.x.dtype) if out is None else out
        if zero_tail or not call.K:  # a sum over nothing is zero
            y.zero_()
        if not some:
            return y
        stride_y_m = y.stride(0) if call.M > 1 else wide
        launch = known[0] if known is not None else None if ready is None else ready.launcher
        if launch is None:
            sm, aligned = local_gpu(device).sm, later.ready.rows_aligned(product, y)
            later.torch_fallback.on_cuda(call.x, call.w, counts, y, call.layout, sm=sm, aligned=aligned)
            return y
        launch(
            y.data_ptr(),
            counts.data_ptr(),
            current_stream(device),
            x=call.x.data_ptr(),
            w=call.w.data_ptr(),
            stride_x_m=tensors.row_stride(call.x, call.K),
            stride_y_m=stride_y_m,
            M=call.M,
        )
        lasting = key is not None and call.x is x and counts is m_sizes and not y.requires_grad
        if key is not None and lasting and len(known_calls) < _MOST_CALLS:
            known_calls[key] = launch, call.N, wide, tensors.extent(call.w)
    return y
