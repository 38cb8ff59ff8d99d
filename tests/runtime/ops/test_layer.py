"""The layer's launches, on a GPU that is host memory: which there are, and that they add up to the reference."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from acts import GATED
from calls import calls_of
from host_gpu import ALL, PASSES, PERSISTENT, Device, Replay, bundle_bytes, replays, use_low_rank_kernels
from pairwise import pairwise
from torch.autograd import forward_ad

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem, RowOp
from pretuned.kernels.activations import Activation
from pretuned.runtime import activate, allow_jit, hooks, moe_mlp, reload
from pretuned.runtime.api import layer_call
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.launch import program
from pretuned.runtime.ops.low_rank import Lora

T, TOPK, E, H, I = 9, 3, 4, 12, 8  # noqa: E741
NAMES = ("hidden", "up", "down", "up_bias", "down_bias", "weights")
ONE = (Op.DX, Fusion.NONE)


def tensors(gated: bool, layout: str, biased: bool, H: int = H) -> dict[str, torch.Tensor | None]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator)

    wide = 2 * I if gated else I
    up, down = (E, wide, H), (E, H, I)
    if layout == "kn":
        up, down = (E, H, wide), (E, I, H)
    values = random(T, H), random(*up), random(*down), random(E, wide), random(E, H), torch.rand(T, TOPK)
    named = dict(zip(NAMES, values, strict=True))
    return {name: tensor if biased or "bias" not in name else None for name, tensor in named.items()}


def results(out: torch.Tensor, leaves: dict[str, torch.Tensor | None], needs: set[str]) -> dict[str, torch.Tensor]:
    """Return the result of a step: out, and the gradients of ``needs``."""
    asked = {name: leaf for name, leaf in leaves.items() if name in needs and leaf is not None}
    if not asked:
        return {"out": out.detach()}
    dout = torch.linspace(-1, 1, out.numel()).view_as(out)
    return {"out": out.detach(), **dict(zip(asked, torch.autograd.grad(out, list(asked.values()), dout), strict=True))}


def step(
    inputs: dict[str, torch.Tensor | None], needs: set[str], ids: torch.Tensor, **how: Any
) -> dict[str, torch.Tensor]:
    """The layer's result, and the gradients of ``needs``."""
    leaves = {
        name: None if tensor is None else tensor.clone().requires_grad_(name in needs)
        for name, tensor in inputs.items()
    }
    out = moe_mlp(
        leaves["hidden"],
        leaves["up"],
        leaves["down"],
        ids,
        leaves["weights"],
        gate_up_bias=leaves["up_bias"],
        down_bias=leaves["down_bias"],
        **how,
    )
    return results(out, leaves, needs)


IDS = torch.randint(-1, E + 1, (T, TOPK), generator=torch.Generator().manual_seed(4))


