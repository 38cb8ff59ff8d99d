"""Choices for a problem that no bundle has, by the measured cells around it."""

from __future__ import annotations

import math
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import craft
import msgpack
import pytest
from small_bundles import (
    ANY,
    H100,
    H200,
    NARROW,
    ON_A100,
    ON_H100,
    ON_H200,
    PROBLEM,
    SPECS,
    WIDE,
    Spec,
    bundle,
    measured,
    modelled,
    snapshot,
    write,
)

from pretuned.artifacts.bundle_file import open_bytes
from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Choice, Layout, LocalGpu, Op, Problem
from pretuned.runtime import self_test_results
from pretuned.runtime.dispatch.decide import Decision, Match, Origin, decide
from pretuned.runtime.dispatch.decide import modelled as by_model
from pretuned.runtime.dispatch.neighbours import Neighbourhood
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import examine

SIZES = [(E, 1024, K) for E in (6, 8, 12) for K in (640, 768, 1024)]
ASKED = PROBLEM._replace(E=10, N=896, K=832)
SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles" / "catalogue-sm90.msgpack"


def around(index: int, second: int, time_us: float = 50, gpu: int = 0) -> dict[Problem, list[Choice]]:
    """Nine shapes around the one that is asked for, each with a choice at three numbers of rows."""
    rows = [measured(M, index, time_us, gpu, second) for M in (32, 64, 128)]
    rows = [row._replace(runner_up_ns=2 * row.time_ns) for row in rows]
    return {PROBLEM._replace(E=E, N=N, K=K): rows for E, N, K in SIZES}


def decision(bundle_set: Snapshot, local: LocalGpu = ON_H200, problem: Problem = ASKED, **how: bool) -> Decision:
    got = decide(bundle_set, problem, 64, local, **how)
    assert isinstance(got, Decision), got
    return got


@pytest.mark.parametrize("winner", [WIDE, NARROW])
def test_what_won_around_is_chosen_whatever_the_cost_model_says(tmp_path: Path, winner: int) -> None:
    write(tmp_path / "a.msgpack", around(winner, WIDE + NARROW - winner), gpus=[H200])
    got = decision(snapshot(tmp_path))
    assert got.chosen.index == winner
    assert (got.chosen.origin, got.chosen.match) == (Origin.MODELLED, Match.COST_MODEL)
    shapes = r"like [89] measured shapes near it, the nearest E=12 N=1024 K=768 on this GPU: no bundle has this problem"
    assert re.match(shapes, got.reason)
    assert got.chosen.time_us == pytest.approx(50, rel=0.4)


