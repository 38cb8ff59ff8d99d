"""Adapters by PEFT's ``target_parameters`` on models that run on pretuned: PEFT's own results, and their gradients."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from calls import calls_of
from torch.utils._python_dispatch import TorchDispatchMode

from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers import adapters

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' and PEFT's own

TINY = {
    "vocab_size": 97,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3_moe": {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24, "head_dim": 8},
    "mixtral": {"num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 8},
    "olmoe": {"num_experts": 6, "num_experts_per_tok": 3},
    "gpt_oss": {"num_local_experts": 6, "num_experts_per_tok": 2, "head_dim": 8},
    "granitemoe": {"num_local_experts": 4, "num_experts_per_tok": 2},
    "deepseek_v3": {
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 24,
        "n_group": 2,
        "topk_group": 1,
        "first_k_dense_replace": 1,
        "num_key_value_heads": 4,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 8,
    },
}
IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])


@pytest.fixture(scope="module")
def peft() -> Any:
    library = pytest.importorskip("peft", minversion="0.21")
    pytest.importorskip("transformers", minversion="5.8")
    from transformers.integrations.moe import ExpertsInterface

    ExpertsInterface.register("pretuned", ours.experts_forward)
    return library


@pytest.fixture(autouse=True)
def nothing_told() -> None:
    adapters._logged.clear()


def base(kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    import transformers

    config = transformers.AutoConfig.for_model(kind, **(TINY | MODELS[kind] | sizes))
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=dtype)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(0, 0.2)
    return model.eval()


def config_of(peft: Any, **more: Any) -> Any:
    settings = {
        "r": 4,
        "lora_alpha": 6,
        "target_modules": [],
        "init_lora_weights": False,
        "target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"],
    }
    return peft.LoraConfig(**(settings | more))


def adapted_model(peft: Any, kind: str = "qwen3_moe", dtype: torch.dtype = torch.float32, **sizes: int) -> Any:
    model = base(kind, dtype, **sizes)
    names = [name for name, _ in model.named_parameters() if name.endswith(("gate_up_proj", "down_proj"))]
    names = [name for name in names if "experts" in name]
    assert names
    model = peft.get_peft_model(model, config_of(peft, target_parameters=names))
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))
    return model


def run(model: Any, how: str) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.get_base_model().set_experts_implementation(how)
    model.zero_grad()
    logits = model(input_ids=IDS).logits
    logits.float().square().mean().backward()
    return logits.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


@pytest.mark.slow
@pytest.mark.parametrize("kind", MODELS)
def test_logits_and_gradients_are_peft_s_own(peft: Any, kind: str, caplog: pytest.LogCaptureFixture) -> None:
    model = adapted_model(peft, kind)
    (wanted, grads), (got, ours_too) = run(model, "eager"), run(model, "pretuned")
    assert not caplog.records  # every adapter was recognised
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    assert set(ours_too) == set(grads)
    assert all("lora_" in name for name in grads)
    for name, grad in grads.items():
        torch.testing.assert_close(ours_too[name], grad, rtol=1e-3, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_in_bf16(peft: Any, kind: str) -> None:
    """One layer: its router has the same input in both, so no token may go elsewhere by a rounding."""
    model = adapted_model(peft, kind, torch.bfloat16, num_hidden_layers=1)
    assert {tensor.dtype for name, tensor in model.named_parameters() if "lora_" in name} == {torch.float32}
    (wanted, grads), (got, ours_too) = run(model, "eager"), run(model, "pretuned")
    for tensor, other in ((got, wanted), *((ours_too[name], grad) for name, grad in grads.items())):
        assert float((tensor.float() - other.float()).norm() / other.float().norm()) < 2e-2


def kept_sizes(model: Any, how: str) -> set[int]:
    """The sizes of what a forward keeps for the backward, beside parameters."""
    model.get_base_model().set_experts_implementation(how)
    mine = {parameter.data_ptr() for parameter in model.parameters()}
    kept: set[int] = set()
    with torch.autograd.graph.saved_tensors_hooks(
        lambda tensor: kept.add(0 if tensor.data_ptr() in mine else tensor.untyped_storage().nbytes()) or tensor,
        lambda tensor: tensor,
    ):
        model(input_ids=IDS)
    return kept


def test_no_weight_with_its_adapter_is_kept(peft: Any) -> None:
    model = adapted_model(peft, hidden_size=64, moe_intermediate_size=96)
    whole = 6 * 2 * 96 * 64 * 4
    assert whole in kept_sizes(model, "eager")
    assert max(kept_sizes(model, "pretuned")) < whole // 2


def test_what_is_not_recognised_goes_peft_s_way_and_is_reported_once(
    peft: Any, caplog: pytest.LogCaptureFixture
) -> None:
    model = adapted_model(peft)
    model.add_adapter("other", config_of(peft, target_parameters=model.peft_config["default"].target_parameters))
    model.base_model.set_adapter(["default", "other"])
    (wanted, grads), (got, ours_too) = run(model, "eager"), run(model, "pretuned")
    torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)
    for name, grad in grads.items():
        torch.testing.assert_close(ours_too[name], grad, rtol=1e-3, atol=1e-5)
    (record,) = caplog.records
    assert "several active adapters" in record.getMessage()


def test_another_parametrization_is_applied(peft: Any, caplog: pytest.LogCaptureFixture) -> None:
    class Double(torch.nn.Module):
        def forward(self, W: torch.Tensor) -> torch.Tensor:
            return 2 * W

    model = base()
    for module in model.modules():
        if hasattr(module, "has_bias"):
            torch.nn.utils.parametrize.register_parametrization(module, "gate_up_proj", Double())
    logits = []
    for how in ("eager", "pretuned"):
        model.set_experts_implementation(how)
        logits.append(model(IDS).logits)
    torch.testing.assert_close(logits[1], logits[0], rtol=1e-4, atol=1e-5)
    assert "is no adapter of PEFT's" in caplog.text


@pytest.mark.slow
def test_a_peft_whose_code_is_another_is_not_recognised(
    peft: Any, monkeypatch: pytest.MonkeyPatch, caplog: Any
) -> None:
    from peft.tuners.lora import layer

    model = adapted_model(peft)
    before, _ = run(model, "pretuned")
    assert not caplog.records
    monkeypatch.setattr(layer._LoraFactorsProxy, "forward", lambda self, W: torch.baddbmm(W, self.lhs, self.rhs))
    after, _ = run(model, "pretuned")
    wanted, _ = run(model, "eager")
    torch.testing.assert_close(after, wanted, rtol=1e-4, atol=1e-5)
    assert float((after - before).norm()) > 1e-3 * float(before.norm())
    assert "not the one that is known here" in caplog.text


@pytest.mark.slow
def test_saved_merged_disabled_and_checkpointed(peft: Any, tmp_path: Path) -> None:
    model = adapted_model(peft)
    wanted, grads = run(model, "pretuned")
    model.save_pretrained(tmp_path)
    loaded = peft.PeftModel.from_pretrained(base(), tmp_path, is_trainable=True)
    got, _ = run(loaded, "pretuned")
    torch.testing.assert_close(got, wanted)
    with model.disable_adapter(), torch.no_grad():
        off = model(input_ids=IDS).logits
    assert float((off - wanted).norm()) > 0.01 * float(wanted.norm())
    plain = base()
    plain.set_experts_implementation("pretuned")
    torch.testing.assert_close(off, plain(input_ids=IDS).logits.detach(), rtol=1e-4, atol=1e-5)
    model.train()
    model.gradient_checkpointing_enable()
    again, checkpointed = run(model, "pretuned")
    torch.testing.assert_close(again, wanted)
    assert set(checkpointed) == set(grads)
    for name, grad in grads.items():
        torch.testing.assert_close(checkpointed[name], grad)
    merged = loaded.merge_and_unload()
    assert not any("lora_" in name for name, _ in merged.named_parameters())
    with torch.no_grad():
        torch.testing.assert_close(merged(input_ids=IDS).logits, wanted, rtol=1e-3, atol=1e-4)


def losses(peft: Any, how: str, dtype: torch.dtype) -> list[float]:
    """Of 50 steps of AdamW on the adapters, over two batches that come again: the same in every way of running."""
    model = adapted_model(peft, dtype=dtype)
    model.get_base_model().set_experts_implementation(how)
    optimizer = torch.optim.AdamW([parameter for parameter in model.parameters() if parameter.requires_grad], lr=3e-2)
    batches = torch.randint(0, TINY["vocab_size"], (2, 2, 16), generator=torch.Generator().manual_seed(1))
    results = []
    for step in range(50):
        ids = batches[step % 2]
        loss = model(input_ids=ids, labels=ids).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        results.append(float(loss))
    return results


@pytest.mark.slow
def test_a_loss_curve_is_peft_s_within_its_noise(peft: Any) -> None:
    """Its noise in bf16: how far PEFT's own curve is from its own in fp32."""
    (exact, ours32), (wanted, ours16) = (
        [torch.tensor(losses(peft, how, dtype)) for how in ("eager", "pretuned")]
        for dtype in (torch.float32, torch.bfloat16)
    )
    assert exact[-2:].mean() < 0.8 * exact[:2].mean(), "it learns"
    apart32, apart16, noise, ours_noise = (
        float((result - other).abs().mean())
        for result, other in ((ours32, exact), (ours16, wanted), (wanted, exact), (ours16, exact))
    )
    print(
        f"{exact[0]:.3f} to {exact[-1]:.3f}: ours beside PEFT's {apart32:.1e} in fp32, {apart16:.1e} in bf16; "
        f"beside fp32 PEFT's bf16 {noise:.1e}, ours {ours_noise:.1e}"
    )
    assert apart32 < 1e-4
    assert apart16 < 2 * noise
    assert ours_noise < 2 * noise