@pytest.fixture
def both(device: Device, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """The reference's step, then the simulated GPU's: compared, and what the GPU ran is in ``device``."""

    def compare(inputs: dict[str, torch.Tensor | None], needs: set[str], ids: torch.Tensor, **how: Any) -> None:
        device.visible = False
        wanted = step(inputs, needs, ids, **how)
        device.visible = True
        device.launches.clear()
        got = step(inputs, needs, ids, **how)
        assert set(got) == set(wanted)
        for name, tensor in wanted.items():
            exact = tensor.dtype is torch.float32
            torch.testing.assert_close(
                got[name],
                tensor,
                rtol=1e-5 if exact else 5e-2,
                atol=1e-4 if exact else 5e-2,
                msg=lambda text, name=name: f"{name}: {text}",
            )

    return compare


@pairwise(
    {
        "activation, gated": [("silu", True), ("swiglu_oai", True), ("relu2", False)],
        "layout": ["nk", "kn"],
        "biased": [False, True],
        "there": ["all", "no passes", "no GEMMs"],
    }
)
def test_the_launches_add_up_to_the_reference(
    device: Device, both: Any, activation: str, gated: bool, layout: str, biased: bool, there: str
) -> None:
    device.there = {"all": {*ALL, *PASSES}, "no passes": set(ALL), "no GEMMs": set(PASSES)}[there]
    inputs = tensors(gated, layout, biased)
    how: dict[str, Any] = {"activation": activation, "gated": gated, "w_layout": layout}
    both(inputs, set(NAMES), IDS, **how)
    both(inputs, set(), IDS, **how)


@pytest.mark.parametrize("grad", [False, True])
def test_biases_of_any_strides(device: Device, monkeypatch: pytest.MonkeyPatch, grad: bool) -> None:
    inputs = tensors(True, "nk", True)
    hidden, up, down, up_bias, down_bias, weights = inputs.values()
    assert up_bias is not None
    assert down_bias is not None
    cut, spread = torch.cat([up_bias, up_bias], 1)[:, : 2 * I], down_bias[0].expand(E, H)
    results = []
    for simulated in (False, True):
        device.visible = simulated
        leaf = hidden.clone().requires_grad_(grad)  # type: ignore[union-attr]
        results.append(moe_mlp(leaf, up, down, IDS, weights, gate_up_bias=cut, down_bias=spread).detach())
    torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


def test_no_experts_and_a_bias() -> None:
    weights = torch.rand(T, TOPK, requires_grad=True)
    out = moe_mlp(
        torch.randn(T, H), torch.randn(0, 2 * I, H), torch.randn(0, H, I), IDS, weights, down_bias=torch.randn(0, H)
    )
    out.sum().backward()
    assert weights.grad is not None
    assert not weights.grad.any()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("there", ["all", "no passes"])
def test_each_gradient_alone(device: Device, both: Any, name: str, there: str) -> None:
    device.there = {"all": {*ALL, *PASSES}, "no passes": set(ALL)}[there]
    both(tensors(True, "nk", True), {name}, IDS)


@pytest.mark.parametrize(
    ("needs", "gemms", "passed"),
    [
        (set(), [], []),
        (
            {"hidden"},
            [ONE, ONE],
            [RowOp.GATHER, RowOp.ACTIVATION_GRAD, RowOp.COMBINE],
        ),  # LoRA: frozen weights
        ({"weights"}, [ONE], [RowOp.GATHER, RowOp.ACTIVATION_GRAD]),
        ({"down"}, [(Op.DW, Fusion.NONE)], [RowOp.GATHER, RowOp.ACTIVATION_GRAD]),
        ({"up"}, [ONE, (Op.DW, Fusion.NONE)], [RowOp.GATHER, RowOp.ACTIVATION_GRAD, RowOp.GATHER]),
        ({"down_bias"}, [(Op.DW, Fusion.NONE)], [RowOp.GATHER]),
    ],
)
def test_only_what_needs_a_gradient_is_computed(
    device: Device, both: Any, needs: set[str], gemms: list[Any], passed: list[RowOp]
) -> None:
    both(tensors(True, "nk", True), needs, IDS)
    assert device.launched == [(Op.FORWARD, Fusion.GATHER), (Op.FORWARD, Fusion.NONE), *gemms]
    assert device.passed == [RowOp.ACTIVATION, RowOp.COMBINE, *passed]


@pytest.mark.parametrize("ids", [torch.full((T, TOPK), -1), torch.full((T, TOPK), 2), torch.empty(0, TOPK).long()])
def test_nobody_here_everybody_on_one_and_no_tokens(both: Any, ids: torch.Tensor) -> None:
    inputs = tensors(True, "nk", True)
    for name in ("hidden", "weights"):
        tensor = inputs[name]
        inputs[name] = None if tensor is None else tensor[: len(ids)]
    both(inputs, set(NAMES), ids)


def test_what_rows_of_no_expert_hold_reaches_nothing(
    device: Device, both: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def poisoned(self: torch.Tensor, *size: Any, **how: Any) -> torch.Tensor:
        tensor = self.new_full(size[0] if len(size) == 1 and not isinstance(size[0], int) else size, 0, **how)
        return tensor.fill_(float("nan")) if tensor.dtype.is_floating_point else tensor

    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned)
    monkeypatch.setattr(torch, "empty_like", lambda tensor: torch.full_like(tensor, float("nan")))
    both(tensors(True, "nk", True), set(NAMES), IDS)


@pytest.mark.parametrize("activation", GATED)
def test_the_activation_alone(device: Device, monkeypatch: pytest.MonkeyPatch, activation: str) -> None:
    h = torch.randn(2, 3, 16, generator=torch.Generator().manual_seed(1), requires_grad=True)
    device.visible = False
    wanted = activate(h, activation)
    (first,) = torch.autograd.grad(wanted.square().sum(), h, create_graph=True)
    (second,) = torch.autograd.grad(first.sum(), h)
    device.visible = True
    got = activate(h, activation)
    torch.testing.assert_close(got, wanted)
    (dh,) = torch.autograd.grad(got.square().sum(), h)
    torch.testing.assert_close(dh, first)
    assert device.passed == [RowOp.ACTIVATION, RowOp.ACTIVATION_GRAD]
    (again,) = torch.autograd.grad(activate(h, activation).square().sum(), h, create_graph=True)
    torch.testing.assert_close(torch.autograd.grad(again.sum(), h)[0], second)


def test_a_second_gradient_of_the_layer_is_refused(both: Any) -> None:
    inputs = tensors(True, "nk", False)
    hidden = inputs["hidden"]
    assert hidden is not None
    hidden.requires_grad_()
    out = moe_mlp(hidden, inputs["up"], inputs["down"], IDS, inputs["weights"])
    (dx,) = torch.autograd.grad(out.square().sum(), hidden, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


class Replayed(NamedTuple):
    """The repeated calls: the number of tokens of each layer by a plan, and the programs of gradients."""

    tokens: list[int]
    gradients: list[Replay]


@pytest.fixture
def replayed(device: Device, monkeypatch: pytest.MonkeyPatch) -> Iterator[Replayed]:
    """Plans of float32 too, which the emulated GPU computes in."""
    replayed = Replayed([], [])

    def noted(replay: Replay) -> None:
        layers = snapshot.snapshot().plans.values()
        if any(replay.is_of(program) for plan in layers for program in plan.programs.values()):
            replayed.tokens.append(replay.M // TOPK)
        else:
            replayed.gradients.append(replay)

    monkeypatch.setattr(program, "KINDS", (torch.float32, torch.bfloat16))
    with replays(noted):
        yield replayed


@pytest.fixture
def planned(replayed: Replayed) -> list[int]:
    """How many tokens each call by a plan had."""
    return replayed.tokens


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("needs", [set(), set(NAMES)])
def test_a_call_that_comes_again_is_planned(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int], layout: str, biased: bool, needs: set[str]
) -> None:
    inputs = tensors(True, layout, biased)
    device.visible = False
    wanted = step(inputs, needs, IDS, w_layout=layout)
    device.visible = True
    leaves = {name: None if tensor is None else tensor.requires_grad_(name in needs) for name, tensor in inputs.items()}
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)  # the same tensors again, as a model has them
    for _ in range(3):
        got = step(leaves, needs, IDS, w_layout=layout)
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)
    assert planned == [T, T]


def test_out_is_handed_back_itself_each_time(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    inputs = tensors(True, "nk", False)
    device.visible = True
    hidden, up, down, weights = (inputs[name] for name in ("hidden", "up", "down", "weights"))
    assert hidden is not None
    for shape in (hidden.shape, (1, *hidden.shape)):
        want = moe_mlp(hidden.view(shape), up, down, IDS, weights)
        planned.clear()
        for _ in range(3):
            out = torch.empty_like(want)
            assert moe_mlp(hidden.view(shape), up, down, IDS, weights, out=out) is out
            torch.testing.assert_close(out, want)
        assert planned == [T, T]


@pytest.fixture
def graded(replayed: Replayed) -> list[Replay]:
    """The programs that computed a gradient."""
    return replayed.gradients


def again(
    device: Device, monkeypatch: pytest.MonkeyPatch, inputs: dict[str, torch.Tensor | None], needs: set[str], **how: Any
) -> Callable[[], None]:
    """A step on the very same tensors each time, as a model has them, held against the reference's."""
    device.visible = False
    wanted = step(inputs, needs, IDS, **how)
    device.visible = True
    leaves = {name: None if tensor is None else tensor.requires_grad_(name in needs) for name, tensor in inputs.items()}
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)

    def call() -> None:
        got = step(leaves, needs, IDS, **how)
        assert set(got) == set(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)

    return call


