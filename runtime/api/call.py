"""A call with everything: checked, cast for autocast, tuned if asked, then run with its gradient or without."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.records.problem import Fusion, Layout, Op, Problem
from ..check import tensors
from ..check.call import Call, Form, autocast, check
from ..driver.device import without_autocast
from ..hooks import demand_tuner
from ..launch.program import remember
from ..ops import gradients
from ..replay.product_plan import ProductPlan, plan
from .lora import Lora

if TYPE_CHECKING:
    from ..weights.expert_weights import ExpertWeights
    from ..weights.quantized_rows import QuantizedRows

# The table of plans, a call's key there, and whether its plan is for any number of rows
_Place: TypeAlias = "tuple[dict[Any, Any], object, bool]"

_transformed = torch._C._are_functorch_transforms_active


def run(
    x: torch.Tensor | QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    form: Form,
    *,
    gather_indices: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
    keep: _Place | None = None,
    lora: Lora | None = None,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """y of ``grouped_gemm``, on any device, differentiable where an input requires grad.

    A plan of the call, where there is one, is put into ``keep``.

    Raises
    ------
    InputError
        for tensors that can't be used, or don't fit each other.
    """
    if not isinstance(x, torch.Tensor):
        from ..weights.quantized_rows import QuantizedRows  # here, as few calls have such x

        if isinstance(x, QuantizedRows):
            from . import coded_rows

            return coded_rows.run(
                x,
                w,
                m_sizes,
                form,
                gather_indices=gather_indices,
                topk_weights=topk_weights,
                fuse_mul_post=fuse_mul_post,
                bias=bias,
                out=out,
                lora=lora,
                expected_rows=expected_rows,
            )
    low = () if not isinstance(lora, Lora) else lora[:2]
    if tensors.is_traced(x, w, m_sizes, gather_indices, topk_weights, bias, *low):
        from .torch_library import traced

        return traced(
            x,
            w,
            m_sizes,
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            bias=bias,
            topk=form.topk,
            permute_x=form.permute_x,
            permute_y=form.permute_y,
            fuse_mul_post=fuse_mul_post,
            w_layout=form.layout.value,
            zero_tail=form.zero_tail,
            dX_only=form.only_dx,
            dW_only=form.only_dw,
            untraceable=out is not None or form.autotune or form.pinned,
            lora=lora,
            expected_rows=expected_rows,
        )
    for name, one in (("x", x), ("w", w), ("m_sizes", m_sizes)):
        if not isinstance(one, torch.Tensor) and not (one is w and tensors.is_quantised(w)):
            tensors.bad(name, f"a {type(one).__name__}", "a torch.Tensor" + " or ExpertWeights" * (name == "w"))
    if not isinstance(w, torch.Tensor) and form.names_kernels:
        raise InputError(
            "grouped_gemm: a kernel_config_* with ExpertWeights is a Config or a Choice, wanted what "
            "get_or_autotune_moe_kernels(..., weights=w) returned. Leave it out; autotune=True measures "
            "their kernels"
        )
    given = x, w, bias
    x, w, bias = autocast(x, w, bias)
    call, rows = check(x, w, m_sizes, form, gather_indices, topk_weights, fuse_mul_post, bias, out, expected_rows)
    own = rows is given[0] and bias is given[2] and w is given[1]
    x = rows
    made = None
    if keep is not None and own and lora is None:
        made = plan(call, x, w, topk_weights, bias, gather_indices, out, varies=keep[2])
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
            if made is None:
                y = gradients.forward(call, x, out)
            else:
                y, _ = made.forward(x, call.w, m_sizes, fusions.weights, fusions.bias, fusions.index, sizes, out=out)
            if out is not None:  # a launch changes it unseen: whoever saved it for a gradient has to be told
                torch.autograd.graph.increment_version(out)
        elif out is not None:
            raise InputError(
                "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or "
                "use torch.no_grad()"
            )
        else:
            from ..ops.autograd import GroupedGemm  # here, as a call without a gradient needs none

            y = GroupedGemm.apply(
                x, call.w, m_sizes, fusions.weights, fusions.bias, fusions.index, call.form, sizes, made
            )  # type: ignore[no-untyped-call]
    _kept(keep, made)
    return y


def _adapted(
    call: Call,
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    lora: Lora,
    out: torch.Tensor | None,
    keep: _Place | None,
) -> torch.Tensor:
    """y of a checked call with an adapter; a plan of one that can have it is put into ``keep``."""
    from .adapted import check_no_gradient, low_rank_of  # here, as it imports all of a layer

    one, fusions = low_rank_of(lora, x, call.m_sizes, call.N), call.fusions
    index, weights, bias = fusions.index, fusions.weights, fusions.bias
    if out is not None:
        tensors.check_apart(out, **{"lora.A": one.A, "lora.B": one.B})
    learns = any(each is not None and each.requires_grad for each in (x, call.w, weights, bias, one.A, one.B))
    made, sizes = None, (call.M, call.x_rows, call.y_rows)
    if keep is not None and not _transformed():
        made = plan(call, x, w, weights, bias, index, out, varies=keep[2], one=one)
    if not (learns and torch.is_grad_enabled()):
        if made is None:
            y: torch.Tensor = gradients.with_adapter(call, x, one, out)[0]
        else:
            y = made.forward(x, call.w, call.m_sizes, weights, bias, index, sizes, one, out)[0]
        if out is not None:  # a launch changes it unseen
            torch.autograd.graph.increment_version(out)
        _kept(keep, made)
        return y
    if out is not None:
        check_no_gradient(one.A, one.B)
        raise InputError(
            "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or use torch.no_grad()"
        )
    from ..ops.autograd import Adapted, AdaptedGemm

    how = Adapted(call.form, sizes, one.scale, made)
    y = AdaptedGemm.apply(x, call.w, call.m_sizes, weights, bias, one.A, one.B, index, how)  # type: ignore[no-untyped-call]
    _kept(keep, made)
    return y


def _kept(place: _Place | None, made: ProductPlan | None) -> None:
    """Put a plan into its place, where there are both, and all of the call was written down."""
    if place is not None and made is not None and made.program is not None:
        table, key, _ = place
        remember(table, key, made)


def problems(call: Call, x: torch.Tensor) -> tuple[Problem, ...]:
    """The problems that a CUDA call and its two gradients look up; of quantised weights those of the forward and dX.

    Where x may be quantised, too, both kinds of forward are among these: which one runs is told by their times.
    """
    from ...kernels.contract.spec import code_of  # here, as only tuning asks

    form, E, N, K = call.form, call.m_sizes.shape[0], call.N, call.K
    dtype, fusions = tensors.check_cuda_dtype(x), call.fusions
    weighted = Fusion.WEIGHT if fusions.weights is not None else Fusion.NONE
    forward = (Fusion.GATHER if form.permute_x else Fusion.NONE) | weighted
    forward |= Fusion.SCATTER if form.permute_y else Fusion.NONE
    forward |= Fusion.BIAS if fusions.bias is not None else Fusion.NONE
    dx = Fusion.SCATTER if form.permute_x else Fusion.NONE
    dx |= Fusion.GATHER if form.permute_y and form.only_dx else Fusion.NONE  # else dW has dy gathered already
    if fusions.weights is not None and (form.only_dx or not fusions.weights.requires_grad):
        dx |= Fusion.WEIGHT
    if not isinstance(call.w, torch.Tensor):
        from ..launch.quantised import problems_of  # here, as only tuning asks

        return problems_of(call.w, x, forward, code_of(Op.DX, dx))
    swapped = form.layout is Layout.KN  # dw.T: dy and x change places
    return (
        Problem(Op.FORWARD, dtype, E, N, K, form.layout, code_of(Op.FORWARD, forward)),
        Problem(Op.DX, dtype, E, N, K, form.layout, code_of(Op.DX, dx)),
        Problem(Op.DW, dtype, E, K, N) if swapped else Problem(Op.DW, dtype, E, N, K),
    )


def _tune(call: Call, x: torch.Tensor) -> None:
    tuner = demand_tuner()
    if tuner is not None and x.is_cuda and call.M:
        every = problems(call, x)
        for dtype in dict.fromkeys(one.dtype for one in every):
            tuner(tuple(one for one in every if one.dtype is dtype), call.form.bucket or call.M, x.get_device())
