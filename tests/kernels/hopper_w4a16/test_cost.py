"""The estimates of products with quantised weights."""

from __future__ import annotations

import itertools
import json
import lzma
import math
import re
from pathlib import Path

import pytest

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Op, Problem
from pretuned.kernels.arch import arch_of
from pretuned.kernels.chips import chip_for, chip_named
from pretuned.kernels.cost import Resources
from pretuned.kernels.cost_model import Ranker, estimate_us
from pretuned.kernels.hopper_w4a16 import DTYPES
from pretuned.kernels.search import candidates, shared_bytes_at_least
from pretuned.kernels.spec import Config, Loads, Schedule, TileRows

ROOT = Path(__file__).parents[3]
RESULTS = ROOT / "benchmarks/results"
CHIP = chip_for(90)
QUANTISED = sorted(DTYPES, key=lambda dtype: dtype.value)
SIZES = [(32, 5760, 2880), (128, 1536, 2048), (256, 4096, 7168), (8, 28672, 4096)]


def pool(dtype: DType) -> list[Resources]:
    return [
        Resources(config, 384, shared_bytes_at_least(Op.FORWARD, dtype, config, 90), 168)
        for config in candidates(Op.FORWARD, dtype, 90)
        if config.schedule is Schedule.W4A16
    ]


def best(problem: Problem, M: int) -> Config:
    configs = pool(problem.dtype)
    return configs[Ranker(configs, Op.FORWARD, problem.dtype, CHIP).rank(problem, M)[0][1]].config


@pytest.mark.parametrize(("E", "N", "K"), SIZES)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_more_rows_never_take_much_less_time(dtype: DType, E: int, N: int, K: int) -> None:
    """By doubling; of each tile, and of the fastest. (More programs fill the memory better.)"""
    problem = Problem(Op.FORWARD, dtype, E, N, K)
    configs, rows = pool(dtype), [1 << power for power in range(20)]
    times = [[estimate_us(problem, M, config, CHIP) for M in rows] for config in configs]
    for row in [*times, [min(column) for column in zip(*times, strict=True)]]:
        assert all(0 < time < math.inf for time in row)
        assert all(more >= 0.9 * less for less, more in itertools.pairwise(row))
        assert row[-1] > 20 * row[0]


