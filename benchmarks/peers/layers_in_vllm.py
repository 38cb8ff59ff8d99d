"""Times vLLM's own MoE layers and the same layers with pretuned's plug-in, in one process, in turns.

    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    python benchmarks/run.py layers_in_vllm --vllm vllm-0.20.2 --json layers-in-vllm.json
    python benchmarks/run.py layers_in_vllm --vllm vllm-0.20.2 --kinds bf16,mxfp4 --tokens 1,16 --json some.json
    python benchmarks/run.py layers_in_vllm --vllm vllm-0.26.0 --kinds flagships --json flagships.json

Each layer is vLLM's FusedMoE, made as a model makes it, and its kernel is called with a routing that is drawn. Choosing
top_k experts by what the router says, the same for all, is left out, but where a backend does that itself (vLLM's
Triton for mxfp4): then it is in the time of all, by vLLM's own router for the others, and the cell says ``routed``.
So is padding the tokens where a backend pads its layer (Marlin for mxfp4). ``auto`` is what vLLM runs with the plug-in
(``--moe-backend auto``); the others are vLLM's backends by their names. Every call is captured in a CUDA graph, and the
graphs are replayed in turns. A cell has microseconds a layer, the experts class that ran, and the distance of its
result from pretuned's. What fails is told in its cell, and the rest goes on; each kind of layer has a process of its
own, which is ended when ``--seconds`` are over. The file is whole after each cell.

``flagships`` are DeepSeek-V4-Flash, one of eight ranks' experts of DeepSeek-V4-Pro and of Kimi-K3 (a rank has as many
rows as T tokens a rank bring), GLM-5.3-Flash and Step-3.7-Flash. They have one side more, ``moe_mlp``: pretuned's layer
called without vLLM, with the model's activation even if the plug-in or this vLLM lacks it. An activation that this vLLM
lacks is silu in its sides, and the cell says so. ``channel`` are layers of fp8 with a scale a row.

vLLM need not be installed: ``--vllm`` is where its wheel is unpacked, ``--packages`` a folder with what it imports
(``carry.py`` makes both, for a machine that fetches nothing).
"""

from __future__ import annotations

import argparse
import contextlib
import faulthandler
import inspect
import json
import os
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import provenance

from .engines import child, find, leave, stand_in


class Kind(NamedTuple):
    """A layer with a model's sizes, and the vLLM backends to compare with; the first is vLLM's own choice on sm_90.

    ``numbers`` are the activation's parameters, in the order of pretuned's ``Activation``.
    """

    model: str
    E: int
    H: int
    I: int  # noqa: E741
    top_k: int
    backends: tuple[str, ...]
    activation: str = "silu"
    has_bias: bool = False
    weights: str = "bf16"
    numbers: dict[str, float] | None = None
    is_flagship: bool = False


def _flagship(
    model: str,
    E: int,
    H: int,
    I: int,  # noqa: E741
    top_k: int,
    weights: str,
    activation: str = "silu",
    **numbers: float,
) -> Kind:
    """A layer of a recent model, against all backends that support its weights."""
    backends = {"mxfp4": ("marlin", "humming"), "fp8": ("triton", "deep_gemm", "marlin", "humming")}
    return Kind(model, E, H, I, top_k, backends.get(weights, ("triton",)), activation, False, weights, numbers, True)


def _channel(model: str, E: int, H: int, I: int, top_k: int) -> Kind:  # noqa: E741
    """An fp8 layer that quantises x, with a scale for each row of w and of x, against vLLM's kernels for these."""
    return Kind(model, E, H, I, top_k, ("triton", "cutlass", "marlin"), weights="fp8_channel")


