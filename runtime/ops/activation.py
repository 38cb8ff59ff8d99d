"""The activations of MoE layers, between the two GEMMs: a bundle's kernel on CUDA, and plain torch.

Both compute the same, torch rounding each of its steps to h's dtype, the kernel only the result.
"""

from __future__ import annotations

from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import RowOp
from ...artifacts.tuples import NamedTuple
from ...kernels import reference, rowops
from ...kernels.activations import KINDS, Activation, activation_of
from ..check import tensors
from ..check.saved_tensors import Saved
from ..driver.device import on
from ..launch import rowops as launch_rowops
from ..launch.program import EAGER, EagerExecutor, Step

_transformed = torch._C._are_functorch_transforms_active
_traced = torch._C._get_tracing_state


class RowActivation(NamedTuple):
    """An activation and where gate and up are in a row of h: halves, even and odd columns, or no gate."""

    function: Activation
    gated: bool
    interleaved: bool

    @property
    def flags(self) -> int:
        """The row kernel's flags for the activation."""
        gate = (rowops.GATED if self.gated else 0) | (rowops.INTERLEAVED if self.interleaved else 0)
        return KINDS.index(self.function.name) | gate

    def columns(self, h: torch.Tensor) -> int:
        """The columns of a; InputError where h's are no gate and up."""
        if self.gated and h.shape[-1] % 2:
            raise InputError(f"activate: gate and up have {h.shape[-1]} columns together, wanted an even number")
        return h.shape[-1] // 2 if self.gated else h.shape[-1]


def activate(
    h: torch.Tensor, activation: str | Activation = "silu", *, gated: bool = True, interleaved: bool = False
) -> torch.Tensor:
    """act(gate) * v(up) of h [M, 2*I] -> [M, I]; without a gate act(h) of h [M, I]. In h's dtype.

    On CUDA a bundle's row kernel computes it in float32 and rounds once, and so its gradient. If torch computes it,
    each operation is in float32; silu, gelu and relu2 without a gate round each result to h's dtype, the others the
    last.

    Parameters
    ----------
    h
        [M, 2*I], or [M, I] without a gate, of a floating-point type.
    activation
        An ``Activation``, whose docstring has the equations, or a name: ``silu gelu gelu_tanh relu2 swiglu_oai``;
        without a gate ``silu gelu gelu_tanh relu2``.
    gated
        Whether h has a gate.
    interleaved
        Whether gate and up are h's even and odd columns; else they are its halves.

    Returns
    -------
    torch.Tensor
        [M, I] in h's dtype, differentiable in h.

    Raises
    ------
    InputError
        for an activation that is not known, or not with (without) a gate.
    """
    function = activation_of("activate", activation, gated=gated, interleaved=interleaved)
    act = RowActivation(function, gated, interleaved)
    columns = act.columns(h)
    if not tensors.on_gpu(h) or torch.compiler.is_compiling() or type(h) is not torch.Tensor or _transformed():
        return by_torch(h, act)
    if tensors.duals._current_level >= 0 or _traced() is not None:  # forward AD, a trace: torch's operations only
        return by_torch(h, act)
    rows = h.reshape(-1, h.shape[-1])
    if torch.is_grad_enabled() and h.requires_grad:
        a: torch.Tensor = _Activate.apply(rows, act)  # type: ignore[no-untyped-call]
    else:
        a = forward(rows, act)
    return a.view(*h.shape[:-1], columns)


def forward(
    h: torch.Tensor, act: RowActivation, bounds: torch.Tensor | None = None, executor: EagerExecutor = EAGER
) -> torch.Tensor:
    """a [M, I] of h [M, 2*I] or [M, I]. With ``bounds`` (``Routing.bounds``) rows of no expert hold anything."""
    I = act.columns(h)  # noqa: E741
    h = h.contiguous()
    launch = launch_rowops.for_rows(RowOp.ACTIVATION, I, h.shape[0], h)
    if launch is None:
        executor.unplanned()
        return by_torch(h, act)
    behind, flags = launch_rowops.used(bounds)
    numbers: dict[str, Any] = {"columns": I, "flags": flags | act.flags, **act.function.words}
    step = Step.of(launch, f"{act.function} of {h.shape[1]} columns", behind=(("used", behind, 0),), **numbers)
    with on(h.get_device()):
        a: torch.Tensor = executor.new(h, (h.shape[0], I))
        executor.run(step, h.shape[0], {"h": h, "a": a, "used": bounds})
    return a


class Needs(NamedTuple):
    """The results of ``gradient`` that are needed."""

    dh: bool = True
    a: bool = False
    dweights: bool = False


