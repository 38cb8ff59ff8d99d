"""List the benchmarks, or run one.

    python benchmarks/run.py                    # the list: each benchmark's question, and what it needs
    python benchmarks/run.py kernels --help     # a benchmark's description and options
    python benchmarks/run.py kernels --out kernels.json

``pretuned`` must be installed (the README's commands do). Benchmarks import each other as ``benchmarks.speed.kernels``.
The repository's root is not on sys.path, because ``import kernels`` would then find this repository's folder.
"""

from __future__ import annotations

import importlib
import sys
from importlib.machinery import ModuleSpec
from importlib.util import module_from_spec
from pathlib import Path
from typing import NamedTuple

HERE = Path(__file__).resolve().parent
GPU = "an NVIDIA GPU"
BUNDLES = "an NVIDIA GPU, bundles in PRETUNED_BUNDLES"


class Benchmark(NamedTuple):
    """A benchmark: a module in a folder of benchmarks; its ``main`` runs it."""

    folder: str
    name: str
    question: str
    needs: str


FOLDERS = {
    "speed": "How fast are GEMMs, layers and whole models?",
    "start": "How soon does a process have its first result, and is it right?",
    "peers": "How fast is pretuned against other libraries, in the same run?",
    "model": "How well do the cost model and the tuner choose?",
}
BENCHMARKS = (
    Benchmark("speed", "kernels", "shipped grouped GEMMs against torch, a dense GEMM, other libraries", GPU),
    Benchmark("speed", "guard", "is any of 60 cells slower than recorded, in two minutes; fails if so", GPU),
    Benchmark("speed", "layer", "a whole MoE layer against the same layer in torch", GPU),
    Benchmark("speed", "fp8_training", "a layer's step in fp8 against bf16, and its memory", f"{GPU} of 9.0"),
    Benchmark("speed", "expert_parallel", "one rank of ep=8, with a hint of its rows and without", GPU),
    Benchmark("speed", "by_torch", "tuned calls against torch's where K is slow; fails if one is slower", GPU),
    Benchmark("speed", "lora", "a layer with LoRA, forward and backward, against torch", GPU),
    Benchmark("speed", "lora_layer", "a layer with attention and PEFT's LoRA on its experts", f"{GPU}, peft"),
    Benchmark("speed", "whole", "transformers' models, with our experts and their own", f"{GPU}, transformers"),
    Benchmark("speed", "host", "host time of a call, and what it is made of", BUNDLES),
    Benchmark("speed", "host_python", "what Python takes of a call, with launches that do nothing", "pytest"),
    Benchmark("speed", "host_trees", "host times of two checkouts, by processes in lock step", BUNDLES),
    Benchmark("speed", "fused", "what gathering and scattering rows adds to a GEMM", GPU),
    Benchmark("speed", "passes", "row kernels, against the time of their bytes", f"{GPU}; Triton if --blocks"),
    Benchmark("speed", "sorting", "sort_routing against torch", GPU),
    Benchmark("speed", "ragged", "what uneven experts cost", GPU),
    Benchmark("speed", "dtypes", "fp16, tf32 and fp32 against bf16 and loops of torch", f"{BUNDLES}: their own"),
    Benchmark("speed", "coded", "quantised weights, portable kernel, against torch", BUNDLES),
    Benchmark(
        "speed",
        "zero_points",
        "prepared int4 with zero points, tested and against int4 without",
        f"{GPU} of 9.0, a bundle of candidates",
    ),
    Benchmark("speed", "quantised_layer", "what quantising the activation in its own pass saves a layer", GPU),
    Benchmark("speed", "refit", "new weights: quantise, prepare, restore and copy, torch and row kernels", GPU),
    Benchmark("speed", "mantissas", "why fp16 is slower than bf16", f"{BUNDLES}: those of dtypes"),
    Benchmark("speed", "freed", "what freeing much memory does to later launches", GPU),
    Benchmark("start", "structure", "how much code there is, and how much of it a first call needs", "pytest"),
    Benchmark("start", "decisions", "what the shipped bundles decide for each of their problems", "any machine"),
    Benchmark("model", "replan", "plans of the shipped bundles made anew, and what they take", "any machine"),
    Benchmark("start", "found", "time of a first call before it uses the GPU", "any machine"),
    Benchmark("start", "first_use", "does a bundle built elsewhere run here, right, at once", BUNDLES),
    Benchmark(
        "start",
        "cold_start",
        "first ten calls, caches empty and warm, against libraries that compile",
        f"{GPU}; others: vLLM's wheel unpacked, humming-kernels",
    ),
    Benchmark("start", "preload", "how long preload takes for a catalogue model", GPU),
    Benchmark("start", "training", "are all forms and gradients right, with the same bits every time", BUNDLES),
    Benchmark("peers", "beside_vllm", "against vLLM's kernel and triton_kernels", f"{GPU}, vLLM's wheel unpacked"),
    Benchmark(
        "peers",
        "beside_quantised",
        "quantised GEMMs against vLLM, DeepGEMM and Humming",
        f"{GPU}, vLLM's wheel unpacked, humming-kernels",
    ),
    Benchmark(
        "peers",
        "batch_invariant",
        "the batch-invariant mode against the free choice, and vLLM's tile for it",
        f"{GPU}; others: vLLM's wheel unpacked, Triton",
    ),
    Benchmark("peers", "padded_rows", "padded rows against packed ones and DeepGEMM's masked kernel", GPU),
    Benchmark("peers", "floors", "quantised GEMMs against their bytes alone and their FLOPs alone", f"{GPU}, Triton"),
    Benchmark("peers", "targets", "targets of quantised GEMMs, and what they reach", "any machine"),
    Benchmark("peers", "carry", "packs an engine for a GPU machine that fetches nothing", "any machine, wheels"),
    Benchmark(
        "peers", "layers_in_vllm", "vLLM's own MoE layers with and without the plug-in", f"{GPU}, vLLM's wheel unpacked"
    ),
    Benchmark(
        "peers",
        "engine_in_vllm",
        "a whole vLLM engine with the plug-in and without: its tokens a second",
        f"{GPU}, vLLM or its wheel unpacked",
    ),
    Benchmark(
        "peers",
        "load_in_vllm",
        "vLLM's load and reload of a model, with the plug-in and without",
        f"{GPU}, vLLM or its wheel unpacked",
    ),
    Benchmark(
        "peers",
        "layers_in_sglang",
        "SGLang's own MoE layers with and without the plug-in",
        f"{GPU}, SGLang's wheel unpacked",
    ),
    Benchmark("peers", "beside_quack", "pretuned against QuACK", f"{GPU}, quack-kernels"),
    Benchmark("model", "variants", "which variant wins where: a sweep of candidates", f"{GPU}, candidates"),
    Benchmark("model", "kinds", "what specialised kernels gain in a sweep", "any machine, sweeps"),
    Benchmark("model", "fit_cost", "fits the cost model's constants and judges them", "any machine, sweeps, numpy"),
    Benchmark(
        "model",
        "unknown",
        "how good is the choice for shapes that no list has",
        f"any machine, journals; {GPU} to write them",
    ),
    Benchmark("model", "tables", "writes the fits' tables into the pages", "any machine"),
    Benchmark("model", "shipped", "what the configs of a bundle lose to all candidates", "any machine, a journal"),
    Benchmark("model", "again", "whether a repeated measurement confirms a choice", "any machine, two journals"),
    Benchmark("model", "tuner", "the tuner against an exhaustive search", f"{GPU}, candidates; or recorded times"),
    Benchmark("model", "scaling", "how the tuner scales over GPUs and Dask workers", "NVIDIA GPUs, candidates, Dask"),
)


