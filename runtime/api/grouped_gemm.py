"""``grouped_gemm``: a call like an earlier one runs its plan; any other call is checked, run, and stores a plan.

Plans are in one table of the snapshot. A plan's key has all that selects kernels; ``product_plan.py`` compares the
rest of a call. Any other call is checked, cast for autocast, tuned if asked, then run with or without its gradient.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Fusion, Layout, Op, Problem
from .. import hooks
from ..check import tensors
from ..check.call import Call, Form, autocast, check, expected_bucket, form_of
from ..driver.device import tf32_allowed, without_autocast
from ..launch.program import remember
from ..ops import low_rank
from ..ops.low_rank import Lora, scales_of
from .product_plan import ProductPlan, plan, sizes_of, takes_any_rows

if TYPE_CHECKING:
    from ..dispatch.pin import KernelPair, Pin
    from ..dispatch.snapshot import Snapshot
    from ..weights.expert_weights import ExpertWeights
    from ..weights.quantized_rows import QuantizedRows

# The table of plans, a call's key there, and whether its plan is for any number of rows
_Place: TypeAlias = "tuple[dict[Any, Any], object, bool]"

_transformed = torch._C._are_functorch_transforms_active

_tracing = torch.compiler.is_dynamo_compiling
_PLAIN, _UNUSABLE = tensors.PLAIN, tensors.UNUSABLE
_jit_state = tensors.jit_state  # inside torch.jit.trace no plan's guard accepts a tensor
_duals = tensors.duals
_rows: Any = torch._C.TensorBase.__len__  # type: ignore[attr-defined]  # x.shape[0], in a third of its time


def grouped_gemm(
    x: torch.Tensor | QuantizedRows,
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
    expected_rows: int | None = None,
    m_starts: torch.Tensor | None = None,
    precision: str | None = None,
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
        Or padded rows, [E, M_max, K], of which expert e has the first m_sizes[e], M_max at most; y is [E, M_max, N].
        Padding is neither read nor written, and its dx is zero. Only with w, m_sizes and the keywords.
        Or ``QuantizedRows``: y is bfloat16, and nothing has a gradient.
    w
        [E, N, K] in x's dtype, or [E, K, N] with ``w_layout="kn"``; also flattened, [E*N, K] or
        [E*K, N]. Its last dimension must be contiguous, the others may have any stride; never copied.
        Or ``ExpertWeights`` of E matrices [N, K], quantised: they are frozen, and get no gradient.
    m_sizes
        [E] int32 or int64, contiguous: the rows of each expert, zero for none. Never read on the host:
        a negative count is taken as zero, and nothing is read or written past row M.
    topk
        Experts of each token; only calls with ``gather_indices`` read it.
    permute_x, permute_y
        Whether x, and whether y, is in token order, as the table above has it. Each needs ``gather_indices``.
    gather_indices
        [M] int32 or int64: row i is slot g[i] % topk of token g[i] // topk. Each index once at most; rows whose
        index is outside [0, T*topk) take no part (in a backward, dy, or x with ``permute_y``, must be finite in them).
        Such rows may pad an expert: M is then more than T*topk. Indices are not read on the host, and not checked.
        (Kernels read the low 32 bits of an int64 index: none below -2^31 or from 2^31 on may be passed.)
        T is x's rows with ``permute_x``, else those of topk_weights, else those of ``out``, else M, divided by topk.
    fuse_mul_post
        Whether each row of y is multiplied by its routing weight. Needs ``topk_weights`` and ``gather_indices``.
    topk_weights
        [T, topk], multiplied in float32; with ``fuse_mul_post`` alone.
    kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW
        A Config or a Choice that an open bundle has for this kind of problem: it runs instead of the best one.
        Or a result of ``pretuned.aot.get_or_autotune_moe_kernels``, of which ``is_first_gemm`` picks a GEMM's config.
        With ExpertWeights only such a result is allowed.
    autotune
        Tune first where nothing was measured on this GPU. Needs the tuner that ``import pretuned.aot`` registers.
    is_first_gemm
        Selects the config from a ``kernel_config`` for both GEMMs, and changes nothing else. False with ``permute_x``
        is refused: the second GEMM's rows are sorted already.
    dX_only, dW_only
        Compute the gradient of x, or of w, alone.
    w_layout
        ``"nk"`` for w [E, N, K], ``"kn"`` for w [E, K, N].
    bias
        [E, N] in x's dtype.
    out
        [M, N] (or [T*topk, N]) to write y to, in x's dtype; its rows must be contiguous, and it has no gradient. It may
        not overlap another tensor of the call; disjoint columns of one matrix are allowed.
    zero_tail
        Whether rows of y past the sum of ``m_sizes``, and padding, are zeroed; otherwise they are left unwritten.
        Their dx is zero.
    lora
        A LoRA adapter, added before the routing weights:
        y[to(i)] = t(i) * (x[from(i)] @ w[e].T + scale * (x[from(i)] @ A[e].T) @ B[e].T + bias[e]). Not with dX_only or
        dW_only: gradients are computed for the tensors that require one.
    expected_rows
        A hint, 0 to M: how many of the M rows (E*M_max if padded) belong to experts. Kernels, also those of gradients,
        are chosen for that many rows; for M if None. Buffers and results do not depend on it.
    m_starts
        [E] int32 or int64, contiguous: rows m_starts[e] to m_starts[e] + m_sizes[e] - 1 of x [M, K] and y [M, N] are
        expert e's, others are padding. No two experts may share a row, which is checked on the CPU alone.
    precision
        "fp8" quantises the operands of the product and of its gradients in every call: x and dy in groups of 128, w,
        bfloat16 or float32, in blocks of 128 x 128. x is bfloat16, N and K are multiples of 128. On CUDA for
        capability 9.0, with neither lora nor ``kernel_config_*``. None: the precision of x and w.

    Returns
    -------
    torch.Tensor
        y in x's dtype, summed in fp32. float32 is IEEE, unless torch allows tf32 for CUDA matmuls and a bundle
        has tf32 kernels. The same inputs give the same bits, in the gradients too. Where N is no multiple of 16
        bytes rows of a new y may lie further apart than N: y is then not contiguous.

    Raises
    ------
    InputError
        for a tensor that can't be used, or parameters that make no sense together; for ``QuantizedRows`` where no
        kernel reads x as codes.
    ProblemNotInBundle
        with PRETUNED_STRICT=1, where no bundle has a choice for this shape on this capability.
    TargetMismatch, DriverTooOld, BundleError
        for a bundle file named in PRETUNED_BUNDLES that this GPU can't use.
    CudaError
        if the driver refuses the launch, such as after an earlier fault of the GPU.

    Notes
    -----
    On CUDA the kernel comes from the best bundle found, see ``explain``; without one, torch computes
    it, with one warning. On other devices it is a torch reference, slow. In a torch.autocast region float32
    x, w and bias are cast. torch.compile and torch.export see one operator. A gradient can't be differentiated again.
    """
    if lora is not None and (dX_only or dW_only):
        raise InputError(
            "grouped_gemm: dX_only or dW_only with lora: requires_grad decides which gradients are "
            "computed. Leave it out, and call w.requires_grad_(False)"
        )
    if precision is not None or m_starts is not None or getattr(x, "ndim", 2) == 3:
        return _by_itself(
            precision,
            x,
            w,
            m_sizes,
            m_starts,
            {
                "w_layout": w_layout,
                "topk": topk,
                "permute_x": permute_x,
                "permute_y": permute_y,
                "zero_tail": zero_tail,
                "is_first_gemm": is_first_gemm,
                "dX_only": dX_only,
                "dW_only": dW_only,
                "autotune": autotune,
                "kernel_config_fwd": kernel_config_fwd,
                "kernel_config_bwd_dX": kernel_config_bwd_dX,
                "kernel_config_bwd_dW": kernel_config_bwd_dW,
            },
            {
                "gather_indices": gather_indices,
                "topk_weights": topk_weights,
                "fuse_mul_post": fuse_mul_post,
                "bias": bias,
                "lora": lora,
                "expected_rows": expected_rows,
                "out": out,
            },
        )
    if lora is not None and isinstance(lora, Lora) and lora.dropout:
        from .lora import dropped

        whole = {
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
            "expected_rows": expected_rows,
        }
        return dropped(grouped_gemm, x, w, m_sizes, lora, whole, rest)
    tracing = _tracing()
    if not tracing and _duals._current_level >= 0:
        tensors.no_tangents("grouped_gemm", x, w, topk_weights, bias, *(lora[:2] if isinstance(lora, Lora) else ()))
    # Read the snapshot first: if ``reload`` comes now, this call stores its plan in the old snapshot, not in the new.
    snapshot: Snapshot | None = None if tracing else (hooks.current() if hooks.blocks else hooks.snapshot)
    key: tuple[Any, ...] | None = None
    others: tuple[object, ...] | None = None
    tensor: Any = x  # (``QuantizedRows`` get no key)
    pinned = kernel_config_fwd is not None or kernel_config_bwd_dX is not None or kernel_config_bwd_dW is not None
    if not tracing and type(x) in _PLAIN and type(topk) is int and not (autotune or pinned):
        plan: ProductPlan | None = None
        try:
            M = _rows(x)
            varied = (
                permute_x
                or permute_y
                or fuse_mul_post
                or dX_only
                or dW_only
                or zero_tail
                or topk != 1
                or not is_first_gemm
                or w_layout != "nk"
                or gather_indices is not None
                or topk_weights is not None
                or bias is not None
                or lora is not None
                or expected_rows is not None
            )
            if varied:
                if permute_x:
                    M *= topk
                others = (
                    topk,
                    permute_x,
                    permute_y,
                    fuse_mul_post,
                    dX_only,
                    dW_only,
                    zero_tail,
                    is_first_gemm,
                    w_layout,
                    gather_indices is None,
                    topk_weights is None,
                    bias is None,
                    None if lora is None else scales_of((lora, None)),
                    None if expected_rows is None else _expected(expected_rows, M, gather_indices),
                )
            key = (
                w.data_ptr() if isinstance(w, torch.Tensor) else (w.codes.data_ptr(), w.format),
                (M * M).bit_length() // 2,  # ``bucket_of``
                tensor.requires_grad,
                out is None,
                others,
            )
            if snapshot is not None and M:  # (M = 0 and M = 1 share a bucket)
                plan = snapshot.plans.get(key)
        except _UNUSABLE:  # no usable tensor: the checks below raise InputError
            key = None
        if plan is not None:
            y: torch.Tensor | None = plan.call(M, tensor, w, m_sizes, topk_weights, bias, gather_indices, out, lora)
            if y is not None:
                return y
    keep = None
    if key is not None:  # add the sizes and tf32 to the key
        plan = None
        try:
            slots = topk if permute_y else 1
            varies = takes_any_rows(M, slots, tensor, gather_indices, topk_weights, out)
            tf32 = tf32_allowed(tensor.dtype)
            if tf32 or not varies:
                rows = key[1] if varies else sizes_of(tensor, gather_indices, topk_weights, out)
                key = (key[0], rows, *key[2:], tf32)
                plan = None if snapshot is None else snapshot.plans.get(key)
        except _UNUSABLE:
            key = None
        if plan is not None:
            y = plan.call(M, tensor, w, m_sizes, topk_weights, bias, gather_indices, out, lora)
            if y is not None:
                return y
    fused: dict[str, Any] = {
        "gather_indices": gather_indices,
        "topk_weights": topk_weights,
        "fuse_mul_post": fuse_mul_post,
        "bias": bias,
        "lora": lora,
        "expected_rows": expected_rows,
    }
    moves: dict[str, Any] = {
        "topk": topk,
        "permute_x": permute_x,
        "permute_y": permute_y,
        "w_layout": w_layout,
        "zero_tail": zero_tail,
        "dX_only": dX_only,
        "dW_only": dW_only,
    }
    if tracing or _jit_state() is not None:
        from .torch_library import traced

        return traced(x, w, m_sizes, **fused, **moves, untraceable=out is not None or autotune or pinned)
    if key is not None and tensors.on_gpu(tensor):
        if snapshot is None:
            from ..dispatch.snapshot import snapshot as taken

            snapshot = taken()
        keep = snapshot.plans, key, varies
    form = form_of(
        **moves,
        is_first_gemm=is_first_gemm,
        autotune=autotune,
        kernel_config_fwd=kernel_config_fwd,
        kernel_config_bwd_dX=kernel_config_bwd_dX,
        kernel_config_bwd_dW=kernel_config_bwd_dW,
    )
    return _run(x, w, m_sizes, form, moves, fused, out, keep)


