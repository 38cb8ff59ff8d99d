from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pretuned.aot.models.catalogue import COLUMNS, catalogue, find, nearest_ids, parse_table
from pretuned.aot.models.hf_config import layers_of
from pretuned.aot.models.layer import ExpertLayer
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.records import Fusion, Layout
from pretuned.kernels.activations import Activation

HEADER = "\t".join(COLUMNS) + "\n"
ROW = "org/A\t8\t2\t64\t32\t0\t0\t1\t-\tnk\t-\tconfig\t-\t-\t-\n"
# id -> where the fields of its config.json were read, how, and the fields of its experts and what decides their format.
PUBLISHED: dict[str, dict[str, Any]] = json.loads(Path(__file__).with_name("published.json").read_text())
FLAGSHIPS = (  # of 2026, as people type them, and what they get: E, k, H, I of the routed experts
    ("DeepSeek-V4-Flash", (256, 6, 4096, 2048)),
    ("DeepSeek-V4-Pro", (384, 6, 7168, 3072)),
    ("DeepSeek-V4.1-Flash", (384, 6, 5120, 2304)),
    ("Kimi-K3", (896, 16, 3584, 3072)),
    ("GLM-5.3", (256, 8, 6144, 2048)),
    ("GLM-5.3-Flash", (288, 8, 4096, 2048)),
    ("MiniMax-M3", (128, 4, 6144, 3072)),
    ("Hy4-preview", (256, 8, 6144, 2048)),
    ("Step-3.7-Flash", (288, 8, 4096, 1280)),
    ("MiMo-V2.5-Pro", (384, 8, 6144, 2048)),
    ("NVIDIA-Nemotron-3-Super-120B-A12B-BF16", (512, 22, 1024, 2688)),
    ("NVIDIA-Nemotron-3-Ultra-550B-A55B-BF16", (512, 22, 2048, 5120)),
    ("Inkling-2-Mini", (128, 8, 2304, 1152)),
    ("JoyAI-LLM-Flash", (256, 8, 2048, 768)),
)


def test_published_sizes() -> None:
    # From the models' config.json files: E, k, H, I, width of the shared experts.
    published = {
        "mistralai/Mixtral-8x7B-v0.1": (8, 2, 4096, 14336, 0),
        "Qwen/Qwen3-30B-A3B": (128, 8, 2048, 768, 0),
        "Qwen/Qwen1.5-MoE-A2.7B": (60, 4, 2048, 1408, 5632),
        "deepseek-ai/DeepSeek-V2": (160, 6, 5120, 1536, 3072),
        "deepseek-ai/DeepSeek-V3": (256, 8, 7168, 2048, 2048),
        "openai/gpt-oss-120b": (128, 4, 2880, 2880, 0),
    }
    for name, sizes in published.items():
        layer = catalogue()[name].layer
        assert (layer.E, layer.k, layer.H, layer.I, layer.shared_width) == sizes


def test_the_table_is_sound() -> None:
    entries = catalogue()
    assert len(entries) > 80
    names = [name for entry in entries.values() for name in (entry.id, *entry.aliases)]
    assert len({name.lower() for name in names}) == len(names)
    for name, entry in entries.items():
        assert name == entry.id
        assert entry.source in {"config", "class", "default"}
        assert entry.layer.contradictions() == []
        assert all(alias.count("/") == 1 for alias in (entry.id, *entry.aliases))


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_row_is_what_its_published_config_says(name: str) -> None:
    entry, published, match = catalogue()[name], PUBLISHED[name], find(name)
    layers, _ = layers_of(published["config"], name)
    assert match is not None
    for layer, listed in zip(layers, match.layers, strict=True):
        unsaid = {"weights"} if "quantization_config" not in json.dumps(published["config"]) else set()
        unsaid |= {"activation"} if layer.activation is None else set()
        assert replace(listed, **{field: getattr(layer, field) for field in unsaid}) == layer
    assert (entry.source, entry.where) == ("config", published["where"])
    assert published["where"].startswith("https://")
    assert published["read"]


def test_a_row_with_a_public_file_has_its_fields_in_the_tests() -> None:
    assert set(PUBLISHED) == {name for name, entry in catalogue().items() if entry.where}


