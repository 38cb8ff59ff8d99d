"""When plans have silu(gate) * up in the first product's epilogue, and what dispatch makes of them."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import craft
import msgpack
import pytest
from small_bundles import H100, H200, ON_A100, ON_H100, ON_H200, SPECS, Spec, measured, modelled, snapshot, write

from pretuned.artifacts.records import Choice, DType, Fusion, Gpu, LocalGpu, Model, Op, Problem
from pretuned.kernels.chips import chip_named
from pretuned.kernels.plans import least_activation_us
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime import allow_jit, register_compiler
from pretuned.runtime.dispatch.decide import Match, Origin, forms_of
from pretuned.runtime.dispatch.hints import build_line
from pretuned.runtime.dispatch.plans import plain_of
from pretuned.runtime.dispatch.snapshot import Snapshot
from pretuned.runtime.inspect.explain import Ruled, examine, fused_silu
from pretuned.runtime.inspect.preload import cells_of

BOTH = Fusion.SILU | Fusion.GATHER
M = 8192
PLAIN = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.GATHER)
GATED = PLAIN._replace(fusion=BOTH)
WIDE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
CODE = (Spec(WIDE, fusion=Fusion.GATHER), Spec(WIDE, fusion=BOTH))
PASS_US = 1.1 * M * 3 * 768 * 2 / 4800e3  # h is read and the result written at an H200's 4.8 TB/s


def book(path: Path, plain: Choice, *gated: Choice, gpus: tuple[Gpu, ...] = (H200,), **how: object) -> Path:
    choices = {PLAIN: [plain]} | ({GATED: list(gated)} if gated else {})
    return write(path, choices, gpus=gpus, specs=how.pop("specs", CODE), **how)


def ruled(bundle_set: Snapshot, problem: Problem, rows: int, local: LocalGpu, *, aligned: bool) -> Ruled:
    """Return the decision and its reason; rows are read by one index entry each."""
    return fused_silu(bundle_set, problem, rows, local, top_k=1, aligned=aligned)


def used(path: Path, local: LocalGpu = ON_H200, rows: int = M, problem: Problem = GATED) -> bool:
    ruling = ruled(snapshot(path), problem, rows, local, aligned=True)
    assert (ruling.chosen is None) == ("faster" not in ruling.reason)
    return ruling.chosen is not None


@pytest.mark.parametrize(
    ("gated_us", "runs"),
    [(200.0, True), (210.0, True), (210.0 + PASS_US - 0.01, True), (210.0 + PASS_US + 0.01, False)],
)
def test_measured_it_may_take_what_the_pass_would_beside_the_product(
    tmp_path: Path, gated_us: float, runs: bool
) -> None:
    book(tmp_path / "a.msgpack", measured(M, 0, 210.0), measured(M, 1, gated_us))
    assert used(tmp_path) is runs
    assert used(tmp_path, rows=M - 100) is runs  # the same bucket
    assert not used(tmp_path, rows=M // 2)  # there is no choice for that
    assert not used(tmp_path, rows=M * 3 // 2)


def test_what_the_pass_takes_on_a_gpu_that_nobody_knows_is_nothing(tmp_path: Path) -> None:
    other = H200._replace(name="NVIDIA H300")
    assert least_activation_us(GATED, M, chip_named(H200.name)) == pytest.approx(PASS_US)
    assert least_activation_us(GATED, M, chip_named(other.name)) == 0
    for gated_us, runs in ((210.1, False), (210.0, True)):
        book(tmp_path / "a.msgpack", measured(M, 0, 210.0), measured(M, 1, gated_us), gpus=(other,))
        assert used(tmp_path, LocalGpu(90, other)) is runs


def test_on_another_gpu_of_the_capability_the_times_are_still_of_one(tmp_path: Path) -> None:
    book(tmp_path / "a.msgpack", measured(M, 0, 210.0), measured(M, 1, 212.0))
    chosen = ruled(snapshot(tmp_path), GATED, M, ON_H100, aligned=True).chosen
    assert chosen is not None
    assert (chosen.origin, chosen.match, chosen.index, chosen.gpu) == (Origin.THIS_CAPABILITY, Match.EXACT, 1, H200)
    assert not used(tmp_path, ON_A100)


@pytest.mark.parametrize(("gated_us", "runs"), [(209.0, True), (210.0, True), (210.1, False)])
def test_modelled_it_may_not_take_longer_than_the_product(tmp_path: Path, gated_us: float, runs: bool) -> None:
    book(tmp_path / "a.msgpack", modelled(M, 0, 210.0), modelled(M, 1, gated_us), gpus=())
    assert used(tmp_path) is runs


def test_modelled_its_tiles_must_be_half_full(tmp_path: Path) -> None:
    for rows, runs in ((M, True), (M // 2, False)):
        book(tmp_path / "a.msgpack", modelled(rows, 0, 210.0), modelled(rows, 1, 200.0), gpus=())
        assert used(tmp_path, rows=rows) is runs
        book(tmp_path / "a.msgpack", measured(rows, 0, 210.0), measured(rows, 1, 200.0))
        assert used(tmp_path, rows=rows)


def test_times_of_two_sources_are_not_compared(tmp_path: Path) -> None:
    book(tmp_path / "1/a.msgpack", measured(M, 0, 210.0), modelled(M, 1, 100.0))
    book(tmp_path / "2/a.msgpack", modelled(M, 0, 210.0), measured(M, 1, 100.0))
    book(tmp_path / "3/a.msgpack", measured(M, 0, 210.0), measured(M, 1, 100.0, gpu=1), gpus=(H200, H100))
    for place in "123":
        assert not used(tmp_path / place)
        assert "not from one source" in ruled(snapshot(tmp_path / place), GATED, M, ON_H200, aligned=True).reason
    newer = H200._replace(driver=H200.driver + 1)  # one GPU all the same
    book(tmp_path / "4/a.msgpack", measured(M, 0, 210.0), measured(M, 1, 100.0, gpu=1), gpus=(H200, newer))
    assert used(tmp_path / "4")


def test_the_choice_is_of_the_bundle_that_runs_the_product(tmp_path: Path) -> None:
    book(tmp_path / "1/plain.msgpack", measured(M, 0, 190.0))
    book(tmp_path / "2/both.msgpack", measured(M, 0, 210.0), measured(M, 1, 200.0))
    assert not used(tmp_path / "1")
    assert used(tmp_path / "2")
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    ruling = ruled(bundle_set, GATED, M, ON_H200, aligned=True)
    assert ruling.chosen is None
    assert "the bundle has no choice for it at M near 8192" in ruling.reason
    # and the first place's product is what the layer runs
    ran = examine(bundle_set, PLAIN, M, ON_H200, aligned=True).chosen
    assert ran is not None
    assert ran.usable.path.name == "plain.msgpack"


def test_a_variant_that_can_not_run_the_call_is_none(tmp_path: Path) -> None:
    for name, code in {"abi": replace(CODE[1], abi=2), "shared": replace(CODE[1], shared_bytes=250_000)}.items():
        book(tmp_path / name / "a.msgpack", measured(M, 0, 210.0), measured(M, 1, 200.0), specs=(CODE[0], code))
        ruling = ruled(snapshot(tmp_path / name), GATED, M, ON_H200, aligned=True)
        assert ruling.chosen is None
        assert "can't run here" in ruling.reason
    book(tmp_path / "a.msgpack", measured(M, 0, 210.0), measured(M, 1, 200.0))
    assert ruled(snapshot(tmp_path / "a.msgpack"), GATED, M, ON_H200, aligned=False).chosen is None


def test_a_product_that_no_choice_of_its_own_runs_says_nothing(tmp_path: Path) -> None:
    other = PLAIN._replace(N=1024)
    write(tmp_path / "a.msgpack", {other: [modelled(M, 0)]}, specs=CODE)
    ruling = ruled(snapshot(tmp_path), GATED, M, ON_H200, aligned=True)
    assert ruling.chosen is None
    assert "no time to compare" in ruling.reason
    write(tmp_path / "b/b.msgpack", {other._replace(fusion=Fusion.NONE): [modelled(M, 0)]}, specs=SPECS)
    ruling = ruled(snapshot(tmp_path / "b"), GATED, M, ON_H200, aligned=True)
    assert ruling.reason == "no bundle has the plain GEMM"


def test_explain_says_what_runs_and_why(tmp_path: Path) -> None:
    book(tmp_path / "1/a.msgpack", measured(M, 0, 210.0), measured(M, 1, 212.0))
    explanation = examine(snapshot(tmp_path / "1"), GATED, M, ON_H200, aligned=True)
    assert explanation.problem == GATED
    assert explanation.runs == "bundle"
    assert "fused=gather+silu" in str(explanation)
    assert "212.0 us measured, the plain GEMM 210.0 us and the activation 8.7 us at least" in str(explanation)
    row = json.loads(json.dumps(explanation.to_dict()))
    assert row["problem"]["fused"] == ["gather", "silu"]
    assert [candidate["variant"] for candidate in row["candidates"]] == [1]
    book(tmp_path / "2/a.msgpack", measured(M, 0, 210.0), measured(M, 1, 220.0))
    explanation = examine(snapshot(tmp_path / "2"), GATED, M, ON_H200, aligned=True)
    assert explanation.chosen is not None
    assert explanation.chosen.index == 0
    assert "the GEMM, then the activation. Fused silu: it is slower: 220.0 us" in str(explanation)
    assert "measured on this GPU, for this problem and M near 8192" in str(explanation)


def test_preload_comes_to_it_from_any_form(tmp_path: Path) -> None:
    book(
        tmp_path / "a.msgpack",
        measured(M, 0, 210.0),
        measured(M, 1, 200.0),
        models=[Model("m", 1, 1, 8, DType.BF16, (PLAIN, GATED))],
    )
    bundle_set = snapshot(tmp_path)
    for problem in (PLAIN, GATED):
        assert (GATED, M) in cells_of({problem: [M]}, bundle_set, ON_H200)
    assert GATED in forms_of(PLAIN._replace(fusion=Fusion.NONE))
    assert not any(Fusion.SILU in problem.fusion for problem in forms_of(PLAIN._replace(op=Op.DX)))


def test_nothing_is_compiled_for_it(tmp_path: Path) -> None:
    register_compiler(lambda *_: pytest.fail("compiled"))
    allow_jit()
    assert not used(tmp_path)


def test_a_form_of_a_later_version_is_skipped_with_its_bundle(tmp_path: Path) -> None:
    newer = book(tmp_path / "1/newer.msgpack", measured(M, 0, 100.0), measured(M, 1, 90.0))
    book(tmp_path / "2/known.msgpack", measured(M, 0, 210.0), measured(M, 1, 200.0))
    index, _ = craft.parts(newer.read_bytes())
    unknown = msgpack.unpackb(index["variants"][1]) | {"fusion": 33}
    data = craft.changed(newer.read_bytes(), variants=[index["variants"][0], msgpack.packb(unknown)])
    newer.chmod(0o644)
    newer.write_bytes(data)
    bundle_set = snapshot(tmp_path / "1", tmp_path / "2")
    chosen = ruled(bundle_set, GATED, M, ON_H200, aligned=True).chosen
    assert chosen is not None
    assert chosen.usable.path.name == "known.msgpack"
    (skipped,) = bundle_set.view(ON_H200, installed=True).skipped
    assert skipped.path.name == "newer.msgpack"
    assert "variant 1 is for ['forward', 'bf16', 'nk', 33]" in skipped.reason


def test_words_for_it() -> None:
    assert plain_of(GATED) == PLAIN
    assert plain_of(GATED._replace(fusion=Fusion.SILU)) == PLAIN._replace(fusion=Fusion.NONE)
    assert build_line(GATED, M, 90) == ('aot build --models "shape:E=128,H=2048,I=768,k=1 ops=forward" --sm 90')


@pytest.mark.parametrize(("gated_us", "runs"), [(200.0, True), (230.0, False)])
def test_where_no_rows_are_gathered_the_two_products_are_compared_as_they_are(
    gated_us: float, runs: bool, tmp_path: Path
) -> None:
    plain, gated = PLAIN._replace(fusion=Fusion.NONE), GATED._replace(fusion=Fusion.SILU)
    choices = {plain: [measured(M, 0, 210.0)], gated: [measured(M, 1, gated_us)]}
    write(tmp_path / "a.msgpack", choices, gpus=(H200,), specs=(Spec(WIDE), Spec(WIDE, fusion=Fusion.SILU)))
    assert used(tmp_path, problem=gated) is runs
