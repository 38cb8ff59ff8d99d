"""Seconds until the first ten calls of a process have ended, with all caches empty and again with them warm.

    python benchmarks/run.py cold_start --vllm vllm-0.20.2 --json cold-start.json       (the GPU machine)
    python benchmarks/run.py cold_start --table cold-start.json --write                 (any machine)

The ten calls are both GEMMs of a model's MoE layer, gate_up and down, for 1, 16, 128, 1,024 and 8,192 tokens:
Qwen3-30B-A3B in bf16 and fp8 128x128 blocks, gpt-oss-20b in mxfp4. Each library (cold_libraries.py) runs in a process
of its own. torch is imported, a CUDA context is up, and weights and inputs are drawn before the clock starts. It counts
importing the library, compiling, and the calls; putting weights into the library's order is timed by itself. vLLM's own
import does not count: its kernels are called without it.

A process has folders of its own for the caches of Triton, torch, DeepGEMM, FlashInfer, vLLM, Humming, pretuned and the
CUDA driver, and for its home. ``empty``: these folders are new. ``warm``: a second process has the folders that the
first one left. Beforehand, Python files are compiled to .pyc, as installing does, and files of all libraries are read
once, so that no library pays for the disk. The libraries take turns, ``--rounds`` times; a library that would not end
in ``--seconds`` is left out of that round. The file is whole after each process. A library that cannot run has the
reason in the file and the table. Each call's result is compared with fp32, after the clock stopped.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import statistics
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from functools import cached_property
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from ..peers.engines import caches_in, child, ready_files
from ..peers.products import Cell, Product
from .cold_libraries import LIBRARIES, Library

MODELS = {"qwen3-30b": (128, 2048, 768, 8), "gpt-oss-20b": (32, 2880, 2880, 4)}  # E, H, I, top_k
NAMES = {"qwen3-30b": "Qwen3-30B-A3B", "gpt-oss-20b": "gpt-oss-20b"}
FORMATS = {"bf16": "bf16", "fp8_block": "fp8 128x128 blocks", "mxfp4": "mxfp4"}
TOKENS = "1,16,128,1024,8192"
TINY = (8, 256, 128, 2)
SIDES = ("empty", "warm")
MAX_ERROR = {"bf16": 1e-2, "mxfp4": 1e-2, "fp8_block": 4e-2}  # in fp8 pretuned quantises x, too
DEFAULTS = {"DG_JIT_USE_NVRTC": "0"}  # DeepGEMM's default
COMPILERS = {"triton", "triton_kernels", "humming", "deep_gemm", "pretuned"}
MOST = 150.0  # seconds of a process
SLACK = 1.2  # limit of a process's time, in times of the last process of its kind
ROOT = Path(__file__).parents[2]
README, START_PAGE = ROOT / "README.md", ROOT / "docs" / "inside" / "performance.md"
PAGE = ROOT / "benchmarks" / "peers" / "README.md"
PLACE = "## Cold start"
PICTURE = "![Cold start by library](docs/pictures/cold-start.svg)"
START = "![time of a new process until its first result](../pictures/start.svg)"
FIRST = "The first ten calls, by library ([table](../../benchmarks/peers/README.md#cold-start)):"
HEAD = "| weights | library | caches empty, s |"


class Dense(Product):
    """A product whose weights are bf16."""

    @cached_property
    def operands(self) -> tuple[torch.Tensor, ...]:  # type: ignore[override]
        """w [E, N, K]."""
        g = torch.Generator(self.device).manual_seed(1)
        w = torch.empty(self.E, self.N, self.K, device=self.device, dtype=torch.bfloat16)
        for matrix in w:
            matrix.copy_(torch.randn(self.N, self.K, generator=g, device=self.device) * 0.05)
        return (w,)

    @property
    def weights(self) -> Dense:  # type: ignore[override]
        """w itself: ``Cell.error`` dequantizes it."""
        return self

    def dequantize(self, dtype: torch.dtype, e: int) -> torch.Tensor:
        """Expert e's weights."""
        return self.operands[0][e].to(dtype)


def routed(E: int, top_k: int, T: int, device: str) -> torch.Tensor:
    """Rows of each expert [E], int32: every expert is as likely as any other."""
    g = torch.Generator(device).manual_seed(T)
    ids = torch.rand(T, E, generator=g, device=device).topk(top_k, -1).indices
    return torch.bincount(ids.flatten(), minlength=E).int()


