"""A build without a GPU is never worse than no build: it takes over measured choices that ship, and models the rest."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import made
import pytest
from made import ANY, H100, H200, HOPPERS, NARROW, WIDE, Spec, measured, modelled

from pretuned.aot.build.build import build
from pretuned.aot.build.options import BuildOptions, Built
from pretuned.aot.bundle.merge import merge
from pretuned.aot.choose.bundle import assembled, choose_from
from pretuned.aot.choose.candidates import Candidates
from pretuned.aot.choose.incumbents import Incumbents, TakenOver
from pretuned.aot.compile.shipped import Shipped
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.journal.file import Contents, Header
from pretuned.aot.journal.records import Measured, Timing
from pretuned.aot.journal.timings import Timings
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import BuildPlan, plan, planned_on
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Bundle, Choice, DType, Fusion, Gpu, Layout, LocalGpu, Model, Op, Problem, Source
from pretuned.kernels.chips import chip_of
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import Ranker
from pretuned.kernels.entry import has_aligned_rows
from pretuned.kernels.spec import Config
from pretuned.runtime.dispatch.decide import Candidate, Decision, Match, Origin, settle
from pretuned.runtime.dispatch.places import Kind, Place, installed_places
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect import explain

ROOT = Path(__file__).parents[3]
MODELS = ROOT / "models.txt"
ONE = Problem(Op.FORWARD, DType.BF16, 8, 1024, 768)
TWO = Problem(Op.FORWARD, DType.BF16, 16, 2048, 768)
PLAN = BuildPlan({ONE: (32, 64, 128), TWO: (64,)}, (Model("mine", 1, 1, 2, DType.BF16, (ONE, TWO)),))
OWN = (*made.SPECS, Spec(Config(64, 128, 64, 4, 3)))
ARGUMENTS = (("x", "ptr"), ("w", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"))


def bundle(choices: Mapping[Problem, Sequence[Choice]], **how: Any) -> Bundle:
    """With arguments that a launcher fills."""
    found = made.bundle(choices, **how)
    return found._replace(variants=tuple(one._replace(arguments=ARGUMENTS) for one in found.variants))


def candidates() -> Candidates:
    """What was compiled here."""
    own = bundle({}, specs=OWN, tag="own")
    compiled = tuple(map(Compiled, own.variants, own.cubins))
    return Candidates(own.target, own.min_driver, own.producer, own.kernels, compiled)


def found_in(folder: Path, *bundles: Bundle, kind: Kind = Kind.INSTALLED) -> Incumbents:
    folder.mkdir(exist_ok=True)
    for i, one in enumerate(bundles):
        publish(folder / f"{i}.msgpack", codec.encode(one))
    place = Place(kind, folder)
    return Incumbents(Snapshot((), lambda: [place]) if kind is Kind.INSTALLED else Snapshot((place,)))


def built_of(taken: TakenOver | None, evidence: Timings | None = None) -> Bundle:
    every = candidates().with_codes(taken.codes) if taken else candidates()
    chosen = choose_from(PLAN, every, evidence, taken=taken)
    return assembled(PLAN, every, chosen, evidence, taken=taken)


def told(found: Bundle, problem: Problem = ONE) -> list[tuple[int, str, float, bytes]]:
    """Bucket, GPU or "modelled", us, cubin."""
    return [
        (
            one.bucket,
            found.gpus[one.gpu].name if one.gpu is not None else "modelled",
            one.time_ns / 1000,
            found.cubins[one.variant],
        )
        for one in found.choices[problem]
    ]


def test_measured_choices_come_along_with_times_gpus_and_code(tmp_path: Path) -> None:
    ships = bundle(
        {
            ONE: [
                measured(64, NARROW, 9, 0, second=WIDE),
                measured(64, WIDE, 5, 1),
                modelled(128, WIDE),
                measured(256, WIDE, 7, 0),
            ]
        },
        gpus=[H100, H200],
        tag="ships",
    )
    taken = found_in(tmp_path / "there", ships).measured(PLAN.buckets, 90)
    assert taken is not None
    made_now = built_of(taken)
    codec.decode(codec.encode(made_now), "it is a bundle")
    rows = told(made_now)
    assert [row[:3] for row in rows if row[1] != "modelled"] == [(64, H100.name, 9.0), (64, H200.name, 5.0)]
    assert [row[3] for row in rows if row[1] != "modelled"] == [ships.cubins[NARROW], ships.cubins[WIDE]]
    assert [row[0] for row in rows if row[1] == "modelled"] == [32, 128]  # the rest, and no bucket beyond the plan
    first = next(one for one in made_now.choices[ONE] if one.bucket == 64)
    assert first.runner_up is not None
    assert made_now.cubins[first.runner_up] == ships.cubins[WIDE]
    assert [source for _, source, *_ in told(made_now, TWO)] == ["modelled"]
    assert made_now.models == PLAN.models
    digest = next(iter(taken.sources)).hex()
    assert made_now.producer.held_against == (digest[:16],)
    assert {(one.kernel, one.revision) for one in made_now.variants} <= {
        (one.name, one.revision) for one in made_now.kernels
    }


def test_what_was_modelled_by_measured_neighbours_leaves_the_choice_to_the_gpu_that_is_there(tmp_path: Path) -> None:
    """A bundle that has measured nothing of its problems hides no choice by neighbours of another GPU."""
    ships = bundle({TWO: [measured(64, NARROW, 9, 0)]}, gpus=[H100], tag="ships")
    there = found_in(tmp_path / "there", ships)
    around = there.neighbourhood(90)
    assert there.measured({ONE: (64,)}, 90) is None
    assert around is not None
    chosen = choose_from(PLAN, candidates(), None, around=around)
    made_now = assembled(PLAN, candidates(), chosen, None, around=around)
    (digest,) = around.sources
    assert made_now.producer.held_against == (digest.hex()[:16],)
    assert {row[1] for row in told(made_now)} == {"modelled"}


def test_of_several_bundles_it_is_the_choice_that_merge_keeps(tmp_path: Path) -> None:
    first = bundle({ONE: [measured(32, NARROW, 3), measured(64, NARROW, 9)]}, gpus=[H100], tag="first")
    second = bundle({ONE: [measured(32, WIDE, 4), measured(64, WIDE, 8)]}, gpus=[H100], tag="second")
    taken = found_in(tmp_path / "there", first, second).measured(PLAN.buckets, 90)
    assert taken is not None
    kept = {row[0]: row[3] for row in told(built_of(taken)) if row[1] == H100.name}
    merged = {row[0]: row[3] for row in told(merge({"first": first, "second": second}).bundle)}
    assert kept == merged == {32: first.cubins[NARROW], 64: second.cubins[WIDE]}


@pytest.mark.parametrize("kind", [Kind.NAMED, Kind.OVERLAY, Kind.SYSTEM])
def test_other_places_of_this_machine_decide_no_bytes(tmp_path: Path, kind: Kind) -> None:
    there = found_in(tmp_path / "there", bundle({ONE: [measured(64, WIDE, 9)]}, gpus=[H100]), kind=kind)
    assert there.measured(PLAN.buckets, 90) is None


def test_nothing_measured_is_nothing_to_take_over(tmp_path: Path) -> None:
    only_modelled = bundle({ONE: [modelled(64, WIDE)]})
    other_capability = bundle({ONE: [measured(64, WIDE, 9)]}, sm=80, gpus=[made.A100])
    assert found_in(tmp_path / "there", only_modelled, other_capability).measured(PLAN.buckets, 90) is None
    assert built_of(None).producer.held_against == ()


def test_code_that_this_version_can_not_launch_stays_behind(tmp_path: Path) -> None:
    specs = (replace(made.SPECS[WIDE], abi=2), replace(made.SPECS[NARROW], shared_bytes=300 << 10), made.SPECS[ANY])
    rows = [measured(32, WIDE, 9), measured(64, NARROW, 9), measured(128, ANY, 9, second=WIDE)]
    ships = bundle({ONE: rows}, gpus=[H100], specs=specs, tag="ships")
    made_now = built_of(found_in(tmp_path / "there", ships).measured(PLAN.buckets, 90))
    assert [row[:2] for row in told(made_now)] == [(32, "modelled"), (64, "modelled"), (128, H100.name)]
    assert next(one for one in made_now.choices[ONE] if one.bucket == 128).runner_up is None


def test_a_kernel_of_the_same_revision_and_other_source_stays_behind(tmp_path: Path) -> None:
    ships = bundle({ONE: [measured(64, WIDE, 9)]}, gpus=[H100], tag="ships")
    other = ships._replace(kernels=tuple(one._replace(source_sha256=bytes(32)) for one in ships.kernels))
    made_now = built_of(found_in(tmp_path / "there", other).measured(PLAN.buckets, 90))
    assert {row[1] for row in told(made_now)} == {"modelled"}


def test_what_this_build_has_times_of_stays(tmp_path: Path) -> None:
    """Of the GPU that a journal is of; that of another GPU is taken over beside it."""
    ships = bundle(
        {ONE: [measured(64, NARROW, 9, 0), measured(64, WIDE, 5, 1)], TWO: [measured(64, WIDE, 5, 1)]},
        gpus=[H100, H200],
        tag="ships",
    )
    own = candidates().compiled
    timings = tuple(
        Timing(one.variant.cubin_sha256, (4000 + 500 * i,) * 2, 0.001, 20, 0.001) for i, one in enumerate(own)
    )
    record = Measured(ONE, 64, own[0].variant.cubin_sha256, timings, None, None, 1.0, 13000, None, ())
    evidence = Timings.of(Contents(Header(90, H200, ()), (record,), 0, 0))
    made_now = built_of(found_in(tmp_path / "there", ships).measured(PLAN.buckets, 90), evidence)
    at_64 = {row[1]: row[3] for row in told(made_now) if row[0] == 64}
    assert at_64 == {H200.name: own[0].cubin, H100.name: ships.cubins[NARROW]}
    assert [row[1] for row in told(made_now, TWO)] == [H200.name]


def test_a_product_under_its_other_name_is_the_same(tmp_path: Path) -> None:
    """dX of [E, N, K] was measured, the plan has the forward of [E, K, N]."""
    wanted = Problem(Op.FORWARD, DType.BF16, 8, 1024, 768, Layout.KN)
    twin = wanted.transposed
    assert twin is not None
    specs = tuple(replace(one, op=twin.op, layout=twin.layout) for one in made.SPECS)
    ships = bundle({twin: [measured(64, NARROW, 9)]}, gpus=[H100], specs=specs)
    taken = found_in(tmp_path / "there", ships).measured({wanted: (64,)}, 90)
    assert taken is not None
    assert [one.bucket for one in taken.bundle.choices[wanted]] == [64]


@pytest.fixture(scope="module")
def from_models(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """The README's build, of 9.0, on a machine without a GPU."""
    listed = plan(load_models([str(MODELS)]).shapes)
    options = BuildOptions(tmp_path_factory.mktemp("out"), shipped=Shipped.found)
    (built,) = build(listed, (90,), options).bundles
    return built


