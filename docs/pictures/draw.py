"""Draw the pictures of the README and the pages: ``python docs/pictures/draw.py`` writes the SVG files beside it.

Figures come from ``benchmarks/results``, the terminal's text from terminal.txt, which ``--record`` writes anew. The
same inputs give the same bytes; a test compares them.
"""

from __future__ import annotations

import argparse
import json
import lzma
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from html import escape
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
RESULTS = HERE.parents[1] / "benchmarks" / "results"
FONT = "system-ui, -apple-system, 'Segoe UI', Roboto, 'DejaVu Sans', sans-serif"
MONO = "ui-monospace, SFMono-Regular, Menlo, 'DejaVu Sans Mono', monospace"
STYLE = f"""<style>
svg {{ --ink: #1f2328; --soft: #59636e; --line: #afb8c1; --ours: #1a7f37; --theirs: #b6bec7; --box: #f3f5f7;
       --cool: #ddf4ff; --warm: #fff3d6; font-family: {FONT}; font-size: 14px }}
@media (prefers-color-scheme: dark) {{
  svg {{ --ink: #e6edf3; --soft: #9aa5b1; --line: #565f6a; --ours: #3fb950; --theirs: #59636e; --box: #1c2128;
         --cool: #12324a; --warm: #40320f }} }}
text {{ fill: var(--ink) }} .soft {{ fill: var(--soft); font-size: 12px }}
.title {{ font-weight: 600; font-size: 15px }}
.mono {{ font-family: {MONO}; font-size: 12.5px }} .mid {{ text-anchor: middle }} .end {{ text-anchor: end }}
.ours {{ fill: var(--ours) }} .theirs {{ fill: var(--theirs) }} .strong {{ font-weight: 600 }}
.box {{ fill: var(--box); stroke: var(--line) }} .cool {{ fill: var(--cool); stroke: var(--line) }}
.warm {{ fill: var(--warm); stroke: var(--line) }} .line {{ fill: none; stroke: var(--line); stroke-width: 1.5 }}
.tip {{ fill: var(--line) }}
</style>"""


class Picture:
    """An SVG under construction: a width, a height and the elements so far."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.size = width, height
        self.title = title
        self.parts: list[str] = []

    def text(self, x: float, y: float, text: str, kind: str = "") -> None:
        self.parts.append(f'<text x="{x:g}" y="{y:g}" class="{kind}">{escape(text)}</text>')

    def rect(self, x: float, y: float, width: float, height: float, kind: str, round: int = 3) -> None:
        self.parts.append(
            f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="{round}" class="{kind}"/>'
        )

    def line(self, points: str, *, tip: bool = False) -> None:
        end = ' marker-end="url(#tip)"' if tip else ""
        self.parts.append(f'<path d="{points}" class="line"{end}/>')

    def box(self, x: float, y: float, width: float, lines: list[str], kind: str = "box", height: float = 0) -> None:
        """A box with centred lines, the first in bold; a line that begins with ` is set in monospace."""
        height = height or 20 + 18 * len(lines)
        self.rect(x, y, width, height, kind, 6)
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for i, line in enumerate(lines):
            style = "mid mono" if line.startswith("`") else "mid strong" if i == 0 else "mid soft"
            self.text(x + width / 2, top + 18 * i, line.strip("`"), style)

    def svg(self) -> str:
        width, height = self.size
        marker = (
            '<defs><marker id="tip" viewBox="0 0 8 8" refX="7" refY="4" markerWidth="7" markerHeight="7" orient="auto">'
        )
        marker += '<path d="M0 0 8 4 0 8z" class="tip"/></marker></defs>'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" role="img">'
        return "\n".join((head, f"<title>{escape(self.title)}</title>", STYLE, marker, *self.parts, "</svg>\n"))


def read(name: str) -> Any:
    """One file of ``benchmarks/results``."""
    data = (RESULTS / name).read_bytes()
    return json.loads(lzma.decompress(data) if name.endswith(".xz") else data)


