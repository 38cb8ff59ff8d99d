"""Runs a whole vLLM engine with dummy weights, with pretuned's plug-in and without, caches empty and warm, in turns.

    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    python benchmarks/run.py engine_in_vllm --vllm vllm-0.20.2 --json engine-in-vllm.json
    python benchmarks/run.py engine_in_vllm --models qwen3-30b --layers 12 --modes graphs --json some.json  # installed
    python benchmarks/run.py engine_in_vllm --models qwen3-30b --ranks 2 --modes graphs --json ep2.json  # on two GPUs

``--models``: Qwen3-30B-A3B in bf16 and in fp8 128x128 blocks, gpt-oss-20b in mxfp4, by their configs alone
(``--layers``: with fewer layers), greedy, with weights that are drawn. Each run is a process of its own. A side's first
run has new, empty folders for all caches (``empty``), its second run has what the first one left (``warm``), and the
sides take turns: without, with, without, with. A run has the seconds from the start of the process to the first token,
and for each case of sequences, prompt and new tokens the new tokens a second (of prompts that are one token long to
answer: the prompt's tokens), the better of two. ``--modes`` are tried in turn until both sides ran: ``compiled`` is
what vLLM does unasked, ``graphs`` is CUDA graphs without torch.compile, ``eager`` neither. Attention is Triton's.
``--ranks``: as many data-parallel engines, a GPU each, with the experts spread over them (tp=1, ep=ranks); each runs
the case's sequences, and tokens a second are the sum. What stops a run is told in it; no run begins that would not end
in ``--seconds``, of each model. The file is whole after each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import os
import socket
import tempfile
import time
import traceback
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from benchmarks import provenance

from .engines import caches_in, child, leave, ready_files
from .layers_in_vllm import find_vllm

QWEN: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B's config.json
    "architectures": ["Qwen3MoeForCausalLM"],
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "num_hidden_layers": 48,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "head_dim": 128,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "decoder_sparse_step": 1,
    "mlp_only_layers": [],
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1e6,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": False,
    "torch_dtype": "bfloat16",
    "bos_token_id": 151643,
    "eos_token_id": 151645,
}
GPT_OSS: dict[str, Any] = {  # openai/gpt-oss-20b's
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "hidden_size": 2880,
    "num_hidden_layers": 24,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "intermediate_size": 2880,
    "num_local_experts": 32,
    "num_experts_per_tok": 4,
    "experts_per_token": 4,
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "initial_context_length": 4096,
    "rms_norm_eps": 1e-5,
    "rope_theta": 150000,
    "rope_scaling": {
        "rope_type": "yarn",
        "factor": 32.0,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "truncate": False,
        "original_max_position_embeddings": 4096,
    },
    "sliding_window": 128,
    "swiglu_limit": 7.0,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "attention_bias": True,
    "attention_dropout": 0.0,
    "torch_dtype": "bfloat16",
    "bos_token_id": 199998,
    "eos_token_id": 200002,
    "pad_token_id": 199999,
    "quantization_config": {
        "quant_method": "mxfp4",
        "modules_to_not_convert": [
            "model.layers.*.self_attn",
            "model.layers.*.mlp.router",
            "model.embed_tokens",
            "lm_head",
        ],
    },
}
FP8 = {
    "quant_method": "fp8",
    "fmt": "e4m3",
    "activation_scheme": "dynamic",
    "weight_block_size": [128, 128],
    "modules_to_not_convert": ["lm_head"],
}
MODELS: dict[str, dict[str, Any]] = {
    "qwen3-30b": QWEN,
    "qwen3-30b-fp8": QWEN | {"quantization_config": FP8},
    "gpt-oss-20b": GPT_OSS,
}
MODULES = {"Qwen3MoeForCausalLM": "qwen3_moe", "GptOssForCausalLM": "gpt_oss"}
TINY = {  # for a machine without a GPU
    "hidden_size": 64,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "intermediate_size": 128,
    "moe_intermediate_size": 32,
    "num_experts": 8,
    "num_experts_per_tok": 2,
    "vocab_size": 256,
    "max_position_embeddings": 512,
    "num_hidden_layers": 2,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
MODES: dict[str, dict[str, Any]] = {
    "compiled": {},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "eager": {"enforce_eager": True},
}
SIDES = {"without": "0", "with": "1"}  # PRETUNED_VLLM
CACHES = ("empty", "warm")
CASES = "1x128+128,16x128+128,128x128+128,16x2048+1"
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo",
    "NCCL_SOCKET_IFNAME": "lo",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}
SLACK = 1.25  # limit of a run's time, in times of the last run of its kind


def logged_lines() -> list[str]:
    """A list that collects each line that pretuned logs, by a filter: vLLM removes all handlers when it starts."""
    lines: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logging.getLogger("vllm.pretuned").addFilter(kept)
    return lines


def cases(said: str) -> list[tuple[int, int, int]]:
    """Parse ``16x128+128``, comma-separated: the number of sequences, and each sequence's prompt and new tokens."""
    parsed = []
    for case in said.split(","):
        count, _, rest = case.partition("x")
        prompt, _, new = rest.partition("+")
        parsed.append((int(count), int(prompt), int(new)))
    return parsed


