"""The experts of every family of transformers, as its classes build them, against what its config.json is read as."""

from __future__ import annotations

import importlib
import inspect
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from stockexperts import families

from pretuned.aot.models.catalogue import find
from pretuned.aot.models.hf_config import EXPERTS, PER_TOKEN, WIDTHS, layers_of
from pretuned.aot.models.layer import ExpertLayer
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Layout

INTERFACE = families()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore"),  # transformers' own
]

E, K, WIDTH = 24, 2, 840  # like no default, so that no two sizes are taken for each other
# What a class needs beside: fields that its defaults lack, and whose experts are of a size that others decide.
MORE: dict[str, dict[str, Any]] = {
    "deepseek_ocr2": {"text_config": {"mlp_layer_types": ["dense", "sparse", "sparse"], "num_hidden_layers": 3}},
    "dots1": {"n_shared_experts": 1},
    "gemma4": {"text_config": {"enable_moe_block": True}},
    "hunyuan_v1_moe": {"head_dim": 128},
    "lfm2_moe": {"layer_types": ["full_attention"] * 32},
    "qwen3_omni_moe": {
        "talker_config": {"text_config": {"shared_expert_intermediate_size": 64}, "spatial_merge_size": 2}
    },
    "qwen4_exp": {
        "text_config": {
            "indexer_n_heads": 4,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 256,
            "indexer_budget": 64,
            "indexer_compress_ratio": 4,
        }
    },
    "zaya": {"num_experts_per_tok": 1},
}


class Experts(NamedTuple):
    """One kind of experts: the weights of both GEMMs as [E, N, K], and how they are held."""

    first: tuple[int, ...]
    second: tuple[int, ...]
    gated: bool
    transposed: bool
    bias: bool
    interleaved: bool
    norm: bool


def classes(kind: str) -> tuple[Any, list[Any]]:
    """A family's config class, of its whole model where it has several, and the models made of it."""
    transformers = pytest.importorskip("transformers", minversion="5.23")
    configs = importlib.import_module(f"transformers.models.{kind}.configuration_{kind}")
    modeling = importlib.import_module(f"transformers.models.{kind}.modeling_{kind}")
    models: dict[Any, list[Any]] = {getattr(configs, name): [] for name in configs.__all__}
    for value in vars(modeling).values():
        if isinstance(value, type) and issubclass(value, transformers.PreTrainedModel) and value.config_class in models:
            models[value.config_class].append(value)
    whole = max(
        models,
        key=lambda config_class: (
            len(config_class.sub_configs),
            config_class.model_type == kind,
            len(models[config_class]),
        ),
    )
    return whole, models[whole]


def config_and_model(kind: str) -> tuple[Any, Any]:
    """A family's whole model on the meta device, with the sizes above where its class has them, and its config."""
    config_class, models = classes(kind)
    from transformers.initialization import no_init_weights

    config = config_class(**merged(sized(config_class), MORE.get(kind, {})))
    models = [candidate for candidate in models if "PreTrained" not in candidate.__name__]
    model_class = max(
        models, key=lambda candidate: ("ForCondition" in candidate.__name__, candidate.__name__.endswith("Model"))
    )
    with torch.device("meta"), no_init_weights():
        return model_class._from_config(config), config


def sized(config_class: Any) -> dict[str, Any]:
    """The fields that give the experts of a config, and of those inside it, sizes of ours."""
    plain = config_class().to_dict()
    sizes: dict[str, Any] = {}
    if any(key in plain for key in EXPERTS):
        for names, value in ((EXPERTS, E), (PER_TOKEN, K), ((*WIDTHS, "intermediate_size"), WIDTH)):
            name = next(key for key in names if key in plain)
            sizes[name] = [value + i for i in range(len(plain[name]))] if isinstance(plain[name], list) else value
    for name, inner in config_class.sub_configs.items():
        if isinstance(plain.get(name), dict) and hasattr(inner, "sub_configs") and (sized_inner := sized(inner)):
            sizes[name] = sized_inner
    return sizes


def merged(config: Mapping[str, Any], more: Mapping[str, Any]) -> dict[str, Any]:
    inner = {name: merged(config.get(name, {}), value) for name, value in more.items() if isinstance(value, dict)}
    return {**config, **more, **inner}


