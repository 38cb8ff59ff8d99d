"""``precision="fp8"`` of ``grouped_gemm`` and ``moe_mlp``: checks of the arguments, and the checked calls.

Checks read outlines of the weights: tensors of the weights' shape in x's dtype, without values.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import DType, Layout, Op, bucket_of
from ...artifacts.tuples import NamedTuple
from ...kernels.hopper_w8a8_block import GROUP
from ...kernels.registry import has_code
from .. import hooks
from ..check import tensors
from ..check.call import Call, Form, Fusions, casts, check, expected_bucket
from ..check.tensors import in_memory
from ..dispatch.snapshot import snapshot
from ..driver.device import current_stream, local_gpu, without_autocast
from ..launch.program import Program, Results, remember
from ..ops import fp8_training, fp8_weights
from ..ops.fp8_weights import Fp8Weights
from ..ops.layer import Layer, Weights
from ..ops.routing import Routing, sort
from ..weights.expert_weights import ExpertWeights
from .layer_plan import LayerPlan
from .product_plan import ProductPlan, has_rows, plan, sizes_of, takes_any_rows

# The base class's apply, without the checks of Function.apply that only torch.func's transforms need.
_apply_layer: Callable[..., torch.Tensor] = super(torch.autograd.Function, fp8_training.Fp8Layer).apply
_apply_gemm: Callable[..., torch.Tensor] = super(torch.autograd.Function, fp8_training.Fp8Gemm).apply
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written
_OF_WEIGHTS = (torch.bfloat16, torch.float32)


def checked_weights(
    call: str,
    precision: object,
    rows: dict[str, Any],
    weights: dict[str, Any],
    others: tuple[Any, ...],
    refused: dict[str, bool],
) -> tuple[list[Any], list[torch.Tensor]]:
    """Return x and the biases, cast in a torch.autocast region, and an outline of each weight.

    ``rows`` are x and the biases, ``weights`` the weights, each by the caller's name; ``others`` the other tensors.

    Raises
    ------
    InputError
        for another precision, ``refused`` arguments that are not None, and tensors that fp8 does not support.
    """
    if precision != "fp8":
        raise InputError(f"{call}: precision is {precision!r}, wanted 'fp8', or None for the precision of x and w")
    for name, there in refused.items():
        if there:
            raise InputError(f"{call}: precision='fp8' with {name}. Leave one of them out")
    (of_x, x), *_ = rows.items()
    if not isinstance(x, torch.Tensor):
        tensors.bad(of_x, f"a {type(x).__name__}, with precision='fp8'", "a bfloat16 tensor, or no precision", call)
    for name, w in weights.items():
        if isinstance(w, ExpertWeights):
            raise InputError(f"{call}: {name} is ExpertWeights, quantised already: leave precision out")
        tensors.tensors(call, **{name: w})
    if tensors.is_traced(x, *weights.values(), *others):
        raise InputError(
            f"{call}: precision='fp8' on a tensor that torch traces or that wraps others. Call it outside of "
            "torch.compile (torch.compiler.disable), on plain tensors (DTensor: to_local()), or leave precision out"
        )
    if casts(x.device.type):
        dtype = torch.get_autocast_dtype(x.device.type)
        rows = {
            name: value.to(dtype) if isinstance(value, torch.Tensor) and value.dtype is torch.float32 else value
            for name, value in rows.items()
        }
        x = rows[of_x]
    if x.dtype is not torch.bfloat16:
        tensors.bad(of_x, f"{x.dtype}, with precision='fp8'", "torch.bfloat16, or float32 in torch.autocast", call)
    for name, w in weights.items():
        if w.dtype not in _OF_WEIGHTS:
            tensors.bad(name, f"{w.dtype}, with precision='fp8'", "torch.bfloat16 or torch.float32", call)
    local = local_gpu(x.get_device()) if tensors.on_gpu(x) else None
    if local is not None and not has_code(Op.FORWARD, DType.FP8_BLOCK, local.sm, Layout.NK):
        raise InputError(f"{call}: precision='fp8' on {local}, for which there are no kernels. Leave precision out")
    return list(rows.values()), [_outline(w, x.dtype) for w in weights.values()]


def check_whole(call: str, **sizes: int) -> None:
    """Raise InputError unless each size is a multiple of 128."""
    for name, size in sizes.items():
        if size % GROUP:
            raise InputError(
                f"{call}: {name}={size} with precision='fp8', wanted a multiple of {GROUP}: that many numbers share a "
                "scale. Leave precision out"
            )


def product(
    precision: str,
    x: torch.Tensor,
    w: torch.Tensor,
    m_sizes: torch.Tensor,
    form: Form,
    *,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None,
    lora: object,
    expected_rows: int | None,
    out: torch.Tensor | None,
) -> torch.Tensor:
    """y of ``grouped_gemm`` with ``precision="fp8"``: by an earlier call's plan, or checked, which stores a plan.

    Raises
    ------
    InputError
        for unusable tensors, and for arguments that fp8 does not support.
    """
    passed = x, topk_weights, bias, gather_indices
    place = None
    if precision == "fp8" and lora is None and not (form.pinned or form.autotune):
        place = _place(x, w, form, gather_indices, topk_weights, fuse_mul_post, bias, expected_rows, out)
    earlier = None if place is None else place.plans.get(place.key)
    if place is not None and earlier is not None:
        again: torch.Tensor | None = earlier.call(place.M, x, w, m_sizes, topk_weights, bias, gather_indices, out, None)
        if again is not None:
            return again
    tensors.tensors(m_sizes=m_sizes)
    refused = {"lora": lora is not None, "a kernel_config": form.pinned, "autotune": form.autotune}
    of_x, of_w, others = {"x": x, "bias": bias}, {"w": w}, (m_sizes, gather_indices, topk_weights, bias)
    (x, bias), (outline,) = checked_weights("grouped_gemm", precision, of_x, of_w, others, refused)
    fused = gather_indices, topk_weights, fuse_mul_post, bias, out, expected_rows
    call, x = check(x, outline, m_sizes, form, *fused)
    check_whole("grouped_gemm", N=call.N, K=call.K)
    index, weights, bias = call.fusions.index, call.fusions.weights, call.fusions.bias
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, w, weights, bias))
    if out is not None:
        tensors.check_apart(out, w=w)
        if learns:
            raise InputError(
                "grouped_gemm: out with an input that requires grad has no gradient. Leave out away, or use "
                "torch.no_grad()"
            )
    w3, new = tensors.three_dimensional(w, m_sizes.shape[0], form.layout), None
    call, sizes = call._replace(w=w3), (call.M, call.x_rows, call.y_rows)
    if place is not None and w3 is w and x is passed[0]:
        new = plan(call, *passed[:1], w, *passed[1:], out, varies=place.varies, kind=Fp8ProductPlan)
    with without_autocast(x.device.type):
        fp8 = fp8_weights.in_block(w, w3, form.layout, learns=learns)
        if learns:
            how = call.form, sizes, fp8, new
            y: torch.Tensor = fp8_training.Fp8Gemm.apply(x, w3, call.m_sizes, weights, bias, index, *how)  # type: ignore[no-untyped-call]
        elif new is not None:
            y = new.product(x, w, call.m_sizes, weights, bias, index, sizes, fp8, out)
        else:
            y = fp8_training.product(call, x, fp8, out)
    if place is not None and new is not None and new.programs:
        remember(place.plans, place.key, new)
    if out is not None:
        _written(out)
    return y


class _Place(NamedTuple):
    """The place of a call's plan: a table, the plan's key there, and whether the plan is for any number of rows."""

    plans: dict[object, Any]
    key: object
    M: int
    varies: bool


def _place(
    x: Any,
    w: Any,
    form: Form,
    index: torch.Tensor | None,
    weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None,
    expected_rows: int | None,
    out: torch.Tensor | None,
) -> _Place | None:
    """The place of a product's plan; None if the call can have no plan, also if its arguments are wrong."""
    if type(x) not in tensors.PLAIN or torch.compiler.is_compiling() or not tensors.on_gpu(x):
        return None
    current = hooks.current() if hooks.blocks else hooks.snapshot
    plans = snapshot().plans if current is None else current.plans
    try:
        M, slots = x.shape[0] * (form.topk if form.permute_x else 1), form.topk if form.permute_y else 1
        varies = takes_any_rows(M, slots, x, index, weights, out)
        rows = bucket_of(M) if varies else sizes_of(x, index, weights, out)
        sorted_rows = M if index is None else index.shape[0]
        expected = None
        if expected_rows is not None:
            expected = expected_bucket("grouped_gemm", expected_rows, sorted_rows, "M")
        there = index is None, weights is None, bias is None, out is None
        return _Place(
            plans, ("fp8", w.data_ptr(), rows, form, fuse_mul_post, x.requires_grad, there, expected), M, varies
        )
    except tensors.UNUSABLE:
        return None


