"""The weights of tensors that an engine has loaded, beside ``ExpertWeights.from_tensors`` of the same checkpoint."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType
from pretuned.integrations.loaded_format import LoadedFormat, int4_name, order_refusal, scale_of_rows
from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights.checkpoints import gptq_zeros

E, N, K = 2, 64, 128
FP8 = torch.float8_e4m3fn


def whole(*shape: int) -> torch.Tensor:
    drawn = torch.randint(-(1 << 31), 1 << 31, shape, dtype=torch.int64, generator=torch.Generator().manual_seed(0))
    return drawn.int()


def of_bytes(*shape: int) -> torch.Tensor:
    return torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(1))


def same(got: ExpertWeights, expected: ExpertWeights) -> None:
    assert got.format == expected.format
    assert torch.equal(got.dequantize(torch.float32), expected.dequantize(torch.float32))


_GPTQ: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "sym": False, "desc_act": False}
_AWQ: dict[str, Any] = {"quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm"}
_PACKED = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": 32},
        }
    },
}
_NVFP4 = {
    "quant_method": "compressed-tensors",
    "format": "nvfp4-pack-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 4,
                "type": "float",
                "symmetric": True,
                "strategy": "tensor_group",
                "group_size": 16,
            },
        }
    },
}
_FP8 = {
    "quant_method": "compressed-tensors",
    "format": "float-quantized",
    "config_groups": {
        "group_0": {
            "targets": ["Linear"],
            "weights": {"num_bits": 8, "type": "float", "symmetric": True, "strategy": "channel"},
            "input_activations": {"num_bits": 8},
        }
    },
}


@pytest.mark.parametrize(
    ("format", "packing", "config", "tensors"),
    [
        (
            "int4_g32_zp",
            "awq",
            _AWQ,
            {"qweight": whole(E, K, N // 8), "scales": torch.rand(E, K // 32, N), "qzeros": whole(E, K // 32, N // 8)},
        ),
        (
            "int4_g32_zp",
            "",
            _PACKED,
            {
                "weight_packed": whole(E, N, K // 8),
                "weight_scale": torch.rand(E, N, 4),
                "weight_zero_point": whole(E, N // 8, 4),
            },
        ),
        *(
            (
                "int4_g32_zp",
                "gptq",
                _GPTQ | more,
                {
                    "qweight": whole(E, K // 8, N),
                    "scales": torch.rand(E, K // 32, N),
                    "qzeros": whole(E, K // 32, N // 8),
                },
            )
            for more in ({}, {"checkpoint_format": "gptq_v2"}, {"meta": {"quantizer": ["gptqmodel:4.0"]}})
        ),
        (
            "int4_g32",
            "gptq",
            _GPTQ | {"sym": True},
            {"qweight": whole(E, K // 8, N), "qzeros": whole(E, 4, N // 8), "scales": torch.rand(E, K // 32, N)},
        ),
        (
            "nvfp4",
            "",
            {"quant_algo": "NVFP4"},
            {
                "weight": of_bytes(E, N, K // 2),
                "weight_scale_2": torch.rand(E),
                "weight_scale": torch.rand(E, N, K // 16).to(FP8),
            },
        ),
        (
            "nvfp4",
            "",
            _NVFP4,
            {
                "weight_packed": of_bytes(E, N, K // 2),
                "weight_global_scale": torch.rand(E) + 1,
                "weight_scale": torch.rand(E, N, K // 16).to(FP8),
            },
        ),
        ("fp8_channel", "", _FP8, {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E, N, 1)}),
        (
            "fp8_channel",
            "",
            {"quant_algo": "FP8"},
            {"weight": torch.randn(E, N, K).to(FP8), "weight_scale": torch.rand(E)},
        ),
    ],
)
def test_weights_are_those_of_the_checkpoint(
    format: str, packing: str, config: dict[str, Any], tensors: dict[str, torch.Tensor]
) -> None:
    order = [*(name for name in tensors if name.endswith(("weight", "packed"))), "scales", "weight_scale", "qzeros"]
    order += ["weight_zero_point", "weight_scale_2", "weight_global_scale"]
    ends = tuple(name for name in order if name in tensors)
    less_one, by_word = gptq_zeros(config) if packing == "gptq" else (True, False)
    divides = "weight_global_scale" in ends
    loaded = LoadedFormat(format, ends, packing, divides=divides, less_one=less_one, by_word=by_word)
    expected = ExpertWeights.from_tensors(tensors, config, "down")
    weights = loaded.weights(*(tensors[end].clone() for end in ends))
    same(weights, expected)
    made_tensors = loaded.tensors_of(weights)
    assert set(made_tensors) == set(ends if loaded.has_zeros or "int4" not in format else ends[:2])
    assert loaded.K_first == (packing in ("awq", "gptq"))
    assert loaded.dtype is DType(format)


def test_zero_points_two_in_a_byte() -> None:
    codes, scale = of_bytes(E, N, K // 2), torch.rand(E, N, 4)
    zero = torch.randint(0, 16, (E, N, 4), dtype=torch.uint8)
    loaded = LoadedFormat("int4_g32_zp", ("qweight", "scales", "qzeros"), "bytes")
    same(loaded.weights(codes, scale, zero[:, ::2] | zero[:, 1::2] << 4), ExpertWeights.int4(codes, scale, zero))


def test_scales_of_gate_and_up_are_those_of_their_rows() -> None:
    scale = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert scale_of_rows(scale, 4).tolist() == [[1, 1, 2, 2], [3, 3, 4, 4]]
    assert scale_of_rows(scale[:, 0], 3).tolist() == [[1, 1, 1], [3, 3, 3]]
    rows = torch.rand(2, 3, 1)
    assert scale_of_rows(rows, 3).data_ptr() == rows.data_ptr()  # no copy: the engine writes to it


def test_gate_and_up_with_two_global_scales_are_refused() -> None:
    loaded = LoadedFormat("nvfp4", ("weight", "weight_scale", "weight_scale_2"))
    outer = torch.ones(E, 2)
    tensors = of_bytes(E, N, K // 2), torch.rand(E, N, K // 16).to(FP8)
    assert loaded.weights(*tensors, outer).global_scale is not None
    outer[1, 1] = 2
    with pytest.raises(InputError, match=r"gate and up of expert 1 have the global scales \[1.0, 2.0\], wanted one"):
        loaded.weights(*tensors, outer)


def test_what_int4_is_served() -> None:
    assert int4_name(4, 64, zeros=True) == ("int4_g64_zp", "")
    for bits, group in ((8, 128), (4, 16), (4, -1)):
        name, why = int4_name(bits, group, zeros=False)
        assert name is None
        assert f"{bits} bits in groups of {group}" in why


def test_which_orders_are_of_neighbours() -> None:
    for order in (None, False, "static", SimpleNamespace(value="weight")):
        assert order_refusal(order) is None
    for order in ("group", SimpleNamespace(value="dynamic"), True):
        assert "groups of another order (actorder " in str(order_refusal(order))