KINDS = {
    "bf16": Kind("Qwen3-30B-A3B", 128, 2048, 768, 8, ("triton",)),
    "fp8": Kind("DeepSeek-V3", 256, 7168, 2048, 8, ("triton", "deep_gemm", "marlin"), weights="fp8"),
    "mxfp4": Kind("gpt-oss-120b", 128, 2880, 2880, 4, ("triton", "marlin"), "swigluoai", True, weights="gpt_oss_mxfp4"),
    "int4": Kind("Kimi-K2-Thinking", 384, 7168, 2048, 8, ("marlin",), weights="int4"),
    "channel-qwen": _channel("Qwen3-30B-A3B", 128, 2048, 768, 8),
    "channel-mixtral": _channel("Mixtral-8x7B, tp=2", 8, 4096, 7168, 2),
    "channel-qwen-235b": _channel("Qwen3-235B-A22B, tp=4", 128, 4096, 384, 8),
    "channel-maverick": _channel("Llama-4-Maverick, tp=8", 128, 5120, 1024, 1),
    "v4-flash": _flagship("DeepSeek-V4-Flash", 256, 4096, 2048, 6, "mxfp4", limit=10.0),
    "v4-pro": _flagship("DeepSeek-V4-Pro, ep=8", 48, 7168, 3072, 6, "mxfp4", limit=10.0),
    "kimi-k3": _flagship("Kimi-K3, ep=8", 112, 3584, 3072, 16, "mxfp4", "situ", beta=4.0, linear_beta=25.0),
    "glm-5.3-flash": _flagship("GLM-5.3-Flash", 288, 4096, 2048, 8, "fp8", limit=10.0),
    "step-3.7": _flagship("Step-3.7-Flash", 288, 4096, 1280, 8, "bf16", "swiglustep", limit=7.0),
}
FLAGSHIPS = [name for name, spec in KINDS.items() if spec.is_flagship]
CHANNEL = [name for name, spec in KINDS.items() if spec.weights == "fp8_channel"]
USUAL = {name: spec for name, spec in KINDS.items() if name not in {*FLAGSHIPS, *CHANNEL}}
GROUPS = {"flagships": FLAGSHIPS, "channel": CHANNEL}
OURS, DIRECT = "auto", "moe_mlp"
ROUNDS = 15
CLOSING = 30  # seconds
TOKENS = "1,4,16,64,256,1024,4096,8192"


def quantisation(weights: str) -> Any:
    """vLLM's config of the layer's weights, from its registry; None for bf16."""
    if weights == "mxfp4":
        return _mxfp4()
    from vllm.model_executor.layers.quantization import get_quantization_config

    group = {"num_bits": 4, "type": "int", "symmetric": True, "strategy": "group", "group_size": 32}
    row = {"num_bits": 8, "type": "float", "symmetric": True, "dynamic": False}
    said = {
        "fp8_channel": (
            "compressed-tensors",
            {
                "quant_method": "compressed-tensors",
                "format": "float-quantized",
                "ignore": [],
                "config_groups": {
                    "group_0": {
                        "targets": ["Linear"],
                        "weights": row | {"strategy": "channel"},
                        "input_activations": row | {"strategy": "token", "dynamic": True},
                    }
                },
            },
        ),
        "fp8": ("fp8", {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}),
        "gpt_oss_mxfp4": ("gpt_oss_mxfp4", {"quant_method": "mxfp4"}),
        "int4": (
            "compressed-tensors",
            {
                "quant_method": "compressed-tensors",
                "format": "pack-quantized",
                "ignore": [],
                "config_groups": {"group_0": {"targets": ["Linear"], "weights": group}},
            },
        ),
    }
    if weights not in said:
        return None
    name, config = said[weights]
    return get_quantization_config(name).from_config(config)


def _mxfp4() -> Any:
    """vLLM's method for DeepSeek-V4's layers, replaced by pretuned's if the plug-in takes the layer.

    vLLM's own config for such a checkpoint needs the model's config.
    """
    from vllm.model_executor.layers.quantization.mxfp4 import Mxfp4Config, Mxfp4MoEMethod

    from pretuned.integrations.vllm import PLUG_IN

    class Published(Mxfp4Config):  # type: ignore[misc]
        def get_quant_method(self, layer: Any, prefix: str) -> Any:
            own = Mxfp4MoEMethod(layer.moe_config)
            if PLUG_IN.is_off:
                return own
            from pretuned.integrations.vllm.quantised import take

            return PLUG_IN.attempt("take a layer", partial(take, own, layer, everywhere=True)) or own

    return Published()


