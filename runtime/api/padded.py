"""Calls on padded rows: ``grouped_gemm`` of x [E, M_max, K], or with ``m_starts``, checked and run.

``ops/padded_rows.py`` has the arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Layout, bucket_of
from .. import hooks
from ..check import tensors
from ..check.call import Starts, autocast, check_fusions, expected_bucket, form_of
from ..dispatch import snapshot as dispatch_snapshot
from ..driver.device import without_autocast
from ..launch.program import EAGER, remember
from ..launch.steps import operands_of
from ..ops import padded_rows
from ..ops.low_rank import Lora, LowRank, as_used, scales_of
from ..ops.padded_rows import How, PaddedGemm, Placed
from ..weights.expert_weights import ExpertWeights, key_of
from ..weights.quantized_rows import QuantizedRows, checked
from .lora import check_no_gradient, low_rank_of
from .padded_plan import Compute, PaddedPlan, as_rows, placed_of, plan
from .quantized_rows import refusal

_CALL = "grouped_gemm"
_tracing = torch.compiler.is_dynamo_compiling
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written


# The arguments of ``grouped_gemm`` that padded rows exclude, with their defaults.
EXCLUDED = {
    "topk": 1,
    "gather_indices": None,
    "permute_x": False,
    "permute_y": False,
    "topk_weights": None,
    "fuse_mul_post": False,
    "kernel_config_fwd": None,
    "kernel_config_bwd_dX": None,
    "kernel_config_bwd_dW": None,
    "autotune": False,
}


def padded_gemm(
    product: Callable[..., torch.Tensor],
    x: torch.Tensor | QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    others: tuple[object, ...],
    *,
    w_layout: str,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    zero_tail: bool,
    lora: Lora | None,
    expected_rows: int | None,
    only_dx: bool,
    only_dw: bool,
) -> torch.Tensor:
    """The result of ``grouped_gemm`` for padded rows. ``product`` is ``grouped_gemm`` itself.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other.
    """
    for (name, usual), value in zip(EXCLUDED.items(), others, strict=True):
        if value is not usual and not (type(value) is type(usual) and value == usual):
            kind = "x [E, M_max, K]" if m_starts is None else "m_starts"
            raise InputError(
                f"{_CALL}: {name} with {kind}: padded rows are sorted by expert already, and pretuned chooses their "
                f"kernel. Leave {name} out"
            )
    if isinstance(x, QuantizedRows):
        if lora is not None:
            raise refusal(_CALL, "x", "lora")
        return _of_codes(x, w, m_sizes, m_starts, w_layout, zero_tail, bias, out, expected_rows)
    if isinstance(lora, Lora) and lora.dropout:
        rest: dict[str, Any] = {"m_starts": m_starts, "expected_rows": expected_rows}
        zeroed = {**rest, "zero_tail": bool(zero_tail or out is not None)}  # padding rows of out must not change
        A, B, scale = low_rank_of(lora, x, m_sizes)
        whole = product(x, w, m_sizes, w_layout=w_layout, bias=bias, out=out, zero_tail=zero_tail, **rest)
        u = product(torch.nn.functional.dropout(x, lora.dropout), A, m_sizes, **zeroed)
        return whole.add_(product(u * scale, B, m_sizes, **zeroed))
    key = None
    if not (tensors.duals._current_level >= 0 or tensors.jit_state() is not None or _tracing()):
        key = _key(x, w, w_layout, zero_tail, bias, out, lora, expected_rows)
        planned = None if key is None else _again(key, x, w, m_sizes, m_starts, bias, out, lora)
        if planned is not None:
            return planned if x.dim() == 2 or out is not None else planned.view(*x.shape[:-1], -1)
    check_rows(_CALL, "x", x, m_sizes, m_starts)
    if tensors.duals._current_level >= 0:
        tensors.no_tangents(_CALL, x, w, bias, *(lora[:2] if isinstance(lora, Lora) else ()))
    originals = x, w, bias
    low = () if not isinstance(lora, Lora) else lora[:2]
    if tensors.is_traced(x, w, m_sizes, m_starts, bias, *low):
        only = only_dx, only_dw
        return _traced(x, w, m_sizes, m_starts, w_layout, zero_tail, only, bias, out, lora, expected_rows)
    moves: dict[str, Any] = {"topk": 1, "permute_x": False, "permute_y": False}
    form = form_of(w_layout=w_layout, zero_tail=zero_tail, dX_only=only_dx, dW_only=only_dw, **moves)
    x, w, bias = autocast(x, w, bias)
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    rows = tensors.check(flat, w, m_sizes, w_layout)
    flat, R, N = rows.x, rows.M, rows.N
    check_fusions(form, m_sizes, x.dtype, N, gather_indices=None, topk_weights=None, fuse_mul_post=False, bias=bias)
    if x.is_cuda:
        tensors.check_cuda_dtype(x)
    bucket = expected_bucket(_CALL, expected_rows, R, most_rows(x))
    part = None if lora is None else low_rank_of(lora, flat, m_sizes, N)
    dense: torch.Tensor | ExpertWeights = w if isinstance(w, ExpertWeights) else rows.w
    y_shape = (*x.shape[:-1], N)
    low_tensors = (None, None) if part is None else (part.A, part.B)
    how = How(True, True, Layout(w_layout), form.zero_tail, bucket, form.only_dx, form.only_dw)
    learns = any(t is not None and t.requires_grad for t in (x, dense, bias, *low_tensors))
    if learns and torch.is_grad_enabled():
        if out is not None:
            check_no_gradient(*(t for t in low_tensors if t is not None))
            raise InputError(
                f"{_CALL}: out with an input that requires grad has no gradient. Leave out away, or use torch.no_grad()"
            )
        placed = placed_of(x, m_sizes, m_starts)
        with without_autocast(x.device.type):
            apply: Any = PaddedGemm.apply
            y: torch.Tensor = apply(flat, dense, bias, *low_tensors, placed, how, 1.0 if part is None else part.scale)
        return y.view(y_shape)
    operands = tuple(operands_of(dense).values())
    inputs = (x, m_sizes, m_starts, *operands, bias, *low_tensors, out)
    if out is not None:
        read = {"x": x, "m_sizes": m_sizes, "m_starts": m_starts, "bias": bias, **named("w", dense)}
        check_out(_CALL, out, y_shape, x, read | {"lora.A": low_tensors[0], "lora.B": low_tensors[1]})
    if not (x is originals[0] and w is originals[1] and bias is originals[2]):
        key = None

    def compute(flat: torch.Tensor, into: torch.Tensor | None, placed: Placed, executor: Any) -> torch.Tensor:
        return padded_rows.product(flat, dense, placed, how, bias, part, into, executor)[0]

    with without_autocast(x.device.type):
        y = run_recorded(key, inputs, flat, compute)
    if out is not None:
        _written(out)
        return out
    return y.view(y_shape)


def _of_codes(
    arriving: QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    w_layout: str,
    zero_tail: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    expected_rows: int | None,
) -> torch.Tensor:
    """Run the product on x that arrives as codes."""
    (codes, scale), x = checked_codes(_CALL, "x", arriving, w, m_sizes, m_starts, bias), arriving.stand_in()
    moves: dict[str, Any] = {"topk": 1, "permute_x": False, "permute_y": False}
    form = form_of(w_layout=w_layout, zero_tail=zero_tail, **moves)
    flat = x.view(-1, x.shape[-1])
    rows = tensors.check(flat, w, m_sizes, w_layout, copies=False)
    check_fusions(
        form, m_sizes, x.dtype, rows.N, gather_indices=None, topk_weights=None, fuse_mul_post=False, bias=bias
    )
    bucket = expected_bucket(_CALL, expected_rows, rows.M, most_rows(x))
    y_shape = (*x.shape[:-1], rows.N)
    if out is not None:
        read = {"m_sizes": m_sizes, "m_starts": m_starts, "bias": bias, **named("w", w)}
        check_out(_CALL, out, y_shape, x, read | {"x.codes": codes, "x.scale": scale})
    how, into = How(True, True, Layout(w_layout), form.zero_tail, bucket), as_rows(out)
    starts = Starts(m_starts, x.shape[-2], packs=False)
    with without_autocast(codes.device.type):
        y = padded_rows.in_place(codes, scale, w, m_sizes, starts, how, bias, into)
        if y is None:
            placed = placed_of(x, m_sizes, m_starts)
            y, _ = padded_rows.product(codes, w, placed, how, bias, None, into, x_scale=scale)
    if out is not None:
        _written(out)
        return out
    return y.view(y_shape)


def checked_codes(
    call: str,
    name: str,
    arriving: QuantizedRows,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    *others: torch.Tensor | ExpertWeights | None,
) -> QuantizedRows:
    """Check padded rows with ``quantized_rows.checked``; InputError also if torch traces the call, or for a gradient.

    ``others`` are the call's other tensors.
    """
    coded = checked(call, name, arriving, w)
    check_rows(call, name, arriving.stand_in(), m_sizes, m_starts)
    there = [tensor for tensor in others if tensor is not None]
    if tensors.duals._current_level >= 0:
        tensors.no_tangents(call, *there)
    if tensors.is_traced(*coded, m_sizes, m_starts, *there):
        raise refusal(call, name, "a call that torch traces")
    if torch.is_grad_enabled() and any(getattr(tensor, "requires_grad", False) for tensor in there):
        raise refusal(call, name, "a gradient")
    return coded


def run_recorded(
    key: object, inputs: Sequence[torch.Tensor | None], flat: torch.Tensor, compute: Compute
) -> torch.Tensor:
    """Return y of ``compute``. If the call can be recorded, its plan is stored under ``key``.

    ``inputs`` are the tensors of the call: x, m_sizes and m_starts first, out last. ``flat`` is x as [R, K].
    """
    x, m_sizes, m_starts, *_, out = inputs
    if x is None or m_sizes is None:
        raise AssertionError("a call without rows")
    new_plan = None if key is None else plan(inputs)
    placed = placed_of(x, m_sizes, m_starts)
    if new_plan is None:
        return compute(flat, as_rows(out), placed, EAGER)
    y = new_plan.first(inputs, placed, compute)
    if new_plan.program is not None:
        remember(dispatch_snapshot.snapshot().plans, key, new_plan)
    return y


def recorded(key: object, inputs: Sequence[torch.Tensor | None]) -> torch.Tensor | None:
    """y [R, N], or out, by the plan that an earlier call stored under ``key``; None if no plan serves this call."""
    snapshot = hooks.snapshot
    earlier: PaddedPlan | None = None if snapshot is None else snapshot.plans.get(key)
    if earlier is None:
        return None
    y = earlier.call(inputs)
    return y if y is None or inputs[-1] is None else inputs[-1]


def _again(
    key: object,
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    lora: Lora | None,
) -> torch.Tensor | None:
    """Run the call by its plan, without checks; None if there is no plan, or none that serves these tensors."""
    try:
        low: tuple[torch.Tensor | None, ...] = (None, None)
        if lora is not None:
            low = as_used(lora, x.dtype, m_sizes.shape[0])[:2]
        dense = w if isinstance(w, ExpertWeights) else tensors.three_dimensional(w, m_sizes.shape[0], Layout.NK)
        inputs = (x, m_sizes, m_starts, *operands_of(dense).values(), bias, *low, out)
    except tensors.UNUSABLE:
        return None
    return recorded(key, inputs)


def _key(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    w_layout: str,
    zero_tail: bool,
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    lora: Lora | None,
    expected_rows: int | None,
) -> object:
    """The key of this call's plan; None if the call can have no plan."""
    try:
        R = x.shape[:-1].numel()
        bucket = None if expected_rows is None else expected_bucket(_CALL, expected_rows, R, most_rows(x))
        scales = None if lora is None else scales_of((lora, None))
        key = "padded", *key_of(w), w_layout, bool(zero_tail), bias is None, out is None, bucket, bucket_of(R), scales
        hash(key)
    except tensors.UNUSABLE:
        return None
    return (*key, x.dim())