def speed(generate: Callable[[int, int, int], None], case: tuple[int, int, int]) -> float:
    """Tokens a second, the better of two runs: new tokens, or prompt tokens if a case has one new token a sequence."""
    count, prompt, new = case
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        generate(*case)
        taken.append(time.perf_counter() - begun)
    return round(count * (new if new > 1 else prompt) / min(taken), 1)


def settings(args: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """The arguments for ``vllm.LLM``; writes the model's config.json into ``folder``."""
    import torch

    config = MODELS[args.models[0]] | (TINY if args.tiny else {})
    config |= {} if args.layers is None else {"num_hidden_layers": args.layers}
    if config["model_type"] == "gpt_oss":
        kinds = ("sliding_attention", "full_attention")
        config |= {"layer_types": [kinds[i % 2] for i in range(config["num_hidden_layers"])]}
    (folder / "config.json").write_text(json.dumps(config))
    longest = max(prompt + new for _, prompt, new in args.cases)
    options = {
        "model": str(folder),
        "load_format": "dummy",
        "skip_tokenizer_init": True,
        "dtype": "bfloat16",
        "seed": 0,
        "max_model_len": longest + 16,
        "max_num_seqs": max(16, *(count for count, *_ in args.cases)),
        "enable_prefix_caching": False,
        **MODES[args.modes[0]],
    }
    if torch.cuda.is_available():
        options |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.9}
    if args.ranks > 1:
        # In this process, as without ranks: a worker's own would miss what is set up here.
        options |= {"enable_expert_parallel": True, "distributed_executor_backend": "uni"}
    return options


def draw_codes() -> None:
    """Make vLLM fill quantised dummy weights too, which it otherwise leaves uninitialised or zero.

    Bytes, which are mxfp4 codes or scales, are drawn so that no value is NaN; e4m3 values are uniform in [-64, 64].
    """
    import torch
    from vllm.model_executor.model_loader import weight_utils

    own = weight_utils.initialize_single_dummy_weight

    def drawn(param: torch.Tensor, *more: Any, **named: Any) -> None:
        if param.device.type == "meta" or param.dtype not in (torch.uint8, torch.float8_e4m3fn):
            own(param, *more, **named)
            return
        g = torch.Generator(param.device).manual_seed(1234)
        for matrix in param.data if param.dim() == 3 else (param.data,):
            if param.dtype is torch.uint8:
                matrix.copy_(torch.randint(119, 124, matrix.shape, generator=g, device=param.device, dtype=torch.uint8))
            else:
                matrix.copy_(torch.rand(matrix.shape, generator=g, device=param.device) * 128 - 64)

    weight_utils.initialize_single_dummy_weight = drawn


def here(args: argparse.Namespace) -> dict[str, Any]:
    """Run one engine in this process; return its times and the lines that pretuned logged."""
    if args.vllm is not None:
        find_vllm(args.vllm, args.packages)
    import vllm

    from pretuned.integrations.vllm import register

    lines = logged_lines()
    register()  # needed if pretuned is not installed as a package; else vLLM calls it as well
    (name,) = MODELS[args.models[0]]["architectures"]  # registered below; else vLLM imports it in a process of its own
    module = importlib.import_module(f"vllm.model_executor.models.{MODULES[name]}")
    vllm.ModelRegistry.register_model(name, getattr(module, name))
    draw_codes()
    report: dict[str, Any] = {"vllm": vllm.__version__, "about": provenance.about()}
    report["environ"] = {name: value for name, value in sorted(os.environ.items()) if name.startswith(("VLLM_", "DG_"))}
    with tempfile.TemporaryDirectory() as folder:
        llm = vllm.LLM(**settings(args, Path(folder)))

        def generate(count: int, prompt: int, new: int) -> None:
            prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(prompt)]} for i in range(count)]
            how = vllm.SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
            llm.generate(prompts, how, use_tqdm=False)

        generate(1, 16, 1)
        report["first_token_s"] = round(time.time() - args.begun, 2)
        report["tokens_per_s"] = {}
        for said, case in zip(args.said.split(","), args.cases, strict=True):
            generate(case[0], case[1], min(case[2], 2))  # a first call of this size, untimed
            report["tokens_per_s"][said] = speed(generate, case)
            args.json.write_text(json.dumps(report | {"told": lines}))
    return report | {"told": lines}


