"""explain: what a call would run and why, also where there is no GPU."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from enum import Enum
from pathlib import Path

import pytest
import torch
from small_bundles import (
    ANY,
    H100,
    H200,
    NARROW,
    ON_H200,
    OTHER,
    PROBLEM,
    SPECS,
    WIDE,
    measured,
    modelled,
    snapshot,
    write,
)

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.records import DType, Fusion, Layout, Source
from pretuned.kernels import arch
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Cache, Config, Edge, Loads, Schedule, TileRows
from pretuned.runtime import ExpertWeights, explain, reload
from pretuned.runtime.dispatch.decide import Decision, Match, decide
from pretuned.runtime.inspect.explain import examine, made_up_gpu
from pretuned.runtime.inspect.query import of_numbers

NUMBERS = {"E": 8, "N": 1024, "K": 768}


def test_bundles_of_other_capabilities_are_counted(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [measured(64, WIDE, 7.5)]}, gpus=[H200])
    for name, sm in (("b", 80), ("c", 86)):
        write(tmp_path / f"{name}.msgpack", {OTHER: [modelled(64, WIDE)]}, sm=sm)
    explanation = examine(snapshot(tmp_path), PROBLEM, 50, ON_H200, aligned=True)
    assert "skipped 2 bundles for other capabilities" in str(explanation)
    assert [Path(value["path"]).name for value in explanation.to_dict()["skipped"]] == ["b.msgpack", "c.msgpack"]


def test_it_names_what_dispatch_runs(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [measured(64, WIDE, 7.5, second=NARROW)]}, gpus=[H200])
    write(tmp_path / "b.msgpack", {OTHER: [modelled(64, WIDE)]}, sm=80)
    bundle_set = snapshot(tmp_path)
    explanation = examine(bundle_set, PROBLEM, 50, ON_H200, aligned=True)
    ran = decide(bundle_set, PROBLEM, 50, ON_H200)
    assert isinstance(ran, Decision)
    assert explanation.chosen == ran.chosen
    assert explanation.reason == ran.reason
    text = str(explanation)
    for wanted in (
        "128x128x64 w8 s3",
        "7.5 us",
        "measured",
        "a.msgpack",
        "PRETUNED_BUNDLES",
        "NVIDIA H200",
        "8.2 us",
        "skipped",
        "b.msgpack",
        "sm_80",
        "cost model",
    ):
        assert wanted in text
    told_dict = json.loads(json.dumps(explanation.to_dict()))
    assert told_dict["runs"] == "bundle"
    assert told_dict["bucket"] == 64
    first, second = told_dict["candidates"][:2]
    assert (first["variant"], first["source"], first["origin"], first["match"]) == (
        WIDE,
        "measured",
        "this_gpu",
        "exact",
    )
    assert (second["variant"], second["time_us"]) == (NARROW, 8.25)
    assert first["measured_on"] == "NVIDIA H200"
    assert first["config"]["block_m"] == 128
    assert len(told_dict["skipped"]) == 1


@pytest.mark.parametrize("M", [1, 64, 5000])
@pytest.mark.parametrize("aligned", [True, False])
def test_the_first_is_what_dispatch_takes_on_every_level(M: int, aligned: bool, tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE, second=NARROW)]})
    bundle_set = snapshot(tmp_path)
    for problem in (PROBLEM, OTHER):
        explanation = examine(bundle_set, problem, M, ON_H200, aligned=aligned)
        ran = decide(bundle_set, problem, M, ON_H200, aligned=aligned)
        assert isinstance(ran, Decision)
        assert explanation.chosen == ran.chosen


def test_past_the_first_every_time_is_for_this_bucket(tmp_path: Path) -> None:
    """A bundle's times of other buckets are no rank in this one."""
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE, 10, second=NARROW), modelled(65536, NARROW, 9000)]})
    for M, match in ((64, Match.EXACT), (512, Match.NEAREST_BUCKET)):
        explanation = examine(snapshot(tmp_path), PROBLEM, M, ON_H200, aligned=True)
        first, *rest = explanation.candidates
        assert (first.index, first.match, first.bucket) == (WIDE, match, 64)
        assert len(rest) == 2
        assert all(candidate.bucket == M and candidate.match is not Match.NEAREST_BUCKET for candidate in rest)
        assert all(candidate.time_us < 1000 for candidate in rest)
    explanation = examine(snapshot(tmp_path), PROBLEM, 64, ON_H200, aligned=True)
    assert [(candidate.index, candidate.match, candidate.time_us) for candidate in explanation.candidates[:2]] == [
        (WIDE, Match.EXACT, 10.0),
        (NARROW, Match.EXACT, 11.0),
    ]