FOUR = ("hidden", "up", "down", "weights")
SUBSETS = [some for count in range(1, 5) for some in itertools.combinations(FOUR, count)]


def test_a_plan_takes_no_bias_that_is_less_aligned(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    """Aligned kernels read 16 bytes of it at once."""
    inputs = tensors(True, "nk", True)
    down_bias = inputs["down_bias"]
    assert down_bias is not None
    elsewhere = inputs | {"down_bias": torch.empty(E * H + 1)[1:].view(E, H).copy_(down_bias)}
    unaligned, aligned = again(device, monkeypatch, elsewhere, set()), again(device, monkeypatch, inputs, set())
    for _ in range(2):
        unaligned()
    assert planned == []
    aligned()  # (another call by its biases' addresses alone)
    assert planned == []
    aligned()
    assert planned == [T]
    unaligned()
    assert planned == [T]


@pairwise({"needs": SUBSETS, "layout": ["nk", "kn"], "gated": [True, False]})
def test_a_gradient_that_comes_again_is_planned(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    graded: list[Replay],
    needs: tuple[str, ...],
    layout: str,
    gated: bool,
) -> None:
    how = {} if gated else {"gated": False, "activation": "relu2"}
    call = again(device, monkeypatch, tensors(gated, layout, False), set(needs), w_layout=layout, **how)
    for _ in range(3):
        call()
    assert len(graded) == 2
    if needs == FOUR:
        loaded = len(device.loads)
        call()
        assert len(device.loads) == loaded  # nothing is looked for again


@pytest.mark.parametrize("needs", [FOUR, ("hidden", "weights"), ("hidden",)], ids="+".join)
def test_a_gradient_beside_biases_is_planned(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay], needs: tuple[str, ...]
) -> None:
    """Biases that are frozen get no gradient."""
    call = again(device, monkeypatch, tensors(True, "nk", True), set(needs))
    for _ in range(3):
        call()
    assert len(graded) == 2


def test_a_gradient_of_biases_is_planned_too(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay], planned: list[int]
) -> None:
    for needs in (set(NAMES), {"hidden", "up_bias"}, {"down_bias", "weights"}):
        call = again(device, monkeypatch, tensors(True, "nk", True), needs)
        call()
        call()
    assert planned == [T, T, T]
    assert len(graded) == 3


@pytest.mark.parametrize(
    ("gone", "needs"),
    [
        (RowOp.GATHER, {"hidden"}),
        (RowOp.ACTIVATION_GRAD, {"hidden"}),
        ((Op.DX, Fusion.NONE), {"weights"}),
        ((Op.DX, Fusion.NONE), {"hidden"}),
        ((Op.DW, Fusion.NONE), {"hidden", "up"}),
        ((Op.DW, Fusion.NONE), {"hidden", "down"}),
    ],
)
def test_without_a_kernel_of_its_own_a_gradient_is_not_planned(
    monkeypatch: pytest.MonkeyPatch,
    device: Device,
    graded: list[Replay],
    gone: object,
    needs: set[str],
) -> None:
    device.there -= {gone}
    call = again(device, monkeypatch, tensors(True, "nk", False), needs)
    for _ in range(3):
        call()
    assert graded == []


def test_kernels_that_a_gradient_does_not_need_are_not_asked_for(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay]
) -> None:
    """Frozen experts: a bundle of forward and dX is enough, in strict mode too."""
    device.there -= {(Op.DW, Fusion.NONE)}
    call = again(device, monkeypatch, tensors(True, "nk", False), {"hidden", "weights"})
    for _ in range(3):
        call()
    assert len(graded) == 2
    assert Op.DW not in {op for op, _ in device.launched}


CHANGES: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "wider": torch.Tensor.double,
    "narrower": torch.Tensor.half,
    "transposed": lambda tensor: tensor.mT.contiguous().mT,
    "shorter": lambda tensor: tensor[:-1],
}


@pytest.mark.parametrize("shape", [(T, H), (T * TOPK, 2 * I), (T, TOPK), (E, 2 * I, H), (E, H, I)], ids=str)
@pytest.mark.parametrize("change", CHANGES)
def test_a_program_does_not_take_what_hooks_made_of_a_tensor(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay], shape: tuple[int, ...], change: str
) -> None:
    """A kernel would read past its end, or take its bytes for other numbers."""
    inputs = tensors(True, "nk", False)
    call = again(device, monkeypatch, inputs, set(FOUR))
    call()
    call()
    assert len(graded) == 1
    changed: list[torch.Tensor] = []

    def unpack(tensor: torch.Tensor) -> torch.Tensor:
        if tuple(tensor.shape) != shape or not tensor.is_floating_point():
            return tensor
        changed.append(tensor)
        return CHANGES[change](tensor)

    device.idle = frozenset(Op)  # the long way may read such bytes as they are
    hooked = torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpack)
    with contextlib.suppress(RuntimeError, ValueError), hooked:
        step(inputs, set(FOUR), IDS)
    assert changed
    assert len(graded) == 1


def test_where_a_compiler_may_help_a_missing_kernel_is_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay]
) -> None:
    """In a graph capture nothing is compiled: the next call outside compiles, and from then on a program runs."""
    device.there -= {(Op.DW, Fusion.NONE)}
    call = again(device, monkeypatch, tensors(True, "nk", False), {"hidden", "up"})
    asked: list[Problem] = []

    def compiler(problem: Problem, sm: int) -> bytes:
        asked.append(problem)
        return bundle_bytes(frozenset({(Op.DW, Fusion.NONE)}), DType.FP32, PERSISTENT)

    hooks.register_compiler(compiler)
    allow_jit()
    call()
    assert {problem.op for problem in asked} == {Op.DW}
    assert graded == []
    call()
    assert len(graded) == 1