def _by_itself(
    precision: str | None,
    x: Any,
    w: Any,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    form: dict[str, Any],
    fused: dict[str, Any],
) -> torch.Tensor:
    """y of a call in fp8, or on padded rows. ``form`` has ``form_of``'s arguments by name, ``fused`` the others."""
    is_padded = m_starts is not None or getattr(x, "ndim", 2) == 3
    if precision is None:
        from .padded import padded_gemm  # imported here: few calls have padded rows

        names = [
            *("topk", "gather_indices", "permute_x", "permute_y", "topk_weights", "fuse_mul_post"),
            *("kernel_config_fwd", "kernel_config_bwd_dX", "kernel_config_bwd_dW", "autotune"),
        ]
        both = form | fused
        rest = {name: both[name] for name in ("w_layout", "bias", "out", "zero_tail", "lora", "expected_rows")}
        rest |= {"only_dx": both["dX_only"], "only_dw": both["dW_only"]}
        return padded_gemm(grouped_gemm, x, w, m_sizes, m_starts, tuple([both[name] for name in names]), **rest)
    from . import fp8  # imported here: few calls have a precision

    if is_padded:
        raise InputError("grouped_gemm: precision='fp8' with padded rows. Pass rows without padding, or no precision")
    if _duals._current_level >= 0:
        tensors.no_tangents("grouped_gemm", x, w, fused["topk_weights"], fused["bias"])
    return fp8.product(precision, x, w, m_sizes, form_of(**form), **fused)