@pytest.mark.slow
@pytest.mark.parametrize("gpu", HOPPERS, ids=lambda gpu: gpu.name)
def test_no_problem_of_models_txt_is_slower_with_the_bundle(from_models: Built, gpu: Gpu) -> None:
    """What was measured runs as before. Elsewhere the cost model, asked of this very GPU, has more to choose among."""
    local = LocalGpu(90, gpu)
    without = Snapshot((), installed_places)
    beside = Snapshot((Place(Kind.NAMED, from_models.path.parent),), installed_places)
    cells = planned_on(plan(load_models([str(MODELS)]).shapes), (90,)).buckets
    counted = {"measured": 0, "modelled": 0}
    for problem, buckets in cells.items():
        for bucket in buckets:
            before, now = (picked(one, problem, bucket, local) for one in (without, beside))
            assert now.origin <= before.origin
            if now.variant.cubin_sha256 == before.variant.cubin_sha256:
                assert (now.origin, now.match) == (before.origin, before.match)
            else:
                assert before.match is Match.COST_MODEL
                assert modelled_us(now, problem, bucket, gpu) <= modelled_us(before, problem, bucket, gpu)
            counted["measured" if before.origin <= Origin.THIS_CAPABILITY else "modelled"] += 1
            if before.origin > Origin.THIS_CAPABILITY or problem.fusion not in (Fusion.GATHER, Fusion.SILU):
                continue
            assert as_run(beside, problem, bucket, local) == as_run(without, problem, bucket, local)
    assert counted == {"measured": 2905, "modelled": 12}


