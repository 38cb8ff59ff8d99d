"""Hooks on saved tensors (``torch.autograd.graph.saved_tensors_hooks``): what a backward does with what they return.

Each tensor that a call saves comes back changed, one at a time: as another tensor, which the backward has to refuse by
name, or as an equal one elsewhere in memory, which changes no gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest
import torch
from host_gpu import Device
from pairwise import pairwise

from pretuned.artifacts.errors import InputError
from pretuned.runtime import ExpertWeights, Lora, activate, grouped_gemm, moe_mlp, sort_routing
from pretuned.runtime.api import torch_library
from pretuned.runtime.launch import program

T, TOPK, E, H, I, R = 9, 3, 4, 12, 8, 4  # noqa: E741
Change = Callable[[torch.Tensor], torch.Tensor]
Call = Callable[[], tuple[torch.Tensor, list[torch.Tensor]]]

OTHER: dict[str, Change] = {
    "narrower": lambda tensor: tensor.half() if tensor.is_floating_point() else tensor.short(),
    "wider": lambda tensor: tensor.double(),
    "shorter": lambda tensor: tensor[:-1],
    "thinner": lambda tensor: tensor[..., :-1],
    "flat": lambda tensor: tensor.reshape(1, -1) if tensor.dim() == 1 else tensor.flatten(),
    "meta": lambda tensor: tensor.to("meta"),
}


def spread(tensor: torch.Tensor) -> torch.Tensor:
    """An equal tensor whose elements are not side by side."""
    return torch.stack((tensor, torch.zeros_like(tensor)), -1).flatten(-2)[..., ::2]


EQUAL: dict[str, Change] = {
    "spread": spread,
    "transposed": lambda tensor: tensor.mT.contiguous().mT if tensor.dim() > 1 else spread(tensor),
    "copied": lambda tensor: tensor.clone(),
    "of rows apart": lambda tensor: torch.cat((tensor, tensor), -1)[..., : tensor.shape[-1]],
}


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape).requires_grad_()


def layer(*, adapted: bool, biased: bool, layout: str = "nk", quantised: bool = False) -> Call:
    ids = torch.randint(-1, E + 1, (T, TOPK))
    hidden, up, down, weights = random(T, H), random(E, 2 * I, H), random(E, H, I), random(T, TOPK)
    if layout == "kn":
        up, down = (tensor.detach().mT.contiguous().requires_grad_() for tensor in (up, down))
    biases = {"gate_up_bias": random(E, 2 * I), "down_bias": random(E, H)} if biased else {}
    lora: tuple[Lora, Lora] | None = None
    low: list[torch.Tensor] = []
    if adapted:
        low = [random(E, R, H), random(E, 2 * I, R), random(E, R, I), random(E, H, R)]
        lora = Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 0.5)
    leaves = [hidden, up, down, weights, *biases.values(), *low]
    matrices: list[torch.Tensor | ExpertWeights] = [up, down]
    if quantised:
        matrices = [ExpertWeights.quantize(matrix.detach(), "fp8_channel_a16") for matrix in (up, down)]
        leaves = [hidden, weights, *biases.values(), *low]
    return lambda: (moe_mlp(hidden, *matrices, ids, weights, w_layout=layout, lora=lora, **biases), leaves)


def product(*, permute: bool, weighted: bool, biased: bool, adapted: bool = False, operator: bool = False) -> Call:
    routing = sort_routing(torch.randint(0, E, (T, TOPK)), E)
    x, w = random(T if permute else T * TOPK, H), random(E, I, H)
    weights, bias = random(T, TOPK) if weighted else None, random(E, I) if biased else None
    lora = Lora(random(E, R, H), random(E, I, R), 0.5) if adapted else None
    index = routing.gather_indices if permute or weighted else None
    leaves = [x, w, *(tensor for tensor in (weights, bias) if tensor is not None)]
    leaves += [] if lora is None else [lora.A, lora.B]

    def call() -> tuple[torch.Tensor, list[torch.Tensor]]:
        fused = {"gather_indices": index, "topk_weights": weights, "bias": bias}
        how = {"topk": TOPK, "permute_x": permute, "fuse_mul_post": weighted, "lora": lora}
        if operator:
            flags = dict.fromkeys(("permute_y", "zero_tail", "dX_only", "dW_only", "untraceable"), False)
            return torch_library.traced(x, w, routing.m_sizes, w_layout="nk", **fused, **how, **flags), leaves
        return grouped_gemm(x, w, routing.m_sizes, **fused, **how), leaves

    return call


CALLS: dict[str, Callable[[], Call]] = {
    "product": lambda: product(permute=False, weighted=False, biased=False),
    "product, gathered": lambda: product(permute=True, weighted=False, biased=True),
    "product, weighted": lambda: product(permute=True, weighted=True, biased=True),
    "product, adapted": lambda: product(permute=False, weighted=False, biased=False, adapted=True),
    "product, all": lambda: product(permute=True, weighted=True, biased=True, adapted=True),
    "operator": lambda: product(permute=True, weighted=True, biased=True, operator=True),
    "operator, adapted": lambda: product(permute=True, weighted=True, biased=True, adapted=True, operator=True),
    "layer": lambda: layer(adapted=False, biased=False),
    "layer, biased": lambda: layer(adapted=False, biased=True),
    "layer, kn": lambda: layer(adapted=False, biased=False, layout="kn"),
    "layer, adapted": lambda: layer(adapted=True, biased=True),
    "layer, frozen": lambda: layer(adapted=False, biased=False, quantised=True),
    "layer, frozen and adapted": lambda: layer(adapted=True, biased=False, quantised=True),
}


def gradients(call: Call) -> list[torch.Tensor]:
    y, leaves = call()
    return list(torch.autograd.grad(y, leaves, torch.linspace(-1, 1, y.numel()).view_as(y).to(y.dtype)))


def hooked(call: Call, at: int, change: Change) -> list[torch.Tensor]:
    """The gradients where the saved tensor ``at`` is unpacked as something else."""
    seen: list[int] = []

    def pack(tensor: torch.Tensor) -> tuple[int, torch.Tensor]:
        seen.append(len(seen))
        return seen[-1], tensor.detach()

    def unpack(kept: tuple[int, torch.Tensor]) -> torch.Tensor:
        return change(kept[1]) if kept[0] == at else kept[1]

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        return gradients(call)


def saved(call: Call) -> list[torch.Tensor]:
    """The tensors that a call saves."""
    held: list[torch.Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: held.append(tensor.detach()), lambda none: none):
        call()
    return held


TIMES = ["cpu", "gpu, first", "gpu, recorded", "gpu, again"]


@pytest.fixture
def times(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[int]:
    """How many calls come before the one with hooks: on an emulated GPU a call that comes again has a program."""
    if request.param == "cpu":
        yield 0
        return
    request.getfixturevalue("device")
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    yield TIMES[1:].index(request.param)


def ready(name: str, times: int) -> Call:
    torch.manual_seed(0)
    call = CALLS[name]()
    if times == 1:
        call()  # the forward is planned, its gradient is recorded with the hooks
    for _ in range(times if times > 1 else 0):
        gradients(call)
    return call


@pairwise({"name": CALLS, "change": OTHER, "times": TIMES}, indirect=["times"])
def test_another_tensor_than_was_saved_is_refused_by_name(name: str, change: str, times: int) -> None:
    call = ready(name, times)
    tried = [at for at, tensor in enumerate(saved(call)) if tensor.dim() > 1 or change != "thinner"]
    assert tried
    for at in tried:
        with pytest.raises(InputError, match=r"a hook on saved tensors made .* of |grouped_gemm: \w+ is "):
            hooked(call, at, OTHER[change])


@pairwise({"name": CALLS, "change": EQUAL, "times": TIMES}, indirect=["times"])
def test_an_equal_tensor_elsewhere_changes_no_gradient(name: str, change: str, times: int) -> None:
    call = ready(name, times)
    wanted = gradients(call)
    for at, _ in enumerate(saved(call)):
        for got, want in zip(hooked(call, at, EQUAL[change]), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_offloaded_to_pinned_memory_and_back_or_saved_on_the_cpu_is_the_same() -> None:
    call = CALLS["layer"]()
    wanted = gradients(call)
    with torch.autograd.graph.save_on_cpu():
        assert all(map(torch.equal, gradients(call), wanted))


@pytest.mark.parametrize("change", ["narrower", "wider", "shorter", "meta"])
def test_an_activation_refuses_it_too(device: Device, change: str) -> None:
    h = random(6, 2 * I)

    def call() -> tuple[torch.Tensor, list[torch.Tensor]]:
        return activate(h, "silu"), [h]

    assert len(saved(call)) == 1
    with pytest.raises(InputError, match=r"activate: a hook on saved tensors made .* of h"):
        hooked(call, 0, OTHER[change])
    for equal in EQUAL.values():
        torch.testing.assert_close(hooked(call, 0, equal), gradients(call))
