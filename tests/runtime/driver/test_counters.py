"""The words that kernels count with: one for each stream, one of its own for a graph, and a new one after a fault."""

from __future__ import annotations

import ctypes

import pytest

from pretuned.runtime.driver.counters import Counters

PER_THREAD = 2


def test_a_stream_has_a_word(stub: ctypes.CDLL) -> None:
    counters = Counters(0)
    first, two = counters.take(7), counters.take(8)
    assert two == first + 4
    assert [counters.take(7), counters.take(8)] == [first, two]
    assert counters.take(PER_THREAD) == counters.take(PER_THREAD) == two + 4


def test_a_graph_has_words_of_its_own(stub: ctypes.CDLL, monkeypatch: pytest.MonkeyPatch) -> None:
    counters = Counters(0)
    plain = counters.take(7)
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: True)
    assert [counters.take(7), counters.take(7)] == [plain + 4, plain + 8]
    monkeypatch.setattr("torch.cuda.is_current_stream_capturing", lambda: False)
    assert counters.take(7) == plain


def test_a_word_that_may_not_be_zero_is_not_taken_again(stub: ctypes.CDLL) -> None:
    counters = Counters(0)
    first, two = counters.take(7), counters.take(8)
    counters.forget(7)
    counters.forget(99)
    assert counters.take(8) == two
    assert counters.take(7) == two + 4 != first