class Fp8ProductPlan(ProductPlan):
    """The programs of one product in fp8: one quantises w in each call, one reads codes that an open block keeps."""

    __slots__ = ("programs",)

    def __init__(self, *of: Any, **how: Any) -> None:
        super().__init__(*of, **how)
        self.programs: dict[bool, Program] = {}  # by whether w is to be quantised

    def learn(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        sizes: tuple[int, int, int],
    ) -> torch.Tensor:
        fp8 = fp8_weights.in_block(w, w, self.form.layout, learns=True)
        return _apply_gemm(x, w, m_sizes, weights, bias, index, self.form, sizes, fp8, self)

    def forward(  # type: ignore[override]
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        sizes: tuple[int, int, int],
        adapter: None = None,
        out: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, None]:
        """y of a call that needs no gradient."""
        fp8 = fp8_weights.in_block(w, w, self.form.layout, learns=False)
        y = self.product(x, w, m_sizes, weights, bias, index, sizes, fp8, out)
        if out is not None:
            _written(out)
        return y, None

    def product(
        self,
        x: torch.Tensor,
        w: torch.Tensor,
        m_sizes: torch.Tensor,
        weights: torch.Tensor | None,
        bias: torch.Tensor | None,
        index: torch.Tensor | None,
        sizes: tuple[int, int, int],
        fp8: Fp8Weights,
        out: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run ``fp8_training.product`` without checks."""
        inputs = (x, w, *_tensors_of([fp8.of_forward]), m_sizes, weights, bias, index, out)
        key = fp8.of_forward is None
        program = self.programs.get(key)
        if program is not None:
            return program.run(sizes[0], current_stream(self._device), inputs)[0]  # type: ignore[return-value]
        call = Call(self.form, w, m_sizes, Fusions(index, weights, bias), *sizes)
        with without_autocast(x.device.type):
            (y,), program = self._recorded(
                call.M, inputs, lambda executor: (fp8_training.product(call, x, fp8, out, executor),)
            )
        if program is not None:
            self.programs[key] = program
        return y  # type: ignore[return-value]

    def gradients(
        self,
        dy: torch.Tensor,
        x: torch.Tensor | None,
        saved: fp8_training.SavedWeights,
        m_sizes: torch.Tensor,
        index: torch.Tensor | None,
        needs: tuple[bool, bool, bool, bool],
        sizes: tuple[int, int, int],
    ) -> Results | None:
        """Run ``fp8_training.product_gradients`` by a program, for calls with no fusion but the gather of x.

        None if ``fp8_training.product_gradients`` itself has to compute them.
        """
        form, M, key = self.form, sizes[0], (*needs, saved.kept is None)
        index = index if form.permute_x else None
        guarded = (dy, x, index, saved.w, *_tensors_of([saved.kept]))
        if m_sizes.dtype is not self._counts or not has_rows(M, dy, index):
            return None
        if x is not None and x.shape[0] != sizes[1]:
            return None
        inputs, loose = (*guarded, m_sizes), 0 if self._own_sizes else 3
        gradient = self._gradients.get(key)
        if gradient is not None:
            return self._again(gradient, M, inputs, loose)
        if form.permute_y or not any(needs) or needs[2] or needs[3]:
            return None
        if type(dy) is not torch.Tensor or not dy.is_contiguous():
            return None
        fusions = Fusions(index, None, None)
        return self._first(
            key,
            M,
            inputs,
            len(guarded),
            lambda executor: fp8_training.product_gradients(
                form, sizes, dy, x, saved, m_sizes, fusions, needs, executor
            ),
            loose,
        )


def layer(
    x: torch.Tensor,
    parameters: Weights,
    routing: Routing,
    topk_weights: torch.Tensor,
    how: Layer,
    into: torch.Tensor | None,
    plan: Fp8LayerPlan | None = None,
) -> torch.Tensor:
    """The result [T, H] of a checked layer on the caller's own weights. ``plan`` records the call."""
    learns = torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, topk_weights, *parameters))
    with without_autocast(x.device.type):
        fp8 = _in_block(parameters, how, learns=learns)
        if learns:
            out: torch.Tensor = fp8_training.Fp8Layer.apply(x, *parameters, topk_weights, routing, how, fp8, plan)  # type: ignore[no-untyped-call]
            return out
        same = into is not None and into.dtype is x.dtype
        run = fp8_training.layer_forward if plan is None else plan.forward
        result, _ = run(how, x, parameters, fp8, routing, topk_weights, keeps_h=False, into=into if same else None)
    return result if into is None or same else into.copy_(result)