def layers() -> Picture:
    """Layers in vLLM: for each model the speed at three batch sizes, vLLM's own choice being 1."""
    own = {"bf16": "triton", "fp8": "triton", "mxfp4": "triton", "int4": "marlin"}  # what vLLM 0.20.2 chooses
    formats = {"bf16": "bf16", "fp8": "fp8 128x128 blocks", "mxfp4": "mxfp4", "int4": "int4"}
    sizes = (1, 128, 8192)
    cells = {
        (cell["model"], cell["kind"], cell["tokens"]): cell["us"] for cell in read("layers-in-vllm-h200.json")["cells"]
    }
    models = list(dict.fromkeys((model, kind) for model, kind, _ in cells))
    left, unit, top, bar = 300, 138, 64, 19
    picture = Picture(760, top + len(models) * 78 + 34, "One MoE layer inside vLLM: pretuned against vLLM's own kernel")
    picture.text(12, 24, "One MoE layer inside vLLM on an H200: how many times as fast with pretuned", "title")
    picture.text(12, 44, "1.0 is the kernel that vLLM 0.20.2 chooses itself", "soft")
    for i, (model, kind) in enumerate(models):
        y = top + 78 * i
        picture.text(12, y + 26, model, "strong")
        picture.text(12, y + 44, formats[kind], "soft")
        for j, tokens in enumerate(sizes):
            us = cells[model, kind, tokens]
            ratio = us[own[kind]] / us["auto"]
            at = y + j * (bar + 3)
            picture.text(left - 10, at + 14, f"{tokens:,} token{'s' * (tokens > 1)}", "end soft")
            picture.rect(left, at, ratio * unit, bar, "ours")
            picture.text(left + ratio * unit + 8, at + 14, f"{ratio:.2f}x", "strong")
    foot = top + 78 * len(models) - 6
    picture.line(f"M{left + unit} {top - 8}V{foot}")
    picture.text(left + unit, foot + 18, "1.0: vLLM's own", "mid soft")
    return picture


def start() -> Picture:
    """Where the time of a process goes until its first result."""
    run = read("first-result-h100.json.xz")["installed"]["2e4f14a2"]
    parts = [
        ("import torch", run["torch_import_ms"], "theirs"),
        ("CUDA context, inputs", run["context_and_inputs_ms"], "theirs"),
        ("import pretuned", run["pretuned_import_ms"], "ours"),
        ("first call: find, check, load, run", run["first_result_ms"], "ours"),
        ("second call", run["second_result_ms"], "ours"),
    ]
    left, unit = 250, 430 / parts[0][1]
    picture = Picture(760, 64 + 34 * len(parts) + 14, "Time of a new process until its first result")
    picture.text(12, 24, "A new process on an H100, until its first grouped GEMM is done", "title")
    picture.text(12, 44, "no autotuning, no JIT, nothing in a compile cache", "soft")
    for i, (name, ms, kind) in enumerate(parts):
        y = 64 + 34 * i
        picture.text(left - 12, y + 15, name, "end")
        picture.rect(left, y, max(1.5, ms * unit), 21, kind)
        picture.text(left + max(1.5, ms * unit) + 8, y + 15, f"{ms:,.0f} ms" if ms >= 1 else f"{ms:.1f} ms", "strong")
    return picture


def cold() -> Picture:
    """Seconds until the first ten calls of a process have ended: each library with empty caches, and with warm ones."""
    report = read(next(name for name in COLD if (RESULTS / name).is_file()))
    rows = [row for row in report["rows"].values() if row["empty"] and row["warm"]]
    formats = {"bf16": "bf16", "fp8_block": "fp8 128x128 blocks", "mxfp4": "mxfp4"}

    def seconds(row: dict[str, Any], side: str) -> float:
        return statistics.median(run["seconds"] for run in row[side])

    gpu = report["gpu"].replace("NVIDIA ", "").split(" ")[0]
    left, unit = 200, 460 / max(seconds(row, "empty") for row in rows)
    by_format = [(format, [row for row in rows if row["format"] == format]) for format in formats]
    by_format = [(format, own) for format, own in by_format if own]
    height = 76 + sum(30 + 40 * len(own) for _, own in by_format)
    picture = Picture(760, height, "A new process: seconds until its first ten grouped GEMMs are done")
    picture.text(12, 24, f"A new process on an {gpu}: seconds until its first ten grouped GEMMs are done", "title")
    picture.text(
        12, 44, "upper bar: every cache empty; lower bar: caches warm; torch and a CUDA context up before", "soft"
    )
    y = 66
    for name, own in by_format:
        picture.text(12, y + 14, f"{formats[name]}, {own[0]['model']}", "strong")
        y += 26
        for row in own:
            picture.text(left - 12, y + 19, row["library"], "end")
            kind = "ours" if row["library"] == "pretuned" else "theirs"
            for at, side, high in ((y, "empty", 17), (y + 19, "warm", 9)):
                s = seconds(row, side)
                picture.rect(left, at, max(1.5, s * unit), high, kind)
                said = f"{s:.1f} s" if s >= 10 else f"{s:.2f} s" if s >= 0.1 else f"{s:.3f} s"
                style = "strong" if side == "empty" else "soft"
                picture.text(left + max(1.5, s * unit) + 8, at + (14 if side == "empty" else 9), said, style)
            y += 40
        y += 4
    return picture


