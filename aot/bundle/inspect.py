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
    """Everything that the index of a bundle says; the choices only where they are asked for.

    Raises
    ------
    BundleCorrupt
        if a record is damaged. Cubins are not read: ``verify`` does that.
    """
    problems = bundle.problems()
    by_problem = {problem: bundle.find(problem) for problem in problems}
    producer = bundle.producer
    variants = bundle.variants()
    found: dict[str, object] = {
        "path": bundle.path,
        "size_bytes": bundle.size_bytes,
        "digest": bundle.digest.hex(),
        "target": str(bundle.target),
        "min_driver": f"CUDA {cuda_version(bundle.min_driver)}",
        "pretuned": producer.pretuned,
        "triton": producer.triton,
        "ptxas": producer.ptxas,
        "launch_abi": ", ".join(map(str, sorted({one.abi for one in variants}))),
        "options": " ".join(producer.compile_options),
        "compared_with": list(producer.held_against),
        "problems": len(problems),
        "choice_count": sum(map(len, by_problem.values())),
        "kernels": [
            {"name": one.name, "revision": one.revision, "source_sha256": one.source_sha256.hex()}
            for one in bundle.kernels
        ],
        "gpus": [
            {"name": one.name, "sm_count": one.sm_count, "memory_mib": one.memory_mib, "driver": one.driver}
            for one in bundle.gpus
        ],
        "models": [
            {
                "name": one.name,
                "tp": one.tp,
                "ep": one.ep,
                "top_k": one.top_k,
                "dtype": one.dtype.value,
                "problems": len(one.problems),
            }
            for one in bundle.models()
        ],
        "variants": [_variant(i, one) for i, one in enumerate(variants)],
    }
    if choices:
        found["choices"] = [_choice(problem, one, bundle.gpus) for problem, row in by_problem.items() for one in row]
    return found


def _variant(i: int, one: Variant) -> dict[str, object]:
    return {
        "variant": i,
        "kernel": one.kernel,
        "abi": one.abi,
        "op": one.op.value,
        "dtype": one.dtype.value,
        "layout": one.layout.value,
        "fused": fused(one.fusion),
        "config": config_text(one),
        "alignment": one.alignment,
        "max_experts": one.max_experts,
        "threads": one.threads,
        "shared_bytes": one.shared_bytes,
        "registers": one.registers,
        "spill_bytes": one.spill_bytes,
        "cubin_bytes": one.cubin_bytes,
    }


def _choice(problem: Problem, one: Choice, gpus: Sequence[Gpu]) -> dict[str, object]:
    gpu = one.measured_on(gpus)
    return {
        "problem": str(problem),
        "M_near": one.bucket,
        "variant": one.variant,
        "source": one.source.value,
        "time_us": round(one.time_ns / 1000, 3),
        "runner_up": one.runner_up,
        "runner_up_us": None if one.runner_up_ns is None else round(one.runner_up_ns / 1000, 3),
        "torch_us": None if one.torch_ns is None else round(one.torch_ns / 1000, 3),
        "gpu": None if gpu is None else gpu.name,
        "plan": list(map(str, one.plan)),
    }
