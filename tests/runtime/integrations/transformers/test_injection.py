"""Adapters that PEFT finds by itself on quantised experts: compared with the dequantised model's."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import warm
from safetensors.torch import save_file
from tiny_adapters import IDS, adapted, experts_of, fill, loaded, near, run
from tiny_quantised import Pair

from pretuned.artifacts.errors import InputError

pytestmark = [pytest.mark.filterwarnings("ignore"), pytest.mark.slow]  # transformers' and PEFT's own warnings
KINDS = ["fp8", "int4", "packed"]  # of Qwen3-MoE, whose experts PEFT's conversion knows
PARTS = ["gate_proj", "up_proj", "down_proj"]
TARGETS: dict[str, Any] = {
    "all-linear": "all-linear",
    "names": ["q_proj", *PARTS],
    "regex": r".*\.(q_proj|gate_proj|up_proj|down_proj)",
    "down alone": ["down_proj"],
    "both": ["q_proj", "gate_up_proj"],
}


def lora_of(model: Any) -> dict[str, tuple[torch.Size, torch.dtype]]:
    return {name: (tensor.shape, tensor.dtype) for name, tensor in model.named_parameters() if "lora_" in name}


def both(pair: Pair, dtype: torch.dtype = torch.float32) -> list[Any]:
    return [loaded(pair.quantised, "pretuned", dtype), loaded(pair.twin, "eager", dtype)]


def same(model: Any, twin: Any) -> None:
    """The names, outputs and gradients of adapters are the twin's."""
    assert lora_of(model) == lora_of(twin)
    (got, grads), (wanted, wanted_grads) = run(model), run(twin)
    assert grads.keys() == wanted_grads.keys()
    torch.testing.assert_close(got, wanted, rtol=1e-3, atol=1e-3)
    for name, grad in wanted_grads.items():
        assert near(grads[name], grad) < 1e-3, name


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("kind", KINDS)
def test_target_modules_adapt_what_they_adapt_in_the_dequantised_model(
    peft: Any, checkpoints: dict[str, Pair], kind: str, target: str
) -> None:
    results, configs, said = [], [], []
    for base in both(checkpoints[kind]):
        config = peft.LoraConfig(r=4, lora_alpha=6, target_modules=TARGETS[target])
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            results.append(peft.get_peft_model(base, config))
        said.append(sorted(str(warning.message) for warning in warned if "pattern keys" in str(warning.message)))
        fill(results[-1])
        configs.append((config.target_modules, config.target_parameters, config.rank_pattern, config.alpha_pattern))
        assert config._custom_modules is None
    assert configs[0] == configs[1]
    assert said[0] == said[1]
    model, twin = results
    assert len([name for name in lora_of(model) if "experts" in name]) == {"both": 0, "down alone": 4}.get(target, 8)
    same(model, twin)
    with model.disable_adapter(), twin.disable_adapter(), torch.no_grad():
        torch.testing.assert_close(model(IDS).logits, twin(IDS).logits, rtol=1e-3, atol=1e-3)


def test_gpt_oss_has_no_experts_among_its_linear_layers(peft: Any, checkpoints: dict[str, Pair]) -> None:
    for target in ("all-linear", ["q_proj", "gate_up_proj", "down_proj"]):
        model, twin = (
            adapted(peft, base, target_modules=target, target_parameters=None) for base in both(checkpoints["mxfp4"])
        )
        same(model, twin)
        model, twin = (adapted(peft, base, target_modules=target) for base in both(checkpoints["mxfp4"]))
        assert any("experts" in name for name in lora_of(model))
        same(model, twin)


def saved_by_an_older_stack(folder: Path, base: Path, target: Any) -> dict[str, torch.Tensor]:
    """Save an adapter of q_proj and of each expert's three weights; return W's changes by transformers 5's names."""
    r, alpha = 3, 6
    config = json.loads((base / "config.json").read_text())
    H, I, E = config["hidden_size"], config["moe_intermediate_size"], config["num_local_experts"]  # noqa: E741
    generator = torch.Generator().manual_seed(5)
    saved, changes = {}, {}

    def matrix(module: str, N: int, K: int) -> torch.Tensor:
        A, B = (0.2 * torch.randn(shape, generator=generator) for shape in ((r, K), (N, r)))
        saved.update({f"base_model.model.{module}.lora_{name}.weight": w for name, w in (("A", A), ("B", B))})
        return alpha / r * (B @ A)

    for layer in range(config["num_hidden_layers"]):
        q = f"model.layers.{layer}.self_attn.q_proj"
        changes[f"{q}.weight"] = matrix(q, config["num_attention_heads"] * config["head_dim"], H)
        experts = f"model.layers.{layer}.mlp.experts"
        gate, up, down = (
            [matrix(f"{experts}.{e}.{part}", *((H, I) if part == "down_proj" else (I, H))) for e in range(E)]
            for part in PARTS
        )
        changes[f"{experts}.gate_up_proj"] = torch.cat([torch.stack(gate), torch.stack(up)], 1)
        changes[f"{experts}.down_proj"] = torch.stack(down)
    folder.mkdir()
    save_file(saved, folder / "adapter_model.safetensors", {"format": "pt"})
    (folder / "adapter_config.json").write_text(
        json.dumps(
            {
                "peft_type": "LORA",
                "task_type": "CAUSAL_LM",
                "r": r,
                "lora_alpha": alpha,
                "target_modules": target,
                "base_model_name_or_path": str(base),
                "inference_mode": True,
            }
        )
    )
    return changes


