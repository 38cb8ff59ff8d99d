"""The experts of a layer between two all-to-alls, on buffers in which each expert has its own range of rows."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Layout, bucket_of
from ...kernels.activations import activation_of
from ..check import tensors
from ..check.call import Starts, autocast, check_fusions, expected_bucket, form_of
from ..driver.device import without_autocast
from ..launch.steps import operands_of
from ..ops import padded_rows
from ..ops.activation import RowActivation, activate
from ..ops.layer import Layer, weights_of
from ..ops.low_rank import Adapters, Lora, adapters_given, as_used, scales_of
from ..ops.padded_rows import How, PackedActivation, PaddedGemm, Placed
from ..weights.expert_weights import ExpertWeights, key_of
from ..weights.quantized_rows import QuantizedRows
from .padded import adapter, check_out, check_rows, checked_codes, most_rows, named, recorded, run_recorded
from .padded_plan import as_rows, placed_of
from .quantized_rows import refusal

if TYPE_CHECKING:
    from ...kernels.activations import Activation

_CALL = "experts_mlp"
_tracing = torch.compiler.is_dynamo_compiling
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written


def experts_mlp(
    x: torch.Tensor | QuantizedRows,
    gate_up_weight: torch.Tensor | ExpertWeights,
    down_weight: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    activation: str | Activation = "silu",
    *,
    gated: bool = True,
    interleaved: bool = False,
    gate_up_bias: torch.Tensor | None = None,
    down_bias: torch.Tensor | None = None,
    w_layout: str = "nk",
    m_starts: torch.Tensor | None = None,
    lora: tuple[Lora | None, Lora | None] | None = None,
    out: torch.Tensor | None = None,
    zero_tail: bool = False,
    expected_rows: int | None = None,
) -> torch.Tensor:
    """y[e, i] = act(x[e, i] @ gate_up[e].T + gate_up_bias[e]) @ down[e].T + down_bias[e] for i < m_sizes[e].

    Runs the experts of this rank, between the all-to-all that brings their rows and the one that returns results.

    Parameters
    ----------
    x
        [E, M_max, H] bfloat16, float16 or float32 (float64 on the CPU), or [M, H] with ``m_starts``. Padding rows
        are not read. Or ``QuantizedRows`` of these shapes: y is bfloat16, and nothing has a gradient.
    gate_up_weight, down_weight, activation, gated, interleaved, gate_up_bias, down_bias, w_layout, lora
        The parameters of ``moe_mlp`` by these names.
    m_sizes, m_starts
        [E] int32 or int64, contiguous: the number of rows of each expert, and for x [M, H] its first row, as in
        ``grouped_gemm``.
    out
        Contiguous, in y's shape and dtype: written and returned, without a gradient. It may be x itself.
    zero_tail
        Whether padding rows of y are zeroed; otherwise they are left as they are.
    expected_rows
        How many rows experts will have, 0 to E*M_max (or M), as ``grouped_gemm`` has it.

    Returns
    -------
    torch.Tensor
        y in x's shape and dtype (bfloat16 for ``QuantizedRows``). Differentiable in x, the weights, the biases and
        adapters; dx of padding rows is zero.

    Raises
    ------
    InputError
        for tensors that can't be used, or parameters that exclude each other; for ``QuantizedRows`` where no kernel
        reads x as codes.
    ProblemNotInBundle, TargetMismatch, DriverTooOld, BundleError, CudaError
        for the reasons of ``grouped_gemm``.
    """
    function = activation_of(_CALL, activation, gated=gated, interleaved=interleaved)
    act = RowActivation(function, gated, interleaved)
    adapters = adapters_given(lora)
    low = [tensor for pair in adapters if isinstance(pair, Lora) for tensor in pair[:2]]
    biases = gate_up_bias, down_bias
    if isinstance(x, QuantizedRows):
        both, rest_of = (gate_up_weight, down_weight), (adapters, out, zero_tail, expected_rows)
        return _of_codes(x, both, m_sizes, m_starts, act, w_layout, biases, *rest_of)
    if tensors.duals._current_level >= 0:
        tensors.no_tangents(_CALL, x, gate_up_weight, down_weight, *biases, *low)
    if any(isinstance(pair, Lora) and pair.dropout for pair in adapters):
        raise InputError(f"{_CALL}: an adapter with dropout: use grouped_gemm for the two products, or dropout=0")
    key = None
    if not (tensors.duals._current_level >= 0 or tensors.jit_state() is not None or _tracing()):
        called = act, w_layout, zero_tail, expected_rows
        key = _key(x, gate_up_weight, down_weight, biases, out, lora, called)
        planned = None
        if key is not None:
            planned = _again(key, x, gate_up_weight, down_weight, m_sizes, m_starts, biases, out, adapters)
        if planned is not None:
            return planned if x.dim() == 2 or out is not None else planned.view(x.shape)
    check_rows(_CALL, "x", x, m_sizes, m_starts)
    if w_layout not in ("nk", "kn"):
        raise InputError(f"{_CALL}: w_layout is {w_layout!r}, wanted 'nk' (E matrices [out, in]) or 'kn' ([in, out])")
    originals = x, gate_up_weight, down_weight, *biases
    x, gate_up, gate_up_bias = autocast(x, gate_up_weight, gate_up_bias)
    _, down, down_bias = autocast(x, down_weight, down_bias)
    rest = [tensor for tensor in (m_sizes, m_starts, down, gate_up_bias, down_bias, *low) if tensor is not None]
    if tensors.is_traced(x, gate_up, *rest):
        if out is not None:
            raise InputError(f"{_CALL}: out= can't be traced by torch.compile or torch.export: leave it out")
        biased = gate_up_bias, down_bias
        return _traced(x, (gate_up, down), biased, m_sizes, m_starts, act, w_layout, adapters, zero_tail, expected_rows)
    own = all(
        tensor is other for tensor, other in zip((x, gate_up, down, gate_up_bias, down_bias), originals, strict=True)
    )
    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    flat, gate_up, down, wide = _checked(flat, gate_up, down, m_sizes, act, w_layout, gate_up_bias, down_bias)
    R = flat.shape[0]
    bucket = expected_bucket(_CALL, expected_rows, R, most_rows(x))
    layout = Layout(w_layout)
    first = adapter(adapters[0], flat, m_sizes, wide)
    second = adapter(adapters[1], flat.new_empty((0, wide // (2 if gated else 1))), m_sizes, flat.shape[1])
    weights = weights_of(gate_up, down, gate_up_bias, down_bias)
    pairs = [each for tensor in (first, second) for each in ((None, None) if tensor is None else tensor[:2])]
    learns = any(tensor is not None and tensor.requires_grad for tensor in (flat, *weights, *pairs))
    if learns and torch.is_grad_enabled():
        if out is not None:
            tensors.bad("out", "given to a call that needs a gradient", "None, or torch.no_grad()", _CALL)
        placed = placed_of(x, m_sizes, m_starts)
        hows = How(True, False, layout, False, bucket), How(False, True, layout, bool(zero_tail), bucket)
        scales = [1.0 if tensor is None else tensor.scale for tensor in (first, second)]
        with without_autocast(x.device.type):
            apply: Any = PaddedGemm.apply
            h = apply(flat, gate_up, gate_up_bias, *pairs[:2], placed, hows[0], scales[0])
            a = PackedActivation.apply(h, act, placed.bounds)  # type: ignore[no-untyped-call]
            y: torch.Tensor = apply(a, down, down_bias, *pairs[2:], placed, hows[1], scales[1])
        return y.view(x.shape)
    operands = (*operands_of(gate_up).values(), *operands_of(down).values())
    inputs = (x, m_sizes, m_starts, *operands, gate_up_bias, down_bias, *pairs, out)
    if out is not None:
        read = {"m_sizes": m_sizes, "m_starts": m_starts, "gate_up_bias": gate_up_bias, "down_bias": down_bias}
        read |= named("gate_up_weight", gate_up) | named("down_weight", down)
        check_out(_CALL, out, x.shape, x, read | {f"lora[{i // 2}].{'AB'[i % 2]}": pairs[i] for i in range(4)})
    how = Layer(1, layout, act, bucket)

    def compute(flat: torch.Tensor, into: torch.Tensor | None, placed: Placed, executor: Any) -> torch.Tensor:
        both = Adapters(first, second)
        return padded_rows.layer(
            how, flat, weights, placed, zero_tail=zero_tail, into=into, adapters=both, executor=executor
        )

    with without_autocast(x.device.type):
        y = run_recorded(key if own else None, inputs, flat, compute)
    if out is not None:
        _written(out)
        return out
    return y.view(x.shape)


def _of_codes(
    arriving: QuantizedRows,
    both: tuple[torch.Tensor | ExpertWeights, torch.Tensor | ExpertWeights],
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    act: RowActivation,
    w_layout: str,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    adapters: tuple[Lora | None, Lora | None],
    out: torch.Tensor | None,
    zero_tail: bool,
    expected_rows: int | None,
) -> torch.Tensor:
    """Run the layer on x that arrives as codes."""
    if any(adapters):
        raise refusal(_CALL, "x", "lora")
    coded = checked_codes(_CALL, "x", arriving, both[0], m_sizes, m_starts, both[1], *biases)
    (codes, scale), x = coded, arriving.stand_in()
    flat = x.view(-1, x.shape[-1])
    _, gate_up, down, _ = _checked(flat, *both, m_sizes, act, w_layout, *biases, copies=False)
    bucket = expected_bucket(_CALL, expected_rows, flat.shape[0], most_rows(x))
    if out is not None:
        read = {"m_sizes": m_sizes, "m_starts": m_starts, "gate_up_bias": biases[0], "down_bias": biases[1]}
        read |= named("gate_up_weight", gate_up) | named("down_weight", down)
        check_out(_CALL, out, x.shape, x, read | {"x.codes": codes, "x.scale": scale})
    weights, placed = weights_of(gate_up, down, *biases), placed_of(x, m_sizes, m_starts)
    how, into = Layer(1, Layout(w_layout), act, bucket), as_rows(out)
    with without_autocast(codes.device.type):
        y = padded_rows.layer(
            how,
            codes,
            weights,
            placed,
            zero_tail=bool(zero_tail),
            into=into,
            x_scale=scale,
            starts=Starts(m_starts, x.shape[-2], packs=True),
        )
    if out is not None:
        _written(out)
        return out
    return y.view(x.shape)


def _again(
    key: object,
    x: torch.Tensor,
    gate_up: torch.Tensor | ExpertWeights,
    down: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor | None,
    adapters: tuple[Lora | None, Lora | None],
) -> torch.Tensor | None:
    """Run the call by its plan, without checks; None if there is no plan, or none that serves these tensors."""
    try:
        low: list[torch.Tensor | None] = []
        for lora in adapters:
            low += (None, None) if lora is None else as_used(lora, x.dtype, m_sizes.shape[0])[:2]
        operands = (*operands_of(gate_up).values(), *operands_of(down).values())
        inputs = (x, m_sizes, m_starts, *operands, *biases, *low, out)
    except tensors.UNUSABLE:
        return None
    return recorded(key, inputs)


def _key(
    x: torch.Tensor,
    gate_up: torch.Tensor | ExpertWeights,
    down: torch.Tensor | ExpertWeights,
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor | None,
    lora: tuple[Lora | None, Lora | None] | None,
    how: tuple[RowActivation, str, bool, int | None],
) -> object:
    """The key of this call's plan; None if the call can have no plan."""
    act, w_layout, zero_tail, expected_rows = how
    try:
        R = x.shape[:-1].numel()
        bucket = None if expected_rows is None else expected_bucket(_CALL, expected_rows, R, most_rows(x))
        scales = None if lora is None else scales_of(lora)
        none = biases[0] is None, biases[1] is None, out is None, out is x
        key = "experts", *key_of(gate_up), *key_of(down), act, w_layout, bool(zero_tail), none, bucket, scales
        hash(key)
    except tensors.UNUSABLE:
        return None
    return (*key, bucket_of(R), x.dim())


