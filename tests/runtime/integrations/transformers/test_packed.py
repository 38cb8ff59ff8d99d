"""Which experts of compressed-tensors' checkpoints are loaded as codes; test_quantised.py loads them."""

from __future__ import annotations

from typing import Any

import pytest

from pretuned.integrations.transformers.packed import _codes_of


@pytest.mark.parametrize(
    ("changed", "kept"),
    [
        ({}, True),
        ({"group_size": 128}, True),
        ({"group_size": 16}, False),
        ({"symmetric": False}, False),  # zero points
        ({"actorder": "weight"}, True),  # groups of neighbours
        ({"num_bits": 8}, False),
    ],
)
@pytest.mark.parametrize("ignore", [[], ["re:.*mlp.experts.*"]])
def test_what_is_kept(changed: dict[str, Any], kept: bool, ignore: list[str]) -> None:
    pytest.importorskip("transformers", minversion="5.23")
    quantization = pytest.importorskip("compressed_tensors.quantization")
    weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32} | changed
    quantization_config = {
        "format": "pack-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }
    config = quantization.QuantizationConfig.model_validate(quantization_config | {"ignore": ignore})
    assert (_codes_of(config, "model.layers.3.mlp.experts") is not None) == (kept and not ignore)