@pytest.mark.parametrize(("E", "N", "K"), SIZES)
@pytest.mark.parametrize("dtype", QUANTISED)
def test_small_tiles_win_with_few_rows_and_large_ones_with_many(dtype: DType, E: int, N: int, K: int) -> None:
    problem = Problem(Op.FORWARD, dtype, E, N, K)
    few, many = best(problem, 8), best(problem, 65536 * max(1, E // 32))
    assert few.block_m <= 32
    assert few.rows is TileRows.FIXED
    assert many.block_m >= 128
    assert many.rows is TileRows.FITTED


@pytest.mark.parametrize("dtype", QUANTISED)
def test_no_estimate_is_under_the_roofline(dtype: DType) -> None:
    for E, N, K in SIZES:
        problem = Problem(Op.FORWARD, dtype, E, N, K)
        for config in pool(dtype):
            for M in (8, 512, 65536):
                us = estimate_us(problem, M, config, CHIP)
                assert us > 2 * M * N * K / (CHIP.bf16_tflops * 1e6)
                assert us > dtype.precision.w_bytes(N, K) / (CHIP.bandwidth_gbs * 1e3)


def test_fewer_bits_take_less_time_where_the_weights_are_what_is_read() -> None:
    four, eight = (Problem(Op.FORWARD, dtype, 128, 1536, 2048) for dtype in (DType.MXFP4, DType.FP8_CHANNEL_A16))
    least = [min(estimate_us(problem, 128, each, CHIP) for each in pool(problem.dtype)) for problem in (four, eight)]
    assert least[0] < 0.8 * least[1]


@pytest.mark.parametrize("op", [Op.FORWARD, Op.DX])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_zero_points_take_a_little_more_time(group: int, op: Op) -> None:
    for M in (8, 128, 1024, 8192, 65536):
        plain, zero = (
            min(
                estimate_us(Problem(op, DType(f"int4_g{group}{name}"), 128, 1536, 2048), M, config, CHIP)
                for config in pool(DType(f"int4_g{group}"))
            )
            for name in ("", "_zp")
        )
        assert plain < zero < 1.1 * plain


def test_what_zero_points_add_is_what_was_measured_in_the_mean() -> None:
    """Every tile that was timed with zero points, forward and dX: neither too long nor too short."""
    chip = chip_named("NVIDIA H100 80GB HBM3")
    assert chip is not None
    recorded = json.loads(lzma.decompress((RESULTS / "zero-points-h100.json.xz").read_bytes()))
    off: dict[str, list[float]] = {"forward": [], "dX": []}
    for cell in recorded["cells"]:
        problem = Problem(Op(cell["op"]), DType(f"int4_g{cell['group']}_zp"), cell["E"], cell["N"], cell["K"])
        M = cell["T"] * (8 if cell["model"] == "qwen3-30b" else 2)
        for name, us in cell["all_us"].items():
            tile = re.fullmatch(r"zero (\d+)x(\d+)x(\d+) w8 s(\d) g8 tma w4a16( fitted)?", name)
            if tile:
                m, n, k, stages = map(int, tile.groups()[:4])
                rows = TileRows.FITTED if tile[5] else TileRows.FIXED
                config = Config(m, n, k, 8, stages, loads=Loads.TMA, schedule=Schedule.W4A16, rows=rows)
                off[cell["op"]].append(math.log(estimate_us(problem, M, Resources(config, 384, 0, 168), chip) / us))
    for each in off.values():
        assert len(each) > 60
        assert abs(sum(each) / len(each)) < 0.035  # 3 % too long since fewer of their blocks are made ahead
        assert math.sqrt(sum(error * error for error in each) / len(each)) < 0.11


def test_what_does_not_fit_an_sm_takes_for_ever() -> None:
    problem = Problem(Op.FORWARD, DType.MXFP4, 32, 5760, 2880)
    config = Config(16, 64, 1024, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
    most = arch_of(90).limits.shared_per_block_bytes
    fits, large = Resources(config, 384, most, 168), Resources(config, 384, 2 * most, 168)
    assert estimate_us(problem, 64, fits, CHIP) < math.inf
    assert estimate_us(problem, 64, large, CHIP) == math.inf
    ranked = Ranker([large, fits], Op.FORWARD, DType.MXFP4, CHIP).rank(problem, 64)
    assert [index for _, index in ranked] == [1, 0]
    assert ranked[0][0] == estimate_us(problem, 64, fits, CHIP)


def test_a_ranker_is_for_one_dtype() -> None:
    ranker = Ranker(pool(DType.MXFP4), Op.FORWARD, DType.MXFP4, CHIP)
    with pytest.raises(ValueError, match="the ranker is for forward mxfp4"):
        ranker.rank(Problem(Op.FORWARD, DType.NVFP4, 8, 256, 256), 8)
    with pytest.raises(ValueError, match="M"):
        estimate_us(Problem(Op.FORWARD, DType.MXFP4, 8, 256, 256), 0, pool(DType.MXFP4)[0], CHIP)


@pytest.mark.slow
@pytest.mark.parametrize(("format", "most"), [("int4", 0.11), ("nvfp4", 0.11), ("mxfp4", 0.12), ("fp8", 0.11)])
def test_a_tenth_off_what_was_measured_in_the_mean(format: str, most: float) -> None:
    """Plain forwards of both GPUs' journals, every tile that was timed; neither too long nor too short."""
    with open_bundle(ROOT / "artifacts/bundles/candidates-sm90.msgpack.xz") as bundle:
        configs = {
            variant.cubin_sha256.hex(): variant.config
            for variant in bundle.variants()
            if variant.kernel == "rows_wna16"
        }
    off = []
    for journal, gpu in (("h100", "NVIDIA H100 80GB HBM3"), ("h200", "NVIDIA H200")):
        chip = chip_named(gpu)
        assert chip is not None
        for line in lzma.decompress((RESULTS / f"quantised-{journal}.journal.xz").read_bytes()).decode().splitlines():
            record = json.loads(line[9:])
            if record["record"] == "measured" and record["problem"][1].startswith(format):
                op, dtype, E, N, K, _, fusion, _ = record["problem"]
                problem, M = Problem(Op(op), DType(dtype), E, N, K), record["bucket"]
                for cubin, ns, *_ in record["timings"]:
                    if op == "forward" and not fusion and cubin in configs:
                        tile = Resources(Config.from_pairs(configs[cubin]), 384, 0, 168)
                        modelled = estimate_us(problem, M, tile, chip)
                        off.append(math.log(modelled * 1e3) - sum(map(math.log, ns)) / len(ns))
    assert len(off) > 150
    assert abs(sum(off) / len(off)) < 0.03
    assert math.sqrt(sum(error * error for error in off) / len(off)) < most
