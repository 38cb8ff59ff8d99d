"""Each family's config.json as its models publish it, cut to the fields that matter and the traps beside them."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pretuned.aot.models import hf_config
from pretuned.aot.models.hf_config import layers_of, read_model
from pretuned.aot.models.layer import ExpertLayer
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.limits import is_label
from pretuned.artifacts.records import Layout
from pretuned.kernels.activations import Activation

DEEPSEEK = {
    "model_type": "deepseek_v3",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "first_k_dense_replace": 3,
    "n_group": 8,
    "topk_group": 4,
}
QWEN3 = {
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "decoder_sparse_step": 1,
    "torch_dtype": "bfloat16",
}
LLAMA4_TEXT = {
    "model_type": "llama4_text",
    "hidden_size": 5120,
    "intermediate_size": 8192,
    "intermediate_size_mlp": 16384,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
    "interleave_moe_layer_step": 1,
}


def layer_of(config: Mapping[str, object], where: str) -> tuple[ExpertLayer, tuple[str, ...]]:
    """Of a config with one kind of experts."""
    (layer,), remarks = layers_of(config, where)
    return layer, remarks


def mixtral_like(model_type: str, **more: object) -> dict[str, object]:
    return {
        "model_type": model_type,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        **more,
    }


def with_types(config: Mapping[str, object], *model_types: str) -> list[dict[str, object]]:
    return [{**config, "model_type": model_type} for model_type in model_types]


OAI = Activation("swiglu_oai")
MIXTRAL = ExpertLayer(8, 2, 4096, 14336)
QWEN3_LAYER = ExpertLayer(128, 8, 2048, 768)
DEEPSEEK_LAYER = ExpertLayer(256, 8, 7168, 2048, 2048)

# model types (of a config, and of the text_config in it): fields -> E, k, H, I, and the width of shared experts.
TABLE = """
olmoe flex_olmo jamba: hidden_size=2048 intermediate_size=1024 num_experts=64 num_experts_per_tok=8 -> 64,8,2048,1024
ernie4_5_moe: hidden_size=2560 intermediate_size=12288 moe_intermediate_size=1536 moe_num_experts=64 moe_k=6
    moe_num_shared_experts=2 -> 64,6,2560,1536,3072
hunyuan_v1_moe: hidden_size=4096 intermediate_size=3072 num_experts=64 moe_topk=[8,8,8]
    moe_intermediate_size=[3072,3072,3072] num_shared_expert=[1,1,1] -> 64,8,4096,3072,3072
hunyuan: hidden_size=6400 intermediate_size=18304 num_experts=16 moe_topk=1 moe_intermediate_size=null
    num_shared_expert=1 -> 16,1,6400,18304,18304
longcat_flash: hidden_size=6144 ffn_hidden_size=12288 expert_ffn_hidden_size=2048 n_routed_experts=512
    zero_expert_num=256 moe_topk=12 -> 512,12,6144,2048
gemma4/gemma4_text: hidden_size=2816 intermediate_size=2112 moe_intermediate_size=704 num_experts=128 top_k_experts=8
    enable_moe_block=true -> 128,8,2816,704
nemotron_h: hidden_size=2688 intermediate_size=1856 moe_intermediate_size=1856 n_routed_experts=128
    num_experts_per_tok=6 n_shared_experts=1 moe_shared_expert_intermediate_size=3712 moe_latent_size=null ->
    128,6,2688,1856,3712
step3p5: hidden_size=4096 intermediate_size=11264 moe_num_experts=288 moe_top_k=8 moe_intermediate_size=1280
    share_expert_dim=1280 -> 288,8,4096,1280,1280
step3_vl/step3_text: hidden_size=7168 intermediate_size=18432 moe_num_experts=48 moe_top_k=3
    moe_intermediate_size=5120 share_expert_dim=5120 -> 48,3,7168,5120,5120
muse_spark/muse_spark_text: hidden_size=8192 intermediate_size=32768 moe_intermediate_size=4096 moe_hidden_size=4096
    num_local_experts=256 num_experts_per_tok=8 -> 256,8,4096,4096
afmoe: hidden_size=2048 intermediate_size=6144 moe_intermediate_size=1024 num_expert_groups=1 num_experts=128
    num_experts_per_tok=8 num_limited_groups=1 num_shared_experts=1 -> 128,8,2048,1024,1024
