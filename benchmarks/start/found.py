"""Time the part of a process's first call before it uses the GPU: find bundles, open them, choose a variant.

    python benchmarks/run.py found --out benchmarks/results/found.json        (any machine; a made-up H200)

Each run is a process of its own. Importing torch and pretuned is not timed, nor a garbage collection, which by chance
takes 2 ms. It prints medians of milliseconds until the chosen variant's code is in memory and checked. PRETUNED_BUNDLES
names a bundle (``file``), the directory of shipped bundles (``directory``), nothing, so that installed packages are
searched (``installed``), or a bundle whose choice is modelled, so that these are searched and read (``modelled``).
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import platform
import statistics
import subprocess
import sys
import tempfile
import time
from importlib.resources import files
from pathlib import Path

from rich.console import Console
from rich.progress import track

from benchmarks import provenance

RUN = Path(__file__).parents[1] / "run.py"


def first() -> float:
    """Return the milliseconds of this process."""
    import torch  # noqa: F401 - a process of a user has it

    import pretuned.runtime  # noqa: F401
    from pretuned.artifacts.records import DType, Gpu, LocalGpu, Op, Problem
    from pretuned.runtime.dispatch.decide import Decision, decide
    from pretuned.runtime.dispatch.snapshot import snapshot

    gate_up = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)  # of Qwen3-30B-A3B
    h200 = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 13000))
    gc.collect()
    begun = time.perf_counter()
    decision = decide(snapshot(), gate_up, 8, h200)
    if not isinstance(decision, Decision):
        raise SystemExit(decision.reason)
    decision.chosen.usable.bundle.cubin(decision.chosen.index)
    return 1000 * (time.perf_counter() - begun)


def modelled(bundle: Path, out: Path) -> Path:
    """Write ``bundle`` with only the H200's choices, marked as modelled."""
    from pretuned.artifacts import codec
    from pretuned.artifacts.bundle_file import open_bundle
    from pretuned.artifacts.records import Source

    with open_bundle(bundle) as opened:
        whole = opened.load()
    choices = {
        problem: tuple(
            choice._replace(source=Source.MODELLED, gpu=None)
            for choice in row
            if choice.gpu is not None and whole.gpus[choice.gpu].name == "NVIDIA H200"
        )
        for problem, row in whole.choices.items()
    }
    choices = {problem: row for problem, row in choices.items() if row}  # some problems have choices of an H100 alone
    out.write_bytes(codec.encode(whole._replace(choices=choices, gpus=(), models=())))
    return out


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--runs", type=int, default=15)
    parser.add_argument("--step", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.step:
        print(first())
        return
    bundles = Path(str(files("pretuned.artifacts") / "bundles"))
    folder = tempfile.TemporaryDirectory()
    ways = {
        "file": str(bundles / "catalogue-sm90.msgpack"),
        "directory": str(bundles),
        "installed": "",
        "modelled": str(modelled(bundles / "catalogue-sm90.msgpack", Path(folder.name) / "modelled-sm90.msgpack")),
    }
    report: dict[str, object] = {
        **provenance.about(),
        "machine": platform.machine(),
        "cores": os.cpu_count(),
        "files": len(list(bundles.glob("*.msgpack"))),
    }
    ms: dict[str, list[float]] = {way: [] for way in ways}
    for _ in track(range(args.runs), "processes", console=Console(stderr=True)):
        for way, named in ways.items():
            environment = os.environ | {"PRETUNED_BUNDLES": named}
            ms[way].append(float(subprocess.check_output([sys.executable, RUN, "found", "--step"], env=environment)))
    for way, runs in ms.items():
        report[way] = {"ms": round(statistics.median(runs), 2), "least": round(min(runs), 2)}
        print(f"{way:10} {statistics.median(runs):6.2f} ms, at least {min(runs):.2f}")
    if args.out:
        args.out.parent.mkdir(parents=True, exist_ok=True)
        args.out.write_text(json.dumps(report, indent=1) + "\n")
