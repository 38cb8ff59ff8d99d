from __future__ import annotations

import pytest

from pretuned.artifacts.types import DType, Fusion, Op
from pretuned.kernels import abi
from pretuned.kernels.abi import Spec
from pretuned.kernels.space import candidates


@pytest.mark.parametrize(
    ("op", "fusion"),
    [
        *((op, Fusion.NONE) for op in Op),
        (Op.FORWARD, Fusion.SILU),
        (Op.FORWARD, Fusion.SILU | Fusion.GATHER),
        (Op.FORWARD, Fusion.GATHER),
        (Op.DX, Fusion.GATHER),
    ],
)
def test_buffers_take_turns_from_one_tile_to_the_next(op: Op, fusion: Fusion) -> None:
    # A tile's first part waits for all but the last SLOTS - 1 stores. That the first buffer is free again by then needs
    # tiles of whole turns, however wide they are.
    specialized = [one for one in candidates(op, DType.BF16, 90) if one.specialized]
    assert specialized
    for config in specialized:
        constants = abi.constants(Spec(op, DType.BF16, config, fusion=fusion), 90)
        width = config.block_k if op is Op.DW else config.block_n
        halves = config.narrow or op is not Op.DW
        widths = {width // 2} if Fusion.SILU in fusion else {width, width // 2} if halves else {width}
        assert all(one // 64 % constants["SLOTS"] == 0 for one in widths), (str(config), widths)
