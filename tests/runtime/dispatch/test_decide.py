"""The ranking, level by level, over real bundle files and made-up GPUs."""

from __future__ import annotations

import logging
import re
import shlex
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import craft
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from small_bundles import (
    ANY,
    H100,
    H200,
    NARROW,
    ON_A100,
    ON_H100,
    ON_H200,
    ON_L40S,
    OTHER,
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

import pretuned.artifacts
from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan
from pretuned.aot.plan.targets import parse_sm
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import BundleCorrupt, ProblemNotInBundle
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    PLAIN_LAYOUTS,
    DType,
    Fusion,
    Gpu,
    Layout,
    LocalGpu,
    Op,
    Problem,
    Source,
    bucket_of,
)
from pretuned.kernels.entry import has_aligned_rows
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime import self_test_results
from pretuned.runtime.dispatch import decide as decide_module
from pretuned.runtime.dispatch.decide import Decision, Match, Miss, Origin, chosen, decide, why_not
from pretuned.runtime.dispatch.hints import build_line
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import examine

ELSEWHERE = Gpu("NVIDIA H800", 132, 81559, 13000)


def decision(
    bundle_set: Snapshot, M: int = 64, local: LocalGpu = ON_H200, problem: Problem = PROBLEM, **how: bool
) -> Decision:
    got = decide(bundle_set, problem, M, local, **how)
    assert isinstance(got, Decision), got
    return got


def came_from(bundle_set: Snapshot, M: int = 64, local: LocalGpu = ON_H200) -> tuple[str, Origin, Match, int]:
    chosen = decision(bundle_set, M, local).chosen
    return chosen.usable.path.stem, chosen.origin, chosen.match, chosen.index


def test_measured_on_this_gpu_beats_the_same_capability_whatever_the_place(tmp_path: Path) -> None:
    write(tmp_path / "1/h100.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H100])
    write(tmp_path / "2/h200.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, gpus=[H200])
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set) == ("h200", Origin.THIS_GPU, Match.EXACT, NARROW)
    assert came_from(bundle_set, local=ON_H100) == ("h100", Origin.THIS_GPU, Match.EXACT, WIDE)
    assert "measured on this GPU" in decision(bundle_set).reason


@pytest.mark.parametrize(
    ("gpu", "wanted"),
    [
        (Gpu("NVIDIA H800", 132, 81559, 13000), "h100"),
        (Gpu("NVIDIA H100 PCIe", 114, 81559, 13000), "h100"),
        (Gpu("NVIDIA H100 NVL", 132, 95830, 13000), "h100"),
        (Gpu("NVIDIA GH200 144G HBM3e", 132, 146831, 13000), "h200"),
        (Gpu("NVIDIA H20-3e", 78, 143771, 13000), "h200"),
    ],
)
@pytest.mark.parametrize("first", ["h100", "h200"])
def test_another_gpu_has_what_was_measured_on_the_one_most_like_it(
    tmp_path: Path, gpu: Gpu, wanted: str, first: str
) -> None:
    second = "h200" if first == "h100" else "h100"
    for place, name in ((1, first), (2, second)):
        at, index = (H100, WIDE) if name == "h100" else (H200, NARROW)
        write(tmp_path / f"{place}/{name}.msgpack", {PROBLEM: [measured(64, index, 9)]}, gpus=[at])
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set, local=LocalGpu(90, gpu))[:2] == (wanted, Origin.THIS_CAPABILITY)
    assert came_from(bundle_set, local=ON_H100)[:2] == ("h100", Origin.THIS_GPU)
    assert came_from(bundle_set, local=ON_H200)[:2] == ("h200", Origin.THIS_GPU)


def test_one_bundle_has_the_choices_of_several_gpus(tmp_path: Path) -> None:
    """Each GPU runs its own, another of the capability those of the one most like it, whatever their order."""
    h300 = H200._replace(name="NVIDIA H300", memory_mib=262144)
    for folder, gpus in (("1", (H100, H200)), ("2", (H200, H100))):
        own = {gpu: measured(64, WIDE if gpu is H100 else NARROW, 9, gpus.index(gpu), second=ANY) for gpu in gpus}
        alone = measured(4096, WIDE, 90, gpus.index(H100))
        rows = {PROBLEM: [*(own[gpu] for gpu in gpus), alone]}
        for installed in (False, True):
            path = write(tmp_path / folder / "both.msgpack", rows, gpus=gpus).parent
            bundle_set = snapshot(installed=[path]) if installed else snapshot(path)
            assert came_from(bundle_set) == ("both", Origin.THIS_GPU, Match.EXACT, NARROW)
            assert came_from(bundle_set, local=ON_H100) == ("both", Origin.THIS_GPU, Match.EXACT, WIDE)
            assert came_from(bundle_set, local=LocalGpu(90, h300)) == (
                "both",
                Origin.THIS_CAPABILITY,
                Match.EXACT,
                NARROW,
            )
            assert came_from(bundle_set, 4096) == ("both", Origin.THIS_CAPABILITY, Match.EXACT, WIDE)
            ranked = chosen(
                bundle_set, PROBLEM, 64, ON_H200, bundle_set.view(ON_H200, installed=True), aligned=True, most=9
            )
            assert [(candidate.index, candidate.gpu) for candidate in ranked] == [
                (NARROW, H200),
                (ANY, H200),
                (WIDE, H100),
            ]


