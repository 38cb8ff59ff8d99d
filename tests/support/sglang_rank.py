"""A program that is one rank of SGLang's layer of gpt-oss, with pretuned's plug-in.

    python sglang_rank.py RANK RANKS PORT FOLDER

FOLDER/given.pt has the layer's whole tensors and a question. The answer, summed over ranks by SGLang, and the lines
that pretuned logged go to FOLDER/RANK.pt.
"""

from __future__ import annotations

import logging
import os
import sys
from pathlib import Path
from types import SimpleNamespace

import torch
import torchvision_absent


class Lines(logging.Handler):
    """The lines that pretuned logged."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


def main(rank: int, ranks: int, port: int, folder: Path) -> None:
    """Make the layer, load this rank's part by gpt-oss's loader, and answer."""
    os.environ["PRETUNED_SGLANG"] = "1"
    torch.set_num_threads(1)
    torchvision_absent.stand_in()
    import sglang_layer
    from sglang.srt import plugins
    from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config
    from sglang.srt.models.gpt_oss import GptOssForCausalLM

    logged, log = Lines(), logging.getLogger("sglang.pretuned")
    log.addHandler(logged)
    log.setLevel(logging.INFO)
    sglang_layer.start(rank, ranks, port)
    plugins.load_plugins()
    inputs = torch.load(folder / "given.pt")
    width = inputs["width"]
    layer = sglang_layer.fused(
        Mxfp4Config(is_checkpoint_mxfp4_serialized=True),
        intermediate_size=width,
        reduce_results=True,
        **inputs["layer"],
    )
    model = torch.nn.Module()
    model.experts = layer
    model.config = SimpleNamespace(intermediate_size=width, num_local_experts=layer.num_experts)
    GptOssForCausalLM._load_mxfp4_experts_weights(model, inputs["tensors"].items())
    layer.quant_method.process_weights_after_loading(layer)
    out = sglang_layer.ask(layer, *inputs["question"])
    torch.save({"out": out, "lines": logged.lines}, folder / f"{rank}.pt")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]), int(sys.argv[3]), Path(sys.argv[4]))
