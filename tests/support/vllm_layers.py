"""A program that makes MoE layers of the vLLM on sys.path, on the CPU, with pretuned's plug-in, and prints JSON.

    python vllm_layers.py SCENARIO ...

Each scenario runs in a child of fork, which begins with vLLM imported, the plug-in registered and no module of
pretuned's that runs a layer. It prints a line: what was registered, and for each layer the method and experts class
that it has, the lines that were logged, and the error if there was one. Scenarios:

- ``unset``, ``on``, ``off``: PRETUNED_VLLM unset, 1 and 0
- ``without:NAME``: on, and module NAME can't be imported; ``without:*``: each module that ``on`` imports in turn
- ``prepare``, ``first_token``: on, and the preparation of weights, or a layer's first token, fails
- ``untried``: on, and any version of vLLM counts as tried
- ``cost``: how long registering takes, and which modules it imports
"""

from __future__ import annotations

import contextlib
import gc
import importlib.abc
import json
import logging
import os
import socket
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

os.environ |= {"VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
os.environ["OMP_NUM_THREADS"] = "1"  # a child of fork has no threads of its parent's
SIZE = 128  # H and I of the layers


class Missing(importlib.abc.MetaPathFinder):
    """Makes the import of one module fail."""

    def __init__(self, name: str) -> None:
        self.name = name

    def find_spec(self, name: str, path: Any = None, target: Any = None) -> None:
        if name == self.name:
            raise ImportError(f"{name} is made to fail")


class Lines(logging.Handler):
    """The lines of vLLM's and of pretuned's loggers, with their level."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(f"{record.levelname} {record.getMessage()}")


def start() -> None:
    """vLLM's groups of one process, which layers ask for their rank, and its workspace."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.distributed import ensure_model_parallel_initialized, init_distributed_environment

    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{free.getsockname()[1]}"
    with set_current_vllm_config(VllmConfig()):
        init_distributed_environment(1, 0, address, 0, backend="gloo")
        ensure_model_parallel_initialized(1, 1)
    with contextlib.suppress(ImportError):
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(torch.device("cpu"))
        torch.accelerator.empty_cache = lambda: None  # which the workspace of vLLM 0.20 calls on the CPU, too


def quantisation(kind: str) -> Any:
    """vLLM's config of the layer's weights; None for bf16."""
    if kind == "bf16":
        return None
    from vllm.model_executor.layers.fused_moe.oracle.fp8 import Fp8MoeBackend, backend_to_kernel_cls
    from vllm.model_executor.layers.quantization import fp8, get_quantization_config

    # vLLM has a backend for such layers on CPUs with AMX alone, or none. Its choice is made for it: it never runs.
    experts = backend_to_kernel_cls(Fp8MoeBackend.TRITON)
    chosen = Fp8MoeBackend.TRITON, experts[0] if isinstance(experts, list) else experts
    fp8.select_fp8_moe_backend = lambda *_, **__: chosen
    said = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
    return get_quantization_config("fp8").from_config(said)


def build_layer(kind: str) -> Any:
    """A layer as a model makes it, whose weights are small numbers."""
    import torch
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor.layers import fused_moe

    make = getattr(fused_moe, "FusedMoEFactory", None) or fused_moe.FusedMoE
    with set_current_vllm_config(VllmConfig()):
        layer = make(
            num_experts=4,
            top_k=2,
            hidden_size=SIZE,
            intermediate_size=SIZE,
            params_dtype=torch.bfloat16,
            quant_config=quantisation(kind),
            prefix=f"model.layers.0.mlp.experts.{kind}",
            renormalize=True,
        )
    layer = getattr(layer, "routed_experts", layer)
    torch.manual_seed(0)
    for name, parameter in sorted(layer.named_parameters()):
        drawn = torch.rand(parameter.shape) * 0.01 if "scale" in name else torch.randn(parameter.shape) * 0.1
        parameter.data.copy_(drawn.to(parameter.dtype))
    return layer


def told_of(layer: Any) -> dict[str, Any]:
    """Which classes run a layer, and its backend."""
    method = layer.quant_method
    experts = getattr(method, "experts_cls", None)
    kernel = getattr(method, "moe_kernel", None)
    return {
        "method": type(method).__name__,
        "ours": type(method).__module__.startswith("pretuned") and type(method).__name__ != "PretunedMoEMethod",
        "experts": getattr(experts, "__name__", None),
        "backend": getattr(getattr(method, "unquantized_backend", None), "name", None),
        "kernel": None if kernel is None else type(kernel.fused_experts).__name__,
    }


def loaded(layer: Any) -> None:
    """Process a layer's weights, as vLLM does after it has loaded them."""
    from vllm.config import VllmConfig, set_current_vllm_config

    with set_current_vllm_config(VllmConfig()):
        layer.quant_method.process_weights_after_loading(layer)


def output_error(layer: Any, kind: str) -> float:
    """The largest difference of the layer's output from experts that are multiplied one by one, over the largest."""
    import torch

    torch.manual_seed(1)
    x, ids = torch.randn(5, SIZE).bfloat16(), torch.stack([torch.randperm(4)[:2] for _ in range(5)]).int()
    weights = torch.rand(5, 2)
    w13, w2 = raw(layer, kind)
    method = layer.quant_method
    extra: dict[str, Any] = {"shared_experts_input": None}
    import inspect

    if "shared_experts" in inspect.signature(method.apply).parameters:
        extra["shared_experts"] = None
    out = method.apply(layer=layer, x=x, topk_weights=weights, topk_ids=ids, **extra)
    wanted = torch.zeros(5, SIZE)
    for t in range(5):
        for s in range(2):
            gate, up = (w13[ids[t, s]] @ x[t].float()).chunk(2)
            wanted[t] += weights[t, s] * (w2[ids[t, s]] @ (torch.nn.functional.silu(gate) * up))
    return float((out.float() - wanted).abs().max() / wanted.abs().max())


def raw(layer: Any, kind: str) -> list[Any]:
    """w13 and w2 in fp32. Of fp8 they were kept before they were prepared."""
    if kind == "bf16":
        return [layer.w13_weight.data.float(), layer.w2_weight.data.float()]
    return layer.kept_for_test  # type: ignore[no-any-return]


def keep_raw(layer: Any, kind: str) -> None:
    """Keep a layer's dequantised weights."""
    if kind == "fp8":
        layer.kept_for_test = [
            getattr(layer, f"{which}_weight").data.float()
            * getattr(layer, f"{which}_weight_scale_inv").data.repeat_interleave(128, 1).repeat_interleave(128, 2)
            for which in ("w13", "w2")
        ]


def layers(report: dict[str, Any], *, run: bool = False) -> None:
    """Make a layer of each kind, and run it."""
    for kind in ("bf16", "fp8"):
        layer = build_layer(kind)
        report[kind] = told_of(layer)
        if run:
            keep_raw(layer, kind)
            before = {name: parameter.data.clone() for name, parameter in layer.named_parameters()}
            try:
                loaded(layer)
            except AttributeError as error:
                if "'_C'" not in str(error):
                    raise
                report[kind]["needs"] = str(
                    error
                )  # vLLM's own experts got as far as its compiled code, which is not here
            report[kind]["loaded"] = told_of(layer)
            after = dict(layer.named_parameters())
            report[kind]["unchanged"] = before.keys() == after.keys() and all(
                before[name].equal(parameter.data) for name, parameter in after.items()
            )
            if "Pretuned" in str(report[kind]["loaded"]["kernel"]):
                report[kind]["error"] = output_error(layer, kind)


def scenario(name: str, report: dict[str, Any]) -> None:
    """Run one."""
    os.environ.pop("PRETUNED_VLLM", None)
    if name != "unset":
        os.environ["PRETUNED_VLLM"] = "0" if name == "off" else "1"
    _, _, missing = name.partition(":")
    before = set(sys.modules)
    if missing:
        sys.meta_path.insert(0, Missing(missing))
    if name == "untried":
        from pretuned.integrations.vllm import PLUG_IN

        PLUG_IN.first, PLUG_IN.last = (0,), (9999,)
    register()
    if name in ("prepare", "first_token"):
        from pretuned.integrations.vllm import experts, quantised

        def fails(*_: Any, **__: Any) -> None:
            raise RuntimeError("made to fail")

        if name == "prepare":
            quantised.prepared = fails
        else:
            experts.moe_mlp = fails
    layers(report, run=name in ("on", "prepare", "first_token") or bool(missing))
    report["counted"] = [counted("pretuned"), counted("engine")]
    report["imported"] = sorted(module for module in set(sys.modules) - before if module.split(".")[0] in OURS)


def counted(runs: str) -> float | None:
    """How many layers the gauge says that pretuned, or the engine, runs."""
    from prometheus_client import REGISTRY

    return REGISTRY.get_sample_value("pretuned_moe_layers", {"engine": "vllm", "runs": runs})


OURS = ("pretuned", "msgpack")


def register() -> None:
    """Load the plug-ins, as each process of an engine does."""
    from vllm import plugins

    plugins.plugins_loaded = False
    plugins.load_general_plugins()


def in_a_child(call: Callable[[dict[str, Any]], object]) -> dict[str, Any]:
    """Return the dict that ``call`` fills in a child of fork."""
    reads, writes = os.pipe()
    child = os.fork()
    if not child:
        report: dict[str, Any] = {}
        lines = Lines()
        logging.getLogger("vllm").addHandler(lines)
        logging.getLogger("vllm").setLevel(logging.INFO)  # as an engine does, some versions when it starts
        try:
            call(report)
        except BaseException:
            report["failed"] = traceback.format_exc()
        report["lines"] = [line for line in lines.lines if "pretuned" in line or "overwritten" in line]
        with os.fdopen(writes, "w") as file:
            file.write(json.dumps(report))
        os._exit(0)
    os.close(writes)
    with os.fdopen(reads) as file:
        said = file.read()
    os.waitpid(child, 0)
    return json.loads(said) if said else {"failed": "the child died"}  # type: ignore[no-any-return]


def cost(report: dict[str, Any]) -> None:
    """Report the cost of registering alone, with the modules that an engine's plug-in would find imported."""
    os.environ.pop("PRETUNED_VLLM", None)
    from importlib.metadata import entry_points

    (point,) = entry_points(group="vllm.general_plugins", name="pretuned")
    gc.disable()  # else it may be now that Python goes through the million objects of vLLM's imports
    before, began, used = set(sys.modules), time.perf_counter(), time.process_time()
    point.load()()
    report |= {"ms": (time.perf_counter() - began) * 1e3, "cpu_ms": (time.process_time() - used) * 1e3}
    report["imported"] = sorted(set(sys.modules) - before)


def main(names: Sequence[str]) -> None:
    """Print a line of JSON for each scenario."""
    import vllm
    import vllm.engine.arg_utils  # which loads the plug-ins, in an engine

    def say(name: str, report: dict[str, Any]) -> None:
        print(json.dumps({"scenario": name, "vllm": vllm.__version__, **report}), flush=True)

    if "cost" in names:
        say("cost", in_a_child(cost))
    import torch

    torch.set_num_threads(1)
    start()
    from vllm.model_executor.layers import fused_moe  # noqa: F401 - once, for all children
    from vllm.model_executor.layers.quantization import fp8  # noqa: F401

    imported: list[str] = []
    for name in names:
        if name == "without:*":
            for library in imported:
                say(
                    f"without:{library}",
                    in_a_child(lambda report, library=library: scenario(f"without:{library}", report)),
                )
        elif name != "cost":
            report = in_a_child(lambda report, name=name: scenario(name, report))
            if name == "on":
                imported = report.get("imported", [])
            say(name, report)


if __name__ == "__main__":
    main(sys.argv[1:])
    sys.stdout.flush()
    os._exit(0)  # past what vLLM does at exit
