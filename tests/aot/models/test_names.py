"""Names that people have: addresses, repackagers' names, the Hugging Face cache."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from pretuned.aot.models.hf_config import cached_config, from_url, republished
from pretuned.aot.models.load import load_models
from pretuned.artifacts.errors import InputError

CONFIG = {
    "model_type": "qwen3_moe",
    "hidden_size": 512,
    "moe_intermediate_size": 256,
    "num_experts": 16,
    "num_experts_per_tok": 2,
}


@pytest.mark.parametrize(
    "url",
    [
        "https://huggingface.co/Qwen/Qwen3-30B-A3B",
        "https://huggingface.co/Qwen/Qwen3-30B-A3B/",
        "https://huggingface.co/Qwen/Qwen3-30B-A3B/tree/main",
        "hf.co/Qwen/Qwen3-30B-A3B",
        "https://huggingface.co/Qwen/Qwen3-30B-A3B/blob/main/config.json?x=1#top",
        "https://modelscope.cn/models/Qwen/Qwen3-30B-A3B",
    ],
)
def test_an_address(url: str) -> None:
    assert from_url(url) == "Qwen/Qwen3-30B-A3B"
    assert load_models([f"'{url}' tp=2"]).shapes[0].name == "Qwen/Qwen3-30B-A3B"


@pytest.mark.parametrize("word", ["Qwen/Qwen3-30B-A3B", "./huggingface.co/a/b", "https://example.org/a/b", ""])
def test_no_address(word: str) -> None:
    assert from_url(word) is None


@pytest.mark.parametrize(
    ("word", "base"),
    [
        ("unsloth/Qwen3-30B-A3B", "Qwen3-30B-A3B"),
        ("unsloth/Qwen3-30B-A3B-bnb-4bit", "Qwen3-30B-A3B"),
        ("unsloth/Qwen3-30B-A3B-unsloth-bnb-4bit", "Qwen3-30B-A3B"),
        ("unsloth/gpt-oss-20b-BF16", "gpt-oss-20b"),
        ("RedHatAI/Mixtral-8x7B-Instruct-v0.1-FP8", "Mixtral-8x7B-Instruct-v0.1"),
        ("x/m-quantized.w4a16", "m"),
        ("nvidia/DeepSeek-R1-FP4", "DeepSeek-R1"),
        ("mistralai/Mixtral-8x22B-v0.1-FP8", "Mixtral-8x22B-v0.1"),
        ("other/Qwen3-30B-A3B", None),
        ("Qwen3-30B-A3B", None),
        ("", None),
        ("-FP8", None),
    ],
)
def test_another_format_of_a_model(word: str, base: str | None) -> None:
    assert republished(word) == base


@pytest.mark.parametrize(
    ("word", "name"),
    [
        ("unsloth/Qwen3-30B-A3B", "Qwen/Qwen3-30B-A3B"),
        ("unsloth/gpt-oss-20b-BF16", "openai/gpt-oss-20b"),
        ("mistralai/Mixtral-8x7B-v0.1-FP8", "mistralai/Mixtral-8x7B-v0.1"),
    ],
)
def test_it_is_built_as_the_model_and_said_to_be(word: str, name: str) -> None:
    loaded = load_models([word])
    assert loaded.shapes[0].name == name
    assert any(f"'{word}' is taken to have the sizes of {name}" in note for note in loaded.notes)


@pytest.mark.parametrize("variable", ["HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"])
def test_a_model_in_the_cache(variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("HF_HOME", "HF_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    hub = tmp_path / {"HF_HOME": "hub", "HF_HUB_CACHE": ".", "XDG_CACHE_HOME": "huggingface/hub"}[variable]
    monkeypatch.setenv(variable, str(tmp_path))
    with pytest.raises(InputError, match="unknown model 'me/tuned'"):
        load_models(["me/tuned"])
    model = hub / "models--me--tuned"
    for revision, experts in (("aaa", 8), ("bbb", 16)):
        folder = model / "snapshots" / revision
        folder.mkdir(parents=True)
        (folder / "config.json").write_text(json.dumps({**CONFIG, "num_experts": experts}))
    (model / "refs").mkdir()
    (model / "refs" / "main").write_text("aaa\n")
    loaded = load_models(["me/tuned tp=2"])
    assert (loaded.shapes[0].name, loaded.shapes[0].E) == ("me/tuned", 8)
    assert any("snapshots/aaa/config.json" in note for note in loaded.notes)
    (model / "refs" / "main").unlink()
    assert cached_config("me/tuned") is not None
    assert cached_config("../tuned") is None


def test_a_cache_without_its_blobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The snapshot's links are there, and what they point at is not: half copied, or half removed."""
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    blob = tmp_path / "models--me--tuned" / "blobs" / "0123"
    folder = tmp_path / "models--me--tuned" / "snapshots" / "aaa"
    for path in (blob, folder / "x"):
        path.parent.mkdir(parents=True)
    (folder / "config.json").symlink_to("../../blobs/0123")
    again = r"a link to '../../blobs/0123', which is not there. Download it again: hf download me/tuned config.json"
    for word in ("me/tuned", str(folder), str(folder / "config.json")):
        with pytest.raises(InputError, match=rf"snapshots/aaa/config.json: {again}"):
            load_models([word])
    blob.write_text(json.dumps(CONFIG))
    assert load_models(["me/tuned"]).shapes[0].name == "me/tuned"
    # What says how the weights are quantised is missed, too.
    (folder / "hf_quant_config.json").symlink_to("../../blobs/4567")
    with pytest.raises(InputError, match=r"'../../blobs/4567', which is not there.*me/tuned hf_quant_config.json"):
        load_models(["me/tuned"])


def test_a_model_whose_sizes_are_known_needs_no_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    folder = tmp_path / "models--unsloth--Qwen3-30B-A3B-bnb-4bit" / "snapshots" / "aaa"
    folder.mkdir(parents=True)
    (folder / "config.json").symlink_to("../../blobs/0123")
    assert load_models(["unsloth/Qwen3-30B-A3B-bnb-4bit"]).shapes[0].name == "Qwen/Qwen3-30B-A3B"
