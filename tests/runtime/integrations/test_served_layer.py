"""Which layers of an engine the bundles are for. (That their kernels are loaded is tested on a GPU.)"""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
from small_bundles import DRIVER, H200, HOPPERS, ON_A100, ON_H200, WIDE, Spec, measured, modelled, write

from pretuned.aot.models.load import load_models
from pretuned.aot.plan.plan import plan, planned_on
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Gpu, LocalGpu, Op, Problem, buckets_between
from pretuned.integrations.served_layer import (
    ServedLayer,
    choose_invariantly,
    expected_rows,
    follow,
    lacks,
    pad_bias,
    prepared,
    widened,
)
from pretuned.kernels.activations import Activation
from pretuned.kernels.spec import Config, Loads, Schedule
from pretuned.runtime import batch_invariant, reload
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.ops.activation import RowActivation
from pretuned.runtime.settings import Invariance
from pretuned.runtime.weights.expert_weights import ExpertWeights

SILU = RowActivation(Activation("silu"), gated=True, interleaved=False)
LAYER = ServedLayer(E=8, H=768, I=512, top_k=2, dtype=DType.BF16, act=SILU)


def test_its_products() -> None:
    assert LAYER.problems == (
        Problem(Op.FORWARD, DType.BF16, 8, 1024, 768),
        Problem(Op.FORWARD, DType.BF16, 8, 768, 512),
    )
    ungated = LAYER._replace(act=RowActivation(Activation("relu2"), gated=False, interleaved=False))
    assert [problem.N for problem in ungated.problems] == [512, 768]
    assert LAYER.all_problems == LAYER.problems


def test_products_of_which_x_is_quantised_too_are_loaded_beside_those_where_it_is_not() -> None:
    layer = LAYER._replace(dtype=DType.FP8_BLOCK)
    assert [problem.dtype for problem in layer.problems] == [DType.FP8_BLOCK_A16] * 2
    assert [problem.dtype for problem in layer.all_problems] == [DType.FP8_BLOCK] * 2 + [DType.FP8_BLOCK_A16] * 2


def test_a_layer_is_served_where_both_products_were_measured(clean_places: Path) -> None:
    first, second = LAYER.problems
    path = clean_places / "a.msgpack"
    missing = "no bundle was measured for {} at about {} rows on NVIDIA H200 (9.0, 132 SMs, 143771 MiB). Build one here"
    few, many = [measured(rows, WIDE, 9) for rows in (4, 16, 64)], [measured(64, WIDE, 9)]
    assert lacks(LAYER, ON_H200, tokens=1) is not None
    for choices, lacking in (
        ({first: few, second: few}, None),
        ({first: few}, (second, 2)),
        ({first: few, second: many}, (second, 2)),  # nothing near a token's two rows
        ({first: few[:2], second: few}, (first, 64)),
        ({second: few, first: [modelled(4, WIDE)]}, (first, 2)),
        ({first._replace(E=9): few, second: few}, (first, 2)),
    ):
        write(path, choices, gpus=[H200])
        reload()
        reason = lacks(LAYER, ON_H200, tokens=64)
        assert reason is None if lacking is None else str(reason).startswith(missing.format(*lacking))
        assert lacks(LAYER, ON_H200, tokens=64, any_variant=True) is None
        assert "was measured for" in str(lacks(LAYER, ON_A100, tokens=64))


@pytest.mark.parametrize(
    ("sizes", "wanted"),
    [
        ((16, 8, 16, 128), 16),
        ((1, 8, 32, 256), 1),
        ((1, 4, 16, 128), 0),
        ((5, 2, 3, 6), 5),
        ((16, 8, 128, 128), None),  # all are here
        ((16, 8, 8, 0), None),  # nobody says how many there are
        ((16, 9, 33, 257, 1), 16 + 16),  # a shared expert on each rank
        ((16, 9, 257, 257, 1), None),
    ],
)
def test_rows_of_a_rank(sizes: tuple[int, ...], wanted: int | None) -> None:
    assert expected_rows(*sizes) == wanted


