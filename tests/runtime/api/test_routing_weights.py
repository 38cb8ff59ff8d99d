"""The routing weights of a layer: passes read them as they are, in float32 or in the layer's own dtype."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from emulated_kernels import variant_and_code
from host_gpu import PERSISTENT, Device

from pretuned.artifacts.records import DType, Layout, Op, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.rowops import RowOpSpec
from pretuned.runtime import sort_routing
from pretuned.runtime.launch import program
from pretuned.runtime.ops import activation, gather_combine, layer
from pretuned.runtime.ops import routing as ops_routing

T, TOPK, E, H, I = 4, 2, 3, 16, 8  # noqa: E741
KINDS = [torch.bfloat16, torch.float32, torch.float16]
HOW = layer.Layer(TOPK, Layout.NK, activation.RowActivation(activation.Activation("silu"), True, False))


@pytest.fixture
def gpu(device: Device) -> Device:
    """A GPU with kernels of bf16. Its products leave their results as they were."""
    device.has(PERSISTENT, DType.BF16)
    device.idle = frozenset(Op)
    return device


def last(gpu: Device, op: RowOp) -> dict[str, Any]:
    """The words of the last launch of a row kernel."""
    return next(row_kernel.words for row_kernel in reversed(gpu.passes) if row_kernel.code.op is op)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_routing_weights_are_read_as_they_are_where_the_kernel_can(
    gpu: Device, kind: torch.dtype, biased: bool
) -> None:
    h, da, weights = torch.randn(4, 6).bfloat16(), torch.randn(4, 3).bfloat16(), torch.rand(4).to(kind)
    act, needs = (
        activation.RowActivation(activation.Activation("silu"), True, False),
        activation.Needs(True, True, True),
    )
    index = torch.arange(4)
    _, _, dweights = activation.gradient(h, da, act, needs, weights=weights, index=index, narrow=not biased)
    narrow = kind is torch.bfloat16
    assert dweights is not None
    assert dweights.dtype is (torch.bfloat16 if narrow and not biased else torch.float32)
    words = last(gpu, RowOp.ACTIVATION_GRAD)
    assert bool(words["flags"] & rowops.NARROW) == narrow
    assert bool(words["flags"] & rowops.NARROW_DWEIGHTS) == (narrow and not biased)
    assert words["flags"] & rowops.WEIGHTED
    assert (words["row_weights"] == weights.data_ptr()) == (narrow or kind is torch.float32)
    y, experts = torch.randn(4, 3).bfloat16(), torch.zeros(4, dtype=torch.int32)
    gather_combine.combine(y, experts, 2, weights, experts, torch.randn(1, 3).bfloat16() if biased else None)
    assert last(gpu, RowOp.COMBINE)["flags"] == rowops.WEIGHTED | rowops.NARROW * narrow | rowops.BIASED * biased


def test_routing_weights_of_another_kind_are_widened() -> None:
    x, weights = torch.zeros(1, dtype=torch.bfloat16), torch.rand(3, 2)
    for kind, read in [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float16, torch.float32)]:
        assert layer.slot_weights(weights.to(kind), x).dtype is read
    for strided in (weights.T, torch.rand(3, 4)[:, ::2]):
        read = layer.slot_weights(strided, x)
        assert read.tolist() == strided.flatten().tolist()
        assert read.is_contiguous()
    assert layer.slot_weights(weights.half(), x.double()).dtype is torch.float64


def routed(kind: torch.dtype) -> tuple[torch.Tensor, ops_routing.Routing]:
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(-1, E + 1, (T, TOPK), generator=generator)
    return torch.rand(T, TOPK, generator=generator).to(kind), sort_routing(ids, E)


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_program_tells_the_sum_of_what_dtype_they_are(gpu: Device, kind: torch.dtype, biased: bool) -> None:
    """Of the tensors that it is given later."""
    up, down = torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16()
    program_of: program.Program | None = None
    for _ in range(2):
        weights, routing = routed(kind)
        x, bias = torch.randn(T, H).bfloat16(), torch.randn(E, H).bfloat16() if biased else None
        arguments = (x, up, down, None, bias, weights, *routing)
        if program_of is None:
            recorder = program.Recorder(T * TOPK, arguments, varies=True)
            out = layer.forward(
                HOW, x, layer.Weights(up, down, None, bias), routing, weights, keeps_h=False, executor=recorder
            )
            program_of = recorder.program(*out)
            assert program_of is not None
        else:
            program_of.run(T * TOPK, 0, arguments)
        words = last(gpu, RowOp.COMBINE)
        flags = rowops.WEIGHTED | (rowops.NARROW if kind is torch.bfloat16 else 0) | (rowops.BIASED if biased else 0)
        assert [words[name] for name in ("M", "columns", "top_k", "flags")] == [T, H, TOPK, flags]
        assert (words["places"], words["experts"]) == (routing.places.data_ptr(), routing.experts.data_ptr())
        assert (words["row_weights"] == weights.data_ptr()) is (kind is not torch.float16)
        assert words["bias"] == (0 if bias is None else bias.data_ptr())


@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_the_program_of_a_gradient_reads_and_writes_them_as_its_kernel_can(
    gpu: Device, kind: torch.dtype, biased: bool
) -> None:
    """``biased``, frozen: the bias' part is added to their gradient in float32."""
    up, down = torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16()
    program_of: program.Program | None = None
    for _ in range(2):
        weights, routing = routed(kind)
        dout, x, h = torch.randn(T, H).bfloat16(), torch.randn(T, H).bfloat16(), torch.randn(T * TOPK, 2 * I).bfloat16()
        bias = torch.randn(E, H).bfloat16() if biased else None
        arguments = (dout, h, x, weights, up, down, bias, *routing)
        if program_of is None:
            recorder = program.Recorder(T * TOPK, arguments, varies=True)
            needs = (True, True, True, False, False, True)
            result: Any = layer.gradients(
                HOW, dout, x, layer.Weights(up, down, None, bias), weights, h, routing, needs, recorder
            )
            program_of = recorder.program(*result)
            assert program_of is not None
        else:
            result = program_of.run(T * TOPK, 0, arguments)
        assert [gradient is not None for gradient in result] == list(needs)
        words, summed = last(gpu, RowOp.ACTIVATION_GRAD), last(gpu, RowOp.COMBINE)
        flags, narrow = words["flags"], kind is torch.bfloat16
        assert result[5].dtype is kind
        assert result[5].shape == weights.shape
        assert flags & rowops.WEIGHTED
        assert bool(flags & rowops.NARROW) is narrow
        assert bool(flags & rowops.NARROW_DWEIGHTS) is (narrow and not biased)
        assert (words["row_weights"] == weights.data_ptr()) is (narrow or kind is torch.float32)
        whole = not biased and (narrow or kind is torch.float32)  # else it is made of what the kernel wrote
        assert (words["dweights"] == result[5].data_ptr()) is whole
        assert [summed[name] for name in ("M", "columns", "top_k", "flags")] == [T, H, TOPK, 0]
        assert summed["places"] == routing.places.data_ptr()
        assert not any(summed[name] for name in ("row_weights", "experts", "bias"))


