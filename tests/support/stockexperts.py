"""transformers' classes of experts, small: one module of each, with its own code's sizes replaced."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

E, H, I = 4, 16, 8  # noqa: E741
_WANTED = {"num_experts": E, "num_local_experts": E, "n_routed_experts": E, "moe_intermediate_size": I}


def families() -> list[str]:
    """The names of the families whose code has the decorator; [] without transformers."""
    spec = importlib.util.find_spec("transformers")  # its import takes 2 s
    if spec is None or spec.origin is None:
        return []
    models = Path(spec.origin).parent / "models"
    paths = [path for path in models.glob("*/modeling_*.py") if "\n@use_experts_implementation" in path.read_text()]
    return sorted({path.parent.name for path in paths})


def classes(family: str) -> Iterator[tuple[type, list[type]]]:
    """A family's classes of experts, and its configs: those of texts first."""
    import transformers

    models = Path(transformers.__file__).parent / "models"
    for path in (models / family).glob("modeling_*.py"):
        names = re.findall(r"\n@use_experts_implementation[^\n]*\n(?:@[^\n]*\n)*class (\w+)", path.read_text())
        if not names:
            continue
        code = importlib.import_module(f"transformers.models.{family}.{path.stem}")
        configs = [value for name, value in vars(code).items() if name.endswith("Config") and isinstance(value, type)]
        configs.sort(key=lambda config: ("Text" not in config.__name__, "Vision" in config.__name__))
        for name in names:
            yield getattr(code, name), configs


def build_experts(kind: type, configs: list[type], seed: int = 1) -> Any:
    """A module of E experts, H columns and I between, with random weights."""
    for config in configs:
        settings = config()
        settings = settings.get_text_config()
        for name, value in _WANTED.items():
            if getattr(settings, name, None) is None:
                setattr(settings, name, value)
        if getattr(settings, "hidden_size", None) is None:
            continue
        several = isinstance(settings.moe_intermediate_size, list)  # then the layer picks one
        with torch.device("meta"):
            module = kind(settings, I) if several else kind(settings)
        return _small(module, seed)
    raise AssertionError(f"no config makes {kind.__name__}")


def _small(module: Any, seed: int) -> Any:
    generator = torch.Generator().manual_seed(seed)
    wide = 2 * I if module.has_gate else I
    first = "gate_up_proj" if module.has_gate else "up_proj"
    sizes: dict[str, tuple[int, ...]] = {first: (E, wide, H), "down_proj": (E, H, I)}
    if module.is_transposed:
        sizes = {name: (size[0], size[2], size[1]) for name, size in sizes.items()}
    if module.has_bias:
        sizes |= {f"{first}_bias": (E, wide), "down_proj_bias": (E, H)}
    assert set(module._parameters) == set(sizes)
    for name, size in sizes.items():
        setattr(module, name, torch.nn.Parameter(torch.randn(size, generator=generator) / 2))
    if getattr(module, "has_post_expert_norm", False):
        module.post_expert_norm.weight = torch.nn.Parameter(torch.rand(H, generator=generator) + 0.5)
    module.num_experts = E
    return module
