"""The settings of single modules, compared with what the libraries that write them make of a name."""

from __future__ import annotations

import re
from typing import Any

import pytest

from pretuned.artifacts.errors import InputError
from pretuned.runtime.weights import quantization
from pretuned.runtime.weights.quantization import by_module, find, names_of

EXPERT = "model.layers.{}.mlp.experts.{}.{}"
MODULES = [EXPERT.format(*place) for place in ((3, 0, "gate_proj"), (3, 12, "down_proj"), (30, 1, "down_proj"))]


def bits(settings: dict[str, Any]) -> list[Any]:
    """Of each of ``MODULES``; None for one that is left out."""
    results = by_module(settings, [(module,) for module in MODULES], "w")
    return [None if setting is None else setting["bits"] for setting in results]


@pytest.mark.parametrize(
    ("dynamic", "wanted"),
    [
        ({}, [4, 4, 4]),
        ({r"+:.*down.*": {"bits": 8}}, [4, 8, 8]),
        ({r".*down.*": {"bits": 8}, r".*": {"bits": 2}}, [2, 8, 8]),  # the first that matches
        ({r"-:.*layers\.3\..*": {}, r".*": {"bits": 2}}, [None, None, 2]),
        ({r"down": {"bits": 8}, r"layers": {"bits": 8}}, [4, 4, 4]),  # from the beginning of a name
        ({r"^model\.layers\.3\.mlp\.experts\.12\.down_proj$": {"bits": 3}, ".*": {}}, [4, 3, 4]),
        ({r".*": {"group_size": 32}, r".*down.*": {"bits": 8}}, [4, 4, 4]),
        ({r".*": {"bits": None}}, [4, 4, 4]),
        ({r".*experts\.\d\..*": {"bits": 16}}, [None, 4, None]),
    ],
)
def test_dynamic_of_gptqmodel(dynamic: dict[str, Any], wanted: list[Any]) -> None:
    """get_dynamic_override of vLLM, and _resolve_dynamic_override of GPTQModel."""
    assert bits({"quant_method": "gptq", "bits": 4, "dynamic": dynamic}) == wanted


@pytest.mark.parametrize(
    ("extra", "wanted"),
    [
        ({MODULES[1]: {"bits": 8}, r".*down.*": {"bits": 2}}, [4, 8, 2]),
        ({r".*down.*": {"bits": 2}, MODULES[1]: {"bits": 8}}, [4, 8, 2]),  # a name goes before patterns
        ({r"experts\.1[0-9]": {"bits": 8}}, [4, 8, 4]),  # anywhere in a name
        ({r"gate_proj|experts\.1\.": {"bits": 8}}, [8, 4, 8]),
        ({"model.layers.3.mlp.experts": {"bits": 16}}, [None, None, 4]),
        ({"model.layers.3.mlp.gate": {"bits": 16}, "lm_head": {"bits": 8}}, [4, 4, 4]),
        ({MODULES[0]: {}, r".*gate_proj.*": {"bits": 8}}, [8, 4, 4]),
    ],
)
def test_extra_config_of_auto_round(extra: dict[str, Any], wanted: list[Any]) -> None:
    """_expand_regex_config of AutoRound."""
    assert bits({"quant_method": "auto-round", "bits": 4, "extra_config": extra}) == wanted


@pytest.mark.parametrize(
    "key",
    [
        r"^model\.layers\.3\.|shared_experts",
        r".*layers\.30\..*|gate_proj",
        r"(?i)EXPERTS\.1",
        r"layers\.3\.|down",
        r"^layers\.3|^model\.layers\.30|12\.",
        r"experts\.(0|1)\.",
        r"(a|layers)\.3\.mlp",
        r"gate|up|down|w1|w2",
        r"mlp\.[ef]xperts|30",
        r"a\.b|\.1\.",
        r".*3\..*|.*12.*|.*gate.*",
    ],
)
def test_keys_of_extra_config_match_anywhere_in_a_name(key: str) -> None:
    """(re.search, in AutoRound and in vLLM.)"""
    wanted = [8 if re.search(key, module) else 4 for module in MODULES]
    assert bits({"quant_method": "auto-round", "bits": 4, "extra_config": {key: {"bits": 8}}}) == wanted