def picked(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu) -> Candidate:
    found = settle(snapshot, problem, bucket, local, has_aligned_rows(problem), False)
    assert isinstance(found, Decision)
    return found.chosen


def modelled_us(one: Candidate, problem: Problem, bucket: int, gpu: Gpu) -> float:
    ranker = Ranker([Resources.of(one.variant)], problem.canonical.op, problem.dtype, chip_of(gpu, 90))
    ((us, _),) = ranker.rank(problem.canonical, bucket)
    return us


def as_run(snapshot: Snapshot, problem: Problem, bucket: int, local: LocalGpu) -> tuple[bytes | None, str]:
    """Whether rows are gathered beforehand, or silu is in the epilogue; by which code, and why."""
    if problem.fusion is Fusion.GATHER:
        found = explain.rows_first(snapshot, problem, bucket, local, top_k=8, fusion=problem.fusion, aligned=True)
    else:
        found = explain.fused_silu(snapshot, problem, bucket, local, top_k=1, aligned=True)
    return (None, "") if found is None else (found.chosen and found.chosen.variant.cubin_sha256, found.reason)


@pytest.mark.slow
def test_it_loses_what_ships_loses(from_models: Built) -> None:
    """By the H100's times. All modelled it lost 2.4 % in the mean, 328 cells over 2 %, the worst 88 %."""
    found = []
    for path in (from_models.path, ROOT / "artifacts/bundles/catalogue-sm90.msgpack"):
        journal = ROOT / "benchmarks/results/catalogue-h100.journal.xz"
        command = [sys.executable, ROOT / "benchmarks/run.py", "shipped", path, journal, "--models", MODELS, "--json"]
        found.append(json.loads(subprocess.check_output(command)))
    for name in ("choices", "as_timed", "beyond_noise", "by_rows", "in_records"):
        assert found[0][name] == found[1][name]
    assert found[0]["in_records"]["mean_loss"] < 0.0005


