from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from pretuned.artifacts.records import DType, Fusion, Op
from pretuned.kernels import registry
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Edge, Spec, TileRows

FITTED = Path(__file__).parents[3] / "kernels" / "hopper_plain" / "fitted.py"


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
    specialized = [
        config
        for config in candidates(op, DType.BF16, 90)
        if config.schedule.warp_specialized and config.rows is TileRows.FIXED
    ]
    assert specialized
    for config in specialized:
        constants = registry.constants(Spec(op, DType.BF16, config, fusion=fusion), 90)
        width = config.block_k if op is Op.DW else config.block_n
        halves = config.edge is Edge.HALF or op is not Op.DW
        widths = {width // 2} if Fusion.SILU in fusion else {width, width // 2} if halves else {width}
        assert all(width // 64 % constants["SLOTS"] == 0 for width in widths), (str(config), widths)


def test_a_fitted_tile_goes_on_with_the_buffer_after_the_last() -> None:
    """It has a part for each 64 rows, so any number: its kernel counts what it has stored, by the lines run here."""
    text = FITTED.read_text()
    (buffer,) = re.findall(r"buffers\.index\(half \* SLOTS \+ (\(stored.+)\)$", text, re.MULTILINE)
    (count,) = re.findall(r"^ +stored = (\(.+)$", text, re.MULTILINE)
    language = SimpleNamespace(cdiv=lambda a, b: -(-a // b))
    for slots in (1, 2):
        used, stored = [], 0
        for rows in (256, 192, 64, 1, 65, 130, 256, 3):
            names = {"gl": language, "SLOTS": slots, "BOX": 64, "stored": stored, "row": 7, "row_end": 7 + rows}
            used += [eval(buffer, names | {"i": i}) for i in range(4) if 64 * i < rows]
            stored = eval(count, names)
        assert used == [i % slots for i in range(len(used))]
