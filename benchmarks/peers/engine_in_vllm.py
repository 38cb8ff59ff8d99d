"""Runs a whole vLLM engine with dummy weights, with pretuned's plug-in and without, in processes that take turns.

    pip download --no-deps vllm==0.20.2 && unzip -q vllm-0.20.2-*.whl -d vllm-0.20.2
    python benchmarks/run.py engine_in_vllm --vllm vllm-0.20.2 --json engine-in-vllm.json
    python benchmarks/run.py engine_in_vllm --layers 12 --modes graphs --json some.json       # an installed vLLM

The model is Qwen3-30B-A3B by its config alone (``--layers``: with fewer layers), greedy, its weights vLLM's dummy ones.
A run has the seconds from the start of the process to the first token, and for each case of sequences, prompt and new
tokens the new tokens a second (of prompts that are one token long to answer: the prompt's tokens), the better of two.
``--modes`` are tried in turn until both sides ran: ``compiled`` is what vLLM does unasked, ``graphs`` is CUDA graphs
without torch.compile, ``eager`` neither. Attention is Triton's. What stops a run is told in it; no run begins that
would not end in ``--seconds``. The file is whole after each.
"""

from __future__ import annotations

import argparse
import importlib
import json
import logging
import tempfile
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .engines import child, leave
from .layers_in_vllm import find_vllm

MODEL: dict[str, Any] = {  # Qwen/Qwen3-30B-A3B's config.json
    "architectures": ["Qwen3MoeForCausalLM"], "model_type": "qwen3_moe", "hidden_size": 2048, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
    "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "vocab_size": 151936, "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6, "rope_theta": 1e6, "hidden_act": "silu", "tie_word_embeddings": False,
    "attention_bias": False, "torch_dtype": "bfloat16", "bos_token_id": 151643, "eos_token_id": 151645,
}  # fmt: skip
TINY = {  # for a machine without a GPU
    "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32, "intermediate_size": 128,
    "moe_intermediate_size": 32, "num_experts": 8, "num_experts_per_tok": 2, "vocab_size": 256,
    "max_position_embeddings": 512, "num_hidden_layers": 2, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
MODES: dict[str, dict[str, Any]] = {
    "compiled": {},
    "graphs": {"compilation_config": {"mode": 0, "cudagraph_mode": "FULL"}},
    "eager": {"enforce_eager": True},
}
SIDES = {"without": "0", "with": "1"}  # PRETUNED_VLLM
CASES = "1x128+128,16x128+128,128x128+128,16x2048+1"
ENVIRON = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0", "VLLM_NO_USAGE_STATS": "1", "HF_HUB_OFFLINE": "1",
    "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo", "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
}  # fmt: skip
SLACK = 1.25  # a run may take so many times what the last of its kind took


def told() -> list[str]:
    """The lines that pretuned tells from now on. (vLLM takes all handlers away when an engine starts, no filter.)"""
    lines: list[str] = []

    def kept(record: logging.LogRecord) -> bool:
        lines.append(record.getMessage())
        return True

    logging.getLogger("vllm.pretuned").addFilter(kept)
    return lines


def cases(said: str) -> list[tuple[int, int, int]]:
    """Sequences, prompt and new tokens of each ``16x128+128``."""
    found = []
    for one in said.split(","):
        count, _, rest = one.partition("x")
        prompt, _, new = rest.partition("+")
        found.append((int(count), int(prompt), int(new)))
    return found


def speed(generate: Callable[[int, int, int], None], case: tuple[int, int, int]) -> float:
    """Tokens a second: new ones, or the prompts' where there is one new token a sequence."""
    count, prompt, new = case
    taken = []
    for _ in range(2):
        begun = time.perf_counter()
        generate(*case)
        taken.append(time.perf_counter() - begun)
    return round(count * (new if new > 1 else prompt) / min(taken), 1)


def settings(given: argparse.Namespace, folder: Path) -> dict[str, Any]:
    """vLLM's arguments."""
    import torch

    config = MODEL | (TINY if given.tiny else {})
    config |= {} if given.layers is None else {"num_hidden_layers": given.layers}
    (folder / "config.json").write_text(json.dumps(config))
    longest = max(prompt + new for _, prompt, new in given.cases)
    found = {
        "model": str(folder), "load_format": "dummy", "skip_tokenizer_init": True, "dtype": "bfloat16", "seed": 0,
        "max_model_len": longest + 16, "max_num_seqs": max(16, *(count for count, *_ in given.cases)),
        "enable_prefix_caching": False, **MODES[given.modes[0]],
    }  # fmt: skip
    if torch.cuda.is_available():
        found |= {"attention_backend": "TRITON_ATTN", "gpu_memory_utilization": 0.9}
    return found


