"""When rows are gathered beforehand: the rule over bundle files, and the launches on a GPU that is host memory."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any, TypeAlias

import host_gpu
import pytest
import torch
from host_gpu import ALL, TOPK, Device, E, K, N, T
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from pairwise import pairwise
from small_bundles import ELF, H100, H200, ON_A100, ON_H100, ON_H200, Spec, bundle, measured, modelled, snapshot

from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    LocalGpu,
    Model,
    Op,
    Problem,
    RowOp,
    Variant,
)
from pretuned.kernels import rowops
from pretuned.kernels import rowops as contract
from pretuned.kernels.chips import chip_named
from pretuned.kernels.plans import gather_us, least_activation_us
from pretuned.kernels.registry import ENTRIES
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime import grouped_gemm, grouped_gemm_dX, moe_mlp, sort_routing
from pretuned.runtime.dispatch import plans
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.inspect import explain, preload
from pretuned.runtime.inspect.explain import examine
from pretuned.runtime.launch import gather

RESULTS = Path(__file__).parents[3] / "benchmarks/results/passes-h200.json"
BOTH = Fusion.SILU | Fusion.GATHER
M = 8192
ON_LOAD = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.GATHER)
PLAIN = ON_LOAD._replace(fusion=Fusion.NONE)
WIDE, HALF = (Config(128, n, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE) for n in (256, 128))
# By index: what gathers, what does not, indexed code in another config and in that one, silu with a gather and without.
CODE = (
    Spec(WIDE, fusion=Fusion.GATHER),
    Spec(WIDE),
    Spec(HALF, fusion=Fusion.SCATTER),
    Spec(WIDE, fusion=Fusion.SCATTER),
    Spec(WIDE, fusion=BOTH),
    Spec(WIDE, fusion=Fusion.SILU),
)
PASS_US = 3.7 + 1.6 * ((M + M / 8) * 2048 * 2 + 8 * M) / 4800e3


def a_pass() -> Variant:
    spec = RowOpSpec(RowOp.GATHER, DType.BF16, 16)
    return Variant(
        "gather",
        ENTRIES["gather"].revision,
        1,
        RowOp.GATHER,
        spec.dtype,
        Layout.NK,
        Fusion.NONE,
        16,
        spec.max_experts,
        spec.config.pairs(),
        "gather",
        rowops.arguments(RowOp.GATHER),
        (),
        128,
        0,
        40,
        0,
        0,
        len(ELF),
        hashlib.sha256(ELF).digest(),
    )


Row: TypeAlias = "Choice | list[Choice]"


def book(
    folder: Path,
    on_load: Row,
    plain: Row,
    *,
    gpus: tuple[Gpu, ...] = (H200,),
    has_pass: bool = True,
    silu: tuple[Row | None, Row | None] = (None, None),
    specs: tuple[Spec, ...] = CODE,
    models: tuple[Model, ...] = (),
) -> Path:
    """A folder of a bundle of these choices: that gathers, that does not, and the two of silu in the epilogue."""
    rows = {
        ON_LOAD: on_load,
        PLAIN: plain,
        PLAIN._replace(fusion=BOTH): silu[0],
        PLAIN._replace(fusion=Fusion.SILU): silu[1],
    }
    choices = {problem: [row] if isinstance(row, Choice) else row for problem, row in rows.items() if row is not None}
    published = bundle(choices, gpus=gpus, specs=specs, models=models)
    if has_pass:
        published = published._replace(
            variants=(*published.variants, a_pass()),
            cubins=(*published.cubins, ELF),
            kernels=(
                *published.kernels,
                Kernel("gather", ENTRIES["gather"].revision, hashlib.sha256(b"source").digest()),
            ),
        )
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "a.msgpack").unlink(missing_ok=True)
    publish(folder / "a.msgpack", encode(published))
    return folder


def beforehand(folder: Path, local: LocalGpu = ON_H200, rows: int = M, top_k: int = 8, **how: Any) -> int | None:
    """The variant of the plain product that runs, or None for the code that gathers."""
    decision = plans.rows_first(snapshot(folder), ON_LOAD, rows, local, top_k=top_k, **how)
    return None if decision is None else decision.variant


def why(folder: Path, local: LocalGpu = ON_H200, fusion: Fusion = Fusion.GATHER) -> str:
    """Why rows are gathered first, or on load."""
    decision = explain.rows_first(snapshot(folder), ON_LOAD, M, local, top_k=8, fusion=fusion, aligned=True)
    assert decision is not None
    assert (None if decision.chosen is None else decision.chosen.index) == beforehand(folder, local, fusion=fusion)
    return decision.reason


def pass_us(rows: int, K: int, itemsize: int, top_k: int, gpu: Gpu) -> float | None:
    """The time of the row kernel on a GPU."""
    return gather_us(rows, K, itemsize, top_k, chip_named(gpu.name))


def test_the_passes_time_is_that_of_the_benchmark(monkeypatch: pytest.MonkeyPatch) -> None:
    cells = [cell for cell in json.loads(RESULTS.read_text())["cells"] if cell["pass"] == "gather"]
    shapes = {"qwen3-30b": (2048, 8), "mixtral-8x7b": (4096, 2), "gpt-oss-20b": (2880, 4)}
    large = [cell for cell in cells if cell["tokens"] >= 1024]
    assert {cell["model"] for cell in large} == set(shapes)
    for cell in large:
        H, k = shapes[cell["model"]]
        assert pass_us(cell["tokens"] * k, H, 2, k, H200) == pytest.approx(cell["us"]["ours"], rel=0.1)
    assert pass_us(M, 2048, 2, 8, H200) == pytest.approx(PASS_US)
    assert pass_us(M, 2048, 2, 8, H200._replace(name="NVIDIA H300")) is None
    once = pass_us(8 * M, 7168, 2, 8, H200)
    monkeypatch.setattr(contract, "BY_TOKEN_LEAST_BYTES", 1 << 40)
    often = pass_us(8 * M, 7168, 2, 8, H200)
    assert once is not None
    assert often is not None
    assert once < 0.9 * often


@pytest.mark.parametrize(("saved_us", "runs"), [(PASS_US + 0.1, 1), (PASS_US - 0.1, None), (-1.0, None)])
def test_measured_the_product_and_the_pass_must_take_less(tmp_path: Path, saved_us: float, runs: int | None) -> None:
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 300.0 - saved_us))
    assert beforehand(tmp_path) == runs
    assert beforehand(tmp_path, rows=M - 100) == runs
    assert beforehand(tmp_path, rows=M * 3 // 2) is None  # no choice for that
    assert beforehand(tmp_path, checks=True) is None  # an index to be checked costs a launch


def test_the_fewer_rows_read_one_row_the_dearer_is_the_pass(tmp_path: Path) -> None:
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 300.0 - PASS_US - 0.1))
    assert beforehand(tmp_path) == 1
    assert beforehand(tmp_path, top_k=1) is None
    assert beforehand(tmp_path, top_k=0) is None  # the pass can't read x


MODELLED_US = 300 / 1.05 - (3.7 + 1.6 * ((M + M / 8) * 2048 * 2 + 8 * M) / 3350e3)  # an H100 stands for sm_90


@pytest.mark.parametrize(
    ("plain_us", "runs"), [(200.0, 1), (MODELLED_US - 0.1, 1), (MODELLED_US + 0.1, None), (270.0, None)]
)
def test_modelled_by_more_than_5_percent(tmp_path: Path, plain_us: float, runs: int | None) -> None:
    book(tmp_path, modelled(M, 0, 300.0), modelled(M, 1, plain_us), gpus=())
    for local in (ON_H100, ON_H200, LocalGpu(90, H200._replace(name="NVIDIA H300"))):
        assert beforehand(tmp_path, local) == runs


def test_times_of_two_sources_or_gpus_are_not_compared(tmp_path: Path) -> None:
    book(tmp_path / "1", measured(M, 0, 300.0), modelled(M, 1, 10.0))
    book(tmp_path / "2", modelled(M, 0, 300.0), measured(M, 1, 10.0))
    other = H200._replace(name="NVIDIA H300")
    book(tmp_path / "3", measured(M, 0, 300.0), measured(M, 1, 10.0, gpu=1), gpus=(H200, other))
    assert [beforehand(tmp_path / name) for name in "123"] == [None] * 3
    book(tmp_path / "4", measured(M, 0, 300.0), measured(M, 1, 10.0), gpus=(other,))
    assert beforehand(tmp_path / "4", LocalGpu(90, other)) is None
    assert "the bandwidth of this GPU is not known" in why(tmp_path / "4", LocalGpu(90, other))
    book(tmp_path / "5", measured(M, 0, 300.0), measured(M, 1, 10.0))
    assert beforehand(tmp_path / "5", ON_H100) == 1  # both of the H200
    assert beforehand(tmp_path / "5", ON_A100) is None
    assert beforehand(tmp_path / "5", aligned=False) is None


def test_of_a_bundle_of_several_gpus_each_has_its_own_times_compared(tmp_path: Path) -> None:
    h100, h200, guess = 0, 1, modelled(M, 0, 1.0)
    on_load = [guess, measured(M, 0, 300.0, h100), measured(M, 0, 300.0, h200)]
    plain = [measured(M, 1, 299.0, h100, second=6), measured(M, 1, 200.0, h200, second=7)]
    silu = [measured(M, 4, 10.0, h100), measured(M, 4, 900.0, h200)]
    specs = (*CODE, Spec(HALF), Spec(HALF._replace(block_n=64)))
    book(tmp_path, on_load, plain, gpus=(H100, H200), silu=(silu, None), specs=specs)
    assert (beforehand(tmp_path, ON_H100), beforehand(tmp_path, ON_H200)) == (None, 1)
    assert beforehand(tmp_path, ON_H200, fusion=Fusion.GATHER | Fusion.BIAS) == 3
    both, bundle_set = PLAIN._replace(fusion=BOTH), snapshot(tmp_path)
    assert plans.fused_silu(bundle_set, both, M, ON_H100, aligned=True, top_k=8) is not None
    assert plans.fused_silu(bundle_set, both, M, ON_H200, aligned=True, top_k=8) is None


def test_preload_loads_what_is_faster_on_one_of_several_gpus(tmp_path: Path) -> None:
    on_load = [measured(M, 0, 100.0, 0), measured(M, 0, 300.0, 1)]
    for plain_us, runs in ((200.0, {1, 3}), (301.0, set())):  # the H200's, slower than the H100 on load
        book(tmp_path, on_load, [measured(M, 1, 110.0, 0), measured(M, 1, plain_us, 1)], gpus=(H100, H200))
        assert {index for _, index in preload.planned_for([(ON_LOAD, M)], snapshot(tmp_path), ON_H200)} == runs


def test_a_bundle_without_the_pass_gathers_on_load(tmp_path: Path) -> None:
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 10.0), has_pass=False)
    assert beforehand(tmp_path) is None
    assert "no usable bundle has the row kernel" in why(tmp_path)


@pytest.mark.parametrize("beside", [Fusion.BIAS, Fusion.SCATTER, Fusion.WEIGHT, Fusion.SCATTER | Fusion.BIAS])
def test_beside_a_gather_the_indexed_code_of_the_plain_config_runs(tmp_path: Path, beside: Fusion) -> None:
    fusion = Fusion.GATHER | beside
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 200.0))
    assert beforehand(tmp_path, fusion=fusion) == 3
    book(tmp_path, measured(M, 0, 210.0 + PASS_US - 0.1), measured(M, 1, 200.0))
    assert beforehand(tmp_path) == 1
    assert beforehand(tmp_path, fusion=fusion) is None  # 5 % of the product more


@pytest.mark.parametrize("beside", [Fusion.BIAS, Fusion.SCATTER | Fusion.WEIGHT])
def test_where_the_plain_config_has_no_indexed_code_the_runner_up_s_runs(tmp_path: Path, beside: Fusion) -> None:
    """Of a bundle that was built before there was any where warpgroups take turns."""
    turns = Spec(Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG))
    specs = (*CODE, turns)
    fusion = Fusion.GATHER | beside
    plain = measured(M, 6, 200.0, second=1)  # takes 220
    book(tmp_path, measured(M, 0, 300.0), plain, specs=specs)
    assert beforehand(tmp_path) == 6
    assert beforehand(tmp_path, fusion=fusion) == 3
    assert {index for _, index in preload.planned_for([(ON_LOAD, M)], snapshot(tmp_path), ON_H200)} == {6, 3}
    assert f"the GEMM {1.05 * 220:.1f} us measured and the row kernel {PASS_US:.1f} us" in why(tmp_path, fusion=fusion)
    book(tmp_path, measured(M, 0, 1.05 * 220 + PASS_US - 0.1), plain, specs=specs)
    assert beforehand(tmp_path) == 6
    assert beforehand(tmp_path, fusion=fusion) is None
    book(tmp_path, measured(M, 0, 300.0), measured(M, 6, 200.0), specs=specs)
    assert "stores by index" in why(tmp_path, fusion=fusion)


@pytest.mark.parametrize(
    ("us", "variant"),
    [
        ((300.0, 280.0, 290.0, 272.0), 5),  # the rows gathered beforehand, then silu
        ((300.0, 290.0, 290.0, 280.0), 4),  # on load: the pass takes more than the 10 us
        ((300.0, 270.0, 320.0, 290.0), None),  # either is slower than the product and its two passes
        ((300.0, 295.0, 304.0, None), 4),
        ((300.0, 280.0, None, 270.0), 5),
        ((300.0, 280.0, None, None), None),
    ],
)
def test_silu_is_the_least_of_four(tmp_path: Path, us: tuple[float | None, ...], variant: int | None) -> None:
    assert 13 < PASS_US < 18
    on_load, plain, *silu = (
        None if time_us is None else measured(M, at, time_us) for at, time_us in zip((0, 1, 4, 5), us, strict=True)
    )
    assert on_load is not None
    assert plain is not None
    book(tmp_path, on_load, plain, silu=(silu[0], silu[1]))
    asked = PLAIN._replace(fusion=BOTH)
    least_us = least_activation_us(asked, M, chip_named(H200.name))
    decision = explain.fused_silu(snapshot(tmp_path), asked, M, ON_H200, aligned=True, top_k=8)
    options: dict[int | None, float] = {None: min(300.0, (us[1] or 0) + PASS_US) + least_us}
    options |= {4: us[2]} if us[2] is not None else {}
    options |= {5: us[3] + PASS_US} if us[3] is not None else {}
    assert min(options, key=lambda option: options[option]) == variant  # (what the case above says)
    assert (None if decision.chosen is None else decision.chosen.index) == variant, decision.reason
    explanation = examine(snapshot(tmp_path), asked, M, ON_H200, aligned=True, top_k=8)
    assert explanation.gathered_first is (variant == 5 or (variant is None and (us[1] or 0) + PASS_US < 300))
    # rows that can't be gathered beforehand
    left = plans.fused_silu(snapshot(tmp_path), asked, M, ON_H200, aligned=True, top_k=0)
    assert left is None or left.variant == 4


def test_explain_tells_of_the_pass(tmp_path: Path) -> None:
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 200.0))
    explanation = examine(snapshot(tmp_path), ON_LOAD, M, ON_H200, aligned=True, top_k=8)
    assert explanation.gathered_first
    assert explanation.chosen is not None
    assert explanation.chosen.index == 1
    assert "after a row kernel that gathers the rows of x" in str(explanation)
    assert f"200.0 us measured and the row kernel {PASS_US:.1f} us, gathered on load 300.0 us" in explanation.reason
    row = json.loads(json.dumps(explanation.to_dict()))
    assert row["gathered_first"] is True
    assert [candidate["variant"] for candidate in row["candidates"]][:2] == [1, 0]
    book(tmp_path, measured(M, 0, 200.0), measured(M, 1, 199.0))
    explanation = examine(snapshot(tmp_path), ON_LOAD, M, ON_H200, aligned=True, top_k=8)
    assert not explanation.gathered_first
    assert explanation.chosen is not None
    assert explanation.chosen.index == 0
    assert "measured on this GPU, for this problem" in explanation.reason
    assert "gathering rows first is not faster" in explanation.reason
    assert not examine(snapshot(tmp_path), PLAIN, M, ON_H200, aligned=True).gathered_first


def test_explain_takes_the_top_k_of_a_model_and_says_so(tmp_path: Path) -> None:
    """The pass reads M / top_k rows of x: what pays with eight experts a token doesn't with one."""
    gain_us = 0.5 * (PASS_US + pass_us(M, ON_LOAD.K, 2, 1, H200))  # type: ignore[operator]
    times = measured(M, 0, 300.0), measured(M, 1, 300.0 - gain_us)
    asked = ON_LOAD._replace(fusion=Fusion.GATHER | Fusion.WEIGHT)  # a form that no plan has
    eight, two = (Model(name, 1, 1, k, DType.BF16, (PLAIN,)) for name, k in (("eight", 8), ("two", 2)))

    def decided_by(*models: Model, problem: Problem = ON_LOAD, top_k: int | None = None) -> tuple[bool, str | None]:
        book(tmp_path, *times, models=models)
        explanation = examine(snapshot(tmp_path), problem, M, ON_H200, aligned=True, top_k=top_k)
        if explanation.assumed is not None:
            assert f"  assumed: {explanation.assumed}" in str(explanation)
        return explanation.gathered_first, explanation.to_dict()["assumed"]

    assert decided_by() == (False, "top_k=1, as no bundle has a model with this product")
    assert decided_by(eight) == (True, "top_k=8, as eight has")
    assert decided_by(eight, problem=asked)[1] == "top_k=8, as eight has"
    turned = ON_LOAD._replace(layout=Layout.KN)  # a model has as many whichever way its weights lie
    assert decided_by(eight, problem=turned)[1] == "top_k=8, as eight has"
    assert decided_by(eight, two)[1] == "top_k=2, as two has; eight has 8"
    assert decided_by(eight, top_k=1) == (False, None)
    assert decided_by(top_k=8) == (True, None)
    assert decided_by(eight, problem=PLAIN) == (False, None)
    assert decided_by(eight, problem=ON_LOAD._replace(op=Op.DX))[1] is None
    assert decided_by(eight, problem=ON_LOAD._replace(top_k=4))[1] is None  # it says so itself
    book(tmp_path, *times, models=(eight,), silu=(measured(M, 4, 500.0), None))
    gated = examine(snapshot(tmp_path), PLAIN._replace(fusion=BOTH), M, ON_H200, aligned=True)
    assert (gated.gathered_first, gated.assumed) == (True, "top_k=8, as eight has")


