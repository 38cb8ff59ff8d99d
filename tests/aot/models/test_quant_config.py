"""quantization_config as published models have it, cut where lists are long, and the names that it leaves out."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretuned.aot.models import quant_config
from pretuned.aot.models.quant_config import expert_weights, experts, left_out
from pretuned.artifacts.errors import InputError

DYNAMIC = {"dynamic": True, "num_bits": 8, "strategy": "token", "symmetric": True, "type": "float"}


def compressed(weights: Mapping[str, Any], inputs: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
    group = {"input_activations": inputs, "output_activations": None, "targets": ["Linear"], "weights": weights}
    return {
        "quant_method": "compressed-tensors",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": ["lm_head", "re:.*self_attn.*", "re:.*mlp.gate$", "re:.*shared_experts.*"],
        "kv_cache_scheme": None,
        **more,
    }


def weights(bits: int, kind: str, strategy: str, **more: Any) -> dict[str, Any]:
    return {
        "actorder": None,
        "block_structure": None,
        "dynamic": False,
        "group_size": None,
        "num_bits": bits,
        "observer": "minmax",
        "strategy": strategy,
        "symmetric": True,
        "type": kind,
        **more,
    }


FP8 = {"activation_scheme": "dynamic", "fmt": "e4m3", "quant_method": "fp8", "weight_block_size": [128, 128]}
PUBLISHED: dict[str, tuple[dict[str, Any], str]] = {
    "DeepSeek-V3": (FP8, "fp8_block"),
    "Qwen3-30B-A3B-FP8": (
        {**FP8, "modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm", "model.layers.0.mlp.gate"]},
        "fp8_block",
    ),
    "MiMo-V2-Flash": (
        {**FP8, "store_dtype": "bfloat16", "ignored_layers": ["model.layers.0.self_attn.o_proj"]},
        "fp8_block",
    ),
    "Inkling-2-Small-MXFP8": (
        {
            "quant_method": "fp8",
            "weight_block_size": [1, 32],
            "scale_fmt": "ue8m0",
            "modules_to_not_convert": ["lm_head", "model.vision_tower", "model.language_model.layers.*.self_attn"],
        },
        "mxfp8",
    ),
    "static per tensor": ({"quant_method": "fp8", "activation_scheme": "static"}, "fp8_channel"),
    "gpt-oss": (
        {
            "quant_method": "mxfp4",
            "modules_to_not_convert": [
                "model.layers.*.self_attn",
                "model.layers.*.mlp.router",
                "model.embed_tokens",
                "lm_head",
            ],
        },
        "mxfp4",
    ),
    "Kimi-K2-Thinking": (
        compressed(
            weights(4, "int", "group", group_size=32),
            format="pack-quantized",
            ignore=["lm_head", "re:.*self_attn.*", "re:.*shared_experts.*", r"re:.*mlp\.(gate|up|gate_up|down)_proj.*"],
        ),
        "int4_g32",
    ),
    "Kimi-K3": (
        compressed(weights(4, "float", "group", group_size=32), format="mxfp4-pack-quantized"),
        "mxfp4",
    ),
    "GLM-4.6-FP8": (compressed(weights(8, "float", "channel"), DYNAMIC, format="float-quantized"), "fp8_channel"),
    "FP8_BLOCK": (
        compressed(weights(8, "float", "block", block_structure=[128, 128]), {**DYNAMIC, "strategy": "group"}),
        "fp8_block",
    ),
    "w8a16": (compressed(weights(8, "float", "channel"), format="naive-quantized"), "fp8_channel_a16"),
    "w4a16 asymmetric": (
        compressed(weights(4, "int", "group", group_size=128, symmetric=False), format="pack-quantized"),
        "int4_g128_zp",
    ),
    "NVFP4 of llm-compressor": (
        compressed(weights(4, "float", "tensor_group", group_size=16), {"num_bits": 4}, format="nvfp4-pack-quantized"),
        "nvfp4",
    ),
    "w8a8 int": (
        compressed(weights(8, "int", "channel"), {**DYNAMIC, "type": "int"}, format="int-quantized"),
        "w8a8_int",
    ),
    "Qwen3-30B-A3B-GPTQ-Int4": (
        {
            "bits": 4,
            "checkpoint_format": "gptq",
            "damp_percent": 0.01,
            "desc_act": False,
            "group_size": 128,
            "quant_method": "gptq",
            "sym": True,
            "true_sequential": True,
        },
        "int4_g128",
    ),
    "GPTQ without symmetry": ({"bits": 4, "group_size": 64, "quant_method": "gptq", "sym": False}, "int4_g64_zp"),
    "GPTQ by columns": ({"bits": 8, "group_size": -1, "quant_method": "gptq", "sym": True}, "int8_channel"),
    "Mixtral-8x7B-Instruct-v0.1-AWQ": (
        {
            "bits": 4,
            "group_size": 128,
            "modules_to_not_convert": ["gate"],
            "quant_method": "awq",
            "version": "gemm",
            "zero_point": True,
        },
        "int4_g128_zp",
    ),
    "auto-round": (
        {
            "bits": 4,
            "data_type": "int",
            "group_size": 128,
            "sym": True,
            "quant_method": "auto-round",
            "packing_format": "auto_round:auto_gptq",
            "block_name_to_quantize": "model.layers",
            "extra_config": {"model.layers.0.mlp.gate": {"bits": 16}},
        },
        "int4_g128",
    ),
    "auto-round of mxfp4": ({"bits": 4, "data_type": "mx_fp", "group_size": 32, "quant_method": "auto-round"}, "mxfp4"),
    "bitsandbytes": (
        {
            "_load_in_4bit": True,
            "bnb_4bit_quant_type": "nf4",
            "load_in_4bit": True,
            "load_in_8bit": False,
            "quant_method": "bitsandbytes",
        },
        "nf4",
    ),
    "modelopt in config.json": (
        {
            "quant_method": "modelopt",
            "quant_algo": "NVFP4",
            "ignore": ["lm_head", "model.layers.0.self_attn*"],
            "producer": {"name": "modelopt", "version": "0.37.0"},
        },
        "nvfp4",
    ),
    "modelopt by layer": (
        {
            "quant_method": "modelopt",
            "quant_algo": "MIXED_PRECISION",
            "quantized_layers": {
                "model.layers.0.self_attn.q_proj": {"quant_algo": "FP8"},
                "model.layers.0.mlp.experts.0.gate_proj": {"quant_algo": "W4A16_AWQ", "group_size": 128},
            },
        },
        "int4_g128",
    ),
    "quark": (
        {
            "quant_method": "quark",
            "global_quant_config": {
                "weight": {"dtype": "fp4", "group_size": 32, "qscheme": "per_group", "scale_format": "e8m0"}
            },
            "exclude": ["lm_head", "model.layers.0.mlp.gate"],
        },
        "mxfp4",
    ),
    "another": ({"quant_method": "AQLM"}, "aqlm"),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_published(name: str) -> None:
    quantised, wanted = PUBLISHED[name]
    stored = expert_weights({"quantization_config": quantised}, "c", layers=61)
    assert stored is not None
    assert (stored.format, stored.remarks) == (wanted, ())


def test_nothing_is_said() -> None:
    assert expert_weights({}, "c") is None
    assert expert_weights({"quantization_config": None}, "c") is None


def test_the_older_name_of_the_field() -> None:
    stored = expert_weights({"compression_config": PUBLISHED["GLM-4.6-FP8"][0]}, "c")
    assert stored is not None
    assert stored.format == "fp8_channel"


def test_modelopt_s_file_goes_first() -> None:
    beside = {
        "producer": {"name": "modelopt", "version": "0.33.0"},
        "quantization": {
            "quant_algo": "NVFP4",
            "kv_cache_quant_algo": "FP8",
            "group_size": 16,
            "exclude_modules": ["lm_head", "model.layers.0*", "model.layers.1.mlp.gate", "model.layers.61*"],
        },
    }
    stored = expert_weights({"quantization_config": FP8}, "c", 61, beside)
    assert stored is not None
    assert stored.format == "nvfp4"
    assert stored.remarks == ("c: the experts of layers 0 are left out of nvfp4: they are bf16",)


def test_deepseek_v4_has_its_experts_apart() -> None:
    config = {"expert_dtype": "fp4", "quantization_config": {**FP8, "scale_fmt": "ue8m0"}}
    stored = expert_weights(config, "c", layers=43)
    assert stored is not None
    assert stored.format == "mxfp4"
    (remark,) = stored.remarks
    assert "fp8 activations, scaled by 128 of K; here x is bf16" in remark
    base = expert_weights({**config, "expert_dtype": "fp8"}, "c")
    assert base is not None
    assert base.format == "fp8_block"


@pytest.mark.parametrize(
    "out",
    [
        {"modules_to_not_convert": ["lm_head", "experts"]},
        {"ignore": ["re:.*experts.*"]},
        {"ignored_layers": ["model.layers.*.mlp.experts"]},
        {"modules_to_not_convert": [f"model.layers.{i}.mlp.experts" for i in range(4)]},
        {"dynamic": {r"-:.*\.mlp\.experts.*": {}}},
        {"extra_config": {f"model.layers.{i}.block_sparse_moe.experts": {"bits": 16} for i in range(4)}},
    ],
)
def test_experts_that_are_left_out(out: Mapping[str, Any]) -> None:
    stored = expert_weights({"quantization_config": {**FP8, **out}}, "c", layers=4)
    assert stored is not None
    assert stored.format == "bf16"
    assert stored.remarks == ("c: the quantisation leaves the experts out: they are bf16",)


@pytest.mark.parametrize(
    "out",
    [
        {"modules_to_not_convert": ["model.layers.1", "model.layers.3.mlp.experts"]},
        {"exclude_modules": ["model.layers.1.*", "model.layers.3.mlp*"]},
        {"ignore": [r"re:model\.layers\.[13]\.mlp\.experts\..*"]},
    ],
)
def test_experts_of_some_layers_are_left_out(out: Mapping[str, Any]) -> None:
    stored = expert_weights({"quantization_config": {**FP8, **out}}, "c", layers=20)
    assert stored is not None
    assert stored.format == "fp8_block"
    assert stored.remarks == ("c: the experts of layers 1, 3 are left out of fp8_block: they are bf16",)


@pytest.mark.parametrize("word", ["mlp.gate", "gate", "shared_experts", "model.layers.0.mlp.shared_expert", "visual"])
def test_words_beside_the_experts_leave_them_in(word: str) -> None:
    stored = expert_weights({"quantization_config": {**FP8, "modules_to_not_convert": [word]}}, "c", layers=2)
    assert stored is not None
    assert (stored.format, stored.remarks) == ("fp8_block", ())


def test_the_group_that_names_the_experts_goes_before_that_of_all_layers() -> None:
    config = compressed(weights(8, "float", "channel"), DYNAMIC)
    group = {"targets": [r"re:.*mlp\.experts.*"], "weights": weights(4, "float", "tensor_group", group_size=16)}
    config["config_groups"]["group_1"] = group
    stored = expert_weights({"quantization_config": config}, "c")
    assert stored is not None
    assert stored.format == "nvfp4"
    config["config_groups"] = {"group_0": {**group, "targets": ["re:.*self_attn.*"]}}
    stored = expert_weights({"quantization_config": config}, "c")
    assert stored is not None
    assert stored.format == "bf16"


GPTQ = {"bits": 4, "group_size": 128, "quant_method": "gptq", "sym": True}
ROUND = {**GPTQ, "quant_method": "auto-round"}


@pytest.mark.parametrize(
    ("quantised", "format", "remarks"),
    [
        ({**GPTQ, "dynamic": {r"+:.*\.experts\..*": {"bits": 8}}}, "int8_g128", ()),
        ({**GPTQ, "dynamic": {r"+:.*self_attn.*": {"bits": 8}, r"-:.*\.gate$": {}}}, "int4_g128", ()),
        (
            {**GPTQ, "dynamic": {r"+:.*\.(?:1[0-5])\..*": {"bits": 8, "group_size": 64}}},
            "int4_g128",
            ("the experts of layers 10, 11, 12, 13, 14, 15 are int8_g64, not int4_g128",),
        ),
        (
            {**GPTQ, "dynamic": {r"-:.*layers\.2\..*": {}, r".*layers\.3\..*experts.*": {"sym": False}}},
            "int4_g128",
            (
                "the experts of layers 2 are left out of int4_g128: they are bf16",
                "the experts of layers 3 are int4_g128_zp, not int4_g128",
            ),
        ),
        (
            {**GPTQ, "dynamic": {r".*down_proj.*": {"bits": 8}}},
            "mixed",
            ("the config gives the experts of a layer several formats: there is no one to build for",),
        ),
        ({**ROUND, "extra_config": {r".*experts.*": {"group_size": 32}}}, "int4_g32", ()),
        ({**ROUND, "extra_config": {f"model.layers.{i}.mlp.gate": {"bits": 16} for i in range(20)}}, "int4_g128", ()),
        (
            {
                **ROUND,
                "extra_config": {
                    f"model.layers.7.mlp.experts.{e}.{name}": {"bits": 2}
                    for e in range(4)
                    for name in ("gate_proj", "up_proj", "down_proj")
                },
            },
            "int4_g128",
            ("the experts of layers 7 are int2_g128, not int4_g128",),
        ),
        (
            {**ROUND, "extra_config": {"model.layers.7.mlp.experts.2.down_proj": {"bits": 2}}},
            "int4_g128",
            ("the experts of layers 7 are mixed, not int4_g128",),
        ),
    ],
)
def test_settings_of_single_modules(quantised: Mapping[str, Any], format: str, remarks: tuple[str, ...]) -> None:
    stored = expert_weights({"quantization_config": quantised}, "c", layers=20, experts=4)
    assert stored is not None
    assert (stored.format, stored.remarks) == (format, tuple(f"c: {remark}" for remark in remarks))


def test_groups_of_some_layers() -> None:
    config = compressed(weights(8, "float", "channel"), DYNAMIC)
    config["config_groups"]["group_1"] = {
        "targets": [r"re:.*layers\.[2-4]\..*experts.*"],
        "weights": weights(4, "float", "tensor_group", group_size=16),
    }
    stored = expert_weights({"quantization_config": config}, "c", layers=9)
    assert stored is not None
    assert stored.format == "fp8_channel"
    assert stored.remarks == ("c: the experts of layers 2, 3, 4 are nvfp4, not fp8_channel",)


@pytest.mark.parametrize("place", [("text_config",), ("thinker_config", "text_config"), ("llm_config",)])
def test_a_composite_models_config(place: tuple[str, ...]) -> None:
    """Kimi-K2.5 has its quantization_config in text_config."""
    config: dict[str, Any] = {"quantization_config": PUBLISHED["Kimi-K2-Thinking"][0]}
    for key in place:
        config = {"model_type": "x", key: config}
    stored = expert_weights(config, "c", layers=61)
    assert stored is not None
    assert stored.format == "int4_g32"
    inner: dict[str, Any] = {"expert_dtype": "fp4"}
    for key in place:
        inner = {key: inner}
    stored = expert_weights({**inner, "quantization_config": FP8}, "c")  # DeepSeek-V4's word inside, its config outside
    assert stored is not None
    assert stored.format == "mxfp4"


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ("fp8", 'quantization_config is "fp8", wanted an object'),
        ({**FP8, "weight_block_size": 128}, r"weight_block_size is 128, wanted \[128, 128\]"),
        ({**FP8, "weight_block_size": ["a", 1]}, r'weight_block_size is \["a", 1\], wanted'),
        ({"quant_method": "gptq", "bits": "4"}, 'bits is "4", wanted a number'),
        ({**FP8, "ignore": ["re:("]}, r'"re:\(" is no regular expression'),
        ({**FP8, "dynamic": {"+:(": {}}}, r'"re:\(" is no regular expression'),
        ({**FP8, "dynamic": {".*": 5}}, r"dynamic of '\.\*' is a int, wanted a dict"),
        ({**FP8, "extra_config": []}, r"extra_config is a list, wanted a dict"),
    ],
)
def test_refused(config: object, message: str) -> None:
    with pytest.raises(InputError, match=f"^c: .*{message}"):
        expert_weights({"quantization_config": config}, "c")


WORDS = st.sampled_from(
    [
        "quant_method",
        "fp8",
        "mxfp4",
        "compressed-tensors",
        "config_groups",
        "weights",
        "targets",
        "Linear",
        "ignore",
        "quant_algo",
        "dynamic",
        "extra_config",
        "weight_block_size",
        "num_bits",
        "strategy",
        "group",
        "bits",
        "re:.*",
        "*",
    ]
)
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 200) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=6),
    max_leaves=15,
)


@pytest.mark.slow
@settings(max_examples=200)
@given(st.dictionaries(WORDS, VALUES, max_size=8))
def test_any_object_is_a_format_or_an_input_error(quantised: dict[str, object]) -> None:
    try:
        stored = expert_weights({"quantization_config": quantised}, "c", layers=3)
    except InputError:
        return
    assert stored is None or stored.format


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
        assert all(f".{part}." in lines for part in slices)


def test_what_is_no_regular_expression() -> None:
    with pytest.raises(InputError, match=r'^c: quantization_config: "re:\(" is no regular expression that'):
        left_out(["*a*", "re:("], LAYERS, "c")


@pytest.mark.parametrize("end", ["self_attn*", "mlp.experts*"])
def test_globs_of_each_layer_take_little(end: str) -> None:
    """Checkpoints of more than a hundred layers list such globs: they are read within the time limit."""
    ends = ("self_attn*", "mlp.gate*", "mlp.shared_experts*", end)
    names = [f"model.layers.{layer}.{end}" for layer in range(118) for end in ends]
    assert left_out(names, 118, "c") == (list(range(118)) if "mlp.experts*" in ends else [])
