"""Times SGLang's own MoE layers beside the same layers with pretuned's plug-in, in one process, in turns.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-0.5.23-*.whl -d sglang-0.5.23
    python benchmarks/run.py layers_in_sglang --sglang sglang-0.5.23 --json layers-in-sglang.json
    python benchmarks/run.py layers_in_sglang --sglang sglang-0.5.23 --kinds bf16,mxfp4 --tokens 1,16 --json some.json

Each layer is SGLang's FusedMoE with the runner that SGLang chooses on this GPU (``own``), and with pretuned's
(``pretuned``); its ``forward`` is called with a routing that is drawn: dispatch, experts, combine. Choosing top_k
experts is left out, but where SGLang's runner does it in a form of its own (triton_kernels, for mxfp4): then SGLang's
router is in the time of both, and the cell says ``routed``. Sizes, weights, method and the file are those of
``layers_in_vllm.py``.

SGLang need not be installed: ``--sglang`` is where its wheel is unpacked, ``--packages`` a folder with what it imports.
Its sgl_kernel is built for one torch; beside another its sum over a token's experts is SGLang's own Triton kernel here,
which SGLang takes itself for few tokens, and the file says ``sgl_kernel: false``.
"""

from __future__ import annotations

import argparse
import importlib
import json
import os
import socket
import sys
import tempfile
import time
import traceback
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from .engines import child, find, leave
from .layers_in_vllm import KINDS, ROUNDS, TOKENS, Kind, Routed, draw, routing, timed

TINY = Kind("tiny", 8, 256, 128, 2, ())
OAI = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}  # what gpt-oss's layers are made with
OWN, OURS = "own", "pretuned"