def way() -> Picture:
    """From models.txt to a launched kernel: the offline half on the left, a process on the right."""
    picture = Picture(760, 250, "From models.txt to a launched kernel")
    picture.rect(8, 8, 440, 234, "box", 8)
    picture.rect(470, 8, 282, 234, "box", 8)
    picture.text(22, 32, "Offline, once: any machine, no GPU needed", "strong")
    picture.text(484, 32, "Online: every process", "strong")
    picture.box(24, 60, 120, ["models.txt", "models, tp, ep"], "warm")
    picture.box(176, 60, 110, ["`aot build", "compile, choose"], "cool")
    picture.box(316, 60, 116, ["bundle", "cubins + choices"], "warm")
    picture.box(176, 160, 110, ["`aot measure", "on your GPU"], "cool")
    picture.box(316, 160, 116, ["image, wheel", "aot pack, COPY"], "warm")
    picture.box(486, 160, 116, ["open, check", "digest, owner"], "cool")
    picture.box(486, 60, 116, ["look up", "shape and rows"], "cool")
    picture.box(626, 60, 116, ["launch", "CUDA driver"], "cool")
    picture.text(626, 180, "no compiler,", "soft")
    picture.text(626, 198, "no tuning, no Triton", "soft")
    for points in ("M144 88H174", "M286 88H314", "M374 116V158", "M432 188H484", "M544 158V118", "M602 88H624"):
        picture.line(points, tip=True)
    picture.line("M231 158V118", tip=True)
    picture.text(238, 142, "times (optional)", "soft")
    return picture


def rows() -> Picture:
    """Rows sorted by expert, with E, M, N and K."""
    picture = Picture(760, 300, "Grouped GEMM: rows sorted by expert")
    sizes, unit, top = (3, 0, 5, 2), 20, 64
    picture.text(12, 24, "y[m] = x[m] @ w[g].T, where row m belongs to expert g", "title")
    picture.text(50, 52, "x [M, K]", "mono")
    picture.text(330, 52, "w [E, N, K]", "mono")
    picture.text(630, 52, "y [M, N]", "mono")
    row = 0
    kinds = ("cool", "box", "warm", "box")
    for g, count in enumerate(sizes):
        for _ in range(count):
            y = top + row * unit
            picture.rect(50, y, 130, unit - 3, kinds[g])
            picture.rect(630, y, 90, unit - 3, kinds[g])
            row += 1
        middle = top + (row - count / 2) * unit
        at = top + 4 + g * 54
        picture.rect(330, at, 130, 44, kinds[g])
        picture.text(395, at + 27, f"w[{g}]", "mid mono")
        if count:
            picture.line(f"M190 {middle:g}C260 {middle:g} 260 {at + 22:g} 322 {at + 22:g}", tip=True)
            picture.line(f"M468 {at + 22:g}C540 {at + 22:g} 540 {middle:g} 622 {middle:g}", tip=True)
        else:
            picture.text(468, at + 27, "no rows: not read", "soft")
    foot = top + row * unit + 22
    picture.text(50, foot, f"m_sizes = [{', '.join(map(str, sizes))}]   E = {len(sizes)}, M = {sum(sizes)}", "mono")
    return picture


def which() -> Picture:
    """Which kernel runs, as a decision tree."""
    picture = Picture(760, 420, "Which kernel a call runs")
    questions = [
        (
            "This problem was measured on this GPU model,",
            "for these rows, half or twice as many?",
            "that choice",
            "nearest number of rows first",
        ),
        (
            "Measured on another GPU of the capability,",
            "for these rows, half or twice as many?",
            "that choice",
            "most similar GPU first",
        ),
        (
            "Modelled for these rows,",
            "or a choice for many more or fewer rows?",
            "that choice",
            "measured before modelled",
        ),
        (
            "Any variant, shipped or compiled,",
            "that can run the call?",
            "by measured neighbours",
            "and the cost model; self-tested",
        ),
    ]
    for i, (first, second, answer, note) in enumerate(questions):
        y = 12 + 92 * i
        picture.box(12, y, 410, [first, second], "cool", 62)
        picture.box(524, y + 4, 224, [answer, note], "warm", 54)
        picture.line(f"M422 {y + 31}H522", tip=True)
        picture.text(455, y + 24, "yes", "soft")
        picture.line(f"M217 {y + 62}V{y + 90}", tip=True)
        picture.text(225, y + 80, "no", "soft")
    picture.box(12, 380, 410, ["torch runs the call, with one warning"], "box", 34)
    return picture