@pytest.mark.slow
def test_what_it_tells_of_each_model(from_models: Built) -> None:
    assert (from_models.choices, from_models.measured, from_models.taken_over) == (5822, 5810, 5810)
    assert (from_models.modelled, from_models.source) == (12, "measured and modelled")
    assert [gpu.name for gpu in from_models.gpus] == [H100.name, H200.name]
    told = {one.name: one for one in from_models.by_model}
    assert len(told) == from_models.models
    assert {name for name, one in told.items() if not one.ships_measured} == {"example"}
    assert told["example"].to_dict() == {"name": "example", "cells": 186, "shipped_measured": 174, "measured": 174}
    with open_bundle(from_models.path) as opened:
        sources = {one.source for problem in opened.problems() for one in opened.find(problem)}
    assert sources == {Source.MEASURED, Source.MODELLED}


@pytest.mark.slow
def test_without_what_is_installed_all_is_modelled(tmp_path: Path) -> None:
    listed = plan(load_models(["Qwen/Qwen3-30B-A3B ops=forward tokens=1..64"]).shapes)
    measured_here = {}
    for take_over in (True, False):
        options = BuildOptions(tmp_path / str(take_over), shipped=Shipped.found, take_over=take_over)
        (built,) = build(listed, (90,), options).bundles
        measured_here[take_over] = (built.measured > 0, built.modelled > 0)
    assert measured_here == {True: (True, False), False: (False, True)}