def test_how_like_it_a_gpu_is_counts_for_nothing_else(tmp_path: Path) -> None:
    """Code for a compatible capability: the place decides, measured or not."""
    a100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 81251, 13000)
    write(tmp_path / "1/measured.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, sm=80, gpus=[a100])
    write(tmp_path / "2/modelled.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    first, second = tmp_path / "1", tmp_path / "2"
    assert came_from(snapshot(first, second), local=ON_L40S)[:2] == ("measured", Origin.COMPATIBLE)
    assert came_from(snapshot(second, first), local=ON_L40S)[:2] == ("modelled", Origin.COMPATIBLE)


def test_what_is_explained_first_is_what_runs(tmp_path: Path) -> None:
    """Choices of an installed package rank as those of PRETUNED_BUNDLES do: by the GPU that they were measured on."""
    write(tmp_path / "named/h200.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, gpus=[H200])
    write(tmp_path / "installed/h100.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H100])
    bundle_set = snapshot(tmp_path / "named", installed=[tmp_path / "installed"])
    gh200 = LocalGpu(90, Gpu("NVIDIA GH200 144G HBM3e", 132, 146831, 13000))
    for local, first in ((LocalGpu(90, ELSEWHERE), "h100"), (gh200, "h200"), (ON_H100, "h100"), (ON_H200, "h200")):
        assert came_from(bundle_set, local=local)[0] == first
        explanation = examine(bundle_set, PROBLEM, 64, local, aligned=True)
        assert [candidate.usable.path.stem for candidate in explanation.candidates[:2]] == sorted(
            ["h200", "h100"], key=first.__ne__
        )
        passed = ". That ranks before the choice of h200.msgpack (PRETUNED_BUNDLES): measured on NVIDIA H200"
        assert explanation.reason == decision(bundle_set, local=local).reason + (passed if first == "h100" else "")


def test_strict_mode_wants_a_choice_of_the_capability_though_one_was_measured_here(tmp_path: Path) -> None:
    write(tmp_path / "l40s.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, sm=80, gpus=[ON_L40S.gpu])
    write(tmp_path / "a100.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    bundle_set = snapshot(installed=[tmp_path])
    assert came_from(bundle_set, local=ON_L40S)[:2] == ("l40s", Origin.THIS_GPU)
    with pytest.raises(ProblemNotInBundle):
        decision(bundle_set, local=ON_L40S, strict=True)


def test_measured_on_the_capability_beats_modelled(tmp_path: Path) -> None:
    write(tmp_path / "1/m.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    write(tmp_path / "2/h100.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, gpus=[H100])
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set) == ("h100", Origin.THIS_CAPABILITY, Match.EXACT, NARROW)
    assert "measured on NVIDIA H100 80GB HBM3" in decision(bundle_set).reason


@pytest.mark.parametrize("measured_at", [32, 128])
def test_measured_in_the_next_bucket_beats_modelled(tmp_path: Path, measured_at: int) -> None:
    write(tmp_path / "1/m.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    write(tmp_path / "2/h200.msgpack", {PROBLEM: [measured(measured_at, NARROW, 9)]}, gpus=[H200])
    assert came_from(snapshot(tmp_path / "1", tmp_path / "2")) == (
        "h200",
        Origin.THIS_GPU,
        Match.NEAREST_BUCKET,
        NARROW,
    )


@pytest.mark.parametrize("gpu", [H200, H100])
@pytest.mark.parametrize("measured_at", [1, 16, 256, 16384])
def test_what_was_measured_for_other_sizes_does_not_beat_modelled(tmp_path: Path, measured_at: int, gpu: Gpu) -> None:
    """A bundle that was measured for a few rows alone had its decode kernels run prefill: 0.2 x as fast as torch."""
    write(tmp_path / "1/h200.msgpack", {PROBLEM: [measured(measured_at, NARROW, 9)]}, gpus=[gpu])
    write(tmp_path / "2/m.msgpack", {PROBLEM: [modelled(32, WIDE)]})
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set, 64) == ("m", Origin.MODELLED, Match.NEAREST_BUCKET, WIDE)
    assert came_from(bundle_set, measured_at)[0] == "h200"


def test_one_bundle_measured_in_part_is_modelled_where_it_was_not(tmp_path: Path) -> None:
    choices = [measured(1, NARROW, 9), measured(2, NARROW, 9), modelled(4, WIDE), modelled(8, WIDE), modelled(16, WIDE)]
    write(tmp_path / "h200.msgpack", {PROBLEM: choices}, gpus=[H200])
    bundle_set = snapshot(tmp_path)
    assert [came_from(bundle_set, M)[3] for M in (1, 2, 4, 8, 16, 64)] == [NARROW, NARROW, NARROW, WIDE, WIDE, WIDE]
    assert "nearest to 4" in decision(bundle_set, 4).reason


def test_compatible_code_comes_after_a_choice_for_other_sizes(tmp_path: Path) -> None:
    """Else a bundle that is not used would change which of the others' variants runs."""
    write(tmp_path / "1/sm89.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, sm=89, gpus=[ON_L40S.gpu])
    alone = came_from(snapshot(tmp_path / "1"), 1024, ON_L40S)
    assert alone == ("sm89", Origin.THIS_GPU, Match.NEAREST_BUCKET, NARROW)
    write(tmp_path / "2/sm80.msgpack", {PROBLEM: [modelled(1024, WIDE)]}, sm=80)
    assert came_from(snapshot(tmp_path / "1", tmp_path / "2"), 1024, ON_L40S) == alone


def test_modelled_for_the_capability_beats_compatible_code(tmp_path: Path) -> None:
    write(tmp_path / "1/sm80.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, sm=80, gpus=[ON_A100.gpu])
    write(tmp_path / "2/sm89.msgpack", {PROBLEM: [modelled(64, NARROW)]}, sm=89)
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set, local=ON_L40S) == ("sm89", Origin.MODELLED, Match.EXACT, NARROW)


def test_the_cost_model_on_the_capability_beats_compatible_code(tmp_path: Path) -> None:
    write(tmp_path / "1/sm80.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    write(tmp_path / "2/sm89.msgpack", {OTHER: [modelled(64, NARROW)]}, sm=89)
    stem, origin, match, _ = came_from(snapshot(tmp_path / "1", tmp_path / "2"), local=ON_L40S)
    assert (stem, origin, match) == ("sm89", Origin.MODELLED, Match.COST_MODEL)


def test_compatible_code_runs_where_its_shared_memory_fits(tmp_path: Path) -> None:
    big = Spec(Config(128, 256, 64, 8, 3), shared_bytes=150 * 1024)
    write(tmp_path / "sm80.msgpack", {PROBLEM: [modelled(64, 3, 5, second=NARROW)]}, sm=80, specs=(*SPECS, big))
    bundle_set = snapshot(tmp_path)
    assert came_from(bundle_set, local=ON_A100) == ("sm80", Origin.MODELLED, Match.EXACT, 3)
    assert came_from(bundle_set, local=ON_L40S) == ("sm80", Origin.COMPATIBLE, Match.EXACT, NARROW)
    assert all(candidate.index != 3 for candidate in examine(bundle_set, PROBLEM, 64, ON_L40S, aligned=True).candidates)


def test_a_choice_measured_here_with_compatible_code_counts_as_measured_here(tmp_path: Path) -> None:
    write(tmp_path / "sm80.msgpack", {PROBLEM: [measured(64, NARROW, 5)]}, sm=80, gpus=[ON_L40S.gpu])
    assert came_from(snapshot(tmp_path), local=ON_L40S)[1] is Origin.THIS_GPU


def test_the_nearest_bucket_the_larger_of_two(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(16, NARROW), modelled(256, WIDE), modelled(65536, WIDE)]})
    bundle_set = snapshot(tmp_path)
    buckets = {M: decision(bundle_set, M).chosen.bucket for M in (1, 16, 23, 45, 46, 64, 65, 4096, 9000, 2**31 - 1)}
    assert buckets == {
        1: 16,
        16: 16,
        23: 16,
        45: 16,
        46: 256,
        64: 256,
        65: 256,
        4096: 65536,
        9000: 65536,
        2**31 - 1: 65536,
    }
    assert decision(bundle_set, 16).chosen.match is Match.EXACT
    assert decision(bundle_set, 22).chosen.match is Match.EXACT
    assert decision(bundle_set, 23).chosen.match is Match.NEAREST_BUCKET
    assert "M near 16, the nearest to 32" in decision(bundle_set, 23).reason


def test_the_place_breaks_ties(tmp_path: Path) -> None:
    write(tmp_path / "1/one.msgpack", {PROBLEM: [modelled(64, WIDE, 90)]})
    write(tmp_path / "2/two.msgpack", {PROBLEM: [modelled(64, NARROW, 1)]})
    assert came_from(snapshot(tmp_path / "1", tmp_path / "2"))[0] == "one"
    assert came_from(snapshot(tmp_path / "2", tmp_path / "1"))[0] == "two"


def test_an_unknown_shape_runs_by_the_cost_model_over_all_variants(tmp_path: Path) -> None:
    write(tmp_path / "1/narrow.msgpack", {OTHER: [modelled(64, 0)]}, specs=[SPECS[NARROW]])
    write(tmp_path / "2/wide.msgpack", {OTHER: [modelled(64, 0)]}, specs=[SPECS[WIDE]])
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    few, many = decision(bundle_set, 8).chosen, decision(bundle_set, 65536).chosen
    assert (few.usable.path.stem, many.usable.path.stem) == ("narrow", "wide")
    assert few.match is many.match is Match.COST_MODEL
    assert few.source is Source.MODELLED
    explanation = examine(bundle_set, PROBLEM, 8, ON_H200, aligned=True)
    assert [candidate.usable.path.stem for candidate in explanation.candidates] == ["narrow", "wide"]


@pytest.mark.parametrize("lead", [0.9, 1.0, 1.1])
def test_a_choice_runs_whatever_its_runner_up_took(tmp_path: Path, lead: float) -> None:
    """A lead that the builder told from noise is the choice's; another is none."""
    for choice, second in ((WIDE, NARROW), (NARROW, WIDE)):
        row = modelled(64, choice, second=second)._replace(runner_up_ns=int(10_000 * lead))
        write(tmp_path / "a.msgpack", {PROBLEM: [row]})
        explanation = examine(snapshot(tmp_path), PROBLEM, 64, ON_H200, aligned=True)
        assert [candidate.index for candidate in explanation.candidates][:2] == [choice, second]


def test_unaligned_calls_take_unaligned_variants(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE, second=NARROW)]})
    chosen = decision(snapshot(tmp_path), aligned=False).chosen
    assert (chosen.index, chosen.match) == (ANY, Match.COST_MODEL)


def test_an_unaligned_choice_serves_both(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, ANY)]})
    assert decision(snapshot(tmp_path), aligned=False).chosen.match is Match.EXACT
    assert decision(snapshot(tmp_path), aligned=True).chosen.match is Match.EXACT