def test_preload_loads_what_may_run_after_a_pass(tmp_path: Path) -> None:
    def top_ks(problem: Problem) -> set[int]:
        return {index for _, index in preload.planned_for([(problem, M)], snapshot(tmp_path), ON_H200)}

    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 200.0), silu=(measured(M, 4, 300.0), measured(M, 5, 190.0)))
    assert top_ks(ON_LOAD) == {1, 3, 4, 5}  # with a bias, and with silu, for whatever top_k
    assert top_ks(PLAIN) == {5}
    book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 299.9))  # the row kernel takes more, whatever top_k is
    assert top_ks(ON_LOAD) == set()
    book(tmp_path, measured(M, 0, 200.0), measured(M, 1, 200.0))
    assert top_ks(ON_LOAD) == set()
    assert {(PLAIN._replace(fusion=fusion), M) for fusion in (Fusion.SILU, BOTH, Fusion.GATHER)} <= set(
        preload.cells_of(
            {PLAIN: [M]},
            snapshot(
                book(
                    tmp_path, measured(M, 0, 3.0), measured(M, 1, 2.0), silu=(measured(M, 4, 3.0), measured(M, 5, 2.0))
                )
            ),
            ON_H200,
        )
    )


def test_preload_loads_the_very_indexed_code_that_runs(tmp_path: Path) -> None:
    """A merged bundle may have a config twice, for few experts and for many."""
    few, many = (Spec(WIDE, fusion=Fusion.SCATTER, max_experts=most) for most in (64, 1024))
    for at, specs in ((3, (*CODE, many)), (6, (*CODE[:3], few, *CODE[4:], many)), (3, (*CODE, few))):
        book(tmp_path, measured(M, 0, 300.0), measured(M, 1, 200.0), specs=specs)
        assert beforehand(tmp_path, fusion=Fusion.GATHER | Fusion.BIAS) == at
        assert {index for _, index in preload.planned_for([(ON_LOAD, M)], snapshot(tmp_path), ON_H200)} == {1, at}