def test_the_columns_are_as_wide_as_what_is_in_them(tmp_path: Path) -> None:
    """Configs of specialised kernels are long."""
    long = Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)
    write(
        tmp_path / "a.msgpack",
        {PROBLEM: [measured(64, 0, 7.5, second=1)]},
        gpus=[H200],
        specs=(replace(SPECS[0], config=long), SPECS[1]),
    )
    text = str(examine(snapshot(tmp_path), PROBLEM, 64, ON_H200, aligned=True))
    rows = [line for line in text.splitlines() if line.endswith(("  bundle", "  a.msgpack"))]
    assert len(rows) == 3
    assert len({len(row) - len(row.split()[-1]) for row in rows}) == 1


def test_without_a_gpu_a_capability_will_do(clean_places: Path) -> None:
    write(clean_places / "a.msgpack", {PROBLEM: [measured(64, WIDE, 7.5)]}, gpus=[H200])
    reload()
    explanation = explain(**NUMBERS, M=64, sm=90)
    assert explanation.chosen is not None
    assert explanation.chosen.source is Source.MEASURED
    assert "any GPU of capability 9.0" in str(explanation)
    assert "measured on NVIDIA H200, of this capability" in explanation.reason
    assert explain(PROBLEM, M=64, sm=90).chosen == explanation.chosen


def test_for_a_capability_it_says_which_cards_answer_it_is(clean_places: Path) -> None:
    for name, gpu in (("a", H200), ("b", H100)):
        write(clean_places / f"{name}.msgpack", {PROBLEM: [measured(64, WIDE, 7.5)]}, gpus=[gpu])
    reload()
    explanation = explain(**NUMBERS, M=64, sm=90)
    first, second = explanation.to_dict()["measured_on"]
    assert {first, second} == {"NVIDIA H200", "NVIDIA H100 80GB HBM3"}
    assert explanation.chosen is not None
    assert explanation.chosen.gpu is not None
    assert explanation.chosen.gpu.name == first
    assert f"the answer for {first}; for {second}: aot explain MODEL --gpu NAME" in str(explanation)
    on_a_card = examine(snapshot(clean_places), PROBLEM, 64, ON_H200, aligned=True)
    assert on_a_card.measured_on == ()
    assert "the answer for" not in str(on_a_card)


def test_a_miss_says_torch_and_what_to_build(clean_places: Path) -> None:
    explanation = explain(**NUMBERS, M=64, sm=90, dtype="fp32")
    assert explanation.chosen is None
    assert "runs: torch" in str(explanation)
    assert "aot build --models" in str(explanation)
    assert explanation.to_dict()["runs"] == "torch"