def test_variants_that_cannot_run_are_passed_over(tmp_path: Path) -> None:
    specs = (Spec(SPECS[0].config, abi=2), Spec(SPECS[1].config, max_experts=8), SPECS[2])
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, 0, second=1)]}, specs=specs)
    bundle_set = snapshot(tmp_path)
    assert decision(bundle_set).chosen.index == 1
    assert decision(bundle_set, problem=Problem(Op.FORWARD, DType.BF16, 9, 1024, 768)).chosen.index == ANY
    many = decide(bundle_set, Problem(Op.FORWARD, DType.BF16, 5000, 1024, 768), 64, ON_H200)
    assert isinstance(many, Miss)
    assert "no variant in 1 bundle" in many.reason


def test_another_dtype_is_a_miss_that_says_what_to_build(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    got = decide(snapshot(tmp_path), Problem(Op.FORWARD, DType.FP16, 8, 1024, 768), 64, ON_H200)
    assert isinstance(got, Miss)
    assert 'aot build --models "shape:E=8,H=1024,I=768,k=1 dtype=fp16 ops=forward" --sm 90' in got.reason


def test_without_any_bundle_there_is_one_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    bundle_set = snapshot(tmp_path)
    for M in (1, 64, 4096):
        assert isinstance(decide(bundle_set, PROBLEM, M, ON_H200), Miss)
        assert isinstance(decide(bundle_set, OTHER, M, ON_H200), Miss)
    assert [record.levelno for record in caplog.records] == [logging.WARNING]
    assert "no usable bundle for NVIDIA H200 (9.0, 132 SMs, 143771 MiB)" in caplog.text
    assert "aot build --models" in caplog.text


@pytest.mark.parametrize("name", ["a\x1b[31mb", "a\nforged: b", "a\udcffb"])
def test_an_outcome_is_reported_without_the_raw_name_of_a_file(
    name: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    write(tmp_path / f"{name}.msgpack", {PROBLEM: [measured(64, WIDE, 10)]}, gpus=[H200])
    for local in (ON_H200, ON_H100):
        decide(snapshot(tmp_path), PROBLEM, 64, local)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.INFO]
    assert all(record.getMessage().isprintable() for record in caplog.records)


def test_an_outcome_is_reported_once_at_a_fitting_level(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    write(tmp_path / "a.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H200])
    bundle_set = snapshot(tmp_path)
    for _ in range(2):
        decide(bundle_set, PROBLEM, 64, ON_H200)
        decide(bundle_set, PROBLEM, 64, ON_H100)
    assert [record.levelno for record in caplog.records] == [logging.DEBUG, logging.INFO]
    assert caplog.records[0].getMessage() == (
        f"pretuned: {PROBLEM} at M near 64 on NVIDIA H200: using 128x128x64 w8 s3 g8 persistent of a.msgpack, "
        "measured on this GPU, for this problem and M near 64"
    )
    assert caplog.records[1].getMessage() == (
        f"pretuned: no measured choice for {PROBLEM} at M near 64 on NVIDIA H100 80GB HBM3; using 128x128x64 w8 s3 g8 "
        "persistent of a.msgpack, measured on NVIDIA H200, of this capability, for this problem and M near 64. "
        f"Build one with: {build_line(PROBLEM, 64, 90)}"
    )


def test_strict_wants_a_choice_for_problem_bucket_and_capability(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    bundle_set = snapshot(tmp_path)
    assert decision(bundle_set, 64, strict=True).chosen.index == WIDE
    assert decision(bundle_set, 64, strict=True, aligned=False).chosen.index == ANY
    assert (
        decision(bundle_set, 46, strict=True).chosen.index == decision(bundle_set, 90, strict=True).chosen.index == WIDE
    )
    for problem, M in ((PROBLEM, 45), (PROBLEM, 91), (OTHER, 64)):
        with pytest.raises(ProblemNotInBundle) as raised:
            decide(bundle_set, problem, M, ON_H200, strict=True)
        text = str(raised.value)
        assert "E=8 N=1024 K=768 (M near 64)" in text
        assert build_line(problem, bucket_of(M), 90) in text
    write(tmp_path / "sm80/b.msgpack", {PROBLEM: [modelled(64, WIDE)]}, sm=80)
    with pytest.raises(ProblemNotInBundle, match="No usable bundle has a problem of this kind"):
        decide(snapshot(tmp_path / "sm80"), PROBLEM, 64, ON_L40S, strict=True)


def test_what_a_miss_names_leaves_out_a_damaged_record(tmp_path: Path) -> None:
    write(tmp_path / "b.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    path = write(tmp_path / "a.msgpack", {PROBLEM: [modelled(16, WIDE)]})
    (choices,) = craft.parts(path.read_bytes())[0]["problems"].values()
    path.write_bytes(craft.changed(path.read_bytes(), problems={b"\x90": choices}))
    with pytest.raises(ProblemNotInBundle, match=r"E=8 N=1024 K=768 \(M near 64\)"):
        decide(snapshot(tmp_path), OTHER, 64, ON_H200, strict=True)


FORMS = (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)


@pytest.mark.parametrize("built", FORMS)
@pytest.mark.parametrize("called", FORMS)
def test_strict_takes_any_form_of_a_product_that_was_built(built: Fusion, called: Fusion, tmp_path: Path) -> None:
    """A bias on a plain first GEMM is scattering code for a weight that no plan scatters."""
    specs = [Spec(SPECS[WIDE].config, fusion=form) for form in FORMS]
    product = PROBLEM._replace(fusion=built)
    elsewhere = OTHER._replace(fusion=called)  # the code of the form is there, chosen for another shape
    choices = {product: [modelled(64, FORMS.index(built))]}
    if built is not called:
        choices[elsewhere] = [modelled(64, FORMS.index(called))]
    write(tmp_path / "a/a.msgpack", choices, specs=specs)
    problem = PROBLEM._replace(fusion=called)
    got = decision(snapshot(tmp_path / "a"), problem=problem, strict=True)
    assert got.chosen.variant.fusion is called
    assert got.chosen.match is (Match.EXACT if built is called else Match.COST_MODEL)
    for other, M in ((problem, 91), (elsewhere, 91), (problem._replace(N=2 * problem.N), 64)):
        with pytest.raises(ProblemNotInBundle):
            decide(snapshot(tmp_path / "a"), other, M, ON_H200, strict=True)
    if built is not called:  # the product was built for, and nothing there can run this form
        write(tmp_path / "b/b.msgpack", {product: [modelled(64, 0)]}, specs=[specs[FORMS.index(built)]])
        with pytest.raises(ProblemNotInBundle):
            decide(snapshot(tmp_path / "b"), problem, 64, ON_H200, strict=True)


@pytest.mark.parametrize(
    ("op", "layout", "fusion"),
    [
        (op, layout, fusion)
        for op in (Op.FORWARD, Op.DX)
        for layout in PLAIN_LAYOUTS
        for fusion in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER)
    ]
    + [(Op.DW, Layout.NK, Fusion.NONE)],
)
@pytest.mark.parametrize(
    ("M", "dtype"), [(64, DType.BF16), (1 << 20, DType.BF16), (30_000_000, DType.BF16), (5, DType.TF32)]
)
def test_the_line_it_names_builds_that_very_problem_and_bucket(
    M: int, dtype: DType, op: Op, layout: Layout, fusion: Fusion
) -> None:
    problem = Problem(op, dtype, 9, 1100, 360, layout, fusion)
    words = shlex.split(build_line(problem, bucket_of(M), 90))
    assert words[:3] == ["aot", "build", "--models"]
    assert parse_sm(words[words.index("--sm") + 1], lambda: None) == (90,)
    wanted = plan(load_models([words[3]]).shapes)
    assert bucket_of(M) in wanted.buckets[problem]


def test_damaged_records_drop_the_bundle(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "2/good.msgpack", {PROBLEM: [modelled(64, NARROW)]}, tag="good")
    publish(tmp_path / "bad.msgpack", with_a_bad_variant())
    with pytest.raises(BundleCorrupt):
        decide(snapshot(tmp_path / "bad.msgpack"), PROBLEM, 64, ON_H200)
    caplog.clear()
    assert not snapshot(tmp_path / "bad.msgpack").serves(PROBLEM, ON_H200)
    caplog.clear()
    (tmp_path / "1").mkdir()
    (tmp_path / "bad.msgpack").rename(tmp_path / "1/bad.msgpack")
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set)[0] == "good"
    assert bundle_set.serves(PROBLEM, ON_H200)
    assert not bundle_set.serves(Problem(Op.FORWARD, DType.TF32, 8, 1024, 768), ON_H200)
    assert len([record for record in caplog.records if "bad.msgpack" in record.getMessage()]) == 1


def with_a_bad_variant() -> bytes:
    """A bundle whose digests hold and whose first variant, which PROBLEM's choice names, is not valid."""
    return craft.changed_variant(encode(bundle({PROBLEM: [modelled(64, WIDE)]})), threads=-1)


@settings(max_examples=40, deadline=None)
@given(
    buckets=st.sets(st.integers(0, 20), min_size=1, max_size=6),
    M=st.integers(1, 2**31 - 1),
    aligned=st.booleans(),
    E=st.sampled_from([8, 9, 512, 513, 4096]),
)
def test_there_is_always_a_decision_and_it_is_always_the_same(
    tmp_path_factory: pytest.TempPathFactory, buckets: set[int], M: int, aligned: bool, E: int
) -> None:
    path = tmp_path_factory.mktemp("b")
    rows = [modelled(1 << power, power % 2, second=ANY) for power in sorted(buckets)]
    write(path / "a.msgpack", {PROBLEM: rows})
    problem = Problem(Op.FORWARD, DType.BF16, E, PROBLEM.N, PROBLEM.K)
    first = decision(snapshot(path), M, problem=problem, aligned=aligned)
    again = decision(snapshot(path), M, problem=problem, aligned=aligned)
    assert (first.chosen.index, first.reason) == (again.chosen.index, again.reason)
    assert first.chosen.variant.max_experts >= E
    assert aligned or first.chosen.variant.alignment == 1
    explanation = examine(snapshot(path), problem, M, ON_H200, aligned=aligned)
    assert (explanation.candidates[0].index, explanation.candidates[0].match) == (
        first.chosen.index,
        first.chosen.match,
    )
    ranked = [(candidate.origin, candidate.match) for candidate in explanation.candidates]
    assert ranked == sorted(ranked)
    assert len({candidate.index for candidate in explanation.candidates}) == len(ranked)


ROWS = st.tuples(st.sampled_from([32, 64, 128, 1024]), st.integers(0, 2), st.sampled_from([WIDE, NARROW]))


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    files=st.lists(
        st.tuples(
            st.booleans(),  # whether it is an installed package's
            st.sampled_from([(), (H100,), (H200,), (H100, H200)]),
            st.lists(ROWS, min_size=1, max_size=6),
        ),
        min_size=1,
        max_size=4,
    ),
    local=st.sampled_from([ON_H100, ON_H200, LocalGpu(90, ELSEWHERE)]),
    M=st.sampled_from([16, 64, 100, 1024]),
)
def test_what_is_not_read_would_not_have_been_chosen(
    tmp_path_factory: pytest.TempPathFactory, files: list[Any], local: LocalGpu, M: int
) -> None:
    """A first call reads few of the installed bundles: the choice is the one that all of them would give."""
    folder = tmp_path_factory.mktemp("b")
    (folder / "named").mkdir()
    for i, (installed, gpus, rows) in enumerate(files):
        problems = (
            modelled(bucket, index) if gpu >= len(gpus) else measured(bucket, index, 9, gpu=gpu)
            for bucket, gpu, index in rows
        )
        by_key = {item.sort_key: item for item in problems}
        row = [by_key[key] for key in sorted(by_key)]
        write(folder / ("installed" if installed else "named") / f"{i}.msgpack", {PROBLEM: row}, gpus=gpus, tag=str(i))
    bundle_set = snapshot(folder / "named", installed=[folder / "installed"])
    got = decision(bundle_set, M, local).chosen
    best = chosen(
        bundle_set, PROBLEM, bucket_of(M), local, bundle_set.view(local, installed=True), aligned=True, most=1
    )
    assert (got.usable.path, got.index, got.origin, got.match) == (
        best[0].usable.path,
        best[0].index,
        best[0].origin,
        best[0].match,
    )


def test_installed_bundles_for_other_gpus_are_read_only_where_they_are_needed(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    mine = {PROBLEM: [measured(64, NARROW, 9)]}
    write(tmp_path / "b.msgpack", mine, gpus=[H200])
    other = write(
        tmp_path / "a.msgpack", {PROBLEM: [measured(64, WIDE, 5)], OTHER: [measured(64, WIDE, 5)]}, gpus=[H100]
    )
    bundle_set = snapshot(installed=[tmp_path])
    assert came_from(bundle_set) == ("b", Origin.THIS_GPU, Match.EXACT, NARROW)
    opened = {opened.path.stem: opened.bundle for opened in bundle_set._files(installed=True)}
    assert opened["b"] is not None
    assert opened["b"]._checked is not None
    assert opened["a"] is not None
    assert opened["a"]._checked is None
    assert came_from(bundle_set, local=ON_H100) == ("a", Origin.THIS_GPU, Match.EXACT, WIDE)
    assert decision(bundle_set, problem=OTHER).chosen.usable.path.stem == "a"  # there is no other

    data = bytearray(other.read_bytes())
    data[-len(data) // 2] ^= 1
    other.write_bytes(data)
    bundle_set = snapshot(installed=[tmp_path])
    assert came_from(bundle_set)[0] == "b"
    assert "a.msgpack" not in caplog.text
    fresh = snapshot(installed=[tmp_path])
    fresh.fingerprint(ON_H200)  # what may be chosen later is looked at
    assert "a.msgpack" in caplog.text
    assert came_from(bundle_set, local=ON_H100)[0] == "b"


def test_a_config_that_this_version_does_not_know_is_passed_over(tmp_path: Path) -> None:
    """An overlay that a later pretuned has written to is read by an earlier one."""
    built = bundle({PROBLEM: [modelled(64, WIDE, second=NARROW)], OTHER: [modelled(64, NARROW)]})
    first = built.variants[WIDE]
    later = first._replace(config=(*first.config, ("zigzag", 1)))
    publish(tmp_path / "a.msgpack", encode(built._replace(variants=(later, *built.variants[1:]))))
    assert decision(snapshot(tmp_path)).chosen.index == NARROW
    assert decision(snapshot(tmp_path), M=65536, problem=OTHER).chosen.index == NARROW
    assert decision(snapshot(tmp_path), M=65536, problem=OTHER._replace(N=4096)).chosen.index in (NARROW, ANY)


def test_threads_agree(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    bundle_set = snapshot(tmp_path)
    got: list[Decision | Miss] = []
    threads = [threading.Thread(target=lambda: got.append(decide(bundle_set, OTHER, 64, ON_H200))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(got) == 8
    assert all(decision is got[0] for decision in got)


@pytest.mark.parametrize(
    ("gpu", "same"),
    [
        (H200, True),
        (Gpu(H200.name, 132, 143700, 13000), True),
        (Gpu(H200.name, 132, 71000, 12080), False),
        (Gpu(H200.name, 60, 143771, 12080), False),
        (H100, False),
    ],
)
def test_what_counts_as_the_same_gpu(gpu: Gpu, same: bool) -> None:
    assert gpu.is_like(H200) is same
    assert H200.is_like(gpu) is same


def test_an_unheard_of_capability_misses_in_words(tmp_path: Path) -> None:
    write(tmp_path / "sm70.msgpack", {OTHER: [modelled(64, WIDE)]}, sm=70)
    got = decide(snapshot(tmp_path), PROBLEM, 64, LocalGpu(75, Gpu("NVIDIA T4", 40, 15360, 12080)))
    assert isinstance(got, Miss)
    assert re.search(r"sm_?75|--sm 75", got.reason)


def held(path: Path, choices: Any, **how: Any) -> None:
    """A bundle that says that it was held against another."""
    made_up = bundle(choices, tag="held", **how)
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, encode(made_up._replace(producer=made_up.producer.with_held_against(["ab" * 32]))))


def test_what_was_held_against_others_has_a_say_in_its_own_cells_alone(tmp_path: Path) -> None:
    held(tmp_path / "1/held.msgpack", {PROBLEM: [measured(64, NARROW, 9), modelled(256, NARROW)]}, gpus=[H200])
    write(tmp_path / "2/ships.msgpack", {PROBLEM: [modelled(32, WIDE), modelled(128, WIDE), modelled(4096, WIDE)]})
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    assert came_from(bundle_set, 64) == ("held", Origin.THIS_GPU, Match.EXACT, NARROW)
    for M in (8, 32, 128, 256, 512, 1024):  # what it has modelled, at 256, is no reason to leave what runs without it
        assert came_from(bundle_set, M)[0] == "ships"
    explanation = examine(bundle_set, PROBLEM, 128, ON_H200, aligned=True)
    assert explanation.candidates[0].usable.path.stem == "ships"
    assert decision(bundle_set, 64, problem=OTHER).chosen.usable.path.stem == "ships"  # by the cost model


def test_what_was_held_against_others_runs_where_nothing_else_can(tmp_path: Path) -> None:
    held(tmp_path / "held.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, gpus=[H200])
    bundle_set = snapshot(tmp_path)
    assert came_from(bundle_set, 64)[1:3] == (Origin.THIS_GPU, Match.EXACT)
    assert came_from(bundle_set, 4096)[:3] == ("held", Origin.MODELLED, Match.COST_MODEL)
    assert decision(bundle_set, 64, problem=OTHER).chosen.match is Match.COST_MODEL


def test_what_it_names_and_did_not_measure_gives_way_to_who_did(tmp_path: Path) -> None:
    held(tmp_path / "named/held.msgpack", {PROBLEM: [modelled(64, WIDE)]}, gpus=[H200])
    write(tmp_path / "installed/h100.msgpack", {PROBLEM: [measured(64, WIDE, 5)]}, gpus=[H100])
    bundle_set = snapshot(tmp_path / "named", installed=[tmp_path / "installed"])
    assert came_from(bundle_set)[:2] == ("h100", Origin.THIS_CAPABILITY)


@pytest.mark.parametrize("M", [32, 64, 128])
@pytest.mark.parametrize("local", [ON_H200, ON_H100, LocalGpu(90, ELSEWHERE)])
@pytest.mark.parametrize("named", ["PRETUNED_BUNDLES", "overlay", "system"])
def test_a_modelled_bundle_never_hides_what_an_installed_one_has_measured(
    tmp_path: Path, named: str, local: LocalGpu, M: int
) -> None:
    """Also where it was measured on another GPU of the capability, or for half or twice the rows."""
    kind = {"PRETUNED_BUNDLES": Kind.NAMED, "overlay": Kind.OVERLAY, "system": Kind.SYSTEM}[named]
    rows = {PROBLEM: [modelled(bucket, WIDE) for bucket in (32, 64, 128)]}
    write(tmp_path / "named/modelled.msgpack", rows)
    write(tmp_path / "installed/h200.msgpack", {PROBLEM: [measured(64, NARROW, 9)]}, gpus=[H200])
    bundle_set = Snapshot([Place(kind, tmp_path / "named")], lambda: [Place(Kind.INSTALLED, tmp_path / "installed")])
    assert came_from(bundle_set, M, local)[::3] == ("h200", NARROW)
    explanation = examine(bundle_set, PROBLEM, M, local, aligned=True)
    assert explanation.candidates[0].usable.path.stem == "h200"
    assert explanation.reason.endswith(f"ranks before the choice of modelled.msgpack ({kind.value}): only modelled")
    assert came_from(bundle_set, 1024, local)[0] == "modelled"  # for other sizes it is the choice
    assert decision(bundle_set, 64, local, PROBLEM._replace(E=9)).chosen.match is Match.COST_MODEL


def test_an_outcome_that_another_thread_came_to_first_stays(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    theirs = decision(snapshot(tmp_path))

    def meanwhile() -> list[Place]:
        bundle_set.decisions[PROBLEM, 64, True, ON_H200, False, False] = theirs
        return []

    bundle_set = Snapshot([Place(Kind.NAMED, tmp_path)], meanwhile)
    assert decide(bundle_set, PROBLEM, 64, ON_H200) is theirs


def test_a_gpu_of_no_capability_runs_nothing(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", {PROBLEM: [modelled(64, WIDE)]})
    missed = decide(snapshot(tmp_path), PROBLEM, 64, LocalGpu(0, Gpu("AMD", 304, 196608, 0)))
    assert isinstance(missed, Miss)
    assert missed.reason.endswith("it is of no CUDA capability")


def test_dw_has_one_form() -> None:
    assert decide_module.forms_of(PROBLEM._replace(op=Op.DW)) == (PROBLEM._replace(op=Op.DW),)


def test_code_of_which_no_sm_holds_a_program_is_none_of_the_models(tmp_path: Path) -> None:
    built = bundle({OTHER: [modelled(64, WIDE)]})
    for registers, runs in ((255, True), (1024, False)):
        variants = tuple(variant._replace(registers=registers) for variant in built.variants)
        publish(tmp_path / f"{registers}.msgpack", encode(built._replace(variants=variants)))
        choice = decide(snapshot(tmp_path / f"{registers}.msgpack"), PROBLEM, 64, ON_H200)
        assert isinstance(choice, Decision if runs else Miss)


def test_why_a_variant_can_not_run(tmp_path: Path) -> None:
    variant = bundle({}).variants[WIDE]
    assert why_not(variant, PROBLEM, ON_H200, aligned=True) is None
    turns = variant._replace(config=Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG).pairs())
    assert why_not(turns, PROBLEM, ON_H200, aligned=True) is None
    message = why_not(turns, PROBLEM._replace(N=(192 << 20) + 8), ON_H200, aligned=True)
    assert message is not None
    assert "the most columns" in message
    self_test_results.leave_out(variant, ON_H200)
    assert (
        why_not(variant, PROBLEM, ON_H200, aligned=True)
        == "its test on this GPU failed, or could not be made in this process"
    )
    assert why_not(variant, PROBLEM, ON_H100, aligned=True) is None


@pytest.mark.parametrize("M", [8, 1024, 65536])
def test_rows_of_y_are_filled_up_for_code_that_reads_w_through_a_descriptor(M: int) -> None:
    """Of what ships; where rows are whole, w lies otherwise or a GPU has no such code there is none."""
    bundle_set = Snapshot([Place(Kind.INSTALLED, Path(pretuned.artifacts.__file__).parent / "bundles")])
    problem = Problem(Op.FORWARD, DType.BF16, 64, 666, 1000)
    assert decide_module.whole_columns(problem) == 672
    chosen = decide_module.with_wide_rows(bundle_set, problem, M, ON_H200)
    assert chosen is not None
    assert chosen.variant.alignment == 16
    assert "w" in {tensor_map.argument for tensor_map in chosen.variant.tensor_maps}
    plain = decide(bundle_set, problem, M, ON_H200, aligned=False)
    assert isinstance(plain, Decision)
    assert plain.chosen.variant.alignment == 1
    for other in (
        problem._replace(N=672),
        problem._replace(K=999),
        problem._replace(layout=Layout.KN),
        problem._replace(op=Op.DX),
        problem._replace(fusion=Fusion.SCATTER),
        problem._replace(dtype=DType.FP32),
    ):
        assert decide_module.with_wide_rows(bundle_set, other, M, ON_H200) is None
    a100 = LocalGpu(80, Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, 13000))
    assert decide_module.with_wide_rows(bundle_set, problem, M, a100) is None


SAID = "torch's grouped_mm, measured faster: 5.0 us against 7.5 us"


def test_torch_runs_what_it_was_measured_faster_for_on_this_very_gpu(tmp_path: Path) -> None:
    choices = [measured(64, WIDE, 7.5, second=NARROW)._replace(torch_ns=5000)]
    gathers = PROBLEM._replace(fusion=Fusion.GATHER, top_k=2)
    write(tmp_path / "a.msgpack", {PROBLEM: choices}, gpus=[H200])
    bundle_set = snapshot(tmp_path)
    ran = decision(bundle_set, 60, strict=True)
    assert (ran.chosen.index, ran.chosen.time_us, ran.chosen.torch_us) == (WIDE, 7.5, 5.0)
    assert SAID in ran.reason
    explanation = examine(bundle_set, PROBLEM, 60, ON_H200, aligned=True)
    assert (explanation.runs, explanation.torch_us, explanation.steps, explanation.to_dict()["torch_us"]) == (
        "torch",
        5.0,
        (),
        5.0,
    )
    assert f"runs: {SAID}" in str(explanation)
    others = [(PROBLEM, 60, local, True) for local in (ON_H100, LocalGpu(90, ELSEWHERE))]
    others += [(PROBLEM, 128, ON_H200, True), (PROBLEM, 60, ON_H200, False), (gathers, 60, ON_H200, True)]
    others += [(OTHER, 60, ON_H200, True)]  # torch does not vote for its neighbours
    for problem, M, local, aligned in others:
        got = decide(bundle_set, problem, M, local, aligned=aligned)
        assert isinstance(got, Miss) or got.chosen.torch_us is None
        explanation = examine(bundle_set, problem, M, local, aligned=aligned)
        assert (explanation.runs, explanation.torch_us) == ("bundle" if explanation.candidates else "torch", None)
        assert "grouped_mm" not in str(explanation)


@pytest.mark.parametrize(
    ("problem", "local"),
    [
        (PROBLEM._replace(op=Op.DW), ON_H200),
        (PROBLEM._replace(dtype=DType.FP16), ON_H200),
        (PROBLEM._replace(K=772), ON_H200),
        (PROBLEM._replace(E=1025), ON_H200),
        (PROBLEM, ON_A100),
    ],
)
def test_torch_s_time_counts_only_where_torch_has_a_kernel(problem: Problem, local: LocalGpu, tmp_path: Path) -> None:
    specs = [replace(SPECS[ANY], op=problem.op, dtype=problem.dtype)]
    choices = {problem: [measured(64, 0, 7.5)._replace(torch_ns=5000)]}
    write(tmp_path / "a.msgpack", choices, gpus=[local.gpu], sm=local.sm, specs=specs)
    ran = decision(snapshot(tmp_path), 64, local, problem, aligned=has_aligned_rows(problem))
    assert (ran.chosen.time_us, ran.chosen.torch_us) == (7.5, None)
