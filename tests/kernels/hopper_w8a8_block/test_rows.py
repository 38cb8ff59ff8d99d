"""The kernel for codes of x and of w, compiled: which products are in its code, and what it takes of an SM."""

from __future__ import annotations

import re

import pytest
from compiled import ptx_for_hopper

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Spec


@pytest.mark.slow
@pytest.mark.parametrize("fusion", [pytest.param(Fusion.NONE, marks=pytest.mark.nightly), Fusion.SCATTER])
def test_what_is_compiled(monkeypatch: pytest.MonkeyPatch, fusion: Fusion) -> None:
    spec = Spec(Op.FORWARD, DType.FP8_BLOCK, candidates(Op.FORWARD, DType.FP8_BLOCK, 90)[0], fusion=fusion)
    ptx = ptx_for_hopper(monkeypatch, spec, {"x": (0, 3), "w": (2, 0), "x_scale": (7, 0), "y_map": (9, 3)})
    # 128 of K are four instructions, of the upper rows of a tile and of the lower, of each of two warpgroups.
    assert len(re.findall(r"wgmma\.mma_async\.sync\.aligned\.m64n128k32\.f32\.e4m3\.e4m3", ptx)) == 16
    assert ptx.count("wgmma.mma_async") == 16
