"""A whole MoE layer: sort the routing, gather, two grouped GEMMs with an activation between, weigh, sum over k.

A call like an earlier one runs that call's plan. The first such call runs layer_call.py, which is imported then.
"""

from __future__ import annotations

import functools
from types import ModuleType
from typing import TYPE_CHECKING

import torch

from ...artifacts.records import bucket_of
from .. import hooks
from ..check import tensors
from ..check.call import expected_bucket
from ..ops.low_rank import Lora, adapters_given, scales_of
from ..weights.expert_weights import ExpertWeights, key_of

if TYPE_CHECKING:
    from ...kernels.activations import Activation
    from ..weights.quantized_rows import QuantizedRows

_tracing = torch.compiler.is_dynamo_compiling
_duals = tensors.duals


def moe_mlp(
    hidden: torch.Tensor | QuantizedRows,
    gate_up_weight: torch.Tensor | ExpertWeights,
    down_weight: torch.Tensor | ExpertWeights,
    topk_ids: torch.Tensor,
    topk_weights: torch.Tensor,
    activation: str | Activation = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    weights_on: str = "output",
    w_layout: str = "nk",
    lora: tuple[Lora | None, Lora | None] | None = None,
    out: torch.Tensor | None = None,
    expected_rows: int | None = None,
    precision: str | None = None,
) -> torch.Tensor:
    """out[t] = sum over slots s of weight[t, s] * (act(hidden[t] @ gate_up[e].T) @ down[e].T), e = topk_ids[t, s].

    Parameters
    ----------
    hidden
        [T, H] (or [..., H], flattened) bfloat16, float16 or float32; float64 on the CPU. Or ``QuantizedRows``: out is
        bfloat16, and nothing has a gradient.
    gate_up_weight, down_weight
        [E, 2*I, H] and [E, H, I] in hidden's dtype; [E, I, H] for the first with ``gated=False``. With
        ``w_layout="kn"`` they are [E, H, 2*I] and [E, I, H]. Or ``ExpertWeights`` of the first shapes: frozen.
    topk_ids
        [T, k] integer: the experts of each token. An id outside [0, E) takes no part.
    topk_weights
        [T, k] floating point, multiplied in float32; differentiable.
    activation, gated, interleaved
        ``silu gelu gelu_tanh relu2 swiglu_oai`` with a gate, ``silu gelu gelu_tanh relu2`` without, or an
        ``Activation``: with numbers (``swiglu``, ``situ``, ``swiglustep``). Gate and up are the first and second half
        of the columns, or with ``interleaved`` the even and odd ones.
    gate_up_bias, down_bias
        [E, 2*I] and [E, H] in hidden's dtype, or None.
    weights_on
        ``"output"``: the expert's result is weighted, as above. ``"input"``: the expert's input is weighted (Llama-4),
        act((weight[t, s] * hidden[t]) @ ...).
    w_layout
        ``"nk"``, or ``"kn"`` for weights with K before N, as above.
    lora
        The adapters of the two products, (gate_up, down), either of which may be None: A [E, r, H] and B [E, 2*I, r]
        of the first, A [E, r, I] and B [E, H, r] of the second, whatever ``w_layout`` is.
    out
        Contiguous, in hidden's shape and dtype: written and returned, without a gradient. It may be hidden itself.
    expected_rows
        A hint, 0 to T*k: how many of the T*k ids are in [0, E), as with experts on other ranks. Kernels, also those of
        gradients, are chosen for that many rows; for T*k if None. It changes no buffer, and a wrong hint no result.
    precision
        "fp8" quantises the operands of both products and of their gradients, as ``grouped_gemm`` says. hidden is
        bfloat16, H and I are multiples of 128; with neither lora nor ``weights_on="input"``. None: hidden's precision.

    Returns
    -------
    torch.Tensor
        [T, H] in hidden's dtype, in hidden's shape. Slots are summed in their order, in fp32, and rounded once.

    Notes
    -----
    An expert's result is rounded to hidden's dtype before it is weighted: in float16 a value over 65504 is infinite. If
    torch traces the call, or with ``weights_on="input"``, the second product scatters its rows, and weights them before
    they are rounded.

    If nothing needs a gradient, silu(gate) * up of halves without a bias is computed in the first product's epilogue
    if a bundle's times say that this is faster (``kernels/plans.py`` has the rule); then gate and up are not rounded.
    A call that needs a gradient, or has another activation, runs the product, then a row kernel for the activation.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other.
    ProblemNotInBundle, TargetMismatch, DriverTooOld, BundleError, CudaError
        for the reasons of ``grouped_gemm``.
    """
    if TYPE_CHECKING:
        assert isinstance(hidden, torch.Tensor)  # ``QuantizedRows`` have no key, and ``run`` checks them
    key: object = None
    snapshot = None
    if not _tracing():
        # Read the snapshot first: a choice from before a ``reload`` must not get into the table from after it.
        snapshot = hooks.current() if hooks.blocks else hooks.snapshot
        if _duals._current_level >= 0:
            low = [matrix for pair in adapters_given(lora) if isinstance(pair, Lora) for matrix in pair[:2]]
            tensors.no_tangents(
                "moe_mlp", hidden, gate_up_weight, down_weight, topk_weights, gate_up_bias, down_bias, *low
            )
        plan = None
        try:
            T, k = topk_ids.shape
            at: tuple[object, ...]
            if type(gate_up_weight) is not ExpertWeights and type(down_weight) is not ExpertWeights:
                at = gate_up_weight.data_ptr(), down_weight.data_ptr()
            else:
                at = (*key_of(gate_up_weight), *key_of(down_weight))
            if type(T) is int:  # else torch.compile traces it: a key would make the graph depend on T
                key = (
                    "layer",
                    *at,
                    k,
                    bucket_of(T * k),
                    activation,
                    gated,
                    interleaved,
                    gate_up_bias is None,
                    down_bias is None,
                    weights_on,
                    w_layout,
                    hidden.dim(),
                    hidden.requires_grad,
                    out is None,
                    None if lora is None else scales_of(lora),
                    None if expected_rows is None else expected_bucket("moe_mlp", expected_rows, T * k, "T*k"),
                    precision,
                )
                if snapshot is None and tensors.on_gpu(hidden):
                    snapshot = _later()[0].snapshot()
                plan = None if snapshot is None else snapshot.plans.get(key)
        except (AttributeError, TypeError, ValueError, RuntimeError):  # no usable tensor: the checks will report it
            key = None
        if plan is not None:
            result: torch.Tensor | None = plan.call(
                hidden, gate_up_weight, down_weight, gate_up_bias, down_bias, topk_ids, topk_weights, out, lora
            )
            if result is not None:
                return result
    if _tracing():
        from .layer_call import run  # imported here: only a call without a plan needs it
    else:
        run = _later()[1].run
    return run(
        hidden,
        (gate_up_weight, down_weight, gate_up_bias, down_bias),
        topk_ids,
        topk_weights,
        (activation, gated, interleaved),
        weights_on=weights_on,
        w_layout=w_layout,
        lora=lora,
        out=out,
        expected_rows=expected_rows,
        key=key,
        snapshot=snapshot,
        precision=precision,
    )


@functools.cache
def _later() -> tuple[ModuleType, ModuleType]:
    """The modules that only a layer without a plan needs, imported at its first call."""
    from ..dispatch import snapshot
    from . import layer_call

    return snapshot, layer_call
