"""Times SGLang's own MoE layers and the same layers with pretuned's plug-in, in one process, in turns.

    pip download --no-deps sglang==0.5.23 && unzip -q sglang-0.5.23-*.whl -d sglang-0.5.23
    python benchmarks/run.py layers_in_sglang --sglang sglang-0.5.23 --json layers-in-sglang.json
    python benchmarks/run.py layers_in_sglang --sglang sglang-0.5.23 --kinds bf16,mxfp4 --tokens 1,16 --json some.json

Each layer is SGLang's FusedMoE with the runner that SGLang chooses for its model on 9.0 (``own``; ``runners`` has its
name), with another of SGLang's by its name (``marlin``, for mxfp4), and with pretuned's (``pretuned``); its ``forward``
is called with a routing that is drawn: dispatch, experts, combine. Choosing top_k experts is left out, but where
SGLang's runner does it in a form of its own (triton_kernels, for mxfp4): then SGLang's router is in the time of all,
and the cell says ``routed``. Results have memory of their own, not the tokens', as SGLang would have it: every call is
of the same tokens. The time of a result that is over ``FAR`` from pretuned's is not kept. Where SGLang's Triton kernel
has no configuration tuned for the layer's sizes and this GPU, the cell says ``tuned: false``. Sizes, weights, method
and the file are those of ``layers_in_vllm.py``.

SGLang need not be installed: ``--sglang`` is where its wheel is unpacked, ``--packages`` a folder with what it imports.
Its sgl_kernel is built for one torch; with another, SGLang's other kernels replace its functions, and the file says
which in ``in_place_of_sgl_kernel`` (``sglang_kernels.py``). SGLang compiles kernels at the first call of each: this
takes most of a run. Kinds are measured one after another, each in a process of its own; where there are several GPUs
let each have one, by ``CUDA_VISIBLE_DEVICES`` and ``--kinds``.
"""

from __future__ import annotations

import argparse
import faulthandler
import json
import logging
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from benchmarks import provenance

from .engines import child, find, leave
from .layers_in_vllm import ROUNDS, TOKENS, Kind, Routed, draw, routing, timed
from .layers_in_vllm import USUAL as KINDS
from .sglang_kernels import build, compile_all, older_triton, stand_in

TINY = Kind("tiny", 8, 256, 128, 2, ())
OAI = {"gemm1_alpha": 1.702, "gemm1_clamp_limit": 7.0, "with_bias": True}  # the arguments of gpt-oss's layers
OWN, OURS = "own", "pretuned"
# Runners by their names in --moe-runner-backend. SGLang sets gpt-oss's runner when it loads the model
# (arg_groups/model_overrides/gpt_oss.py); a layer alone would run with bf16 weights.
SIDES = {"mxfp4": {OWN: "triton_kernel", "marlin": "marlin", OURS: "triton_kernel"}}
AUTO = {OWN: "auto", OURS: "auto"}
SOONEST = ("bf16", "fp8", "mxfp4", "int4")  # kinds, in ascending order of SGLang's compile time
FAR = 0.1  # limit of the difference from another's result: fp8 tokens, quantised twice, reach 0.07
_begun = time.monotonic()


def say(*words: object) -> None:
    """Print a line of progress, with the seconds since the start."""
    print(f"[{time.monotonic() - _begun:5.1f} s]", *words, flush=True)


def start(device: str) -> None:
    """Set up SGLang's settings and process groups for one process."""
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
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "quantization_status": "compressed",
                "config_groups": {"group_0": group},
                "ignore": ["lm_head"],
            }
        )
    return None


def make_layer(kind: str, spec: Kind, device: str) -> Any:
    """SGLang's layer with drawn weights, equal with and without the plug-in, processed as after loading."""
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    with torch.device(device):
        layer = FusedMoE(
            num_experts=spec.E,
            hidden_size=spec.H,
            intermediate_size=spec.I,
            layer_id=0,
            top_k=spec.top_k,
            params_dtype=torch.bfloat16,
            quant_config=quantisation(kind),
            prefix="model.layers.0.mlp.experts",
            inplace=False,
            **(OAI if kind == "mxfp4" else {}),
        )
        torch.manual_seed(0)
        for name, parameter in sorted(layer.named_parameters()):
            if parameter.numel():
                draw(name, parameter, kind, spec)
        layer.quant_method.process_weights_after_loading(layer)
    return layer


