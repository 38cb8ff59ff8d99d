"""The child of tuning on demand: real bundles, made-up times; and the compiler behind allow_jit, with real Triton."""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import childjobs
import faketimer
import pytest
import small_bundles
import warm

from pretuned.aot.choose.candidates import read_candidates
from pretuned.aot.choose.incumbents import Incumbents
from pretuned.aot.compile import toolchain
from pretuned.aot.compile.shipped import shipped_file
from pretuned.aot.demand import tuner, worker
from pretuned.aot.demand.api import key_for
from pretuned.aot.demand.worker import compile_in_child
from pretuned.aot.executors.local import LocalExecutor
from pretuned.aot.measure.job import Setup
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.process import child
from pretuned.aot.process.child import scratch_folder
from pretuned.aot.tune.tuner import tune_problems
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import CompileError, HostError, InputError
from pretuned.artifacts.records import Bundle, DType, LocalGpu, Op, Problem, Source
from pretuned.kernels.spec import Spec
from pretuned.runtime import settings
from pretuned.runtime.dispatch import snapshot

ON_H200 = LocalGpu(90, faketimer.H200)


@pytest.fixture(autouse=True)
def nothing_but_what_ships(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    for name in ("PRETUNED_BUNDLES", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture(autouse=True)
def without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """Times are made up."""

    def tune(problems: Any, candidates: Path, journal: Path, *, gpus: Any, executors: None, **how: Any) -> object:
        with executor(candidates) as here:
            return tune_problems(problems, candidates, journal, executors=here, **how)

    monkeypatch.setattr(worker, "tune_problems", tune)


@contextmanager
def executor(candidates: Path) -> Iterator[list[LocalExecutor]]:
    with open_bundle(candidates) as bundle, scratch_folder() as scratch:
        executor = LocalExecutor(
            Setup(str(candidates), bundle.digest, 0), scratch, greet=faketimer.greet, run=faketimer.run
        )
        try:
            yield [executor]
        finally:
            executor.shutdown()


def planned(dtype: str) -> BuildPlan:
    key = key_for(ON_H200, 13, 1024, 1536, 4, dtype, 512)
    return tuner.planned_for(key, tuner.shape_of(key))


@pytest.fixture
def layer() -> BuildPlan:
    """A layer of nobody's."""
    return planned("bf16")


@pytest.fixture
def unknown() -> BuildPlan:
    """A layer for which nothing ships, not even a candidate."""
    return planned("fp32")


def measured(planned: BuildPlan, answer: Path, names: Sequence[str] = ()) -> Bundle:
    cells = [(worker.plain(problem), list(buckets)) for problem, buckets in planned.buckets.items()]
    models = [
        (model.name, model.top_k, model.dtype.value, [worker.plain(problem) for problem in model.problems])
        for model in planned.models
    ]
    worker.measure_cells(cells, models, 90, 0, 60.0, None, names, answer)
    return codec.decode(answer.read_bytes(), "tuned now")


def nothing_compiles(monkeypatch: pytest.MonkeyPatch, error: Exception) -> list[list[Spec]]:
    asked: list[list[Spec]] = []

    def refuse(specs: Any, sm: int, cache: object) -> tuple[()]:
        asked.append(list(specs))
        raise error

    monkeypatch.setattr(worker, "compile_specs", refuse)
    return asked


@pytest.mark.slow
@pytest.mark.parametrize("error", [CompileError("no barrier"), HostError("no Triton here")])
def test_where_nothing_compiles_what_ships_is_measured(
    layer: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    nothing_compiles(monkeypatch, error)
    tuned = measured(layer, tmp_path / "answer")
    assert {*tuned.choices} == {*layer.problems}
    assert {choice.source for row in tuned.choices.values() for choice in row} == {Source.MEASURED}
    there = {incumbent.code.variant.cubin_sha256 for incumbent in Incumbents.on_search_path().codes(layer.problems, 90)}
    assert {variant.cubin_sha256 for variant in tuned.variants} <= there
    running = Incumbents.on_search_path().running(layer.buckets, ON_H200)
    assert tuned.producer.held_against == tuple(sorted({incumbent.bundle.hex()[:16] for incumbent in running.values()}))


@pytest.mark.parametrize("error", [CompileError("no barrier"), HostError("no Triton here")])
def test_where_there_is_nothing_at_all_the_reason_is_reported(
    unknown: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    nothing_compiles(monkeypatch, error)
    with pytest.raises(type(error), match=str(error)):
        measured(unknown, tmp_path / "answer")


def test_the_models_next_ones_are_compiled_where_the_first_can_not_be(
    layer: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Until each problem has one; then no more."""
    asked = nothing_compiles(monkeypatch, CompileError("no barrier"))
    with pytest.raises(CompileError):
        worker._candidates_beside(layer.buckets, (), 90, None)
    specs_asked = [spec for specs in asked for spec in specs]
    assert len(asked) > 2
    assert len(specs_asked) == len(set(specs_asked))
    assert all(specs for specs in asked)


@pytest.mark.slow
def test_what_only_the_callers_process_has_is_held_against(
    layer: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The overlay can't be written: the process measured before, and is asked again."""
    nothing_compiles(monkeypatch, CompileError("no barrier"))
    first = measured(layer, tmp_path / "first")
    file = tmp_path / "made.msgpack"
    file.write_bytes(codec.encode(first))
    file.chmod(0o600)
    again = measured(layer, tmp_path / "second", [file.name])
    with open_bundle(file) as opened:
        assert opened.digest.hex()[:16] in again.producer.held_against


def test_what_runs_instead_is_reported(layer: BuildPlan, unknown: BuildPlan) -> None:
    message = tuner._instead(layer.buckets, ON_H200)
    assert message.startswith("what runs instead is the ordinary choice, of catalogue-")
    cells = sum(map(len, unknown.buckets.values()))
    assert tuner._instead(unknown.buckets, ON_H200) == f"torch's grouped GEMM runs {cells} of {cells} cells"


def test_what_this_process_made_goes_to_the_child(tmp_path: Path) -> None:
    path = small_bundles.write(tmp_path / "kept.msgpack", {small_bundles.PROBLEM: [small_bundles.modelled(64, 0)]})
    with open_bundle(path) as opened:
        snapshot.keep(opened)
        snapshot.forget()  # what another test of this process took
        try:
            assert list(tuner._made_here(90).values()) == [path.read_bytes()]
            assert tuner._made_here(80) == {}
        finally:
            snapshot.forget_made()
            snapshot.forget()


@pytest.mark.slow
def test_without_triton_the_candidates_that_ship_are_measured(
    layer: BuildPlan, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Not only what the bundles have: the model's best of each cell."""
    monkeypatch.setattr(
        importlib.util,
        "find_spec",
        lambda name, real=importlib.util.find_spec: None if name == "triton" else real(name),
    )
    toolchain.toolchain.cache_clear()
    try:
        tuned = measured(layer, tmp_path / "answer")
    finally:
        toolchain.toolchain.cache_clear()
    assert {*tuned.choices} == {*layer.problems}
    assert {choice.source for row in tuned.choices.values() for choice in row} == {Source.MEASURED}
    with open_bundle(tmp_path / "answer.candidates") as bundle:
        took_part = {variant.cubin_sha256 for variant in bundle.variants()}
    in_bundles = {
        incumbent.code.variant.cubin_sha256 for incumbent in Incumbents.on_search_path().codes(layer.problems, 90)
    }
    shipped = {candidate.variant.cubin_sha256 for candidate in read_candidates(shipped_file(90)).compiled}
    assert took_part - in_bundles
    assert took_part <= in_bundles | shipped


PROBLEM = Problem(Op.DW, DType.FP32, 8, 256, 128)  # few candidates

# A script without a __main__ guard, and with a module that no child may import.
SCRIPT = """
import sys
print("begun", flush=True)
import pretuned.aot
from pretuned.artifacts.records import DType
from pretuned.artifacts.records import Op, Problem
from pretuned.artifacts.records import Gpu, LocalGpu
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
