"""Mistakes of a new user: each ends in one clear message, the right exit code, and nothing written."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest

from pretuned.aot.process.gpus import native_sm

Run = Callable[..., object]
SHAPE = "shape:E=8,H=256,I=128,k=2"


def expect(ended, here: Path, code: int, *words: str) -> None:
    assert ended.code == code, ended
    assert ended.out == ""
    assert ended.err.startswith(("error: ", "interrupted"))
    assert "Traceback" not in ended.err
    for word in words:
        assert word in ended.err
    assert not list(here.glob("bundles*"))


def test_a_typo_in_a_model_id(aot, here):
    ended = aot("build", "--models", "Qwen/Qwen3-30B-A3", "--sm", "90")
    expect(ended, here, 2, "Qwen/Qwen3-30B-A3", "did you mean", "Qwen/Qwen3-30B-A3B")


@pytest.mark.parametrize("option", ["--out", "--cache-dir"])
def test_a_directory_of_a_variable_that_is_not_set(aot, here, option):
    ended = aot("build", "--models", f"{SHAPE} tokens=1..1", "--sm", "80", "--ops", "dW", option, "")
    expect(ended, here, 2, f"'{option}': it is empty; name a directory")
    assert not list(here.iterdir())


def test_a_width_that_tp_does_not_divide(aot, here):
    expect(aot("build", "--models", "Qwen/Qwen3-30B-A3B tp=5", "--sm", "90"), here, 2, "tp=5 does not divide I=768")


def test_the_config_of_a_dense_model(aot, here):
    (here / "config.json").write_text(
        json.dumps({"model_type": "llama", "hidden_size": 4096, "intermediate_size": 11008, "num_hidden_layers": 32})
    )
    expect(aot("build", "--models", "config.json", "--sm", "90"), here, 2, "no experts")


def test_a_missing_file(aot, here):
    expect(aot("build", "--models", "nothing.txt", "--sm", "90"), here, 2, "nothing.txt", "no such file")


def test_an_empty_file(aot, here):
    (here / "models.txt").write_text("# nothing yet\n")
    expect(aot("build", "--models", "models.txt", "--sm", "90"), here, 2, "models.txt: no models in it")


def test_all_bad_lines_at_once(aot, here):
    (here / "models.txt").write_text(f"{SHAPE} tpp=2\nmistralai/Mixtral-8x7B-v0.1\nshape:E=2,H=8,I=8,k=3\n")
    expect(aot("build", "--models", "models.txt", "--sm", "90"), here, 2, "models.txt:1", "'tp'", "models.txt:3", "k=3")


@pytest.mark.parametrize("sm", ["75x", "75", "101", "", "9.5"])
def test_a_capability_that_there_is_not(aot, here, sm):
    expect(aot("build", "--models", SHAPE, "--sm", sm), here, 2, f"--sm {sm}", "Supported: 80, 86, ")


def test_mistakes_in_models_and_capability_together(aot, here):
    expect(aot("build", "--models", "nothing.txt", "--sm", "75x"), here, 2, "--sm 75x", "nothing.txt")


@pytest.mark.skipif(native_sm() is not None, reason="there is a GPU here")
def test_no_gpu_and_no_capability_given(aot, here):
    expect(aot("build", "--models", SHAPE), here, 1, "no NVIDIA GPU found here", "--sm 80,90")


def test_no_models(aot, here):
    expect(aot("build", "--sm", "90"), here, 2, "--models FILE", "aot models")


def test_a_spec_without_its_quotes(aot, here):
    ended = aot("build", "--models", "Qwen/Qwen3-30B-A3B", "tp=1,2", "--sm", "90")
    expect(ended, here, 2, "'tp=1,2'", "--models 'Qwen/Qwen3-30B-A3B tp=1,2'")
    ended = aot("plan", "Qwen/Qwen3-30B-A3B", "--sm", "90")
    expect(ended, here, 2, "'Qwen/Qwen3-30B-A3B' belongs to no option", "e.g. --models Qwen/Qwen3-30B-A3B")
    ended = aot("plan", "--models", "a.txt", "b.txt", "c d.txt", "--sm", "90")
    expect(ended, here, 2, "'b.txt'", "e.g. --models b.txt --models 'c d.txt'")
    ended = aot("plan", "shape:E=8,H=256,I=128,k=2", "tp=2", "--sm", "90")
    expect(ended, here, 2, "e.g. --models 'shape:E=8,H=256,I=128,k=2 tp=2'")


def test_options_beside_a_file_of_specs(aot, here):
    (here / "models.txt").write_text(SHAPE)
    ended = aot("plan", "--models", "models.txt tp=2", "--sm", "90")
    assert (ended.code, ended.out) == (2, "")
    assert "'models.txt': no config.json" in ended.err
    assert "each spec has its options in it" in ended.err


@pytest.mark.parametrize(
    "arguments",
    [
        ("build", "--models", "x", "--sm", "90", "--journal", ""),
        ("build", "--models", "x", "--candidates", ""),
        ("compile", "--models", "x", "--sm", "90", "-o", ""),
        ("measure", "", "--models", "x", "-J", "j"),
        ("merge", "a", "b", "-o", ""),
        ("prune", "a", "--models", "x", "-o", ""),
        ("report", "a", "-o", ""),
    ],
)
def test_a_path_that_is_empty(aot, here, arguments):
    expect(aot(*arguments), here, 2, "it is empty; name a file")


def test_ops_that_are_none(aot, here):
    expect(aot("build", "--models", SHAPE, "--sm", "90", "--ops", "backward"), here, 2, "'backward' is no op", "dX")
    expect(aot("build", "--models", SHAPE, "--sm", "90", "--ops", ","), here, 2, "it names none")


def test_a_name_that_leaves_the_directory(aot, here):
    expect(aot("build", "--models", SHAPE, "--sm", "90", "--name", "../x"), here, 2, "--name '../x'")


def test_a_verb_and_an_option_that_there_are_not(aot, here):
    expect(aot("biuld"), here, 2, "no command 'biuld'; did you mean 'build'?")
    expect(aot("build", "--model", SHAPE), here, 2, "--model")
    expect(aot("build", "--models", SHAPE, "--sm", "90", "--workers", "0"), here, 2, "--workers")


def test_an_output_directory_that_is_a_file(aot, here):
    (here / "out").write_text("")
    ended = aot("build", "--models", SHAPE, "--sm", "90", "--out", "out")
    expect(ended, here, 1, "can't make the directory 'out'", "--out DIR")
    assert ended.err.count("\n") == 1


def test_a_bundle_cut_in_half(aot, here, small_bundle):
    data = small_bundle.read_bytes()
    (here / "half.msgpack").write_bytes(data[: len(data) // 2])
    for verb in ("verify", "inspect"):
        ended = aot(verb, "half.msgpack")
        expect(ended, here, 2, f"file is {len(data) // 2} bytes, header says {len(data)}", "aot build")
        assert ended.err.count("\n") == 1


def test_a_bundle_that_is_missing_or_none(aot, here):
    (here / "text.msgpack").write_text("this is no bundle, however long the text may be made to look like one" * 9)
    for name in ("missing.msgpack", "text.msgpack", "."):
        for verb in ("verify", "inspect"):
            expect(aot(verb, name), here, 2, name)


def test_debug_shows_the_traceback_wherever_it_stands(aot, here):
    for arguments in (("--debug", "verify", "missing"), ("inspect", "missing", "--debug")):
        ended = aot(*arguments)
        assert ended.code == 2
    assert "Traceback" in ended.err