def test_tensors_on_the_host(clean_places: Path) -> None:
    write(clean_places / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    reload()
    x, w = torch.empty(64, 768, dtype=torch.bfloat16), torch.empty(8, 1024, 768, dtype=torch.bfloat16)
    explanation = explain(x, w, torch.zeros(8, dtype=torch.int32), sm=90)
    assert explanation.problem == PROBLEM
    assert explanation.M == 64
    assert explanation.aligned
    odd = torch.empty(64, 769, dtype=torch.bfloat16)[:, 1:]
    assert not explain(odd, w, torch.zeros(8, dtype=torch.int32), sm=90).aligned


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({**NUMBERS, "M": 0, "sm": 90}, "M is 0"),
        ({**NUMBERS, "sm": 90}, "M is None"),
        ({"E": 8, "N": 8, "M": 4, "sm": 90}, "K is None"),
        ({**NUMBERS, "M": 4, "sm": 75}, "sm=75 is not supported, wanted one of 80"),
        ({**NUMBERS, "M": 4, "sm": 90, "dtype": "fp8"}, "bf16, fp16, fp32, tf32"),
        ({"x": torch.empty(2, 2), "sm": 90}, "wanted x, w and m_sizes"),
        ({"x": torch.empty(2, 2), "w": torch.empty(1, 2, 2), "sm": 90}, "wanted x, w and m_sizes"),
        ({"x": torch.empty(2, 2), "m_sizes": torch.zeros(1, dtype=torch.int32), "sm": 90}, "wanted x, w and m_sizes"),
        ({**NUMBERS, "M": 1.5, "sm": 90}, "M is 1.5, wanted the number of rows, an int"),
        ({**NUMBERS, "M": True, "sm": 90}, "M is True"),
        ({**NUMBERS, "M": 2**31, "sm": 90}, "M is 2147483648, wanted .* at most 2147483647"),
        ({**NUMBERS, "E": "4", "M": 4, "sm": 90}, "E is '4', wanted a size of w"),
        ({**NUMBERS, "N": 2**31, "M": 4, "sm": 90}, "N is 2147483648"),
        ({**NUMBERS, "K": 768.0, "M": 4, "sm": 90}, "K is 768.0"),
        ({"x": PROBLEM._replace(E=0), "M": 4, "sm": 90}, "E is 0"),
        ({"x": PROBLEM._replace(N=2**31), "M": 4, "sm": 90}, "N is 2147483648"),
        ({"x": PROBLEM, "M": "4", "sm": 90}, "M is '4'"),
        ({**NUMBERS, "M": 4, "top_k": 0, "sm": 90}, "top_k is 0, wanted the number of experts of a token"),
        ({**NUMBERS, "M": 4, "top_k": 1.5, "sm": 90}, "top_k is 1.5"),
        ({**NUMBERS, "M": 4, "sm": 90.0}, "sm=90.0 is not supported"),
        ({**NUMBERS, "M": 4, "sm": [90]}, r"sm=\[90\] is not supported"),
        ({**NUMBERS, "M": 4, "sm": 90, "dtype": torch.float64}, "torch.float64.* wanted a dtype of bf16"),
        ({**NUMBERS, "M": 4, "sm": 90, "dtype": ["bf16"]}, "wanted a dtype of bf16"),
        ({**NUMBERS, "M": 4, "sm": 90, "w_layout": "x"}, "a w_layout of nk, kn"),
    ],
)
def test_what_is_no_call(how: dict[str, object], words: str, clean_places: Path) -> None:
    with pytest.raises(InputError, match=words):
        explain(**how)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("dtype", "name"), [(torch.bfloat16, "bf16"), (torch.float16, "fp16"), (torch.float32, "fp32")]
)
def test_a_dtype_may_be_torchs(dtype: torch.dtype, name: str, clean_places: Path) -> None:
    explanation = explain(**NUMBERS, M=2**31 - 1, sm=90, dtype=dtype)
    assert explanation.problem == explain(**NUMBERS, M=4, sm=90, dtype=name).problem


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu_or_a_capability(clean_places: Path) -> None:
    with pytest.raises(HostError, match=r"no CUDA GPU here.*sm=90 explains for a GPU of 9\.0"):
        explain(**NUMBERS, M=4)


