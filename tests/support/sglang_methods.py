"""A program that chooses runners for MoE layers of the SGLang on sys.path, with pretuned's plug-in, and prints JSON.

    python sglang_methods.py [untried]

It has the class of the runner's core for each method, and the lines that pretuned logged. ``untried``: every version of
SGLang counts as tried. Old versions are imported with the libraries of a newer one.
"""

from __future__ import annotations

import json
import logging
import os
import sys
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any

import torch
import torchvision_absent


def stand_in() -> None:
    """Stand in for parts of torchvision and transformers that old versions import and MoE layers do not use."""
    from transformers import AutoConfig

    torchvision_absent.stand_in()
    if "torchvision.io" not in sys.modules and "torchvision" in sys.modules:
        module = sys.modules["torchvision.io"] = ModuleType("torchvision.io")
        module.__spec__, module.decode_jpeg = ModuleSpec("torchvision.io", None), object  # type: ignore[attr-defined]
        sys.modules["torchvision"].io = module  # type: ignore[attr-defined]
    register = AutoConfig.register
    AutoConfig.register = staticmethod(lambda name, config, exist_ok=True: register(name, config, exist_ok=True))


class Lines(logging.Handler):
    """The lines of pretuned's logger, with their level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def main() -> None:
    """Print the JSON."""
    stand_in()
    os.environ["PRETUNED_SGLANG"] = "1"
    lines, log = Lines(), logging.getLogger("sglang.pretuned")
    log.addHandler(lines)
    log.setLevel(logging.INFO)
    import sglang
    from sglang.srt import plugins

    if "untried" in sys.argv:
        from pretuned.integrations.sglang import PLUG_IN

        PLUG_IN.first, PLUG_IN.last = (0,), (9999,)
    plugins.load_plugins()
    from sglang.srt.layers.moe.moe_runner.base import MoeRunnerConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod
    from sglang.srt.layers.quantization.unquant import UnquantizedFusedMoEMethod

    report: dict[str, Any] = {"sglang": sglang.__version__}
    fp8 = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    for kind, make in {"bf16": UnquantizedFusedMoEMethod, "fp8": lambda: Fp8MoEMethod(fp8)}.items():
        config = MoeRunnerConfig(
            num_experts=4,
            num_local_experts=4,
            hidden_size=128,
            intermediate_size_per_partition=128,
            top_k=2,
            params_dtype=torch.bfloat16,
        )
        method = make()
        method.create_moe_runner(torch.nn.Module(), config)
        report[kind] = type(method.runner.runner_core).__name__
    print(json.dumps(report | {"lines": lines.lines}), flush=True)


if __name__ == "__main__":
    main()
    os._exit(0)
