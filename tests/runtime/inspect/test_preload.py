"""Variants that preload would load; loading itself is tested on a GPU."""

from __future__ import annotations

import gc
from pathlib import Path

import craft
import pytest
import torch
from emulated_driver import EmulatedGpu, emulated
from host_gpu import PERSISTENT, Device, E
from small_bundles import ON_H200, OTHER, PROBLEM, WIDE, modelled, snapshot, write

from pretuned.artifacts.bundle_file import BundleFile
from pretuned.artifacts.errors import BundleCorrupt, CudaError, HostError, InputError
from pretuned.artifacts.records import DType, Model, Op, Problem, bucket_of
from pretuned.integrations.served_layer import expected_rows
from pretuned.runtime import explain, fingerprint, preload
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import Decision, Miss, decide
from pretuned.runtime.inspect import preload as inspect_preload
from pretuned.runtime.inspect.preload import _rows, buckets, cells_of, fallbacks_of, problems_of, records_of, rows_of
from pretuned.runtime.inspect.query import twins_in_fp16

CHOICES = {PROBLEM: [modelled(64, WIDE)], OTHER: [modelled(64, WIDE)]}
MODELS = (
    Model("acme/large", 1, 1, 2, DType.BF16, (PROBLEM, OTHER)),
    Model("acme/large", 2, 1, 2, DType.BF16, (OTHER,)),
    Model("acme/small", 1, 1, 4, DType.BF16, (PROBLEM,)),
)


