"""Times experts on padded rows, as an all-to-all hands them over, against the same rows packed and DeepGEMM's kernel.

    python benchmarks/run.py padded_rows --json padded-rows-h200.json --vllm vllm-0.20.2

One rank of ep=8 has x [E, 1024, H], of which expert e has about ``rows`` rows, the others being padding. Timed are

    fp8 product  pretuned on x in bf16 (padded), on the same rows without padding (packed), and with --vllm (a wheel of
                 vLLM 0.20.2, unpacked) DeepGEMM's masked kernel on x that is quantised beforehand, outside the time;
                 pretuned on that x, too (codes), with the scales of an expert column by column
    bf16 product padded and packed
    layer        experts_mlp of fp8 weights, and two products with an activation between of packed rows

Results are compared: padded rows have the packed call's bits where both run the same config. CUDA graphs take turns, L2
flushed. It takes at most 100 s on an H100; cells that it has no time for are left out. It exits with 1 if a result is
wrong, or padding was written to.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch

from benchmarks import method, provenance
from benchmarks.peers import vllm_kernels
from benchmarks.speed.kernels import in_turns
from pretuned.aot.measure.inputs import quantised_weights
from pretuned.artifacts.records import DType
from pretuned.runtime import ExpertWeights, QuantizedRows, activate, experts_mlp, grouped_gemm

RANKS, MOST = 8, 1024  # most rows of an expert
ROWS = (1, 8, 16, 64, 128, 1024)
CANARY = 7.25
MAX_DIFFERENCE = 5e-2  # relative, between results of x in e4m3 and of x in bf16
BUDGET_MS = 150.0  # of a cell


class Kind(NamedTuple):
    """A layer's name and sizes; E counts the experts of all ranks."""

    name: str
    E: int
    H: int
    I: int  # noqa: E741


KINDS = (Kind("DeepSeek-V3", 256, 7168, 2048), Kind("Qwen3-235B", 128, 4096, 1536))
Call = Callable[[], torch.Tensor]


