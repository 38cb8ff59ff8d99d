"""Specialised kernels whose tiles are fitted to the rows of each expert."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest

from pretuned.aot.plan.families import Family, Pool
from pretuned.artifacts.records import PLAIN_DTYPES, DType, Fusion, Layout, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.chips import chip_for
from pretuned.kernels.cost import CONSTANTS, Resources
from pretuned.kernels.cost_model import estimate_us
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import PINGPONG_COLUMNS, Cache, Config, Edge, Loads, Schedule, Spec, TileRows

KERNEL = Path(__file__).parents[3] / "kernels" / "hopper_plain" / "fitted.py"
BOTH = Config(256, 128, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, rows=TileRows.FITTED)
TURNS = Config(192, 128, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG, rows=TileRows.FITTED)
WHOLE = Config(128, 256, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
HALVES = (DType.BF16, DType.FP16)


@pytest.mark.parametrize("config", [BOTH, TURNS])
def test_what_is_fitted(config: Config) -> None:
    assert registry.refusal(Spec(Op.FORWARD, DType.BF16, config)) is None
    assert str(config).endswith(" fitted")
    assert not registry.dealt(Op.FORWARD, config)
    for other in (
        config._replace(schedule=Schedule.PERSISTENT),
        config._replace(block_k=128),
        config._replace(block_n=256),
        config._replace(rows=TileRows.FIXED),
        config._replace(edge=Edge.HALF),
        config._replace(cache=Cache.EVICT_FIRST),
        config._replace(loads=Loads.POINTER),
    ):
        assert registry.refusal(Spec(Op.FORWARD, DType.BF16, other)), other
    assert Config.from_pairs(config.pairs()) == config


def test_which_kernels_have_such_code() -> None:
    for config in (BOTH, TURNS):
        for op in Op:
            for dtype in DType:
                for fusion in (Fusion.NONE, Fusion.GATHER, Fusion.SCATTER, Fusion.SILU):
                    there = op is not Op.DW and dtype in HALVES and fusion in (Fusion.NONE, Fusion.SCATTER)
                    refused = registry.refusal(Spec(op, dtype, config, fusion=fusion))
                    assert (refused is None) is there, (op, dtype, fusion)
    for rows in ({"block_m": 256}, {"block_m": 256, "block_n": 64}, {"block_m": 64}):  # 128 rows, or fitted
        reason = registry.refusal(Spec(Op.FORWARD, DType.BF16, WHOLE._replace(**rows)))
        assert f"block_m is {rows['block_m']}, wanted 128" in str(reason)


@pytest.mark.parametrize("dtype", [dtype for dtype in DType if dtype in PLAIN_DTYPES])
@pytest.mark.parametrize("op", Op)
def test_it_is_tried_where_there_is_such_code(op: Op, dtype: DType) -> None:
    configs = [
        config for sm in (80, 90, 100, 120) for config in candidates(op, dtype, sm) if config.rows is TileRows.FITTED
    ]
    assert configs == ([BOTH, TURNS] if op is not Op.DW and dtype in HALVES else [])
    for fusion in (Fusion.GATHER, Fusion.SILU, Fusion.SILU | Fusion.GATHER):
        if op is Op.FORWARD or (op is Op.DX and Fusion.SILU not in fusion):
            assert not [
                config
                for config in Pool().candidates(Family(op, dtype, Layout.NK, fusion), 90)
                if config.rows is TileRows.FITTED
            ]
    if op is not Op.DW:
        scattered = Pool().candidates(Family(op, dtype, Layout.NK, Fusion.SCATTER), 90)
        assert [config for config in scattered if config.rows is TileRows.FITTED] == configs


@pytest.mark.parametrize("config", [BOTH, TURNS])
def test_its_boxes_and_constants(config: Config) -> None:
    """w by its 128 columns of y at once, or where those are contiguous by 64, as wide as lines in shared memory are."""
    for op, layout, w in (
        (Op.FORWARD, Layout.NK, (1, 128, 64)),
        (Op.FORWARD, Layout.KN, (1, 64, 64)),
        (Op.DX, Layout.NK, (1, 64, 64)),
        (Op.DX, Layout.KN, (1, 128, 64)),
    ):
        spec = Spec(op, DType.BF16, config, layout)
        assert registry.entry_of(spec).name == "rows_fitted"
        assert registry.boxes(spec) == {"x": (64, 64), "w": w, "y_map": (1, 1, 64, 64)}
        constants = registry.constants(spec, 90)
        assert constants["BLOCK_M"] == config.block_m
        assert constants["W_KN"] is (w == (1, 64, 64))
        assert (constants["PINGPONG"], constants["SLOTS"]) == ((True, 1) if config is TURNS else (False, 2))
        assert registry.arguments(spec) == registry.arguments(spec._replace(config=WHOLE))
        scattered = spec._replace(fusion=Fusion.SCATTER)
        assert registry.arguments(scattered) == registry.arguments(scattered._replace(config=WHOLE))
        more = registry.constants(scattered, 90)
        assert (constants["INDEXED"], more["INDEXED"]) == (False, True)
        assert more == constants | {"INDEXED": True, "SLOTS": 1, "y_map": None}, "room for what is looked up"


def test_how_large_a_product_can_be() -> None:
    for config in (BOTH, TURNS):
        most = 64 * ((1 << 20) - 1)
        assert registry.beyond(Problem(Op.FORWARD, DType.BF16, 4, 64, most), config) is None
        assert "reduction" in str(registry.beyond(Problem(Op.FORWARD, DType.BF16, 4, 64, most + 1), config))
    assert registry.most_tiles(256 + 7, 2, 384, BOTH) == 3 * 3  # one of 256 rows, two of what is left
    assert registry.most_tiles(PINGPONG_COLUMNS + 7, 2, 384, TURNS) == 3 * 3


def test_the_estimate_counts_rows_by_16() -> None:
    """DeepSeek-V3, gate_up, T=8192, 256 rows an expert: measured 7071 us in tiles of 128 x 256 and 6675 in these."""
    problem, M = Problem(Op.FORWARD, DType.BF16, 256, 4096, 7168), 65536

    def us(config: Config, rows: int, lacking: float = CONSTANTS.hopper.specialized.lacking) -> float:
        special = CONSTANTS.hopper.specialized._replace(lacking=lacking)
        constants = CONSTANTS._replace(hopper=CONSTANTS.hopper._replace(specialized=special))
        return estimate_us(problem, rows, Resources(config, 384, 229752, 168, 16), chip_for(90), constants)

    assert us(BOTH, M) < 0.99 * us(WHOLE, M)
    assert us(BOTH, M, lacking=0.0) > 1.05 * us(BOTH, M)  # what is saved of the rows that a tile lacks
    assert us(BOTH, 64 * M, lacking=0.0) < 1.02 * us(BOTH, 64 * M)  # where nearly all are whole


@pytest.mark.parametrize(
    "rows", [1, 15, 16, 17, 31, 32, 33, 64, 191, 192, 193, 256, 257, 300, 384, 385, 511, 513, 1000, 2049]
)
@pytest.mark.parametrize("config", [BOTH, TURNS])
def test_an_experts_rows_are_shared_out_whole(config: Config, rows: int) -> None:
    """The kernel's own lines, run in Python: no tile is empty or too high, no row is left or comes twice."""
    lines = [line.strip() for line in KERNEL.read_text().splitlines()]
    first, last = lines.index("rows = row_end - row_start"), lines.index("grains = gl.cdiv(row_end - row, GRAIN)")
    code = "\n".join(line for line in lines[first : last + 1] if "grouped(" not in line)
    language = SimpleNamespace(cdiv=lambda a, b: -(-a // b), minimum=min)
    tiles, covered = -(-rows // config.block_m), 0
    for row_tile in range(tiles):
        held = {"row_start": 1000, "row_end": 1000 + rows, "row_tile": row_tile, "BLOCK_M": config.block_m}
        exec(code, {"gl": language, "GRAIN": 16}, held)
        assert held["tiles_m"] == tiles
        assert held["row"] == 1000 + covered
        assert 0 < held["row_end"] - held["row"] <= held["grains"] * 16 <= config.block_m
        assert held["grains"] == -(-(held["row_end"] - held["row"]) // 16)
        covered = held["row_end"] - 1000
    assert covered == rows