@pytest.mark.parametrize("biased", [False, True])
def test_their_gradient_is_of_their_dtype_where_no_bias_adds_to_it(gpu: Device, biased: bool) -> None:
    weights, routing = routed(torch.bfloat16)
    bias = torch.randn(E, H).bfloat16() if biased else None
    layer_weights = layer.Weights(torch.randn(E, 2 * I, H).bfloat16(), torch.randn(E, H, I).bfloat16(), None, bias)
    x, h = torch.randn(T, H).bfloat16(), torch.randn(T * TOPK, 2 * I).bfloat16()
    needs = (True, False, False, False, False, True)
    layer.gradients(HOW, x.clone(), x, layer_weights, weights, h, routing, needs)
    assert bool(last(gpu, RowOp.ACTIVATION_GRAD)["flags"] & rowops.NARROW_DWEIGHTS) is not biased


def test_the_sum_asks_for_a_kernel_that_may_read_its_bias(gpu: Device) -> None:
    weights, routing = routed(torch.float32)
    y, bias = torch.randn(T * TOPK, H).bfloat16(), torch.randn(E, H).bfloat16()
    spare = torch.empty(E * H + 1).bfloat16()[1:].view(E, H).copy_(bias)
    sums = [
        gather_combine.combine(y, routing.places, TOPK, weights.flatten(), routing.experts, vector)
        for vector in (bias, spare, None)
    ]
    wanted = [
        variant_and_code(RowOpSpec(RowOp.COMBINE, DType.BF16, alignment))[0].cubin_sha256 for alignment in (16, 1, 16)
    ]
    assert [row_kernel.digest for row_kernel in gpu.passes if row_kernel.code.op is RowOp.COMBINE] == wanted
    assert torch.equal(sums[0], sums[1])


@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_torch_adds_up_in_float32_as_many_tokens_at_a_time_as_memory_allows(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype
) -> None:
    T, k, H = 23, 8, 64
    monkeypatch.setattr(gather_combine, "_CHUNK_ELEMENTS", 5 * k * H)
    generator = torch.Generator().manual_seed(2)
    experts = torch.randint(0, E + 1, (T * k,), generator=generator, dtype=torch.int32)
    places = torch.where(experts < E, torch.randperm(T * k, generator=generator).int(), -1)
    y, bias = (torch.randn(rows, H, generator=generator).bfloat16() for rows in (T * k, E))
    weights = torch.rand(T * k, generator=generator).to(kind)
    got = gather_combine.combine(y, places, k, weights, experts, bias)
    here = places >= 0
    want = y[places.clamp(min=0).long()].double() + bias[experts.clamp(max=E - 1).long()].double()
    want = torch.where(here[:, None], want * weights[:, None].double(), 0).view(T, k, H).sum(1)
    assert got.dtype is torch.bfloat16
    assert float((got.double() - want).norm() / want.norm()) < 2.2e-3  # one rounding; summed in bf16 it is twice as far