def experts_of(model: Any) -> Iterator[Experts]:
    for module in model.modules():
        if hasattr(module, "has_gate") and hasattr(module, "is_transposed"):
            first = module.gate_up_proj if module.has_gate else module.up_proj
            shapes = [tuple(w.shape) for w in (first, module.down_proj)]
            if module.is_transposed:
                shapes = [(E, N, K) for E, K, N in shapes]
            interleaved = module.has_gate and not module.is_concatenated
            yield Experts(
                *shapes,
                module.has_gate,
                module.is_transposed,
                module.has_bias,
                interleaved,
                module.has_post_expert_norm,
            )


def as_read(layer: ExpertLayer) -> Experts:
    E, H, width = layer.E, layer.H, layer.I
    first = (E + layer.zero_experts, 2 * width if layer.gated else width, H)
    return Experts(
        first,
        (E, H, width),
        layer.gated,
        Layout.KN in layer.layouts,
        "bias" in layer.note,
        "interleaved" in layer.note,
        "norm" in layer.note,
    )


def read(config: Any) -> tuple[ExpertLayer, ...]:
    return layers_of(json.loads(config.to_json_string()), "c")[0]


def test_every_family_with_the_interface_is_tried() -> None:
    assert len(INTERFACE) >= 60


@pytest.mark.parametrize("kind", INTERFACE)
def test_experts_are_read_as_the_classes_build_them(kind: str) -> None:
    model, config = config_and_model(kind)
    built = set(experts_of(model))
    assert built
    assert {as_read(layer) for layer in read(config)} == built


def test_zero_experts_have_rows_in_the_first_weights_alone() -> None:
    model, config = config_and_model("longcat_flash")
    (layer,) = read(config)
    shapes = {tuple(parameter.shape) for name, parameter in model.named_parameters() if ".experts." in name}
    assert shapes == {as_read(layer).first, as_read(layer).second}
    assert as_read(layer).first[0] == E + layer.zero_experts > E


def test_experts_in_attention_are_a_layer_of_their_own() -> None:
    model, config = config_and_model("jetmoe")
    mlp, attention = read(config)
    assert attention.part == "attention"
    built = {tuple(parameter.shape) for name, parameter in model.named_parameters() if name.endswith("_linear.weight")}
    assert built == {shape for module in (mlp, attention) for shape in (as_read(module).first, as_read(module).second)}


def test_llama4_has_its_own_code_and_w_as_kn() -> None:
    model, config = config_and_model("llama4")
    (layer,) = read(config)
    first, second = as_read(layer).first, as_read(layer).second
    built = {tuple(parameter.shape) for name, parameter in model.named_parameters() if ".experts." in name}
    assert built == {(e, k, n) for e, n, k in (first, second)}
    assert Layout.KN in layer.layouts


def test_experts_that_are_no_matrices_are_refused() -> None:
    transformers = pytest.importorskip("transformers", minversion="5.23")
    with pytest.raises(InputError, match=r"model_type 'doge': its experts are rows of two embeddings"):
        read(transformers.DogeConfig(is_moe=True))


# Families whose class names another model than the catalogue's flagship.
FLAGSHIPS = {
    "deepseek_v3": "deepseek-ai/DeepSeek-V3",
    "gemma4": "google/gemma-4-26B-A4B-it",
    "glm4_moe": "zai-org/GLM-4.5-Air",  # the defaults are Air's
    "glm4_moe_lite": "zai-org/GLM-4.7-Flash",
    "granitemoe": "ibm-granite/granite-3.0-1b-a400m-base",
    "granitemoehybrid": "ibm-granite/granite-4.0-h-small",
    "granitemoeshared": "ibm-research/moe-7b-1b-active-shared-experts",
    "minimax_m2": "MiniMaxAI/MiniMax-M2.5",
}


def flagship(kind: str) -> str:
    source = Path(inspect.getfile(classes(kind)[0])).read_text(encoding="utf-8")
    return FLAGSHIPS.get(kind) or re.findall(r'checkpoint="([^"]+)"', source)[-1]


@pytest.mark.parametrize("kind", [*INTERFACE, "jetmoe", "longcat_flash"])
def test_the_catalogue_has_each_family_s_flagship_and_its_class_s_sizes(kind: str) -> None:
    names = {"jetmoe": "jetmoe/jetmoe-8b", "longcat_flash": "meituan-longcat/LongCat-Flash-Chat"}
    match = find(names.get(kind) or flagship(kind))
    assert match is not None
    if match.entry.source == "config":
        return
    layers = layers_of(json.loads(classes(kind)[0]().to_json_string()), "c")[0]
    listed = match.layers
    assert [replace(layer, weights="", note="") for layer in layers[: len(listed)]] == [
        replace(layer, weights="", note="") for layer in listed
    ]
