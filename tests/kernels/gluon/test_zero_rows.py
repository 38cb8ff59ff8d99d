"""The rows that no index names: the lines of ``kernels/gluon/zero_rows.py``, run in Python for every program of
a grid.

No interpreter runs the language they are written in. What stands in for it here is numpy, and a pointer a list. The PTX
among them is run as it stands.
"""

from __future__ import annotations

import ast
import functools
import re
from pathlib import Path
from types import CodeType, SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from warp import Warp

KERNEL = Path(__file__).parents[3] / "kernels" / "gluon" / "zero_rows.py"
ROWS, LOADS = (  # as it ships
    int(re.findall(rf"^{name}\b.*= \D*(\d+)", KERNEL.read_text(), re.MULTILINE)[0]) for name in ("ROWS", "_LOADS")
)
SCATTER, ZERO_TAIL = 2, 16


class Tensor(np.ndarray[Any, Any]):
    """Numbers, with the language's ``to``."""

    def to(self, _dtype: object) -> Tensor:
        return self


def tensor(values: Any) -> Tensor:
    return np.asarray(values, dtype=np.int64).view(Tensor)


class Pointer:
    """Words in a list, and where."""

    def __init__(self, words: list[int], at: Any = 0) -> None:
        self.words, self.at = words, at

    def __add__(self, more: Any) -> Pointer:
        return Pointer(self.words, self.at + more)

    def to(self, _dtype: object, bitcast: bool) -> Pointer:
        return self


def assembly(text: str, _constraints: str, arguments: list[Any], **_: object) -> Tensor:
    """Return a warp's result of the PTX; an address is a place in the pointer's words."""
    pointer, *others = arguments
    # (Nothing keeps the compiler from giving the result the register of an argument, so it is set when all are read.)
    assert text.count("$0") == 1
    assert text.rstrip("\n}").endswith("mov.b32 $0, named;")
    warp = Warp(pointer.words, {"$1": 0})
    warp.registers |= {f"${i}": np.broadcast_to(other, 32).astype(np.int64) for i, other in enumerate(others, 2)}
    warp.run(text)
    return tensor(warp.registers["$0"])


@functools.cache
def code() -> CodeType:
    """The module's functions, without their decorators."""
    tree = ast.parse(KERNEL.read_text())
    functions: list[ast.stmt] = [node for node in tree.body if isinstance(node, ast.FunctionDef)]
    for function in functions:
        assert isinstance(function, ast.FunctionDef)
        function.decorator_list = []
    return compile(ast.Module(functions, []), str(KERNEL), "exec", flags=annotations.compiler_flag)