def test_a_gradient_that_is_another_one_goes_the_long_way(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay]
) -> None:
    inputs = tensors(True, "nk", False)
    leaves = {name: tensor for name, tensor in inputs.items() if tensor is not None}
    for tensor in leaves.values():
        tensor.requires_grad_()

    def call() -> torch.Tensor:
        return moe_mlp(leaves["hidden"], leaves["up"], leaves["down"], IDS, leaves["weights"])

    def grads(out: torch.Tensor, dout: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return torch.autograd.grad(out, list(leaves.values()), dout)

    device.visible = True
    dout = torch.linspace(-1, 1, T * H).view(T, H)
    wanted = grads(call(), dout)
    for tensor, other in zip(grads(call(), dout), wanted, strict=True):
        assert torch.equal(tensor, other)
    assert len(graded) == 1

    def elsewhere(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.dim() != 3:
            return tensor
        wide = torch.zeros(*tensor.shape[:2], tensor.shape[2] + 4)
        wide[..., : tensor.shape[2]] = tensor.detach()
        return wide[..., : tensor.shape[2]]

    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, elsewhere):
        out = call()
    odd = torch.cat([torch.zeros(1), dout.flatten()])[1:].view(T, H)  # begins elsewhere
    across = dout.T.contiguous().T
    for result, given_dout in ((out, dout), (call(), odd), (call(), across)):
        for tensor, other in zip(grads(result, given_dout), wanted, strict=True):
            torch.testing.assert_close(tensor, other, rtol=1e-5, atol=1e-5)
    out = call()
    reload()  # the bundles may be others
    for tensor, other in zip(grads(out, dout), wanted, strict=True):
        assert torch.equal(tensor, other)
    assert len(graded) == 1


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float16, torch.float64])
@pytest.mark.parametrize("needs", [set(), set(NAMES)])
def test_routing_weights_of_any_float_are_planned(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int], kind: torch.dtype, needs: set[str]
) -> None:
    """Several models of transformers have theirs in bf16."""
    inputs = tensors(True, "nk", False)
    weights = inputs["weights"]
    assert weights is not None
    inputs["weights"] = weights.detach().to(kind)
    device.visible = False
    wanted = step(inputs, needs, IDS)
    device.visible = True
    leaves = {name: None if tensor is None else tensor.requires_grad_(name in needs) for name, tensor in inputs.items()}
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)
    for _ in range(3):
        got = step(leaves, needs, IDS)
        for name, tensor in wanted.items():
            rounds = name == "weights" and kind is not torch.float64
            torch.testing.assert_close(got[name], tensor, rtol=1e-2 if rounds else 1e-5, atol=1e-2 if rounds else 1e-4)
    assert planned == [T, T]


GATED = (Op.FORWARD, Fusion.SILU | Fusion.GATHER)
UNGATED = [(Op.FORWARD, Fusion.GATHER), (Op.FORWARD, Fusion.NONE)]
FUSED = {GATED: 1.0, UNGATED[0]: 1000.0, UNGATED[1]: 1000.0}  # us: with silu in the epilogue it is faster


def halves(layout: str = "nk", biased: bool = False, gated: bool = True) -> dict[str, torch.Tensor | None]:
    """Return inputs like ``tensors``, in bf16 with rows of whole 16 bytes: silu in the epilogue needs that."""
    inputs = tensors(gated, layout, biased, H=16)
    inputs |= {name: tensor / 4 for name in ("up", "down") if (tensor := inputs[name]) is not None}
    return {
        name: None if tensor is None else tensor if name == "weights" else tensor.bfloat16()
        for name, tensor in inputs.items()
    }


@pytest.fixture
def fused(device: Device) -> Device:
    """It was measured that silu in the first product's epilogue is faster."""
    device.has(PERSISTENT, DType.BF16)
    device.there |= {GATED}
    device.measures(FUSED, (2 * I, 16))
    return device


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_silu_is_the_first_products_work_where_no_gradient_needs_h(
    fused: Device, both: Callable[..., None], layout: str
) -> None:
    fused.layout = Layout(layout)
    fused.measures(FUSED, (2 * I, 16))
    inputs = halves(layout)
    both(inputs, set(), IDS, w_layout=layout)
    assert fused.launched == [GATED, (Op.FORWARD, Fusion.NONE)]
    assert fused.passed == [RowOp.COMBINE]
    both(inputs, {"hidden"}, IDS, w_layout=layout)
    assert fused.launched[:2] == UNGATED
    assert RowOp.ACTIVATION in fused.passed
    fused.measures({GATED: 2000.0}, (2 * I, 16))  # it does not pay
    both(inputs, set(), IDS, w_layout=layout)
    assert fused.launched == UNGATED


@pytest.mark.parametrize(
    ("how", "biased"),
    [
        ({"activation": "gelu"}, False),
        ({"activation": "swiglu_oai"}, False),
        ({"interleaved": True}, False),
        ({"gated": False}, False),
        ({}, True),
    ],
)
def test_nothing_else_is(fused: Device, both: Callable[..., None], how: dict[str, Any], biased: bool) -> None:
    both(halves(biased=biased, gated=how.get("gated", True)), set(), IDS, **how)
    forms = [(Op.FORWARD, Fusion.GATHER), (Op.FORWARD, Fusion.SCATTER if biased else Fusion.NONE)]
    assert fused.launched in (UNGATED, forms)


def test_nor_is_it_where_what_an_expert_reads_is_weighted(fused: Device, both: Callable[..., None]) -> None:
    both(halves(), set(), IDS, weights_on="input")
    assert fused.launched == [(Op.FORWARD, Fusion.GATHER), (Op.FORWARD, Fusion.SCATTER)]


def test_a_plan_keeps_h_only_for_a_gradient(fused: Device, planned: list[int]) -> None:
    device = fused
    device.visible = False
    inputs = halves()
    leaves = [inputs[name] for name in ("hidden", "up", "down")]
    wanted = moe_mlp(*leaves, IDS, inputs["weights"])
    device.visible = True
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_()
    for needs in (False, False, True, True):
        passes_run = [RowOp.ACTIVATION, RowOp.COMBINE] if needs else [RowOp.COMBINE]
        device.launches.clear()
        with torch.set_grad_enabled(needs):
            out = moe_mlp(*leaves, IDS, inputs["weights"])
        torch.testing.assert_close(out.detach(), wanted, rtol=5e-2, atol=5e-2)
        assert device.passed == passes_run
    assert planned == [T, T]
    dx = torch.autograd.grad(out.sum(), leaves[0])[0]  # h is there
    device.visible = False
    right = torch.autograd.grad(moe_mlp(*leaves, IDS, inputs["weights"]).sum(), leaves[0])[0]
    torch.testing.assert_close(dx, right, rtol=5e-2, atol=5e-2)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_rows_gathered_beforehand_add_up_to_the_reference(
    device: Device, both: Callable[..., None], layout: str, biased: bool
) -> None:
    device.layout = Layout(layout)
    device.gathers_first((2 * I, H))
    left = (Op.FORWARD, Fusion.SCATTER if biased else Fusion.NONE)
    inputs = tensors(True, layout, biased)
    both(inputs, set(NAMES), IDS, w_layout=layout)
    assert device.launched[0] == left
    assert device.passed[:3] == [RowOp.GATHER, RowOp.ACTIVATION, RowOp.COMBINE]
    both(inputs, set(), IDS, w_layout=layout)
    assert device.passed == [RowOp.GATHER, RowOp.ACTIVATION, RowOp.COMBINE]
    device.there -= {RowOp.GATHER}
    both(inputs, set(), IDS, w_layout=layout)
    assert device.passed == [RowOp.ACTIVATION, RowOp.COMBINE]