def _expected(rows: int, M: int, gather_indices: torch.Tensor | None) -> int | None:
    """Return the bucket of ``rows``, the caller's ``expected_rows``. The limit is M, or the length of the index."""
    return expected_bucket("grouped_gemm", rows, M if gather_indices is None else gather_indices.shape[0], "M")


def _run(
    x: torch.Tensor | QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    form: Form,
    moves: dict[str, Any],
    fused: dict[str, Any],
    out: torch.Tensor | None,
    keep: _Place | None,
) -> torch.Tensor:
    """Return y of ``grouped_gemm`` on any device, differentiable if an input requires grad.

    ``moves`` has the call's arguments that are part of ``form``, ``fused`` its other arguments, by name. If the call
    can have a plan, it is stored in ``keep``.

    Raises
    ------
    InputError
        for tensors that can't be used, or don't fit each other.
    """
    gather_indices, topk_weights, fuse_mul_post, bias, lora, expected_rows = fused.values()
    if not isinstance(x, torch.Tensor):
        from ..weights.quantized_rows import QuantizedRows  # imported here: few calls have such x

        if isinstance(x, QuantizedRows):
            from . import quantized_rows

            return quantized_rows.run(x, w, m_sizes, form, **fused, out=out)
    low = () if not isinstance(lora, Lora) else lora[:2]
    if tensors.is_traced(x, w, m_sizes, gather_indices, topk_weights, bias, *low):
        from .torch_library import traced

        return traced(x, w, m_sizes, **fused, **moves, untraceable=out is not None or form.autotune or form.pinned)
    for name, value in (("x", x), ("w", w), ("m_sizes", m_sizes)):
        if not isinstance(value, torch.Tensor) and not (value is w and tensors.is_quantised(w)):
            tensors.bad(name, f"a {type(value).__name__}", "a torch.Tensor" + " or ExpertWeights" * (name == "w"))
    if not isinstance(w, torch.Tensor) and form.names_kernels:
        raise InputError(
            "grouped_gemm: a kernel_config_* with ExpertWeights is a Config or a Choice, wanted what "
            "get_or_autotune_moe_kernels(..., weights=w) returned. Leave it out; autotune=True measures "
            "their kernels"
        )
    originals = x, w, bias
    if torch.is_autocast_enabled(x.device.type):
        x, w, bias = autocast(x, w, bias)
    call, rows = check(x, w, m_sizes, form, gather_indices, topk_weights, fuse_mul_post, bias, out, expected_rows)
    own = rows is originals[0] and bias is originals[2] and w is originals[1]
    x = rows
    new_plan = None
    if keep is not None and own and lora is None:
        new_plan = plan(call, x, w, topk_weights, bias, gather_indices, out, varies=keep[2])
    if form.autotune:
        _tune(call, x)
    fusions = call.fusions
    if lora is not None:
        with without_autocast(x.device.type):
            return _adapted(call, x, w, lora, out, keep if own else None)
    with without_autocast(x.device.type):
        sizes = (call.M, call.x_rows, call.y_rows)
        inputs_with_grad = any(t is not None and t.requires_grad for t in (x, w, fusions.weights, fusions.bias))
        if not (inputs_with_grad and torch.is_grad_enabled()):
            if new_plan is None:
                y = low_rank.forward(call, x, out)
            else:
                y, _ = new_plan.forward(
                    x, call.w, m_sizes, fusions.weights, fusions.bias, fusions.index, sizes, out=out
                )
            if out is not None:  # autograd doesn't see the launch: count the write, in case ``out`` was saved
                torch.autograd.graph.increment_version(out)
        elif out is not None:
            raise InputError(
                "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or "
                "use torch.no_grad()"
            )
        else:
            from ..ops.autograd import GroupedGemm  # imported here: a call without a gradient needs none

            y = GroupedGemm.apply(
                x, call.w, m_sizes, fusions.weights, fusions.bias, fusions.index, call.form, sizes, new_plan
            )  # type: ignore[no-untyped-call]
    _kept(keep, new_plan)
    return y