def most_rows(x: torch.Tensor) -> str:
    """The name of x's number of rows, for messages: M, or E*M_max."""
    return "M" if x.dim() == 2 else "E*M_max"


def check_rows(call: str, name: str, x: torch.Tensor, m_sizes: torch.Tensor, m_starts: torch.Tensor | None) -> None:
    """Raise InputError unless x [E, M_max, K], or x [M, K] with ``m_starts`` [E], can be rows of E experts."""
    tensors.tensors(call, **{name: x, "m_sizes": m_sizes})
    tensors.tensors_or_none(call, m_starts=m_starts)
    tensors.check_sizes(m_sizes)
    E = m_sizes.shape[0]
    if m_starts is None:
        if x.dim() != 3 or x.shape[0] != E:
            wanted = f"[E, M_max, K] with E={E}, the length of m_sizes, or [M, K] with m_starts"
            tensors.bad(name, f"of shape {list(x.shape)}", wanted, call)
        return
    if x.dim() != 2:
        tensors.bad(name, f"of shape {list(x.shape)}", "[M, K] with m_starts: leave one of the two away", call)
    if tuple(m_starts.shape) != (E,) or m_starts.dtype not in (torch.int32, torch.int64):
        got = f"{m_starts.dtype} of shape {list(m_starts.shape)}"
        tensors.bad("m_starts", got, f"int32 or int64 [E] = [{E}], the first row of each expert", call)
    if m_starts.device != x.device:
        tensors.bad("m_starts", f"on {m_starts.device}", f"{name}'s device, {x.device}", call)
    if x.device.type == "cpu" and not tensors.on_gpu(x) and not tensors.is_traced(x, m_sizes, m_starts):
        _check_apart(call, m_sizes, m_starts, x.shape[0])