def work(library: Library, tokens: list[int], sizes: tuple[int, ...], device: str) -> list[list[Cell]]:
    """Both products of a layer, each with inputs for every number of tokens."""
    E, H, width, top_k = sizes
    kind = Dense if library.format == "bf16" else Product
    products = []
    for gemm, N, K in (("gate_up", 2 * width, H), ("down", H, width)):
        product = kind(library.format, library.model, gemm, E, N, K, width, top_k, device)
        _ = product.operands
        cells = [Cell(product, T, routed(E, top_k, T, device)) for T in tokens]
        if library.format == "fp8_block":
            for cell in cells:
                _ = cell.quantised
        products.append(cells)
    return products


def steps(library: Library, cells: list[list[Cell]], wait: Callable[[], None]) -> dict[str, Any]:
    """The seconds of each step of a library's first ten calls, and each result's error against fp32."""
    clock = time.perf_counter
    begun = clock()
    library.load()
    wait()
    loaded = clock()
    weights = [library.prepare(own[0].product) for own in cells]
    wait()
    prepared = clock()
    calls = [(library.arrange(w, cell), cell) for w, own in zip(weights, cells, strict=True) for cell in own]
    wait()
    ready = clock()
    library.compile(weights, cells)
    wait()
    compiled, seconds, results = clock(), [], []
    for call, _ in calls:
        at = clock()
        y = call()
        wait()
        seconds.append(clock() - at)
        results.append(y)
    at = clock()
    for call, _ in calls:
        call()
        wait()
    again = clock() - at
    of_codes = library.format == "fp8_block" and library.name in ("vllm_fp8", "deepgemm")
    errors = [cell.error(y, of_codes=of_codes) for y, (_, cell) in zip(results, calls, strict=True)]
    whole = loaded - begun + compiled - ready + sum(seconds)
    seconds_of = {
        "import_s": loaded - begun,
        "prepare_s": prepared - loaded,
        "compile_s": compiled - ready,
        "calls_s": seconds,
        "seconds": whole,
        "again_s": again,
    }
    rounded = {
        name: [round(s, 5) for s in value] if isinstance(value, list) else round(value, 5)
        for name, value in seconds_of.items()
    }
    return rounded | {"errors": [float(f"{error:.2e}") for error in errors], "wrong": _wrong(library, errors)}


def _wrong(library: Library, errors: list[float]) -> bool:
    return not all(error < MAX_ERROR[library.format] for error in errors)


def here(args: argparse.Namespace) -> dict[str, Any]:
    """Run one library in this process."""
    (name,) = args.libraries
    find(args)
    place = None if args.vllm is None else args.vllm / "vllm"
    library = LIBRARIES[name](place)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    wait: Callable[[], None] = torch.cuda.synchronize if device == "cuda" else (lambda: None)
    torch.zeros(1, device=device).item()  # creates the CUDA context
    sizes = TINY if args.tiny else MODELS[library.model]
    library.set_up()
    cells = work(library, args.tokens, sizes, device)
    wait()
    early = sorted({module.partition(".")[0] for module in sys.modules} & COMPILERS)
    if name.startswith("pretuned") and early:
        raise RuntimeError(f"imported before the clock: {', '.join(early)}")
    return steps(library, cells, wait) | {"imported_before": early}


def find(args: argparse.Namespace) -> None:
    """Make vLLM's own libraries and Humming importable, after installed packages."""
    for folder in (args.humming, args.vllm and args.vllm / "vllm" / "third_party", args.packages):
        if folder is not None:
            sys.path.append(str(Path(folder).resolve()))


def one_process(args: argparse.Namespace, name: str, caches: Path, seconds: float) -> dict[str, Any]:
    """Run a library's first ten calls in a new process, with these caches."""
    begun = time.monotonic()
    environ = DEFAULTS | os.environ | caches_in(caches)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "run.json"
        options = {
            "--vllm": args.vllm,
            "--packages": args.packages,
            "--humming": args.humming,
            "--json": out,
            "--libraries": name,
            "--tokens": ",".join(map(str, args.tokens)),
        }
        words = [str(word) for option, value in options.items() if value is not None for word in (option, value)]
        ended = child(["cold_start", "--here", *words, *(["--tiny"] if args.tiny else [])], seconds, environ)
        run: dict[str, Any] = json.loads(out.read_text()) if out.is_file() else {}
    if ended and "failed" not in run:
        run["failed"] = ended
    return run | {"process_s": round(time.monotonic() - begun, 1)}


def missing(args: argparse.Namespace, name: str) -> str | None:
    """The reason why a library can't run here; None if it can."""
    for need in LIBRARIES[name].needs:
        if need == "vllm" and args.vllm is None:
            return "no --vllm"
        if need != "vllm" and importlib.util.find_spec(need) is None and args.humming is None:
            return f"no package {need}: --humming, or install it"
    return None