def here(given: argparse.Namespace) -> dict[str, Any]:
    """One engine in this process: what it told, and its times."""
    if given.vllm is not None:
        find_vllm(given.vllm, given.packages)
    import torch
    import vllm

    from pretuned.integrations.vllm import register

    lines = told()
    register()  # where pretuned is not installed as a package; else vLLM calls it as well
    name = MODEL["architectures"][0]  # handed over; else vLLM imports it in a process of its own, to look at it
    vllm.ModelRegistry.register_model(
        name, getattr(importlib.import_module("vllm.model_executor.models.qwen3_moe"), name)
    )
    found: dict[str, Any] = {"vllm": vllm.__version__, "torch": torch.__version__}
    found["gpu"] = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    with tempfile.TemporaryDirectory() as folder:
        llm = vllm.LLM(**settings(given, Path(folder)))

        def generate(count: int, prompt: int, new: int) -> None:
            prompts = [{"prompt_token_ids": [(7 * i + j) % 250 + 3 for j in range(prompt)]} for i in range(count)]
            how = vllm.SamplingParams(max_tokens=new, temperature=0, detokenize=False, ignore_eos=True)
            llm.generate(prompts, how, use_tqdm=False)

        generate(1, 16, 1)
        found["first_token_s"] = round(time.time() - given.begun, 2)
        found["tokens_per_s"] = {}
        for said, case in zip(given.said.split(","), given.cases, strict=True):
            generate(case[0], case[1], min(case[2], 2))  # what a first call of this size does
            found["tokens_per_s"][said] = speed(generate, case)
            given.json.write_text(json.dumps(found | {"told": lines}))
    return found | {"told": lines}


def one_run(given: argparse.Namespace, mode: str, side: str, seconds: float) -> dict[str, Any]:
    """An engine in a process of its own."""
    begun = time.time()
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        options = {"--vllm": given.vllm, "--packages": given.packages, "--layers": given.layers, "--json": out,
                   "--cases": given.said, "--modes": mode, "--begun": begun}  # fmt: skip
        words = [str(word) for name, value in options.items() if value is not None for word in (name, value)]
        words += ["--here", *(["--tiny"] if given.tiny else [])]
        ended = child(["engine_in_vllm", *words], seconds, {**ENVIRON, "PRETUNED_VLLM": SIDES[side]})
        found: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    found |= {"mode": mode, "side": side, "run_s": round(time.time() - begun, 1)}
    return found | ({"stopped": found.get("stopped") or ended} if ended else {})


def measure(given: argparse.Namespace) -> list[dict[str, Any]]:
    """Both sides in turns, in the first mode that both run in, as often as ``--rounds`` says and the time is there."""
    end, runs = time.monotonic() + given.seconds, []
    for mode in given.modes:
        took = 0.0
        for _ in range(given.rounds):
            for side in SIDES:
                left = end - time.monotonic()
                if left < took * SLACK:
                    return runs
                run = one_run(given, mode, side, left)
                runs.append(run)
                took = max(took, run["run_s"])
                given.json.write_text(json.dumps({"model": MODEL["architectures"][0], "runs": runs}, indent=1))
                print(mode, side, run.get("first_token_s"), run.get("tokens_per_s"), *run.get("told", ()), flush=True)
                if "stopped" in run:
                    print("  stopped:", run["stopped"].strip().splitlines()[-1], flush=True)
                    break
            if "stopped" in runs[-1]:
                break
        else:
            return runs
    return runs


def arguments(args: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked; default: the one that is installed")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that vLLM imports")
    parser.add_argument("--json", type=Path, required=True, help="the file to write")
    parser.add_argument("--layers", type=int, help="of the model's 48")
    parser.add_argument("--cases", default=CASES, dest="said", help="sequences x prompt + new tokens")
    parser.add_argument("--modes", default=",".join(MODES), help=f"some of {', '.join(MODES)}, in this order")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--seconds", type=float, default=540, help="for all")
    parser.add_argument("--tiny", action="store_true", help="a model of two small layers, to try this without a GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument("--begun", type=float, help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    given.modes = given.modes.split(",")
    for mode in given.modes:
        if mode not in MODES:
            parser.error(f"--modes: {mode!r} is none of {', '.join(MODES)}")
    try:
        given.cases = cases(given.said)
    except ValueError:
        parser.error(f"--cases: {given.said!r} is not of the form {CASES.partition(',')[0]}")
    if given.vllm is not None and not (given.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {given.vllm} has no folder vllm of an unpacked wheel")
    return given


def main(args: list[str] | None = None) -> int:
    """Measure; 1 where a side has no times."""
    given = arguments(args)
    if given.here:
        try:
            given.json.write_text(json.dumps(here(given)))
            leave(0)
        except Exception:
            traceback.print_exc()
            known = json.loads(given.json.read_text()) if given.json.is_file() else {}
            given.json.write_text(json.dumps(known | {"stopped": traceback.format_exc(limit=-8)}))
        leave(1)
    runs = measure(given)
    return 0 if {run["side"] for run in runs if run.get("tokens_per_s")} == set(SIDES) else 1
