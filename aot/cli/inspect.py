"""aot inspect."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from typing import Any

import click

from ...artifacts.bundle_file import BundleFile, open_bundle
from ...artifacts.records import Choice, Gpu, Problem, Variant, cuda_version
from ..bundle.assemble import config_text
from ..plan.families import fused
from .options import as_json, bundle_files, print_json
from .table import echo, facts, size, table

_MODELS = 6  # names in the summary
_DIGITS = 12  # of a digest that are shown


@click.command()
@click.argument("bundles", nargs=-1, required=True, type=click.Path(), metavar="BUNDLE...")
@click.option("--models", is_flag=True, help="List the models that it was built for.")
@click.option("--variants", is_flag=True, help="List its kernels and variants.")
@click.option("--choices", is_flag=True, help="List the choice of every problem and bucket.")
@as_json
def inspect(bundles: tuple[str, ...], models: bool, variants: bool, choices: bool, as_json: bool) -> None:
    """Show what bundles hold: GPUs and models; on request every variant and choice.

    BUNDLE is a file, or a directory of bundles.

    \b
    Examples:
      aot inspect bundles
      aot inspect bundles/pretuned-sm90.msgpack
      aot inspect bundles/pretuned-sm90.msgpack --models --variants
      aot inspect bundles/pretuned-sm90.msgpack --choices
      aot inspect bundles/pretuned-sm90.msgpack --json
    """
    all_contents = []
    for path in bundle_files(bundles):
        with open_bundle(path) as opened:
            all_contents.append(contents(opened, choices=choices))
    if as_json:
        several = len(bundles) > 1 or os.path.isdir(bundles[0])  # noqa: PTH112 - Path.is_dir raises for some paths
        print_json(all_contents if several else all_contents[0])
        return
    wanted = {"models": models, "kernels": variants, "variants": variants, "choices": choices}
    for place, data in enumerate(all_contents):
        echo(("\n" if place else "") + facts(_summary(data)))
        for title in (name for name, asked in wanted.items() if asked):
            rows = data.get(title)
            if isinstance(rows, list) and rows:
                echo(f"\n{title}")
                echo(table(list(rows[0]), [[_shown(cell) for cell in row.values()] for row in rows]))


def _summary(data: dict[str, Any]) -> list[tuple[str, object]]:
    gpus = ", ".join(dict.fromkeys(gpu["name"] for gpu in data["gpus"]))
    models = list(dict.fromkeys(model["name"] for model in data["models"]))
    some = ", ".join(models[:_MODELS]) + (f" and {len(models) - _MODELS} more" if len(models) > _MODELS else "")
    summary = (
        ("bundle", f"{data['path']}, {size(data['size_bytes'])}"),
        ("for", f"{data['target']}, driver {data['min_driver']} or later"),
        (
            "choices",
            f"{data['choice_count']} of {data['problems']} problems, "
            + (f"measured on {gpus}" if gpus else "modelled: a cost model ranked, nothing was measured"),
        ),
        ("variants", f"{len(data['variants'])} of {len(data['kernels'])} kernels"),
        ("models", f"{len(models)}: {some}" if models else "none named"),
        (
            "built by",
            f"pretuned {data['pretuned']}, Triton {data['triton']}, ptxas {data['ptxas']}, "
            f"launch ABI {data['launch_abi']}",
        ),
        ("options", data["options"]),
        ("compared", f"with {len(data['compared_with'])} other bundles" if data["compared_with"] else ""),
        ("digest", f"{_shown(data['digest'])} (--json has it whole)"),
    )
    return [(name, value) for name, value in summary if value]


def _shown(cell: object) -> object:
    """Format a table's cell: the beginning of a digest, the items of a list."""
    if isinstance(cell, str) and re.fullmatch("[0-9a-f]{64}", cell):
        return cell[:_DIGITS]
    if isinstance(cell, list):
        return "; ".join(cell) or "-"
    return "-" if cell is None else cell


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