def measure(args: argparse.Namespace, head: dict[str, Any]) -> dict[str, Any]:
    """Measure all libraries in turns, each with empty caches and then with warm ones."""
    end = time.monotonic() + args.seconds
    rows: dict[str, dict[str, Any]] = {}
    for name in args.libraries:
        kind = LIBRARIES[name]
        rows[name] = {"library": kind.title, "format": kind.format, "model": NAMES[kind.model]}
        rows[name] |= {side: [] for side in SIDES}
        why = missing(args, name)
        rows[name] |= {} if why is None else {"failed": why}
    report = head | {"unit": "s", "tokens": args.tokens, "rows": rows}
    took: dict[str, float] = {}
    for turn in range(args.rounds):
        order = args.libraries[turn % len(args.libraries) :] + args.libraries[: turn % len(args.libraries)]
        for name in order:
            left = end - time.monotonic()
            if "failed" in rows[name] or left < max(took.get(name, 0.0) * SLACK, 1.0):
                continue
            begun = time.monotonic()
            with tempfile.TemporaryDirectory() as folder:
                for side in SIDES:
                    run = one_process(args, name, Path(folder), min(MOST, end - time.monotonic()))
                    if "failed" in run:
                        if not rows[name][side]:
                            rows[name] |= {word: run[word] for word in ("failed", "trace") if word in run}
                        break
                    rows[name][side].append(run)
                    print(name, side, run["seconds"], "wrong" if run["wrong"] else "", flush=True)
            took[name] = time.monotonic() - begun
            if "failed" in rows[name]:
                print(name, "failed:", rows[name]["failed"], flush=True)
            args.json.write_text(json.dumps(report, indent=1) + "\n")
    return report


def median(row: dict[str, Any], side: str, what: str = "seconds") -> float | None:
    """Return the medians of a library's processes."""
    return statistics.median(run[what] for run in row[side]) if row[side] else None


def said(seconds: float | None) -> str:
    """A number with two significant digits."""
    if seconds is None:
        return ""
    if seconds < 0.0005:
        return "0"
    return f"{seconds:.3f}" if seconds < 0.1 else f"{seconds:.2f}" if seconds < 10 else f"{seconds:.1f}"


def table(report: dict[str, Any]) -> list[str]:
    """The lines of the table, without its head."""
    lines = []
    for row in sorted(report["rows"].values(), key=lambda row: list(FORMATS).index(row["format"])):
        cells = [f"{FORMATS[row['format']]}, {row['model']}", row["library"]]
        if row["empty"]:
            wrong = any(run["wrong"] for side in SIDES for run in row[side])
            cells += [said(median(row, side)) + (" (wrong results)" if wrong else "") for side in SIDES]
            cells += [said(median(row, side, "prepare_s")) for side in SIDES] + [str(len(row["empty"]))]
        else:
            cells += [f"not measured: {row.get('failed', 'no time was left')}", "", "", "", "0"]
        lines.append("| " + " | ".join(cells) + " |")
    return lines


def heading() -> list[str]:
    """The table's two first lines."""
    head = f"{HEAD} warm, s | preparing weights, empty, s | warm, s | processes timed |"
    return [head, "|---" * head.count(" |") + "|"]


def card(report: dict[str, Any]) -> str:
    """The GPU's short name, such as H100."""
    name: str = report["gpu"] or "no GPU"
    return name.replace("NVIDIA ", "").split(" ")[0]


def bullet(report: dict[str, Any]) -> str:
    """The README's line: pretuned's range with empty caches, and the range of libraries that compile."""
    ranges = []
    for ours in (True, False):
        medians = [
            median(row, "empty")
            for name, row in report["rows"].items()
            if name != "torch" and name.startswith("pretuned") is ours and row["empty"]
        ]
        times = [time_s for time_s in medians if time_s is not None]
        ranges.append(f"{said(min(times))} to {said(max(times))} s" if times else "an unknown time")
    text = (
        f"- **Cold start.** With every cache empty, a new process finishes its first ten GEMMs {ranges[0]} after "
        f"torch and CUDA are up. Libraries that compile need {ranges[1]} ({card(report)}, "
        "[all](benchmarks/peers/README.md#cold-start), [parts](docs/inside/performance.md#start))."
    )
    return "\n".join(_wrapped(text))


def _wrapped(text: str) -> Iterator[str]:
    """A list item's text in lines of at most 120 characters."""
    line = ""
    for word in text.split(" "):
        if line and len(line) + 1 + len(word) > 120:
            yield line
            line = " "
        line = f"{line} {word}" if line else word
    yield line


