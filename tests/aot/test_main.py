"""The entry point, where something is missing."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pretuned.aot.cli.doctor import versions

ROOT = Path(__file__).resolve().parents[2]

_WITHOUT = """
import sys
class Missing:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {names!r}:
            raise ModuleNotFoundError(f"No module named {{name!r}}", name=name)
class Spec:
    pass
import importlib.util
real = importlib.util.find_spec
importlib.util.find_spec = lambda name, package=None: None if name in {names!r} else real(name, package)
sys.meta_path.insert(0, Missing())
from pretuned.aot.__main__ import main
sys.argv[1:] = {arguments!r}
sys.exit(main())
"""


def without(names: set[str], *arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    script = _WITHOUT.format(names=sorted(names), arguments=list(arguments))
    return subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=cwd, check=False)


@pytest.mark.parametrize("names", [{"click"}, {"rich"}, {"click", "rich"}])
def test_without_the_command_lines_packages(names: set[str], tmp_path: Path) -> None:
    done = without(names, "--help", cwd=tmp_path)
    assert done.returncode == 1
    assert done.stdout == ""
    assert done.stderr.count("\n") == 1
    assert 'pip install "pretuned[aot]"' in done.stderr
    assert all(name in done.stderr for name in names)


@pytest.mark.parametrize("name", ["pebble", "platformdirs"])
def test_without_the_builders_packages(name: str, tmp_path: Path) -> None:
    arguments = ("build", "--models", "shape:E=8,H=256,I=128,k=2", "--sm", "80", "--compile-all", "--no-cache")
    done = without({name}, *(arguments[:-1] if name == "platformdirs" else arguments), cwd=tmp_path)
    assert done.returncode == 1, done.stderr
    assert done.stdout == ""
    assert name in done.stderr.lower()
    assert done.stderr.rstrip().endswith('pip install "pretuned[aot]"')
    assert not list(tmp_path.glob("bundles/*.msgpack"))


@pytest.mark.slow  # processes
@pytest.mark.parametrize("model", ["shape:E=8,H=256,I=128,k=2 dtype=fp16", "shape:E=8,H=256,I=128,k=2"])
def test_a_build_without_triton(model: str, tmp_path: Path) -> None:
    """Of candidates that ship; where none do, it says why."""
    arguments = ["build", "--models", model, "--sm", "80", "--ops", "forward", "--measure", "no"]
    done = without({"triton"}, *arguments, cwd=tmp_path)
    assert "Triton is not installed" in done.stderr
    assert "the build uses kernels that ship compiled" in done.stderr
    if "fp16" in model:
        assert done.returncode == 1
        assert "not one variant of forward fp16 can be used" in done.stderr
    else:
        assert done.returncode == 0, done.stderr
        checked = without({"triton"}, "verify", "bundles/pretuned-sm80.msgpack", cwd=tmp_path)
        assert checked.stdout.startswith("ok ")
        quiet = without({"triton"}, *arguments, "-q", cwd=tmp_path)
        assert (quiet.stdout, quiet.stderr) == ("bundles/pretuned-sm80.msgpack\n", "")
    without_them = without({"triton"}, *arguments, "--compile-all", cwd=tmp_path)
    assert without_them.returncode == 1
    assert "pip install 'pretuned[compile]'" in without_them.stderr


@pytest.mark.slow  # processes
@pytest.mark.parametrize(
    "arguments",
    [
        ["plan", "-m", "shape:E=8,H=256,I=128,k=2", "--sm", "80"],
        ["models"],
        ["doctor"],
        ["measure", "--help"],
        ["inspect", str(ROOT / "artifacts/bundles/catalogue-sm80.msgpack")],
        ["verify", str(ROOT / "artifacts/bundles/candidates-sm80-sm86-sm89.msgpack.xz")],
    ],
    ids=lambda arguments: arguments[0],
)
def test_the_other_verbs_need_no_triton(arguments: list[str], tmp_path: Path) -> None:
    done = without({"triton"}, *arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_version_without_triton(tmp_path: Path) -> None:
    done = without({"triton"}, "--version", cwd=tmp_path)
    assert done.returncode == 0
    assert "Triton is not installed" in done.stdout


def test_the_version_without_the_builder(tmp_path: Path) -> None:
    """In an environment that has the runtime alone."""
    done = without({"click", "rich", "triton"}, "--version", cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.split() == ["pretuned", versions()["pretuned"]]


@pytest.mark.parametrize("arguments", [["aot/__main__.py"], ["-m", "aot"]])
def test_as_a_loose_folder_it_says_how_to_install(arguments: list[str]) -> None:
    done = subprocess.run([sys.executable, *arguments], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert done.stdout == ""
    assert "pip install" in done.stderr
    assert done.stderr.count("\n") == 1


def test_version_and_help_import_neither_torch_nor_triton_nor_rich() -> None:
    script = """
import sys
from pretuned.aot.cli.main import run
assert run(["--version"]) == 0 and run(["--help"]) == 0 and run(["build", "--help"]) == 0
assert not {"torch", "triton", "rich", "pebble"} & set(sys.modules), sorted(sys.modules)
"""
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, env=dict(os.environ), check=False
    )
    assert done.returncode == 0, done.stderr