def test_a_rank_is_served_where_the_rows_of_its_own_experts_were_measured(clean_places: Path) -> None:
    """One of 8 ranks: a step of 64 tokens comes to 16 rows of its experts, and one token to none."""
    part = LAYER._replace(experts=64)
    assert [part.rows(tokens) for tokens in (1, 4, 64)] == [0, 1, 16]
    few = [measured(rows, WIDE, 9) for rows in (1, 4, 16)]
    write(clean_places / "a.msgpack", dict.fromkeys(LAYER.problems, few), gpus=[H200])
    reload()
    assert lacks(part, ON_H200, tokens=64) is None
    assert "at about 64 rows" in str(lacks(LAYER, ON_H200, tokens=64))
    assert "at about 64 rows" in str(lacks(part, ON_H200, tokens=256))


def test_where_x_may_be_quantised_too_both_products_were_measured(clean_places: Path) -> None:
    """At 8,192 tokens those of x in bf16 alone take half as long again as an engine's own."""
    layer = ServedLayer(E=8, H=768, I=512, top_k=2, dtype=DType.FP8_BLOCK, act=SILU)
    specs = [
        Spec(Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16), dtype=DType.FP8_BLOCK_A16),
        Spec(Config(128, 256, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_BLOCK), dtype=DType.FP8_BLOCK),
    ]
    both = {
        problem: [measured(rows, 1 if problem.dtype is DType.FP8_BLOCK else 0, 9) for rows in (4, 16, 64)]
        for problem in layer.all_problems
    }
    path = clean_places / "a.msgpack"
    write(path, {problem: both[problem] for problem in layer.problems}, gpus=[H200], specs=specs)
    reload()
    reason = lacks(layer, ON_H200, tokens=64)
    assert str(reason).startswith("no bundle was measured for forward fp8_block E=8 N=1024 K=768 at about 2 rows on")
    assert str(reason).endswith('"shape:E=8,H=768,I=512,k=2 weights=fp8_block ops=forward"')
    assert lacks(layer, ON_H200, tokens=64, any_variant=True) is None
    write(path, both, gpus=[H200], specs=specs)
    reload()
    assert lacks(layer, ON_H200, tokens=64) is None


def test_a_layer_that_was_only_modelled_stays_with_the_engine(clean_places: Path) -> None:
    write(
        clean_places / "a.msgpack",
        {problem: [modelled(rows, WIDE) for rows in (4, 16, 64)] for problem in LAYER.problems},
    )
    reload()
    assert "was measured for" in str(lacks(LAYER, ON_H200, tokens=64))
    assert lacks(LAYER, ON_H200, tokens=64, any_variant=True) is None


@pytest.mark.parametrize("dtype", [DType.MXFP4, DType.MXFP8, DType.FP8_BLOCK, DType.INT4_G32])
def test_other_gpus_have_no_kernel_for_codes_that_are_put_in_order(dtype: DType) -> None:
    """A build there makes code of codes as they are stored, so none is advised."""
    reason = str(lacks(LAYER._replace(dtype=dtype), ON_A100, tokens=64, any_variant=True))
    assert f"no kernel for {ON_A100} reads {dtype.value} weights" in reason
    assert "aot build" not in reason


def test_a_gpu_for_which_there_is_no_code_is_reported() -> None:
    reason = lacks(LAYER, LocalGpu(70, Gpu("Tesla V100-SXM2-16GB", 80, 16160, DRIVER)), tokens=1, any_variant=True)
    assert str(reason).startswith(
        "no bundle has a kernel for forward bf16 E=8 N=1024 K=768 at about 2 rows on Tesla V100-SXM2-16GB (7.0, "
    )


@pytest.mark.parametrize("dtype", DType)
@pytest.mark.parametrize("act", [SILU, RowActivation(Activation("relu2"), gated=False, interleaved=False)])
def test_the_command_that_it_names_is_one(dtype: DType, act: RowActivation) -> None:
    layer = LAYER._replace(dtype=dtype, act=act)
    spec = layer.build_line.removeprefix('aot build --models "').removesuffix('"')
    assert set(layer.all_problems) <= set(plan(load_models([spec]).shapes).problems)


