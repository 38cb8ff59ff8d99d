"""Names of what a quantisation leaves out: parts of a name, globs and regular expressions, as their libraries read."""

from __future__ import annotations

import itertools

import pytest

from pretuned.aot.models import quant_config
from pretuned.aot.models.quant_config import experts, left_out
from pretuned.artifacts.errors import InputError

LAYERS = 4


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        ("model.layers.2.mlp.experts", [2]),
        ("layers.1", [1]),
        ("3", [3]),
        ("mlp", [0, 1, 2, 3]),
        ("0", [0, 1, 2, 3]),
        ("experts.0.w1", [0, 1, 2, 3]),
        ("model.layers.2.mlp.experts.0.w1", [2]),
        ("layers.2.moe.experts.0", [2]),
        ("model.layers", [0, 1, 2, 3]),
        ("lm_head", []),
        ("model.layers.4", []),
        ("layer", []),
        ("", []),
        (".mlp", []),
        ("mlp.", []),
        ("layers.2.experts", []),
        ("experts.1.w1", []),
        ("model.layers.1*", [1]),
        ("*experts", [0, 1, 2, 3]),
        ("*.2.*", [2]),
        ("layers.[12].mlp*", [1, 2]),
        ("*gate", []),
        ("re:model.layers.[02].mlp.experts", [0, 2]),
        ("re:.*experts$", [0, 1, 2, 3]),
        ("re:mlp", []),
        ("re:", [0, 1, 2, 3]),
    ],
)
def test_what_a_name_means(name: str, layers: list[int]) -> None:
    assert left_out([name], LAYERS, "config") == layers
    assert left_out(["lm_head", name, "re:.*lm_head", "*lm_head"], LAYERS, "config") == layers


def test_each_part_of_a_name_is_meant() -> None:
    """Of all names, all neighbouring parts, and no others."""
    for layer in (0, 7):
        lines = "\n".join(f".{name}." for name in experts(layer))
        slices = set()
        for parts in (name.split(".") for name in experts(layer)):
            slices |= {".".join(parts[i:j]) for i, j in itertools.combinations(range(len(parts) + 1), 2)}
        assert slices == quant_config._parts(layer)
        assert all(f".{one}." in lines for one in slices)


def test_what_is_no_regular_expression() -> None:
    with pytest.raises(InputError, match=r'^c: quantization_config: "re:\(" is no regular expression that'):
        left_out(["*a*", "re:("], LAYERS, "c")


@pytest.mark.parametrize("end", ["self_attn*", "mlp.experts*"])
def test_globs_of_each_layer_take_little(end: str) -> None:
    """As checkpoints of more than a hundred layers list them: within the time that there is."""
    ends = ("self_attn*", "mlp.gate*", "mlp.shared_experts*", end)
    names = [f"model.layers.{layer}.{one}" for layer in range(118) for one in ends]
    assert left_out(names, 118, "c") == (list(range(118)) if "mlp.experts*" in ends else [])
