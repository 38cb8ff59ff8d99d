"""Programs: what was done once is done again on other tensors, and what could not be written down has none."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated

from pretuned.runtime.launch import program
from pretuned.runtime.launch.program import EAGER, EagerExecutor, Recorder, Step

ROWS = 4


@pytest.fixture(autouse=True)
def stream() -> Iterator[None]:
    """torch's current one is 7."""
    with emulated(EmulatedGpu()) as gpu:
        gpu.stream = 7
        yield


def launched(seen: list[tuple[int, ...]], *, scales: bool = True) -> Step:
    return Step(lambda M, stream, *at: seen.append((M, stream, *at)), "a launch", ("x", "y", "w"), scales)


def arithmetic(
    executor: EagerExecutor, seen: list[tuple[int, ...]], x: torch.Tensor, w: torch.Tensor | None
) -> torch.Tensor:
    """y = f(x, w) by a launch into new memory, then twice the sum of its rows by torch."""
    y = executor.new(x, (ROWS, 3))
    executor.run(launched(seen), ROWS, {"x": x, "y": y.zero_(), "w": w})
    tensor = executor.new(x, (ROWS // 2,), torch.float64, per=2)
    executor.run(launched(seen), ROWS, {"x": y, "y": tensor, "w": None})
    total: torch.Tensor = executor.call(lambda tensor: tensor.sum(0) * 2, y)
    return total


def recorded(executor: Recorder, result: torch.Tensor | None) -> program.Program | None:
    return executor.program(result)


def test_at_once_and_written_down_it_does_the_same_and_then_again_on_others() -> None:
    seen: list[tuple[int, ...]] = []
    x, w = torch.zeros(ROWS, 3), torch.zeros(2)
    arithmetic(EAGER, seen, x, w)
    executor = Recorder(ROWS, (x, w), varies=False)
    recording = recorded(executor, arithmetic(executor, seen, x, w))
    assert recording is not None
    assert [step.name for step in recording.steps] == ["a launch"] * 2
    assert seen[0][:3] == seen[2][:3] == (ROWS, 7, x.data_ptr())
    assert seen[0][4] == seen[2][4] == w.data_ptr()
    assert seen[2][3] == seen[3][2] != seen[3][3]  # the first one's result is the second's operand
    assert seen[3][4] == 0
    other, more = torch.zeros(ROWS, 3), torch.zeros(2)
    (result,) = recording.run(ROWS, 9, (other, more))
    assert result is not None
    assert result.shape == (3,)
    assert seen[4][:3] == (ROWS, 9, other.data_ptr())
    assert seen[4][4] == more.data_ptr()
    assert seen[5][2] == seen[4][3]


def test_it_keeps_no_tensor() -> None:
    x = torch.zeros(ROWS, 3)
    executor = Recorder(ROWS, (x, None), varies=False)
    recording = recorded(executor, arithmetic(executor, [], x, None))
    assert recording is not None
    there = weakref.ref(x)
    del x, executor
    gc.collect()
    assert there() is None


def test_memory_that_nothing_reads_any_more_is_given_back() -> None:
    alive: list[weakref.ref[torch.Tensor]] = []
    x = torch.zeros(ROWS, 3)

    def noted(tensor: torch.Tensor) -> torch.Tensor:
        alive.append(weakref.ref(tensor))
        return tensor.clone()

    executor = Recorder(ROWS, (x,), varies=False)
    first = executor.call(noted, x)
    second = executor.call(noted, first)
    recording = recorded(
        executor, executor.call(lambda tensor: tensor + sum(ref() is not None for ref in alive[-2:]), second)
    )
    del first, second
    assert recording is not None
    alive.clear()
    (result,) = recording.run(ROWS, 0, (x,))
    assert result is not None
    assert result.eq(1).all()  # x alone is there; in the first run its copy was, too


def leaves_the_launches(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    executor.unplanned()
    return x


def reads_what_is_not_of_it(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    executor.run(launched([]), ROWS, {"x": x, "y": torch.zeros(1), "w": None})
    return x


def returns_what_is_not_of_it(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    return x + 1


def fills_by_other_means(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    tensor: torch.Tensor = executor.new(x, (ROWS, 1))
    return tensor.zero_()


def reads_a_view(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    result: torch.Tensor = executor.call(lambda tensor: tensor + 1, x.view(-1))
    return result


def is_of_another_number_of_rows(executor: Recorder, x: torch.Tensor) -> torch.Tensor:
    executor.run(launched([]), ROWS + 1, {"x": x, "y": x, "w": None})
    return x


@pytest.mark.parametrize(
    "compute",
    [
        leaves_the_launches,
        reads_what_is_not_of_it,
        returns_what_is_not_of_it,
        fills_by_other_means,
        reads_a_view,
        is_of_another_number_of_rows,
    ],
)
def test_what_could_not_be_written_down_has_none(compute: Any) -> None:
    x = torch.zeros(ROWS, 3)
    executor = Recorder(ROWS, (x,), varies=False)
    assert executor.program(compute(executor, x)) is None


def test_two_names_of_one_memory_are_not_told_apart() -> None:
    x = torch.zeros(ROWS, 3)
    assert Recorder(ROWS, (x, x.view(-1)), varies=False).program(x) is None


def test_of_any_number_of_rows_it_has_no_size_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    for varies in (False, True):
        for scales in (False, True):
            x = torch.zeros(ROWS, 3)
            executor = Recorder(ROWS, (x,), varies=varies)
            executor.run(launched([], scales=scales), ROWS, {"x": x, "y": x, "w": None})
            assert (executor.program(x) is not None) is (scales or not varies)
    x = torch.zeros(ROWS, 3)
    executor = Recorder(ROWS, (x,), varies=True)
    y, half = executor.new(x, (ROWS, 5)), executor.new(x, (ROWS // 2, 5), per=2)
    same = executor.new(x, (ROWS, 2), per=0)
    executor.run(launched([]), ROWS, {"x": y, "y": half, "w": same})
    recording = executor.program(y, half, None, same)
    assert recording is not None
    results = recording.run(10, 0, (x,))
    assert [None if tensor is None else tuple(tensor.shape) for tensor in results] == [(10, 5), (5, 5), None, (ROWS, 2)]


def of_weights(executor: EagerExecutor, seen: list[tuple[int, ...]], x: torch.Tensor) -> torch.Tensor:
    """Memory of a size that is a function of M, filled by a launch that reads no rows."""
    y: torch.Tensor = executor.new(x, (3, 2 * len(x) + 1), torch.float64, per=lambda M: (3, 2 * M + 1))
    executor.run(launched(seen)._replace(has_rows=False), 0, {"x": x, "y": y})
    return y


def test_sizes_that_are_functions_of_the_rows() -> None:
    seen: list[tuple[int, ...]] = []
    x = torch.zeros(ROWS, 3)
    executor = Recorder(ROWS, (x,), varies=True)
    recording = executor.program(of_weights(executor, seen, x))
    assert recording is not None
    for rows in (2, 7, 2):
        (y,) = recording.run(rows, 7, [torch.zeros(rows, 3)])
        assert y is not None
        assert (y.shape, y.stride(), y.dtype) == ((3, 2 * rows + 1), (2 * rows + 1, 1), torch.float64)
        assert seen[-1][3] == y.data_ptr()
    executor = Recorder(ROWS, (x,), varies=True)
    y = executor.new(x, (3, ROWS), per=lambda M: (3, M + 1))
    executor.run(launched(seen), ROWS, {"x": x, "y": y})
    assert executor.program(y) is None  # the function says another size