TARGETS = [
    ["Linear"],
    [r"re:.*experts\.[0-9]\..*"],
    [MODULES[1], "re:.*down_proj$"],
    ["re:.*layers.30.*", "Linear"],
    ["down_proj", "lm_head"],
    [r"re:model\.layers\.3\..*"],
    ["re:experts"],
]


@pytest.mark.parametrize("first", range(len(TARGETS)))
@pytest.mark.parametrize("second", range(len(TARGETS)))
def test_config_groups_of_compressed_tensors(first: int, second: int) -> None:
    """By name, in order, by the library's own ``match_name``; then by class."""
    match_name = pytest.importorskip("compressed_tensors.utils.match").match_name
    groups = {"a": {"targets": TARGETS[first]}, "b": {"targets": TARGETS[second]}}
    ordered = {target: name for name, group in groups.items() for target in group["targets"]}  # the later group has it
    for module, setting in zip(
        MODULES,
        by_module(
            {"quant_method": "compressed-tensors", "config_groups": groups},
            [names_of(module) for module in MODULES],
            "w",
        ),
        strict=True,
    ):
        named = next((name for target, name in ordered.items() if match_name(module, target)), None)
        by_class = ordered.get("Linear") or ordered.get("down_proj")  # one class alone is taken for that of experts
        wanted = named or by_class
        assert (None if setting is None else list(setting["config_groups"])) == (None if wanted is None else [wanted])


def test_modules_share_their_settings() -> None:
    settings = {"quant_method": "gptq", "bits": 4, "dynamic": {".*down.*": {"bits": 8}}}
    gate, down, other = by_module(settings, [(module,) for module in MODULES], "w")
    assert gate is settings
    assert down is other


def test_a_name_under_every_root() -> None:
    layer = "layers.3.mlp.experts.0.w1"
    for root in quantization.ROOTS:
        assert set(names_of(root + layer)) == {root + layer for root in quantization.ROOTS}
        assert names_of(root + layer)[0] == root + layer
    assert names_of("experts.0.w1") == ("experts.0.w1",)


@pytest.mark.parametrize("inside", [("text_config",), ("thinker_config", "text_config"), ("llm_config",)])
def test_a_composite_config(inside: tuple[str, ...]) -> None:
    config: dict[str, Any] = {"quantization_config": {"quant_method": "x"}, "expert_dtype": "fp4"}
    for key in inside:
        config = {"model_type": "y", key: config}
    assert find(config) == {"quant_method": "x", "expert_dtype": "fp4"}
    assert find({**config, "quantization_config": {"quant_method": "outer"}})["quant_method"] == "outer"
    assert find({"quantization_config": None, "compression_config": {}, "text_config": 5}) is None
    assert find({"quantization_config": "fp8"}) == "fp8"


def test_objects_inside_each_other_for_ever() -> None:
    config: dict[str, Any] = {}
    config["text_config"] = config
    assert find(config) is None
    config["llm_config"] = config
    assert find(config) is None


def test_what_is_wrong_is_named() -> None:
    for config, message in (
        ({"config_groups": {"a": 5}}, "w: a group of the config is a int, wanted a dict"),
        ({"config_groups": {"a": {"targets": "Linear"}}}, "w: the config's targets of a group is 'Linear', wanted a"),
        ({"config_groups": {str(i): {} for i in range(129)}}, "w: 129 config_groups, the limit is 128"),
        ({"config_groups": {5: {}}}, "w: config_groups has 5, wanted strings as names"),
    ):
        with pytest.raises(InputError) as caught:
            by_module({"quant_method": "compressed-tensors", **config}, [("x",)], "w")
        assert str(caught.value).startswith(message)
