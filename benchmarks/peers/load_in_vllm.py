"""Times vLLM's load of a model, with pretuned's plug-in and without: dummy weights, and real safetensors files.

    python benchmarks/run.py load_in_vllm --vllm vllm-0.26.0 --json load-in-vllm.json

gpt-oss-20b in mxfp4 and Qwen3-30B-A3B in fp8 128x128 blocks, by their configs with ``--layers`` layers and every
expert. vLLM's ``get_model`` is timed until the GPU is idle: it makes the model, loads the experts' tensors and
processes them. The files have the experts alone, with codes that are drawn, and are in the page cache. ``first`` is a
process's first load, with what a GPU and the kernels need once; ``later`` is the best of others. Each
side has two processes, in turns, and the best of both counts. ``reload`` is vLLM's layerwise reload of a second set of
files into the same model; vLLM 0.26 can't reload its own layers of gpt-oss.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import shutil
import tempfile
import time
import traceback
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from benchmarks import provenance

from .engine_in_vllm import ENVIRON, FP8, GPT_OSS, MODULES, QWEN, SIDES
from .engines import child, leave, ready_files
from .layers_in_vllm import find_vllm, vllm_of_one

MODELS: dict[str, dict[str, Any]] = {"gpt-oss-20b": GPT_OSS, "qwen3-30b-fp8": QWEN}
SMALL = {"vocab_size": 1024, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}  # embeddings are not what loads
LATER = 2  # loads after the first
ROUNDS = 2  # processes of each side, in turns: on a GPU of another socket than the files a copy takes longer


def config_of(model: str, layers: int, **sizes: int) -> dict[str, Any]:
    """A model's config.json with fewer layers; its experts alone are quantised. ``sizes`` are others than its own."""
    config = MODELS[model] | SMALL | {"num_hidden_layers": layers} | sizes
    if model == "gpt-oss-20b":
        kinds = ("sliding_attention", "full_attention")
        return config | {"layer_types": [kinds[i % 2] for i in range(layers)]}
    names = ("mlp.gate", *(f"self_attn.{part}_proj" for part in ("q", "k", "v", "o")))
    others = ["lm_head", *(f"model.layers.{i}.{name}" for i in range(layers) for name in names)]
    return config | {"quantization_config": FP8 | {"modules_to_not_convert": others}}


def experts(config: dict[str, Any], layer: int, device: str) -> Iterator[tuple[str, Any]]:
    """A layer's tensors by a checkpoint's names, with numbers that are drawn: no NaN, and results that are small."""
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
    """Write a model's config and its experts, a file for each layer; how many bytes these are."""
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
    """vLLM's config of the model in a folder. ``files`` is its load format."""
    import torch
    from vllm.engine.arg_utils import EngineArgs

    attention = {"attention_backend": "TRITON_ATTN"} if torch.cuda.is_available() else {}
    options = {"model": str(folder), "load_format": files, "skip_tokenizer_init": True, "dtype": "bfloat16"}
    return EngineArgs(**options, max_model_len=256, enforce_eager=True, **attention).create_engine_config()


def register(model: str) -> None:
    """Hand vLLM a model's class; else it imports it in a process of its own. And the plug-in."""
    import vllm

    from pretuned.integrations.vllm import register as register_pretuned

    register_pretuned()
    (name,) = MODELS[model]["architectures"]
    module = importlib.import_module(f"vllm.model_executor.models.{MODULES[name]}")
    vllm.ModelRegistry.register_model(name, getattr(module, name))


def load(config: Any) -> Any:
    """vLLM's model."""
    from vllm.config import set_current_vllm_config
    from vllm.model_executor.model_loader import get_model

    with set_current_vllm_config(config):
        return get_model(vllm_config=config)


def reload(model: Any, config: Any, folder: Path) -> None:
    """New weights from a folder's files, as vLLM's ``reload_weights`` does it: its model runner's own lines."""
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