def write(report: dict[str, Any], file: str, pages: tuple[Path, Path, Path] = (README, PAGE, START_PAGE)) -> None:
    """Write the table and pictures into the page of other libraries, the README and the page of figures."""
    readme, page, start = pages
    lines = page.read_text().split("\n")
    at = next((i for i, line in enumerate(lines) if line.startswith(HEAD)), None)
    if at is None:
        at = lines.index(PLACE) + 2
        said = f"On an {card(report)} ([result](../results/{file})):"
        lines[at:at] = [said, "", *heading(), *table(report), ""]
    else:
        stop = next(i for i in range(at, len(lines)) if not lines[i].startswith("|"))
        lines[at:stop] = [*heading(), *table(report)]
    page.write_text("\n".join(lines))
    lines = start.read_text().split("\n")
    if FIRST not in lines:
        at = lines.index(START) + 1
        lines[at:at] = ["", FIRST, "", PICTURE.replace("docs/", "../")]
        start.write_text("\n".join(lines))
    lines = readme.read_text().split("\n")
    at = next(i for i, line in enumerate(lines) if line.startswith("- **Cold start.**"))
    stop = next(i for i in range(at + 1, len(lines)) if not lines[i].startswith("  "))
    lines[at:stop] = [bullet(report)]
    if PICTURE not in lines:
        first = next((i for i, line in enumerate(lines) if line.startswith("![")), len(lines) - 1)
        lines[first:first] = [PICTURE, ""]
    readme.write_text("\n".join(lines))


def versions(args: argparse.Namespace) -> dict[str, str | None]:
    """The versions of the libraries other than torch, from metadata in these folders or of installed packages."""
    numbers: dict[str, str | None] = {}
    for name, package, folder in (
        ("triton", "triton", None),
        ("vllm", "vllm", args.vllm),
        ("humming", "humming-kernels", args.humming),
    ):
        try:
            numbers[name] = version(package)
        except PackageNotFoundError:
            numbers[name] = None
        stem = package.replace("-", "_")
        for path in sorted(folder.glob(f"{stem}-*.dist-info")) if folder is not None else ():
            numbers[name] = path.name.removeprefix(f"{stem}-").removesuffix(".dist-info")
    return numbers


def arguments(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    parser.add_argument("--json", type=Path, help="the file to write")
    parser.add_argument("--vllm", type=Path, help="where vLLM's wheel is unpacked (carry)")
    parser.add_argument("--packages", type=Path, help="a folder with the packages that it imports")
    parser.add_argument("--humming", type=Path, help="a folder with humming-kernels; default: what is installed")
    parser.add_argument("--libraries", default=",".join(LIBRARIES), help=f"some of {', '.join(LIBRARIES)}")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=330, help="for all")
    parser.add_argument("--table", type=Path, help="print the table of a file, and measure nothing")
    parser.add_argument("--write", action="store_true", help="with --table: put it into the page and the README")
    parser.add_argument("--tiny", action="store_true", help="small weights, to try this without a GPU")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)  # one library, in this process
    args = parser.parse_args(argv)
    args.libraries, args.tokens = args.libraries.split(","), [int(T) for T in args.tokens.split(",")]
    for name in args.libraries:
        if name not in LIBRARIES:
            parser.error(f"--libraries: {name!r} is none of {', '.join(LIBRARIES)}")
    if args.json is None and args.table is None:
        parser.error("--json is needed, or --table")
    if args.vllm is not None and not (args.vllm / "vllm" / "model_executor").is_dir():
        parser.error(f"--vllm: {args.vllm} has no folder vllm of an unpacked wheel")
    return args


def main(argv: list[str] | None = None) -> int:
    """Measure and print the table; return 1 if a library that could run has no time."""
    args = arguments(argv)
    if args.here:
        try:
            args.json.write_text(json.dumps(here(args)))
        except Exception as error:
            why = f"{type(error).__name__}: {' '.join(str(error).split())[:120]}"
            args.json.write_text(json.dumps({"failed": why, "trace": traceback.format_exc(limit=-6)}))
            return 1
        return 0
    if args.table is not None:
        report = json.loads(args.table.read_text())
        if args.write:
            write(report, args.table.name)
    else:
        from .. import provenance

        folders = [args.humming, args.vllm and args.vllm / "vllm" / "third_party"]
        ready_files([folder for folder in folders if folder is not None], ("pretuned", "triton", "humming"))
        report = measure(args, provenance.about() | {"versions": versions(args)})
    print("\n".join([*heading(), *table(report)]))
    return 0 if all(row["empty"] for row in report["rows"].values()) else 1
