from __future__ import annotations

from pathlib import Path

import pytest

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Op, RowOp
from pretuned.kernels.arch import supported
from pretuned.kernels.registry import refusal
from pretuned.kernels.search import candidates, fallbacks
from pretuned.kernels.spec import Cache, Config, Edge, Loads, Schedule, Spec, TileRows

SHIPPED = sorted((Path(__file__).parents[2] / "artifacts" / "bundles").glob("*.msgpack"))
WIRE = (
    "block_k",
    "block_m",
    "block_n",
    "group_m",
    "narrow",
    "num_stages",
    "num_warps",
    "persistent",
    "pingpong",
    "specialized",
    "streamed",
    "tma",
)
FITS = Config(256, 128, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, rows=TileRows.FITTED)
TURNS = Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_read_and_written_as_it_is(path: Path) -> None:
    with open_bundle(path) as file:
        for variant in file.variants():
            if not isinstance(variant.op, RowOp):
                assert Config.from_pairs(variant.config).pairs() == variant.config


def test_every_candidate_has_pairs_of_its_own() -> None:
    fields = {
        config
        for op in Op
        for dtype in DType
        for sm in supported()
        for config in (*candidates(op, dtype, sm), *fallbacks(op, dtype, sm))
    }
    assert {Config.from_pairs(config.pairs()) for config in fields} == fields
    assert len({config.pairs() for config in fields}) == len(fields)
    assert len({str(config) for config in fields}) == len(fields)


def test_the_wire_has_the_flags_of_format_1() -> None:
    assert tuple(name for name, _ in FITS.pairs()) == WIRE
    plain = {name: value for name, value in Config(64, 64, 32, 4, 3).pairs() if name in WIRE[4:5] + WIRE[7:]}
    assert plain == {"narrow": 0, "persistent": 1, "pingpong": 0, "specialized": 0, "streamed": 0, "tma": 0}
    for config, flags in (
        (Config(64, 64, 32, 4, 3, schedule=Schedule.TILE), {"persistent": 0}),
        (Config(64, 64, 32, 4, 3, loads=Loads.TMA, cache=Cache.EVICT_FIRST), {"tma": 1, "streamed": 1}),
        (FITS._replace(edge=Edge.HALF), {"tma": 1, "specialized": 1, "narrow": 1}),
        (TURNS, {"tma": 1, "specialized": 1, "pingpong": 1}),
    ):
        assert {name: value for name, value in config.pairs() if name in plain} == plain | flags
        assert Config.from_pairs(config.pairs()) == config


def test_tiles_of_the_sizes_of_fitted_ones_are_fitted() -> None:
    """Their pairs say no more than the sizes."""
    for op in Op:
        assert "rows is FIXED, wanted FITTED" in str(refusal(Spec(op, DType.BF16, FITS._replace(rows=TileRows.FIXED))))
    assert refusal(Spec(Op.FORWARD, DType.BF16, FITS)) is None


CODES = Config(16, 64, 1024, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)


def test_configs_for_codes_have_flags_of_their_own_and_others_do_not() -> None:
    fitted = CODES._replace(block_m=128, block_n=256, block_k=128, rows=TileRows.FITTED)
    for config, flag in ((CODES, 0), (fitted, 1)):
        pairs = dict(config.pairs())
        assert set(pairs) == {*WIRE, "fitted", "mixed_input"}
        assert {name: pairs[name] for name in ("fitted", "mixed_input", "specialized", "persistent", "pingpong")} == {
            "fitted": flag,
            "mixed_input": 1,
            "specialized": 1,
            "persistent": 1,
            "pingpong": 0,
        }
        assert Config.from_pairs(config.pairs()) == config
    for config in (FITS, TURNS, Config(64, 64, 32, 4, 3)):
        assert tuple(name for name, _ in config.pairs()) == WIRE


@pytest.mark.parametrize("flag", ["narrow", "pingpong", "streamed", "specialized", "persistent", "tma"])
def test_an_older_bundle_lacks_flags_that_came_later(flag: str) -> None:
    config = Config(64, 64, 32, 4, 3)
    assert Config.from_pairs(tuple(pair for pair in config.pairs() if pair[0] != flag)) == config


@pytest.mark.parametrize(
    ("config", "wrong", "message"),
    [
        (TURNS, {"block_q": 16}, "config has the fields"),
        (TURNS, {"specialized": 0}, "a pingpong config is specialized"),
        (TURNS, {"persistent": 0}, "a specialized config is persistent"),
        (TURNS, {"block_m": 0}, "block_m is 0, wanted 16 or 32 or 64 or 128 or 256 or 192"),
        (TURNS, {"block_n": 48}, "block_n is 48"),
        (TURNS, {"block_k": 2048}, "block_k is 2048"),
        (TURNS, {"block_m": 512}, "block_m is 512"),
        (TURNS, {"fitted": 1}, "a fitted config of format 1 is mixed_input or row_scaled"),
        (FITS, {"mixed_input": 1, "specialized": 0}, "a mixed_input config is specialized"),
        (TURNS, {"num_warps": 3}, "num_warps is 3, wanted 1 or 2 or 4 or 8 or 16"),
        (TURNS, {"num_stages": 0}, "num_stages is 0, wanted 1 to 15"),
        (TURNS, {"num_stages": 16}, "num_stages is 16, wanted 1 to 15"),
        (TURNS, {"group_m": 0}, "group_m is 0, wanted 1 to 1024"),
        (TURNS, {"group_m": 1025}, "group_m is 1025, wanted 1 to 1024"),
    ],
)
def test_pairs_that_are_no_config(config: Config, wrong: dict[str, int], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Config.from_pairs(tuple(sorted((dict(config.pairs()) | wrong).items())))
    with pytest.raises(ValueError, match="config has the fields"):
        Config.from_pairs(config.pairs()[1:])
