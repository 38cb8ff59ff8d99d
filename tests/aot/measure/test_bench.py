"""How many rounds a cell's contenders are timed in."""

from __future__ import annotations

import pytest

from pretuned.aot.measure.bench import Bench
from pretuned.aot.measure.clock import orders
from pretuned.aot.measure.job import MeasureJob
from pretuned.artifacts.records import DType, Op, Problem


class Told:
    """A clock by which each launch takes ``us``, and which tells how many rounds were asked for."""

    def __init__(self, us: float) -> None:
        self.us, self.rounds = us, list[int]()

    def rounds_us(self, graphs: list[object], rounds: int) -> list[list[float]]:
        self.rounds.append(rounds)
        return [[self.us] * rounds for _ in graphs]


@pytest.mark.parametrize(
    ("us", "first", "quick"), [(10.0, 20, 8), (1000.0, 10, 4), (2000.0, 5, 3), (9000.0, 5, 3), (20_000.0, 3, 3)]
)
def test_a_second_pass_takes_three_times_as_many_rounds_and_a_quick_one_fewer(
    us: float, first: int, quick: int
) -> None:
    bench = object.__new__(Bench)  # that of a GPU starts it
    problem = Problem(Op.FORWARD, DType.BF16, 8, 64, 64)
    for again, short, wanted in (
        (False, False, first),
        (True, False, 3 * first),
        (False, True, quick),
        (True, True, 3 * quick),
    ):
        bench.clock = clock = Told(us)  # type: ignore[assignment]
        job = MeasureJob(problem, 16, (), again=again, quick=short)
        rounds = bench._rounds([object(), object()], 10_000.0, (5, 20), job)  # type: ignore[list-item]
        assert clock.rounds == [1, wanted]
        assert [len(row) for row in rounds] == [wanted, wanted]


@pytest.mark.parametrize("count", [1, 2, 3, 42])
def test_nobody_has_the_same_one_before_it_each_time(count: int) -> None:
    rounds = 9
    drawn = orders(count, rounds)
    assert drawn == orders(count, rounds)
    assert [sorted(order) for order in drawn] == [list(range(count))] * rounds
    for number in range(count):
        places = [order.index(number) for order in drawn]
        before = [order[place - 1] for order, place in zip(drawn, places, strict=True) if place]
        after = [order[place + 1] for order, place in zip(drawn, places, strict=True) if place + 1 < count]
        if count > 1:
            assert len(set(places)) > 1
            assert abs(len(before) - len(after)) <= rounds // 3
        if count > 2:
            assert len(set(before)) > 1