def test_what_the_call_would_raise(clean_places: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    good = write(clean_places / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    reload()
    assert explain(PROBLEM, M=64, sm=90).raises is None
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    assert explain(PROBLEM, M=64, sm=90).raises is None
    unbuilt = explain(PROBLEM, M=4096, sm=90)
    assert unbuilt.chosen is not None
    assert "the call raises: PRETUNED_STRICT" in str(unbuilt)
    assert unbuilt.to_dict()["raises"] == unbuilt.raises
    monkeypatch.delenv("PRETUNED_STRICT")
    monkeypatch.setenv("PRETUNED_BUNDLES", f"{good}:{tmp_path / 'gone.msgpack'}")
    reload()
    missing = explain(PROBLEM, M=64, sm=90)
    assert missing.chosen is not None
    assert "gone.msgpack" in (missing.raises or "")
    assert "PRETUNED_BUNDLES names this file" in (missing.raises or "")


def test_every_word_of_a_config_is_explained() -> None:
    page = Path(__file__).parents[3] / "docs" / "runtime" / "runtime.md"
    text = page.read_text().split("### What a config says")[1]
    section = text.split("\n### ")[0]
    values = {"loads": Loads, "schedule": Schedule, "cache": Cache, "edge": Edge, "rows": TileRows}
    plain = Config(128, 128, 64, 8, 3, schedule=Schedule.TILE)
    assert {name for name in Config._fields if not isinstance(Config._field_defaults.get(name), Enum)} == {
        "block_m",
        "block_n",
        "block_k",
        "num_warps",
        "num_stages",
        "group_m",
    }
    configs = [plain._replace(**{knob: value}) for knob, kind in values.items() for value in kind]
    words = {word for config in configs for word in str(config).split()} - set(str(plain).split())
    assert {word for word in words if f"`{word}`" in section} == words > {"tma", "cooperative"}


@pytest.mark.parametrize("sm", arch.supported())
def test_every_capability_has_a_representative(sm: int) -> None:
    local = made_up_gpu(sm)
    assert local.sm == sm
    assert local.gpu.sm_count > 0
    assert local.gpu.driver == 0


def test_a_dtype_that_no_bundle_has_ends_in_the_line_that_builds_it() -> None:
    explanation = explain(E=128, N=1536, K=2048, M=64, dtype="fp16", sm=80)
    line = 'aot build --models "Qwen/Qwen3-30B-A3B dtype=fp16 ops=forward" --sm 80'
    assert explanation.runs == "torch"
    assert str(explanation).endswith(f"\n  build it with: {line}")
    assert explanation.to_dict()["build"] == line
    assert line not in explanation.reason
    assert explain(E=128, N=1536, K=2048, M=64, sm=80).build is None


def test_quantised_weights_are_explained_as_the_kernel_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the bundle that ships: gate and up in mxfp4, of a tenth of gpt-oss-20b's columns."""
    monkeypatch.delenv("PRETUNED_BUNDLES", raising=False)
    reload()
    w = ExpertWeights.mxfp4(
        torch.zeros(32, 576, 1440, dtype=torch.uint8), torch.full((32, 576, 90), 120, dtype=torch.uint8)
    )
    x, m_sizes = torch.randn(4096, 2880).bfloat16(), torch.full((32,), 128, dtype=torch.int32)
    explanation = explain(x, w, m_sizes, sm=90)
    assert (explanation.problem.dtype, explanation.M, explanation.aligned, explanation.runs) == (
        DType.MXFP4,
        4096,
        True,
        "bundle",
    )
    assert not w.is_prepared
    assert len(explanation.steps) == 1
    assert explanation.steps[0].startswith("coded")
    w = w.prepare()
    explanation = explain(x, w, m_sizes, sm=90)
    assert (explanation.problem.dtype, explanation.M, explanation.aligned, explanation.runs) == (
        DType.MXFP4,
        4096,
        True,
        "bundle",
    )
    assert len(explanation.steps) == 1
    assert explanation.steps[0].startswith("rows_wna16")
    assert f"step 1: {explanation.steps[0]}" in str(explanation)
    gathered = explain(explanation.problem._replace(fusion=Fusion.GATHER), M=4096, sm=90)
    assert gathered.gathered_first
    assert [step.split()[0] for step in gathered.steps] == ["gather", "rows_wna16"]
    assert gathered.to_dict()["steps"] == list(gathered.steps)
    alone = explain(
        explanation.problem._replace(fusion=Fusion.GATHER), M=4, top_k=4, sm=90
    )  # its rows are all one token's
    assert not alone.gathered_first
    assert [step.split()[0] for step in alone.steps] == ["rows_wna16"]
    assert not explain(x.half(), w, m_sizes, sm=90).aligned  # no kernel reads fp16 beside them
    reload()


def test_a_format_of_weights_is_asked_for_by_its_name() -> None:
    """By the bundle that ships."""
    explanation = explain(E=32, N=5760, K=2880, M=4096, sm=90, weights="mxfp4")
    assert explanation.problem.dtype is DType.MXFP4
    assert explanation.runs == "bundle"
    assert explain(E=256, N=4096, K=7168, M=64, sm=90, weights="fp8_block").problem.dtype is DType.FP8_BLOCK_A16


@pytest.mark.parametrize(("format", "kernel"), [("fp8_block", "rows_w8a8"), ("fp8_channel", "rows_w8a8_channel")])
def test_it_says_whether_x_is_quantised_and_why(format: str, kernel: str) -> None:
    """By what ships: on 9.0 after a pass, on others that multiply e4m3 by the product itself."""
    layer = {"E": 128, "N": 1536, "K": 2048, "weights": format}
    few, many = (explain(M=M, sm=90, **layer) for M in (8, 1 << 16))  # type: ignore[arg-type]
    assert (few.problem.dtype.value, few.quantised_first) == (f"{format}_a16", False)
    assert "; quantising x is not faster: " in few.reason
    assert (many.problem.dtype.value, many.quantised_first, many.aligned) == (format, True, True)
    assert [step.split()[0] for step in many.steps] == ["quantise", kernel]
    assert many.to_dict()["quantised_first"] is True
    assert many.reason.startswith("quantising x is faster at M near 65536")
    gathered = explain(many.problem._replace(fusion=Fusion.GATHER), M=1 << 16, sm=90, top_k=8)
    assert (gathered.quantised_first, gathered.gathered_first) == (True, False)
    assert [step.split()[0] for step in gathered.steps] == ["quantise", kernel]
    assert explain(M=1 << 16, sm=90, **(layer | {"weights": f"{format}_a16"})).steps[0].startswith("rows_wna16")
    if format == "fp8_channel":  # which ships for 9.0 alone
        return
    for sm in (89, 100, 120):
        explanation = explain(M=1 << 16, sm=sm, **layer)  # type: ignore[arg-type]
        assert (explanation.problem.layout, explanation.quantised_first) == (Layout.STORED, False)
        assert [step.split()[0] for step in explanation.steps] == ["w8a8"]
    for sm in (80, 86):
        explanation = explain(M=1 << 16, sm=sm, **layer)  # type: ignore[arg-type]
        assert explanation.problem.dtype is DType.FP8_BLOCK_A16
        assert explanation.reason.endswith(f"; x stays bf16: sm_{sm} has no products of e4m3, so w becomes bf16")


@pytest.mark.parametrize(
    "weights", ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128", "fp8_block", "fp8_channel", "fp32"]
)
def test_what_no_bundle_has_ends_in_the_line_that_builds_it(tmp_path: Path, weights: str) -> None:
    problem = of_numbers(8, 1024, 768, "bf16", weights, "nk")
    explanation = examine(snapshot(tmp_path), problem, 64, ON_H200, aligned=True)
    last = str(explanation).splitlines()[-1]
    assert last.startswith("  build it with: aot build --models ")
    (spec,) = re.findall(r'"(.*)"', last)
    assert explanation.problem in plan(load_models([spec]).shapes).problems


@pytest.mark.parametrize(("N", "K"), [(96, 768), (1024, 96)])
def test_weights_of_no_whole_blocks_are_read_as_they_are_stored(tmp_path: Path, N: int, K: int) -> None:
    explanation = explain(E=8, N=N, K=K, M=64, sm=90, weights="mxfp4")
    assert explanation.problem.layout is Layout.STORED
    assert explanation.chosen is not None
    assert explanation.chosen.variant.layout is Layout.STORED
    explanation = examine(snapshot(tmp_path), explanation.problem, 64, ON_H200, aligned=True)
    (spec,) = re.findall(r'"(.*)"', str(explanation.build))
    assert explanation.problem in plan(load_models([spec]).shapes).problems


def test_a_capability_without_code_for_a_format_is_not_sent_to_a_build(tmp_path: Path) -> None:
    for sm in arch.supported():
        problem = of_numbers(8, 1024, 768, "bf16", "int4_g32", "nk")
        explanation = examine(snapshot(tmp_path), problem, 64, made_up_gpu(sm), aligned=True)
        able = bool(candidates(problem.op, problem.dtype, sm))
        assert (explanation.build is not None) == able
        assert (
            able or f"No kernel is for forward of int4_g32 weights on sm_{sm}: torch dequantises" in explanation.reason
        )


@pytest.mark.parametrize(("K", "slow"), [(1000, True), (1032, True), (1008, False), (1024, False), (1001, False)])
def test_rows_at_odd_multiples_of_16_bytes_are_noted(K: int, slow: bool, tmp_path: Path) -> None:
    problem = PROBLEM._replace(K=K)
    write(tmp_path / "a.msgpack", {problem: [measured(64, ANY, 9)]}, gpus=[H200])
    explanation = examine(snapshot(tmp_path), problem, 64, ON_H200, aligned=K % 8 == 0, strict=False)
    assert ("note: with K=" in str(explanation)) == slow
    assert (explanation.to_dict()["note"] is not None) == slow
