"""The measurement itself, on a real GPU with real candidates. Set PRETUNED_TEST_CANDIDATES to a bundle of them
(``aot compile``) where no Triton of this machine's can compile some."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import FAULT, ROUTINGS, WRONG, Measured, geometric_mean
from pretuned.aot.plan.families import serves
from pretuned.aot.tune.tuner import Entrants, TuneObservers, tune_problems
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU")

MODEL = "shape:E=16,H=512,I=256,k=2 tokens=1..64 name=small"
E, N, K = 16, 512, 512


@pytest.fixture(scope="module")
def candidates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Real cubins for this GPU."""
    candidates_path = os.environ.get("PRETUNED_TEST_CANDIDATES")
    if candidates_path:
        return Path(candidates_path)
    pytest.importorskip("triton")
    path = tmp_path_factory.mktemp("candidates") / "candidates.msgpack"
    command = [sys.executable, "-m", "pretuned.aot", "compile", "--models", MODEL, "-o", str(path)]
    subprocess.run(command, check=True, capture_output=True)
    return path


def test_a_cell_is_measured_and_kept(candidates: Path, tmp_path: Path) -> None:
    """Every op and form of one shape; the whole way through a worker process."""
    with open_bundle(candidates) as bundle:
        kinds = {
            (variant.op, variant.layout, variant.fusion) for variant in bundle.variants() if isinstance(variant.op, Op)
        }
    problems = {
        Problem(op, DType.BF16, E, N, K, layout, fusion): (16, 1024) for op, layout, fusion in sorted(kinds, key=str)
    }
    journal = tmp_path / "here.journal"
    notes: list[str] = []
    outcome = tune_problems(problems, candidates, journal, observers=TuneObservers(on_note=notes.append))
    assert outcome.measured == 2 * len(problems), notes
    assert not outcome.failures
    assert outcome.finished
    contents = read_journal(journal)
    for record in contents.records:
        assert isinstance(record, Measured)
        assert len(record.timings) >= (2 if record.problem.fusion is Fusion.NONE else 1)
        assert record.timings[0].variant == record.modelled
        assert 0.5 < record.drift < 2.0
        for timing in record.timings:
            assert len(timing.ns) == len(ROUTINGS)
            assert 1_000 < timing.time_ns < 1_000_000
            assert 0 < timing.error < 1e-2
            assert timing.noise < 0.2
        plain = record.problem.fusion is Fusion.NONE and record.problem.layout is Layout.NK
        assert (record.torch_ns is not None) == plain
        assert (record.plain is not None) == bool(record.problem.fusion & (Fusion.GATHER | Fusion.SILU))
        if record.plain is not None:  # in turns with the form, which takes about as long
            sha, ns = record.plain
            product = record.problem._replace(fusion=Fusion.NONE)
            beside = next(
                other for other in contents.records if (other.problem, other.bucket) == (product, record.bucket)
            )
            assert isinstance(beside, Measured)
            assert min(beside.timings, key=lambda timing: (timing.time_ns, timing.variant)).variant == sha
            assert len(ns) == len(ROUTINGS)
            assert 0.5 < geometric_mean(ns) / min(timing.time_ns for timing in record.timings) < 2.0
    again = tune_problems(problems, candidates, journal)
    assert (again.measured, again.in_journal) == (0, outcome.measured)


def test_a_variant_with_wrong_numbers_is_out(candidates: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The reference of another weight: no variant agrees with it."""
    from pretuned.aot.measure import bench
    from pretuned.aot.measure.bench import NumericsCheck
    from pretuned.aot.measure.inputs import Tensors
    from pretuned.aot.measure.job import MeasureJob, Setup

    with open_bundle(candidates) as bundle:
        variants = bundle.variants()
        digest = bundle.digest
    problem = Problem(Op.FORWARD, DType.BF16, E, N, K)
    first = next(i for i, variant in enumerate(variants) if serves(variant, problem))
    before = NumericsCheck.reference

    def other(self: NumericsCheck, on: Tensors, counts: list[int]) -> torch.Tensor:
        return before(self, on, counts) * 1.02

    monkeypatch.setattr(NumericsCheck, "reference", other)
    result = bench.run(Setup(str(candidates), digest, 0), MeasureJob(problem, 64, (first,)))
    assert result.measured is None
    assert not result.broken
    assert [failure.kind for failure in result.failures] == [WRONG]
    assert "relative error 0.02" in result.failures[0].reason


def test_a_fault_on_the_gpu_is_contained(candidates: Path, tmp_path: Path) -> None:
    """A variant that reads its weights at address 0: an illegal access, after which its process is of no use."""
    with open_bundle(candidates) as opened:
        bundle = opened.load()
    problem = Problem(Op.FORWARD, DType.BF16, E, N, K)
    bad = next(
        i for i, variant in enumerate(bundle.variants) if serves(variant, problem) and not dict(variant.config)["tma"]
    )
    swapped = {"w": "index", "index": "w"}
    arguments = tuple((swapped.get(name, name), kind) for name, kind in bundle.variants[bad].arguments)
    broken = bundle.variants[bad]._replace(arguments=arguments)
    variants = (*bundle.variants[:bad], broken, *bundle.variants[bad + 1 :])
    path = tmp_path / "broken.msgpack"
    publish(path, codec.encode(bundle._replace(variants=variants)))
    journal = tmp_path / "here.journal"
    outcome = tune_problems({problem: (64, 1024)}, path, journal, entrants=Entrants(share=1.0))
    assert [failure.kind for failure in outcome.failures] == [FAULT]
    assert outcome.failures[0].variant == broken.cubin_sha256
    assert "illegal memory access" in outcome.failures[0].reason
    assert (outcome.measured, outcome.left) == (2, 0)
    for record in read_journal(journal).records:
        if isinstance(record, Measured):
            assert broken.cubin_sha256 not in {timing.variant for timing in record.timings}
            assert len(record.timings) > 10
