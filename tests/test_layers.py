"""Imports point down only, artifacts <- kernels <- runtime <- aot, and each layer keeps to its own dependencies."""

from __future__ import annotations

import ast
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("artifacts", "kernels", "runtime", "aot")
THIRD_PARTY = {
    "artifacts": {"msgpack", "filelock"},
    "kernels": {"torch"},
    "runtime": {"torch"},
}
# The rooms of kernels, whose modules import Triton.
KERNEL_ROOMS = ("kernels.gemm", "kernels.rowops")
FILES = [path for layer in LAYERS for path in sorted((ROOT / layer).rglob("*.py"))]


def imports(path: Path) -> Iterator[str]:
    """Every module that a file imports, as its absolute name: ``pretuned.kernels.contract.registry``, ``torch``."""
    package = ["pretuned", *path.relative_to(ROOT).parent.parts]
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            if module == "pretuned":
                yield from (f"pretuned.{alias.name}" for alias in node.names)
            else:
                yield module


def in_kernel_room(path: Path) -> bool:
    return ".".join(path.relative_to(ROOT).parts).startswith(KERNEL_ROOMS)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(ROOT)))
def test_a_file_imports_only_what_its_layer_may(path: Path) -> None:
    layer = path.relative_to(ROOT).parts[0]
    below = LAYERS[: LAYERS.index(layer) + 1]
    for name in imports(path):
        first, *rest = name.split(".")
        if first == "pretuned":
            assert rest, f"{path}: imports the namespace itself"
            assert rest[0] in below, f"{path}: {layer} imports {name}"
            if ".".join(rest).startswith(KERNEL_ROOMS):
                assert in_kernel_room(path) or layer == "aot", f"{path}: imports {name}, which imports Triton"
        elif first == "triton":
            assert layer == "aot" or in_kernel_room(path), f"{path}: imports {name}"
        elif layer in THIRD_PARTY and first not in sys.stdlib_module_names:
            assert first in THIRD_PARTY[layer], f"{path}: {layer} imports {name}"


def test_there_is_something_to_look_at() -> None:
    assert {path.relative_to(ROOT).parts[0] for path in FILES} == set(LAYERS)
    assert "pretuned.artifacts.records.problem" in set(imports(ROOT / "runtime" / "dispatch" / "hints.py"))
    assert "triton" in set(imports(ROOT / "kernels" / "gemm" / "portable" / "rows.py"))