class Rows(NamedTuple):
    """Padded rows [E, MOST, columns] with NaN between them, the counts, and the same rows packed."""

    padded: torch.Tensor
    counts: torch.Tensor
    packed: torch.Tensor
    there: torch.Tensor

    @classmethod
    def of(cls, E: int, rows: int, columns: int, device: str, most: int = MOST) -> Rows:
        """Draw padded rows with about ``rows`` rows an expert."""
        g = torch.Generator().manual_seed(rows)
        drawn = torch.randint(max(1, rows // 2), rows + rows // 2 + 1, (E,), generator=g)
        counts = drawn.clamp(max=most).to(device, torch.int32)
        there = torch.arange(most, device=device) < counts[:, None]
        packed = method.activations(int(counts.sum()), columns, torch.bfloat16, device)
        padded = torch.full((E, most, columns), float("nan"), dtype=torch.bfloat16, device=device)
        padded[there] = packed
        return cls(padded, counts, packed, there)


def products(rows: Rows, w: Any) -> dict[str, Call]:
    """The padded and the packed call by name, each with a y of its own."""
    N, how = w.shape[1], {"expected_rows": rows.packed.shape[0]}
    out = rows.padded.new_full((*rows.padded.shape[:2], N), CANARY)
    return {
        "padded": functools.partial(grouped_gemm, rows.padded, w, rows.counts, out=out, **how),
        "packed": functools.partial(grouped_gemm, rows.packed, w, rows.counts),
    }


def layers(rows: Rows, up: Any, down: Any) -> dict[str, Call]:
    """Return the calls of a layer by name, like ``products`` for a product."""
    out = torch.full_like(rows.padded, CANARY)
    how = {"expected_rows": rows.packed.shape[0], "out": out}

    def packed() -> torch.Tensor:
        return grouped_gemm(activate(grouped_gemm(rows.packed, up, rows.counts)), down, rows.counts)

    return {"padded": functools.partial(experts_mlp, rows.padded, up, down, rows.counts, **how), "packed": packed}


def quantised(rows: Rows) -> QuantizedRows:
    """Codes of x with a scale for each 128 columns, in the form that an all-to-all delivers."""
    E, most, K = rows.padded.shape
    x = torch.where(rows.there[..., None], rows.padded, 0).float().view(E, most, K // 128, 128)
    scales = (x.abs().amax(-1) / 448).clamp(min=1e-10)
    codes = (x / scales[..., None]).to(torch.float8_e4m3fn).view(E, most, K)
    return QuantizedRows(codes, scales.mT.contiguous().mT)


def coded(rows: Rows, w: ExpertWeights) -> Call:
    """Return pretuned's call on x that was quantised beforehand."""
    out = rows.padded.new_full((*rows.padded.shape[:2], w.shape[1]), CANARY)
    how = {"expected_rows": rows.packed.shape[0], "out": out}
    return functools.partial(grouped_gemm, quantised(rows), w, rows.counts, **how)


def deepgemm(rows: Rows, w: ExpertWeights) -> Call:
    """Return DeepGEMM's masked kernel on x that was quantised beforehand; w is in the checkpoint layout."""
    import deep_gemm

    codes, scales = quantised(rows)
    aligned = deep_gemm.get_mn_major_tma_aligned_tensor(scales.contiguous())
    y = rows.padded.new_empty((*rows.padded.shape[:2], w.shape[1]))
    expected = max(1, rows.packed.shape[0] // len(rows.counts))

    def call() -> torch.Tensor:
        deep_gemm.fp8_m_grouped_gemm_nt_masked(
            (codes, aligned), (w.codes, w.scale), y, rows.counts, expected, disable_ue8m0_cast=True
        )
        return y

    return call


def compared(rows: Rows, calls: dict[str, Call]) -> dict[str, Any]:
    """The difference between padded and packed rows, whether their bits are equal, and whether padding was written."""
    want, padded = calls["packed"](), calls["padded"]()
    got = padded[rows.there]
    row: dict[str, Any] = {
        "difference": float((got.float() - want.float()).norm() / want.float().norm()),
        "same_bits": bool(torch.equal(got, want)),
        "padding_written": bool((padded[~rows.there] != CANARY).any()),
    }
    if "codes" in calls:
        padded = calls["codes"]()
        row["codes_difference"] = float((padded[rows.there].float() - want.float()).norm() / want.float().norm())
        row["padding_written"] |= bool((padded[~rows.there] != CANARY).any())
    if "deepgemm" in calls:
        theirs = calls["deepgemm"]()[rows.there].float()
        row["deepgemm_difference"] = float((theirs - want.float()).norm() / want.float().norm())
    return row


def fp8_weights(E: int, N: int, K: int, device: str) -> tuple[ExpertWeights, ExpertWeights]:
    """Weights with fp8 128x128 blocks, whose products quantise x: in the checkpoint layout, and prepared."""
    w = quantised_weights(E, N, K, DType.FP8_BLOCK, device, prepared=False)
    return w, ExpertWeights.fp8_block(w.codes.clone(), w.scale.clone()).prepare()


def cells_of(kind: Kind, device: str, theirs: bool) -> Any:
    """Yield (name, function of rows that builds the calls); weights are freed before the next is built."""
    E = kind.E // RANKS
    sizes = {"gate_up": (2 * kind.I, kind.H), "down": (kind.H, kind.I)}
    ups = {name: fp8_weights(E, *size, device) for name, size in sizes.items()}
    for name, (_, K) in sizes.items():
        raw, prepared = ups[name]

        def of_fp8(rows: Rows, raw: ExpertWeights = raw, prepared: ExpertWeights = prepared) -> dict[str, Call]:
            calls = products(rows, prepared) | {"codes": coded(rows, prepared)}
            return calls | ({"deepgemm": deepgemm(rows, raw)} if theirs else {})

        yield f"fp8 {name}", K, of_fp8
    yield "fp8 layer", kind.H, lambda rows: layers(rows, ups["gate_up"][1], ups["down"][1])
    ups.clear()
    w = method.weights(E, *sizes["gate_up"], torch.bfloat16, device)
    yield "bf16 gate_up", kind.H, lambda rows: products(rows, w)


def measure(kinds: Sequence[Kind], numbers: Sequence[int], seconds: float, *, theirs: bool) -> list[dict[str, Any]]:
    """Measure a cell for each product and number of rows; no cell begins after so many seconds."""
    clock, begun, cells = method.Clock(), time.monotonic(), []
    for kind in kinds:
        for what, K, make in cells_of(kind, "cuda", theirs):
            for number in numbers:
                if time.monotonic() - begun > seconds:
                    return cells
                rows = Rows.of(kind.E // RANKS, number, K, "cuda")
                cell: dict[str, Any] = {"model": kind.name, "what": what, "rows": number}
                cell["padding"] = round(1 - rows.packed.shape[0] / rows.there.numel(), 3)
                with torch.no_grad():
                    calls = make(rows)
                    try:
                        cell |= compared(rows, calls)
                    except Exception as error:  # another library's error: it is recorded, and ours is timed
                        cell["failed"] = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
                        calls.pop("deepgemm", None)
                        cell |= compared(rows, calls)
                    times = in_turns(clock, *calls.values(), budget_ms=BUDGET_MS)
                cell |= {f"{name}_us": us for name, us in zip(calls, times, strict=True)}
                cells.append(cell)
                print(said(cell), flush=True)
                del calls, rows
        torch.cuda.empty_cache()
    return cells


def said(cell: dict[str, Any]) -> str:
    """A cell in one line."""
    text = f"{cell['model']:12} {cell['what']:13} {cell['rows']:>5} rows: padded {cell['padded_us']:8.1f} us"
    text += f", x {cell['padded_us'] / cell['packed_us']:.3f} of packed"
    if "deepgemm_us" in cell:
        text += f", DeepGEMM {cell['deepgemm_us']:8.1f} us, {cell['deepgemm_us'] / cell['padded_us']:.2f} x"
    return text + ("" if cell["same_bits"] else ", other bits") + (f", {cell['failed']}" if "failed" in cell else "")


def table(cells: Sequence[dict[str, Any]]) -> list[str]:
    """A Markdown table by rows an expert: padded time over packed, and DeepGEMM's over padded."""
    numbers = sorted({cell["rows"] for cell in cells})
    lines = ["| layer | ratio | " + " | ".join(map(str, numbers)) + " |", "|---|---|" + "---|" * len(numbers)]
    for name, what in dict.fromkeys((cell["model"], cell["what"]) for cell in cells):
        some = {cell["rows"]: cell for cell in cells if (cell["model"], cell["what"]) == (name, what)}
        ratios = [
            ("padded / packed", "padded_us", "packed_us"),
            ("DeepGEMM / padded", "deepgemm_us", "padded_us"),
            ("DeepGEMM / codes", "deepgemm_us", "codes_us"),
        ]
        for label, above, below in ratios:
            timed = {n: cell for n, cell in some.items() if above in cell and below in cell}
            results = [timed[n][above] / timed[n][below] if n in timed else None for n in numbers]
            if any(results):
                line = " | ".join("" if ratio is None else f"{ratio:.2f}" for ratio in results)
                lines.append(f"| {name} {what} | {label} | {line} |")
    return lines


def wrong(cell: dict[str, Any]) -> bool:
    """Return True if a result is wrong, or padding was written to."""
    differences = [cell[name] for name in ("difference", "codes_difference") if name in cell]
    return bool(cell["padding_written"] or not all(difference < MAX_DIFFERENCE for difference in differences))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--vllm", type=Path, help="vLLM's wheel, unpacked: its DeepGEMM is timed, too")
    parser.add_argument("--models", nargs="*", default=[kind.name for kind in KINDS], help="of the table's layers")
    parser.add_argument("--rows", type=int, nargs="*", default=ROWS, help=f"of an expert, 1 to {MOST}")
    parser.add_argument("--seconds", type=float, default=85.0, help="no further cell is begun after so long")
    args = parser.parse_args()
    unknown = [model for model in args.models if all(model != kind.name for kind in KINDS)]
    if unknown or any(not 1 <= row <= MOST for row in args.rows):
        parser.error(f"wanted models of {[kind.name for kind in KINDS]} and rows of 1 to {MOST}")
    if args.vllm is not None:
        sys.path.insert(0, str(vllm_kernels.package(args.vllm) / "third_party"))
    begun = time.monotonic()
    kinds = [kind for kind in KINDS if kind.name in args.models]
    cells = measure(kinds, args.rows, args.seconds, theirs=args.vllm is not None)
    lines = table(cells)
    print("\n".join(lines))
    report = {
        **provenance.about(),
        "gpu": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "seconds": round(time.monotonic() - begun, 1),
        "table": lines,
        "cells": cells,
    }
    args.json.write_text(json.dumps(report, indent=1) + "\n")
    bad = [cell for cell in cells if wrong(cell)]
    sys.exit(f"{len(bad)} results are wrong, or padding was written to" if bad else 0)
