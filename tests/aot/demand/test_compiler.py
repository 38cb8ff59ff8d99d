"""The compiler behind allow_jit: real Triton in a child process."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import childjobs
import pytest
import warm

from pretuned.aot.demand.worker import compile_in_child
from pretuned.aot.process import child
from pretuned.artifacts.errors import CompileError, HostError, InputError
from pretuned.artifacts.format import codec
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.runtime import settings

PROBLEM = Problem(Op.DW, DType.FP32, 8, 256, 128)  # few candidates

# A script without a __main__ guard, and with a module that no child may import.
SCRIPT = """
import sys
print("begun", flush=True)
import pretuned.aot
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem
from pretuned.artifacts.records.target import Gpu, LocalGpu
from pretuned.runtime import allow_jit
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.dispatch.decide import decide
allow_jit()
local = LocalGpu(90, Gpu("NVIDIA H200", 132, 143771, 12080))
snapshot = Snapshot([])
for N, M, aligned in ((256, 64, True), (256, 8192, True), (251, 64, False)):
    found = decide(snapshot, Problem(Op.DW, DType.FP32, 8, N, 128), M, local, aligned=aligned)
    print(found.chosen.origin.name, found.chosen.variant.alignment)
print("triton" in sys.modules)
"""


@pytest.fixture
def home(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Path]:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.setenv("PRETUNED_BUNDLES", "")
    for name in ("XDG_CACHE_HOME", "PRETUNED_DISABLE_AUTOTUNE", "PRETUNED_STRICT"):
        monkeypatch.delenv(name, raising=False)
    settings.forget()
    yield tmp_path
    monkeypatch.undo()
    settings.forget()


@pytest.mark.slow
def test_from_a_plain_script_to_variants_that_run_any_shape(home: Path) -> None:
    (home / "script.py").write_text(SCRIPT)
    done = warm.run([home / "script.py"])
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines() == ["begun", "COMPILED 16", "COMPILED 16", "COMPILED 1", "False"]
    kept = list((home / ".cache" / "pretuned" / "compiled").rglob("*.bin"))
    assert 2 <= len(kept) <= 7
    settings.forget()
    again = codec.decode(compile_in_child(PROBLEM, 90), "again")  # from the cache
    assert len(again.variants) <= len(kept)
    assert {variant.alignment for variant in again.variants} == {1, 16}
    assert again.target.sm == 90


@pytest.mark.slow
def test_with_tuning_disabled_nothing_is_written(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    settings.forget()
    assert codec.decode(compile_in_child(PROBLEM, 80), "now").target.sm == 80
    assert not (home / ".cache").exists()


def test_a_capability_that_triton_does_not_know(home: Path) -> None:
    with pytest.raises(HostError, match="not for sm_75"):
        compile_in_child(PROBLEM, 75)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("function", "error", "words"),
    [
        (childjobs.refuse, InputError, "not this"),
        (childjobs.fail, CompileError, "no code"),
        (childjobs.trip, HostError, "ZeroDivisionError"),
        (childjobs.abort, HostError, r"died \(SIGABRT\)"),
        (childjobs.leave, HostError, r"died \(exit 3\)"),
        (childjobs.hang, HostError, "did not end within 3 s"),
    ],
)
def test_a_child_that_ends_badly(function: Callable[..., None], error: type[Exception], words: str) -> None:
    with pytest.raises(error, match=words):
        child.call(function, {}, timeout_s=3.0, who="a test")


def test_without_a_place_for_temporary_files(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import tempfile

    monkeypatch.setattr(tempfile, "tempdir", "/nowhere")
    with pytest.raises(HostError, match="TMPDIR names another one"):
        compile_in_child(PROBLEM, 90)