def make_layer(kind: str, spec: Kind, backend: str, device: str, most: int) -> Any:
    """vLLM's layer for at most ``most`` tokens a call, with drawn weights, processed as after loading."""
    from vllm.config import KernelConfig, VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import fused_moe

    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    config = VllmConfig(kernel_config=KernelConfig(moe_backend=backend))
    config.scheduler_config.max_num_batched_tokens = most
    limit = (spec.numbers or {}).get("limit") if spec.activation == "silu" else None
    with set_current_vllm_config(config), torch.device(device):
        experts = make(
            num_experts=spec.E,
            top_k=spec.top_k,
            hidden_size=spec.H,
            intermediate_size=spec.I,
            params_dtype=torch.bfloat16,
            quant_config=quantisation(spec.weights),
            prefix=f"model.layers.0.mlp.experts.{kind}.{backend}",
            activation=known_activation(spec),
            has_bias=spec.has_bias,
            **({} if limit is None else {"swiglu_limit": limit}),
        )
        layer = getattr(experts, "routed_experts", experts)  # from vLLM 0.22 on
        if layer is not experts:
            object.__setattr__(layer, "router", experts.router)
        torch.manual_seed(0)
        for name, parameter in sorted(layer.named_parameters()):
            draw(name, parameter, spec.weights, spec)
        layer.quant_method.process_weights_after_loading(layer)
        if hasattr(layer, "_ensure_moe_quant_config_init"):
            layer._ensure_moe_quant_config_init()
    return layer, config