def pages() -> Picture:
    """Which page is for whom."""
    rows = [
        ("I serve with vLLM or SGLang", "Serve", "use/serving"),
        ("I train or fine-tune", "Fine-tune", "runtime/finetuning, runtime/training"),
        ("I write my own MoE layer", "Call it yourself", "runtime/runtime, runtime/quantised"),
        ("My model or GPU is missing", "Build and ship bundles", "use/build, use/tuning, use/containers"),
        ("Will it run, and how fast?", "GPUs and formats, bench", "use/gpus, use/bench"),
        ("Something is wrong", "Troubleshooting", "use/troubleshooting"),
        ("I change the code", "Inside", "inside/architecture, inside/kernels"),
    ]
    picture = Picture(760, 16 + 50 * len(rows), "Which page for whom")
    for i, (who, what, where) in enumerate(rows):
        y = 8 + 50 * i
        picture.box(12, y, 250, [who], "cool", 38)
        picture.line(f"M262 {y + 19}H308", tip=True)
        picture.rect(312, y, 436, 38, "warm", 6)
        picture.text(326, y + 24, what, "strong")
        picture.text(736, y + 24, where, "end soft")
    return picture


COMMANDS = (
    'aot build --models "Qwen/Qwen3-30B-A3B tp=1,2" --sm 90',
    "aot explain Qwen/Qwen3-30B-A3B --gpu h100 --tokens 1,128,8192",
)
COLUMNS = 132


def record() -> str:
    """Run ``COMMANDS`` in an empty folder, without a GPU; return what a terminal of ``COLUMNS`` shows."""
    shown = []
    path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
    with tempfile.TemporaryDirectory() as folder:
        for command in COMMANDS:
            env = {**os.environ, "PATH": path, "COLUMNS": str(COLUMNS), "CUDA_VISIBLE_DEVICES": "", "NO_COLOR": "1"}
            done = subprocess.run(
                shlex.split(command), cwd=folder, env=env, stdout=subprocess.PIPE, text=True, check=True
            )
            shown += [f"$ {command}", *(line.rstrip() for line in done.stdout.rstrip().splitlines()), ""]
        return "\n".join(shown).replace(folder, "$PWD")


def terminal() -> Picture:
    """The recorded commands, typed and answered line by line, again and again."""
    lines = (HERE / "terminal.txt").read_text(encoding="utf-8").rstrip().splitlines()
    wide, high = 6.65, 16
    picture = Picture(int(COLUMNS * wide) + 32, len(lines) * high + 56, "aot build, then aot explain, in a terminal")
    width, height = picture.size
    picture.parts.append(
        "<style>.term { fill: #10151c } .out { fill: #d5dde6; white-space: pre } .out, .cmd { font-family: "
        f"{MONO}; font-size: 11px }} .cmd {{ fill: #7ee787; white-space: pre }}"
        "@keyframes show { from { opacity: 0 } to { opacity: 1 } } .row { animation: show .01s both }"
        "@media (prefers-reduced-motion: reduce) { .row { animation: none } }</style>"
    )
    picture.rect(0, 0, width, height, "term", 8)
    for i, colour in enumerate(("#ff5f57", "#febc2e", "#28c840")):
        picture.parts.append(f'<circle cx="{20 + 18 * i}" cy="18" r="5.5" fill="{colour}"/>')
    at = 0.3
    for i, line in enumerate(lines):
        kind = "cmd" if line.startswith("$ ") else "out"
        at += 1.2 if kind == "cmd" else 0.12
        picture.parts.append(
            f'<text x="16" y="{46 + i * high}" class="{kind} row" style="animation-delay: {at:.2f}s"'
            f' xml:space="preserve">{escape(line)}</text>'
        )
        at += 1.5 if kind == "cmd" else 0
    return picture


COLD = ("cold-start-h100.json", "cold-start-h200.json")  # by benchmarks/start/cold_start.py
PICTURES: dict[str, Callable[[], Picture]] = {
    "layers": layers,
    "start": start,
    "way": way,
    "rows": rows,
    "which-kernel": which,
    "which-page": pages,
    "terminal": terminal,
}
if any((RESULTS / name).is_file() for name in COLD):
    PICTURES["cold-start"] = cold


def drawn() -> Iterator[tuple[Path, str]]:
    """(file, its text) of each picture."""
    for name, draw in PICTURES.items():
        yield HERE / f"{name}.svg", draw().svg()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--record", action="store_true", help="run the terminal's commands anew")
    if parser.parse_args().record:
        (HERE / "terminal.txt").write_text(record(), encoding="utf-8")
    for path, text in drawn():
        path.write_text(text, encoding="utf-8")
        print(path.relative_to(HERE.parents[1]))
