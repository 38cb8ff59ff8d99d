"""Products and layers with adapters, each one function with its own gradient (``ops/autograd.py``, ``ops/layer.py``).

Their low-rank parts are in their products' own kernels where there is such code.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import bucket_of
from ..check import tensors
from ..check.call import MAX_RANK
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import without_autocast
from ..launch.program import remember
from ..ops import layer
from ..ops.layer import FrozenWeights, Layer, Weights
from ..ops.low_rank import Adapters, Lora, LowRank, as_read
from ..ops.routing import Routing
from ..weights.expert_weights import key_of
from ..weights.quantized_rows import QuantizedRows
from .layer_plan import plan_layer
from .quantized_rows import refusal


def low_rank_of(lora: Lora, x: torch.Tensor, m_sizes: torch.Tensor, N: int | None = None) -> LowRank:
    """Return a checked adapter for a product of x [.., K] into N columns; if N is None, B's columns are not checked.

    Raises
    ------
    InputError
        for one that doesn't fit the product.
    """
    A, B = _usable(x, m_sizes, lora)
    if N is not None:
        check_columns(lora.B, N)
    return LowRank(A, B, lora.scale)


def dropped(
    product: Callable[..., torch.Tensor],
    x: torch.Tensor | QuantizedRows,
    w: object,
    m_sizes: torch.Tensor,
    lora: Lora,
    moves: Mapping[str, Any],
    rest: Mapping[str, Any],
) -> torch.Tensor:
    """Return ``product(x, w, m_sizes, **moves, **rest)`` plus the part of an adapter with dropout, computed apart.

    ``product`` is ``grouped_gemm``. ``moves`` has its arguments for the gather, the scatter and the routing weights, of
    both parts; ``rest`` has the arguments of the base product alone.

    Raises
    ------
    InputError
        for an adapter that doesn't fit the product.
    """
    if isinstance(x, QuantizedRows):
        raise refusal("grouped_gemm", "x", "lora")
    A, B, scale = low_rank_of(lora, x, m_sizes)
    if rest["out"] is not None:
        check_no_gradient(A, B)
    y = product(x, w, m_sizes, **moves, **rest)
    check_columns(lora.B, y.shape[1])
    index, topk, weights = moves["gather_indices"], moves["topk"], moves["topk_weights"]
    how = {name: moves[name] for name in ("permute_y", "fuse_mul_post", "zero_tail")}
    how["expected_rows"] = rest["expected_rows"]
    how["zero_tail"] |= rest["out"] is not None  # rows of out past the last expert's must not change
    seen = torch.nn.functional.dropout(x, lora.dropout)
    if moves["permute_x"]:
        u = product(seen, A, m_sizes, topk, index, permute_x=True, expected_rows=how["expected_rows"])
        # Padding rows of u are not written. B's gradient multiplies them by zero, so they must be finite.
        u = u.masked_fill(((index < 0) | (index >= x.shape[0] * topk))[:, None], 0)
    else:
        u = product(seen, A, m_sizes, expected_rows=how["expected_rows"])
    if how["permute_y"] and weights is None and y.shape[0] != u.shape[0]:  # T is taken from weights
        weights, how["fuse_mul_post"] = x.new_ones((y.shape[0] // topk, topk), dtype=torch.float32), True
    return y.add_(product(u * scale, B, m_sizes, topk, index, topk_weights=weights, is_first_gemm=False, **how))


def check_no_gradient(*low: torch.Tensor) -> None:
    """Raise InputError, for a call with ``out``, if A or B needs a gradient."""
    if torch.is_grad_enabled() and any(tensor.requires_grad for tensor in low):
        raise InputError(
            "grouped_gemm: out with a lora that requires grad has no gradient. Leave out away, or use torch.no_grad()"
        )


def check_columns(B: torch.Tensor, N: int) -> None:
    """Raise InputError unless B is for a product of N columns."""
    if B.shape[1] != N:
        tensors.bad("lora.B", f"of shape {list(B.shape)}", f"[E or 1, N={N}, r={B.shape[2]}]")


def adapted_layer(
    x: torch.Tensor,
    parameters: Weights | FrozenWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    how: Layer,
    routing: Routing,
    lora: tuple[Lora | None, Lora | None],
    *,
    comes_again: bool,
    known_as: object = None,
) -> torch.Tensor:
    """A whole layer with adapters on its products, as one function with its own gradient.

    With ``comes_again`` (the weights are the caller's own tensors) the call is recorded in a plan (``layer_plan.py``),
    which is stored under its own key and under ``known_as``.

    Raises
    ------
    InputError
        for an adapter that doesn't fit its product.
    """
    wide = layer.columns(parameters.gate_up, how.layout)
    ins = x, x.new_empty((0, wide // 2 if how.act.gated else wide))
    low: list[LowRank | None] = []
    for adapter, into, w in zip(lora, ins, parameters[:2], strict=True):
        if adapter is None:
            low.append(None)
            continue
        low.append(low_rank_of(adapter, into, routing.m_sizes, layer.columns(w, how.layout)))
    pairs = [each for adapter in low for each in ((None, None) if adapter is None else adapter[:2])]
    scales, adapters = tuple(1.0 if adapter is None else adapter.scale for adapter in low), Adapters(*low)
    plan, snapshot, key = None, None, None
    if comes_again and tensors.on_gpu(x) and not torch._C._are_functorch_transforms_active():
        snapshot = dispatch_snapshot.snapshot()
        key = (
            "lora",
            *key_of(parameters.gate_up),
            *key_of(parameters.down),
            how,
            bucket_of(ids.numel()),
            scales,
            ids.dtype,
            *map(_kind, (x[:0], weights[:0], *parameters[2:], *pairs)),
        )
        plan = snapshot.plans.get(key)
        if plan is not None and not plan.takes(x, parameters, ids, weights, adapters=adapters):
            plan = None
        if plan is None:
            plan = plan_layer(how, x, parameters, ids, weights, adapters=adapters)
    with without_autocast(x.device.type):
        if torch.is_grad_enabled() and any(
            adapter is not None and adapter.requires_grad for adapter in (x, weights, *parameters, *pairs)
        ):
            out: torch.Tensor = layer.AdaptedLayer.apply(  # type: ignore[no-untyped-call]
                x, *parameters, weights, routing, how, scales, plan, *pairs
            )
        else:
            run = layer.forward if plan is None else plan.forward
            out = run(how, x, parameters, routing, weights, keeps_h=False, adapters=adapters)[0]
    if plan is not None and snapshot is not None and plan.programs:
        for name in (key, known_as):
            if name is not None and snapshot.plans.get(name) is not plan:
                remember(snapshot.plans, name, plan)
    return out


def _kind(tensor: torch.Tensor | None) -> object:
    """The properties of a tensor that are part of a plan's key."""
    return None if tensor is None else (tensor.dtype, tensor.shape, tensor.stride(), tensor.requires_grad)


def _usable(x: torch.Tensor, m_sizes: torch.Tensor, lora: Lora) -> tuple[torch.Tensor, torch.Tensor]:
    """Return A [E, r, K] and B [E, N, r], checked, as the products take them."""
    if not isinstance(lora, Lora):
        tensors.bad("lora", f"a {type(lora).__name__}", "a pretuned.runtime.Lora(A, B, scale)")
    tensors.tensors(**{"x": x, "m_sizes": m_sizes, "lora.A": lora.A, "lora.B": lora.B})
    tensors.check_sizes(m_sizes)
    if not isinstance(lora.scale, (int, float)) or isinstance(lora.scale, bool):
        tensors.bad("lora.scale", repr(lora.scale), "a number")
    if not isinstance(lora.dropout, (int, float)) or isinstance(lora.dropout, bool) or not 0 <= lora.dropout < 1:
        tensors.bad("lora.dropout", repr(lora.dropout), "a number of at least 0 and below 1")
    E, K, r = m_sizes.shape[0], x.shape[-1] if x.dim() else 0, lora.A.shape[1] if lora.A.dim() == 3 else 0
    wanted = {"lora.A": f"[E, r, K] = [{E} or 1, 1 to {MAX_RANK}, {K}]", "lora.B": f"[E, N, r] = [{E} or 1, N, {r}]"}
    fits = {
        "lora.A": lora.A.dim() == 3 and lora.A.shape[2] == K and 1 <= r <= MAX_RANK,
        "lora.B": lora.B.dim() == 3 and lora.B.shape[2] == r,
    }
    matrices = []
    for of_r, name, matrix in ((1, "lora.A", lora.A), (2, "lora.B", lora.B)):
        if not fits[name] or matrix.shape[0] not in (1, E):
            tensors.bad(name, f"of shape {list(matrix.shape)}", wanted[name])
        if not matrix.dtype.is_floating_point:
            tensors.bad(name, f"{matrix.dtype}", "a floating-point type")
        if matrix.device != x.device:
            tensors.bad(name, f"on {matrix.device}", f"x's device, {x.device}")
        matrices.append(as_read(matrix, x.dtype, E, of_r))
    return matrices[0], matrices[1]
