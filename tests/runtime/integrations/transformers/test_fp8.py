"""``register(training="fp8")``: which experts it trains in fp8, and a small model whose loss follows bf16's."""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from calls import calls_of

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Op, Problem
from pretuned.integrations import transformers as ours
from pretuned.runtime import reload

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' own

V, S, BATCH = 64, 32, 4  # of the data: tokens that follow each other by fixed chances


@pytest.fixture
def library() -> Iterator[Any]:
    yield pytest.importorskip("transformers", minversion="5.8")
    ours.register()


def model_of(library: Any, *, wide: int = 128, **more: Any) -> Any:
    config = library.Qwen3MoeConfig(
        vocab_size=V,
        hidden_size=128,
        intermediate_size=128,
        moe_intermediate_size=wide,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=64,
        num_experts=4,
        num_experts_per_tok=2,
        **more,
    )
    torch.manual_seed(0)
    model = library.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.set_experts_implementation("pretuned")
    return model


def batches(seed: int, many: int) -> Iterator[torch.Tensor]:
    chances = torch.rand(V, V, generator=torch.Generator().manual_seed(7)) ** 8
    g = torch.Generator().manual_seed(seed)
    for _ in range(many):
        ids = torch.randint(0, V, (BATCH, 1), generator=g)
        for _ in range(S - 1):
            ids = torch.cat([ids, torch.multinomial(chances[ids[:, -1]], 1, generator=g)], 1)
        yield ids


def precisions(model: Any) -> list[Any]:
    with calls_of(ours.moe_mlp) as calls:
        model(next(batches(1, 1))).logits.float().square().mean().backward()
    return [call.arguments.get("precision") for call in calls]


def test_experts_that_learn_run_in_fp8(library: Any) -> None:
    ours.register(training="fp8")
    model = model_of(library)
    assert precisions(model) == ["fp8"]
    experts = model.model.layers[0].mlp.experts
    assert experts.gate_up_proj.grad.dtype is torch.bfloat16
    experts.requires_grad_(False)
    assert precisions(model) == [None]  # frozen ones gain nothing that quantised weights would not
    experts.requires_grad_(True)
    ours.register()
    assert precisions(model) == [None]
    with pytest.raises(InputError, match="training is 'int8', wanted 'fp8'"):
        ours.register(training="int8")


def test_adapters_keep_their_precision(library: Any) -> None:
    peft = pytest.importorskip("peft", minversion="0.21")
    ours.register(training="fp8")
    model = model_of(library)
    names = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
    model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=[], target_parameters=names))
    assert precisions(model) == [None]


def test_what_fp8_does_not_take_is_logged_once(
    library: Any, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours.register(training="fp8")
    ours._tell.cache_clear()
    model = model_of(library, wide=96)
    for _ in range(2):
        assert precisions(model)[-1] is None
    (line,) = [record.getMessage() for record in caplog.records if record.name == ours.__name__]
    assert line.startswith("pretuned: Qwen3MoeExperts is not trained in fp8: moe_mlp: I=96")
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    with pytest.raises(InputError, match="I=96"):
        precisions(model)
    monkeypatch.undo()
    reload()


def test_the_kernels_of_both_directions_are_loaded(library: Any) -> None:
    ours.register(training="fp8")
    experts, names = model_of(library).model.layers[0].mlp.experts, ("gate_up_proj", "down_proj")
    coded = {Problem(Op.FORWARD, DType.FP8_BLOCK, 4, N, K) for N, K in ((256, 128), (128, 256), (128, 128))}
    coded |= {Problem(Op.DW, DType.FP8_BLOCK, 4, N, 128) for N in (256, 128)}
    assert {
        problem for problem in ours._problems(experts, names, [None, None]) if problem.dtype is DType.FP8_BLOCK
    } == coded
    experts.requires_grad_(False)
    assert not coded & ours._problems(experts, names, [None, None])


def losses(library: Any, training: str | None, seed: int, steps: int) -> list[float]:
    ours.register(training=training)
    model = model_of(library)
    optimizer = torch.optim.AdamW(model.parameters(), lr=2e-3)
    results = []
    for ids in batches(seed, steps):
        loss = model(ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        results.append(loss.item())
    return results


@pytest.mark.slow
@pytest.mark.parametrize("steps", [100, pytest.param(200, marks=pytest.mark.nightly)])
def test_many_steps_follow_the_loss_of_bf16(library: Any, steps: int) -> None:
    """The means of 25 steps are nearer to bf16's of the same batches than bf16's of others."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # small products: more threads wait for each other
    try:
        bf16, fp8 = (losses(library, training, 1, steps) for training in (None, "fp8"))
        other = losses(library, None, 2, steps)
    finally:
        torch.set_num_threads(threads)
    means = [[statistics.mean(run[i : i + 25]) for i in range(0, steps, 25)] for run in (bf16, fp8, other)]
    apart, noise = (max(abs(a - b) for a, b in zip(means[0], run, strict=True)) for run in means[1:])
    print(f"bf16 {bf16[0]:.3f} to {means[0][-1]:.3f}: fp8 at most {apart:.4f} apart, noise {noise:.4f}")
    assert means[0][-1] < means[0][0] - 0.5
    assert fp8 != bf16
    assert apart < noise
    assert apart < 0.02