def test_explain_has_the_same_first_and_all_others_after_it(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", around(NARROW, WIDE), gpus=[H200])
    bundle_set = snapshot(tmp_path)
    explanation = examine(bundle_set, ASKED, 64, ON_H200, aligned=True, strict=False)
    first, *others = (candidate.index for candidate in explanation.candidates)
    assert (first, sorted(others)) == (NARROW, [WIDE, ANY])
    assert explanation.reason == decision(bundle_set).reason
    assert "measured shapes near it" in str(explanation)


def test_this_gpus_own_count_else_those_of_the_one_most_like_it(tmp_path: Path) -> None:
    rows = {problem: [*row, *around(NARROW, WIDE, gpu=1)[problem]] for problem, row in around(WIDE, NARROW).items()}
    rows = {problem: sorted(row, key=lambda choice: choice.sort_key) for problem, row in rows.items()}
    write(tmp_path / "a.msgpack", rows, gpus=[H100, H200])
    bundle_set = snapshot(tmp_path)
    assert decision(bundle_set, ON_H100).chosen.index == WIDE
    assert decision(bundle_set, ON_H200).chosen.index == NARROW
    another = decision(bundle_set, LocalGpu(90, H200._replace(name="NVIDIA GH200 144G HBM3e", memory_mib=146831)))
    assert another.chosen.index == NARROW
    assert "on NVIDIA H200: no bundle" in another.reason


def test_a_gpu_that_measured_nothing_of_the_kind_counts_for_nothing(tmp_path: Path) -> None:
    """The H200 has choices of dX alone: a forward goes by the H100's."""
    other = {
        problem._replace(op=Op.DX, N=problem.K, K=problem.N): row
        for problem, row in around(WIDE, NARROW, gpu=1).items()
    }
    specs = [*SPECS, *(replace(spec, op=Op.DX) for spec in SPECS)]
    other = {
        problem: [choice._replace(variant=choice.variant + 3, runner_up=NARROW + 3) for choice in row]
        for problem, row in other.items()
    }
    write(tmp_path / "a.msgpack", {**around(NARROW, WIDE), **other}, gpus=[H100, H200], specs=specs)
    got = decision(snapshot(tmp_path))
    assert got.chosen.index == NARROW
    assert H100.name in got.reason


def test_without_measured_choices_the_cost_model_decides_alone(tmp_path: Path) -> None:
    rows = {problem: [modelled(64, NARROW)] for problem in around(NARROW, WIDE)}
    write(tmp_path / "a.msgpack", rows)
    got = decision(snapshot(tmp_path))
    assert got.reason.startswith("the cost model's choice among the bundles' variants")
    assert got.chosen.near is None
    write(tmp_path / "b/old.msgpack", around(NARROW, WIDE), sm=80, gpus=[H100])
    assert decision(snapshot(tmp_path / "b"), ON_A100, aligned=False).reason.startswith("the cost model's")


def test_what_cannot_run_the_call_is_not_chosen(tmp_path: Path) -> None:
    """For that it needs aligned rows, takes fewer experts, or was found wrong."""
    specs = [SPECS[WIDE], replace(SPECS[NARROW], max_experts=14), SPECS[ANY]]
    path = write(tmp_path / "a.msgpack", around(NARROW, WIDE), gpus=[H200], specs=specs)
    bundle_set = snapshot(tmp_path)
    assert decision(bundle_set, problem=ASKED._replace(E=15)).chosen.index == WIDE
    assert decision(bundle_set, problem=ASKED._replace(E=14)).chosen.index == NARROW
    assert decision(bundle_set, aligned=False).chosen.index == ANY
    assert decision(bundle_set, problem=ASKED._replace(K=833), aligned=False).chosen.index == ANY
    wrong = bundle(around(NARROW, WIDE), gpus=[H200], specs=specs).variants[NARROW]
    self_test_results.leave_out(wrong, ON_H200)
    assert decision(snapshot(path)).chosen.index == WIDE


def test_the_same_variant_of_another_bundle_is_known_by_its_config(tmp_path: Path) -> None:
    """One bundle has measured what another has code of, too: of both the first runs."""
    write(tmp_path / "1/code.msgpack", {PROBLEM._replace(E=512): [modelled(64, WIDE)]}, tag="code")
    write(tmp_path / "2/measured.msgpack", around(NARROW, WIDE), gpus=[H200])
    got = decision(snapshot(tmp_path / "1", tmp_path / "2"))
    assert (got.chosen.usable.path.stem, got.chosen.index) == ("code", NARROW)
    assert got.chosen.near is not None


def test_the_products_other_name_counts(tmp_path: Path) -> None:
    """dX of w [E, K, N] is the forward of [E, N, K], in the bundle and in the call."""
    rows = {problem.transposed: row for problem, row in around(NARROW, WIDE).items() if problem.transposed}
    specs = [replace(spec, op=Op.DX, layout=Layout.KN) for spec in SPECS]
    write(tmp_path / "a.msgpack", rows, gpus=[H200], specs=specs)
    bundle_set = snapshot(tmp_path)
    called = ASKED.transposed
    assert called is not None
    for problem in (ASKED, called):
        got = decision(bundle_set, problem=problem)
        assert got.chosen.index == NARROW
        assert got.chosen.near is not None


def test_what_this_process_made_decides_nothing_else(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", around(WIDE, NARROW), gpus=[H200])
    bundle_set = snapshot(tmp_path)
    near = {ASKED._replace(K=816): [measured(M, NARROW, 9, second=WIDE) for M in (32, 64, 128)]}
    bundle_set.add(open_bytes(encode(bundle(near, gpus=[H200], tag="made")), "made now"))
    assert decision(bundle_set).chosen.index == WIDE


def test_a_bundle_that_was_held_against_others_decides_nothing_else(tmp_path: Path) -> None:
    """It changes its own cells alone: of others nobody measured that it is not slower."""
    write(tmp_path / "1/before.msgpack", around(WIDE, NARROW), gpus=[H200])
    near = {ASKED._replace(K=816): [measured(M, NARROW, 9, second=WIDE) for M in (32, 64, 128)]}
    added = bundle(near, gpus=[H200], tag="added")
    held = added._replace(producer=added.producer.with_held_against(["ab" * 32]))
    (tmp_path / "2").mkdir()
    for evidence, counts in ((held, False), (added, True)):
        publish(tmp_path / "2/added.msgpack", encode(evidence))
        near_to = decision(snapshot(tmp_path / "2", tmp_path / "1")).chosen.near
        assert near_to is not None
        assert (near_to.nearest.K == 816) == counts
    publish(tmp_path / "2/added.msgpack", encode(held))
    installed = decision(
        snapshot(tmp_path / "1", installed=[tmp_path / "2"])
    ).chosen.near  # what ships was there before
    assert installed is not None
    assert installed.nearest.K == 816


def test_a_damaged_choice_drops_its_bundle(tmp_path: Path) -> None:
    """It is met when the choices around are read, long after the bundle was opened: the others decide."""
    path = write(tmp_path / "1/damaged.msgpack", around(NARROW, WIDE), gpus=[H200], tag="damaged")
    write(tmp_path / "2/whole.msgpack", around(WIDE, NARROW), gpus=[H200])
    problems = craft.parts(path.read_bytes())[0]["problems"]
    path.write_bytes(craft.changed(path.read_bytes(), problems=dict.fromkeys(problems, msgpack.packb([[1, 2]]))))
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    got = decision(bundle_set)
    assert (got.chosen.usable.path.stem, got.chosen.index) == ("whole", WIDE)
    assert [skip.path.stem for skip in bundle_set.view(ON_H200, installed=True).skipped] == ["damaged"]


def test_without_leaves_shapes_out(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", around(NARROW, WIDE), gpus=[H200])
    bundle_set = snapshot(tmp_path)
    neighbourhood = Neighbourhood(bundle_set, ON_H200, bundle_set.view(ON_H200, installed=True))
    near = neighbourhood.near(PROBLEM, 64)
    assert near is not None
    assert (near.nearest.K, near.shapes) == (768, 9)
    rest = neighbourhood.without({(8, 1024, 768)}).near(PROBLEM, 64)
    assert rest is not None
    assert (rest.nearest.K != 768 or rest.nearest.E != 8, rest.shapes) == (True, 8)
    assert neighbourhood.without(set(SIZES)).near(PROBLEM, 64) is None


def test_far_problems_still_have_neighbours(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", around(NARROW, WIDE), gpus=[H200])
    bundle_set = snapshot(tmp_path)
    for problem in (ASKED._replace(E=500), ASKED._replace(N=60_000, K=16), ASKED._replace(E=1)):
        got = decision(bundle_set, problem=problem)
        assert got.chosen.near is not None
        assert math.isfinite(got.chosen.time_us)


def test_every_process_chooses_alike() -> None:
    """By the shipped choices, whatever was asked before."""
    asked = [(Op.FORWARD, 60, 3328, 2560, 16), (Op.DX, 60, 3328, 2560, 4096), (Op.DW, 23, 1984, 4416, 512)]
    code = f"""
import sys
from pathlib import Path
from pretuned.artifacts.records import DType
from pretuned.artifacts.records import Op, Problem
from pretuned.artifacts.records import Gpu, LocalGpu
from pretuned.runtime.dispatch.decide import decide
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot
found = Snapshot([Place(Kind.INSTALLED, Path({str(SHIPPED.parent)!r}))])
for op, E, N, K, M in {[(op.value, *sizes) for op, *sizes in asked]}[:: int(sys.argv[1])]:
    got = decide(found, Problem(Op(op), DType.BF16, E, N, K), M, LocalGpu(90, Gpu("NVIDIA H200", 132, 143155, 13000)))
    print(op, got.chosen.index, got.chosen.time_us, got.reason)
"""
    first, second = (
        subprocess.run([sys.executable, "-c", code, step], capture_output=True, text=True, check=True).stdout
        for step in ("1", "-1")
    )
    assert sorted(first.splitlines()) == sorted(second.splitlines())
    assert first.count("like ") == len(asked)


def test_the_cost_models_ranking_is_whole_where_all_are_asked_for(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", around(NARROW, WIDE), gpus=[H200], specs=(*SPECS, Spec(SPECS[WIDE].config, 1)))
    bundle_set = snapshot(tmp_path)
    view = bundle_set.view(ON_H200, installed=True)
    ranked = by_model(bundle_set, ASKED, 64, ON_H200, view, aligned=True)
    assert len(ranked) == 4
    assert by_model(bundle_set, ASKED, 64, ON_H200, view, aligned=True, most=1) == ranked[:1]
    assert ranked[0].near is not None
    assert sum(candidate.near is not None for candidate in ranked) == 2
    assert [candidate.time_us for candidate in ranked] == sorted(candidate.time_us for candidate in ranked)


def test_the_neighbours_are_imported_when_a_problem_is_in_no_bundle() -> None:
    """Most processes have a choice for all that they call: the cost model and this take time to import."""
    code = "import sys, pretuned.runtime.dispatch.decide; print([one for one in sys.modules if '.cost' in one])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