@pytest.mark.parametrize("target", ["names", "regex"])
@pytest.mark.parametrize("kind", KINDS)
def test_adapters_of_each_expert_that_older_stacks_saved_are_loaded(
    peft: Any, checkpoints: dict[str, Pair], kind: str, target: str, tmp_path: Path
) -> None:
    import transformers

    pair = checkpoints[kind]
    changes = saved_by_an_older_stack(tmp_path / "adapter", pair.quantised, TARGETS[target])
    changed = loaded(pair.twin, "eager")
    with torch.no_grad():
        before = changed(IDS).logits
        for name, parameter in changed.named_parameters():
            if name in changes:
                parameter += changes.pop(name)
        wanted = changed(IDS).logits
    assert not changes
    assert near(before, wanted) > 0.1

    def by_transformers() -> Any:
        model = loaded(pair.quantised)
        info = model.load_adapter(str(tmp_path / "adapter"))
        assert not info.missing_keys
        assert not info.unexpected_keys
        return model

    def by_state_dict() -> Any:
        config = peft.PeftConfig.from_pretrained(tmp_path / "adapter")
        model = peft.get_peft_model(loaded(pair.quantised), config)
        done = peft.set_peft_model_state_dict(model, peft.load_peft_weights(str(tmp_path / "adapter"), "cpu"))
        assert not done.unexpected_keys
        return model

    for load in (
        lambda: peft.PeftModel.from_pretrained(loaded(pair.quantised), tmp_path / "adapter"),
        lambda: peft.PeftModel.from_pretrained(loaded(pair.quantised), tmp_path / "adapter", low_cpu_mem_usage=True),
        lambda: transformers.AutoModelForCausalLM.from_pretrained(
            tmp_path / "adapter", experts_implementation="pretuned", dtype=torch.float32
        ),
        by_transformers,
        by_state_dict,
    ):
        with warnings.catch_warnings(record=True) as warned, torch.no_grad():
            warnings.simplefilter("always")
            model = load()
            assert near(model(input_ids=IDS).logits, wanted) < 1e-4
        assert not [warning for warning in warned if "missing adapter keys" in str(warning.message)]
        assert len([name for name in lora_of(model) if "experts" in name]) == 8


@pytest.mark.parametrize("kind", [KINDS[0], *(pytest.param(kind, marks=pytest.mark.nightly) for kind in KINDS[1:])])
def test_several_adapters_are_saved_loaded_switched_and_deleted(
    peft: Any, checkpoints: dict[str, Pair], kind: str, tmp_path: Path
) -> None:
    def config(r: int) -> Any:
        return peft.LoraConfig(r=r, lora_alpha=6, target_modules="all-linear")

    results = []
    for base in both(checkpoints[kind]):
        model = peft.get_peft_model(base, config(4))
        model.add_adapter("second", config(3))
        fill(model)
        model.base_model.set_adapter(["default", "second"])
        results.append(model)
    model, twin = results
    same(model, twin)
    model.save_pretrained(tmp_path)
    with torch.no_grad():
        sums, wanted_sums = model(IDS).logits, twin(IDS).logits
        model.set_adapter("second")
        twin.set_adapter("second")
        second = model(IDS).logits
        assert near(second, twin(IDS).logits) < 1e-3
        assert near(second, sums) > 1e-2
        for place, how in zip(checkpoints[kind], ("pretuned", "eager"), strict=True):
            again = peft.PeftModel.from_pretrained(loaded(place, how), tmp_path)
            again.load_adapter(tmp_path / "second", "second")
            again.base_model.set_adapter(["default", "second"])
            assert near(again(IDS).logits, wanted_sums) < 1e-3
            again.delete_adapter("default")
            again.set_adapter("second")
            assert near(again(IDS).logits, second) < 1e-3
        merged = again.merge_and_unload()  # the way that a refused merge names, on the twin
        assert near(merged(IDS).logits, second) < 1e-3
    for merge in (model.merge_and_unload, model.merge_adapter):
        with pytest.raises(InputError, match=r"can't be merged: .* load the model in bf16 .* and merge there"):
            merge()
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, second)
        assert torch.equal(model.unload()(IDS).logits, loaded(checkpoints[kind].quantised)(IDS).logits)


