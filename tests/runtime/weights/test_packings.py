"""Each packing of one matrix, and of several stacked. What the numbers are is tested by ``test_checkpoints.py``."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime.weights import packings
from pretuned.runtime.weights.codes import Quantised
from pretuned.runtime.weights.packings import Int4, Suffixes

E, N, K = 3, 128, 256
FP8 = torch.float8_e4m3fn


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).int()


def of_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def suffixes(**tensors: torch.Tensor) -> Suffixes:
    suffixes = Suffixes("experts.down_proj.weight")
    suffixes.update(tensors)
    return suffixes


PACKINGS: list[tuple[Callable[[Suffixes], Quantised], dict[str, torch.Tensor]]] = [
    (packings.fp8_blocks, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale_inv": torch.rand(E, 1, 2).bfloat16()}),
    (packings.fp8_rows, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E, N, 1)}),
    (packings.fp8_rows, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E)}),
    (packings.deepseek_fp4, {"weight": of_bytes(E, N, K // 2).view(torch.int8), "scale": of_bytes(E, N, K // 32)}),
    (packings.packed_mxfp4, {"weight_packed": of_bytes(E, N, K // 2), "weight_scale": of_bytes(E, N, K // 32)}),
    (packings.blocks, {"blocks": of_bytes(E, N, K // 32, 16), "scales": of_bytes(E, N, K // 32)}),
    (
        packings.packed_nvfp4,
        {
            "weight_packed": of_bytes(E, N, K // 2),
            "weight_scale": torch.rand(E, N, K // 16).to(FP8),
            "weight_global_scale": torch.rand(E, 1) + 1,
        },
    ),
    (
        packings.modelopt_nvfp4,
        {
            "weight": of_bytes(E, N, K // 2),
            "weight_scale": torch.rand(E, N, K // 16).to(FP8),
            "weight_scale_2": torch.rand(E),
        },
    ),
    (
        partial(packings.packed_int4, how=Int4(32)),
        {
            "weight_packed": whole(E, N, K // 8),
            "weight_scale": torch.rand(E, N, K // 32),
            "weight_zero_point": whole(E, N // 8, K // 32),
        },
    ),
    (
        partial(packings.gptq, how=Int4(64)),
        {"qweight": whole(E, K // 8, N), "qzeros": whole(E, K // 64, N // 8), "scales": torch.rand(E, K // 64, N)},
    ),
    (
        partial(packings.awq, how=Int4()),
        {"qweight": whole(E, K, N // 8), "qzeros": whole(E, K // 64, N // 8), "scales": torch.rand(E, K // 64, N)},
    ),
]


@pytest.mark.parametrize(("read", "tensors"), PACKINGS)
def test_stacked_is_each_for_itself(read: Callable[[Suffixes], Quantised], tensors: dict[str, torch.Tensor]) -> None:
    stacked = read(suffixes(**tensors))
    for e in range(E):
        of_one = read(suffixes(**{name: tensor[e] for name, tensor in tensors.items()}))
        for part, whole in zip(of_one, stacked, strict=True):
            assert (part is None) == (whole is None)
            if part is not None and whole is not None:
                assert torch.equal(
                    part.view(torch.uint8) if part.dtype is FP8 else part,
                    whole[e].view(torch.uint8) if part.dtype is FP8 else whole[e],
                )
    assert stacked.codes.shape == (E, N, K // (1 if stacked.codes.dtype is FP8 else 2))


def test_zero_points_of_8_are_none() -> None:
    codes, scale = of_bytes(2, 3, 150), torch.rand(2, 3, 3)
    for number in (8, 7):
        quantised = Quantised(codes, scale, torch.full((2, 3, 3), number, dtype=torch.uint8))
        assert (packings.whole_groups(quantised).zero is None) is (number == 8)


@pytest.mark.parametrize(
    ("group", "unit"), [(-1, 128), (1 << 70, 128), (512, 128), (256, 128), (192, 64), (96, 32), (160, 32), (64, 64)]
)
def test_groups_of_other_sizes_are_several_that_are_equal(group: int, unit: int) -> None:
    K = 384
    G = -(-K // group) if group > 0 else 1
    scale, zero = torch.rand(E, N, G), torch.randint(0, 16, (E, N, G))
    stored = packings.pack(zero.to(torch.uint8).mT).reshape(E, G, N // 2).clone(memory_format=torch.contiguous_format)
    stored = stored.view(torch.int32).mT  # packed along N
    named = suffixes(weight_packed=whole(E, N, K // 8), weight_scale=scale, weight_zero_point=stored)
    quantised = packings.packed_int4(named, Int4(group))
    each = torch.arange(0, K, unit) // (min(group, K) if group > 0 else K)
    assert torch.equal(quantised.scale, scale[..., each])
    assert quantised.zero is not None
    assert torch.equal(quantised.zero.int(), zero[..., each].int())


@pytest.mark.parametrize("group", [48, 16, 24])
def test_groups_that_are_no_multiple_of_32_are_refused(group: int) -> None:
    G = -(-96 // group)
    named = suffixes(weight_packed=whole(N, 12), weight_scale=torch.rand(N, G))
    with pytest.raises(
        InputError, match=rf"the group of 'experts.down_proj.weight' is {group}, wanted a multiple of 32"
    ):
        packings.packed_int4(named, Int4(group, symmetric=True))


def test_what_is_missing_or_of_another_dtype_is_named() -> None:
    with pytest.raises(InputError, match=r"what belongs to 'experts.down_proj.weight' is \['weight'\], wanted 'scale'"):
        packings.deepseek_fp4(suffixes(weight=of_bytes(N, K // 2)))
    with pytest.raises(InputError, match=r"its qweight, is torch.uint8, wanted torch.int32"):
        packings.awq(suffixes(qweight=of_bytes(K, N // 8), scales=torch.rand(K // 64, N)), Int4())
    with pytest.raises(InputError, match=r"its weight_scale, is of shape \[3\], wanted a scale for each row, \[128\]"):
        packings.fp8_rows(suffixes(weight=torch.zeros(N, K).to(FP8), weight_scale=torch.rand(3)))


def test_an_engine_s_experts_are_those_of_their_stacked_tensors() -> None:
    """Zero points stay, all 8 or not: an engine's layer has the dtype that its config says."""
    awq = {"qweight": whole(E, K, N // 8), "scales": torch.rand(E, K // 64, N), "qzeros": whole(E, K // 64, N // 8)}
    awq["qzeros"][:] = 0x88888888 - (1 << 32)
    tensors = {
        "weight_packed": whole(E, N, K // 8),
        "weight_scale": torch.rand(E, N, K // 32),
        "weight_zero_point": whole(E, N // 8, K // 32),
    }
    gptq = {"qweight": whole(E, K // 8, N), "scales": torch.rand(E, K // 64, N)}
    for stored, wanted in (
        (packings.awq_experts(*awq.values(), group=64), packings.awq(suffixes(**awq), Int4(64))),
        (packings.packed_experts(*tensors.values(), group=32), packings.packed_int4(suffixes(**tensors), Int4(32))),
        (packings.gptq_experts(*gptq.values(), group=64), packings.gptq(suffixes(**gptq), Int4(64, symmetric=True))),
    ):
        assert all(tensor.is_contiguous() for tensor in stored)
        assert len(stored) == sum(tensor is not None for tensor in wanted)
        for tensor, of_all in zip(stored, wanted, strict=False):
            assert of_all is not None
            assert torch.equal(tensor, of_all)


def test_words_of_awq_and_gptq_are_undone() -> None:
    for there, back, words in (
        (packings.awq_codes, packings.awq_words, whole(K, N // 8)),
        (packings.gptq_codes, packings.gptq_words, whole(K // 8, N)),
    ):
        codes = there(words)
        assert (codes.dtype, tuple(codes.shape)) == (torch.uint8, (N, K // 2))
        assert torch.equal(back(codes), words)
