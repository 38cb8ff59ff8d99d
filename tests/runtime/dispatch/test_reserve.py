"""Candidates that ship: what runs where no bundle has code, and only there."""

from __future__ import annotations

import errno
import logging
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import signing
import small_bundles
from host_gpu import LOW_RANK, PERSISTENT, Device, bundle_bytes, install_candidates_bundle
from small_bundles import ON_A100, ON_H200, ON_L40S, PROBLEM, SPECS, Spec, modelled, snapshot, write

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import BundleCorrupt, ProblemNotInBundle
from pretuned.artifacts.packed import pack, unpack
from pretuned.artifacts.records import DType, Fusion, Gpu, Layout, LocalGpu, Op, Problem
from pretuned.kernels.spec import Config, Schedule
from pretuned.runtime.dispatch import pin
from pretuned.runtime.dispatch.decide import Decision, Match, Miss, Origin, _fits, decide, with_low_part
from pretuned.runtime.dispatch.places import Kind, Place, candidates_name, installed_places
from pretuned.runtime.dispatch.snapshot import Snapshot, take
from pretuned.runtime.inspect.explain import examine
from pretuned.runtime.inspect.query import as_read
from pretuned.runtime.launch import product_kernels
from pretuned.runtime.settings import Settings

SHIP_EVERYWHERE = [DType.MXFP4, DType.INT4_G32, DType.INT4_G128, DType.INT4_G128_ZP, DType.FP8_BLOCK_A16]
FP16 = tuple(replace(spec, dtype=DType.FP16) for spec in SPECS)
HALF = PROBLEM._replace(dtype=DType.FP16)
A16 = LocalGpu(86, Gpu("NVIDIA A16", 10, 15 << 10, small_bundles.DRIVER))


def candidates(folder: Path, sm: int = 80, specs: tuple[Spec, ...] = (*SPECS, *FP16), **how: Any) -> Path:
    """A file of candidates as ``aot compile`` writes one: variants without a choice."""
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / candidates_name(sm)
    path.write_bytes(pack(encode(small_bundles.bundle({}, sm=sm, specs=specs, tag="candidates", **how))))
    return path


def installed(tmp_path: Path) -> Snapshot:
    return snapshot(installed=[tmp_path])


