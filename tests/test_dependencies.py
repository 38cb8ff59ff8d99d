"""Each layer imports the standard library and the packages that it may: users install no others for it."""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.kernels.registry import FOLDERS

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ROOT = Path(__file__).resolve().parents[1]
# The packages of a folder; the longest name that fits counts. aot imports what its extras have.
ALLOWED = {
    "artifacts": {"msgpack", "filelock"},
    "artifacts/signature.py": {"msgpack", "cryptography"},  # where keys are trusted
    "kernels": {"torch"},
    **{f"kernels/{name}.py": set() for name in ("arch", "chips", "spec", "entry", "activations", "cost")},
    **{f"kernels/{folder}": {"triton"} for folder in ("gluon", *FOLDERS)},
    "kernels/rowops": {"triton"},
    "runtime": {"torch"},
    "runtime/dispatch": set(),  # what chooses needs no torch
    "runtime/integrations": {"torch", "prometheus_client"},
    "runtime/integrations/sglang": {"torch", "sglang"},
    "runtime/integrations/transformers": {"torch", "transformers", "peft", "compressed_tensors"},
    "runtime/integrations/vllm": {"torch", "vllm"},
}


def imported(path: Path) -> Iterator[tuple[int, str]]:
    """The line and the first word of each absolute import of a file, inside functions too."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"), str(path))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.split(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and not node.level:
            yield node.lineno, (node.module or "").split(".")[0]


def foreign(root: Path) -> Iterator[str]:
    """Each import of a package that the file's folder may not import."""
    for layer in ("artifacts", "kernels", "runtime"):
        for path in sorted((root / layer).rglob("*.py")):
            name = str(path.relative_to(root))
            allowed = ALLOWED[max((prefix for prefix in ALLOWED if f"{name}/".startswith(prefix + "/")), key=len)]
            for line, package in imported(path):
                if package not in {*sys.stdlib_module_names, *allowed, "pretuned"}:
                    yield f"{name}:{line}: imports {package}, allowed are {sorted(allowed)}"


def test_layers_import_the_packages_that_they_may() -> None:
    assert list(foreign(ROOT)) == []


def test_the_runtime_needs_what_pyproject_declares() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    declared = {re.split(r"\W", dependency)[0] for dependency in project["dependencies"]}
    needed = [ALLOWED[layer] for layer in ("artifacts", "kernels", "runtime")]
    assert set().union(*needed) == declared == {"torch", "msgpack", "filelock"}


@pytest.mark.parametrize(
    ("name", "text", "complaint"),
    [
        ("runtime/dispatch/a.py", "import torch", "runtime/dispatch/a.py:1: imports torch, allowed are []"),
        ("runtime/api/a.py", "import os\nimport numpy as np", "runtime/api/a.py:2: imports numpy"),
        ("kernels/cost.py", "def f():\n    from triton.language import x", "kernels/cost.py:2: imports triton"),
        ("artifacts/a.py", "import torch.nn", "artifacts/a.py:1: imports torch"),
    ],
)
def test_another_import_is_reported(tmp_path: Path, name: str, text: str, complaint: str) -> None:
    (tmp_path / name).parent.mkdir(parents=True)
    (tmp_path / name).write_text(text)
    (message,) = foreign(tmp_path)
    assert complaint in message