def one_run(args: argparse.Namespace, model: str, mode: str, side: str, caches: Path, seconds: float) -> dict[str, Any]:
    """Run an engine in processes of its own, one a rank, with its caches in the folder ``caches``."""
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder, ThreadPoolExecutor(args.ranks) as pool:
        outs = [Path(folder) / f"{rank}.json" for rank in range(args.ranks)]
        options = {
            "--vllm": args.vllm,
            "--packages": args.packages,
            "--layers": args.layers,
            "--models": model,
            "--cases": args.said,
            "--modes": mode,
            "--ranks": args.ranks,
            "--begun": begun,
        }
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        words += ["--here", *(["--tiny"] if args.tiny else [])]
        environ = {**ENVIRON, **caches_in(caches), "PRETUNED_VLLM": SIDES[side]}
        ends = [
            pool.submit(child, ["engine_in_vllm", *words, "--json", str(out)], seconds, environ | of_rank)
            for out, of_rank in zip(outs, ranks(args.ranks), strict=True)
        ]
        ended = "; ".join(filter(None, (end.result() for end in ends)))
        reports: list[dict[str, Any]] = [json.loads(out.read_text()) for out in outs if out.is_file()]
    report = together(reports) if len(reports) == args.ranks else {}
    report |= {"model": model, "mode": mode, "side": side, "run_s": round(time.time() - begun, 1)}
    return report | ({"stopped": report.get("stopped") or ended} if ended else {})


def ranks(number: int) -> list[dict[str, str]]:
    """The environment of each data-parallel rank."""
    if number == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"VLLM_DP_SIZE": str(number), "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    return [shared | {"VLLM_DP_RANK": str(rank), "VLLM_DP_RANK_LOCAL": str(rank)} for rank in range(number)]


def together(reports: list[dict[str, Any]]) -> dict[str, Any]:
    """The first rank's report with the latest first token of all ranks and the sum of their tokens a second."""
    report = dict(reports[0])
    if all("tokens_per_s" in of_rank for of_rank in reports):
        report["first_token_s"] = max(of_rank["first_token_s"] for of_rank in reports)
        report["tokens_per_s"] = {
            case: round(sum(of_rank["tokens_per_s"].get(case, 0.0) for of_rank in reports), 1)
            for case in report["tokens_per_s"]
        }
    return report


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every model, one after another; the file is complete after each run."""
    runs: list[dict[str, Any]] = []
    head: dict[str, Any] = {"command": provenance.command()}

    def keep(run: dict[str, Any]) -> None:
        about = run.pop("about", {}) | {"command": head["command"]}
        if about.get("torch"):
            head.update(about)
        runs.append(run)
        args.json.write_text(
            json.dumps(head | {"layers": args.layers, "ranks": args.ranks, "runs": runs}, indent=1) + "\n"
        )
        said = (run[name] for name in ("model", "mode", "side", "caches"))
        print(*said, run.get("first_token_s"), run.get("tokens_per_s"), *run.get("told", ()), flush=True)
        if "stopped" in run:
            print("  stopped:", run["stopped"].strip().splitlines()[-1], flush=True)

    for model in args.models:
        of_model(args, model, keep)
    return runs


def of_model(args: argparse.Namespace, model: str, keep: Callable[[dict[str, Any]], None]) -> None:
    """Run both sides of a model in turns, in the first mode that both support, as often as there is time."""
    end = time.monotonic() + args.seconds
    for mode in args.modes:
        took = 0.0
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for caches in CACHES:
                    for side in SIDES:
                        left = end - time.monotonic()
                        if left < took * SLACK:
                            return
                        run = one_run(args, model, mode, side, Path(folder) / side, left)
                        keep(run | {"caches": caches})
                        took = max(took, run["run_s"])
                        if "stopped" in run:
                            break
                    if "stopped" in run:
                        break
            if "stopped" in run:
                break
        else:
            return


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked; default: the one that is installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that vLLM imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--models", default=",".join(MODELS), help=f"some of {', '.join(MODELS)}")
    parser.add_argument("--layers", type=int, help="of the model's")
    parser.add_argument("--cases", default=CASES, dest="said", help="sequences x prompt + new tokens")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}, in this order")
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel engines that share the experts, a GPU each")
    parser.add_argument("--rounds", type=int, default=1, help="of empty and warm caches, both sides")
    parser.add_argument("--seconds", type=float, default=540, help="for each model")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, to try this without a GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    args = parser.parse_args(argv)
    args.modes, args.models = args.modes.split(","), args.models.split(",")
    for model in args.models:
        if model not in MODELS:
            parser.error(f"--models: {model!r} is none of {', '.join(MODELS)}")
    for mode in args.modes:
        if mode not in MODES:
            parser.error(f"--modes: {mode!r} is none of {', '.join(MODES)}")
    try:
        args.cases = cases(args.said)
    except ValueError:
        parser.error(f"--cases: {args.said!r} is not of the form {CASES.partition(',')[0]}")
    if args.vllm is not None and not (args.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {args.vllm} has no folder vllm of an unpacked wheel")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure; return 1 if a side of a model has no times."""
    args = arguments(argv)
    if args.here:
        try:
            args.json.write_text(json.dumps(here(args)))
            leave(0)
        except Exception:
            traceback.print_exc()
            saved = json.loads(args.json.read_text()) if args.json.is_file() else {}
            args.json.write_text(json.dumps(saved | {"stopped": traceback.format_exc(limit=-8)}))
        leave(1)
    ready_files([] if args.vllm is None else [args.vllm])
    ran = {(run["model"], run["side"]) for run in measure(args) if run.get("tokens_per_s")}
    return 0 if ran == {(model, side) for model in args.models for side in SIDES} else 1
