"""The kernel for codes with a scale a row, compiled: which products are in its code, and what it takes of an SM."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from compiled import ptx_for_hopper

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

MANY = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
FEW = Config(16, 64, 512, 8, 3, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL)


def test_these_are_among_what_is_built() -> None:
    assert {MANY, FEW} <= set(candidates(Op.FORWARD, DType.FP8_CHANNEL, 90))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("config", "fusion"),
    [(MANY, Fusion.NONE), pytest.param(MANY, Fusion.SCATTER, marks=pytest.mark.nightly), (FEW, Fusion.SCATTER)],
)
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, config: Config, fusion: Fusion) -> None:
    spec = Spec(Op.FORWARD, DType.FP8_CHANNEL, config, fusion=fusion)
    ptx = ptx_for_hopper(monkeypatch, spec, {"x": (0, 3), "w": (2, 0), "y_map": (9, 3)})
    widths = Counter(map(int, re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k32\.f32\.e4m3\.e4m3", ptx)))
    assert widths.total() == ptx.count("wgmma.mma_async")
    # Of both warpgroups, 32 of K an instruction; a tile of 64 columns shares out K.
    each = 2 * config.block_k // 32 // (2 if config.block_n == 64 else 1)
    fitted = config.rows is TileRows.FITTED
    heights = range(16, config.block_m + 1, 16) if fitted else (config.block_m,)
    assert widths == dict.fromkeys(heights, each)
    # Sums of more than 128 registers a thread are kept in fp16, two to a register.
    assert ("cvt.rn.f16x2.f32" in ptx) is (config.block_m == 256)