def stand_in_for_sgl_kernel() -> bool:
    """Whether SGLang's extension is there; if not, what its layers import of it is put in its place."""
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError):
        for name in [one for one in sys.modules if one.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
    else:
        return True

    def moe_sum_reduce(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
        from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

        fused_moe.moe_sum_reduce_triton(x, out, factor)

    def absent(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name}: no sgl_kernel is built for torch {torch.__version__}")

        return missing

    scalars = next((Path(one) / "sgl_kernel" for one in sys.path if (Path(one) / "sgl_kernel").is_dir()), None)
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.moe_sum_reduce = moe_sum_reduce  # type: ignore[attr-defined]
    module.__getattr__ = absent  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = module
    for name in ("elementwise", "gemm", "quantization", "allreduce", "moe", "scalar_type"):
        part = types.ModuleType(f"sgl_kernel.{name}")
        part.__getattr__ = absent  # type: ignore[method-assign]
        sys.modules[part.__name__] = part
        setattr(module, name, part)
        if name == "scalar_type" and scalars is not None:  # Python alone
            exec((scalars / "scalar_type.py").read_text(), part.__dict__)
    return False


def older_triton() -> list[str]:
    """Put into Triton what triton_kernels asks of a newer one: is this another vendor's GPU? The names of it."""
    info = importlib.import_module("triton.language.target_info")
    put = [name for name in ("is_hip_gfx1250",) if not hasattr(info, name)]
    for name in put:
        setattr(info, name, info.is_hip)  # False on NVIDIA's
    return put


def start(device: str) -> None:
    """SGLang's settings and process groups, of one process."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.server_args import ServerArgs

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    ranks = runtime_context.SpawnRanks(world_rank=0)
    runtime_context.publish(ServerArgs(model_path="none", device=device), role="test", ranks=ranks)
    backend = "nccl" if device == "cuda" else "gloo"
    init_distributed_environment(1, 0, address, 0, backend=backend)
    initialize_model_parallel(backend=backend)


def quantisation(kind: str) -> Any:
    """SGLang's config of the layer's weights; None for bf16."""
    if kind == "fp8":
        from sglang.srt.layers.quantization.fp8 import Fp8Config

        return Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    if kind == "mxfp4":
        from sglang.srt.layers.quantization.mxfp4 import Mxfp4Config

        return Mxfp4Config(is_checkpoint_mxfp4_serialized=True)
    if kind == "int4":
        from sglang.srt.layers.quantization.compressed_tensors.compressed_tensors import CompressedTensorsConfig

        weights = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
        group = {"targets": ["Linear"], "weights": weights, "input_activations": None, "output_activations": None}
        return CompressedTensorsConfig.from_config(
            {"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
             "config_groups": {"group_0": group}, "ignore": ["lm_head"]}
        )  # fmt: skip
    return None


def made(kind: str, one: Kind, device: str) -> Any:
    """SGLang's layer with weights that are drawn, the same for both, processed as after loading."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    with torch.device(device):
        layer = FusedMoE(
            num_experts=one.E, hidden_size=one.H, intermediate_size=one.I, layer_id=0, top_k=one.top_k,
            params_dtype=torch.bfloat16, quant_config=quantisation(kind), prefix="model.layers.0.mlp.experts",
            **(OAI if kind == "mxfp4" else {}),
        )  # fmt: skip
        torch.manual_seed(0)
        for name, parameter in sorted(layer.named_parameters()):
            if parameter.numel():
                draw(name, parameter, kind, one)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def call_of(layer: Any, one: Kind, given: Routed, *, routed: bool) -> Callable[[], torch.Tensor]:
    """The layer on these tokens; ``routed``: with choosing top_k experts by SGLang, as its runner takes them."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK

    if not routed:
        chosen = StandardTopKOutput(given.weights, given.ids, given.logits)
        return lambda: layer(given.x, chosen)  # type: ignore[no-any-return]
    top = TopK(top_k=one.top_k, renormalize=True, layer_id=0)
    top.bind_runner_backend(layer.runner_backend)
    return lambda: layer(given.x, top(given.x, given.logits))  # type: ignore[no-any-return]


def both(kind: str, one: Kind, device: str, failed: dict[str, str]) -> dict[str, Any]:
    """The layer as SGLang has it, then as it has it with pretuned's plug-in; what failed is told in ``failed``."""
    from sglang.srt.plugins import load_plugins

    from pretuned.integrations.sglang import register

    layers = {}
    os.environ["PRETUNED_SGLANG"] = "0"
    for side in (OWN, OURS):
        if side == OURS:
            os.environ["PRETUNED_SGLANG"] = "1"
            register()  # where pretuned is not installed as a package; else SGLang calls it as well
            load_plugins()
        try:
            layers[side] = made(kind, one, device)
        except Exception:
            failed[side] = traceback.format_exc(limit=-6)
            if device == "cuda":
                torch.cuda.empty_cache()
    return layers


def measure(kind: str, one: Kind, tokens: list[int], device: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """All cells of a layer."""
    from pretuned.aot.measure.clock import Clock, HostClock

    clock = Clock() if device == "cuda" else HostClock()
    failed: dict[str, str] = {}
    layers = both(kind, one, device, failed)
    runners = {side: getattr(layer.runner_backend, "value", None) for side, layer in layers.items()}
    routed = "triton_kernel" in runners.values()
    for T in tokens:
        given, graphs, out, wrong = routing(one, T, device), {}, {}, dict(failed)
        for side, layer in layers.items():
            try:
                call = call_of(layer, one, given, routed=routed)
                out[side] = call().clone()
                graphs[side] = clock.capture(call)
            except Exception:
                wrong[side] = traceback.format_exc(limit=-6)
        cell: dict[str, Any] = {"kind": kind, "model": one.model, "tokens": T, "routed": routed, "failed": wrong}
        cell["runners"] = runners
        timed(cell, clock, graphs, out, OURS)
        keep(cell)
        graphs.clear()
        clock.release()


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sglang", type=Path, help="where SGLang's wheel is unpacked; default: the one installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that SGLang imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--kinds", default=",".join(KINDS), help=f"some of {', '.join(KINDS)}")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=540, help="when to end what is still measured")
    parser.add_argument("--tiny", action="store_true", help="a small layer, on the CPU where there is no GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kind, in this process
    given = parser.parse_args(args)
    given.kinds, given.tokens = given.kinds.split(","), [int(T) for T in given.tokens.split(",")]
    for kind in given.kinds:
        if kind not in KINDS:
            parser.error(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
    if given.sglang is not None and not (given.sglang / "sglang" / "srt").is_dir():
        parser.error(f"--sglang: {given.sglang} has no folder sglang of an unpacked wheel")
    return given


def here(given: argparse.Namespace) -> int:
    """Measure one kind of layer in this process."""
    (kind,) = given.kinds
    cells: list[dict[str, Any]] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if given.sglang is not None:
        find([given.sglang], given.packages)
    head: dict[str, Any] = {"torch": torch.__version__}
    head["gpu"] = torch.cuda.get_device_name() if device == "cuda" else None
    head["sgl_kernel"] = stand_in_for_sgl_kernel() if device == "cuda" else None
    head["put_into_triton"] = older_triton() if device == "cuda" else []

    def keep(cell: dict[str, Any]) -> None:
        cells.append(head | cell)
        given.json.write_text(json.dumps({"rounds": ROUNDS, "cells": cells}, indent=1))
        print(cell["kind"], cell["tokens"], cell.get("us"), cell.get("distance"), flush=True)
        for name, why in cell["failed"].items():
            print(f"  {name} failed: {why.strip().splitlines()[-1]}", flush=True)

    try:
        start(device)
        measure(kind, TINY if given.tiny else KINDS[kind], given.tokens, device, keep)
    except Exception:
        keep({"kind": kind, "tokens": None, "failed": {"all": traceback.format_exc(limit=-6)}})
    return 0 if any(cell.get("us") for cell in cells) else 1


def in_a_process(given: argparse.Namespace, kind: str, seconds: float) -> list[dict[str, Any]]:
    """The cells of one kind of layer: a fault of the GPU ends its process alone."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        options = {"--sglang": given.sglang, "--packages": given.packages, "--json": out, "--kinds": kind,
                   "--tokens": ",".join(map(str, given.tokens))}  # fmt: skip
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        ended = child(["layers_in_sglang", "--here", *words, *(["--tiny"] if given.tiny else [])], seconds)
        cells: list[dict[str, Any]] = json.loads(out.read_text())["cells"] if out.is_file() else []
    if ended and not (cells and cells[-1]["tokens"] is None):
        cells.append({"kind": kind, "tokens": None, "failed": {"all": ended}})
    return cells


def main(args: list[str] | None = None) -> int:
    """Measure; 1 where no cell has a time."""
    given = arguments(args)
    if given.here:
        leave(here(given))
    cells: list[dict[str, Any]] = []
    end = time.monotonic() + given.seconds
    for kind in given.kinds:
        cells += in_a_process(given, kind, end - time.monotonic())
        given.json.write_text(json.dumps({"rounds": ROUNDS, "cells": cells}, indent=1))
    return 0 if any(cell.get("us") for cell in cells) else 1
