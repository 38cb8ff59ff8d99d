"""Plans of repeated layers: programs recorded in one call run later calls like it, without checks.

A plan belongs to the layer's weights and to a bucket of rows, for which all its kernels were chosen, whatever the
number of tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from operator import itemgetter
from typing import Any, TypeAlias, TypeVar

import torch

from ..check import tensors as check_tensors
from ..check.tensors import address_of, in_memory
from ..driver.device import current_stream, device_is_current
from ..launch.program import LOW, MOST_ROWS, Guard, Program, Programs, Results, guard, replays
from ..launch.steps import operands_of
from ..ops import layer
from ..ops.layer import (
    NO_ADAPTERS,
    NOTHING_NARROW,
    AdaptedLayer,
    FrozenWeights,
    Layer,
    MoeLayer,
    Narrow,
    Weights,
    columns,
)
from ..ops.low_rank import Adapters, as_used
from ..ops.routing import Routing, sort
from ..weights.expert_weights import ExpertWeights

_W: TypeAlias = "torch.Tensor | ExpertWeights"
_Plan = TypeVar("_Plan", bound="LayerPlan")

# The base class's apply, without the checks of Function.apply that only torch.func's transforms need.
_apply: Callable[..., torch.Tensor] = super(torch.autograd.Function, MoeLayer).apply
_apply_adapted: Callable[..., torch.Tensor] = super(torch.autograd.Function, AdaptedLayer).apply
_transformed: Callable[[], bool] = torch._C._are_functorch_transforms_active
_written = torch.autograd.graph.increment_version  # call it for each tensor that a launch has written
stream_of = current_stream


class LayerPlan(Programs):
    """One layer's programs. With ``masters`` its weights may have another dtype than hidden."""

    masters = False
    __slots__ = ("E", "_behind", "_dense", "_low", "_lows", "_same", "_sizes", "_there", "how", "programs")

    def __init__(
        self,
        how: Layer,
        hidden: torch.Tensor,
        parameters: Weights | FrozenWeights,
        there: Sequence[int],
        behind: int,
        same: Guard,
        grad: bool,
    ) -> None:
        super().__init__(hidden, grad=grad, varies=True)
        self.how, self._same, self._low, self._lows = how, same, hidden.data_ptr() & LOW, _lows(parameters)
        self.E, self._sizes, self._dense = (
            parameters.gate_up.shape[0],
            (how.top_k, hidden.shape[-1]),
            type(parameters) is Weights,
        )
        self._there, self._behind = itemgetter(*there), behind  # ``behind``: where biases and adapters begin
        self.programs: dict[object, Program] = {}  # by whether h is kept

    def call(
        self,
        hidden: torch.Tensor,
        gate_up: _W,
        down: _W,
        gate_up_bias: torch.Tensor | None,
        down_bias: torch.Tensor | None,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
        lora: Any = None,
    ) -> torch.Tensor | None:
        """The result of ``moe_mlp`` with these arguments. If the plan does not serve them, do nothing and return None.

        ``lora`` has the adapters of both products (``Lora``), or is None.
        """
        parameters: Any = (Weights if self._dense else FrozenWeights)(gate_up, down, gate_up_bias, down_bias)  # type: ignore[arg-type]
        x, adapters = hidden, NO_ADAPTERS
        if lora is not None:
            first, second = lora
            try:
                adapters = Adapters(
                    None if first is None else as_used(first, hidden.dtype, self.E),
                    None if second is None else as_used(second, hidden.dtype, self.E),
                )
            except check_tensors.UNUSABLE:
                return None
            # Adapters read x as [T, H], as in the recorded call.
            x = hidden if hidden.dim() == 2 else hidden.reshape(-1, hidden.shape[-1])
        if not self.takes(x, parameters, ids, weights, out, adapters):
            return None
        grad = (self.grad or (out is not None and out.requires_grad)) and torch.is_grad_enabled()
        if (grad or lora is not None) and (out is not None or _transformed()):
            return None
        x = x if x.dim() == 2 else x.view(-1, x.shape[-1])
        routing = sort(ids, self.E)
        if out is not None:
            self.forward(self.how, x, parameters, routing, weights, keeps_h=False, into=out.view(x.shape))
            _written(out)
            return out
        if not grad:
            result, *_ = self.forward(self.how, x, parameters, routing, weights, keeps_h=False, adapters=adapters)
        elif lora is None:
            result = _apply(x, *parameters, weights, routing, self.how, self)
        else:
            scales = tuple(1.0 if adapter is None else adapter.scale for adapter in adapters)
            result = _apply_adapted(x, *parameters, weights, routing, self.how, scales, self, *_low(adapters))
        return result if hidden.dim() == 2 else result.view(hidden.shape)

    def takes(
        self,
        hidden: torch.Tensor,
        parameters: Weights | FrozenWeights,
        ids: torch.Tensor,
        weights: torch.Tensor,
        out: torch.Tensor | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> bool:
        """True if the plan serves a call on these tensors, which may differ from the recorded call's in M alone."""
        inputs: Any = (hidden, ids, weights, *(parameters if self._dense else _operands(parameters)))
        some = self._there(inputs if adapters is NO_ADAPTERS else inputs + _low(adapters))
        biases = some[self._behind :]
        if out is None:
            if not self._same(*some):
                return False
        elif (
            out.shape != hidden.shape
            or not self._same(*some, out)
            or not _takes_results(out, (hidden, weights, *biases))
        ):
            return False
        M, (k, H) = ids.numel(), self._sizes
        return (
            0 < M == weights.numel()
            and hidden.numel() * k == M * H
            and hidden.is_contiguous()
            and weights.is_contiguous()
            and hidden.data_ptr() & LOW == self._low
            and (self._dense or _lows(parameters) == self._lows)
            and not (biases and any(bias.data_ptr() & LOW for bias in biases))
            and (self._alone or device_is_current(self._device))
        )

    def forward(
        self,
        how: Layer,
        x: torch.Tensor,
        parameters: Weights | FrozenWeights,
        routing: Routing,
        weights: torch.Tensor,
        *,
        keeps_h: bool,
        into: torch.Tensor | None = None,
        adapters: Adapters = NO_ADAPTERS,
    ) -> layer.Forward:
        """Run ``layer.forward`` without checks: ``takes``, or a first call's checks, has accepted the tensors."""
        M = routing.gather_indices.numel()
        inputs: Any = (x, *(parameters if self._dense else _operands(parameters)), weights, *routing, into)
        if adapters is not NO_ADAPTERS:
            inputs += _low(adapters)
        program = self.programs.get(keeps_h)
        if program is not None:
            return program.run(M, stream_of(self._device), inputs)  # type: ignore[return-value]
        results, program = self._recorded(
            M,
            inputs,
            lambda executor: layer.forward(
                how, x, parameters, routing, weights, keeps_h=keeps_h, executor=executor, into=into, adapters=adapters
            ),
        )
        if program is not None:
            self.programs[keeps_h] = program
        return results  # type: ignore[return-value]

    def gradients(
        self,
        how: Layer,
        dout: torch.Tensor,
        x: torch.Tensor | None,
        parameters: Weights | FrozenWeights,
        weights: torch.Tensor,
        h: torch.Tensor,
        routing: Routing,
        needs: tuple[bool, ...],
        adapters: Adapters = NO_ADAPTERS,
        narrow: Narrow = NOTHING_NARROW,
    ) -> Results | None:
        """The gradients of ``layer.all_gradients``, by a program; None if that function itself has to compute them."""
        T, M = dout.shape[0], routing.gather_indices.shape[0]
        if T * how.top_k != M or h.shape[0] != M or weights.shape[0] != T or (x is not None and x.shape[0] != T):
            return None
        dout = in_memory("dout", dout, "moe_mlp")
        inputs: Any = (dout, h, x, weights, *narrow, *(parameters if self._dense else _operands(parameters)))
        inputs += routing if adapters is NO_ADAPTERS else (*_low(adapters), *routing)
        gradient = self._gradients.get(needs)
        if gradient is not None:
            return self._again(gradient, M, inputs, loose=6)
        return self._first(
            needs,
            M,
            inputs,
            len(inputs) - len(routing),
            lambda executor: layer.all_gradients(
                how, dout, x, parameters, weights, h, routing, needs, adapters, narrow, executor
            ),
            loose=6,
        )


def plan_layer(
    how: Layer,
    hidden: torch.Tensor,
    parameters: Weights | FrozenWeights,
    ids: torch.Tensor,
    weights: torch.Tensor,
    out: torch.Tensor | None = None,
    adapters: Adapters = NO_ADAPTERS,
    kind: type[_Plan] = LayerPlan,  # type: ignore[assignment]
) -> _Plan | None:
    """An empty plan for this layer, or None if calls like it must be checked each time.

    The tensors are as the caller passed them; adapters are as the products take them.
    """
    T, H, M = ids.shape[0], hidden.shape[-1], ids.numel()
    wide = columns(parameters.gate_up, how.layout)
    if not check_tensors.on_gpu(hidden) or not replays(hidden.dtype) or not (M and H and wide > 1):
        return None
    if M >= MOST_ROWS or hidden.numel() != T * H or not (hidden.is_contiguous() and weights.is_contiguous()):
        return None
    if any(
        tensor is not None and (tensor.dtype is not hidden.dtype or not tensor.is_contiguous())
        for tensor in parameters[2:]
    ):
        return None
    for tensor in parameters[:2]:
        if isinstance(tensor, ExpertWeights):
            if not tensor.is_prepared:
                return None
        elif not kind.masters and tensor.dtype is not hidden.dtype:
            return None
    operands = _operands(parameters)
    inputs = (hidden, ids, weights, *operands, *(() if adapters is NO_ADAPTERS else _low(adapters)))
    there = [i for i, tensor in enumerate(inputs) if tensor is not None]
    tensors, behind = (
        [tensor for tensor in inputs if tensor is not None],
        3 + sum(tensor is not None for tensor in operands[:-2]),
    )
    if any(tensor.data_ptr() & LOW for tensor in tensors[behind:]):
        return None
    grad, loose = any(tensor.requires_grad for tensor in tensors), [0, 1, 2]  # of any length: a row for each token
    if out is not None:
        if not _takes_results(out, (hidden, weights, *tensors[behind:])):
            return None
        loose.append(len(tensors))
        tensors.append(out)
    same = guard(*tensors, loose=loose)
    return None if same is None else kind(how, hidden, parameters, there, behind, same, grad)


def _takes_results(out: torch.Tensor, read: Sequence[torch.Tensor]) -> bool:
    """True if the layer's result can be written to ``out``: contiguous, aligned, and no byte of ``read`` in it."""
    begin = out.data_ptr()
    end = begin + out.nbytes
    apart = all(end <= tensor.data_ptr() or tensor.data_ptr() + tensor.nbytes <= begin for tensor in read)
    return apart and not begin & LOW and out.is_contiguous()


def _low(adapters: Adapters) -> tuple[torch.Tensor | None, ...]:
    """A and B of the first product, then of the second."""
    return tuple(each for adapter in adapters for each in (adapter or (None, None))[:2])


def _lows(parameters: Weights | FrozenWeights) -> list[int]:
    """The low bits of the addresses of the weights' tensors: kernels were chosen for their alignment."""
    return [address_of(tensor) & LOW for tensor in _operands(parameters)[:-2]]


def _operands(parameters: Weights | FrozenWeights) -> tuple[torch.Tensor | None, ...]:
    """The tensors of both weights that kernels read, then the biases; for dense weights these are ``parameters``."""
    return (
        *(tensor for w in parameters[:2] for tensor in ((None,) if w is None else operands_of(w).values())),
        *parameters[2:],
    )
