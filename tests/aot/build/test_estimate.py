"""The times that ``aot plan`` estimates, compared with those that a build took."""

from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.aot.cli.plan import estimate
from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.shipped import Shipped
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import BuildPlan, plan
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Spec

# A build of these by ``--no-cache --measure no`` on two cores of a server, at the commit that this test came with.
MODELS = (
    "Qwen/Qwen3-30B-A3B tp=1,2,4",
    "Qwen/Qwen3-Next-80B-A3B-Instruct tp=1,4",
    "mistralai/Mixtral-8x7B-v0.1 tp=1,2",
    "deepseek-ai/DeepSeek-V3 ep=8 weights=bf16",
    "zai-org/GLM-4.5-Air tp=1,2 ep=1,4",
    "openai/gpt-oss-20b layout=nk weights=bf16 tokens=1..16384",
    "allenai/OLMoE-1B-7B-0924 dtype=bf16,fp16",
    "shape:E=16,H=2048,I=1024,k=2 name=example",
)
CPU_S = {80: 248, 90: 364}
SIZE_BYTES = {80: 3_879_914, 90: 6_657_243}


@pytest.fixture(scope="module")
def planned() -> BuildPlan:
    return plan(load_models(MODELS).shapes)


def test_it_is_near_what_a_build_took(planned: BuildPlan) -> None:
    for expected in estimate(planned, (80, 90), None, 1, lambda sm: Shipped()):
        assert expected.shipped == 0
        assert expected.seconds == pytest.approx(CPU_S[expected.sm], rel=0.15)
        assert expected.size_bytes == pytest.approx(SIZE_BYTES[expected.sm], rel=0.15)


def test_workers_share_the_time(planned: BuildPlan) -> None:
    single, two = (estimate(planned, (90,), None, workers, lambda sm: Shipped())[0] for workers in (1, 2))
    assert 0.5 * single.seconds < two.seconds < 0.53 * single.seconds


class Plain(CompileCache):
    """Has all but specialised code."""

    def has(self, spec: Spec | RowOpSpec, sm: int) -> bool:
        return isinstance(spec, RowOpSpec) or not spec.config.schedule.warp_specialized


@pytest.mark.slow
def test_what_is_compiled_costs_nothing_and_specialised_code_more(planned: BuildPlan, tmp_path: Path) -> None:
    (estimated,) = estimate(planned, (90,), None, workers=1)
    (rest,) = estimate(planned, (90,), Plain(tmp_path), workers=1)
    assert estimated.cached == 0
    assert rest.variants == estimated.variants
    left = (rest.variants - (rest.cached or 0)) / estimated.variants
    assert 0.1 < left < 0.4
    assert 1.5 * left < rest.seconds / estimated.seconds < 3 * left
    (none,) = estimate(planned, (80,), Plain(tmp_path), workers=1)
    assert none.cached == none.variants
    assert none.seconds < 4.0  # 3 s on two cores: reading what ships, and choosing