def package() -> None:
    """Make ``benchmarks.*`` importable: a package whose only location is this folder."""
    spec = ModuleSpec("benchmarks", None, is_package=True)
    spec.submodule_search_locations = [str(HERE)]
    sys.modules.setdefault("benchmarks", module_from_spec(spec))


def listing() -> str:
    """Return the list of benchmarks by folder: name, question and needs."""
    wide = max(len(benchmark.name) for benchmark in BENCHMARKS)
    lines = ["usage: python benchmarks/run.py NAME [ARGUMENT ...]; NAME --help tells the rest"]
    for folder, question in FOLDERS.items():
        lines += ["", f"{folder}/  {question}"]
        for benchmark in BENCHMARKS:
            if benchmark.folder == folder:
                lines.append(f"  {benchmark.name:{wide}}  {benchmark.question} [{benchmark.needs}]")
    return "\n".join(lines)


def main() -> None:
    name, *rest = sys.argv[1:] or ["--help"]
    if name in ("-h", "--help"):
        print(listing())
        return
    matches = [benchmark for benchmark in BENCHMARKS if benchmark.name == name]
    if not matches:
        sys.exit(
            f"{name!r} is no benchmark: wanted one of {', '.join(sorted(benchmark.name for benchmark in BENCHMARKS))}"
        )
    package()
    sys.path[:] = [entry for entry in sys.path if Path(entry or ".").resolve() != HERE]
    sys.argv = [f"benchmarks/run.py {name}", *rest]  # as argparse and the results' ``command`` show it
    sys.exit(importlib.import_module(f"benchmarks.{matches[0].folder}.{name}").main())


if __name__ == "__main__":
    main()