@pytest.mark.parametrize(
    ("E", "H", "I", "top_k", "dtype"),
    [
        (128, 2048, 768, 8, DType.BF16),
        (128, 2048, 768, 8, DType.FP8_BLOCK_A16),
        (256, 7168, 2048, 8, DType.FP8_BLOCK),
        (128, 2880, 2880, 4, DType.MXFP4),
        (384, 7168, 2048, 8, DType.INT4_G32),
    ],
)
def test_the_bundles_that_ship_are_for_these(E: int, H: int, I: int, top_k: int, dtype: DType) -> None:  # noqa: E741
    assert lacks(ServedLayer(E, H, I, top_k, dtype, SILU), ON_H200, tokens=8192) is None


@pytest.mark.parametrize(
    ("E", "H", "I", "top_k", "dtype"),
    [
        (16, 4096, 1536, 8, DType.BF16),  # Qwen3-235B
        (32, 7168, 2048, 8, DType.FP8_BLOCK),  # DeepSeek-V3
        (16, 2880, 2880, 4, DType.MXFP4),  # gpt-oss-120b
        (48, 7168, 2048, 8, DType.INT4_G32),  # Kimi-K2
    ],
)
def test_the_bundles_that_ship_are_for_one_rank_of_eight(E: int, H: int, I: int, top_k: int, dtype: DType) -> None:  # noqa: E741
    assert lacks(ServedLayer(E, H, I, top_k, dtype, SILU, experts=8 * E), ON_H200, tokens=8192) is None


@pytest.mark.parametrize("gpu", HOPPERS, ids=lambda gpu: gpu.name)
def test_a_modelled_bundle_takes_no_layer_away(clean_places: Path, gpu: Gpu) -> None:
    """A bundle in PRETUNED_BUNDLES was built without a GPU: measured choices still ship."""
    layer = ServedLayer(128, 2048, 768, 8, DType.BF16, SILU)
    rows = [modelled(bucket, WIDE) for bucket in buckets_between(8, 1 << 16)]
    write(clean_places / "a.msgpack", dict.fromkeys(layer.problems, rows))
    reload()
    assert lacks(layer, LocalGpu(90, gpu), tokens=8192) is None


@pytest.mark.parametrize(
    ("I", "dtype", "width"),
    [
        (1440, DType.MXFP4, 1472),
        (720, DType.MXFP4, 768),
        (736, DType.MXFP4, 768),
        (384, DType.MXFP4, 384),
        (96, DType.INT4_G32_ZP, 128),
        (96, DType.INT4_G128, 96),
        (192, DType.FP8_BLOCK, 256),
        (96, DType.FP8_CHANNEL, 128),
        (96, DType.BF16, 96),
    ],
)
def test_its_products_are_of_the_width_that_quantised_weights_are_padded_to(I: int, dtype: DType, width: int) -> None:  # noqa: E741
    layer = LAYER._replace(I=I, dtype=dtype)
    assert {(problem.N, problem.K) for problem in layer.all_problems} == {(2 * width, 768), (768, width)}
    assert (f"I={I} (padded to {width}: {width / I - 1:.1%} more memory)" in str(layer)) == (width != I)
    spec = layer.build_line.removeprefix('aot build --models "').removesuffix('"')
    if width != I:
        assert set(layer.all_problems) <= set(planned_on(plan(load_models([spec]).shapes), (90,)).problems)


def test_a_padded_product_is_of_zeros_after_each_half_of_gate_and_up() -> None:
    w = ExpertWeights.quantize(torch.randn(2, 192, 64) + 3, "mxfp4")
    halves = widened(w, 128, SILU, down=False).dequantize().view(2, 2, 128, 64)
    assert torch.equal(halves[:, :, :96].flatten(1, 2), w.dequantize())
    assert not halves[:, :, 96:].any()
    pairs = widened(w, 128, SILU._replace(interleaved=True), down=False).dequantize()
    assert torch.equal(pairs[:, :192], w.dequantize())
    assert not pairs[:, 192:].any()
    alone = widened(w, 256, SILU._replace(gated=False), down=False).dequantize()
    assert torch.equal(alone[:, :192], w.dequantize())
    assert alone.shape == (2, 256, 64)
    down = widened(w, 128, SILU, down=True).dequantize()
    assert torch.equal(down[:, :, :64], w.dequantize())
    assert not down[:, :, 64:].any()


