"""Each verb as it should be used."""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import pty
import re
import subprocess
import sys

import pytest
from building import fill

from pretuned.aot.cli.doctor import versions
from pretuned.aot.cli.main import _VERBS
from pretuned.aot.cli.table import next_steps
from pretuned.aot.compile.toolchain import toolchain
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.kernels.entry import LAUNCH_ABI

MODEL = "shape:E=8,H=256,I=128,k=2 dtype=fp32 ops=dW tokens=1..64 name=mine"  # few candidates


@pytest.mark.parametrize("verb", _VERBS)
def test_every_verb_has_help_with_examples(aot, verb):
    ended = aot(verb, "--help")
    assert ended.code == 0
    assert "Examples:" in ended.out
    assert f"aot {verb}" in ended.out


def test_help_lists_every_verb(aot):
    for arguments in ((), ("--help",), ("-h",)):
        ended = aot(*arguments)
        assert ended.code == 0
        for verb in _VERBS:
            assert f"\n  {verb}" in ended.out


def test_help_lists_verbs_by_what_they_are_for(aot):
    output = aot("--help").out
    titles = [output.index(f"\n{title}:\n") for title in ("Build", "Look", "Change", "Check")]
    assert titles == sorted(titles)
    assert "..." not in output[titles[0] :]
    for verb in _VERBS:
        assert aot("help", verb).out == aot(verb, "--help").out
    assert aot("help").out == output
    assert aot("help", "nope").code == 2


def test_the_options_of_a_build_stand_in_sections(aot):
    output = aot("build", "--help").out
    for title, option in (
        ("What to build", "--sm"),
        ("Where it goes", "--out"),
        ("Measuring", "--budget"),
        ("Compiling", "--workers"),
        ("Output", "--quiet"),
    ):
        section = output.partition(f"\n{title}:\n")[2].partition("\n\n")[0]
        assert option in section, title
    for option in (
        "--models",
        "--ops",
        "--configs",
        "--candidates",
        "--name",
        "--measure",
        "--journal",
        "--gpus",
        "--executor",
        "--cache-dir",
        "--no-cache",
        "--verbose",
        "--json",
    ):
        assert option in output


@pytest.mark.parametrize(
    ("word", "meant"),
    [("biuld", "build"), ("Inspect", "inspect"), ("veryfy", "verify"), ("hlep", "help"), ("version", "--version")],
)
def test_a_misspelt_verb(aot, word, meant):
    ended = aot(word)
    assert (ended.code, ended.out) == (2, "")
    assert f"no command '{word}'; did you mean '{meant}'?" in ended.err
    assert "there are build, plan, " in aot("zzz").err


@pytest.mark.slow
def test_quiet(aot, here, tmp_path, compiled_models):
    fill(tmp_path / "mine", compiled_models, lacking=2)
    ended = aot("build", "--models", f"{MODEL}", "--sm", "80", "-q", "--cache-dir", tmp_path / "mine")
    assert (ended.code, ended.err) == (0, "")
    assert ended.out == "bundles/pretuned-sm80.msgpack\n"
    assert len(list((tmp_path / "mine").glob("??/*.bin"))) == 14, "it compiled two"


def test_quiet_plan(aot, here):
    asked = ("plan", "--models", "Qwen3-30B-A3B", "--sm", "90")
    loud, quiet = aot(*asked), aot(*asked, "-q")
    assert (quiet.code, quiet.err) == (0, "")
    assert "is taken as" in loud.err
    assert loud.out.startswith(quiet.out.rstrip())
    assert len(quiet.out.splitlines()) == 3


def test_version(aot):
    ended = aot("--version")
    assert ended.code == 0
    lines = dict(line.split(maxsplit=1) for line in ended.out.splitlines() if line.count("  "))
    assert lines["triton"] == toolchain().triton
    for word in ("pretuned", "python", "ptxas", "bundle format", "launch abi", "compile cache"):
        assert word in ended.out
    for arguments in (("--version", "--json"), ("--json", "--version")):
        ended = aot(*arguments)
        assert (ended.code, ended.err) == (0, "")
        assert json.loads(ended.out) == versions()


def _keys(value):
    """Every key of a JSON value."""
    if isinstance(value, dict):
        for key, item in value.items():
            yield key
            yield from _keys(item)
    elif isinstance(value, list):
        for item in value:
            yield from _keys(item)