def here(args: argparse.Namespace) -> dict[str, Any]:
    """All loads of a model in this process."""
    if args.vllm is not None:
        find_vllm(args.vllm, args.packages)
    import torch
    import vllm

    register(args.models[0])
    about = provenance.about() | {"vllm": vllm.__version__, "gpu": torch.cuda.get_device_name()}
    times: dict[str, list[float]] = {}
    classes: list[str] = []
    folders = args.files / args.models[0] / "0", args.files / args.models[0] / "1"
    with vllm_of_one("cuda"):
        for files in ("dummy", "safetensors"):
            for _ in range(1 + LATER):
                model = None
                gc.collect()
                torch.cuda.empty_cache()
                config = settings(folders[0], files)
                begun = time.perf_counter()
                model = load(config)
                torch.cuda.synchronize()
                times.setdefault(files, []).append(time.perf_counter() - begun)
        classes = ran_by(model)
        for number in range(1 + LATER):
            begun = time.perf_counter()
            try:
                reload(model, config, folders[1 - number % 2])
            except Exception:
                print("no reload:", traceback.format_exc(limit=0).strip(), flush=True)
                break
            torch.cuda.synchronize()
            times.setdefault("reload", []).append(time.perf_counter() - begun)
    seconds = {name: {"first": round(found[0], 3), "later": round(min(found[1:]), 3)} for name, found in times.items()}
    return {"about": about, "seconds": seconds, "experts": classes}


def of_model(args: argparse.Namespace, model: str, files: Path, seconds: float) -> dict[str, Any]:
    """Both sides of a model, each in processes of its own, in turns."""
    sides: dict[str, list[dict[str, Any]]] = {side: [] for side in SIDES}
    for side in [*SIDES] * ROUNDS:
        with tempfile.TemporaryDirectory() as folder:
            out = Path(folder) / "run.json"
            options = {"--vllm": args.vllm, "--packages": args.packages, "--json": out, "--models": model}
            options |= {"--files": files}
            words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
            ended = child(["load_in_vllm", *words, "--here"], seconds, ENVIRON | {"PRETUNED_VLLM": SIDES[side]})
            sides[side].append(json.loads(out.read_text()) if out.is_file() else {"stopped": ended})
    run = {"model": model, "layers": args.layers, "sides": sides}
    for side, reports in sides.items():
        for name in ("dummy", "safetensors", "reload"):
            found = [report["seconds"][name] for report in reports if name in report.get("seconds", {})]
            if found:
                best = {key: min(each[key] for each in found) for key in ("first", "later")}
                run.setdefault(side, {})[name] = best
                print(f"{model:14} {name:12} {side:8} first {best['first']:8.3f} s  later {best['later']:8.3f} s")
        for report in reports:
            told = report.get("experts") or report.get("stopped", "").strip().splitlines()[-1:]
            print(" ", side, *told, flush=True)
    return run


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked; default: the one that is installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that vLLM imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=90, help="for each process")
    parser.add_argument("--files", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one side, in this process
    args = parser.parse_args(argv)
    args.models = args.models.split(",")
    for model in args.models:
        if model not in MODELS:
            parser.error(f"--models: {model!r} is none of {', '.join(MODELS)}")
    if args.vllm is not None and not (args.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {args.vllm} has no folder vllm of an unpacked wheel")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure; 1 where a side of a model has no times."""
    args = arguments(argv)
    if args.here:
        try:
            args.json.write_text(json.dumps(here(args)))
            leave(0)
        except Exception:
            traceback.print_exc()
            args.json.write_text(json.dumps({"stopped": traceback.format_exc(limit=-8)}))
        leave(1)
    ready_files([] if args.vllm is None else [args.vllm])
    runs: list[dict[str, Any]] = []
    files = Path(tempfile.mkdtemp())
    try:
        for model in args.models:
            (files / model).mkdir()
            config = config_of(model, args.layers)
            size = sum(write(files / model / str(seed), config, seed, "cuda") for seed in range(2)) // 2
            print(f"{model}: {args.layers} layers, {size / 1e9:.2f} GB of files", flush=True)
            runs.append(of_model(args, model, files, args.seconds) | {"files_gb": round(size / 1e9, 2)})
            args.json.write_text(json.dumps({"command": provenance.command(), "runs": runs}, indent=1) + "\n")
            shutil.rmtree(files / model)
    finally:
        shutil.rmtree(files)
    return 0 if all("safetensors" in run.get(side, {}) for run in runs for side in SIDES) else 1