def test_a_choice_of_another_bucket_is_no_rival(tmp_path: Path) -> None:
    book(tmp_path, measured(M, 0, 300.0), measured(M // 2, 1, 10.0))
    assert beforehand(tmp_path) is None
    assert "the bundle has no choice for it at M near 8192" in why(tmp_path)


# On a GPU that is host memory.


@pytest.fixture
def first(device: Device) -> Device:
    device.gathers_first((N, K), (2 * N, K))
    return device


@pairwise(
    {
        **dict.fromkeys(("permute_x", "permute_y", "weights", "bias"), (False, True)),
        "layout": ["nk", "kn"],
        "there": ["all", "no pass", "plain code alone"],
    },
    strength=3,
)
def test_every_form_and_gradient_is_the_references(
    first: Device, permute_x: bool, permute_y: bool, weights: bool, bias: bool, layout: str, there: str
) -> None:
    first.layout = Layout(layout)
    first.gathers_first((N, K))
    if there != "all":
        first.there -= {RowOp.GATHER} if there == "no pass" else {spec for spec in ALL if spec[1] is Fusion.SCATTER}
    tensors = host_gpu.tensors(permute_x=permute_x, weights=weights, bias=bias, layout=layout)
    form = {"permute_x": permute_x, "permute_y": permute_y, "w_layout": layout}
    first.visible = False
    wanted = host_gpu.ran(form, tensors, wide=False)
    first.visible = True
    for wide in (False, True):
        for got, want in zip(host_gpu.ran(form, tensors, wide), wanted, strict=True):
            torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-5)
    if permute_x and there == "all" and (permute_y or weights):
        assert first.passed


@settings(max_examples=60, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    index=st.lists(st.integers(-2, T * TOPK + 2), min_size=1, max_size=T * TOPK, unique=True),
    data=st.data(),
    wide=st.booleans(),
    permute_y=st.booleans(),
    weighted=st.booleans(),
    zero_tail=st.booleans(),
    into=st.booleans(),
)
def test_any_index_gives_what_the_code_that_gathers_gives(
    device: Device,
    index: list[int],
    data: st.DataObject,
    wide: bool,
    permute_y: bool,
    weighted: bool,
    zero_tail: bool,
    into: bool,
) -> None:
    sizes = torch.tensor(data.draw(st.lists(st.integers(0, 6), min_size=E, max_size=E)))
    flat = torch.tensor(index, dtype=torch.int64 if wide else torch.int32)
    generator = torch.Generator().manual_seed(len(index))
    x, w = torch.randn(T, K, generator=generator), torch.randn(E, N, K, generator=generator)
    weights = torch.rand(T, TOPK, generator=generator) if weighted else None
    written = torch.zeros(len(index), dtype=torch.bool)
    written[: int(sizes.sum())] = True
    written &= (flat >= 0) & (flat < T * TOPK)
    results = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "BY_TOKEN_LEAST_BYTES", data.draw(st.sampled_from([0, 1 << 40])))
        for on_load in (1.0, 1000.0):  # us: rows are gathered on load, or beforehand
            device.measures({(Op.FORWARD, Fusion.GATHER): on_load, (Op.FORWARD, Fusion.NONE): 500.0}, (N, K))
            out = torch.full((T * TOPK if permute_y else len(index), N), 7.0) if into else None
            results.append(
                grouped_gemm(
                    x,
                    w,
                    sizes,
                    TOPK,
                    flat,
                    permute_x=True,
                    permute_y=permute_y,
                    topk_weights=weights,
                    fuse_mul_post=weighted,
                    zero_tail=zero_tail,
                    out=out,
                )
            )
    if not (permute_y or zero_tail or into):
        results = [result[written] for result in results]
    torch.testing.assert_close(results[1], results[0], rtol=0, atol=0)