def _adapted(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    lora: Lora,
    out: torch.Tensor | None,
    keep: _Place | None,
) -> torch.Tensor:
    """Return y of a checked call with an adapter; if the call can have a plan, it is stored in ``keep``."""
    from .lora import check_no_gradient, low_rank_of  # imported here: it imports all of a layer

    adapter, fusions = low_rank_of(lora, x, call.m_sizes, call.N), call.fusions
    index, weights, bias = fusions.index, fusions.weights, fusions.bias
    if out is not None:
        tensors.check_apart(out, **{"lora.A": adapter.A, "lora.B": adapter.B})
    learns = any(each is not None and each.requires_grad for each in (x, call.w, weights, bias, adapter.A, adapter.B))
    new_plan, sizes = None, (call.M, call.x_rows, call.y_rows)
    if keep is not None and not _transformed():
        new_plan = plan(call, x, w, weights, bias, index, out, varies=keep[2], adapter=adapter)
    if not (learns and torch.is_grad_enabled()):
        if new_plan is None:
            y: torch.Tensor = low_rank.with_adapter(call, x, adapter, out)[0]
        else:
            y = new_plan.forward(x, call.w, call.m_sizes, weights, bias, index, sizes, adapter, out)[0]
        if out is not None:  # autograd doesn't see the launch
            torch.autograd.graph.increment_version(out)
        _kept(keep, new_plan)
        return y
    if out is not None:
        check_no_gradient(adapter.A, adapter.B)
        raise InputError(
            "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or use torch.no_grad()"
        )
    from ..ops.autograd import Adapted, AdaptedGemm

    how = Adapted(call.form, sizes, adapter.scale, new_plan)
    y = AdaptedGemm.apply(x, call.w, call.m_sizes, weights, bias, adapter.A, adapter.B, index, how)  # type: ignore[no-untyped-call]
    _kept(keep, new_plan)
    return y