def _checked(
    x: torch.Tensor,
    gate_up: torch.Tensor | ExpertWeights,
    down: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    act: RowActivation,
    w_layout: str,
    gate_up_bias: torch.Tensor | None,
    down_bias: torch.Tensor | None,
    *,
    copies: bool = True,
) -> tuple[torch.Tensor, Any, Any, int]:
    """Return x with rows that kernels can read, both weights as 3-D, and the columns of the first product."""
    form = form_of(w_layout=w_layout, topk=1, permute_x=False, permute_y=False)

    def product(rows: torch.Tensor, w: Any, bias: torch.Tensor | None) -> tensors.RowGemm:
        gemm = tensors.check(rows, w, m_sizes, w_layout, copies=copies)
        check_fusions(
            form, m_sizes, x.dtype, gemm.N, gather_indices=None, topk_weights=None, fuse_mul_post=False, bias=bias
        )
        return gemm

    with _product("gate_up"):
        first = product(x, gate_up, gate_up_bias)
    if act.gated and first.N % 2:
        raise InputError(f"{_CALL}: gate and up have {first.N} columns together, wanted an even number")
    with _product("down"):
        second = product(x.new_empty((0, first.N // (2 if act.gated else 1))), down, down_bias)
    if second.N != first.K:
        raise InputError(
            f"{_CALL}: down_weight is {list(down.shape)}, wanted H={first.K} rows of an expert, x's columns"
        )
    if x.is_cuda:
        tensors.check_cuda_dtype(x, "x", _CALL)
    up, low = (w if isinstance(w, ExpertWeights) else gemm.w for w, gemm in ((gate_up, first), (down, second)))
    return first.x, up, low, first.N


@contextlib.contextmanager
def _product(name: str) -> Iterator[None]:
    """Have errors of a product's check name the caller's arguments instead of w and bias."""
    try:
        yield
    except InputError as error:
        raise InputError(f"{_CALL}: of the product with {name}_weight as w and {name}_bias as bias, {error}") from None


def _traced(
    x: torch.Tensor,
    weights: tuple[Any, Any],
    biases: tuple[torch.Tensor | None, torch.Tensor | None],
    m_sizes: torch.Tensor,
    m_starts: torch.Tensor | None,
    act: RowActivation,
    w_layout: str,
    adapters: tuple[Lora | None, Lora | None],
    zero_tail: bool,
    expected_rows: int | None,
) -> torch.Tensor:
    """Run the layer by operators that torch can trace. Padding rows of y are zero."""
    from .torch_library import traced

    flat = x if x.dim() == 2 else x.reshape(-1, x.shape[-1])
    index, counts, _ = padded_rows.place(m_sizes, m_starts, x.shape[-2], flat.shape[0])
    same: dict[str, Any] = {
        "gather_indices": index,
        "topk_weights": None,
        "topk": 1,
        "fuse_mul_post": False,
        "w_layout": w_layout,
        "dX_only": False,
        "dW_only": False,
        "untraceable": False,
        "expected_rows": expected_rows,
    }
    # torch differentiates the activation of padding rows, too: NaN there would stop torch's anomaly mode.
    zeroes = torch.is_grad_enabled()
    first, second = adapters
    h = traced(
        flat,
        weights[0],
        counts,
        bias=biases[0],
        permute_x=True,
        permute_y=False,
        zero_tail=zeroes,
        lora=first,
        **same,
    )
    a = activate(h, act.function, gated=act.gated, interleaved=act.interleaved)
    y = traced(
        a,
        weights[1],
        counts,
        bias=biases[1],
        permute_x=False,
        permute_y=True,
        zero_tail=zero_tail,
        lora=second,
        **same,
    )
    return y.view(x.shape)