@pytest.mark.parametrize("repeats", [True, False])
def test_rows_of_one_token_need_no_pass(first: Device, monkeypatch: pytest.MonkeyPatch, repeats: bool) -> None:
    """All of them are its row, read with a stride of 0, where the driver knows such rows: of a call, and of a layer."""
    if not repeats:
        first.fails["cuTensorMapEncodeTiled"] = 1
    up, down = torch.randn(E, 2 * N, K), torch.randn(E, K, N)
    for tokens in (1, 2, 1):
        x, ids, weights = torch.randn(tokens, K), torch.tensor([[2, 0], [1, 3]])[:tokens], torch.rand(tokens, TOPK)
        routing = sort_routing(ids, E)
        results = []
        for is_on in (False, True):
            first.visible = is_on
            first.launches.clear()
            how = {"topk": TOPK, "gather_indices": routing.gather_indices, "permute_x": True}
            y = grouped_gemm(x, up, routing.m_sizes, permute_y=True, **how)
            of_call, expected = list(first.passed), [RowOp.GATHER] * (tokens == 2 or not repeats)
            results.append((y, moe_mlp(x, up, down, ids, weights)))
        assert of_call == expected
        assert first.passed == expected + expected + [RowOp.ACTIVATION, RowOp.COMBINE]
        torch.testing.assert_close(results[1], results[0], rtol=1e-5, atol=1e-4)


