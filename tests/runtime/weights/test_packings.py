"""Each packing of one matrix, and of several stacked. What the numbers are is tested by ``test_checkpoints.py``."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime.weights import packings
from pretuned.runtime.weights.codes import Quantised
from pretuned.runtime.weights.packings import Suffixes

E, N, K = 3, 128, 256
FP8 = torch.float8_e4m3fn


def whole(*shape: int) -> torch.Tensor:
    return torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64).int()


def of_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8)


def suffixes(**given: torch.Tensor) -> Suffixes:
    found = Suffixes("experts.down_proj.weight")
    found.update(given)
    return found


PACKINGS: list[tuple[Callable[[Suffixes], Quantised], dict[str, torch.Tensor]]] = [
    (packings.fp8_blocks, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale_inv": torch.rand(E, 1, 2).bfloat16()}),
    (packings.fp8_rows, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E, N, 1)}),
    (packings.fp8_rows, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E)}),
    (packings.deepseek_fp4, {"weight": of_bytes(E, N, K // 2).view(torch.int8), "scale": of_bytes(E, N, K // 32)}),
    (packings.packed_mxfp4, {"weight_packed": of_bytes(E, N, K // 2), "weight_scale": of_bytes(E, N, K // 32)}),
    (packings.blocks, {"blocks": of_bytes(E, N, K // 32, 16), "scales": of_bytes(E, N, K // 32)}),
    (packings.packed_nvfp4, {"weight_packed": of_bytes(E, N, K // 2), "weight_scale": torch.rand(E, N, K // 16).to(FP8),
                             "weight_global_scale": torch.rand(E, 1) + 1}),
    (packings.modelopt_nvfp4, {"weight": of_bytes(E, N, K // 2), "weight_scale": torch.rand(E, N, K // 16).to(FP8),
                               "weight_scale_2": torch.rand(E)}),
    (packings.packed_int4, {"weight_packed": whole(E, N, K // 8), "weight_scale": torch.rand(E, N, K // 32),
                            "weight_zero_point": whole(E, N // 8, K // 32)}),
    (lambda one: packings.gptq(one, 64, newer=False), {
        "qweight": whole(E, K // 8, N), "qzeros": whole(E, K // 64, N // 8),
                                                       "scales": torch.rand(E, K // 64, N).half()}),
    (packings.awq, {"qweight": whole(E, K, N // 8), "qzeros": whole(E, K // 64, N // 8),
                    "scales": torch.rand(E, K // 64, N).half()}),
]  # fmt: skip


@pytest.mark.parametrize(("read", "given"), PACKINGS)
def test_stacked_is_each_for_itself(read: Callable[[Suffixes], Quantised], given: dict[str, torch.Tensor]) -> None:
    stacked = read(suffixes(**given))
    for e in range(E):
        one = read(suffixes(**{name: tensor[e] for name, tensor in given.items()}))
        for found, every in zip(one, stacked, strict=True):
            assert (found is None) == (every is None)
            if found is not None and every is not None:
                assert torch.equal(found.view(torch.uint8) if found.dtype is FP8 else found,
                                   every[e].view(torch.uint8) if found.dtype is FP8 else every[e])  # fmt: skip
    assert stacked.codes.shape == (E, N, K // (1 if stacked.codes.dtype is FP8 else 2))


def test_zero_points_of_8_are_none_and_one_scale_a_row_is_one_a_group() -> None:
    codes, scale = of_bytes(2, 3, 150), torch.rand(2, 3, 1)
    found = packings.whole_groups(Quantised(codes, scale, torch.full((2, 3, 1), 8, dtype=torch.uint8)))
    assert found.zero is None
    assert found.scale.shape == (2, 3, 3)
    assert torch.equal(found.scale, scale.expand(2, 3, 3))
    kept = packings.whole_groups(Quantised(codes, scale, torch.full((2, 3, 1), 7, dtype=torch.uint8)))
    assert kept.zero is not None
    assert kept.zero.shape == (2, 3, 3)


def test_what_is_missing_or_of_another_dtype_is_named() -> None:
    with pytest.raises(InputError, match=r"what belongs to 'experts.down_proj.weight' is \['weight'\], wanted 'scale'"):
        packings.deepseek_fp4(suffixes(weight=of_bytes(N, K // 2)))
    with pytest.raises(InputError, match=r"its qweight, is torch.uint8, wanted torch.int32"):
        packings.awq(suffixes(qweight=of_bytes(K, N // 8), scales=torch.rand(K // 64, N)))
    with pytest.raises(InputError, match=r"its weight_scale, is of shape \[3\], wanted a scale for each row, \[128\]"):
        packings.fp8_rows(suffixes(weight=torch.zeros(N, K).to(FP8), weight_scale=torch.rand(3)))
