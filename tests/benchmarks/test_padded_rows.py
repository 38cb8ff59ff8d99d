"""The benchmark of padded rows: its calls compute the same, and its table says what was measured."""

from __future__ import annotations

import pytest
import torch

from benchmarks.peers import padded_rows
from benchmarks.peers.padded_rows import Kind, Rows


@pytest.mark.parametrize("rows", [1, 8, 16])
def test_padded_and_packed_calls_are_the_same(rows: int) -> None:
    kind = Kind("small", 32, 128, 128)
    for what, K, make in padded_rows.cells_of(kind, "cpu", theirs=False):
        some = Rows.of(4, rows, K, "cpu", most=24)
        assert some.padded[~some.there].isnan().all()
        with torch.no_grad():
            cell = padded_rows.compared(some, make(some))
        assert cell["difference"] < 1e-2, what
        assert not padded_rows.wrong(cell)


def test_what_is_wrong_is_seen() -> None:
    some = Rows.of(4, 2, 8, "cpu", most=5)
    for mine, is_wrong in ((some.packed, False), (2 * some.packed, True)):
        y = torch.full((4, 5, 8), padded_rows.CANARY).bfloat16()
        y[some.there] = mine
        assert (
            padded_rows.wrong(padded_rows.compared(some, {"packed": lambda: some.packed, "padded": lambda y=y: y}))
            is is_wrong
        )
    y[some.there] = some.packed
    y[~some.there] = 0
    assert padded_rows.wrong(padded_rows.compared(some, {"packed": lambda: some.packed, "padded": lambda: y}))


def test_the_table_has_the_ratios() -> None:
    cell = {"model": "a", "what": "fp8 down", "padded_us": 2.0, "packed_us": 1.6, "same_bits": True}
    cells = [cell | {"rows": 1, "deepgemm_us": 3.0}, cell | {"rows": 8, "failed": "RuntimeError: no nvcc"}]
    assert padded_rows.table(cells) == [
        "| layer | ratio | 1 | 8 |",
        "|---|---|---|---|",
        "| a fp8 down | padded / packed | 1.25 | 1.25 |",
        "| a fp8 down | DeepGEMM / padded | 1.50 |  |",
    ]
    assert padded_rows.said(cells[0]).endswith("x 1.250 of packed, DeepGEMM      3.0 us, 1.50 x")
    assert padded_rows.said(cells[1]).endswith("x 1.250 of packed, RuntimeError: no nvcc")
