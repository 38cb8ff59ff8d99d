"""aot explain: what would run a model on a GPU that is not here."""

from __future__ import annotations

import json
import re

import pytest
from small_bundles import H100, PROBLEM, WIDE, measured, write

from pretuned.aot.plan.targets import parse_gpu
from pretuned.artifacts.errors import InputError
from pretuned.runtime import reload
from pretuned.runtime.inspect.explain import explain

QWEN = "Qwen/Qwen3-30B-A3B"


@pytest.fixture(autouse=True)
def shipped_bundles(monkeypatch):
    """Only what ships: neither the user's overlay nor PRETUNED_BUNDLES."""
    monkeypatch.delenv("PRETUNED_BUNDLES", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", "/nonexistent")
    reload()


def test_a_model_on_an_h100_runs_what_was_measured_there(aot):
    ended = aot("explain", QWEN, "--gpu", "h100", "--tokens", "1,8192")
    assert (ended.code, ended.err) == (0, "")
    head, *lines = ended.out.splitlines()
    assert head == "on NVIDIA H100 80GB HBM3 (9.0, 132 SMs, 81920 MiB)"
    rows = [line for line in lines if line.startswith(("gate_up", "down"))]
    assert [row.split()[:4] for row in rows] == [
        ["gate_up", "forward", "1", "8"],
        ["gate_up", "forward", "8192", "65536"],
        ["down", "forward", "1", "8"],
        ["down", "forward", "8192", "65536"],
    ]
    assert all("measured on NVIDIA H100 80GB HBM3" in row and "catalogue-sm90.msgpack" in row for row in rows)


def test_json_has_the_whole_explanation(aot):
    ended = aot("explain", f"{QWEN} tp=2", "--gpu", "h200", "--tokens", "4", "--ops", "forward,dX", "--json")
    gemms = json.loads(ended.out)["gemms"]
    assert [(gemm["gemm"], gemm["problem"]["op"], gemm["M"]) for gemm in gemms] == [
        ("gate_up", "forward", 32),
        ("down", "forward", 32),
        ("gate_up", "dX", 32),
        ("down", "dX", 32),
    ]
    first = gemms[0]
    assert (first["model"], first["tp"], first["ep"], first["gpu"]["name"]) == (QWEN, 2, 1, "NVIDIA H200")
    assert first["problem"]["fused"] == ["gather", "silu"]
    assert first["candidates"][0]["measured_on"] == "NVIDIA H200"


def test_it_says_what_the_runtime_s_own_explain_says(aot):
    ended = aot("explain", QWEN, "--gpu", "90", "--tokens", "128", "--json")
    down = json.loads(ended.out)["gemms"][1]
    explanation = explain(E=128, N=2048, K=768, M=1024, sm=90).to_dict()
    assert {name: down[name] for name in explanation} == explanation


def test_why_explains_each_row(aot):
    ended = aot("explain", QWEN, "--gpu", "a100", "--tokens", "16", "--why")
    assert ended.out.count("  why:  ") == 2
    assert "modelled" in ended.out


def test_what_no_kernel_runs_and_the_build_that_makes_one(aot):
    ended = aot("explain", "shape:E=8,H=256,I=128,k=2 dtype=fp32", "--gpu", "h100", "--tokens", "4")
    assert ended.code == 0
    assert "no kernel here" in ended.out
    assert "Next:\n  for rows that torch runs  aot build --models " in ended.out


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--gpu", "h100,h200"], 2, "--gpu h100,h200: wanted one GPU"),
        (["--gpu", "v100"], 2, "no kernels are built for it"),
        (["--gpu", "toaster"], 2, "--gpu toaster: 'toaster' is no GPU or capability"),
        (["--gpu", "h100", "--tokens", "0"], 2, "--tokens 0: wanted numbers from 1 to"),
        (["--gpu", "h100", "--tokens", "1,x"], 2, "--tokens 1,x: wanted numbers"),
        (["--gpu", "h100", "--ops", "up"], 2, "'up' is no op"),
    ],
)
def test_mistakes(aot, arguments, code, complaint):
    ended = aot("explain", QWEN, *arguments)
    assert (ended.code, ended.out) == (code, "")
    assert complaint in ended.err
    assert "unknown model" in aot("explain", "nope", "--gpu", "h100").err


def test_strict_mode_says_that_the_call_raises(aot, monkeypatch):
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    ended = aot("explain", "shape:E=8,H=256,I=128,k=2 dtype=fp32", "--gpu", "h100", "--tokens", "4")
    assert ended.code == 0
    assert "the call raises: " in ended.out


@pytest.mark.parametrize(
    ("text", "name", "sm", "sm_count"),
    [
        ("h100", "NVIDIA H100 80GB HBM3", 90, 132),
        ("H100 PCIe", "NVIDIA H100 PCIe", 90, 114),
        ("9.0", "", 90, 132),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 89, 128),
        ("sm_100", "", 100, 148),
    ],
)
def test_a_gpu_by_name_or_capability(text, name, sm, sm_count):
    gpu = parse_gpu(text, lambda: pytest.fail("no GPU here is asked"))
    assert (gpu.gpu.name, gpu.sm, gpu.gpu.sm_count) == (name, sm, sm_count)
    with pytest.raises(InputError, match="--gpu"):
        parse_gpu("", lambda: pytest.fail("no GPU here is asked"))


def test_torch_where_it_was_measured_faster(aot, tmp_path, monkeypatch):
    by_torch = measured(64, WIDE, 7.5)._replace(torch_ns=5000)
    monkeypatch.setenv("PRETUNED_BUNDLES", str(write(tmp_path / "a.msgpack", {PROBLEM: [by_torch]}, gpus=[H100])))
    reload()
    asked = "explain", "shape:E=8,H=1024,I=768,k=2", "--tokens", "32", "--gpu"
    (down,) = [line for line in aot(*asked, "h100").out.splitlines() if line.startswith("down")]
    assert re.search("32 +64 +torch, measured faster +5.0 +measured on NVIDIA H100", down)
    down = json.loads(aot(*asked, "h100", "--json").out)["gemms"][1]
    assert (down["runs"], down["torch_us"]) == ("torch", 5.0)
    assert "runs: torch's grouped_mm, measured faster: 5.0 us against 7.5 us" in aot(*asked, "h100", "--why").out
    assert "torch" not in aot(*asked, "h200").out