@pytest.mark.slow
@pytest.mark.parametrize("part", ["layer", pytest.param("model", marks=pytest.mark.nightly)])
def test_compiled(peft: Any, caplog: pytest.LogCaptureFixture, part: str) -> None:
    """torch.compile leaves parametrised experts as they are: recognised."""
    ours.register()
    model = adapted_model(peft, num_hidden_layers=1)
    wanted, grads = run(model, "eager")
    model.get_base_model().set_experts_implementation("pretuned")
    torch._dynamo.reset()
    (model if part == "model" else model.get_base_model().model.layers[0]).compile(backend="aot_eager")
    model.zero_grad()
    with calls_of(ours.moe_mlp) as calls:
        logits = model(input_ids=IDS).logits
    logits.float().square().mean().backward()
    assert len(calls) == 1
    assert None not in calls[0].arguments["lora"]
    torch.testing.assert_close(logits.detach(), wanted, rtol=1e-4, atol=1e-5)
    for name, tensor in model.named_parameters():
        if tensor.requires_grad:
            torch.testing.assert_close(tensor.grad, grads[name], rtol=1e-3, atol=1e-5)
    assert "not its adapter alone" not in caplog.text


@pytest.mark.slow
def test_in_autocast(peft: Any, caplog: pytest.LogCaptureFixture) -> None:
    """It casts A and B as the weights."""
    model = adapted_model(peft, num_hidden_layers=1)
    results = []
    for how in ("eager", "pretuned"):
        with torch.autocast("cpu", torch.bfloat16):
            results.append(run(model, how))
    (own, own_grads), (ours_too, our_grads) = results
    assert set(our_grads) == set(own_grads)
    for got, want in ((ours_too, own), *((our_grads[name], grad) for name, grad in own_grads.items())):
        assert got.dtype is want.dtype
        assert float((got.float() - want.float()).norm() / want.float().norm()) < 3e-2
    assert "not its adapter alone" not in caplog.text


