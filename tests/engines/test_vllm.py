"""Real vLLM engines in this process, on the CPU: what they say with pretuned's plug-in and without."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_models import MODELS, save
from vllm_engine import NEW_TOKENS, Told, generate, lines, run

pytestmark = pytest.mark.filterwarnings("default")
_LAYERS = dict.fromkeys(MODELS, 2) | {"DeepSeek-V3": 1, "GLM-4-MoE": 1}  # with experts
_ONE = "Qwen3-MoE"


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The tokens of each call of a layer on pretuned."""
    from pretuned.integrations.vllm.experts import PretunedExperts

    seen: list[int] = []
    apply = PretunedExperts.apply

    def counted(self: Any, output: torch.Tensor, **kwargs: Any) -> None:
        seen.append(output.shape[0])
        apply(self, output, **kwargs)

    monkeypatch.setattr(PretunedExperts, "apply", counted)
    return seen


def like(said: Told, other: Told, tolerance: float) -> bool:
    """Return True if the tokens are the same, and their probabilities nearly."""
    pairs = zip(itertools.chain(*said.logprobs), itertools.chain(*other.logprobs), strict=True)
    return said.tokens == other.tokens and all(abs(ours - two) <= tolerance for ours, two in pairs)


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name in ("DeepSeek-V3", "gpt-oss") else pytest.mark.nightly) for name in MODELS],
)
def test_a_model_says_the_same(name: str, models: dict[str, Path], without: dict[str, Told], calls: list[int]) -> None:
    def ask(llm: Any) -> Told:
        calls.clear()  # of the run that measures memory
        return generate(llm)

    wanted = without[name]  # before: vLLM sets up its loggers when the first engine starts
    with lines() as logged:
        said = run(models[name], "1", ask)
    assert like(said, wanted, 1e-4)
    steps = NEW_TOKENS * _LAYERS[name]  # each makes a token for both prompts, but where the second begins a step later
    assert steps <= len(calls) <= steps + _LAYERS[name]
    assert sum(calls) == _LAYERS[name] * (45 + 2 * (NEW_TOKENS - 1))
    assert len(logged) == 1
    assert logged[0].startswith("pretuned: runs the MoE layers of E=8 H=64 I=")


def test_bfloat16(models: dict[str, Path], without: dict[str, Told], calls: list[int]) -> None:
    said = run(models[_ONE], "1", generate, dtype="bfloat16")
    assert calls
    assert said.logprobs[1][0] == pytest.approx(without[_ONE].logprobs[1][0], abs=0.05)


def test_an_activation_that_is_none_of_pretuned_s_stays_with_vllm(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], without: dict[str, Told], calls: list[int]
) -> None:
    from pretuned.integrations.vllm import experts

    monkeypatch.delitem(experts._ACTIVATIONS, "swigluoai")
    with lines() as logged:
        said = run(models["gpt-oss"], "1", generate)
    assert said == without["gpt-oss"]
    assert not calls
    (told_once,) = logged
    assert "to vLLM's CPU backend: the activation swigluoai is none of pretuned's (silu, gelu, " in told_once


def test_weights_that_are_loaded_again_are_read_in_chunks_of_a_prompt(
    models: dict[str, Path], without: dict[str, Told], calls: list[int], tmp_path: Path
) -> None:
    other = save(_ONE, tmp_path / "other", seed=1)
    own = run(other, "0", generate)

    def ask(llm: Any) -> tuple[Told, Told]:
        calls.clear()
        first = generate(llm)
        llm.collective_rpc("reload_weights", kwargs={"weights_path": str(other)})
        return first, generate(llm)

    first, second = run(models[_ONE], "1", ask, max_num_batched_tokens=16, enable_prefix_caching=False)
    assert like(first, without[_ONE], 1e-4)
    assert like(second, own, 1e-4)
    assert max(calls) == 16  # of the prompt of 40 tokens


def test_torch_compile_traces_it(
    monkeypatch: pytest.MonkeyPatch, models: dict[str, Path], without: dict[str, Told]
) -> None:
    monkeypatch.setenv("VLLM_CPU_CI_ENV", "1")  # vLLM's own: the graph is traced, and run without a C++ compiler
    monkeypatch.delenv("TORCHDYNAMO_DISABLE")

    wanted, counters = without[_ONE], torch._dynamo.utils.counters
    counters.clear()

    def ask(llm: Any) -> tuple[Told, int, int]:
        return generate(llm), counters["stats"]["unique_graphs"], sum(counters["graph_break"].values())

    with lines() as logged:
        said, traced, breaks = run(models[_ONE], "1", ask, enforce_eager=False)
    assert like(said, wanted, 1e-4)
    assert len(logged) == 1
    assert traced  # the model: vLLM's other functions were left as they are when they were imported
    assert not breaks