def _in_block(parameters: Weights, how: Layer, *, learns: bool) -> tuple[Fp8Weights, Fp8Weights]:
    """Return the fp8 weights that an open block keeps for a layer's two weights, the caller's own tensors."""
    first, second = (fp8_weights.in_block(w, w, how.layout, learns=learns) for w in parameters[:2])
    return first, second


class Fp8LayerPlan(LayerPlan):
    """One layer's programs in fp8. They quantise its weights in each call, except those that an open block keeps."""

    __slots__ = ()
    masters = True

    def call(
        self,
        hidden: torch.Tensor,
        gate_up: Any,
        down: Any,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
        lora: Any = None,
    ) -> torch.Tensor | None:
        parameters = Weights(gate_up, down, gate_up_bias, down_bias)
        if lora is not None or not self.takes(hidden, parameters, ids, weights, out):
            return None
        grad = (self.grad or (out is not None and out.requires_grad)) and torch.is_grad_enabled()
        if grad and (out is not None or _transformed()):
            return None
        x = hidden if hidden.dim() == 2 else hidden.view(-1, hidden.shape[-1])
        routing, fp8 = sort(ids, self.E), _in_block(parameters, self.how, learns=grad)
        if grad:
            result = _apply_layer(x, *parameters, weights, routing, self.how, fp8, self)
        else:
            into = None if out is None else out.view(x.shape)
            result = self.forward(self.how, x, parameters, fp8, routing, weights, keeps_h=False, into=into)[0]
        if out is not None:
            _written(out)
            return out
        return result if hidden.dim() == 2 else result.view(hidden.shape)

    def forward(  # type: ignore[override]
        self,
        how: Layer,
        x: torch.Tensor,
        parameters: Weights,
        fp8: tuple[Fp8Weights, Fp8Weights],
        routing: Routing,
        weights: torch.Tensor,
        *,
        keeps_h: bool,
        into: torch.Tensor | None = None,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Run ``fp8_training.layer_forward`` without checks."""
        M, kept = routing.gather_indices.numel(), [each.of_forward for each in fp8]
        inputs = (x, *parameters, *_tensors_of(kept), weights, *routing, into)
        key = (keeps_h, *(w is None for w in kept))
        program = self.programs.get(key)
        if program is not None:
            return program.run(M, current_stream(self._device), inputs)  # type: ignore[return-value]
        with without_autocast(x.device.type):
            results, program = self._recorded(
                M,
                inputs,
                lambda executor: fp8_training.layer_forward(
                    how, x, parameters, fp8, routing, weights, keeps_h=keeps_h, into=into, executor=executor
                ),
            )
        if program is not None:
            self.programs[key] = program
        return results  # type: ignore[return-value]

    def gradients(  # type: ignore[override]
        self,
        how: Layer,
        dout: torch.Tensor,
        x: torch.Tensor | None,
        matrices: Sequence[fp8_training.SavedWeights],
        down_bias: torch.Tensor | None,
        weights: torch.Tensor,
        h: torch.Tensor,
        routing: Routing,
        needs: tuple[bool, ...],
    ) -> Results | None:
        """Run ``fp8_training.gradients`` by a program; None if that function itself has to compute them."""
        T, M = dout.shape[0], routing.gather_indices.shape[0]
        if T * how.top_k != M or h.shape[0] != M or weights.shape[0] != T or (x is not None and x.shape[0] != T):
            return None
        dout = in_memory("dout", dout, "moe_mlp")
        kept = [saved.kept for saved in matrices]
        guarded = (dout, h, x, weights, *(saved.w for saved in matrices), down_bias, *_tensors_of(kept))
        inputs, key = (*guarded, *routing), (*needs, *(w is None for w in kept))
        gradient = self._gradients.get(key)
        if gradient is not None:
            return self._again(gradient, M, inputs, loose=4)
        return self._first(
            key,
            M,
            inputs,
            len(guarded),
            lambda executor: fp8_training.gradients(
                how, dout, x, matrices, down_bias, weights, h, routing, needs, executor
            ),
            loose=4,
        )


def _tensors_of(kept: Sequence[ExpertWeights | None]) -> tuple[torch.Tensor | None, ...]:
    """Codes and scales of the weights that a block keeps; None for each other weight."""
    return tuple(tensor for w in kept for tensor in ((None, None) if w is None else (w.codes, w.scale)))


def _outline(w: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(w.shape[-1:], dtype=dtype, device=w.device).expand(w.shape)