def test_rows_gathered_beforehand_and_silu_in_the_epilogue(
    device: Device, both: Callable[..., None], planned: list[int]
) -> None:
    device.has(PERSISTENT, DType.BF16)
    silu = (Op.FORWARD, Fusion.SILU)
    device.there |= {silu}
    device.measures({silu: 1.0, UNGATED[0]: 1000.0, UNGATED[1]: 500.0}, (2 * I, 16))
    inputs = halves()
    both(inputs, set(), IDS)
    assert device.launched == [silu, UNGATED[1]]
    assert device.passed == [RowOp.GATHER, RowOp.COMBINE]
    device.visible = False
    leaves = [inputs[name] for name in ("hidden", "up", "down")]
    wanted = moe_mlp(*leaves, IDS, inputs["weights"])
    device.visible = True
    for leaf in leaves:
        assert leaf is not None
        leaf.requires_grad_()
    for grad in (False, False, True, True):  # by a plan from the second on
        device.launches.clear()
        with torch.set_grad_enabled(grad):
            out = moe_mlp(*leaves, IDS, inputs["weights"])
        torch.testing.assert_close(out.detach(), wanted, rtol=5e-2, atol=5e-2)
        assert device.passed == [RowOp.GATHER, *([RowOp.ACTIVATION] if grad else []), RowOp.COMBINE]


def test_a_layer_of_one_token_gathers_nothing_by_a_plan_too(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    device.gathers_first((2 * I, H))
    inputs, calls = tensors(True, "nk", False), []
    device.visible = False
    for tokens in (1, 1, 2, 1, 2):
        of = inputs | {"hidden": torch.rand(tokens, H), "weights": torch.rand(tokens, TOPK)}
        calls.append((tokens, of, step(of, set(), IDS[:tokens])))
    device.visible = True
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)  # the same weights again
    for tokens, of, wanted in calls:
        device.launches.clear()
        torch.testing.assert_close(step(of, set(), IDS[:tokens]), wanted, rtol=1e-5, atol=1e-4)
        assert device.passed == [*([RowOp.GATHER] if tokens > 1 else []), RowOp.ACTIVATION, RowOp.COMBINE]
    assert planned == [1, 1, 2]


def test_no_tokens_and_no_width(fused: Device, both: Callable[..., None]) -> None:
    inputs, half = halves(), torch.bfloat16
    both(inputs | {"hidden": torch.rand(0, 16, dtype=half), "weights": torch.rand(0, TOPK)}, set(), IDS[:0])
    assert fused.launched == []
    both(inputs | {"up": torch.rand(E, 0, 16, dtype=half), "down": torch.rand(E, 16, 0, dtype=half)}, set(), IDS)
    assert GATED not in fused.launched


def test_a_call_that_is_another_one_is_not(monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]) -> None:
    device.visible = True
    inputs = tensors(True, "nk", False)
    hidden, up, down, weights = (inputs[name] for name in ("hidden", "up", "down", "weights"))
    assert hidden is not None
    assert weights is not None

    def call(x: torch.Tensor, ids: torch.Tensor, t: torch.Tensor, **how: Any) -> torch.Tensor:
        return moe_mlp(x, up, down, ids, t, **how)

    wanted = call(hidden, IDS, weights)
    assert torch.equal(call(hidden, IDS, weights), wanted)
    assert planned == [T]
    shifted = torch.empty(T * H + 1)[1:].view(T, H).copy_(hidden)  # not as well aligned
    sparse = torch.empty(T, 2 * H)[:, :H].copy_(hidden)
    for x, ids, t in (
        (shifted, IDS, weights),
        (sparse, IDS, weights),
        (hidden.view(3, 3, H), IDS, weights),
        (hidden, IDS.int(), weights),
        (hidden, IDS, weights.double()),
        (hidden, IDS, weights.t().contiguous().t()),
        (hidden, IDS, torch.nn.Parameter(weights)),  # a gradient is wanted now
    ):
        torch.testing.assert_close(call(x, ids, t).view(T, H), wanted)
    assert planned == [T]
    assert not torch.equal(call(hidden, IDS, weights, activation="gelu"), wanted)
    reload()
    call(hidden, IDS, weights)
    assert planned == [T]  # the bundles may be others


@pytest.mark.parametrize("needs", [set(), {"hidden", "weights"}])
def test_plans_of_activations_that_differ_in_one_number(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int], needs: set[str]
) -> None:
    """Of the same tensors, each of them by turns: a plan is for its own numbers, in the gradient too."""
    base, capped = Activation("swiglu", limit=1.0, alpha=1.3, beta=0.5), Activation("situ", beta=1.0, linear_beta=0.5)
    acts = [
        base,
        base._replace(limit=0.5),
        base._replace(alpha=0.7),
        base._replace(beta=-0.5),
        capped,
        capped._replace(beta=0.25),
        capped._replace(linear_beta=None),
        Activation("swiglustep", limit=1.0),
        "swiglu_oai",
        Activation("swiglu_oai"),
        "silu",
        Activation("silu"),
    ]
    inputs = tensors(True, "nk", False)
    device.visible = False
    wanted = [step(inputs, needs, IDS, activation=act) for act in acts]
    assert all(
        not torch.equal(tensor[name], other[name])
        for at, tensor in enumerate(wanted[:9])
        for other in wanted[:at]
        for name in tensor
    )
    device.visible = True
    leaves = {name: None if tensor is None else tensor.requires_grad_(name in needs) for name, tensor in inputs.items()}
    monkeypatch.setattr(torch.Tensor, "clone", lambda self: self)  # the same tensors again, as a model has them
    for _ in range(3):
        for act, each in zip(acts, wanted, strict=True):
            got = step(leaves, needs, IDS, activation=act)
            for name, tensor in each.items():
                torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)
    assert planned == [T] * 2 * len(acts)