def test_a_model_is_all_its_shardings(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    view = snapshot(tmp_path).view(ON_H200, installed=False)
    assert records_of(["acme/large"], view) == list(MODELS[:2])
    assert records_of(["acme/small"], view) == [MODELS[2]]


def test_a_model_is_all_its_kinds_of_experts(tmp_path: Path) -> None:
    vision = MODELS[2]._replace(name="acme/small+vision")
    write(tmp_path / "a.msgpack", CHOICES, models=(*MODELS, vision))
    view = snapshot(tmp_path).view(ON_H200, installed=False)
    assert records_of(["acme/small"], view) == [MODELS[2], vision]
    assert records_of(["acme/small+vision"], view) == [vision]


def test_an_unknown_model_names_the_nearest(tmp_path: Path) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    view = snapshot(tmp_path).view(ON_H200, installed=False)
    with pytest.raises(InputError, match=r"'acme/smal' \(2 models are known\); did you mean acme/small"):
        records_of(["acme/smal"], view)


def test_of_a_bundle_with_a_damaged_record_nothing_is_preloaded_and_it_is_reported(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Its digest is right: what wrote it is broken. It stays in use, as in a rank that preloads nothing."""
    whole = tmp_path / "b.msgpack"
    write(whole, CHOICES, models=MODELS)
    index, _ = craft.parts(whole.read_bytes())
    (tmp_path / "a.msgpack").write_bytes(craft.changed(whole.read_bytes(), models=b"\xc0"))
    bundle_set = snapshot(tmp_path)
    view = bundle_set.view(ON_H200, installed=False)
    assert records_of(["acme/small"], view) == [MODELS[2]]
    assert "a.msgpack" in caplog.text
    with pytest.raises(BundleCorrupt, match=r"a\.msgpack.*models"):
        records_of(["acme/other"], view)  # it may be in there
    assert len(bundle_set.view(ON_H200, installed=False).usable) == 2
    caplog.clear()
    damaged = dict(zip((b"\x90", b"\x91"), index["problems"].values(), strict=True))
    (tmp_path / "a.msgpack").write_bytes(craft.changed(whole.read_bytes(), problems=damaged))
    nothing, (first, second) = problems_of(snapshot(tmp_path).view(ON_H200, installed=False))
    assert not nothing
    assert {first, second} == {PROBLEM, OTHER}
    assert "a.msgpack" in caplog.text


@pytest.mark.parametrize(
    ("tokens", "rows"),
    [
        (range(1, 2), (8, 8)),
        (range(1, 8193), (8, 65536)),
        (range(100, 201, 50), (800, 1600)),
        (range(200, 99, -50), (800, 1600)),
        (range(65), (8, 512)),
        (range(0), (0, 0)),
        (range(-5, 0), (0, 0)),
        (None, (1, 1 << 20)),
    ],
)
def test_the_rows_of_a_range_of_tokens(tokens: range | None, rows: tuple[int, int]) -> None:
    model = Model("m", 1, 1, 8, DType.BF16, (PROBLEM,))
    assert rows_of(model, tokens) == rows


def test_with_expert_parallelism_a_rank_gets_any_part_of_them() -> None:
    """Kernels are chosen for what ``expected_rows`` says, or for every slot of a token, wherever its expert is."""
    few = Problem(PROBLEM.op, PROBLEM.dtype, 4, PROBLEM.N, PROBLEM.K)
    model = Model("m", 1, 8, 8, DType.BF16, (few,))
    assert rows_of(model, range(16, 1025)) == (1, 8192)
    assert rows_of(model, range(0)) == (0, 0)
    loaded = buckets(rows_of(model, range(16, 1025)))
    for tokens in range(16, 1025):
        expected = expected_rows(tokens, 8, 4, 32)
        assert expected is not None
        assert bucket_of(expected) in loaded
        assert bucket_of(tokens * 8) in loaded


def test_the_rows_of_a_problem_whose_top_k_nobody_knows() -> None:
    assert _rows(PROBLEM, range(3, 4)) == (1, 24)
    assert _rows(PROBLEM, range(0)) == (0, 0)
    assert _rows(PROBLEM, None) == (1, 1 << 20)


def test_buckets() -> None:
    assert buckets((0, 0)) == []
    assert buckets((1, 1)) == [1]
    assert buckets((8, 90)) == [8, 16, 32, 64]
    assert buckets((8, 91)) == [8, 16, 32, 64, 128]
    assert buckets((1, 1 << 40))[-1] == 1 << 31


@pytest.mark.parametrize("tokens", [range(1, 2), range(3, 700), range(64, 65)])
@pytest.mark.parametrize("model", MODELS)
def test_every_call_of_a_step_is_among_the_cells(tmp_path: Path, model: Model, tokens: range) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    bundle_set = snapshot(tmp_path)
    wanted = {problem: buckets(rows_of(model, tokens)) for problem in model.problems}
    cells = cells_of(wanted, bundle_set, ON_H200)
    assert len(cells) == len(set(cells))
    loads = {variant_of(decide(bundle_set, problem, bucket, ON_H200)) for problem, bucket in cells}
    loads |= set(fallbacks_of(wanted, bundle_set, ON_H200))
    count = len(bundle_set.decisions)
    for T in tokens:
        for problem in model.problems:
            assert variant_of(decide(bundle_set, problem, T * model.top_k, ON_H200)) in loads
    assert len(bundle_set.decisions) == count
    for T in tokens:
        for problem in model.problems:
            assert variant_of(decide(bundle_set, problem, T * model.top_k, ON_H200, aligned=False)) in loads


def variant_of(decision: Decision | Miss) -> tuple[BundleFile, int]:
    assert isinstance(decision, Decision)
    return decision.chosen.usable.bundle, decision.chosen.index


def test_forms_that_no_bundle_has_code_for_are_left_out(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write(tmp_path / "a.msgpack", CHOICES, models=MODELS)
    cells = cells_of({PROBLEM: [64]}, snapshot(tmp_path), ON_H200)
    assert cells == [(PROBLEM, 64)]
    assert not caplog.records


@pytest.mark.parametrize("enabled", [True, False])
def test_no_collection_delays_it_and_none_is_left_out_afterwards(
    clean_places: Path, monkeypatch: pytest.MonkeyPatch, enabled: bool
) -> None:
    """A full one takes 80 ms where torch is imported, whatever little was allocated."""
    seen = []

    def ask() -> int:
        seen.append(gc.isenabled())
        raise CudaError("far enough")

    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", ask)
    was = gc.isenabled()
    try:
        (gc.enable if enabled else gc.disable)()
        with pytest.raises(CudaError, match="far enough"):
            preload()
        assert seen == [False]
        assert gc.isenabled() is enabled
    finally:
        (gc.enable if was else gc.disable)()


def test_one_model_by_its_name(clean_places: Path) -> None:
    with emulated(EmulatedGpu()), pytest.raises(InputError, match="Qwen/Qwen3-30B-A3B"):
        preload("Qwen/Qwen3-30B-A3B")  # of which no usable bundle has a choice


def test_a_model_in_one_format_of_its_weights() -> None:
    """Of the bundles that ship."""
    view = dispatch_snapshot.snapshot().view(ON_H200, installed=True)

    def dtypes(model: str, weights: str | None) -> set[DType]:
        return {record.dtype for record in records_of([model], view, weights)}

    assert dtypes("openai/gpt-oss-20b", None) == {DType.BF16, DType.FP16, DType.MXFP4}
    assert dtypes("openai/gpt-oss-20b", "mxfp4") == {DType.MXFP4}
    assert dtypes("openai/gpt-oss-20b", "bf16") == {DType.BF16}
    assert dtypes("deepseek-ai/DeepSeek-V3", "fp8_block") == {DType.FP8_BLOCK, DType.FP8_BLOCK_A16}
    message = (
        r"bundle has openai/gpt-oss-20b in nvfp4 \(there is bf16, fp16, mxfp4\)\. Build it with: aot build --models "
    )
    with pytest.raises(InputError, match=message + '"openai/gpt-oss-20b weights=nvfp4"'):
        records_of(["openai/gpt-oss-20b"], view, "nvfp4")


def test_fp16_beside_bf16_is_not_what_a_deployment_comes_to() -> None:
    first, other = (Problem(Op.FORWARD, DType.BF16, 8, 64, K) for K in (32, 64))
    half, alone = first._replace(dtype=DType.FP16), other._replace(dtype=DType.FP16, E=4)
    codes = first._replace(dtype=DType.MXFP4)
    assert twins_in_fp16([first, half, other, alone, codes]) == {half}
    assert twins_in_fp16([half, alone, codes]) == set()


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ("fp8", "weights is 'fp8', wanted one of bf16, "),
        (8, "weights is 8, wanted"),
    ],
)
def test_weights_are_a_format_with_kernels(weights: object, message: str) -> None:
    with pytest.raises(InputError, match=f"preload: {message}"):
        preload(weights=weights)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=f"explain: {message}"):
        explain(E=8, N=512, K=512, M=1, sm=90, weights=weights)  # type: ignore[arg-type]


def test_tokens_are_a_range() -> None:
    with pytest.raises(InputError, match=r"tokens is 8192, wanted a range, e.g. range\(1, 8193\)"):
        preload(tokens=8192)  # type: ignore[arg-type]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_without_a_gpu(clean_places: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Code for a GPU machine runs where none is: nothing to load is no error. A GPU that is named is to be there."""
    done = preload(models=["Qwen/Qwen3-30B-A3B"])
    assert (done.count, done.problems, done.cells) == (0, 0, 0)
    assert "no CUDA GPU here, nothing is loaded" in caplog.text
    assert fingerprint() == fingerprint()
    with pytest.raises((HostError, CudaError)):
        preload(device=0)
    with pytest.raises((HostError, CudaError)):
        fingerprint(device=0)


def test_beside_quantised_weights_rows_are_bf16() -> None:
    """Products of the bundles that ship; a layer's calls then load no pass."""
    shipped = dispatch_snapshot.snapshot()
    first, quantised = (
        inspect_preload.passes_of([PROBLEM._replace(dtype=dtype)], shipped, ON_H200)
        for dtype in (DType.BF16, DType.MXFP4)
    )
    assert len(first) > 2
    assert first == quantised


def test_it_tells_how_much_torch_runs(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.has(PERSISTENT, DType.BF16)
    device.runs_torch([Op.FORWARD], (64, 64), buckets=[8, 16])  # measured for two of eight buckets, 1 to 128
    with caplog.at_level("INFO"):
        done = preload(problems=[Problem(Op.FORWARD, DType.BF16, E, 64, 64)], tokens=range(8, 33), device=0)
    assert (done.by_torch, done.cells, done.count) == (2, 24, len(device.loads))  # plain, scatter and gather
    assert "torch's grouped_mm, measured faster, runs 2 of 24 cells" in caplog.text