def gradient(
    h: torch.Tensor,
    da: torch.Tensor,
    act: RowActivation,
    needs: Needs,
    *,
    weights: torch.Tensor | None = None,
    index: torch.Tensor | None = None,
    bounds: torch.Tensor | None = None,
    narrow: bool = False,
    executor: EagerExecutor = EAGER,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    """dh[i] = act'(h[i]) * (t * da[i]), a[i] = t * act(h[i]), dweights[index[i]] = dot(da[i], act(h[i])).

    h [M, 2*I] or [M, I], da [M, I]; t = weights[index[i]] with ``weights``, by index in h's dtype or float32, else 1.
    ``index`` [M] is a permutation. With ``bounds`` rows of no expert get dweights of zero, and in dh and a they hold
    anything. dweights are float32 (float64 beside float64); with ``narrow`` they may be of the weights' dtype. None
    for results that are not needed.
    """
    M, I = da.shape  # noqa: E741
    h, da = h.contiguous(), da.contiguous()
    launch = launch_rowops.for_rows(RowOp.ACTIVATION_GRAD, I, M, h, da)
    if launch is None:
        executor.unplanned()
        return _gradient_by_torch(h, da, act, needs, weights, index, bounds)
    kind = weights.dtype if narrow and weights is not None else torch.float32
    behind, flags = launch_rowops.used(bounds)
    flags |= act.flags | (rowops.WRITES_DH if needs.dh else 0) | (rowops.WRITES_A if needs.a else 0)
    flags |= launch_rowops.weighing(weights) | (rowops.WRITES_DWEIGHTS if needs.dweights else 0)
    flags |= 0 if kind is torch.float32 else rowops.NARROW_DWEIGHTS
    index_step = 2 if index is not None and index.dtype is torch.int64 else 1
    numbers: dict[str, Any] = {"columns": I, "index_step": index_step, "flags": flags, **act.function.words}
    name = f"gradient of {act.function} of {h.shape[1]} columns"
    step = Step.of(launch, name, behind=(("used", behind, 0),), **numbers)
    with on(h.get_device()):
        dh = executor.new(h, h.shape) if needs.dh else None
        a = executor.new(da, (M, I)) if needs.a else None
        dweights = executor.new(h, (M,), kind) if needs.dweights else None
        executor.run(
            step,
            M,
            {
                "h": h,
                "da": da,
                "row_weights": weights,
                "index": index,
                "used": bounds,
                "dh": dh,
                "a": a,
                "dweights": dweights,
            },
        )
    return dh, a, dweights


class _Activate(torch.autograd.Function):
    """``activate`` by a kernel; torch computes gradients that are differentiated again."""

    @staticmethod
    def forward(ctx: Any, h: torch.Tensor, act: RowActivation) -> torch.Tensor:
        ctx.save_for_backward(h)
        ctx.act, ctx.columns = act, h.shape[1]
        return forward(h, act)

    @staticmethod
    def backward(ctx: Any, da: torch.Tensor) -> tuple[torch.Tensor | None, None]:
        (h,) = ctx.saved_tensors
        h = Saved.beside("activate", da).whole("h", h, (da.shape[0], ctx.columns))
        if torch.is_grad_enabled():
            return torch.autograd.grad(by_torch(h, ctx.act), h, da, create_graph=True)[0], None
        return gradient(h, tensors.in_memory("da", da, "activate"), ctx.act, Needs())[0], None


def by_torch(h: torch.Tensor, act: RowActivation) -> torch.Tensor:
    """``activate`` in torch's own operations, on any device."""
    return reference.activation(h, act.function, gated=act.gated, interleaved=act.interleaved)


def _gradient_by_torch(
    h: torch.Tensor,
    da: torch.Tensor,
    act: RowActivation,
    needs: Needs,
    weights: torch.Tensor | None,
    index: torch.Tensor | None,
    bounds: torch.Tensor | None,
) -> tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor | None]:
    scale = None if weights is None or index is None else weights[index.long()][:, None]
    dh = dweights = None
    if bounds is not None:  # rows of no expert are uninitialised: NaN there would stop autograd's anomaly mode
        inside = torch.arange(len(h), device=h.device) < bounds[-1]
        h, da = (torch.where(inside[:, None], tensor, 0) for tensor in (h, da))
    with torch.enable_grad():
        leaf = h.detach().requires_grad_()
        a = by_torch(leaf, act)
    if needs.dh:
        (dh,) = torch.autograd.grad(a, leaf, da if scale is None else (da * scale).to(da.dtype))
    a = a.detach()
    if needs.dweights and index is not None:
        wide = torch.promote_types(da.dtype, torch.float32)
        dots = (da.to(wide) * a.to(wide)).sum(-1)
        dweights = torch.zeros_like(dots).index_copy_(0, index.long(), dots)
    return dh, (a if scale is None else (a * scale).to(a.dtype)) if needs.a else None, dweights