@pytest.mark.parametrize("kind", [*KINDS, "mxfp4"])
def test_modules_to_save_are_trained_or_refused(
    peft: Any, checkpoints: dict[str, Pair], kind: str, tmp_path: Path
) -> None:
    router = "mlp.router" if kind == "mxfp4" else "mlp.gate"
    model, twin = (adapted(peft, base, modules_to_save=[router, "embed_tokens"]) for base in both(checkpoints[kind]))
    same(model, twin)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "modules_to_save" in name:
                parameter *= 1.5
        wanted = model(IDS).logits
        model.save_pretrained(tmp_path)
        for place, how in zip(checkpoints[kind], ("pretuned", "eager"), strict=True):
            assert near(peft.PeftModel.from_pretrained(loaded(place, how), tmp_path)(IDS).logits, wanted) < 1e-3
    for name in ("experts", "mlp"):
        base = loaded(checkpoints[kind].quantised)
        before = [(key, type(module)) for key, module in base.named_modules()], base.state_dict().keys()
        with pytest.raises(InputError, match=rf"modules_to_save is .*'{name}'.*layers.0.mlp.experts has quantised"):
            adapted(peft, base, modules_to_save=[router, name])
        assert ([(key, type(module)) for key, module in base.named_modules()], base.state_dict().keys()) == before


def test_ranks_above_the_most_are_refused_before_the_model_is_changed(peft: Any, checkpoints: dict[str, Pair]) -> None:
    base = loaded(checkpoints["int4"].quantised)
    with pytest.raises(InputError, match=r"r is 258 for .*experts.gate_up_proj \(gate_proj and up_proj .*most 256"):
        peft.get_peft_model(base, peft.LoraConfig(r=129, target_modules="all-linear"))
    assert not lora_of(base)
    model = adapted(peft, base, r=128, target_modules="all-linear", target_parameters=None)
    same(
        model,
        adapted(
            peft, loaded(checkpoints["int4"].twin, "eager"), r=128, target_modules="all-linear", target_parameters=None
        ),
    )


@pytest.mark.parametrize("kind", ["int4", "mxfp4"])
def test_codes_that_run_elsewhere_are_refused(peft: Any, checkpoints: dict[str, Pair], kind: str) -> None:
    base = loaded(checkpoints[kind].quantised)
    base.set_experts_implementation("eager")
    for target in (
        [{}] if kind == "mxfp4" else [{}, *({"target_modules": TARGETS[style]} for style in ("names", "regex"))]
    ):
        with pytest.raises(InputError, match=r"layers.0.mlp.experts.* runs on 'eager'.*set_experts_implementation\("):
            adapted(peft, base, **({"target_parameters": None} if target else {}) | target)
        assert not lora_of(base)
    base.set_experts_implementation("pretuned")
    same(adapted(peft, base), adapted(peft, loaded(checkpoints[kind].twin, "eager")))


def test_replicated_layers_share_codes_and_show_none_of_them(peft: Any, checkpoints: dict[str, Pair]) -> None:
    model, twin = (
        adapted(peft, base, layer_replication=[(0, 2), (0, 2)], target_modules="all-linear", target_parameters=None)
        for base in both(checkpoints["int4"])
    )
    same(model, twin)
    assert len(experts_of(model)) == 4
    assert not [experts for experts in experts_of(model) if "gate_up_proj" in experts._parameters]


_ORDERS = """
import sys
import torch, peft, transformers
from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer
from tiny_adapters import IDS, NAMES, adapted, fill, loaded, near, run
from pretuned.artifacts.errors import InputError
from pretuned.integrations.transformers import register

FineGrainedFP8HfQuantizer.validate_environment = lambda self, *_, **__: None
quantised, twin = sys.argv[1:]
everything = {"target_modules": "all-linear", "target_parameters": None}
attention = {"target_modules": ["q_proj"], "target_parameters": None}
plain = adapted(peft, loaded(twin, "eager"), **everything)
wanted, _ = run(plain)
on_codes, other = (adapted(peft, loaded(quantised, "eager"), **one) for one in (everything, attention))
register()
for model in (plain, on_codes, other):
    model.set_experts_implementation("pretuned")
assert near(run(plain)[0], wanted) < 1e-5
try:
    on_codes(IDS)
except InputError as error:
    assert "experts_implementation='pretuned'" in str(error), error
else:
    raise SystemExit("adapters that PEFT adds to codes ran")
other.add_adapter("second", peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
fill(other)
other.set_adapter("second")
twin_of = adapted(peft, loaded(twin, "eager"), **attention)
twin_of.add_adapter("second", peft.LoraConfig(r=4, lora_alpha=6, target_modules="all-linear"))
fill(twin_of)
twin_of.set_adapter("second")
(got, grads), (wanted, wanted_grads) = run(other), run(twin_of)
assert near(got, wanted) < 1e-3 and grads.keys() == wanted_grads.keys()
assert any("experts" in name for name in grads)
"""


def test_adapters_put_on_before_register(checkpoints: dict[str, Pair]) -> None:
    pair = checkpoints["fp8"]
    place = {"PYTHONPATH": str(Path(__file__).resolve().parents[3] / "support")}
    done = warm.run(["-c", _ORDERS, pair.quantised, pair.twin], env=os.environ | place)
    assert done.returncode == 0, done.stderr[-3000:]