def _kept(place: _Place | None, new_plan: ProductPlan | None) -> None:
    """Store a plan in its place, if neither is None and the whole call was recorded."""
    if place is not None and new_plan is not None and new_plan.program is not None:
        table, key, _ = place
        remember(table, key, new_plan)


def problems(call: Call, x: torch.Tensor) -> tuple[Problem, ...]:
    """Return the problems that a CUDA call and its gradients look up; quantised weights have no dW.

    If x may be quantised, the forwards with quantised x and with x as it is are both returned: their times decide.
    """
    from ...kernels.spec import code_of  # imported here: only tuning needs it

    form, E, N, K = call.form, call.m_sizes.shape[0], call.N, call.K
    dtype, fusions = tensors.check_cuda_dtype(x), call.fusions
    weighted = Fusion.WEIGHT if fusions.weights is not None else Fusion.NONE
    forward = (Fusion.GATHER if form.permute_x else Fusion.NONE) | weighted
    forward |= Fusion.SCATTER if form.permute_y else Fusion.NONE
    forward |= Fusion.BIAS if fusions.bias is not None else Fusion.NONE
    dx = Fusion.SCATTER if form.permute_x else Fusion.NONE
    dx |= Fusion.GATHER if form.permute_y and form.only_dx else Fusion.NONE  # with dW, dy is gathered already
    if fusions.weights is not None and (form.only_dx or not fusions.weights.requires_grad):
        dx |= Fusion.WEIGHT
    if not isinstance(call.w, torch.Tensor):
        from ..launch.quantised import problems_of  # imported here: only tuning asks

        return problems_of(call.w, x, forward, code_of(Op.DX, dx))
    swapped = form.layout is Layout.KN  # then the kernel computes dw.T: dy and x change places
    return (
        Problem(Op.FORWARD, dtype, E, N, K, form.layout, code_of(Op.FORWARD, forward)),
        Problem(Op.DX, dtype, E, N, K, form.layout, code_of(Op.DX, dx)),
        Problem(Op.DW, dtype, E, K, N) if swapped else Problem(Op.DW, dtype, E, N, K),
    )


def _tune(call: Call, x: torch.Tensor) -> None:
    tuner = hooks.demand_tuner()
    if tuner is not None and x.is_cuda and call.M:
        wanted = problems(call, x)
        for dtype in dict.fromkeys(problem.dtype for problem in wanted):
            tuner(
                tuple(problem for problem in wanted if problem.dtype is dtype),
                call.form.bucket or call.M,
                x.get_device(),
            )