@pytest.mark.parametrize(("name", "sizes"), FLAGSHIPS)
def test_the_flagships_are_found_planned_and_suggested(name: str, sizes: tuple[int, ...]) -> None:
    match = find(name)
    assert match is not None
    layer = match.layers[0]
    assert (layer.E, layer.k, layer.H, layer.I) == sizes
    degree = next(size for size in (8, 4, 2) if layer.E % size == 0)
    built = plan(load_models([f"{name} ep={degree} ops=forward tokens=1..1024"]).shapes)
    assert {(problem.E, problem.N, problem.K) for problem in built.problems} == {
        (layer.E // degree, (2 if layer.gated else 1) * layer.I, layer.H),
        (layer.E // degree, layer.H, layer.I),
    }
    assert match.id in nearest_ids(name[:-2] + name[-1])


def test_the_epilogue_with_silu_is_planned_for_no_other_activation() -> None:
    silu, limited, unknown = (
        any(problem.fusion & Fusion.SILU for problem in plan(load_models([spec]).shapes).problems)
        for spec in (
            "Qwen/Qwen3-30B-A3B ops=forward",
            "DeepSeek-V4-Flash weights=bf16 ops=forward",
            "shape:E=128,H=2048,I=768,k=8 ops=forward",
        )
    )
    assert (silu, limited, unknown) == (True, False, True)


def test_catalogue_is_read_only() -> None:
    with pytest.raises(TypeError):
        catalogue()["x"] = None  # type: ignore[index]


@pytest.mark.parametrize(
    ("word", "id_", "entry"),
    [
        ("Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("qwen/qwen3-30b-a3b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("Qwen3-30B-a3b", "Qwen/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3"),
        ("glm-4.7", "zai-org/GLM-4.7", "zai-org/GLM-4.6"),
    ],
)
def test_find(word: str, id_: str, entry: str) -> None:
    match = find(word)
    assert match is not None
    assert (match.id, match.entry.id) == (id_, entry)


def test_an_alias_has_the_format_of_its_own_checkpoint() -> None:
    for word, format_ in (
        ("Qwen/Qwen3-30B-A3B", "bf16"),
        ("Qwen/Qwen3-30B-A3B-FP8", "fp8_block"),
        ("Kimi-K2-Thinking", "int4_g32"),
        ("deepseek-ai/DeepSeek-R1", "fp8_block"),
        ("zai-org/GLM-4.5-Air-FP8", "fp8_channel"),
        ("openai/gpt-oss-20b", "mxfp4"),
        ("Mixtral-8x7B-Instruct-v0.1", "bf16"),
    ):
        match = find(word)
        assert match is not None
        assert match.layers[0].weights == format_
    assert catalogue()["Qwen/Qwen3-30B-A3B"].formats == ("bf16", "fp8_block", "int4_g128")
    assert catalogue()["moonshotai/Kimi-K2-Instruct"].formats == ("fp8_block", "int4_g32")


def test_a_model_has_all_its_kinds_of_experts() -> None:
    match = find("ERNIE-4.5-VL-28B-A3B-PT")
    assert match is not None
    assert [(layer.part, layer.I) for layer in match.layers] == [("", 1536), ("vision", 512)]
    entry = find("baidu/ERNIE-4.5-VL-28B-A3B-PT+vision")
    assert entry is not None
    assert [layer.part for layer in entry.layers] == ["vision"]


def test_find_nothing() -> None:
    assert find("Qwen/Qwen3-30B-A4B") is None
    assert find("other/Qwen3-30B-A3B") is None
    assert find("") is None


def test_nearest() -> None:
    assert nearest_ids("Qwen/Qwen3-30B-A4B")[0] == "Qwen/Qwen3-30B-A3B"
    assert nearest_ids("gpt-oss-20")[0] == "openai/gpt-oss-20b"
    assert "mistralai/Mixtral-8x7B-v0.1" in nearest_ids("mixtral")
    assert any("Mixtral" in name for name in nearest_ids("mixtrl"))
    assert nearest_ids("Qwen/Qwen3-Nxt")[0] == "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert nearest_ids("zzzzzzzz") == []


def test_parse_row() -> None:
    (entry,) = parse_table("# comment\n" + HEADER + ROW).values()
    assert entry.layer == ExpertLayer(8, 2, 64, 32)
    assert (entry.aliases, entry.formats) == ({}, ())
    (situ,) = parse_table(HEADER + ROW.replace("1\t-\tnk", "1\tsitu:beta=4,linear_beta=25\tnk")).values()
    assert situ.layer.activation == Activation("situ", beta=4.0, linear_beta=25.0)
    (both,) = parse_table(HEADER + ROW.replace("nk", "nk,kn")).values()
    assert both.layer.layouts == (Layout.NK, Layout.KN)


def test_models_whose_checkpoints_have_w_as_kn_are_held_in_both_ways() -> None:
    both = {name for name, entry in catalogue().items() if entry.layer.layouts == (Layout.NK, Layout.KN)}
    families = ("openai/", "meta-llama/Llama-4", "rhymes-ai/Aria")
    assert both == {name for name in catalogue() if name.startswith(families)}
    assert all(entry.layer.layouts == (Layout.NK,) for name, entry in catalogue().items() if name not in both)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must name the columns"),
        ("id\tE\n", "must name the columns"),
        (HEADER + "org/A\t8\n", "tsv:2: 2 fields, wanted 15"),
        (HEADER + ROW.replace("64", "x"), "tsv:2: invalid literal"),
        (HEADER + ROW.replace("\t2\t", "\t9\t"), "tsv:2: k=9 is more than E=8"),
        (HEADER + ROW.replace("nk", "nm"), "tsv:2: 'nm' is not a valid Layout"),
        (HEADER + ROW.replace("1\t-\tnk", "1\tsilly\tnk"), "tsv:2: Activation: name is 'silly'"),
        (HEADER + ROW.replace("1\t-\tnk", "1\tsitu:gamma=4\tnk"), "tsv:2: activation .*: unknown number 'gamma'"),
        (HEADER + ROW + ROW, "tsv:3: org/A is there twice"),
    ],
)
def test_damaged_table(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_table(text)
