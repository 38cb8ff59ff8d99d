"""Adapters by PEFT's ``target_parameters`` on experts that stay quantised, beside those of the dequantised model."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised
import torch
from tiny_adapters import IDS, NAMES, adapted, experts_of, fill, loaded, near, run

from pretuned.artifacts.errors import InputError
from pretuned.integrations.transformers import adapters
from pretuned.integrations.transformers.quantised import quantised

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' and PEFT's own
KINDS = ["fp8", "mxfp4", "int4"]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_dequantised_model_by_peft(
    peft: Any, checkpoints: dict[str, tiny_quantised.Pair], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = checkpoints[kind]
    model, twin = adapted(peft, loaded(pair.quantised)), adapted(peft, loaded(pair.twin, "eager"))
    for experts in experts_of(model):
        assert quantised(experts, "gate_up_proj") is not None
    shapes, wanted_shapes = (
        {name: (tensor.shape, tensor.dtype) for name, tensor in each.named_parameters() if "lora_" in name}
        for each in (model, twin)
    )
    assert shapes == wanted_shapes
    (got, grads), (wanted, wanted_grads) = run(model), run(twin)
    assert set(grads) == set(wanted_grads)
    assert all("lora_" in name for name in grads)
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    for name, grad in wanted_grads.items():
        assert near(grads[name], grad) < 1e-3, name
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        off, wanted_off = model(input_ids=IDS).logits, twin(input_ids=IDS).logits
    torch.testing.assert_close(off, wanted_off, rtol=1e-3, atol=1e-3)
    assert near(off, got) > 0.01
    assert not any(adapters.any_held(experts) for experts in experts_of(model))
    assert "pretuned" not in caplog.text


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_in_bf16_and_in_autocast(peft: Any, checkpoints: dict[str, tiny_quantised.Pair], kind: str) -> None:
    for dtype, cast in ((torch.bfloat16, False), (torch.float32, True)):
        model, twin = (
            adapted(peft, loaded(place, how, dtype))
            for place, how in zip(checkpoints[kind], ("pretuned", "eager"), strict=True)
        )
        with torch.autocast("cpu", torch.bfloat16, enabled=cast):
            (got, grads), (wanted, wanted_grads) = run(model), run(twin)
        assert near(got, wanted) < 3e-2
        for name, grad in wanted_grads.items():
            assert grads[name].dtype is grad.dtype
            assert near(grads[name], grad) < 6e-2, name


@pytest.mark.slow
@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])])
def test_twenty_steps_learn_and_what_is_saved_is_an_adapter_of_the_dequantised_model_too(
    peft: Any, checkpoints: dict[str, tiny_quantised.Pair], kind: str, tmp_path: Path
) -> None:
    pair = checkpoints[kind]
    losses: dict[str, list[float]] = {}
    models = {}
    for how, place in (("pretuned", pair.quantised), ("eager", pair.twin)):
        model = models[how] = adapted(peft, loaded(place, how))
        codes = {name: tensor.clone() for name, tensor in model.named_parameters() if "lora_" not in name}
        optimizer = torch.optim.AdamW(
            [parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-2
        )
        losses[how] = []
        for _ in range(20):
            loss = model(input_ids=IDS, labels=IDS).loss
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses[how].append(float(loss.detach()))
        assert all(
            torch.equal(codes[name].view(torch.uint8), parameter.view(torch.uint8))
            for name, parameter in model.named_parameters()
            if name in codes
        )
    assert losses["pretuned"][-1] < 0.8 * losses["pretuned"][0]
    torch.testing.assert_close(torch.tensor(losses["pretuned"]), torch.tensor(losses["eager"]), rtol=2e-2, atol=2e-2)
    wanted, _ = run(models["pretuned"])
    models["pretuned"].save_pretrained(tmp_path)
    for how, place in (("pretuned", pair.quantised), ("eager", pair.twin)):
        again = peft.PeftModel.from_pretrained(loaded(place, how), tmp_path, is_trainable=True)
        assert near(run(again)[0], wanted) < 1e-4
    base = loaded(pair.quantised)
    base.load_adapter(str(tmp_path))  # transformers' own way to it
    with torch.no_grad():
        assert near(base(input_ids=IDS).logits, wanted) < 1e-4


@pytest.mark.slow
def test_several_adapters_are_summed(peft: Any, checkpoints: dict[str, tiny_quantised.Pair]) -> None:
    results = []
    for place, how in zip(checkpoints["mxfp4"], ("pretuned", "eager"), strict=True):
        model = adapted(peft, loaded(place, how))
        alone, _ = run(model)
        config = {"lora_alpha": 6, "target_modules": [], "target_parameters": NAMES}
        model.add_adapter("other", peft.LoraConfig(r=3, **config))
        fill(model, 2)
        model.base_model.set_adapter(["default", "other"])
        results.append(run(model))
        assert near(results[-1][0], alone) > 1e-2
    (got, grads), (wanted, wanted_grads) = results
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    assert len(grads) == len(wanted_grads) == 16
    assert all(near(grads[name], grad) < 1e-3 for name, grad in wanted_grads.items())
    model = adapted(peft, loaded(checkpoints["mxfp4"].quantised), r=200)
    model.add_adapter("other", peft.LoraConfig(r=100, **config))
    model.base_model.set_adapter(["default", "other"])
    with pytest.raises(InputError, match=r"rank of the active adapters is 300 together, wanted at most 256"):
        model(input_ids=IDS)


@pytest.mark.slow
def test_checkpointed_copied_and_in_a_trainer(peft: Any, checkpoints: dict[str, tiny_quantised.Pair]) -> None:
    from transformers.trainer_utils import validate_quantization_for_training

    base = loaded(checkpoints["mxfp4"].quantised)
    with pytest.raises(ValueError, match="adapters"):
        validate_quantization_for_training(base)
    model = adapted(peft, peft.prepare_model_for_kbit_training(base, use_gradient_checkpointing=False))
    validate_quantization_for_training(model)
    wanted, grads = run(model)
    other, _ = run(copy.deepcopy(model))
    assert torch.equal(other, wanted)
    model.train()
    for reentrant in (True, False):
        model.gradient_checkpointing_enable({"use_reentrant": reentrant})
        model.enable_input_require_grads()
        got, ours_too = run(model)
        torch.testing.assert_close(got, wanted)
        for name, grad in grads.items():
            torch.testing.assert_close(ours_too[name], grad)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "part"),
    [
        ("fp8", "layer"),
        *(
            pytest.param(kind, part, marks=pytest.mark.nightly)
            for kind, part in (("fp8", "model"), ("mxfp4", "layer"), ("mxfp4", "model"))
        ),
    ],
)
def test_compiled_as_one_graph(peft: Any, checkpoints: dict[str, tiny_quantised.Pair], kind: str, part: str) -> None:
    model = adapted(peft, loaded(checkpoints[kind].quantised))
    wanted, grads = run(model)
    torch._dynamo.reset()
    (model if part == "model" else model.get_base_model().model.layers[0]).compile(backend="aot_eager", fullgraph=True)
    for _ in range(2):
        model.zero_grad()
        logits = model(input_ids=IDS).logits
        logits.float().square().mean().backward()
        torch.testing.assert_close(logits.detach(), wanted, rtol=1e-4, atol=1e-4)
        for name, tensor in model.named_parameters():
            if tensor.requires_grad:
                assert near(tensor.grad, grads[name]) < 1e-4
        for experts in experts_of(model):  # as a move does: what the graph reads goes along
            experts._apply(lambda tensor: tensor.clone())
    torch._dynamo.reset()


@pytest.mark.slow
def test_what_can_t_be_is_refused_by_name(peft: Any, checkpoints: dict[str, tiny_quantised.Pair]) -> None:
    place = checkpoints["mxfp4"].quantised
    for end in ("_blocks", "_scales"):
        with pytest.raises(InputError, match=r"a part of quantised weights, wanted '(gate_up|down)_proj'"):
            adapted(peft, loaded(place), target_parameters=[name + end for name in NAMES])
    with pytest.raises(InputError, match=r"LoraConfig: r is 300 for .*experts.gate_up_proj, wanted at most 256"):
        adapted(peft, loaded(place), r=300)
    model = adapted(peft, loaded(place), target_modules=["q_proj"])
    wanted, _ = run(model)
    q = model.base_model.model.model.layers[0].self_attn.q_proj
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(InputError, match=r"can't be merged: the weight is mxfp4.* load the model in bf16"):
            merge()
        assert not q.merged
    model.set_experts_implementation("eager")
    with pytest.raises(InputError, match=r"the experts run on 'eager', wanted 'pretuned'"):
        model(input_ids=IDS)
    model.set_experts_implementation("pretuned")
    assert torch.equal(run(model)[0], wanted)
    assert not [
        name for experts in experts_of(model) for name, _ in experts.named_parameters() if name.endswith("proj")
    ]


@pytest.mark.slow
def test_adapters_that_were_put_on_for_another_implementation_are_reported(
    peft: Any, checkpoints: dict[str, tiny_quantised.Pair]
) -> None:
    """PEFT's own would add to fp8 codes; what runs them then is transformers' code, where there is a GPU."""
    model = loaded(checkpoints["fp8"].quantised, "eager")
    assert not any(hasattr(type(module), "unmergeable") for module in adapted(peft, model).modules())
    model.set_experts_implementation("pretuned")
    for experts in experts_of(model):
        torch.nn.utils.parametrize.register_parametrization(experts, "gate_up_proj", torch.nn.Identity())
        with pytest.raises(InputError, match=r"gate_up_proj is codes that a parametrization adds to .*register\(\)"):
            quantised(experts, "gate_up_proj")
