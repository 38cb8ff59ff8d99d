"""A bundle's contents as plain data, for a table or for JSON."""

from __future__ import annotations

from collections.abc import Sequence

from ...artifacts.files.bundle_file import BundleFile
from ...artifacts.records.bundle import Choice, Variant
from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu, cuda_version
from ..plan.families import fused
from .assemble import config_text


def contents(bundle: BundleFile, *, choices: bool) -> dict[str, object]:
    """Everything in the index of a bundle; the choices only if asked for.

    Raises
    ------
    BundleCorrupt
        if a record is damaged. Cubins are not read: ``verify`` does that.
    """
    problems = bundle.problems()
    by_problem = {problem: bundle.find(problem) for problem in problems}
    producer = bundle.producer
    variants = bundle.variants()
    data: dict[str, object] = {
        "path": bundle.path,
        "size_bytes": bundle.size_bytes,
        "digest": bundle.digest.hex(),
        "target": str(bundle.target),
        "min_driver": f"CUDA {cuda_version(bundle.min_driver)}",
        "pretuned": producer.pretuned,
        "triton": producer.triton,
        "ptxas": producer.ptxas,
        "launch_abi": ", ".join(map(str, sorted({variant.abi for variant in variants}))),
        "options": " ".join(producer.compile_options),
        "compared_with": list(producer.held_against),
        "problems": len(problems),
        "choice_count": sum(map(len, by_problem.values())),
        "kernels": [
            {"name": kernel.name, "revision": kernel.revision, "source_sha256": kernel.source_sha256.hex()}
            for kernel in bundle.kernels
        ],
        "gpus": [
            {"name": gpu.name, "sm_count": gpu.sm_count, "memory_mib": gpu.memory_mib, "driver": gpu.driver}
            for gpu in bundle.gpus
        ],
        "models": [
            {
                "name": model.name,
                "tp": model.tp,
                "ep": model.ep,
                "top_k": model.top_k,
                "dtype": model.dtype.value,
                "problems": len(model.problems),
            }
            for model in bundle.models()
        ],
        "variants": [_variant(i, variant) for i, variant in enumerate(variants)],
    }
    if choices:
        gpus = bundle.gpus
        data["choices"] = [_choice(problem, choice, gpus) for problem, row in by_problem.items() for choice in row]
    return data


def _variant(i: int, variant: Variant) -> dict[str, object]:
    return {
        "variant": i,
        "kernel": variant.kernel,
        "abi": variant.abi,
        "op": variant.op.value,
        "dtype": variant.dtype.value,
        "layout": variant.layout.value,
        "fused": fused(variant.fusion),
        "config": config_text(variant),
        "alignment": variant.alignment,
        "max_experts": variant.max_experts,
        "threads": variant.threads,
        "shared_bytes": variant.shared_bytes,
        "registers": variant.registers,
        "spill_bytes": variant.spill_bytes,
        "cubin_bytes": variant.cubin_bytes,
    }


def _choice(problem: Problem, choice: Choice, gpus: Sequence[Gpu]) -> dict[str, object]:
    gpu = choice.measured_on(gpus)
    return {
        "problem": str(problem),
        "M_near": choice.bucket,
        "variant": choice.variant,
        "source": choice.source.value,
        "time_us": round(choice.time_ns / 1000, 3),
        "runner_up": choice.runner_up,
        "runner_up_us": None if choice.runner_up_ns is None else round(choice.runner_up_ns / 1000, 3),
        "torch_us": None if choice.torch_ns is None else round(choice.torch_ns / 1000, 3),
        "gpu": None if gpu is None else gpu.name,
        "plan": list(map(str, choice.plan)),
    }