@pytest.mark.parametrize(
    "arguments",
    [
        ["--version"],
        ["models"],
        ["inspect", "{}", "--choices"],
        ["verify", "{}"],
        ["pack", "{}", "--oci", "image"],
        ["diff", "{}", "{}"],
        ["doctor"],
        ["report", "{}"],
        ["prune", "{}", "-m", "shape:E=8,H=256,I=128,k=2", "-o", "b.msgpack"],
        ["plan", "-m", "shape:E=8,H=256,I=128,k=2", "--sm", "80", "--ops", "forward"],
        ["explain", "shape:E=8,H=256,I=128,k=2", "--gpu", "a100"],
    ],
    ids=lambda arguments: arguments[0],
)
def test_no_key_of_json_has_a_blank(aot, small_bundle, arguments):
    ended = aot(*(str(small_bundle) if argument == "{}" else argument for argument in arguments), "--json")
    assert ended.code == 0, ended.err
    assert not [key for key in _keys(json.loads(ended.out)) if " " in key]


def test_a_directory_stands_for_its_bundles(aot, here, small_bundle):
    (here / "bundles").mkdir()
    for name in ("b.msgpack", "a.msgpack", ".hidden.msgpack"):
        (here / "bundles" / name).write_bytes(small_bundle.read_bytes())
    (here / "bundles" / "notes.txt").write_text("")
    report = json.loads(aot("inspect", "bundles", "--json").out)
    assert [entry["path"] for entry in report] == ["bundles/a.msgpack", "bundles/b.msgpack"]
    assert aot("inspect", "bundles/a.msgpack", "bundles/b.msgpack").out.count("bundle    ") == 2
    assert [line.split()[1] for line in aot("verify", "bundles").out.splitlines()] == [
        entry["path"] for entry in report
    ]
    packed = json.loads(aot("pack", "bundles", "--dir", "out", "--json").out)
    assert [bundle["file"] for bundle in packed["bundles"]] == ["a.msgpack", "b.msgpack"]
    ended = aot("report", "bundles")
    assert (ended.code, "'bundles' holds 2 bundles and a report is of one" in ended.err) == (2, True)
    (here / "bundles" / "b.msgpack").unlink()
    assert aot("report", "bundles").code == 0
    for verb, *rest in (
        ("diff", small_bundle),
        ("merge", "-o", "o.msgpack"),
        ("prune", "-m", "Qwen/Qwen3-30B-A3B", "-o", "o.msgpack"),
    ):
        ended = aot(verb, "bundles", *rest)
        assert (ended.code, "it is a directory. Name its files, e.g. bundles/*.msgpack" in ended.err) == (2, True)
    (here / "empty").mkdir()
    for verb in ("inspect", "verify", "report", "pack", "sign"):
        more = {"pack": ("--dir", "out"), "sign": ("--key", "k.pem")}.get(verb, ())
        ended = aot(verb, "empty", *more)
        assert (ended.code, "'empty' is a directory without bundles" in ended.err) == (2, True)


