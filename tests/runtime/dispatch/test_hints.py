"""The line that builds what is missing, in the user's words, and that it does build it."""

from __future__ import annotations

import shlex
from dataclasses import replace
from pathlib import Path

import pytest
from small_bundles import ON_H200, SPECS, WIDE, modelled, snapshot, write

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.artifacts.records import DType, Fusion, Layout, Model, Op, Problem, bucket_of
from pretuned.runtime.dispatch.hints import build_line, remedy
from pretuned.runtime.dispatch.snapshot import View

GATE_UP = Problem(Op.FORWARD, DType.FP16, 128, 1536, 2048)


@pytest.fixture(scope="module")
def view(tmp_path_factory: pytest.TempPathFactory) -> View:
    """Of a bundle that was built for some models, sharded and not, in bf16."""
    models: list[Model] = []
    for spec in (
        "Qwen/Qwen3-30B-A3B tp=2,1",
        "Qwen/Qwen3-Omni-30B-A3B-Instruct",
        "openai/gpt-oss-20b dtype=bf16 layout=nk",
        "deepseek-ai/DeepSeek-V3 ep=8 dtype=bf16",
        "deepseek-ai/DeepSeek-V3 ep=8 dtype=bf16 shared=fuse",
        "shape:E=24,H=512,I=256,k=2 name=mine",
    ):
        models += plan(load_models([spec]).shapes).models
    models = [
        model._replace(problems=tuple(p for p in model.problems if not p.fusion & Fusion.SILU)) for model in models
    ]
    problems = {problem for model in models for problem in model.problems}
    forms = sorted({(problem.op, problem.fusion) for problem in problems}, key=str)
    specs = [replace(SPECS[WIDE], op=op, fusion=fusion) for op, fusion in forms]
    folder: Path = tmp_path_factory.mktemp("bundles")
    choices = {problem: [modelled(64, forms.index((problem.op, problem.fusion)))] for problem in problems}
    write(folder / "a.msgpack", choices, specs=specs, models=tuple(models))
    return snapshot(folder).view(ON_H200, installed=True)


def spec_of(line: str) -> str:
    words = shlex.split(line)
    assert words[:3] == ["aot", "build", "--models"]
    assert words[4:] == ["--sm", "90"]
    return words[3]


@pytest.mark.parametrize(
    ("problem", "spec"),
    [
        (GATE_UP, "Qwen/Qwen3-30B-A3B dtype=fp16 ops=forward"),
        (GATE_UP._replace(dtype=DType.BF16), "Qwen/Qwen3-30B-A3B dtype=bf16 ops=forward"),
        (
            Problem(Op.FORWARD, DType.BF16, 32, 4096, 7168),
            "deepseek-ai/DeepSeek-V3 ep=8 dtype=bf16 ops=forward",  # without dtype= it would be as published, in fp8
        ),
        (GATE_UP._replace(N=2048, K=768), "Qwen/Qwen3-30B-A3B dtype=fp16 ops=forward"),
        (GATE_UP._replace(fusion=Fusion.GATHER, top_k=8), "Qwen/Qwen3-30B-A3B dtype=fp16 ops=forward"),
        (GATE_UP._replace(N=768), "Qwen/Qwen3-30B-A3B tp=2 dtype=fp16 ops=forward"),
        (GATE_UP._replace(op=Op.DW, dtype=DType.FP32), "Qwen/Qwen3-30B-A3B dtype=fp32 ops=dW"),
        (Problem(Op.DX, DType.FP16, 32, 5760, 2880, Layout.KN), "openai/gpt-oss-20b dtype=fp16 layout=kn ops=dX"),
        (Problem(Op.FORWARD, DType.FP16, 32, 4096, 7168), "deepseek-ai/DeepSeek-V3 ep=8 dtype=fp16 ops=forward"),
        (
            Problem(Op.FORWARD, DType.FP16, 33, 4096, 7168),
            "deepseek-ai/DeepSeek-V3 ep=8 shared=fuse dtype=fp16 ops=forward",
        ),
        (Problem(Op.FORWARD, DType.FP16, 24, 512, 512), "shape:E=24,H=512,I=512,k=1 dtype=fp16 ops=forward"),
        (GATE_UP._replace(K=2056), "shape:E=128,H=1536,I=2056,k=1 dtype=fp16 ops=forward"),
    ],
)
@pytest.mark.parametrize("M", [64, 1 << 21])
def test_a_model_of_the_bundles_is_named(view: View, problem: Problem, spec: str, M: int) -> None:
    got = spec_of(build_line(problem, bucket_of(M), 90, view))
    assert got.split(" tokens=")[0] == spec
    wanted = plan(load_models([got]).shapes)
    assert bucket_of(M) in wanted.buckets[problem._replace(top_k=0)]


def test_more_rows_than_tokens_may_make_are_of_a_shape(view: View) -> None:
    assert spec_of(build_line(GATE_UP, 1 << 28, 90, view)).startswith("shape:")


def test_without_bundles_it_is_a_shape() -> None:
    assert spec_of(build_line(GATE_UP, 64, 90)) == "shape:E=128,H=1536,I=2048,k=1 dtype=fp16 ops=forward"


@pytest.mark.parametrize("sm", [70, 75, 101, 110])
def test_a_gpu_that_nothing_is_built_for_is_not_sent_to_a_build(sm: int, view: View) -> None:
    assert build_line(GATE_UP, 64, sm, view) is None
    assert remedy(GATE_UP, 64, sm, view).startswith(f"No kernels are built for sm_{sm} (only 80, 86, ")
    assert f"Build one with: {build_line(GATE_UP, 64, 90, view)}" == remedy(GATE_UP, 64, 90, view)


@pytest.mark.parametrize(
    "problem",
    [
        GATE_UP._replace(N=(1 << 20) + 8),
        GATE_UP._replace(K=1 << 24),
        GATE_UP._replace(E=65537),
    ],
)
def test_sizes_over_the_limits_of_a_spec_are_not_sent_to_a_build(problem: Problem, view: View) -> None:
    assert build_line(problem, 64, 90, view) is None
    assert "aot builds for E up to 65536, and H and I up to 1048576" in remedy(problem, 64, 90, view)
    assert build_line(GATE_UP._replace(N=1 << 20), 64, 90, view) is not None


def test_quantised_weights_are_asked_for_as_a_spec_has_them(view: View) -> None:
    problem = GATE_UP._replace(dtype=DType("mxfp4"))
    spec = spec_of(build_line(problem, 64, 90, view) or "")
    assert "weights=mxfp4" in spec
    assert problem.dtype in load_models([spec]).shapes[0].dtypes


def test_quantised_weights_that_no_kernel_is_for() -> None:
    message = remedy(Problem(Op.DW, DType.MXFP4, 32, 2048, 2048), 64, 90)
    assert message.startswith("No kernel is for dW of mxfp4 weights on sm_90: torch dequantises them")
    assert build_line(Problem(Op.DW, DType.MXFP4, 32, 2048, 2048), 64, 90) is None


def test_a_product_that_is_planned_as_another_is_of_no_model(view: View) -> None:
    problem = GATE_UP._replace(op=Op.DW, layout=Layout.KN)
    line = build_line(problem, 64, 90, view)
    assert line is not None
    assert "shape:E=128" in line
