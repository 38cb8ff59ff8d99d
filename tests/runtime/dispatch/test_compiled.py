"""The last resort: what a compiler makes, once allowed. (tests/aot/demand/test_worker.py has the real compiler.)"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from emulated_driver import EmulatedGpu, emulated
from small_bundles import (
    ANY,
    NARROW,
    ON_A100,
    ON_H200,
    ON_L40S,
    OTHER,
    PROBLEM,
    SPECS,
    WIDE,
    Spec,
    bundle,
    modelled,
    snapshot,
    write,
)

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import CompileError, InputError, ProblemNotInBundle
from pretuned.artifacts.records import DType, Problem
from pretuned.runtime import allow_jit, hooks, register_compiler
from pretuned.runtime.dispatch import compiled
from pretuned.runtime.dispatch.decide import Decision, Match, Miss, Origin, decide
from pretuned.runtime.dispatch.places import Kind
from pretuned.runtime.inspect.explain import examine

HALF = PROBLEM._replace(dtype=DType.FP16)


class Compiler:
    """Makes a small bundle of made-up code, and remembers what it was asked."""

    def __init__(self, error: Exception | None = None) -> None:
        self.asked: list[tuple[Problem, int]] = []
        self.error = error

    def __call__(self, problem: Problem, sm: int) -> bytes:
        self.asked.append((problem, sm))
        if self.error is not None:
            raise self.error
        specs = [replace(spec, dtype=problem.dtype) for spec in SPECS]
        return encode(bundle({problem: [modelled(64, NARROW)]}, sm=sm, specs=specs, tag="compiled"))


@pytest.fixture
def compiler(clean_places: Path) -> Iterator[Compiler]:
    """A compiler that is registered, and not allowed yet."""
    before, compiler = hooks._compiler, Compiler()
    register_compiler(compiler)
    compiled.forget()
    yield compiler
    compiled.forget()
    allow_jit(False)
    register_compiler(before)


def test_without_being_allowed_nothing_is_compiled(compiler: Compiler, tmp_path: Path) -> None:
    assert isinstance(decide(snapshot(tmp_path), PROBLEM, 64, ON_H200), Miss)
    assert examine(snapshot(tmp_path), PROBLEM, 64, ON_H200, aligned=True).runs == "torch"
    assert not compiler.asked


def test_explain_says_what_a_call_would_do_and_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    bundle_set = snapshot(tmp_path)
    explanation = examine(bundle_set, PROBLEM, 64, ON_H200, aligned=True)
    assert explanation.runs == explanation.to_dict()["runs"] == "jit"
    assert "what Triton compiles in the first call" in str(explanation)
    assert not compiler.asked
    decide(bundle_set, PROBLEM, 64, ON_H200)
    assert examine(bundle_set, PROBLEM, 64, ON_H200, aligned=True).runs == "bundle"
    compiler.error = CompileError("no")
    decide(bundle_set, HALF, 64, ON_H200)
    assert examine(bundle_set, HALF, 64, ON_H200, aligned=True).runs == "torch"


def test_it_is_compiled_once_for_every_shape_of_the_kind(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    bundle_set = snapshot(tmp_path)
    for problem, M, aligned in ((PROBLEM, 64, True), (PROBLEM, 4096, True), (PROBLEM, 64, False), (OTHER, 7, True)):
        got = decide(bundle_set, problem, M, ON_H200, aligned=aligned)
        assert isinstance(got, Decision)
        assert got.chosen.origin is Origin.COMPILED
        assert got.chosen.usable.place.kind is Kind.PROCESS
        assert got.reason.startswith("compiled now by Triton")
        assert aligned or got.chosen.index == ANY
    assert compiler.asked == [(PROBLEM, 90)]
    assert isinstance(decide(snapshot(tmp_path), PROBLEM, 64, ON_H200), Decision)  # another snapshot: not again
    assert compiler.asked == [(PROBLEM, 90)]
    decide(bundle_set, HALF, 64, ON_H200)
    decide(bundle_set, PROBLEM, 64, ON_A100)
    assert compiler.asked[1:] == [(HALF, 90), (PROBLEM, 80)]


def test_it_is_the_last_resort(compiler: Compiler, tmp_path: Path) -> None:
    """8.0 code that runs on 8.9 goes before it; where that needs too much shared memory, it does not."""
    allow_jit()
    write(tmp_path / "a/sm80.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    got = decide(snapshot(tmp_path / "a"), PROBLEM, 64, ON_L40S)
    assert isinstance(got, Decision)
    assert got.chosen.origin is Origin.COMPATIBLE
    assert not compiler.asked
    big = [Spec(SPECS[WIDE].config, shared_bytes=150 << 10)]
    write(tmp_path / "b/sm80.msgpack", {PROBLEM: [modelled(64, 0)]}, sm=80, specs=big)
    got = decide(snapshot(tmp_path / "b"), PROBLEM, 64, ON_L40S)
    assert isinstance(got, Decision)
    assert got.chosen.origin is Origin.COMPILED


def test_what_was_compiled_never_displaces_a_bundle(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, 0)]}, specs=[SPECS[WIDE]])  # no unaligned variant
    bundle_set = snapshot(tmp_path)
    unaligned = decide(bundle_set, PROBLEM, 64, ON_H200, aligned=False)
    assert isinstance(unaligned, Decision)
    assert unaligned.chosen.origin is Origin.COMPILED
    for problem, match in ((PROBLEM, Match.EXACT), (OTHER, Match.COST_MODEL)):
        aligned = decide(bundle_set, problem, 64, ON_H200)
        assert isinstance(aligned, Decision)
        assert (aligned.chosen.origin, aligned.chosen.match) == (Origin.MODELLED, match)
    explanation = examine(bundle_set, OTHER, 64, ON_H200, aligned=True)
    assert [candidate.origin for candidate in explanation.candidates] == sorted(
        candidate.origin for candidate in explanation.candidates
    )
    assert explanation.candidates[-1].origin is Origin.COMPILED


def test_never_in_a_graph_capture(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    bundle_set = snapshot(tmp_path)
    with emulated(EmulatedGpu()) as gpu:
        gpu.capturing = True
        assert isinstance(decide(bundle_set, PROBLEM, 64, ON_H200), Miss)
        assert not compiler.asked
        gpu.capturing = False
        assert isinstance(decide(bundle_set, PROBLEM, 64, ON_H200), Decision)


def test_what_does_not_compile_falls_to_torch_with_the_reason(
    compiler: Compiler, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    allow_jit()
    compiler.error = CompileError("ptxas: no")
    bundle_set = snapshot(tmp_path)
    for M in (1, 64):
        got = decide(bundle_set, PROBLEM, M, ON_H200)
        assert isinstance(got, Miss)
        assert "could not be compiled: ptxas: no" in got.reason
    assert len(compiler.asked) == 1
    assert [record.levelno for record in caplog.records] == [logging.WARNING] * 3  # begun, failed, torch runs


def test_strict_compiles_nothing(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    with pytest.raises(ProblemNotInBundle):
        decide(snapshot(tmp_path), PROBLEM, 64, ON_H200, strict=True)
    assert not compiler.asked
    bundle_set = snapshot(tmp_path)
    decide(bundle_set, PROBLEM, 64, ON_H200)
    with pytest.raises(ProblemNotInBundle):
        decide(bundle_set, PROBLEM, 64, ON_H200, strict=True)


def test_the_fingerprint_tells_who_may_compile_and_not_what_was(compiler: Compiler, tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    bundle_set = snapshot(tmp_path)
    without = bundle_set.fingerprint(ON_H200)
    allow_jit()
    allowed = bundle_set.fingerprint(ON_H200)
    decide(bundle_set, HALF, 64, ON_H200)
    assert compiler.asked
    assert bundle_set.fingerprint(ON_H200) == allowed != without


def test_it_needs_a_compiler(clean_places: Path) -> None:
    before = hooks._compiler
    register_compiler(None)
    try:
        with pytest.raises(InputError, match=r"import pretuned\.aot"):
            allow_jit()
        allow_jit(False)
        assert not hooks.jit_allowed()
    finally:
        register_compiler(before)


def test_a_compiler_that_was_taken_out(compiler: Compiler, tmp_path: Path) -> None:
    allow_jit()
    register_compiler(None)
    missed = decide(snapshot(tmp_path), PROBLEM, 64, ON_H200)
    assert isinstance(missed, Miss)
    assert missed.reason.endswith("(allow_jit: no compiler is registered)")