def call_of(layer: Any, spec: Kind, inputs: Routed, *, routed: bool) -> Callable[[], torch.Tensor]:
    """A call of the layer on these tokens; ``routed``: SGLang chooses top_k experts in it, as its runner needs."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput, TopK

    if not routed:
        chosen = StandardTopKOutput(inputs.weights, inputs.ids, inputs.logits)
        return lambda: layer(inputs.x, chosen)  # type: ignore[no-any-return]
    top = TopK(top_k=spec.top_k, renormalize=True, layer_id=0)
    top.bind_runner_backend(layer.runner_backend)
    return lambda: layer(inputs.x, top(inputs.x, inputs.logits))  # type: ignore[no-any-return]


def runs_by(name: str) -> None:
    """Make SGLang use its runner of that name for the layers that are made from here on."""
    from sglang.srt.layers.moe.utils import resolve_moe_runner_backend
    from sglang.srt.runtime_context import get_flags

    get_flags().moe.runner_backend = resolve_moe_runner_backend(name)


def layers_of(kind: str, spec: Kind, device: str, sides: dict[str, str], failed: dict[str, str]) -> dict[str, Any]:
    """The layer with each of SGLang's runners, then with pretuned's plug-in; ``failed`` gets the errors."""
    from sglang.srt.plugins import load_plugins

    from pretuned.integrations.sglang import register

    layers = {}
    os.environ["PRETUNED_SGLANG"] = "0"
    for side in sorted(sides, key=lambda side: side == OURS):
        if side == OURS:
            os.environ["PRETUNED_SGLANG"] = "1"
            register()  # needed if pretuned is not installed as a package; else SGLang calls it as well
            load_plugins()
        try:
            runs_by(sides[side])
            layers[side] = make_layer(kind, spec, device)
            say(kind, f"{side}: made, by {name_of(layers[side])}")
        except Exception:
            failed[side] = traceback.format_exc(limit=-6)
            say(kind, f"{side} failed: {failed[side].strip().splitlines()[-1]}")
            if device == "cuda":
                torch.cuda.empty_cache()
    return layers


def name_of(layer: Any) -> str | None:
    """Return the name of a layer's runner."""
    return getattr(layer.runner_backend, "value", None)


class Untuned(logging.Handler):
    """Note whether SGLang's Triton kernel had no configuration for a layer, which SGLang logs once."""

    def __init__(self) -> None:
        super().__init__()
        self.is_told = False
        logging.getLogger("sglang.srt.layers.moe.moe_runner.triton_utils.fused_moe_triton_config").addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        self.is_told |= record.getMessage().startswith("Using default MoE kernel config")


