from __future__ import annotations

import pytest

from pretuned.aot.models.catalogue import COLUMNS, catalogue, find, nearest_ids, parse_table
from pretuned.aot.models.layer import ExpertLayer
from pretuned.artifacts.records.problem import Layout

HEADER = "\t".join(COLUMNS) + "\n"
ROW = "org/A\t8\t2\t64\t32\t0\t0\t1\tnk\t-\tconfig\t-\t-\n"


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
    every = [name for entry in entries.values() for name in (entry.id, *entry.aliases)]
    assert len({name.lower() for name in every}) == len(every)
    for name, entry in entries.items():
        assert name == entry.id
        assert entry.source in {"config", "class", "default"}
        assert entry.layer.contradictions() == []
        assert all(one.count("/") == 1 for one in (entry.id, *entry.aliases))


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
        ("Qwen/Qwen3-30B-A3B", "bf16"), ("Qwen/Qwen3-30B-A3B-FP8", "fp8_block"), ("Kimi-K2-Thinking", "int4_g32"),
        ("deepseek-ai/DeepSeek-R1", "fp8_block"), ("zai-org/GLM-4.5-Air-FP8", "fp8_channel"),
        ("openai/gpt-oss-20b", "mxfp4"), ("Mixtral-8x7B-Instruct-v0.1", "bf16"),
    ):  # fmt: skip
        match = find(word)
        assert match is not None
        assert match.layers[0].weights == format_
    assert catalogue()["Qwen/Qwen3-30B-A3B"].formats == ("bf16", "fp8_block", "int4_g128")
    assert catalogue()["moonshotai/Kimi-K2-Instruct"].formats == ("fp8_block", "int4_g32")


def test_a_model_has_all_its_kinds_of_experts() -> None:
    match = find("ERNIE-4.5-VL-28B-A3B-PT")
    assert match is not None
    assert [(one.part, one.I) for one in match.layers] == [("", 1536), ("vision", 512)]
    one = find("baidu/ERNIE-4.5-VL-28B-A3B-PT+vision")
    assert one is not None
    assert [layer.part for layer in one.layers] == ["vision"]


def test_find_nothing() -> None:
    assert find("Qwen/Qwen3-30B-A4B") is None
    assert find("other/Qwen3-30B-A3B") is None
    assert find("") is None


def test_nearest() -> None:
    assert nearest_ids("Qwen/Qwen3-30B-A4B")[0] == "Qwen/Qwen3-30B-A3B"
    assert nearest_ids("gpt-oss-20")[0] == "openai/gpt-oss-20b"
    assert "mistralai/Mixtral-8x7B-v0.1" in nearest_ids("mixtral")
    assert any("Mixtral" in one for one in nearest_ids("mixtrl"))
    assert nearest_ids("Qwen/Qwen3-Nxt")[0] == "Qwen/Qwen3-Next-80B-A3B-Instruct"
    assert nearest_ids("zzzzzzzz") == []


def test_parse_row() -> None:
    (entry,) = parse_table("# comment\n" + HEADER + ROW).values()
    assert entry.layer == ExpertLayer(8, 2, 64, 32)
    assert (entry.aliases, entry.formats) == ({}, ())
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
        (HEADER + "org/A\t8\n", "tsv:2: 2 fields, wanted 13"),
        (HEADER + ROW.replace("64", "x"), "tsv:2: invalid literal"),
        (HEADER + ROW.replace("\t2\t", "\t9\t"), "tsv:2: k=9 is more than E=8"),
        (HEADER + ROW.replace("nk", "nm"), "tsv:2: 'nm' is not a valid Layout"),
        (HEADER + ROW + ROW, "tsv:3: org/A is there twice"),
    ],
)
def test_damaged_table(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_table(text)