def _check_apart(call: str, m_sizes: torch.Tensor, m_starts: torch.Tensor, M: int) -> None:
    """Raise InputError for ``m_starts`` on the CPU if two experts share a row, or a row is not in [0, M)."""
    order = m_starts.argsort(stable=True).tolist()
    starts, counts = m_starts.tolist(), m_sizes.tolist()
    end, before = 0, None
    for e in order:
        if counts[e] <= 0:
            continue
        rows = f"rows {starts[e]} to {starts[e] + counts[e] - 1} for expert {e}"
        if starts[e] < 0 or starts[e] + counts[e] > M:
            tensors.bad("m_starts", rows, f"rows of 0 to M - 1 = {M - 1}", call)
        if starts[e] < end:
            tensors.bad("m_starts", f"{rows}, of which some are expert {before}'s", "rows of their own", call)
        end, before = starts[e] + counts[e], e


def check_out(
    call: str,
    out: torch.Tensor,
    shape: Sequence[int],
    like: torch.Tensor,
    read: Mapping[str, torch.Tensor | None],
) -> None:
    """Raise InputError unless ``out`` can take y of this shape, in memory of its own."""
    if not isinstance(out, torch.Tensor):
        tensors.bad("out", f"a {type(out).__name__}", "a torch.Tensor or None", call)
    if tuple(out.shape) != tuple(shape):
        tensors.bad("out", f"of shape {list(out.shape)}", f"y's, {list(shape)}", call)
    if out.dtype is not like.dtype or out.device != like.device:
        tensors.bad("out", f"{out.dtype} on {out.device}", f"{like.dtype} on {like.device}", call)
    if not out.is_contiguous():
        tensors.bad("out", f"with strides {list(out.stride())}", "a contiguous tensor", call)
    if out.requires_grad and torch.is_grad_enabled():
        tensors.bad("out", "a tensor that requires grad", "one that does not: out.detach(), or torch.no_grad()", call)
    tensors.check_apart(out, call, **read)