class Made(TorchDispatchMode):
    """Notes what is made of so large a shape."""

    def __init__(self, shape: torch.Size) -> None:
        super().__init__()
        self.shape, self.names = shape, list[str]()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if isinstance(out, torch.Tensor) and out.shape == self.shape:
            self.names.append(str(func))
        return out


def test_from_the_second_forward_on_no_matrices_of_all_experts_are_made(peft: Any) -> None:
    """And a model that runs otherwise has its own, and its own results."""
    model = adapted_model(peft)
    model.set_experts_implementation("eager")
    before, _ = run(model, "eager")
    shape = next(tensor.shape for name, tensor in model.named_parameters() if name.endswith("gate_up_proj"))
    run(model, "pretuned")  # PEFT's class is recognised
    with Made(shape) as watched:
        run(model, "pretuned")
    assert [name for name in watched.names if "baddbmm" in name or "add" in name] == []
    with Made(shape) as watched:
        again, _ = run(model, "eager")
    assert any("baddbmm" in name for name in watched.names)
    assert torch.equal(before, again)


def test_who_reads_the_parameter_in_a_check_of_his_own_has_it_whole(peft: Any) -> None:
    """Torch's check alone is spared: a parametrization is PEFT's own to whoever else calls it."""
    from peft.tuners.lora.layer import _LoraFactorsProxy

    run(adapted_model(peft), "pretuned")
    W, lhs, rhs = torch.randn(3, 8, 6), torch.randn(3, 8, 2), torch.randn(3, 2, 6)
    proxy = _LoraFactorsProxy(lhs, rhs, 0.5)
    assert torch.allclose(proxy(W), W + 0.5 * lhs @ rhs, atol=1e-5)
    module = torch.nn.Module()
    module.w = torch.nn.Parameter(W)
    torch.nn.utils.parametrize.register_parametrization(module, "w", proxy)
    assert torch.allclose(module.w, W + 0.5 * lhs @ rhs, atol=1e-5)
    torch.nn.utils.parametrize.remove_parametrizations(module, "w")
    assert torch.allclose(module.w, W + 0.5 * lhs @ rhs, atol=1e-5)
