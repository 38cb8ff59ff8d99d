"""Times vLLM's load of a model, with pretuned's plug-in and without: dummy weights, and real safetensors files.

    python benchmarks/run.py load_in_vllm --vllm vllm-0.26.0 --json load-in-vllm.json

gpt-oss-20b in mxfp4 and Qwen3-30B-A3B in fp8 128x128 blocks, by their configs with ``--layers`` layers and every
expert. vLLM's ``get_model`` is timed, and its phases, each until the GPU is idle: ``make`` the model, load ``weights``
into its parameters, ``process`` them. The files have the experts alone, with codes that are drawn, and are in the page
cache. Processes differ more than the sides, so a process of a model loads with the plug-in and without in turns
(without, with, with, without, ...), ``--turns`` times each after a first one. Milliseconds are medians and quartiles.
``reload`` is vLLM's layerwise reload of another set of files into a side's model, ``--reloads`` times; vLLM 0.26 can't
reload its own layers of gpt-oss.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import gc
import importlib
import json
import os
import shutil
import statistics
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from benchmarks import provenance

from .engine_in_vllm import ENVIRON, FP8, GPT_OSS, MODULES, QWEN, SIDES
from .engines import child, leave, ready_files
from .layers_in_vllm import find_vllm, vllm_of_one

MODELS: dict[str, dict[str, Any]] = {"gpt-oss-20b": GPT_OSS, "qwen3-30b-fp8": QWEN}
SMALL = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # small embeddings
WHOLE = "whole"
PHASES = ("make", "weights", "process", WHOLE)
_Times = dict[str, list[float]]  # of each phase, milliseconds


def config_of(model: str, layers: int, **sizes: int) -> dict[str, Any]:
    """A model's config.json with fewer layers; only its experts are quantised. ``sizes`` replace the model's sizes."""
    config = MODELS[model] | SMALL | {"num_hidden_layers": layers} | sizes
    if model == "gpt-oss-20b":
        kinds = ("sliding_attention", "full_attention")
        return config | {"layer_types": [kinds[i % 2] for i in range(layers)]}
    names = ("mlp.gate", *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")))
    others = ["lm_head", *(f"model.layers.{i}.{name}" for i in range(layers) for name in names)]
    return config | {"quantization_config": FP8 | {"modules_to_not_convert": others}}


def experts(config: dict[str, Any], layer: int, device: str) -> Iterator[tuple[str, Any]]:
    """Yield a layer's tensors under a checkpoint's names, drawn without NaN and so that results are small."""
    import torch

    H = config["hidden_size"]
    prefix = f"model.layers.{layer}.mlp.experts"
    if config["model_type"] == "gpt_oss":
        E, I = config["num_local_experts"], config["intermediate_size"]  # noqa: E741
        for name, N, K in (("gate_up_proj", 2 * I, H), ("down_proj", H, I)):
            codes = torch.randint(0, 256, (E, N, K // 32, 16), dtype=torch.uint8, device=device)
            yield f"{prefix}.{name}_blocks", codes
            yield (
                f"{prefix}.{name}_scales",
                torch.randint(118, 122, (E, N, K // 32), dtype=torch.uint8, device=device),
            )
            yield f"{prefix}.{name}_bias", (torch.randn(E, N, device=device) * 0.1).bfloat16()
        return
    E, I = config["num_experts"], config["moe_intermediate_size"]  # noqa: E741
    for name, N, K in (("gate_proj", I, H), ("up_proj", I, H), ("down_proj", H, I)):
        for e in range(E):
            codes = (torch.randn(N, K, device=device) * 100).clamp_(-448, 448).to(torch.float8_e4m3fn)
            scale = (torch.rand(N // 128, K // 128, device=device) + 0.5) * 5e-4
            yield f"{prefix}.{e}.{name}.weight", codes
            yield f"{prefix}.{e}.{name}.weight_scale_inv", scale


def write(folder: Path, config: dict[str, Any], seed: int, device: str) -> int:
    """Write a model's config and its experts, a file for each layer; return the files' bytes."""
    import torch
    from safetensors.torch import save_file

    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    torch.manual_seed(seed)
    for layer in range(config["num_hidden_layers"]):
        tensors = {name: tensor.cpu() for name, tensor in experts(config, layer, device)}
        save_file(tensors, folder / f"model-{layer:05}.safetensors", {"format": "pt"})
    return sum(file.stat().st_size for file in folder.glob("*.safetensors"))


def settings(folder: Path, files: str) -> Any:
    """vLLM's config for the model in ``folder``. ``files`` is vLLM's load format."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    attention = {"attention_backend": "TRITON_ATTN"} if torch.cuda.is_available() else {}
    options = {"model": str(folder), "load_format": files, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    return EngineArgs(**options, max_model_len=256, enforce_eager=True, **attention).create_engine_config()


def register(model: str) -> None:
    """Register pretuned's plug-in, and the model's class, which vLLM would otherwise import in a process of its own."""
    import vllm

    from pretuned.integrations.vllm import register as register_pretuned

    register_pretuned()
    (name,) = MODELS[model]["architectures"]
    module = importlib.import_module(f"vllm.model_executor.models.{MODULES[name]}")
    vllm.ModelRegistry.register_model(name, getattr(module, name))


def idle() -> None:
    """Wait for the GPU, if there is one."""
    import torch

    if torch.cuda.is_available():
        torch.cuda.synchronize()


def timed(call: Callable[..., Any], times: list[float]) -> Callable[..., Any]:
    """Wrap ``call``: each call appends its milliseconds, from idle GPU to idle GPU, to ``times``."""

    @functools.wraps(call)
    def run(*arguments: Any, **named: Any) -> Any:
        idle()
        begun = time.perf_counter()
        result = call(*arguments, **named)
        idle()
        times.append(1e3 * (time.perf_counter() - begun))
        return result

    return run


@contextlib.contextmanager
def phases(times: _Times) -> Iterator[None]:
    """Append the times of each phase of vLLM's loads in this block to ``times``."""
    from vllm.model_executor.model_loader import base_loader
    from vllm.model_executor.model_loader.default_loader import DefaultModelLoader
    from vllm.model_executor.model_loader.dummy_loader import DummyModelLoader

    functions = [
        ("make", base_loader, "initialize_model"),
        ("weights", DefaultModelLoader, "load_weights"),
        ("weights", DummyModelLoader, "load_weights"),
        ("process", base_loader, "process_weights_after_loading"),
    ]
    own = [getattr(holder, name) for _, holder, name in functions]
    for (phase, holder, name), function in zip(functions, own, strict=True):
        setattr(holder, name, timed(function, times.setdefault(phase, [])))
    try:
        yield
    finally:
        for (_, holder, name), function in zip(functions, own, strict=True):
            setattr(holder, name, function)


def load(config: Any, times: _Times | None = None) -> Any:
    """Load the model with vLLM's loader."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    times = {} if times is None else times
    with set_current_vllm_config(config), phases(times):
        return timed(get_model, times.setdefault(WHOLE, []))(vllm_config=config)


def reload(model: Any, config: Any, folder: Path) -> None:
    """Load other weights from a folder's files, with the steps of vLLM's ``reload_weights``."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model_loader
    from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

    config.model_config.model = str(folder)
    with set_current_vllm_config(config):
        named = get_model_loader(config.load_config).get_all_weights(config.model_config, model)
        initialize_layerwise_reload(model)
        model.load_weights(named)
        finalize_layerwise_reload(model, config.model_config)


def ran_by(model: Any) -> list[str]:
    """The classes that run a model's layers of experts."""
    methods = [getattr(module, "quant_method", None) for module in model.modules()]
    kernels = [method.moe_kernel for method in methods if getattr(method, "moe_kernel", None) is not None]
    return sorted({type(kernel.fused_experts).__name__ for kernel in kernels})


def in_turns(turns: int, run: Callable[[str], None]) -> None:
    """Call ``run`` with each side once, and ``turns`` times in turns; the environment switches the plug-in."""
    first, second = SIDES
    for side in [first, second, *([first, second, second, first] * -(-turns // 2))[: 2 * turns]]:
        os.environ["PRETUNED_VLLM"] = SIDES[side]
        gc.collect()
        run(side)


def here(args: argparse.Namespace) -> dict[str, Any]:
    """Time all loads of a model in this process."""
    if args.vllm is not None:
        find_vllm(args.vllm, args.packages)
    import torch
    import vllm

    (name,), device = args.models, "cuda" if torch.cuda.is_available() else "cpu"
    os.environ["PRETUNED_VLLM"] = SIDES["with"]
    register(name)
    about = provenance.about() | {"vllm": vllm.__version__}
    report: dict[str, Any] = {"model": name, "about": about, "ms": {}, "experts": {}}
    folders = [args.files / name / str(seed) for seed in range(2)]
    models: dict[str, Any] = {}

    def load_files(side: str, files: str, times: dict[str, _Times]) -> None:
        models.pop(side, None)
        if device == "cuda":
            torch.cuda.empty_cache()
        config = settings(folders[0], files)
        models[side] = load(config, times[side]), config

    def load_again(side: str, times: dict[str, _Times], numbers: dict[str, int]) -> None:
        numbers[side] += 1
        with contextlib.suppress(KeyError):  # of vLLM 0.26's own layers of gpt-oss
            timed(reload, times[side].setdefault(WHOLE, []))(*models[side], folders[numbers[side] % 2])

    with vllm_of_one(device):
        for files in ("dummy", "safetensors"):
            times: dict[str, _Times] = {side: {} for side in SIDES}
            report["ms"][files] = times
            in_turns(args.turns, functools.partial(load_files, files=files, times=times))
            args.json.write_text(json.dumps(report))
        report["experts"] = {side: ran_by(model) for side, (model, _) in models.items()}
        report["ms"]["reload"] = times = {side: {} for side in SIDES}
        in_turns(args.reloads, functools.partial(load_again, times=times, numbers=dict.fromkeys(SIDES, 0)))
    return report


def summary(report: dict[str, Any]) -> Iterator[str]:
    """A line for each phase of each load: both sides' medians and quartiles without the first load, and their ratio."""
    for loading, sides in report["ms"].items():
        for phase in PHASES:
            both = [sides[side].get(phase, [])[1:] for side in SIDES]
            if not all(len(times) > 1 for times in both):
                continue
            medians = [statistics.median(times) for times in both]
            texts = []
            for side, times, median in zip(SIDES, both, medians, strict=True):
                low, _, high = statistics.quantiles(times, n=4)
                texts.append(f"{side} {median:8.1f} ({low:.1f} to {high:.1f})")
            line = f"{report['model']:14} {loading:12} {phase:8} {'  '.join(texts)}"
            yield f"{line}  with / without {medians[1] / medians[0]:.3f}"
    yield f"{report['model']:14} {report.get('experts')}"


def of_model(args: argparse.Namespace, model: str, files: Path) -> dict[str, Any]:
    """Measure the loads of a model in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        options = {"--vllm": args.vllm, "--packages": args.packages, "--json": out, "--models": model}
        options |= {"--files": files, "--turns": args.turns, "--reloads": args.reloads}
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        ended = child(["load_in_vllm", *words, "--here"], args.seconds, ENVIRON)
        report: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {"model": model, "ms": {}}
    report |= {"layers": args.layers} | ({"stopped": ended} if ended else {})
    for line in (*summary(report), report.get("stopped", "").strip()):
        print(line, flush=True)
    return report


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked; default: the one that is installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that vLLM imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--turns", type=int, default=10, help="loads of each side, after a first one")
    parser.add_argument("--reloads", type=int, default=4, help="reloads of each side, after a first one")
    parser.add_argument("--seconds", type=float, default=180, help="for each model")
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one model, in this process
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for model in args.models:
        if model not in MODELS:
            parser.error(f"--models: {model!r} is none of {', '.join(MODELS)}")
    if args.vllm is not None and not (args.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {args.vllm} has no folder vllm of an unpacked wheel")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if a model was stopped."""
    args = arguments(argv)
    if args.here:
        try:
            args.json.write_text(json.dumps(here(args)))
            leave(0)
        except Exception:
            traceback.print_exc()
        leave(1)
    import torch

    ready_files([] if args.vllm is None else [args.vllm])
    runs: list[dict[str, Any]] = []
    files, device = Path(tempfile.mkdtemp()), "cuda" if torch.cuda.is_available() else "cpu"
    try:
        for model in args.models:
            (files / model).mkdir()
            config = config_of(model, args.layers)
            size = sum(write(files / model / str(seed), config, seed, device) for seed in range(2)) // 2
            print(f"{model}: {args.layers} layers, {size / 1e9:.2f} GB of files", flush=True)
            runs.append(of_model(args, model, files) | {"files_gb": round(size / 1e9, 2)})
            args.json.write_text(json.dumps({"command": provenance.command(), "runs": runs}, indent=1) + "\n")
            shutil.rmtree(files / model)
    finally:
        shutil.rmtree(files)
    return 1 if any("stopped" in run for run in runs) else 0
