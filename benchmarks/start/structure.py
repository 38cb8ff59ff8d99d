"""How large the code is, and how many files and Python calls the first GEMM and the first layer of a process need.

    python benchmarks/run.py structure
    python benchmarks/run.py structure --json

Lines, statements and files are counted over the files that git tracks; modules and us are of the import and one GEMM.
The calls run on the tests' emulated GPU (tests/support/emulated_driver.py). Only functions of pretuned count. A
return is a step into a file that was left before.
"""

from __future__ import annotations

import argparse
import ast
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PRODUCT = ("aot", "runtime", "kernels", "artifacts")
SMALL = 15  # lines
PATCHES = {"setattr", "setitem", "delattr", "patch"}


def tracked(*folders: str) -> list[Path]:
    """The Python files that git tracks in these folders."""
    listed = subprocess.run(
        ["git", "-C", str(ROOT), "ls-files", "-z", *(f"{folder}/*.py" for folder in folders)],
        capture_output=True,
        text=True,
        check=True,
    ).stdout
    return [ROOT / name for name in listed.split("\0") if name and (ROOT / name).is_file()]


def size(files: list[Path]) -> dict[str, int]:
    """Lines, statements, files, and small files."""
    texts = [path.read_text(encoding="utf-8") for path in files]
    lines = [text.count("\n") for text in texts]
    statements = sum(isinstance(node, ast.stmt) for text in texts for node in ast.walk(ast.parse(text)))
    small = sum(n <= SMALL for n in lines)
    return {"lines": sum(lines), "statements": statements, "files": len(files), "small files": small}


def patches(files: list[Path]) -> int:
    """The calls of monkeypatch (or mock) in tests that replace an attribute."""
    count = 0
    for path in files:
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            count += isinstance(node, ast.Call) and isinstance(node.func, ast.Attribute) and node.func.attr in PATCHES
    return count


class Way:
    """The files and functions of pretuned that a call runs through, in order."""

    def __init__(self) -> None:
        self.files: list[str] = []
        self.calls = 0

    def note(self, frame: FrameType, event: str, _argument: object) -> None:
        """Record a call or return; a callback for sys.setprofile."""
        if event in ("call", "return"):
            step = frame if event == "call" else frame.f_back
            path = Path(step.f_code.co_filename).resolve() if step is not None else None
            if path is not None and path.is_relative_to(ROOT) and path.relative_to(ROOT).parts[0] in PRODUCT:
                self.calls += event == "call"
                if not self.files or self.files[-1] != str(path):
                    self.files.append(str(path))

    def result(self) -> dict[str, int]:
        """Return the number of distinct files, of calls, and of returns to a file that was left before."""
        return {"files": len(set(self.files)), "calls": self.calls, "returns": len(self.files) - len(set(self.files))}


def followed(call: Callable[[], object]) -> dict[str, int]:
    """The way of one call."""
    way = Way()
    sys.setprofile(way.note)
    try:
        call()
    finally:
        sys.setprofile(None)
    return way.result()


def first_calls() -> dict[str, Any]:
    """The ways of the first plain GEMM and the first layer, after the imports that such a call needs."""
    from benchmarks.speed.host_python import calls, made_up_gpu

    with made_up_gpu(ROOT / "tests" / "support"):
        from pretuned.runtime import reload

        calls_of, figures = calls(), {}
        for name in ("call", "layer"):
            calls_of[name]()
            reload()
            figures[f"first {name}"] = followed(calls_of[name])
            figures[f"repeated {name}"] = followed(calls_of[name])
        return figures | {
            "process's first call": min((cold_call() for _ in range(7)), key=lambda figures_of: figures_of["us"])
        }


def cold_call() -> dict[str, int]:
    """The modules of pretuned that its import and one GEMM load, and the CPU microseconds of both.

    Run it on a made-up GPU. Python reads bytecode from its cache, unless PYTHONDONTWRITEBYTECODE keeps it empty.
    """
    import torch

    x, w = torch.zeros(64, 128, dtype=torch.bfloat16), torch.zeros(8, 256, 128, dtype=torch.bfloat16)
    m_sizes = torch.full((8,), 8, dtype=torch.int32)
    before = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in ("pretuned", "msgpack")}
    for name in before:
        del sys.modules[name]
    gc.collect()
    begun = time.process_time()
    try:
        from pretuned.runtime import grouped_gemm

        grouped_gemm(x, w, m_sizes)
        us = int(1e6 * (time.process_time() - begun))
        return {"modules": sum(name.partition(".")[0] == "pretuned" for name in sys.modules), "us": us}
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in ("pretuned", "msgpack")]:
            del sys.modules[name]
        sys.modules.update(before)


def report() -> dict[str, Any]:
    """All figures."""
    tests = tracked("tests")
    product = tracked(*PRODUCT)
    return {
        "product": size(product),
        "runtime with integrations": size(tracked("runtime")),
        "tests": size(tests),
        "patches in tests": patches(tests),
        **first_calls(),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="print JSON")
    args = parser.parse_args()
    figures = report()
    if args.json:
        print(json.dumps(figures, indent=1))
        return
    for name, value in figures.items():
        text = ", ".join(f"{n:,} {what}" for what, n in value.items()) if isinstance(value, dict) else f"{value:,}"
        print(f"{name:26} {text}")
