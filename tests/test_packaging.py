"""The wheel holds exactly the package, and the metadata keeps the runtime small."""

from __future__ import annotations

import importlib.metadata
import os
import re
import runpy
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
import warm
from wheels import copy_tree

from pretuned.aot.compile.toolchain import KNOWN

ROOT = Path(__file__).resolve().parents[1]
LAYERS = ("artifacts", "kernels", "runtime", "aot")
MOST_BYTES = 25_000_000
DATA = {
    "py.typed",
    "artifacts/FORMAT.md",
    "aot/models/catalogue.tsv",
    *(f"aot/report/{name}" for name in ("cells.html", "page.css", "page.html", "page.js")),
} | {f"{layer}/py.typed" for layer in LAYERS}
pytestmark = pytest.mark.slow  # a wheel is built


@pytest.fixture(scope="module")
def wheel(built_wheel: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(built_wheel)


def test_the_wheel_holds_the_four_layers_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    held = {name for name in wheel.namelist() if ".dist-info/" not in name}
    sources = {f"pretuned/{path.relative_to(ROOT)}" for layer in LAYERS for path in (ROOT / layer).rglob("*.py")}
    bundles = {f"pretuned/artifacts/bundles/{path.stem}" for path in (ROOT / "artifacts" / "pressed").iterdir()}
    bundles |= {f"pretuned/{path.relative_to(ROOT)}" for path in (ROOT / "artifacts" / "bundles").glob("*.xz")}
    sources = {name.replace("pretuned/runtime/integrations/", "pretuned/integrations/") for name in sources}
    sources.add("pretuned/__init__.py")
    assert held == sources | {f"pretuned/{name}" for name in DATA} | bundles


def test_the_runtime_needs_three_packages_and_only_who_compiles_triton(wheel: zipfile.ZipFile) -> None:
    metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    needs = [line.split(": ", 1)[1] for line in metadata.splitlines() if line.startswith("Requires-Dist")]
    assert sorted(need.split(">")[0] for need in needs if "extra ==" not in need) == ["filelock", "msgpack", "torch"]
    compilers = [need.split("; extra == ") for need in needs if need.startswith("triton")]
    first, last = KNOWN
    assert compilers == [[f"triton<{last[0]}.{last[1] + 1},>={first[0]}.{first[1]}", '"compile"']]


def test_the_wheel_is_no_larger_than_an_index_takes_with_ease(wheel: zipfile.ZipFile) -> None:
    assert wheel.fp is not None
    assert wheel.fp.seek(0, 2) < MOST_BYTES


def test_the_wheel_carries_the_licence(wheel: zipfile.ZipFile) -> None:
    assert any(name.endswith("licenses/LICENSE") for name in wheel.namelist())


def test_what_an_index_shows_names_files_and_links_nowhere_that_is_not_there(wheel: zipfile.ZipFile) -> None:
    metadata = next(wheel.read(name).decode() for name in wheel.namelist() if name.endswith("METADATA"))
    shown = metadata.partition("\n\n")[2]
    assert "Description-Content-Type: text/markdown\n" in metadata
    assert shown.startswith("# pretuned\n")
    assert "[training]" not in shown
    assert "training (`docs/runtime/training.md`)" in shown
    assert "](" not in shown


def test_with_an_address_the_readmes_links_are_the_repositorys() -> None:
    description = runpy.run_path(str(ROOT / "setup.py"))["description"]
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    wanted = re.findall(r"(!?)\[[^\]]+\]\(([^)#]+)", readme)
    assert len(wanted) > 20
    there = "https://example.org/someone/pretuned"
    shown = re.findall(r"(!?)\[[^\]]+\]\(([^)#]+)", description(readme, there + "/"))
    assert shown == [(mark, f"{there}/{'raw' if mark else 'blob'}/HEAD/{path}") for mark, path in wanted]
    kept = "[a](https://example.org/x#y)"
    assert description(kept, None) == kept
    assert description("[a](docs/b.md#c)", there) == f"[a]({there}/blob/HEAD/docs/b.md#c)"


def test_the_source_distribution_has_the_files_that_the_readme_names(tmp_path: Path) -> None:
    """Its list alone is made: to pack it takes seconds more."""
    copy_tree(tmp_path)
    subprocess.run([sys.executable, "setup.py", "-q", "egg_info"], cwd=tmp_path, check=True, capture_output=True)
    listed = set((tmp_path / "src" / "pretuned.egg-info" / "SOURCES.txt").read_text(encoding="utf-8").splitlines())
    named = {
        path for _, path in re.findall(r"(!?)\[[^\]]+\]\(([^)#]+)", (ROOT / "README.md").read_text(encoding="utf-8"))
    }
    assert named <= listed
    assert {"constraints.txt", "models.txt", "LICENSE"} <= listed
    pressed = {str(path.relative_to(ROOT)) for path in (ROOT / "artifacts" / "pressed").iterdir()}
    assert len(pressed) > 8
    assert pressed <= listed
    assert not [text for text in listed if "artifacts/bundles/" in text and text.endswith(".msgpack")]


def test_the_version_stands_where_people_look() -> None:
    import pretuned

    assert pretuned.__version__ == importlib.metadata.version("pretuned")
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        pretuned.nothing  # noqa: B018


def test_the_names_that_people_use_are_the_packages_own_and_imported_when_they_are_used() -> None:
    names = (
        "Activation",
        "ExpertWeights",
        "Lora",
        "QuantizedRows",
        "batch_invariant",
        "explain",
        "grouped_gemm",
        "moe_mlp",
        "preload",
    )
    code = (
        "import sys, pretuned, pretuned as p\n"
        "assert [m for m in sys.modules if m.startswith('pretuned')] == ['pretuned']\n"
        f"from pretuned import {', '.join(names)}\n"
        "import pretuned.runtime as r\n"
        f"assert all(getattr(p, n) is getattr(r, n) for n in {names!r})\n"
        f"assert {{*{names!r}}} < set(dir(p)) and {{*{names!r}, '__version__'}} == set(p.__all__)\n"
    )
    done = warm.run(["-c", code])
    assert done.returncode == 0, done.stderr


USERS = """
import torch

import pretuned
from pretuned import ExpertWeights, Lora, explain, grouped_gemm, moe_mlp, preload
from pretuned.integrations.transformers import register

version: str = pretuned.__version__
y: torch.Tensor = grouped_gemm(torch.randn(4, 8), torch.randn(2, 16, 8), torch.tensor([2, 2]))
print(explain(E=8, N=16, K=16, M=4, sm=90), ExpertWeights, Lora, moe_mlp, preload)
register()
"""


@pytest.mark.nightly
def test_a_users_file_passes_strict_mypy_with_the_wheel(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path / "site")
    (tmp_path / "user.py").write_text(USERS)
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports=silent", "user.py"]
    env = {**os.environ, "MYPYPATH": str(tmp_path / "site"), "MYPY_CACHE_DIR": str(tmp_path / "cache")}
    done = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