def known_activation(spec: Kind) -> str:
    """The layer's activation, or silu if this vLLM lacks it."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    return spec.activation if spec.activation in [member.value for member in MoEActivation] else "silu"


class Direct:
    """pretuned's layer with the same weights, called without vLLM."""

    def __init__(self, spec: Kind, device: str) -> None:
        from pretuned.runtime import ExpertWeights, moe_mlp

        self.run = moe_mlp
        scale = {"fp8": "weight_scale_inv", "mxfp4": "weight_scale"}.get(spec.weights)
        names = ["w13_weight", "w2_weight"] + [f"{which}_{scale}" for which in ("w13", "w2") if scale is not None]
        dtype = {"fp8": torch.float8_e4m3fn, "mxfp4": torch.uint8}.get(spec.weights, torch.bfloat16)
        parameters = {}
        torch.manual_seed(0)
        for name in sorted(names):
            N, K = (2 * spec.I, spec.H) if name.startswith("w13") else (spec.H, spec.I)
            if "scale" in name:
                N, K = (N // 128, K // 128) if spec.weights == "fp8" else (N, K // 32)
            elif spec.weights == "mxfp4":
                K //= 2
            of = torch.float32 if "scale" in name and spec.weights == "fp8" else dtype
            parameters[name] = torch.nn.Parameter(
                torch.empty(spec.E, N, K, dtype=of, device=device), requires_grad=False
            )
            draw(name, parameters[name], spec.weights, spec)
        self.weights: list[Any] = [parameters[f"{which}_weight"].data for which in ("w13", "w2")]
        if scale is not None:
            make = ExpertWeights.fp8_block if spec.weights == "fp8" else ExpertWeights.mxfp4
            self.weights = [
                make(w, parameters[f"{which}_{scale}"].data).prepare()
                for w, which in zip(self.weights, ("w13", "w2"), strict=True)
            ]
        self.activation = activation(spec)

    def call(self, inputs: Routed) -> Callable[[], torch.Tensor]:
        """Run the layer on these tokens."""
        gate_up, down = self.weights
        return lambda: self.run(inputs.x, gate_up, down, inputs.ids, inputs.weights, self.activation)


def activation(spec: Kind) -> Any:
    """A layer's activation, as pretuned takes it."""
    if not spec.numbers:
        return spec.activation
    from pretuned.runtime import Activation

    return Activation("swiglu" if spec.activation == "silu" else spec.activation, **spec.numbers)


def draw(name: str, parameter: torch.Tensor, kind: str, spec: Kind) -> None:
    """Fill a parameter: codes of any value, scales within one power of two, small biases and bf16 weights.

    Numbers are drawn in the checkpoint's shape: a backend may pad or transpose the parameter.
    """
    to = parameter.data.zero_()
    if "g_idx" in name or "shape" in name:
        return
    N, K = (2 * spec.I, spec.H) if name.startswith("w13") else (spec.H, spec.I)
    if "scale" in name:
        rows, columns = {"fp8": (128, 128), "fp8_channel": (1, K)}.get(kind, (1, 32))
    else:
        rows, columns = 1, {torch.uint8: 2, torch.int32: 8}.get(to.dtype, 1)
    shape, device = (N // rows, K // columns) if to.dim() == 3 else (N,), to.device
    for expert in to:
        if to.dtype is torch.int32:
            values = torch.randint(-(2**31), 2**31, shape, device=device)
        elif to.dtype is torch.uint8:
            values = torch.randint(*((119, 124) if "scale" in name else (0, 256)), shape, device=device)
        elif "scale" in name:
            values = (torch.rand(shape, device=device) + 0.5) * 5e-4
        elif to.dtype is torch.float8_e4m3fn:
            values = (torch.randn(shape, device=device) * 100).clamp_(-448, 448)
        else:
            values = torch.randn(shape, device=device) * 0.02
        values = values.mT if getattr(parameter, "is_transposed", False) else values
        expert[tuple(slice(size) for size in values.shape)].copy_(values)


class Routed(NamedTuple):
    """Tokens [T, H] and router logits [T, E] in bf16; the top_k experts by these logits, and their weights."""

    x: torch.Tensor
    logits: torch.Tensor
    weights: torch.Tensor
    ids: torch.Tensor


def routing(spec: Kind, T: int, device: str) -> Routed:
    """Drawn tokens. A token's logits all differ, so every implementation of top_k chooses the same experts."""
    g = torch.Generator(device).manual_seed(T)
    x = torch.randn(T, spec.H, generator=g, device=device).bfloat16()
    # The bits of bf16 numbers between 2**-7 and 2, E different ones, in any order.
    bits = torch.randint(0x3C00, 0x4000 - spec.E, (T, spec.E), generator=g, device=device).sort(-1).values
    bits += torch.arange(spec.E, device=device)
    order = torch.rand(T, spec.E, generator=g, device=device).argsort(-1)
    logits = bits.gather(1, order).short().view(torch.bfloat16)
    weights, ids = logits.float().softmax(-1).topk(spec.top_k, -1)
    return Routed(x, logits, weights / weights.sum(-1, keepdim=True), ids.int())


def call_of(layer: Any, inputs: Routed, routed: bool) -> Callable[[], torch.Tensor]:
    """A call of the layer on these tokens, as vLLM's runner calls it; ``routed``: with choosing top_k experts."""
    method = layer.quant_method
    H = inputs.x.shape[1]
    padding = 0 if method.skip_forward_padding else layer.moe_config.hidden_dim - H
    shared = dict.fromkeys({"shared_experts", "shared_experts_input"} & {*inspect.signature(method.apply).parameters})
    if "shared" in inspect.signature(method.apply).parameters:  # pretuned's method passes on this vLLM's arguments
        shared = shared_of(layer)

    dtype = getattr(method, "topk_indices_dtype", None)
    chosen = inputs.ids if dtype is None else inputs.ids.to(dtype)

    def call() -> torch.Tensor:
        x = torch.nn.functional.pad(inputs.x, (0, padding)) if padding else inputs.x
        if method.is_monolithic:
            return method.apply_monolithic(layer=layer, x=x, router_logits=inputs.logits)[:, :H]  # type: ignore[no-any-return]
        weights, ids = inputs.weights, chosen
        if routed:
            weights, ids = layer.router.select_experts(hidden_states=x, router_logits=inputs.logits)
        out = method.apply(layer=layer, x=x, topk_weights=weights, topk_ids=ids, **shared)
        return out[:, :H]  # type: ignore[no-any-return]

    return call


def shared_of(layer: Any) -> dict[str, None]:
    """The arguments for shared experts of this vLLM's modular kernel."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    parameters = {} if kernel is None else inspect.signature(kernel.apply).parameters
    return dict.fromkeys(name for name in ("shared_experts", "shared_experts_input") if name in parameters)


def experts_of(layer: Any) -> str:
    """The class of the experts that runs a layer."""
    kernel = getattr(layer.quant_method, "moe_kernel", None)
    return type(kernel.fused_experts if kernel is not None else layer.quant_method).__name__


def distance(a: torch.Tensor, b: torch.Tensor) -> float:
    """|one - other| / |other|."""
    return float((a.float() - b.float()).norm() / b.float().norm())


def timed(cell: dict[str, Any], clock: Any, graphs: dict[str, Any], out: dict[str, torch.Tensor], ours: str) -> None:
    """Write each side's time in us and its result's distance from ours into a cell, or the error that stopped it."""
    try:
        times = clock.rounds_us(list(graphs.values()), ROUNDS)
        cell["us"] = {name: round(statistics.median(replays), 2) for name, replays in zip(graphs, times, strict=True)}
        if ours in out:
            cell["distance"] = {name: float(f"{distance(y, out[ours]):.2e}") for name, y in out.items()}
    except Exception:
        cell["failed"]["timing"] = traceback.format_exc(limit=-6)


@contextlib.contextmanager
def vllm_of_one(device: str) -> Iterator[None]:
    """vLLM's process groups for one process, and its workspace.

    The groups end before their rendezvous file is removed: NCCL's thread would wait for the file.
    """
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import parallel_state
    from vllm.v1.worker.workspace import init_workspace_manager

    with set_current_vllm_config(VllmConfig()), tempfile.TemporaryDirectory() as folder:
        backend = "nccl" if device == "cuda" else "gloo"
        parallel_state.init_distributed_environment(1, 0, f"file://{folder}/group", 0, backend)
        parallel_state.initialize_model_parallel(1, 1)
        init_workspace_manager(torch.device(device))
        try:
            yield
        finally:
            parallel_state.destroy_model_parallel()
            parallel_state.destroy_distributed_environment()


def measure(kind: str, backends: list[str], tokens: list[int], keep: Callable[[dict[str, Any]], None]) -> None:
    """Measure all cells of a layer."""
    from vllm.config import set_current_vllm_config
    from vllm.forward_context import set_forward_context

    from pretuned.aot.measure.clock import Clock

    spec = KINDS[kind]
    clock, sides, failed, direct = Clock(), {}, {}, None
    if DIRECT in backends:
        try:
            direct = Direct(spec, "cuda")
        except Exception:
            failed[DIRECT] = traceback.format_exc(limit=-6)
    for backend in (name for name in backends if name != DIRECT):
        try:
            layer, config = make_layer(kind, spec, backend, "cuda", max(tokens))
            with set_current_vllm_config(config), set_forward_context(None, config):
                # The workspace has its size from here on.
                call_of(layer, routing(spec, max(tokens), "cuda"), layer.quant_method.is_monolithic)()
            sides[backend] = layer, config
        except Exception:
            failed[backend] = traceback.format_exc(limit=-6)
            torch.cuda.empty_cache()
    routed = any(layer.quant_method.is_monolithic for layer, _ in sides.values())
    for T in tokens:
        inputs, graphs, out, wrong = routing(spec, T, "cuda"), {}, {}, dict(failed)
        for backend, (layer, config) in sides.items():
            try:
                with set_current_vllm_config(config), set_forward_context(None, config):
                    call = call_of(layer, inputs, routed)
                    out[backend] = call().clone()
                    graphs[backend] = clock.capture(call)
            except Exception:
                wrong[backend] = traceback.format_exc(limit=-6)
        if direct is not None:
            try:
                call = direct.call(inputs)
                out[DIRECT] = call().clone()
                graphs[DIRECT] = clock.capture(call)
            except Exception:
                wrong[DIRECT] = traceback.format_exc(limit=-6)
        cell: dict[str, Any] = {"kind": kind, "model": spec.model, "tokens": T, "routed": routed, "failed": wrong}
        name = known_activation(spec)
        cell["activation"] = name if name == spec.activation else f"{name}: this vLLM has no {spec.activation}"
        cell["experts"] = {backend: experts_of(layer) for backend, (layer, _) in sides.items()}
        timed(cell, clock, graphs, out, DIRECT if DIRECT in out else OURS)
        keep(cell)
        graphs.clear()
        clock.release()


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, required=True, help="where vLLM's wheel is unpacked")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that vLLM imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    usual = ",".join(USUAL)
    parser.add_argument(
        "--kinds", default=usual, help=f"some of {', '.join(KINDS)}, or {' or '.join(GROUPS)}; default: {usual}"
    )
    parser.add_argument("--backends", help="some of a kind's, auto (the plug-in) and moe_mlp; default: all")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--seconds", type=float, default=540, help="when to end what is still measured")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one kind, in this process
    args = parser.parse_args(argv)
    args.kinds = GROUPS.get(args.kinds) or args.kinds.split(",")
    args.tokens = [int(T) for T in args.tokens.split(",")]
    for kind in args.kinds:
        if kind not in KINDS:
            parser.error(f"--kinds: {kind!r} is none of {', '.join(KINDS)}")
    if not (args.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {args.vllm} has no folder vllm of an unpacked wheel")
    return args


def find_vllm(vllm: Path, packages: Path | None) -> None:
    """Make vLLM and its triton_kernels importable; stub attention's modules if the wheel was cut."""
    find([vllm, vllm / "vllm" / "third_party"], packages)
    if not (vllm / "vllm" / "vllm_flash_attn").is_dir():
        stand_in("vllm.vllm_flash_attn", "vllm.vllm_flash_attn.flash_attn_interface")


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if no cell has a time."""
    args = arguments(argv)
    if args.here:
        leave(here(args))
    cells: list[dict[str, Any]] = []
    head: dict[str, Any] = {}
    end = time.monotonic() + args.seconds
    for number, kind in enumerate(args.kinds):
        left, kinds = end - time.monotonic(), len(args.kinds) - number
        about, measured = in_a_process(args, kind, left if kinds == 1 else min(left, 2 * left / kinds))
        head, cells = about or head, cells + measured
        head["command"] = provenance.command()
        args.json.write_text(json.dumps(head | {"rounds": ROUNDS, "cells": cells}, indent=1) + "\n")
    return 0 if any(cell.get("us") for cell in cells) else 1


def here(args: argparse.Namespace) -> int:
    """Measure one kind of layer in this process."""
    (kind,) = args.kinds
    cells: list[dict[str, Any]] = []
    all_sides = [OURS, *([DIRECT] if KINDS[kind].is_flagship else []), *KINDS[kind].backends]
    backends = args.backends.split(",") if args.backends else all_sides
    for name, value in {
        "PRETUNED_VLLM": "1",
        "DG_JIT_USE_NVRTC": "0",
        "GLOO_SOCKET_IFNAME": "lo",
        "NCCL_SOCKET_IFNAME": "lo",
        "VLLM_NO_USAGE_STATS": "1",
    }.items():
        os.environ.setdefault(name, value)
    find_vllm(args.vllm, args.packages)
    from pretuned.integrations.vllm import register

    register()
    import vllm

    head = {"torch": torch.__version__, "gpu": torch.cuda.get_device_name()}
    about = provenance.about() | {"vllm": vllm.__version__}

    def keep(cell: dict[str, Any]) -> None:
        cells.append(head | cell)
        args.json.write_text(json.dumps(about | {"rounds": ROUNDS, "cells": cells}, indent=1))
        print(cell["kind"], cell["tokens"], cell.get("us"), cell.get("distance"), flush=True)
        for name, why in cell["failed"].items():
            print(f"  {name} failed: {why.strip().splitlines()[-1]}", flush=True)

    try:
        with vllm_of_one("cuda"):
            measure(kind, backends, args.tokens, keep)
            faulthandler.dump_traceback_later(CLOSING, exit=True)  # if closing the groups hangs
    except Exception:
        keep({"kind": kind, "tokens": None, "failed": {"all": traceback.format_exc(limit=-6)}})
    return 0 if any(cell.get("us") for cell in cells) else 1


def in_a_process(args: argparse.Namespace, kind: str, seconds: float) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Measure one kind of layer in a process of its own, so that a GPU fault ends only that: (head, cells)."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "cells.json"
        options = {
            "--vllm": args.vllm,
            "--packages": args.packages,
            "--json": out,
            "--kinds": kind,
            "--backends": args.backends,
            "--tokens": ",".join(map(str, args.tokens)),
        }
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        ended = child(["layers_in_vllm", "--here", *words], seconds)
        about: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    cells: list[dict[str, Any]] = about.pop("cells", [])
    if ended and not (cells and cells[-1]["tokens"] is None):
        cells.append({"kind": kind, "tokens": None, "failed": {"all": ended}})
    return about, cells