def result_of(call: Callable[[], torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    """Return a call's result for the tokens x [T, H]; raise if the call changes x, which is used again."""
    before = x.clone()
    out = call().clone()
    if not torch.equal(before, x):
        raise ValueError("it wrote over the tokens that it was given: its next call would be of others")
    return out


def drop_far(cell: dict[str, Any]) -> None:
    """Remove the times of results that are far from pretuned's, and report them."""
    for side, far in cell.get("distance", {}).items():
        if not far <= FAR:  # or no number
            cell["failed"][side] = f"its result is {far} of pretuned's away: its time is of something else"
            cell["us"].pop(side, None)


def measure(
    kind: str, spec: Kind, tokens: list[int], device: str, sides: dict[str, str], keep: Callable[[dict[str, Any]], None]
) -> None:
    """Measure all cells of a layer."""
    from pretuned.aot.measure.clock import Clock, HostClock

    clock = Clock() if device == "cuda" else HostClock()
    failed: dict[str, str] = {}
    untuned = Untuned()
    layers = layers_of(kind, spec, device, sides, failed)
    runners = {side: name_of(layer) for side, layer in layers.items()}
    routed = "triton_kernel" in runners.values()
    for T in tokens:
        inputs, graphs, out, wrong = routing(spec, T, device), {}, {}, dict(failed)
        for side, layer in layers.items():
            try:
                call = call_of(layer, spec, inputs, routed=routed)
                out[side] = result_of(call, inputs.x)
                graphs[side] = clock.capture(call)
                say(kind, f"T={T} {side}: captured")
            except Exception:
                wrong[side] = traceback.format_exc(limit=-6)
                inputs = routing(spec, T, device)
        cell: dict[str, Any] = {"kind": kind, "model": spec.model, "tokens": T, "routed": routed, "failed": wrong}
        cell["runners"] = runners
        if "triton" in runners.values():
            cell["tuned"] = not untuned.is_told
        timed(cell, clock, graphs, out, OURS)
        drop_far(cell)
        keep(cell)
        graphs.clear()
        clock.release()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--sglang", type=Path, help="where SGLang's wheel is unpacked; default: the one installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that SGLang imports")
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument(
        "--build",
        type=Path,
        metavar="FOLDER",
        help="only compile SGLang's kernels of these layers for 9.0 into this folder; needs nvcc, no GPU",
    )
    parser.add_argument("--built", type=Path, metavar="FOLDER", help="such a folder: what is in it is not compiled")
    parser.add_argument("--kinds", default=",".join(SOONEST), help=f"some of {', '.join(SOONEST)}")
    parser.add_argument("--sides", help=f"some of {OWN} and {OURS}, and of mxfp4 marlin; default: all")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=540, help="when to end what is still measured")
    parser.add_argument("--tiny", action="store_true", help="a small layer, on the CPU where there is no GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kind, in this process
    args = parser.parse_args(argv)
    if (args.json is None) == (args.build is None):
        parser.error("wanted one of --json, where the times go, and --build")
    if args.built is not None and not args.built.is_dir():
        parser.error(f"--built: {args.built} is no folder")
    args.kinds, args.tokens = args.kinds.split(","), [int(T) for T in args.tokens.split(",")]
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
    args.sides = args.sides.split(",") if args.sides else None
    for side in args.sides or ():
        for kind in args.kinds:
            if side not in SIDES.get(kind, AUTO):
                parser.error(f"--sides: {side!r} is none of {kind}'s: {', '.join(SIDES.get(kind, AUTO))}")
    if args.sglang is not None and not (args.sglang / "sglang" / "srt").is_dir():
        parser.error(f"--sglang: {args.sglang} has no folder sglang of an unpacked wheel")
    return args


def here(args: argparse.Namespace) -> int:
    """Measure one kind of layer in this process."""
    (kind,) = args.kinds
    cells: list[dict[str, Any]] = []
    device = "cuda" if torch.cuda.is_available() else "cpu"
    for name in ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"):
        os.environ.setdefault(name, "lo")
    if args.sglang is not None:
        find([args.sglang], args.packages)
    head: dict[str, Any] = {"torch": torch.__version__}
    head["gpu"] = torch.cuda.get_device_name() if device == "cuda" else None
    head["in_place_of_sgl_kernel"] = stand_in() if device == "cuda" else {}
    head["put_into_triton"] = older_triton() if device == "cuda" else []
    # Print a traceback shortly before the time limit, to show where a hanging run is.
    faulthandler.dump_traceback_later(max(args.seconds - 5, 1))
    sides = {name: by for name, by in SIDES.get(kind, AUTO).items() if args.sides is None or name in args.sides}

    about = provenance.about()

    def keep(cell: dict[str, Any]) -> None:
        cells.append(head | cell)
        args.json.write_text(json.dumps(about | {"rounds": ROUNDS, "cells": cells}, indent=1))
        say(cell["kind"], f"T={cell['tokens']}", cell.get("us"), cell.get("distance"))
        for name, why in cell["failed"].items():
            print(f"  {name} failed: {why.strip().splitlines()[-1]}", flush=True)

    try:
        start(device)
        say(kind, "SGLang imported")
        if device == "cuda":
            compiled(kind, args.built)
        measure(kind, TINY if args.tiny else KINDS[kind], args.tokens, device, sides, keep)
    except Exception:
        keep({"kind": kind, "tokens": None, "failed": {"all": traceback.format_exc(limit=-6)}})
    return 0 if any(cell.get("us") for cell in cells) else 1


def compiled(kind: str, built: Path | None) -> None:
    """Compile the kernels that SGLang runs for a kind; the cell that calls a kernel reports its compile error again."""
    try:
        compile_all(kind, Path(tempfile.mkdtemp()), built)
        say(kind, "SGLang's kernels compiled")
    except Exception:
        say(kind, f"compiling SGLang's kernels failed: {traceback.format_exc(limit=-3)}")


def in_a_process(args: argparse.Namespace, kind: str, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure one kind of layer in a process of its own, so that a GPU fault ends only that: (head, cells).

    The process writes the cells to a file next to ``--json`` after each cell, so they survive if this process ends.
    """
    out = args.json.with_name(f"{args.json.stem}-{kind}.part")
    out.unlink(missing_ok=True)
    options = {
        "--sglang": args.sglang,
        "--packages": args.packages,
        "--json": out,
        "--kinds": kind,
        "--built": args.built,
        "--sides": ",".join(args.sides) if args.sides else None,
        "--tokens": ",".join(map(str, args.tokens)),
        "--seconds": seconds,
    }
    words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
    with tempfile.TemporaryDirectory() as folder:  # the process's results survive if it is ended
        words += ["--tiny"] if args.tiny else []
        ended = child(["layers_in_sglang", "--here", *words], seconds, {"TMPDIR": folder})
    about: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    cells: list[dict[str, Any]] = about.pop("cells", [])
    out.unlink(missing_ok=True)
    if ended and not (cells and cells[-1]["tokens"] is None):
        cells.append({"kind": kind, "tokens": None, "failed": {"all": ended}})
    return about, cells


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if no cell has a time."""
    args = arguments(argv)
    if args.here:
        leave(here(args))
    if args.build is not None:
        if args.sglang is not None:
            find([args.sglang], args.packages)
        with tempfile.TemporaryDirectory() as folder:
            print("\n".join(build(args.build, Path(folder))))
        return 0
    cells: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    end = time.monotonic() + args.seconds
    for kind in args.kinds:
        about, measured = in_a_process(args, kind, end - time.monotonic())
        head, cells = about or head, cells + measured
        head["command"] = provenance.command()
        args.json.write_text(json.dumps(head | {"rounds": ROUNDS, "cells": cells}, indent=1) + "\n")
    return 0 if any(cell.get("us") for cell in cells) else 1
