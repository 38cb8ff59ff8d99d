"""Weights with rows and columns of zeros after their own: what they are, and that a layer of them computes the same."""

from __future__ import annotations

import pytest
import torch

from pretuned import moe_mlp
from pretuned.artifacts.errors import InputError
from pretuned.kernels.activations import Activation
from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights.padding import narrowed, padded

FORMATS = ("mxfp4", "mxfp8", "nvfp4", "fp8_channel", "fp8_channel_a16", "int4_g32", "int4_g32_zp", "int4_g64_zp")


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    w = torch.randn(*shape, generator=torch.Generator().manual_seed(seed))
    return w + 0.5  # else zero points are near 8


def expected(w: torch.Tensor, N: int, K: int, parts: int) -> torch.Tensor:
    E, rows, columns = w.shape
    padded = torch.zeros(E, parts, N // parts, K, dtype=w.dtype)
    padded[:, :, : rows // parts, :columns] = w.view(E, parts, rows // parts, columns)
    return padded.view(E, N, K)


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(
    ("shape", "N", "K", "parts"),
    [
        ((3, 80, 64), 128, 64, 1),
        ((3, 160, 64), 256, 64, 2),
        ((2, 64, 96), 64, 128, 1),
        ((2, 64, 80), 64, 192, 1),  # 80 ends within a group of 32
        ((2, 6, 70), 10, 72, 2),
    ],
)
def test_values_are_the_same_and_zeros_after_them(
    format: str, shape: tuple[int, ...], N: int, K: int, parts: int
) -> None:
    w = ExpertWeights.quantize(drawn(*shape), format)
    before = {name: tensor.clone() for name, tensor in w.tensors().items()}
    wide = padded(w, N, K, parts=parts)
    assert (wide.format, tuple(wide.shape)) == (format, (shape[0], N, K))
    assert torch.equal(wide.dequantize(torch.float32), expected(w.dequantize(torch.float32), N, K, parts))
    assert all(tensor.is_contiguous() for tensor in wide.tensors().values())
    for name, tensor in w.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), before[name].view(torch.uint8))
    back = ExpertWeights.from_state_dict(format, wide.state_dict())  # which checks all of its tensors
    assert back.shape == wide.shape


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize(("shape", "N", "K", "parts"), [((3, 96, 64), 128, 64, 1), ((2, 192, 96), 256, 128, 2)])
def test_padding_is_undone(format: str, shape: tuple[int, ...], N: int, K: int, parts: int) -> None:
    w = ExpertWeights.quantize(drawn(*shape), format)
    back = narrowed(padded(w, N, K, parts=parts).prepare().restore(), *shape[1:], parts=parts)
    for name, tensor in w.tensors().items():
        assert torch.equal(tensor.view(torch.uint8), back.tensors()[name].view(torch.uint8)), name


@pytest.mark.parametrize("format", FORMATS)
def test_padded_weights_can_be_prepared(format: str) -> None:
    w = ExpertWeights.quantize(drawn(2, 64, 96), format)
    assert not w.can_be_prepared
    wide = padded(w, 64, 128)
    values = wide.dequantize(torch.float32)
    prepared = wide.prepare()
    assert prepared.is_prepared
    assert torch.equal(prepared.dequantize(torch.float32), values)


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "fp8_channel", "int4_g32", "int4_g32_zp"])
@pytest.mark.parametrize(
    ("act", "gated", "interleaved"),
    [
        ("silu", True, False),
        ("gelu", True, False),
        ("gelu_tanh", True, False),
        ("swiglu_oai", True, True),
        ("swiglu_oai", True, False),
        ("relu2", False, False),
        (Activation("swiglu", limit=7.0, alpha=1.5, beta=0.7), True, False),
        (Activation("swiglustep", limit=7.0), True, False),
        (Activation("situ", beta=4.0, linear_beta=7.0), True, False),
    ],
)
def test_a_layer_of_padded_weights_computes_the_same(
    format: str, act: str | Activation, gated: bool, interleaved: bool
) -> None:
    E, H, width, wide, T = 4, 64, 96, 128, 5
    halves = 2 if gated else 1
    gate_up = ExpertWeights.quantize(drawn(E, halves * width, H) / 8, format)
    down = ExpertWeights.quantize(drawn(E, H, width, seed=1) / 8, format)
    bias, down_bias = drawn(E, halves * width, seed=2).bfloat16(), drawn(E, H, seed=3).bfloat16()
    x = drawn(T, H, seed=4).bfloat16()
    ids = torch.stack([torch.randperm(E, generator=torch.Generator().manual_seed(t))[:2] for t in range(T)])
    share = torch.full((T, 2), 0.5)
    parts = halves if not interleaved else 1
    bias_wide = torch.zeros(E, parts, halves * wide // parts, dtype=bias.dtype)
    bias_wide[:, :, : halves * width // parts] = bias.view(E, parts, -1)
    how = {"gated": gated, "interleaved": interleaved, "down_bias": down_bias}
    y = moe_mlp(x, gate_up, down, ids, share, act, gate_up_bias=bias, **how)
    large = padded(gate_up, halves * wide, H, parts=parts), padded(down, H, wide)
    z = moe_mlp(x, *large, ids, share, act, gate_up_bias=bias_wide.flatten(1), **how)
    assert y.isfinite().all()
    assert y.abs().max() > 0.1
    torch.testing.assert_close(z, y, rtol=2**-8, atol=1e-5)  # torch may sum in another order


def test_fp8_blocks_are_padded_by_whole_blocks() -> None:
    w = ExpertWeights.quantize(drawn(2, 256, 200), "fp8_block")
    wide = padded(w, 512, 256, parts=2)
    assert torch.equal(wide.dequantize(torch.float32), expected(w.dequantize(torch.float32), 512, 256, 2))
    with pytest.raises(InputError, match=r"parts of 129 rows, wanted multiples of 128"):
        padded(w, 258, 256, parts=2)
    with pytest.raises(InputError, match=r"parts of 96 rows, wanted multiples of 128"):
        padded(ExpertWeights.quantize(drawn(2, 192, 128), "fp8_block"), 256, 128, parts=2)


@pytest.mark.parametrize(("N", "K", "parts"), [(32, 64, 1), (64, 32, 1), (65, 64, 2), (64, 67, 1)])
def test_sizes_that_can_not_be(N: int, K: int, parts: int) -> None:
    w = ExpertWeights.quantize(drawn(1, 64, 64), "mxfp4")
    assert padded(w, 64, 64) is w
    with pytest.raises(InputError, match=r"what is padded is ExpertWeights"):
        padded(w, N, K, parts=parts)


def test_prepared_weights_are_not_padded() -> None:
    w = ExpertWeights.quantize(drawn(1, 64, 64), "mxfp4").prepare()
    with pytest.raises(InputError, match=r"restore\(\) has it"):
        padded(w, 128, 64)
