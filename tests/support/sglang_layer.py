"""SGLang's registry of hooks, plug-in loader and whole FusedMoE layers on the CPU, in a world of one process."""

from __future__ import annotations

import contextlib
import functools
import logging
import pkgutil
import socket
import sys
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torchvision_absent


@contextlib.contextmanager
def hooks(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's registry of hooks, as it is before plug-ins are loaded, and its classes as they are without."""
    torchvision_absent.stand_in()
    from sglang.srt import plugins
    from sglang.srt.plugins import hook_registry
    from sglang.srt.plugins.hook_registry import HookRegistry

    from pretuned.integrations import sglang
    from pretuned.integrations.sglang import experts

    places = [
        (pkgutil.resolve_name(owner), name) for owner, _, name in (place.rpartition(".") for place in sglang.PLACES)
    ]
    own = [(owner, name, vars(owner).get(name)) for owner, name in places]
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    # For each hook it looks for what is hooked in all modules: thousands, but only SGLang's have it.
    its = {name: module for name, module in sys.modules.items() if name.startswith("sglang")}
    monkeypatch.setattr(hook_registry, "sys", SimpleNamespace(modules=its))
    monkeypatch.delenv("PRETUNED_SGLANG", raising=False)
    monkeypatch.delenv("SGLANG_PLUGINS", raising=False)
    experts._tell.cache_clear()
    HookRegistry.reset()
    yield HookRegistry
    HookRegistry.reset()
    for owner, name, method in own:
        if method is not None:
            setattr(owner, name, method)
        elif name in vars(owner):
            delattr(owner, name)  # it was a parent's


def load(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    """Load plug-ins as each of SGLang's processes does, with these variables."""
    from sglang.srt import plugins

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "_plugins_loaded", False)
    plugins.load_plugins()


@functools.cache
def start(rank: int = 0, ranks: int = 1, port: int = 0) -> None:
    """SGLang's settings and process groups, of this process and as many as there are ranks."""
    from sglang.srt import runtime_context
    from sglang.srt.distributed.parallel_state import init_distributed_environment, initialize_model_parallel
    from sglang.srt.server_args import ServerArgs

    placed = runtime_context.SpawnRanks(world_rank=rank)
    settings = ServerArgs(model_path="none", device="cpu", tp_size=ranks)
    runtime_context.publish(settings, role="test", ranks=placed)
    address = f"tcp://127.0.0.1:{port or free_port()}"
    init_distributed_environment(ranks, rank, address, rank, backend="gloo")
    initialize_model_parallel(backend="gloo")


def free_port() -> int:
    """A port of this machine that nobody listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def fused(quant_config: Any, **changes: Any) -> Any:
    """SGLang's whole layer of experts, or a rank's part of it where ``start`` was told of ranks."""
    if not torch.distributed.is_initialized():
        start()
    from sglang.srt.layers.moe.fused_moe_triton.layer import FusedMoE

    settings = {
        "num_experts": 4,
        "hidden_size": 256,
        "intermediate_size": 128,
        "layer_id": 0,
        "top_k": 2,
        "params_dtype": torch.float32,
        "prefix": "model.layers.0.mlp.experts",
    }
    return FusedMoE(quant_config=quant_config, **(settings | changes))


def ask(layer: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """The layer of tokens x, by SGLang's own ``forward``: dispatch, experts, combine."""
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    out: torch.Tensor = layer(x.clone(), StandardTopKOutput(weights, ids, torch.empty(0)))
    return out


def wanted(layer: Any, how: Any, x: torch.Tensor, weights: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Each token's experts, one by one, as SGLang's Triton runner has it."""
    out = torch.zeros_like(x)
    for t, s in torch.cartesian_prod(*map(torch.arange, ids.shape)).tolist():
        e = int(ids[t, s])
        if e < 0:
            continue
        first = how.apply_router_weight_on_input
        h = layer.w13_weight[e] @ (x[t] * weights[t, s] if first else x[t])
        if hasattr(layer, "w13_weight_bias"):
            h = h + layer.w13_weight_bias[e]
        a = activated(how, h)
        y = layer.w2_weight[e] @ a
        if hasattr(layer, "w2_weight_bias"):
            y = y + layer.w2_weight_bias[e]
        out[t] += y if first else y * weights[t, s]
    return out * (how.routed_scaling_factor or 1.0)


def activated(how: Any, h: torch.Tensor) -> torch.Tensor:
    """The activation of h by the functions that SGLang's Triton runner calls, or by its own lines."""
    from sglang.srt.layers.activation import SituAndMul
    from sglang.srt.layers.moe.fused_moe_triton import fused_marlin_moe
    from sglang.srt.layers.moe.moe_runner.triton_utils import fused_moe

    alpha, limit, swiglu_limit = how.gemm1_alpha, how.gemm1_clamp_limit or None, how.swiglu_limit or None
    if how.activation == "situ":
        return SituAndMul(alpha or 4.0, limit).forward_native(h)
    if not how.is_gated:
        return torch.relu(h).square() if how.activation == "relu2" else getattr(torch.nn.functional, how.activation)(h)
    if alpha:
        halves = fused_moe.swiglu_no_interleaved_with_alpha_and_limit
        a: torch.Tensor = (fused_moe.swiglu_gpt_oss_sigmoid_alpha if how.gate_up_interleaved else halves)(
            h, alpha, limit
        )
        return a
    if limit:
        return fused_moe._swiglu_silu_clamp_mul(h, limit)
    if swiglu_limit:
        a = torch.empty(1, len(h) // 2, dtype=h.dtype)
        fused_marlin_moe.swiglu_limit_func(a, h[None], swiglu_limit)
        return a[0]
    gate, up = h.chunk(2)
    if how.activation == "gelu_tanh":
        return torch.nn.functional.gelu(gate, approximate="tanh") * up
    return getattr(torch.nn.functional, how.activation)(gate) * up


def lines(logged: pytest.LogCaptureFixture) -> list[str]:
    """Return the lines that pretuned logged through SGLang's logger."""
    said = [record.getMessage() for record in logged.records if record.name == "sglang.pretuned"]
    return [message for message in said if message.startswith("pretuned: ")]  # without the line that it is active


@contextlib.contextmanager
def listening(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Lines of SGLang's logger are kept."""
    with caplog.at_level(logging.INFO, "sglang.pretuned"):
        yield caplog


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """SGLang's hooks with pretuned's, for a test."""
    with hooks(monkeypatch) as hooked:
        yield hooked


@pytest.fixture
def logged(caplog: pytest.LogCaptureFixture) -> Iterator[pytest.LogCaptureFixture]:
    """Yield a handler that gets the lines of SGLang's logger."""
    with listening(caplog):
        yield caplog