def test_a_padded_bias_has_zeros_where_its_weights_have_rows_of_zeros() -> None:
    bias = torch.arange(1.0, 9.0)[None]
    assert pad_bias(bias, 3, 4, SILU).tolist() == [[1, 2, 3, 0, 4, 5, 6, 0]]  # the last two were never loaded
    assert pad_bias(bias, 3, 4, SILU._replace(interleaved=True)).tolist() == [[1, 2, 3, 4, 5, 6, 0, 0]]
    assert pad_bias(bias, 8, 9, SILU._replace(gated=False)).tolist() == [[1, 2, 3, 4, 5, 6, 7, 8, 0]]


@pytest.mark.parametrize("in_place", [False, True])
def test_a_gpu_gets_no_nan_that_a_kernel_would_read_as_480(in_place: bool) -> None:
    """The engine's own method runs such a layer; what is no GPU's stays as it is, and is right."""
    first, second = (ExpertWeights.quantize(torch.randn(2, 64, 64), "fp8_channel") for _ in range(2))
    second.codes.view(torch.uint8)[1, 3, 5] = 0x7F
    before = first.codes.view(torch.uint8).clone()
    with pytest.raises(InputError, match=r"no kernel takes the scales of .*, or NaN among fp8 codes: PRETUNED_X=0"):
        prepared((first, second), "PRETUNED_X", on_gpu=True, in_place=in_place)
    if in_place:
        assert torch.equal(first.codes.view(torch.uint8), before)
    assert prepared((second,), "PRETUNED_X", on_gpu=False, in_place=in_place) == (second,)
    assert second.dequantize().isnan().nonzero().tolist() == [[1, 3, 5]]


def test_weights_loaded_again_are_copied_to_where_the_first_are() -> None:
    draw = torch.Generator().manual_seed(0)
    first, now = (
        [ExpertWeights.quantize(torch.randn(2, 64, 64, generator=draw), "int4_g32_zp").prepare()] for _ in range(2)
    )
    pointers = [tensor.data_ptr() for tensor in first[0].tensors().values()]
    follow(first, now)
    assert [tensor.data_ptr() for tensor in first[0].tensors().values()] == pointers
    assert torch.equal(first[0].dequantize(), now[0].dequantize())


@pytest.mark.parametrize("dtype", [DType.BF16, DType.MXFP4, DType.FP8_BLOCK])
@pytest.mark.parametrize("quantises", [False, True])
def test_a_layer_that_is_served_is_served_in_the_batch_invariant_mode(
    clean_places: Path, dtype: DType, quantises: bool
) -> None:
    """Of few rows no measured choice may have the order: what was measured around them will do."""
    sizes = {DType.MXFP4: (32, 2880, 2880, 4), DType.FP8_BLOCK: (128, 2048, 768, 8)}
    layer = ServedLayer(*sizes.get(dtype, (128, 2048, 768, 8)), dtype, SILU)
    assert lacks(layer, ON_H200, tokens=8192) is None
    with batch_invariant(quantize_x=quantises):
        assert lacks(layer, ON_H200, tokens=8192) is None
        assert lacks(layer._replace(I=layer.I + 64), ON_A100, tokens=64) is not None


def test_an_engine_s_switch_turns_the_mode_on(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For all that the process starts, too; the user's own variable has the last word."""
    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "")  # so that the test's end takes it out
    monkeypatch.delenv("PRETUNED_BATCH_INVARIANT")
    assert snapshot().invariance is None
    assert choose_invariantly() == Invariance()
    assert os.environ["PRETUNED_BATCH_INVARIANT"] == "1"
    assert snapshot().invariance == Invariance()
    taken = snapshot()
    choose_invariantly()
    assert snapshot() is taken
    for value, mode in (("quantize_x", Invariance(quantize_x=True)), ("0", None)):
        monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", value)
        reload()
        assert choose_invariantly() == mode