def named(name: str, w: torch.Tensor | ExpertWeights) -> dict[str, torch.Tensor | None]:
    """The tensors of weights, by their names in error messages."""
    if isinstance(w, ExpertWeights):
        return {f"{name}.{part}": tensor for part, tensor in w.tensors().items()}
    return {name: w}


def _traced(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    w_layout: str,
    zero_tail: bool,
    only: tuple[bool, bool],
    bias: torch.Tensor | None,
    out: torch.Tensor | None,
    lora: Lora | None,
    expected_rows: int | None,
) -> torch.Tensor:
    """Run the call by the traceable operator that gathers and scatters rows. Padding rows of y are zero."""
    from .torch_library import traced

    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    index, counts, _ = padded_rows.place(m_sizes, m_starts, x.shape[-2], flat.shape[0])
    y = traced(
        flat,
        w,
        counts,
        gather_indices=index,
        topk_weights=None,
        bias=bias,
        topk=1,
        permute_x=True,
        permute_y=True,
        fuse_mul_post=False,
        w_layout=w_layout,
        zero_tail=zero_tail,
        dX_only=only[0],
        dW_only=only[1],
        untraceable=out is not None,
        lora=lora,
        expected_rows=expected_rows,
    )
    return y.view(*x.shape[:-1], y.shape[-1])


def adapter(lora: Lora | None, x: torch.Tensor, m_sizes: torch.Tensor, N: int) -> LowRank | None:
    """Return a checked adapter for a product into N columns; None if ``lora`` is None."""
    return None if lora is None else low_rank_of(lora, x, m_sizes, N)
