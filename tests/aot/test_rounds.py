"""How many rounds a cell's contenders are timed in."""

from __future__ import annotations

import pytest

from pretuned.aot.measure import Bench


class Told:
    """A clock by which each launch takes ``us``, and which tells how many rounds were asked for."""

    def __init__(self, us: float) -> None:
        self.us, self.rounds = us, list[int]()

    def rounds_us(self, graphs: list[object], rounds: int) -> list[list[float]]:
        self.rounds.append(rounds)
        return [[self.us] * rounds for _ in graphs]


@pytest.mark.parametrize(
    ("us", "first", "second"), [(10.0, 20, 60), (1000.0, 10, 30), (9000.0, 5, 15), (20_000.0, 3, 9)]
)
def test_a_second_look_takes_three_times_as_many_rounds(us: float, first: int, second: int) -> None:
    bench = object.__new__(Bench)  # that of a GPU starts it
    for again, wanted in ((False, first), (True, second)):
        bench.clock = clock = Told(us)  # type: ignore[assignment]
        found = bench._rounds([object(), object()], 10_000.0, (5, 20), again)  # type: ignore[list-item]
        assert clock.rounds == [1, wanted]
        assert [len(row) for row in found] == [wanted, wanted]