def kernel(program: int, programs: int, rows: int, loads: int) -> dict[str, Any]:
    """The module's functions, of smaller windows, as one program of a grid has them."""
    language = SimpleNamespace(
        constexpr=object,
        int32=None,
        int64=None,
        BlockedLayout=lambda *_: None,
        to_tensor=tensor,
        arange=lambda first, end, layout: tensor(np.arange(first, end)),
        where=lambda a, b, c: tensor(np.where(a, b, c)),
        sum=lambda values, _axis: tensor(values.sum()),
        inline_asm_elementwise=assembly,
        minimum=lambda a, b: tensor(min(a, b)),
        cdiv=lambda a, b: -(-a // b),
        program_id=lambda _axis: program,
        num_programs=lambda _axis: programs,
    )

    def counts(m_sizes: Pointer, step: int, M: int, E: int, experts: int, _layout: object) -> Tensor:
        each = (m_sizes.words[m_sizes.at + i * step] if i < E else 0 for i in range(experts))
        return tensor([min(max(size, 0), M) for size in each])

    held: dict[str, Any] = {
        "gl": language,
        "counts": counts,
        "LANES": None,
        "ROWS": rows,
        "_LOADS": loads,
        "_ALL": "0xffffffff",
        "SCATTER_FLAG": SCATTER,
        "ZERO_TAIL_FLAG": ZERO_TAIL,
    }
    exec(code(), held)
    held["_TEXT"] = held["text"]()
    return held


def cleared(
    sizes: list[int],
    index: list[int],
    index_end: int,
    programs: int,
    rows: int,
    loads: int,
    step: int = 1,
    flags: int = SCATTER | ZERO_TAIL,
) -> list[int]:
    """Every row that some program clears."""
    results: list[int] = []
    M = tensor(len(index))
    words = [word for number in index for word in (number, *[0] * (step - 1))]
    for program in range(programs):
        held = kernel(program, programs, rows, loads)
        held["_clear_row"] = lambda _y, row, *_: results.append(int(row))
        moved = (Pointer(words), None, None, step, index_end, 1, flags)
        held["clear_unnamed"](None, Pointer(sizes), moved, M, len(sizes), 8, 8, 1)
    return sorted(results)


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    sizes=st.lists(st.integers(-3, 30), min_size=1, max_size=70),
    index=st.lists(st.integers(-2, 90), max_size=160),
    index_end=st.integers(1, 85),
    programs=st.integers(1, 90),
    rows=st.sampled_from([32, 64, 1024]),
    loads=st.sampled_from([2, 16]),
    step=st.sampled_from([1, 2]),
)
@example(sizes=[4], index=[63, 31, 32, 31], index_end=64, programs=1, rows=64, loads=2, step=1)  # the last bits
@example(sizes=[160], index=[*range(80), *range(79, -1, -1)], index_end=85, programs=2, rows=64, loads=2, step=2)
@example(sizes=[600], index=[i % 90 for i in range(600)], index_end=85, programs=1, rows=64, loads=16, step=1)
@example(sizes=[2000], index=[*range(1121, 1, -1)], index_end=1123, programs=1, rows=ROWS, loads=LOADS, step=1)
@example(sizes=[512], index=[*range(560)], index_end=600, programs=1, rows=ROWS, loads=LOADS, step=2)
@example(sizes=[1] * 40, index=list(range(60)), index_end=60, programs=3, rows=32, loads=2, step=2)  # many experts
def test_each_row_that_no_index_names_is_cleared_once(
    sizes: list[int], index: list[int], index_end: int, programs: int, rows: int, loads: int, step: int
) -> None:
    used = min(sum(min(max(size, 0), len(index)) for size in sizes), len(index))
    want = sorted(set(range(index_end)) - set(index[:used]))
    assert cleared(sizes, index, index_end, programs, rows, loads, step) == want


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(
    start=st.sampled_from([0, 1, 1000, 2**31 - 1 - 1024]),
    rows=st.sampled_from([1, 31, 32, 33, 1000, 1024]),
    loads=st.sampled_from([2, 16]),
    step=st.sampled_from([1, 2]),
    used=st.integers(0, 1100),
    seed=st.integers(0, 99),
)
@example(start=2**31 - 1 - 1024, rows=1024, loads=16, step=2, used=1087, seed=0)
def test_the_search_finds_what_is_named_and_no_other(
    start: int, rows: int, loads: int, step: int, used: int, seed: int
) -> None:
    """Of numbers of any size, and no word is read but those that are asked for."""
    random = np.random.default_rng(seed)
    near = random.permutation(np.arange(start - 40, start + rows + 40))
    far = random.choice([-(2**31), -(2**31) + 1, -1, 0, 2**31 - 1, *near.tolist()], used)
    index = np.resize(np.where(random.random(used) < 0.5, np.resize(near, used), far), used)
    index = np.where(index > 2**31 - 1, index - 2**32, index)
    words = np.full((used, step), start)  # (another row's number where an int64 has its upper half)
    words[:, 0] = index
    memory = words.ravel().tolist()[: (used - 1) * step + 1 if used else 0]
    lane = np.arange(32)
    text = kernel(0, 1, ROWS, loads)["text"]()
    named = assembly(text, "", [Pointer(memory), used, start, rows, lane, step])
    bits = {32 * i + bit for i in range(32) for bit in range(32) if int(named[i]) >> bit & 1}
    assert {bit for bit in bits if bit < rows} == {int(row) - start for row in index if start <= row < start + rows}


def test_nothing_is_unless_it_is_asked_for() -> None:
    for flags in (0, SCATTER, ZERO_TAIL, 4 | ZERO_TAIL):
        assert cleared([3], [0, 1, 2], 8, 2, 32, 8, flags=flags) == []
