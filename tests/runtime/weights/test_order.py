"""Codes in another order, in place. No format has one yet, so the orders here are made up."""

from __future__ import annotations

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights import codes
from pretuned.runtime.weights.order import ORDERS, CodeOrder, reorder


def _interleaved(given: torch.Tensor, undo: bool) -> torch.Tensor:
    """The nibbles of each 16 bytes: those of the low halves, then those of the high ones."""
    nibbles = codes.unpack(given).view(*given.shape[:-1], -1, 32)
    halves = (16, 2) if undo else (2, 16)
    moved = nibbles.view(*nibbles.shape[:-1], *(halves[::-1] if not undo else (2, 16))).transpose(-1, -2)
    return codes.pack(moved.flatten(-2).flatten(-2))


FIRST, SECOND = CodeOrder(7, _interleaved), CodeOrder(8, lambda given, undo: given.flip(-1))


@pytest.fixture
def w() -> ExpertWeights:
    torch.manual_seed(0)
    return ExpertWeights.quantize(torch.randn(3, 6, 64), "mxfp4")


def test_a_format_without_an_order_is_left_as_it_is(w: ExpertWeights) -> None:
    before = w.codes.clone()
    assert w.prepare() is w
    assert w.order == 0
    assert torch.equal(w.codes, before)
    assert w.restore() is w


def test_codes_move_in_place_and_back_bit_for_bit(w: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", FIRST)
    before, at, values = w.codes.clone(), w.codes.data_ptr(), w.dequantize(torch.float32)
    assert w.prepare().order == 7
    assert w.codes.data_ptr() == at
    assert not torch.equal(w.codes, before)
    assert torch.equal(w.dequantize(torch.float32), values)
    moved = w.codes.clone()
    w.prepare()  # once is enough
    assert torch.equal(w.codes, moved)
    assert w.restore().order == 0
    assert torch.equal(w.codes, before)


def test_the_order_travels_with_the_tensors(w: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", FIRST)
    values = w.dequantize(torch.float32)
    state = w.prepare().state_dict()
    again = ExpertWeights.from_state_dict("mxfp4", {name: one.clone() for name, one in state.items()})
    assert again.order == 7
    assert torch.equal(again.dequantize(torch.float32), values)


def test_another_order_than_this_version_knows_is_refused(w: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", FIRST)
    state = w.prepare().state_dict()
    monkeypatch.setitem(ORDERS, "mxfp4", SECOND)
    with pytest.raises(InputError, match="order is 7, wanted one that this version knows for mxfp4: 0 or 8"):
        ExpertWeights.from_state_dict("mxfp4", state)


def test_what_fails_half_way_leaves_all_as_they_were(w: ExpertWeights) -> None:
    before, done = w.codes.clone(), []

    def fails(given: torch.Tensor, undo: bool) -> torch.Tensor:
        done.append(undo)
        if len(done) == 3:
            raise MemoryError
        return _interleaved(given, undo)

    with pytest.raises(MemoryError):
        reorder(w.codes, CodeOrder(1, fails), undo=False)
    assert done == [False, False, False, True, True]
    assert torch.equal(w.codes, before)