def test_a_reload_while_a_plan_is_made_is_not_of_it(device: Device, planned: list[int]) -> None:
    """Another thread's, while a chosen kernel is loaded."""
    reloads = [snapshot.forget]
    device.on_load = lambda: reloads.pop()() if reloads else None
    inputs = tensors(True, "nk", False)
    for taken in (0, 0, 1):
        moe_mlp(inputs["hidden"], inputs["up"], inputs["down"], IDS, inputs["weights"])
        assert len(planned) == taken


def test_a_sum_over_nothing_has_its_bias() -> None:
    hidden, up, down = torch.rand(T, H), torch.rand(E, 0, H), torch.rand(E, H, 0)
    weights, bias = torch.rand(T, TOPK, requires_grad=True), torch.rand(E, H, requires_grad=True)
    out = moe_mlp(hidden, up, down, IDS, weights, down_bias=bias)
    here = (IDS >= 0) & (IDS < E)
    wanted = (torch.where(here, weights, 0.0)[..., None] * bias[IDS.long().clamp(0, E - 1)]).sum(1)
    torch.testing.assert_close(out, wanted)
    for got, want in zip(
        torch.autograd.grad(out.sum(), [weights, bias]), torch.autograd.grad(wanted.sum(), [weights, bias]), strict=True
    ):
        torch.testing.assert_close(got, want)


def test_a_sum_over_nothing_is_zero(both: Any) -> None:
    inputs: dict[str, torch.Tensor | None] = dict.fromkeys(NAMES)
    inputs |= {"hidden": torch.rand(T, H), "up": torch.rand(E, 0, H), "down": torch.rand(E, H, 0)}
    inputs |= {"weights": torch.rand(T, TOPK)}
    both(inputs, {"hidden", "weights", "down"}, IDS)
    leaves = [tensor for tensor in (inputs["hidden"], inputs["up"], inputs["down"]) if tensor is not None]
    assert not moe_mlp(*leaves, IDS, torch.rand(T, TOPK)).any()


@pytest.mark.parametrize(
    ("down", "says"),
    [((E, H + 1, I), "wanted H=12 rows"), ((E, H, I + 1), "K=8, x's last dimension"), ((E + 1, H, I), "same number")],
)
def test_weights_that_do_not_fit_each_other(down: tuple[int, ...], says: str) -> None:
    inputs = tensors(True, "nk", False)
    with pytest.raises(InputError, match=says):
        moe_mlp(inputs["hidden"], inputs["up"], torch.rand(down), IDS, inputs["weights"])


@pytest.mark.parametrize("there", [set(PASSES), {*ALL, RowOp.ACTIVATION}, set(ALL)])
def test_without_every_kernel_there_is_no_plan(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int], there: set[object]
) -> None:
    device.visible = True
    device.there = there
    inputs = tensors(True, "nk", False)
    results = [moe_mlp(inputs["hidden"], inputs["up"], inputs["down"], IDS, inputs["weights"]) for _ in range(2)]
    assert torch.equal(*results)
    assert planned == []


def test_what_autocast_casts_and_biases_with_gaps_are_not_planned(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    inputs = tensors(True, "nk", True)
    hidden, up, down, weights = (inputs[name] for name in ("hidden", "up", "down", "weights"))
    assert hidden is not None
    low = hidden.bfloat16()
    for _ in range(2):
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            out = moe_mlp(low, up, down, IDS, weights)
        assert out.dtype is torch.bfloat16
    bias = torch.rand(2 * I, E).t()
    for _ in range(2):
        moe_mlp(hidden, up, down, IDS, weights, gate_up_bias=bias)
    assert planned == []


def test_a_full_table_of_plans_begins_anew(monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]) -> None:
    monkeypatch.setattr(program, "MOST_PLANS", 2)
    device.visible = True
    inputs = tensors(True, "nk", False)
    hidden, weights = inputs["hidden"], inputs["weights"]
    assert hidden is not None
    assert weights is not None
    for count in (1, 2, 7, 7, 1):  # each of a bucket of its own
        moe_mlp(hidden[:count], inputs["up"], inputs["down"], IDS[:count], weights[:count])
    assert planned == [7]
    assert len(snapshot.snapshot().plans) == 2