def test_an_index_that_nobody_vouches_for_leaves_the_rows_of_others_alone(
    first: Device, monkeypatch: pytest.MonkeyPatch
) -> None:
    x, w = torch.randn(T, K), torch.randn(E, N, K)
    index = torch.arange(T * TOPK)
    sizes = torch.tensor([3, 0, 5, 4])
    grouped_gemm(x, w, sizes, TOPK, index, permute_x=True)
    assert first.passed == [RowOp.GATHER]
    for how in ({"zero_tail": True}, {"out": torch.zeros(T * TOPK, N)}):
        grouped_gemm(x, w, sizes, TOPK, index, permute_x=True, **how)
        assert first.passed == [RowOp.GATHER]  # such rows are not to be written there
    dy = torch.randn(T * TOPK, N)
    grouped_gemm_dX(dy, w, sizes, TOPK, index, permute_y=True)
    assert first.passed == [RowOp.GATHER]
    grouped_gemm_dX(dy, w, sizes, TOPK, index, permute_y=True, topk_weights=torch.rand(T, TOPK), fuse_mul_post=True)
    assert first.passed == [RowOp.GATHER] * 2  # the indexed code leaves them out itself


def test_rows_that_are_not_dense_are_gathered_on_load(first: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    wide, w = torch.randn(T, 2 * K), torch.randn(E, N, K)
    index, sizes = torch.arange(T * TOPK), torch.tensor([3, 0, 5, 6])
    results = [grouped_gemm(x, w, sizes, TOPK, index, permute_x=True) for x in (wide[:, :K], wide[:, :K].contiguous())]
    torch.testing.assert_close(results[0], results[1], rtol=0, atol=0)
    assert first.passed == [RowOp.GATHER]
    none = grouped_gemm(wide[:0, :K].contiguous(), w, sizes, TOPK, index, permute_x=True, permute_y=False)
    assert none.shape == (T * TOPK, N)
    assert first.passed == [RowOp.GATHER]


def test_the_scratch_is_of_the_call(first: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is allocated for each launch, [M, K], and nothing that is kept holds it."""
    shapes: list[tuple[int, ...]] = []
    empty = torch.empty_strided

    def spy(size: tuple[int, ...], *rest: Any, **how: Any) -> torch.Tensor:
        shapes.append(tuple(size))
        return empty(size, *rest, **how)

    x, w, index = torch.randn(T, K), torch.randn(E, N, K), torch.arange(T * TOPK)
    new_empty = torch.Tensor.new_empty

    def spy_new(self: torch.Tensor, size: tuple[int, ...], **how: Any) -> torch.Tensor:
        shapes.append(tuple(size))
        return new_empty(self, size, **how)

    monkeypatch.setattr(torch, "empty_strided", spy)
    monkeypatch.setattr(torch.Tensor, "new_empty", spy_new)
    for _ in range(3):
        with torch.no_grad():
            grouped_gemm(x, w, torch.tensor([3, 0, 5, 6]), TOPK, index, permute_x=True)
    assert shapes.count((T * TOPK, K)) == 3
    (ready,) = (launcher for launcher in dispatch_snapshot.snapshot().launchers.values() if launcher.gather is not None)
    assert not any(isinstance(field, torch.Tensor) for field in ready)


def test_an_index_is_brought_into_range() -> None:
    for kind in (torch.int32, torch.int64):
        index = torch.tensor([-5, 0, 13, 14, 2**31 - 1], dtype=kind)
        got = gather.in_range(index, torch.empty(7, 1), 2)
        assert got.dtype is kind
        assert got.tolist() == [0, 0, 13, 13, 13]


def test_an_index_into_no_rows_launches_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    x, w, m_sizes = torch.empty(0, host_gpu.K), torch.randn(2, host_gpu.N, host_gpu.K), torch.tensor([2, 2]).int()
    y = grouped_gemm(x, w, m_sizes, 2, torch.arange(4), permute_x=True, zero_tail=True)
    assert torch.equal(y, torch.zeros(4, host_gpu.N))
    assert device.launched == []