def test_what_no_bundle_has_code_for_runs_from_the_candidates(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    candidates(tmp_path)
    write(tmp_path / "b.msgpack", {PROBLEM: [modelled(64, 0)]}, sm=80)
    bundle_set = installed(tmp_path)
    caplog.set_level(logging.INFO)
    ran = decide(bundle_set, HALF, 64, ON_A100)
    assert isinstance(ran, Decision)
    assert ran.chosen.usable.place == Place(Kind.CANDIDATES, tmp_path)
    assert (ran.chosen.origin, ran.chosen.match) == (Origin.MODELLED, Match.COST_MODEL)
    assert ran.chosen.variant.dtype is DType.FP16
    assert "among the shipped candidates" in ran.reason
    (record,) = [record for record in caplog.records if "no measured choice" in record.getMessage()]
    assert candidates_name(80) in record.getMessage()
    assert not [record for record in caplog.records if record.levelno > logging.INFO]
    explanation = examine(bundle_set, HALF, 64, ON_A100, aligned=True)
    assert explanation.chosen is not None
    assert (explanation.chosen.usable.path, explanation.chosen.index) == (
        tmp_path / candidates_name(80),
        ran.chosen.index,
    )
    assert {candidate.variant.dtype for candidate in explanation.candidates} == {DType.FP16}


def test_what_a_bundle_has_code_for_leaves_them_closed(tmp_path: Path) -> None:
    candidates(tmp_path).write_bytes(b"no candidates: opening them would tell")
    write(tmp_path / "b.msgpack", {PROBLEM: [modelled(64, 0)]}, sm=80)
    bundle_set = installed(tmp_path)
    for problem in (PROBLEM, PROBLEM._replace(E=3, N=640)):  # chosen, and by the cost model of the bundle's
        ran = decide(bundle_set, problem, 64, ON_A100)
        assert isinstance(ran, Decision)
        assert ran.chosen.usable.path.name == "b.msgpack"
    assert bundle_set.serves(PROBLEM, ON_A100)
    assert not bundle_set.serves(PROBLEM._replace(fusion=Fusion.SILU), ON_A100)


def test_strict_mode_wants_a_choice(tmp_path: Path) -> None:
    candidates(tmp_path)
    with pytest.raises(ProblemNotInBundle):
        decide(installed(tmp_path), HALF, 64, ON_A100, strict=True)


LOW = PROBLEM._replace(fusion=Fusion.LOW_RANK)


def test_a_low_rank_part_has_the_config_of_its_product_where_candidates_have_it(tmp_path: Path) -> None:
    low = tuple(replace(spec, fusion=Fusion.LOW_RANK) for spec in SPECS)
    candidates(tmp_path, specs=low)
    alone = with_low_part(installed(tmp_path), LOW, 64, ON_A100)
    assert alone is not None
    assert alone.usable.place.kind is Kind.CANDIDATES
    for i, spec in enumerate(SPECS):
        if spec.alignment > 1 and spec.op is Op.FORWARD and spec.layout is Layout.NK:
            write(tmp_path / "b.msgpack", {PROBLEM: [modelled(64, i)]}, sm=80)
            decision = with_low_part(installed(tmp_path), LOW, 64, ON_A100)
            assert decision is not None
            assert decision.config == spec.config
            assert Fusion.LOW_RANK in decision.variant.fusion


def test_without_code_for_a_low_rank_part_there_are_two_products(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    candidates(tmp_path)
    assert with_low_part(installed(tmp_path), LOW, 64, ON_A100) is None
    assert with_low_part(snapshot(installed=[]), LOW, 64, ON_A100) is None
    assert not caplog.records


def test_a_file_that_is_damaged_is_reported_once_and_torch_runs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = candidates(tmp_path)
    path.write_bytes(path.read_bytes()[:-9])
    bundle_set = installed(tmp_path)
    for problem in (PROBLEM, HALF):
        assert isinstance(decide(bundle_set, problem, 64, ON_A100), Miss)
    (record,) = [record for record in caplog.records if "skipping" in record.getMessage()]
    assert record.levelno == logging.WARNING
    assert str(path) in record.getMessage()


def test_where_there_is_no_memory_for_them_torch_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    candidates(tmp_path)

    def refused(*_: object) -> int:
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "memfd_create", refused)
    bundle_set = installed(tmp_path)
    assert isinstance(decide(bundle_set, PROBLEM, 64, ON_A100), Miss)
    (skipped,) = bundle_set.reserve(ON_A100).skipped
    assert "Too many open files" in skipped.reason
    assert skipped in examine(bundle_set, PROBLEM, 64, ON_A100, aligned=True).skipped


def test_of_several_files_the_first_that_can_be_used_counts(tmp_path: Path) -> None:
    candidates(tmp_path / "a").write_bytes(b"junk of another package")
    candidates(tmp_path / "b")
    bundle_set = snapshot(installed=[tmp_path / "a", tmp_path / "b"])
    assert [usable.path.parent.name for usable in bundle_set.reserve(ON_A100).usable] == ["b"]
    assert len(bundle_set.reserve(ON_A100).skipped) == 1
    candidates(tmp_path / "b", sm=86)
    candidates(tmp_path / "a", sm=86).write_bytes(b"junk again")
    bundle_set = snapshot(installed=[tmp_path / "a", tmp_path / "b"])
    assert [usable.path.name for usable in bundle_set.reserve(A16).usable] == [candidates_name(86)]


def test_their_epilogues_are_not_taken(tmp_path: Path) -> None:
    silu = PROBLEM._replace(fusion=Fusion.SILU)
    candidates(tmp_path, specs=(replace(SPECS[0], fusion=Fusion.SILU),))
    bundle_set = installed(tmp_path)
    assert isinstance(decide(bundle_set, silu, 4096, ON_A100), Miss)
    assert not bundle_set.serves(silu, ON_A100)


def test_epilogues_that_ship_are_not_taken_either(shipped: Snapshot) -> None:
    (usable,) = shipped.reserve(ON_H200).usable
    fused = [variant for variant in usable.bundle.variants() if Fusion.SILU in variant.fusion]
    assert fused
    assert not any(_fits(usable, variant) for variant in fused)


def test_what_explain_shows_can_be_named(tmp_path: Path) -> None:
    candidates(tmp_path)
    bundle_set = installed(tmp_path)
    explanation = examine(bundle_set, HALF, 64, ON_A100, aligned=True)
    for candidate in explanation.candidates:
        usable, index = pin.find(bundle_set, candidate.config, HALF, ON_A100, aligned=True)
        assert (usable.path, index) == (candidate.usable.path, candidate.index)


def test_rows_gathered_beforehand_are_multiplied_by_what_a_bundle_has(tmp_path: Path) -> None:
    """Code of codes that were put in order gathers nothing; candidates' of codes as they are stored does."""
    ordered = Spec(Config(128, 128, 64, 8, 3), dtype=DType.MXFP4)
    plain = Problem(Op.FORWARD, DType.MXFP4, 8, 1024, 768)
    write(tmp_path / "b.msgpack", {plain: [modelled(64, 0)]}, specs=(ordered,))
    candidates(tmp_path, 90, (replace(ordered, layout=Layout.STORED, fusion=Fusion.GATHER),))
    gathered = plain._replace(fusion=Fusion.GATHER)
    assert as_read(installed(tmp_path), gathered, ON_H200) == gathered


def test_a_record_that_is_damaged_drops_the_file(tmp_path: Path) -> None:
    candidates(tmp_path)
    bundle_set = installed(tmp_path)
    (usable,) = bundle_set.reserve(ON_A100).usable
    bundle_set.reject(usable.bundle, BundleCorrupt("damaged"))
    assert bundle_set.reserve(ON_A100).usable == ()
    assert isinstance(decide(bundle_set, PROBLEM, 64, ON_A100), Miss)


def test_whose_capability_they_are(tmp_path: Path) -> None:
    """Its own, else those of the next minor revision before it; never another's, nor code for one capability alone."""
    candidates(tmp_path, 80)
    candidates(tmp_path, 90)
    bundle_set = installed(tmp_path)
    assert [usable.path.name for usable in bundle_set.reserve(ON_A100).usable] == [candidates_name(80)]
    assert [usable.path.name for usable in bundle_set.reserve(ON_H200).usable] == [candidates_name(90)]
    ran = decide(bundle_set, PROBLEM, 64, ON_L40S)  # 8.9
    assert isinstance(ran, Decision)
    assert ran.chosen.origin is Origin.COMPATIBLE
    assert "code for sm_80, which sm_89 runs" in ran.reason
    candidates(tmp_path, 86)
    assert [usable.path.name for usable in installed(tmp_path).reserve(A16).usable] == [candidates_name(86)]
    assert installed(tmp_path).reserve(LocalGpu(91, ON_H200.gpu)).usable == ()
    assert installed(tmp_path / "nowhere").reserve(ON_A100).usable == ()


def test_what_takes_too_much_is_not_chosen(tmp_path: Path) -> None:
    """Candidates have all that was compiled, what a build leaves out as well."""
    wide = Spec(Config(128, 128, 64, 8, 3), shared_bytes=200_000)
    candidates(tmp_path, specs=(wide,))
    assert isinstance(decide(installed(tmp_path), PROBLEM, 4096, ON_A100), Miss)
    candidates(tmp_path, specs=(wide, SPECS[1]))
    ran = decide(installed(tmp_path), PROBLEM, 4096, ON_A100)
    assert isinstance(ran, Decision)
    assert ran.chosen.index == 1


def test_they_must_be_signed_where_all_must(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signing.keys(tmp_path / "keys")
    path = candidates(tmp_path / "wheel")
    where = "pretuned.runtime.dispatch.snapshot.installed_places"
    monkeypatch.setattr(where, lambda: [Place(Kind.INSTALLED, tmp_path / "wheel")])
    wanted = Settings(bundles=(), overlay=tmp_path / "overlay", trusted_keys=tmp_path / "keys")
    assert take(wanted).reserve(ON_A100).usable == ()
    signing.sign(path)
    assert len(take(wanted).reserve(ON_A100).usable) == 1
    monkeypatch.setattr(where, installed_places)
    (own,) = take(wanted).reserve(ON_A100).usable
    assert own.path.name == f"{candidates_name(80, 86, 89)}#sm80"


def joint(folder: Path, *sms: int) -> Path:
    """One file of the candidates for several capabilities, and none beside it."""
    files = [candidates(folder, sm) for sm in sms]
    bundles = [b"".join(unpack(file.read_bytes(), file.name)) for file in files]
    for file in files:
        file.unlink()
    path = folder / candidates_name(*sms)
    path.write_bytes(pack(*bundles))
    return path


def test_of_a_joint_file_the_one_for_the_gpu_is_taken(tmp_path: Path) -> None:
    path = joint(tmp_path, 80, 86, 90)
    for local, sm in ((ON_A100, 80), (A16, 86), (ON_H200, 90)):
        view = installed(tmp_path).reserve(local)
        assert [usable.path for usable in view.usable] == [Path(f"{path}#sm{sm}")]
        assert [usable.bundle.target.sm for usable in view.usable] == [sm]
        assert not view.skipped
    assert installed(tmp_path).reserve(ON_L40S).usable[0].bundle.target.sm == 86  # whose code it runs
    ran = decide(installed(tmp_path), HALF, 64, A16)
    assert isinstance(ran, Decision)
    assert ran.chosen.usable.bundle.cubin(ran.chosen.index).endswith(b"candidates 86 %d" % ran.chosen.index)


def test_a_file_of_its_own_comes_before_a_joint_one(tmp_path: Path) -> None:
    joint(tmp_path, 80, 86)
    own = candidates(tmp_path, 80, SPECS)
    assert [usable.path for usable in installed(tmp_path).reserve(ON_A100).usable] == [own]


def test_a_name_that_is_no_joint_file_is_not_opened(tmp_path: Path) -> None:
    others = ("candidates-sm8", "more-candidates-sm80", "candidates-sm800-sm90", ".candidates-sm80-sm86", "candidates")
    for name in ("candidates-sm80-sm86.msgpack", *(f"{other}.msgpack.xz" for other in others)):
        (tmp_path / name).write_bytes(b"no bundle")
    view = installed(tmp_path).reserve(ON_A100)
    assert (view.usable, view.skipped) == ((), ())
    (tmp_path / candidates_name(86, 80)).write_bytes(b"no bundle")
    (skipped,) = installed(tmp_path).reserve(ON_A100).skipped
    assert isinstance(skipped.error, BundleCorrupt)


def test_a_joint_file_without_what_its_name_says(tmp_path: Path) -> None:
    joint(tmp_path, 86, 90).rename(tmp_path / candidates_name(80, 90))
    (skipped,) = installed(tmp_path).reserve(ON_A100).skipped
    assert "the file holds none for sm_80, but for sm_86, sm_90" in skipped.reason


def test_each_of_a_joint_file_is_signed_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signing.keys(tmp_path / "keys")
    path = joint(tmp_path / "wheel", 80, 90)
    where = "pretuned.runtime.dispatch.snapshot.installed_places"
    monkeypatch.setattr(where, lambda: [Place(Kind.INSTALLED, tmp_path / "wheel")])
    wanted = Settings(bundles=(), overlay=tmp_path / "overlay", trusted_keys=tmp_path / "keys")
    signing.sign(Path(f"{path}#sm80"))
    assert len(take(wanted).reserve(ON_A100).usable) == 1
    (skipped,) = take(wanted).reserve(ON_H200).skipped
    assert "has no signature" in skipped.reason
    Path(f"{path}#sm80.sig").rename(f"{path}#sm90.sig")
    (skipped,) = take(wanted).reserve(ON_H200).skipped
    assert "is not of this content" in skipped.reason


def test_ranks_with_other_candidates_have_other_fingerprints(tmp_path: Path) -> None:
    write(tmp_path / "b.msgpack", {PROBLEM: [modelled(64, 0)]}, sm=80)
    without = installed(tmp_path).fingerprint(ON_A100)
    candidates(tmp_path)
    fingerprint = installed(tmp_path).fingerprint(ON_A100)
    candidates(tmp_path, specs=SPECS)
    assert len({without, fingerprint, installed(tmp_path).fingerprint(ON_A100)}) == 3


@pytest.mark.parametrize("sm", [80, 86, 89, 100, 103, 120, 121])
@pytest.mark.parametrize("dtype", SHIP_EVERYWHERE)
def test_every_gpu_runs_what_ships_of_quantised_weights(shipped: Snapshot, sm: int, dtype: DType) -> None:
    local = LocalGpu(sm, Gpu("", 100, 40 << 10, 0))
    for op in (Op.FORWARD, Op.DX):
        problem = Problem(op, dtype, 32, 5760, 2880)
        read = as_read(shipped, problem, local) if op is Op.FORWARD else problem._replace(layout=Layout.STORED)
        assert read.layout is Layout.STORED
        for M in (1, 4096):
            ran = decide(shipped, read, M, local)
            assert isinstance(ran, Decision)
            assert ran.chosen.usable.place.kind is Kind.CANDIDATES
            assert Config.from_pairs(ran.chosen.variant.config).schedule is Schedule.TILE


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype.quantised and not dtype.quantises_x])
def test_hopper_runs_codes_as_they_are_stored(shipped: Snapshot, dtype: DType) -> None:
    """Of sizes that are no whole blocks, as gpt-oss's are where it is split over four GPUs, and with zero points."""
    problem = as_read(shipped, Problem(Op.FORWARD, dtype, 32, 1440, 2896), ON_H200)
    ran = decide(shipped, problem._replace(layout=Layout.STORED), 64, ON_H200)
    assert isinstance(ran, Decision)
    assert ran.chosen.usable.place.kind in (Kind.CANDIDATES, Kind.INSTALLED)
    assert ran.chosen.variant.layout is Layout.STORED


@pytest.fixture(scope="module")
def shipped() -> Snapshot:
    return Snapshot((), installed_places)


@pytest.mark.parametrize("strict", [False, True])
def test_strict_mode_takes_no_low_rank_part_of_the_candidates(
    device: Device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, strict: bool
) -> None:
    monkeypatch.setenv("PRETUNED_STRICT", str(int(strict)))
    install_candidates_bundle(monkeypatch, tmp_path, bundle_bytes(frozenset(LOW_RANK), DType.BF16, PERSISTENT))
    assert (product_kernels.low_rank_kernel(LOW, 64, 0) is None) is strict


@pytest.mark.parametrize(("dtype", "N", "K"), [(DType.INT4_G128, 64, 192), (DType.MXFP4, 100, 208)])
def test_dx_of_codes_that_can_t_be_in_order_is_of_those_stored(tmp_path: Path, dtype: DType, N: int, K: int) -> None:
    asked = Problem(Op.DX, dtype, 8, N, K)
    assert as_read(installed(tmp_path), asked, ON_H200) == asked._replace(layout=Layout.STORED)