def many(count: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """hidden, ids and routing weights of so many tokens."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(-1, E + 1, (count, TOPK), generator=generator)
    return torch.randn(count, H, generator=generator), ids, torch.rand(count, TOPK, generator=generator)


def test_a_plan_is_of_a_bucket_whatever_the_number_of_tokens(
    monkeypatch: pytest.MonkeyPatch, device: Device, graded: list[Replay], planned: list[int]
) -> None:
    """Prompts and sequences of other lengths all the time."""
    inputs = tensors(True, "nk", False)
    experts = [inputs["up"].requires_grad_(), inputs["down"].requires_grad_()]  # type: ignore[union-attr]
    counts = (24, 23, 30, 17, 45, 24, 12)
    results: dict[bool, list[torch.Tensor]] = {False: [], True: []}
    for simulated, result in results.items():
        device.visible = simulated
        for count in counts:
            hidden, ids, weights = many(count)
            leaves = [hidden.requires_grad_(), *experts, weights.requires_grad_()]
            out = moe_mlp(hidden, *experts, ids, weights)
            result += [out, *torch.autograd.grad(out, leaves, torch.linspace(-1, 1, out.numel()).view_as(out))]
    for got, want in zip(results[True], results[False], strict=True):
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)
    assert planned == [23, 30, 17, 24]  # 46 to 90 rows are of one bucket; 135 and 36 are not
    assert len(graded) == 4


def test_what_a_plan_of_a_bucket_does_not_take(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    device.visible = True
    inputs = tensors(True, "nk", False)
    hidden, ids, weights = many(24)

    def call(*of: torch.Tensor) -> torch.Tensor:
        return moe_mlp(of[0], inputs["up"], inputs["down"], *of[1:])

    wanted = call(hidden, ids, weights)
    assert torch.equal(call(hidden.view(24, H), ids, weights), wanted)
    assert planned == [24]
    for less in ((hidden[:23], ids, weights), (hidden, ids[:23], weights), (hidden, ids, weights[:23])):
        with pytest.raises(InputError, match="the tokens of hidden"):
            call(*less)
    wide = torch.cat([hidden, hidden], dim=1)[:, :H]
    turned = weights.T.contiguous().T
    assert torch.equal(call(wide, ids, weights), wanted)
    assert torch.equal(call(hidden, ids, turned), wanted)
    assert call(hidden[:0], ids[:0], weights[:0]).shape == (0, H)
    assert planned == [24]
    three = hidden.view(4, 6, H)
    for _ in range(2):
        assert torch.equal(call(three, ids, weights), wanted.view(4, 6, H))
    assert torch.equal(call(hidden, ids, weights), wanted)  # in turns: each has a plan of its own
    assert planned == [24, 24, 24]
    again = many(28)
    assert call(again[0].view(7, 4, H), *again[1:]).shape == (7, 4, H)
    assert planned == [24, 24, 24, 28]


LOW = ("A1", "B1", "A2", "B2")


def adapted(
    inputs: dict[str, torch.Tensor | None],
    low: dict[str, torch.Tensor | None],
    needs: set[str],
    ids: torch.Tensor,
    **how: Any,
) -> dict[str, torch.Tensor]:
    """The layer with adapters of its products, on these very tensors, and the gradients of ``needs``."""
    leaves = {
        name: None if tensor is None else tensor.requires_grad_(name in needs)
        for name, tensor in (inputs | low).items()
    }
    pairs = [(leaves[f"A{i}"], leaves[f"B{i}"]) for i in (1, 2)]
    lora = tuple(
        None if A is None or B is None else Lora(A, B, scale) for (A, B), scale in zip(pairs, (0.5, 1.0), strict=True)
    )
    out = moe_mlp(
        leaves["hidden"],
        leaves["up"],
        leaves["down"],
        ids,
        leaves["weights"],
        gate_up_bias=leaves["up_bias"],
        down_bias=leaves["down_bias"],
        lora=lora,
        **how,
    )
    return results(out, leaves, needs)


def low_rank(gated: bool, shared: bool, r: int = 4) -> dict[str, torch.Tensor | None]:
    generator, many = torch.Generator().manual_seed(5), 1 if shared else E
    wide = 2 * I if gated else I
    sizes = ((many, r, H), (many, wide, r), (many, r, I), (many, H, r))
    return {name: torch.randn(size, generator=generator) / 3 for name, size in zip(LOW, sizes, strict=True)}


@pairwise(
    {
        "needs": [LOW, (*LOW, "hidden", "weights"), ()],
        "activation, gated": [("silu", True), ("relu2", False)],
        "biased": [False, True],
        "shared": [False, True],
        "without": [None, 1, 2],
        "inside": [False, True],
    },
    strength=3,
)
def test_a_layer_with_adapters_that_comes_again_is_planned(
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    device: Device,
    planned: list[int],
    graded: list[Replay],
    needs: tuple[str, ...],
    activation: str,
    gated: bool,
    biased: bool,
    shared: bool,
    without: int | None,
    inside: bool,
) -> None:
    """The low-rank part is in its product's kernel (``inside``), or a product of its own beside it."""
    inputs, low = tensors(gated, "nk", biased), low_rank(gated, shared)
    if inside:
        use_low_rank_kernels(monkeypatch, tmp_path)
    if without is not None:
        low |= {f"A{without}": None, f"B{without}": None}
    how: dict[str, Any] = {"activation": activation, "gated": gated}
    device.visible = False
    wanted = adapted(inputs, low, set(needs), IDS, **how)
    device.visible, loaded = True, 0
    for i in range(3):
        device.launches.clear()
        got = adapted(inputs, low, set(needs), IDS, **how)
        assert set(got) == set(wanted)
        for name, tensor in wanted.items():
            torch.testing.assert_close(
                got[name], tensor, rtol=1e-5, atol=1e-4, msg=lambda text, name=name: f"{name}: {text}"
            )
        loaded = loaded or len(device.loads)
        assert len(device.loads) == loaded, "kernels are looked for the first time alone"
        if not i:
            used = {(op, fusion) for op, fusion in device.launched if Fusion.LOW_RANK in fusion}
            first = {(Op.FORWARD, Fusion.LOW_RANK | Fusion.GATHER)} if without != 1 else set()
            second = {(Op.FORWARD, Fusion.LOW_RANK)} if without != 2 else set()
            back = needs and (without is None or "hidden" in needs)
            dx = {(Op.DX, Fusion.LOW_RANK)} if back else set()
            assert used == (first | second | dx if inside else set())
    assert planned == [T, T]
    assert len(graded) == (2 if needs else 0)


def test_plans_with_adapters_are_for_those_like_them(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int], graded: list[Replay]
) -> None:
    """Others of the same sizes take the plan, whatever they hold; of another rank, dtype or scale none does."""
    inputs = tensors(True, "nk", False)

    def compare(low: dict[str, torch.Tensor | None], ids: torch.Tensor = IDS) -> int:
        device.visible = False
        wanted = adapted(inputs, low, {*LOW, "hidden"}, ids)
        device.visible = True
        before = len(planned)
        got = adapted(inputs, low, {*LOW, "hidden"}, ids)
        for name, tensor in wanted.items():
            torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)
        return len(planned) - before

    first = low_rank(True, False)
    assert compare(first) == 0
    assert compare({name: tensor * 2 for name, tensor in first.items() if tensor is not None}) == 1
    assert compare(low_rank(True, False, r=8)) == 0
    assert compare(low_rank(True, False, r=8)) == 1
    assert compare(first) == 1
    assert compare(first, IDS.flip(0)) == 1
    nobody = torch.full_like(IDS, E)
    assert compare(first, nobody) == 1