exaone_moe: hidden_size=6144 intermediate_size=18432 is_moe_layer=[false,true] moe_intermediate_size=2048
    num_experts=128 num_experts_per_tok=8 num_shared_experts=1 -> 128,8,6144,2048,2048
cohere2_vision/cohere2_moe: hidden_size=4096 intermediate_size=4096 num_experts=128 num_experts_per_tok=8
    num_shared_experts=4 -> 128,8,4096,4096,16384
granitemoe_swa: hidden_size=1280 intermediate_size=512 num_local_experts=48 num_experts_per_tok=4
    shared_intermediate_size=1280 -> 48,4,1280,512,1280
aria/aria_text: hidden_size=2560 intermediate_size=1664 moe_num_experts=64 moe_topk=6 moe_num_shared_experts=2 ->
    64,6,2560,1664,3328
openai_privacy_filter: hidden_size=640 intermediate_size=640 num_local_experts=128 num_experts_per_tok=4 ->
    128,4,640,640
inkling_text: hidden_size=6144 intermediate_size=3072 dense_intermediate_size=24576 n_routed_experts=256
    num_experts_per_tok=6 n_shared_experts=2 -> 256,6,6144,3072,6144
"""
KN = (Layout.NK, Layout.KN)
MORE: dict[str, dict[str, Any]] = {
    "aria": {"layouts": KN},
    "longcat_flash": {"note": "256 more experts without weights", "zero_experts": 256},
    "muse_spark": {"note": "a norm after each expert"},
    "nemotron_h": {"gated": False},
    "openai_privacy_filter": {"note": "bias", "layouts": KN, "activation": OAI},
}


def tabled() -> Iterator[tuple[Mapping[str, object], ExpertLayer]]:
    for names, fields, numbers in re.findall(r"(.+?): (.+?) -> (.+)", TABLE.replace("\n    ", " ")):
        read = {name: json.loads(value) for name, value in (field.split("=") for field in fields.split())}
        for name in names.split():
            outer, *inner = name.split("/")
            config = {"text_config": {"model_type": inner[0], **read}} if inner else read
            yield {"model_type": outer, **config}, ExpertLayer(*map(int, numbers.split(",")), **MORE.get(outer, {}))


FAMILIES: list[tuple[Mapping[str, object], ExpertLayer]] = [
    *(
        (mixtral_like(model_type), MIXTRAL)
        for model_type in ("mixtral", "phimoe", "granitemoe", "minimax", "minimax_m2")
    ),
    (mixtral_like("granitemoeshared", shared_intermediate_size=1024), ExpertLayer(8, 2, 4096, 14336, 1024)),
    (
        {
            "model_type": "gpt_oss",
            "hidden_size": 2880,
            "intermediate_size": 2880,
            "num_local_experts": 32,
            "num_experts_per_tok": 4,
            "experts_per_token": 4,
            "quantization_config": {"quant_method": "mxfp4", "modules_to_not_convert": ["lm_head"]},
        },
        ExpertLayer(
            32,
            4,
            2880,
            2880,
            weights="mxfp4",
            note="bias; gate and up interleaved",
            layouts=(Layout.NK, Layout.KN),
            activation=OAI,
        ),
    ),
    (QWEN3, QWEN3_LAYER),
    *(
        (config, ExpertLayer(128, 8, 2048, 768, 512))
        for config in with_types({**QWEN3, "shared_expert_intermediate_size": 512}, "qwen2_moe", "qwen3_next")
    ),
    (
        {
            "model_type": "qwen3_vl_moe",
            "text_config": {**QWEN3, "model_type": "qwen3_vl_moe_text"},
            "vision_config": {"hidden_size": 1152, "intermediate_size": 4304},
        },
        QWEN3_LAYER,
    ),
    (
        {
            "model_type": "qwen3_5_moe",
            "hidden_size": 1,
            "text_config": {
                "model_type": "qwen3_5_moe_text",
                "hidden_size": 2048,
                "moe_intermediate_size": 512,
                "num_experts": 256,
                "num_experts_per_tok": 8,
                "shared_expert_intermediate_size": 512,
            },
        },
        ExpertLayer(256, 8, 2048, 512, 512),
    ),
    ({"model_type": "qwen3_omni_moe", "thinker_config": {"text_config": QWEN3}}, QWEN3_LAYER),
    *(
        (config, DEEPSEEK_LAYER)
        for config in with_types(
            DEEPSEEK,
            "deepseek_v2",
            "deepseek_v3",
            "deepseek_v32",
            "deepseek_v4",
            "glm4_moe",
            "glm_moe_dsa",
            "kimi_k2",
            "dots1",
            "mimo_v2_flash",
        )
    ),
    ({"model_type": "kimi_vl", "text_config": DEEPSEEK}, DEEPSEEK_LAYER),
    (
        {"model_type": "llama4", "text_config": LLAMA4_TEXT, "vision_config": {"hidden_size": 1408}},
        ExpertLayer(16, 1, 5120, 8192, 8192, layouts=(Layout.NK, Layout.KN)),
    ),
    (
        {
            "model_type": "dbrx",
            "d_model": 6144,
            "ffn_config": {
                "moe_num_experts": 16,
                "moe_top_k": 4,
                "ffn_hidden_size": 10752,
                "ffn_act_fn": {"name": "silu"},
            },
        },
        ExpertLayer(16, 4, 6144, 10752),
    ),
    *tabled(),
]


@pytest.mark.parametrize(("config", "layer"), FAMILIES, ids=[str(config["model_type"]) for config, layer in FAMILIES])
def test_family(config: Mapping[str, object], layer: ExpertLayer) -> None:
    assert layer_of(config, "config.json") == (layer, ())


def test_latent_width_replaces_hidden() -> None:
    layer, remarks = layer_of(
        {
            "model_type": "nemotron_h",
            "hidden_size": 4096,
            "moe_intermediate_size": 2688,
            "n_routed_experts": 512,
            "num_experts_per_tok": 22,
            "moe_latent_size": 1024,
            "moe_shared_expert_intermediate_size": 5376,
        },
        "c",
    )
    assert (layer.H, layer.I, layer.gated, layer.shared_width) == (1024, 2688, False, 0)
    assert "full hidden width" in layer.note
    assert remarks == ()


def test_unknown_family_is_read_by_field_names() -> None:
    assert layer_of({**QWEN3, "model_type": "new"}, "c") == (QWEN3_LAYER, ())
    layer, (remark,) = layer_of(mixtral_like("new"), "c")
    assert layer == MIXTRAL
    assert "unknown model_type 'new': the expert width is taken from intermediate_size" in remark


NO_DTYPE = {name: value for name, value in QWEN3.items() if name != "torch_dtype"}


@pytest.mark.parametrize(
    "config",
    [
        {**QWEN3, "torch_dtype": "float16"},
        {**NO_DTYPE, "dtype": "float16"},
        {"model_type": "x_vl", "text_config": NO_DTYPE, "torch_dtype": "float16"},
        {"model_type": "x_vl", "text_config": NO_DTYPE, "dtype": "float16"},
    ],
)
def test_fp16_checkpoint_is_reported(config: Mapping[str, object]) -> None:
    layer, (remark,) = layer_of(config, "c")
    assert layer == QWEN3_LAYER
    assert "dtype=fp16" in remark


def test_quantised_at_the_top_of_a_nested_config() -> None:
    config = {"model_type": "x_vl", "text_config": QWEN3, "quantization_config": {"quant_method": "fp8"}}
    assert layer_of(config, "c")[0].weights == "fp8_channel"


ERNIE_VL = {
    "model_type": "ernie4_5_moe_vl",
    "hidden_size": 2560,
    "intermediate_size": 12288,
    "moe_num_experts": [64, 64],
    "moe_k": 6,
    "moe_intermediate_size": [1536, 512],
    "moe_num_shared_experts": 2,
}


def test_two_kinds_of_experts_in_one_layer() -> None:
    text, vision = layers_of(ERNIE_VL, "c")[0]
    assert text == ExpertLayer(64, 6, 2560, 1536, 3072)
    assert vision == ExpertLayer(64, 6, 2560, 512, part="vision")
    for change in ({"moe_num_experts": 64}, {"model_type": "ernie4_5_vl_moe", "moe_k": [6, 6]}):
        assert layers_of({**ERNIE_VL, **change}, "c")[0] == (text, vision)


def test_a_second_model_inside_has_its_experts_read() -> None:
    talker = {**QWEN3, "hidden_size": 1024, "moe_intermediate_size": 384, "num_experts_per_tok": 6}
    config = {
        "model_type": "qwen3_omni_moe",
        "thinker_config": {"text_config": QWEN3, "audio_config": {"d_model": 1280}},
        "talker_config": {"text_config": {**talker, "shared_expert_intermediate_size": 768}, "num_code_groups": 16},
        "code2wav_config": {"hidden_size": 1024, "intermediate_size": 3072},
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]},
    }
    layers, remarks = layers_of(config, "c")
    assert layers == (
        replace(QWEN3_LAYER, weights="fp8_block"),
        ExpertLayer(128, 6, 1024, 384, 768, part="talker"),
    )
    assert remarks == ()
    (only,), (remark,) = layers_of({**config, "talker_config": {"num_experts": 4}}, "c")
    assert only == layers[0]
    assert remark.startswith("c: the experts of talker_config are left out: model_type '' with 4 experts lacks")


def test_experts_whose_number_differs_between_layers() -> None:
    tower = {
        "model_type": "dots3_note_vision_encoder",
        "hidden_size": 1536,
        "moe_intermediate_size": 2112,
        "num_local_experts": 64,
        "num_experts_per_tok": 2,
    }
    changes = {str(i): {"num_local_experts": E} for i, E in ((25, 4), (26, 8), (27, 8))}
    main, *vision = layers_of({**DEEPSEEK, "vision_config": {**tower, "per_layer_config": changes}}, "c")[0]
    assert main == DEEPSEEK_LAYER
    assert [(layer.part, layer.E, layer.I) for layer in vision] == [
        ("vision", 64, 2112),
        ("vision-E4", 4, 2112),
        ("vision-E8", 8, 2112),
    ]
    raw = {"embed_dim": 1536, "moe_intermediate_size": 2112, "pyramid_num_routed": [-1, -1, 4, 8, 8]}
    _, *vision = layers_of({**DEEPSEEK, "vision_config": raw}, "c")[0]
    assert [(layer.part, layer.E, layer.k, layer.H) for layer in vision] == [
        ("vision-E4", 4, 2, 1536),
        ("vision-E8", 8, 2, 1536),
    ]


def test_experts_in_attention() -> None:
    config = {
        "model_type": "jetmoe",
        "hidden_size": 2048,
        "intermediate_size": 5632,
        "kv_channels": 128,
        "num_key_value_heads": 16,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    }
    mlp, attention = layers_of(config, "c")[0]
    assert mlp == ExpertLayer(8, 2, 2048, 5632)
    assert (attention.part, attention.I, attention.gated) == ("attention", 2048, False)
    with pytest.raises(InputError, match=r"c: I=0: wanted 1 to"):
        layers_of({**config, "kv_channels": None}, "c")


def test_modelopt_writes_a_file_beside(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(QWEN3))
    assert read_model(tmp_path).layers[0].weights == "bf16"
    beside = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4", "group_size": 16}}
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(beside))
    assert read_model(tmp_path).layers[0].weights == "nvfp4"
    (tmp_path / "hf_quant_config.json").write_text("[]")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: holds \[\], wanted a JSON object"):
        read_model(tmp_path)


def test_a_number_with_a_point() -> None:
    assert layer_of({**QWEN3, "num_experts": 128.0, "num_experts_per_tok": 8.0}, "c")[0] == QWEN3_LAYER


@pytest.mark.parametrize("nothing", [0, None])
def test_layers_without_experts_in_a_list(nothing: object) -> None:
    lists = {
        "num_experts": [nothing, 128, 128],
        "moe_intermediate_size": [nothing, 768, 768],
        "num_experts_per_tok": [nothing, 8, 8],
    }
    assert layer_of({**QWEN3, **lists}, "c")[0] == QWEN3_LAYER
    with pytest.raises(InputError, match=r"moe_intermediate_size differs between layers \(512, 768\)"):
        layer_of({**QWEN3, "moe_intermediate_size": [nothing, 512, 768]}, "c")


def test_the_params_of_mistral(tmp_path: Path) -> None:
    own = {
        "dim": 4096,
        "n_layers": 32,
        "head_dim": 128,
        "hidden_dim": 14336,
        "n_heads": 32,
        "vocab_size": 32000,
        "moe": {"num_experts_per_tok": 2, "num_experts": 8},
    }
    (tmp_path / "params.json").write_text(json.dumps(own))
    for path in (tmp_path, tmp_path / "params.json"):
        model = read_model(path)
        assert model.layers == (MIXTRAL,)
        assert model.name == tmp_path.name  # as of a config.json
        assert not model.remarks
    own["moe"] = {"num_experts_per_tok": 4, "num_experts": 128, "expert_hidden_dim": 4096, "num_shared_experts": 1}
    assert layers_of({**own, "dim": 7168}, "c")[0] == (ExpertLayer(128, 4, 7168, 4096, 4096),)
    with pytest.raises(InputError, match="looks dense"):
        layers_of({"dim": 4096, "hidden_dim": 14336}, "c")


@pytest.mark.parametrize("nested", [False, True])
def test_sizes_of_each_layer(nested: bool) -> None:
    """A Nemotron-H whose sizes were searched for has them in an object a layer."""

    def block(experts: int, width: int) -> dict[str, object]:
        sizes = {"n_routed_experts": experts, "moe_intermediate_size": width, "num_experts_per_tok": 6}
        return {"block_type": "moe", **({"moe": sizes} if nested else sizes)}

    config: dict[str, object] = {"model_type": "nemotron_h", "hidden_size": 2688, "n_shared_experts": 1}
    dense: list[object] = [{"block_type": "mamba"}, {"block_type": "mlp", "intermediate_size": 8192}]
    config["block_configs"] = [*dense, block(128, 1856), block(128, 1856)]
    assert layers_of(config, "c")[0] == (ExpertLayer(128, 6, 2688, 1856, 1856, gated=False),)
    config["block_configs"] = [*dense, block(128, 1856), block(96, 1856), block(96, 1280), block(96, 1856)]
    layers = layers_of(config, "c")[0]
    assert [(layer.part, layer.E, layer.I) for layer in layers] == [
        ("layers1", 128, 1856),
        ("layers2", 96, 1856),
        ("layers3", 96, 1280),
    ]
    config["block_configs"] = dense
    with pytest.raises(InputError, match="looks dense"):
        layers_of(config, "c")


LLAMA = {"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_attention_heads": 32}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (LLAMA, "no experts: found hidden_size, intermediate_size but none of num_experts, num_local_experts"),
        ({"model_type": "llava", "text_config": LLAMA}, "no experts"),
        ({**QWEN3, "num_experts": 0}, "no experts: num_experts is 0"),
        ({**QWEN3, "num_experts": None}, "none of num_experts"),
        (mixtral_like("granitemoehybrid", num_local_experts=0), "no experts: num_local_experts is 0"),
        ({}, "none of the fields of a language model"),
        ({**QWEN3, "num_experts": "128"}, 'num_experts is "128", wanted a whole number'),
        ({**QWEN3, "num_experts": True}, "num_experts is true"),
        ({**QWEN3, "num_experts": 128.5}, "num_experts is 128.5"),
        ({**QWEN3, "num_experts": {"a": 1}}, "wanted a whole number"),
        ({**QWEN3, "num_experts": 4}, "k=8 is more than E=4"),
        ({**QWEN3, "hidden_size": -1}, "H=-1: wanted 1 to"),
        ({**QWEN3, "hidden_size": 10**30}, "wanted 1 to"),
        ({**QWEN3, "num_local_experts": 64}, "num_experts=128, num_local_experts=64 mean the same and disagree"),
        ({**QWEN3, "moe_intermediate_size": None}, "'qwen3_moe' with 128 experts lacks moe_intermediate_size"),
        ({"num_experts": 4}, "lacks num_experts_per_tok or .*, and hidden_size or .* or embed_dim or dim, and moe"),
        ({**QWEN3, "quantization_config": "fp8"}, 'quantization_config is "fp8", wanted an object'),
        (
            {
                "model_type": "hunyuan",
                "hidden_size": 2560,
                "num_experts": 64,
                "moe_topk": 6,
                "moe_intermediate_size": [1536, 512],
            },
            r"moe_intermediate_size differs between layers \(512, 1536\); give each as a spec of its own",
        ),
        (
            {"model_type": "doge", "hidden_size": 64, "num_experts": 16384, "num_experts_per_tok": 64},
            "model_type 'doge': its experts are rows of two embeddings, not matrices: no grouped GEMM computes them",
        ),
        ({**QWEN3, "model_type": "gemma4_text", "enable_moe_block": False}, "num_experts is 128, and enable_moe"),
    ],
)
def test_refused(config: Mapping[str, object], message: str) -> None:
    with pytest.raises(InputError, match=message) as caught:
        layer_of(config, "dir/config.json")
    assert str(caught.value).startswith("dir/config.json: ")


NAMES = st.sampled_from(
    (
        *hf_config.EXPERTS[:4],
        "num_experts_per_tok",
        "hidden_size",
        "moe_intermediate_size",
        "intermediate_size",
        "ffn_config",
        "text_config",
        "model_type",
        "n_shared_experts",
        "quantization_config",
        "torch_dtype",
    )
)
LEAVES = st.none() | st.booleans() | st.integers(-2, 9) | st.just("qwen3_moe") | st.floats(allow_nan=False)
VALUES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=8), max_leaves=20
)


@pytest.mark.slow
@settings(max_examples=300)
@given(st.dictionaries(NAMES, VALUES, max_size=10))
def test_any_object_is_a_sound_layer_or_an_input_error(config: dict[str, object]) -> None:
    try:
        layers, _ = layers_of(config, "c")
    except InputError:
        return
    assert layers
    assert all(layer.contradictions() == [] for layer in layers)


def test_read_directory_and_file(tmp_path: Path) -> None:
    folder = tmp_path / "my model"
    folder.mkdir()
    file = folder / "config.json"
    file.write_text(json.dumps(QWEN3))
    (folder / "model.safetensors").touch()
    for path in (folder, file):
        model = read_model(path)
        assert (model.name, model.layers) == ("my-model", (QWEN3_LAYER,))
    other = tmp_path / "qwen.json"
    other.write_text(json.dumps(QWEN3))
    assert read_model(other).name == "qwen"


def test_name_in_the_cache_of_hugging_face(tmp_path: Path) -> None:
    snapshot = tmp_path / "models--Qwen--Qwen3-30B-A3B" / "snapshots" / "0123abc"
    snapshot.mkdir(parents=True)
    (tmp_path / "blob").write_text(json.dumps(QWEN3))
    (snapshot / "config.json").symlink_to(tmp_path / "blob")
    assert read_model(snapshot).name == "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize(
    ("path", "wanted"),
    [
        ("_hidden/config.json", "hidden"),
        ("a/...json", "model"),
        ("modèle (2)/config.json", "mod-le--2-"),
        ("models--org--a--b/snapshots/1/config.json", "org/a--b"),
        ("models--gpt2/config.json", "gpt2"),
        ("x" * 120 + "/config.json", "x" * 96),
    ],
)
def test_a_name_is_one_that_a_bundle_takes(tmp_path: Path, path: str, wanted: str) -> None:
    (tmp_path / path).parent.mkdir(parents=True)
    (tmp_path / path).write_text(json.dumps(QWEN3))
    name = read_model(tmp_path / path).name
    assert name == wanted
    assert is_label(name)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "damaged JSON"),
        (b'{"num_experts": 12', "damaged JSON: .*line 1 column"),
        (b"\xff\xfe\x00", "damaged JSON"),
        (b"[1, 2]", r"holds \[1, 2\], wanted a JSON object"),
        (b"[" * 200_000, "damaged JSON"),
        (b'{"num_experts": ' + b"9" * 5000 + b"}", "damaged JSON"),
    ],
)
def test_damaged_file(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "config.json").write_bytes(data)
    with pytest.raises(InputError, match=message):
        read_model(tmp_path)


def test_file_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(InputError, match=r"no config\.json in this directory"):
        read_model(tmp_path)
    with pytest.raises(InputError, match="x: no such file"):
        read_model(tmp_path / "x")
    with pytest.raises(InputError, match="File name too long"):
        read_model(tmp_path / ("x" * 300))
    os.mkfifo(tmp_path / "config.json")
    with pytest.raises(InputError, match="no regular file"):
        read_model(tmp_path)


def test_huge_file(tmp_path: Path) -> None:
    with (tmp_path / "config.json").open("wb") as stream:
        stream.truncate(1 << 40)
    with pytest.raises(InputError, match="larger than 8 MiB"):
        read_model(tmp_path)
