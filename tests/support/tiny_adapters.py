"""Models with PEFT's adapters, quantised and dequantised: how tests load, fill and run them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

IDS = torch.tensor([[5, 9, 11, 40, 7, 8, 96], [3, 3, 3, 60, 61, 62, 63]])
NAMES = ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]


def loaded(place: Path, how: str = "pretuned", dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    return transformers.AutoModelForCausalLM.from_pretrained(place, experts_implementation=how, dtype=dtype)


def adapted(peft: Any, model: Any, **more: Any) -> Any:
    settings = {"r": 4, "lora_alpha": 6, "target_modules": [], "target_parameters": NAMES}
    model = peft.get_peft_model(model, peft.LoraConfig(**(settings | more)))
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
    return logits.detach(), {
        name: parameter.grad for name, parameter in model.named_parameters() if parameter.grad is not None
    }


def near(tensor: torch.Tensor, other: torch.Tensor) -> float:
    return float((tensor.float() - other.float()).norm() / other.float().norm())


def experts_of(model: Any) -> list[Any]:
    return [module for module in model.modules() if "is_transposed" in module.__dict__]
