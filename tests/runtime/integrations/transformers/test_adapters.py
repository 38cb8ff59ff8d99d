"""Adapters by PEFT's ``target_parameters`` on experts that stay quantised: those of the dequantised model, and its results."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import tiny_quantised
import torch

from pretuned.artifacts.errors import InputError
from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers import adapters
from pretuned.integrations.transformers.quantised import keep_mxfp4, quantised

pytestmark = [pytest.mark.filterwarnings("ignore")]  # transformers' and PEFT's own
IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]
KINDS = ["fp8", "mxfp4", "int4"]


@pytest.fixture(scope="module")
def peft() -> Any:
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("compressed_tensors")
    ours.register()
    return pytest.importorskip("peft", minversion="0.21")


@pytest.fixture(scope="module")
def keeping(peft: Any) -> Iterator[None]:
    """Checkpoints stay quantised: gpt-oss by pretuned's loader, fp8 without the GPU that transformers' asks for."""
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    before = auto.AUTO_QUANTIZER_MAPPING["mxfp4"]
    keep_mxfp4()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)
        yield
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = before


@pytest.fixture(scope="module")
def checkpoints(keeping: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tiny_quantised.Pair]:
    return {kind: getattr(tiny_quantised, kind)(tmp_path_factory.mktemp(kind)) for kind in KINDS}


def loaded(place: Path, how: str = "pretuned", dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(place, experts_implementation=how, dtype=dtype)


def adapted(peft: Any, model: Any, **more: Any) -> Any:
    given = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": NAMES}
    model = peft.get_peft_model(model, peft.LoraConfig(**(given | more)))
    fill(model)
    return model


def fill(model: Any, seed: int = 1) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "lora_" in name:
                parameter.copy_(0.2 * torch.randn(parameter.shape, generator=generator))


def run(model: Any, ids: torch.Tensor = IDS) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    model.zero_grad()
    logits = model(input_ids=ids).logits
    logits.float().square().mean().backward()
    return logits.detach(), {name: one.grad for name, one in model.named_parameters() if one.grad is not None}


def near(one: torch.Tensor, other: torch.Tensor) -> float:
    return float((one.float() - other.float()).norm() / other.float().norm())


def experts_of(model: Any) -> list[Any]:
    return [one for one in model.modules() if "is_transposed" in one.__dict__]


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
def test_results_are_those_of_the_dequantised_model_by_peft(
    peft: Any, checkpoints: dict[str, tiny_quantised.Pair], kind: str, caplog: pytest.LogCaptureFixture
) -> None:
    pair = checkpoints[kind]
    model, twin = adapted(peft, loaded(pair.quantised)), adapted(peft, loaded(pair.twin, "eager"))
    for experts in experts_of(model):
        assert quantised(experts, "gate_up_proj") is not None
    shapes, wanted_shapes = ({name: (one.shape, one.dtype) for name, one in each.named_parameters() if "lora_" in name}
                             for each in (model, twin))  # fmt: skip
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
    assert not any(adapters.any_held(one) for one in experts_of(model))
    assert "pretuned" not in caplog.text