def test_next_steps_fit_a_narrow_terminal(aot, here, small_bundle, monkeypatch):
    monkeypatch.setenv("COLUMNS", "60")
    ended = aot("pack", small_bundle, "--oci", "image", "--dir", "out", "--name", "acme-kernels-of-the-team")
    steps = ended.out.partition("Next:\n")[2].splitlines()
    assert steps[:2] == ["  push:", "    skopeo copy oci:image:1.0 \\"]
    assert [line for line in steps if len(line) > 60] == [steps[-1]] * (len(str(here)) > 30)  # a path does not break
    command = "aot build --models ... --sm 90 --candidates candidates.msgpack --journal h200.journal # with a GPU"
    lines = next_steps(("build", command), ("then", "call it")).splitlines()
    assert max(map(len, lines)) <= 60
    assert lines[-2:] == ["  then:", "    call it"]
    asked = subprocess.run(
        ["sh", "-c", "aot() { echo $# $*; }\n" + "\n".join(lines[2:-2])], capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == ["9", *command.partition(" #")[0].split()[1:]]
    monkeypatch.delenv("COLUMNS")
    assert next_steps(("build", "aot build"), ("or", "aot plan")) == "Next:\n  build  aot build\n  or     aot plan"


def _seen(*arguments, cwd):
    """The lines that a build shows in a terminal while it works."""
    main, side = pty.openpty()
    command = [sys.executable, "-m", "pretuned.aot", "build", "--measure", "no", *arguments]
    environment = {**os.environ, "TERM": "xterm", "XDG_CACHE_HOME": str(cwd / "cache")}
    with subprocess.Popen(command, cwd=cwd, stdout=subprocess.DEVNULL, stderr=side, env=environment) as process:
        os.close(side)
        seen = b""
        with contextlib.suppress(OSError):  # EIO, as the other side is closed
            while data := os.read(main, 1 << 16):
                seen += data
        os.close(main)
    assert process.returncode == 0, seen
    return seen.decode()


@pytest.mark.slow  # processes that build
def test_no_bar_where_nothing_is_compiled(here, compiled_models):
    fill(here / "cache" / "pretuned" / "compiled", compiled_models, lacking=2)
    asked = ("--models", "shape:E=8,H=256,I=128,k=2", "--sm", "80", "--ops", "forward")
    assert "compiling" not in _seen(*asked, cwd=here)
    assert "compiling" in _seen("--models", MODEL, "--sm", "80", "--out", "compiled", cwd=here)


def test_json_alone_says_where_it_belongs(aot):
    for arguments in (("--json",), ("--json", "models")):
        ended = aot(*arguments)
        assert ended.code == 2
        assert "aot models --json" in ended.err


def test_models(aot):
    models = json.loads(aot("models", "--json").out)
    assert len(models) > 20
    some = json.loads(aot("models", "--json", "MIXTRAL").out)
    assert 0 < len(some) < len(models)
    assert {"id", "E", "k", "H", "I"} <= set(some[0])
    (oss, *_) = json.loads(aot("models", "--json", "gpt-oss").out)
    assert oss["layouts"] == ["nk", "kn"]
    assert " nk,kn " in aot("models", "gpt-oss").out
    assert "Qwen/Qwen3-30B-A3B " in aot("models", "qwen3").out
    (fields,) = [line.split() for line in aot("models", "deepseek-r1").out.split("\n") if "DeepSeek-R1 " in line]
    assert fields == ["deepseek-ai/DeepSeek-R1", "deepseek-ai/DeepSeek-V3", "fp8_block"], "a found name is shown"
    assert " bf16,fp8_block,int4_g128 " in aot("models", "qwen3-30b-a3b").out, "formats of all its repositories"
    assert "also" not in aot("models", "jamba").out, "it has no other name"
    nothing = aot("models", "no-such-model")
    assert (nothing.code, nothing.out) == (2, "")


@pytest.mark.slow
def test_plan_shows_the_formats_of_the_weights_and_what_is_built(aot, here):
    done = aot("plan", "--models", "openai/gpt-oss-20b tp=1,8 ops=forward weights=mxfp4,bf16", "--sm", "90", "--json")
    assert json.loads(done.out)["weights"] == [
        {"model": "openai/gpt-oss-20b", "tp": tp, "ep": 1, "weights": ["mxfp4", "bf16"], "built_in": ["mxfp4", "bf16"]}
        for tp in (1, 8)
    ]
    note, slow = json.loads(done.out)["notes"]  # 360 is no multiple of 64
    assert "I/tp=360 padded to 384 (6.7% more memory)" in note
    assert slow.startswith("with K=360, rows of w begin at odd multiples of 16 bytes")  # of the bf16 weights
    done = aot("plan", "--models", "openai/gpt-oss-20b ops=forward weights=int4_g128_zp", "--sm", "80", "--json")
    assert json.loads(done.out)["weights"][0]["built_in"] == ["int4_g128_zp"]
    ended = aot("plan", "--models", "openai/gpt-oss-20b", "--sm", "90", "--problems")
    assert re.search(r"^openai/gpt-oss-20b +mxfp4 +mxfp4$", ended.out, re.M)
    assert "openai/gpt-oss-20b: built as published, with mxfp4 weights, forward" in ended.err
    assert "openai/gpt-oss-20b (mxfp4)" in ended.out
    other = aot("plan", "--models", "openai/gpt-oss-20b ops=forward dtype=bf16", "--sm", "90", "--problems")
    assert re.search(r"^openai/gpt-oss-20b +mxfp4 +bf16$", other.out, re.M)
    assert "bf16 is built for openai/gpt-oss-20b; weights=mxfp4 builds the checkpoint's format" in other.err


def test_plan_tells_of_shards_that_only_fallbacks_run(aot, here):
    done = aot("plan", "--models", "shape:E=8,H=1024,I=1000,k=2 tp=8 ops=forward", "--sm", "90", "--json")
    (note,) = json.loads(done.out)["notes"]
    assert "gate_up (N=250, K=1024) and down (N=1024, K=125)" in note
    assert "tp=1,5 would have none" in note


@pytest.mark.slow
def test_plan_shows_what_build_would_do_and_builds_nothing(aot, here):
    ended = aot("plan", "--models", "Qwen/Qwen3-30B-A3B tp=1,2", "--sm", "80,90")
    assert ended.code == 0
    assert len(ended.out.splitlines()) < 10, "the answer alone"
    assert ended.out.startswith("for ")
    assert "Nothing was built" in ended.out
    planned = aot("plan", "--models", "Qwen/Qwen3-30B-A3B tp=1,2", "--sm", "80,90", "--problems")
    assert planned.out.startswith(ended.out)
    assert "Qwen/Qwen3-30B-A3B tp=2 ep=1" in planned.out
    report = json.loads(aot("plan", "--models", "Qwen/Qwen3-30B-A3B tp=1,2", "--sm", "80,90", "--json").out)
    assert [capability["sm"] for capability in report["capabilities"]] == [80, 90]
    assert len(report["problems"]) == 24  # forward 6 a shard, dX 4, dW 2
    assert {(problem["op"], problem["fused"]) for problem in report["problems"]} == {
        *((op, fused) for op in ("forward", "dX") for fused in ("", "gather", "scatter")),
        ("dW", ""),
        ("forward", "silu"),
        ("forward", "gather+silu"),
    }
    assert [capability["problems"] for capability in report["capabilities"]] == [20, 24]
    only = json.loads(aot("plan", "-m", "Qwen/Qwen3-30B-A3B", "--sm", "90", "--ops", "forward", "--json").out)
    assert {problem["op"] for problem in only["problems"]} == {"forward"}
    assert all(
        capability["cached"] == capability["variants"] == 0 and capability["shipped"] > 100
        for capability in report["capabilities"]
    )
    other = json.loads(aot("plan", "-m", "Qwen/Qwen3-30B-A3B dtype=fp16", "--sm", "90", "--json").out)
    assert other["capabilities"][0]["variants"] > 100
    assert not list(here.iterdir())


@pytest.mark.slow
def test_the_whole_way_in_processes(aot_process, here, tmp_path, compiled_models):
    """plan, build, build again, inspect, verify: as pasted from the README; most is compiled."""
    (here / "models.txt").write_text(f"# mine\n{MODEL}\n")
    planned = json.loads(aot_process("plan", "--models", "models.txt", "--sm", "sm_80", "--json").out)
    fill(tmp_path / "cache" / "pretuned" / "compiled", compiled_models, lacking=3)
    first = aot_process("build", "--models", "models.txt", "--sm", "8.0")
    assert first.code == 0, first.err
    assert "bundles/pretuned-sm80.msgpack" in first.out
    assert "modelled" in first.out
    assert "PRETUNED_BUNDLES" in first.out
    variants, shipped = planned["capabilities"][0]["variants"], planned["capabilities"][0]["shipped"]
    assert shipped == 2, "the sort of the slots and the list of rows, which are of no dtype"
    assert f"{variants + shipped} of {variants + shipped} variants, {shipped} shipped" in first.err
    again = json.loads(aot_process("build", "--models", "models.txt", "--sm", "80", "--json").out)
    (bundle,) = again["bundles"]
    counts = (bundle["shipped"], bundle["compiled"], bundle["cached"], bundle["unchanged"])
    assert counts == (shipped, 0, variants, True)
    assert again["seconds"] < 5.0
    inspected = json.loads(aot_process("inspect", bundle["path"], "--json", "--choices").out)
    with open_bundle(here / bundle["path"]) as opened:
        assert inspected["digest"] == opened.digest.hex()
        assert len(inspected["variants"]) == opened.variant_count
        assert inspected["choice_count"] == len(inspected["choices"]) == bundle["choices"]
    assert inspected["models"] == [{"name": "mine", "tp": 1, "ep": 1, "top_k": 2, "dtype": "fp32", "problems": 2}]
    verified = json.loads(aot_process("verify", bundle["path"], "--json").out)
    assert verified[0]["ok"] is True


def test_inspect_as_a_table(aot, small_bundle):
    ended = aot("inspect", small_bundle, "--models", "--variants", "--choices")
    assert ended.code == 0
    for word in ("sm_80", "rows", "small", "64x64x64 w4 s4", "modelled"):
        assert word in ended.out
    report = json.loads(aot("inspect", small_bundle, "--json").out)
    assert report["launch_abi"] == str(LAUNCH_ABI)
    assert {variant["abi"] for variant in report["variants"]} == {LAUNCH_ABI}


@pytest.mark.parametrize("columns", ["", "40", "80", "120"])
def test_what_is_reported_a_bundle_fits(aot, small_bundle, monkeypatch, columns):
    """And no digest is printed whole that nobody asked for."""
    monkeypatch.setenv("COLUMNS", columns)
    name = small_bundle.name
    monkeypatch.chdir(small_bundle.parent)
    summary = aot("inspect", name).out
    assert len(summary.splitlines()) < 25
    assert "modelled" in " ".join(summary.split())
    for arguments in ((), ("--models",), ("--variants",), ("--choices",)):
        ended = aot("inspect", name, *arguments)
        assert ended.out.startswith(summary)
        assert not re.search("[0-9a-f]{40}", ended.out)
        assert not columns or max(map(len, ended.out.splitlines())) <= int(columns)
    planned = aot("plan", "--models", MODEL, "--sm", "80,90", "--problems").out
    assert not columns or max(map(len, planned.splitlines())) <= int(columns)
    listed = aot("models", "mixtral").out
    assert not columns or max(map(len, listed.splitlines())) <= int(columns)
    assert "mistralai/Mixtral-8x7B-v0.1" in "".join(listed.split())


def test_verify_tells_each_file(aot, here, small_bundle):
    data = bytearray(small_bundle.read_bytes())
    data[-10] ^= 1
    (here / "flipped.msgpack").write_bytes(data)
    ended = aot("verify", small_bundle, "flipped.msgpack")
    assert ended.code == 2
    assert ended.out.startswith("ok  ")
    assert ended.err.startswith("error: bundle 'flipped.msgpack'")
    report = json.loads(aot("verify", small_bundle, "flipped.msgpack", "--json").out)
    assert [entry["ok"] for entry in report] == [True, False]


def test_verify_with_a_pin(aot, here, small_bundle):
    digest = hashlib.sha256(small_bundle.read_bytes()).hexdigest()
    assert aot("verify", small_bundle, "--sha256", digest).code == 0
    wrong = aot("verify", small_bundle, "--sha256", "0" * 64)
    assert (wrong.code, "the pin says" in wrong.err) == (2, True)
    assert aot("verify", small_bundle, small_bundle, "--sha256", digest).code == 2


@pytest.mark.slow  # processes that import torch
def test_doctor(aot, aot_process):
    ended = aot_process("doctor", "--json", PRETUNED_BUNDLES="")
    report = json.loads(ended.out)
    assert ended.code == (0 if report["runtime"]["ok"] else 1)
    assert report["builder"]["triton"] == toolchain().triton
    assert "compile cache" in aot("doctor").out


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", [["pretuned.aot", "doctor"], pytest.param(["pretuned.runtime"], marks=pytest.mark.nightly)]
)
def test_doctor_without_numpy_warns_of_nothing(words: list[str], here):
    """torch warns where there is none, as after ``pip install pretuned[aot]`` alone; nothing here needs it."""
    code = (
        f"import runpy, sys; sys.modules['numpy'] = None; sys.argv = {words!r}; "
        f"runpy.run_module({words[0]!r}, run_name='__main__', alter_sys=True)"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=here)
    assert "packages" in done.stdout, done.stderr
    assert "NumPy" not in done.stderr


def test_no_home_directory_is_no_error(here):
    """The process runs as uid 12345, which no passwd file lists."""
    done = subprocess.run(
        ["unshare", "--map-user=12345", "--map-group=12345", sys.executable, "-m", "pretuned.aot", "--version"],
        cwd=here,
        env={"PATH": os.environ["PATH"]},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert "none (no home directory)" in done.stdout


@pytest.mark.slow
def test_the_counts_of_candidates_add_up(aot, here, compiled_dir):
    """One cubin may be several candidates: builds of them count it once, as compiling does."""
    done = aot("compile", "--models", MODEL, "--sm", "90", "-o", "c.msgpack", "--cache-dir", compiled_dir)
    match = re.search(r"of (\d+) cubins \((\d+) compiled now and (\d+) cached, (\d+) of these pruned; (\d+)", done.out)
    assert match is not None, done.out
    cubins, now, cached, pruned, _ = map(int, match.groups())
    assert cubins == now + cached - pruned
    done = aot("build", "--models", MODEL, "--sm", "90", "--candidates", "c.msgpack", "--json")
    (built,) = json.loads(done.out)["bundles"]
    assert (built["compiled"], built["cached"], built["pruned"]) == (0, cubins, 0)
