"""The cells and variants to measure, and a bundle's choices for them."""

from __future__ import annotations

import hashlib
from pathlib import Path

import faketimer
import pytest
from tuning import gpus, last

from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Measured
from pretuned.aot.plan.plan import BuildPlan
from pretuned.aot.tune.space import TuningSpace, fits
from pretuned.aot.tune.tuner import Entrants, tune_problems
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Choice, DType, LocalGpu, Op, Problem, Source
from pretuned.kernels.spec import Config
from pretuned.runtime.dispatch.neighbours import Near, Neighbourhood
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot, Usable, View

pytestmark = pytest.mark.slow


def test_what_another_bundle_has_for_a_cell_is_asked(candidates: Path, small_plan: BuildPlan) -> None:
    with open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1, bundle)
        alone = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        for problem, buckets in small_plan.buckets.items():
            for choice in bundle.find(problem):
                named = [i for i in (choice.variant, choice.runner_up) if i is not None]
                assert ground.elsewhere(problem, choice.bucket) == [bundle.variant(i).config for i in named]
                assert alone.elsewhere(problem, choice.bucket) == []
            assert ground.elsewhere(problem, 2 * buckets[-1]) == []
        assert ground.elsewhere(problem._replace(E=problem.E + 1), 1) == []


def with_wider_tiles(candidates: Path, path: Path) -> Path:
    """The candidates, and of each aligned one three more with other tiles, whose code nobody runs."""
    with open_bundle(candidates) as bundle:
        loaded = bundle.load()
    variants, cubins = list(loaded.variants), list(loaded.cubins)
    for variant, cubin in zip(loaded.variants, loaded.cubins, strict=True):
        for n in (16, 128, 256) if isinstance(variant.op, Op) and variant.alignment > 1 else ():
            config, code = Config.from_pairs(variant.config)._replace(block_n=n), cubin[:-1] + bytes([n % 255])
            variants.append(variant._replace(config=config.pairs(), cubin_sha256=hashlib.sha256(code).digest()))
            cubins.append(code)
    publish(path, codec.encode(loaded._replace(variants=tuple(variants), cubins=tuple(cubins))))
    return path


def test_it_is_measured_beside_the_models_first(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    """Of each cell the variant that the model puts last: without it two others are measured."""
    candidates = with_wider_tiles(candidates, tmp_path / "candidates.msgpack")
    with gpus(candidates) as here, open_bundle(candidates) as bundle:
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        worst = {
            problem: tuple(Choice(M, ground.ranked(problem, M)[-1][1], Source.MODELLED, 1000) for M in buckets)
            for problem, buckets in ground.cells.items()
        }
        publish(tmp_path / "like.msgpack", codec.encode(bundle.load()._replace(choices=worst)))
        like = Entrants(like=tmp_path / "like.msgpack")
        tune_problems(small_plan.buckets, candidates, tmp_path / "journal", executors=here, entrants=like)
        for record in read_journal(tmp_path / "journal").records:
            assert isinstance(record, Measured)
            names = {bundle.variant(i).config for _, i in ground.ranked(record.problem, record.bucket)}
            assert len(names) in (1, 8)
            tried = {sha: ground.index[record.problem, sha] for sha in (timing.variant for timing in record.timings)}
            assert last(ground, record.problem, record.bucket) in {bundle.variant(i).config for i in tried.values()}
            assert len(tried) == min(4, len(names))


def test_what_does_not_fit_the_memory_is_left_modelled(candidates: Path, small_plan: BuildPlan, tmp_path: Path) -> None:
    problem = small_plan.problems[0]
    assert fits(problem, 1 << 20, 143771)
    assert not fits(problem, 1 << 31, 143771)
    assert not fits(Problem(Op.FORWARD, DType.BF16, 256, 4096, 7168), 16, 16_000)  # 15 GB of weights
    with gpus(candidates) as here:
        outcome = tune_problems({problem: (16, 1 << 31)}, candidates, tmp_path / "journal", executors=here)
    assert (outcome.total, outcome.measured, outcome.too_large, outcome.left) == (2, 1, 1, 0)


def test_what_is_measured_around_comes_first(candidates: Path, small_plan: BuildPlan) -> None:
    """The variant that the model puts last won in all like cells: the shortlist begins with it."""
    with open_bundle(candidates) as bundle:
        alone = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1)
        problem = next(problem for problem in alone.cells if len(alone.able[problem]) > 1)
        bucket = alone.cells[problem][-1]
        worst, first = (alone.ranked(problem, bucket)[at][1] for at in (-1, 0))
        bundle_set = Snapshot([])
        view = View((Usable(0, Place(Kind.NAMED, candidates), bundle),), ())
        around = Neighbourhood(bundle_set, LocalGpu(90, faketimer.H200), view)
        number, _ = around.numbered(bundle.variant(worst))
        near = Near({number: 0.0}, 9.0, 1, problem, faketimer.H200)
        around.near = lambda *cell, **how: near  # type: ignore[method-assign]
        ground = TuningSpace.of(small_plan.buckets, bundle, faketimer.H200, 90, 0.1, around=around)
        ranked = [i for _, i in ground.ranked(problem, bucket)]
        assert ranked[0] == worst != first
        assert sorted(ranked) == sorted(i for _, i in alone.ranked(problem, bucket))
