"""The kernel for codes of w, compiled: which products are in its code, and what it takes of an SM."""

from __future__ import annotations

import re
from collections import Counter

import pytest
from compiled import ptx_for_hopper

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

# Tiles that share out K, and such whose rows are fitted: their loop is there once for each number of rows.
FEW = Config(16, 64, 1024, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
FITTED = FEW._replace(block_m=64, block_n=256, block_k=128, num_stages=5, rows=TileRows.FITTED)
BYTES = FITTED._replace(block_n=128, num_stages=4)
TURNED = FITTED._replace(block_m=256, block_n=128, block_k=64, num_stages=5)
SPECS = [  # each tile, codes of 4 and 8 bits, with zero points and without
    Spec(Op.FORWARD, DType.NVFP4, FEW),
    Spec(Op.FORWARD, DType.MXFP4, FITTED, fusion=Fusion.SCATTER),
    Spec(Op.DX, DType.INT4_G32_ZP, TURNED),
    Spec(Op.FORWARD, DType.MXFP8, BYTES, fusion=Fusion.SCATTER),
]
MORE = [
    Spec(Op.DX, DType.INT4_G32, TURNED),
    Spec(Op.FORWARD, DType.FP8_CHANNEL_A16, BYTES),
    Spec(Op.FORWARD, DType.INT4_G128_ZP, FITTED, fusion=Fusion.SCATTER),
    Spec(Op.DX, DType.MXFP8, TURNED._replace(num_stages=4)),
]


def test_these_are_among_what_is_built() -> None:
    assert all(spec.config in candidates(spec.op, spec.dtype, 90) for spec in (*SPECS, *MORE))


@pytest.mark.slow
@pytest.mark.parametrize("spec", [*SPECS, *(pytest.param(spec, marks=pytest.mark.nightly) for spec in MORE)], ids=str)
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, spec: Spec) -> None:
    config = spec.config
    ptx = ptx_for_hopper(monkeypatch, spec, {"x": (9, 3), "w": (2, 0), "w_scale": (0, 0), "w_zero": (0, 0)})
    widths = Counter(map(int, re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n(\d+)k16\.f32\.bf16\.bf16", ptx)))
    assert widths.total() == ptx.count("wgmma.mma_async")
    mine = max(1, config.block_n // 128)  # blocks of columns of a warpgroup
    blocks = config.block_k // 64 if config.block_n > 64 else config.block_k // 128  # of K, of a step
    each = 2 * 4 * blocks * mine  # both warpgroups, 16 of K an instruction
    if config.rows is TileRows.FITTED:
        assert widths == dict.fromkeys(range(16, config.block_m + 1, 16), each)
    else:
        assert widths == {config.block_m: each}
