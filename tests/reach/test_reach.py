"""The measures themselves: a line that is not reached is told, and a change is what it says."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
sys.path.append(str(ROOT))  # the folder is a program: python -m tests.reach
try:
    from tests.reach import mutants
    from tests.reach.__main__ import faults
    from tests.reach.part import PART, TESTS
finally:
    sys.path.remove(str(ROOT))

FILE = "artifacts/limits.py"
LINE = (ROOT / FILE).read_text().splitlines()[4]


def report(lines: list[int], ways: list[list[int]]) -> dict[str, object]:
    return {"files": {FILE: {"missing_lines": lines, "missing_branches": ways}}}


def test_each_line_and_way_that_is_not_reached_is_reported() -> None:
    assert list(faults(report([], []), {})) == []
    assert list(faults(report([5], [[5, 6], [5, -1]]), {})) == [f"{FILE}:5: is not reached: {LINE}"]
    assert list(faults(report([], [[5, 6], [5, -1]]), {})) == [
        f"{FILE}:5: never goes on to 6: {LINE}",
        f"{FILE}:5: never leaves: {LINE}",
    ]


def test_a_line_is_left_out_by_its_text_and_only_while_it_is_not_reached() -> None:
    row = {(FILE, LINE): "why"}
    assert list(faults(report([5], []), row)) == []
    assert list(faults(report([], [[5, 6]]), row)) == []
    (fault,) = faults(report([], []), row)
    assert fault == f"{FILE}: part.py leaves out a line that is reached, or gone: {LINE}"


def test_what_is_measured_is_there() -> None:
    files = [*PART, *TESTS, *mutants.FILES, *(test for tests in mutants.FILES.values() for test in tests)]
    assert [file for file in files if not (ROOT / file).exists()] == []
    for file, line, _ in mutants.SAME:
        assert line in map(str.strip, (ROOT / file).read_text().splitlines()), f"{file} has no line {line}"


@pytest.mark.parametrize(
    ("text", "became"),
    [
        ("a < b", ["a <= b"]),
        ("a == b", ["a != b"]),
        ("a in b", ["a not in b"]),
        ("a is None", ["a is not None"]),
        ("a and b", ["a or b"]),
        ("not a", ["a"]),
        ("1", ["2"]),
        ("True", ["False"]),
        ("a + b", ["a - b"]),
        ("f(a)", ["pass"]),
        ("'text'", []),
        ("a", []),
        ("None", []),
        ("if a:\n    b", ["if not a:"]),
        ("while a:\n    break", ["while not a:", "continue"]),
        ("raise E", ["pass"]),
        ("def f():\n    return a", ["return None"]),
        ("def f():\n    return None", []),
    ],
)
def test_what_a_line_becomes(text: str, became: list[str]) -> None:
    changed = [change for node in ast.walk(ast.parse(text)) for change in mutants.changes(node)]
    assert [ast.unparse(ast.fix_missing_locations(tree)).splitlines()[0] for tree in changed] == became


def test_a_mutant_is_the_file_with_one_thing_changed() -> None:
    listed = mutants.mutants("artifacts/locking.py")
    whole = ast.unparse(ast.parse((ROOT / "artifacts/locking.py").read_text())).splitlines()
    assert len(listed) > 20
    for mutant in listed:
        there = mutant.source.splitlines()
        changed = [i for i, (a, b) in enumerate(zip(whole, there, strict=False)) if a != b]
        assert changed or len(there) != len(whole), mutant
        assert len(changed) <= 1 or len(there) != len(whole), mutant


@pytest.mark.nightly  # several runs of pytest, of a tool that the night uses alone
def test_mutants_are_tested_by_their_tests() -> None:
    """Mutants of a small file are tested in a process that has not imported the product; an unchanged file survives."""
    code = """
from tests.reach import chosen, mutants
file = "artifacts/publishing.py"
with mutants.product() as place:
    path = place / "pretuned" / file
    before = path.read_text()
    tests = chosen.timed(place, file, mutants.FILES[file])
    one = next(one for one in mutants.mutants(file) if one.became == "return None")
    print(mutants.judge(place, one, tests), path.read_text() == before)
    print(chosen.noticed(place, one.lines, tests), chosen.passes(place, mutants.FILES[file]))
    near = [test.name for test in tests if not test.lines.isdisjoint(one.lines)]
    print(0 < len(near) < len(tests), tests == sorted(tests, key=lambda test: test.seconds))
    path.write_text("raise KeyError")
    print(chosen.timed(place, file, mutants.FILES[file]), chosen.noticed(place, range(0), tests))
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["True", "True", "False", "True", "True", "True", "None", "True"]


@pytest.mark.parametrize(("text", "lines"), [("if (a and\n b):\n  c", (1, 2)), ("a = (1,\n 2)", (1, 2)), ("a", (1,))])
def test_the_lines_of_a_statement(text: str, lines: tuple[int, ...]) -> None:
    """Without those that it holds."""
    assert tuple(mutants._head(ast.parse(text).body[0])) == lines
    assert mutants._head(ast.parse(text).body[0].value if text == "a" else ast.arg("a")) is None