def test_calls_that_alternate_keep_their_plans(
    monkeypatch: pytest.MonkeyPatch, device: Device, planned: list[int]
) -> None:
    """The router frozen or not, ids of either width, an adapter that is a slice; and a table that they just fill."""
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    wide = (torch.randn(E, 4, 2 * H) / 3)[:, :, :H]
    device.visible = True
    kinds = [
        ({*LOW}, low, IDS),
        ({*LOW, "weights"}, low, IDS),
        ({*LOW}, low, IDS.int()),
        ({*LOW}, low | {"A1": wide}, IDS),
    ]
    monkeypatch.setattr(program, "MOST_PLANS", len(kinds) + 1)  # the last also by the name that all of them have
    for needs, adapters, ids in kinds * 3:
        adapted(inputs, adapters, needs, ids)
    assert planned == [T] * 2 * len(kinds)


def test_a_call_with_the_same_adapters_is_not_checked_again(device: Device, planned: list[int]) -> None:
    """And one with others, or with what is no adapter, is."""
    device.visible = True
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    wanted = [adapted(inputs, low, needs, IDS) for needs in ({*LOW, "hidden"}, set())]
    with calls_of(layer_call._check_tensors) as checked:
        for _ in range(2):
            got = adapted(inputs, low, {*LOW, "hidden"}, IDS)
            for name, tensor in wanted[0].items():
                assert torch.equal(got[name], tensor), name
        assert (checked, planned) == ([], [T, T])
        adapted(
            inputs,
            {name: None if tensor is None else tensor.clone() for name, tensor in low.items()},
            {*LOW, "hidden"},
            IDS,
        )
        assert checked == []  # of the same sizes
        adapted(inputs, low_rank(True, False, r=8), {*LOW, "hidden"}, IDS)
        assert len(checked) == 1
    for _ in range(2):
        got = adapted(inputs, low, set(), IDS)
        assert torch.equal(got["out"], wanted[1]["out"])
    for wrong in ((low["A1"], low["B1"]), [None, Lora(low["A1"], low["B1"], True)], "ab"):  # type: ignore[arg-type]
        with pytest.raises(InputError, match="lora"):
            moe_mlp(inputs["hidden"], inputs["up"], inputs["down"], IDS, inputs["weights"], lora=wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["as PEFT has B", "one for all", "of another dtype", "hidden of 3 dimensions"])
def test_adapters_that_are_brought_into_form_are_not_checked_again(
    device: Device, planned: list[int], kind: str
) -> None:
    inputs, low = tensors(True, "nk", False), low_rank(True, kind == "one for all")
    if kind == "as PEFT has B":
        low |= {name: low[name].transpose(1, 2).contiguous().transpose(1, 2) for name in ("B1", "B2")}  # type: ignore[union-attr]
    elif kind == "of another dtype":
        low = {name: None if tensor is None else tensor.double() for name, tensor in low.items()}
    elif kind == "hidden of 3 dimensions":
        inputs["hidden"] = inputs["hidden"][None]  # type: ignore[index]
    needs = {*LOW, "hidden"}
    device.visible = False
    wanted = adapted(inputs, low, needs, IDS)
    device.visible = True
    with calls_of(layer_call._check_tensors) as checked:
        for _ in range(3):
            got = adapted(inputs, low, needs, IDS)
            for name, tensor in wanted.items():
                assert got[name].shape == tensor.shape
                torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)
    assert (len(checked), planned) == (1, [T, T])


def test_out_takes_a_layer_with_adapters_each_time(monkeypatch: pytest.MonkeyPatch, device: Device) -> None:
    device.visible = True
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    wanted = adapted(inputs, low, set(), IDS)["out"]
    lora = Lora(low["A1"], low["B1"], 0.5), Lora(low["A2"], low["B2"], 1.0)  # type: ignore[arg-type]
    for _ in range(3):
        out = torch.zeros_like(wanted)
        with torch.no_grad():
            got = moe_mlp(inputs["hidden"], inputs["up"], inputs["down"], IDS, inputs["weights"], lora=lora, out=out)  # type: ignore[arg-type]
        assert got is out
        assert torch.equal(out, wanted)


@pytest.mark.parametrize(("needs", "many"), [({"hidden"}, 0), ({"hidden", "A1"}, 2), ({"hidden", "B2"}, 2)])
def test_adapters_that_learn_nothing_have_no_gradients(
    monkeypatch: pytest.MonkeyPatch, device: Device, needs: set[str], many: int
) -> None:
    """``many`` are the products that make those of a pair of A and B."""
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    device.visible = False
    wanted = adapted(inputs, low, needs, IDS)
    device.visible = True
    device.launches.clear()
    got = adapted(inputs, low, needs, IDS)
    for name, tensor in wanted.items():
        torch.testing.assert_close(got[name], tensor, rtol=1e-5, atol=1e-4)
    assert sum(op is Op.DW for op, _ in device.launched) == many


@pytest.mark.parametrize("copied", [True, False])
def test_weights_that_autocast_copies_have_no_plan(device: Device, planned: list[int], copied: bool) -> None:
    """Their copies lie elsewhere in each call."""
    device.has(PERSISTENT, DType.BF16)
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    inputs |= {name: inputs[name].bfloat16() for name in (("hidden",) if copied else ("hidden", "up", "down"))}  # type: ignore[union-attr]
    for _ in range(3):
        with torch.autocast("cuda", torch.bfloat16), torch.autocast("cpu", torch.bfloat16):
            out = adapted(inputs, low, {*LOW}, IDS)["out"]
        assert out.dtype is torch.bfloat16
    assert planned == ([] if copied else [T, T])
    assert bool(snapshot.snapshot().plans) is not copied


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_a_tangent_of_an_adapter_is_refused(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    device.visible = True
    inputs, low = tensors(True, "nk", False), low_rank(True, False)
    with forward_ad.dual_level():
        low["A1"] = forward_ad.make_dual(low["A1"], torch.ones_like(low["A1"]))  # type: ignore[arg-type]
        with pytest.raises(InputError, match="forward-mode tangent"):
            adapted(inputs, low, set(), IDS)


@pytest.mark.parametrize("activation", ["silu", "swiglu_oai"])
@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_trace_of_an_activation_sees_torchs_operations(
    device: Device, monkeypatch: pytest.MonkeyPatch, activation: str
) -> None:
    """It would not see a launch, and return memory that nothing wrote."""
    device.visible = True
    h, other = torch.randn(T, 2 * I), torch.randn(T, 2 * I)
    traced = torch.jit.trace(lambda h: activate(h, activation), (h,), check_trace=False)
    torch.testing.assert_close(traced(other), activate(other, activation))
