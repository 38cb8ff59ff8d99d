"""Names and docstrings that a stranger understands: no pronouns or participles as names, no riddles as first words."""

from __future__ import annotations

import ast
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
NO_NOUNS = {"one", "found", "given", "known", "told", "every", "made"}
OPENING = re.compile(r"(The same|That of|Those of|What|Who|As|Whether)\b")
SUSPECT = re.compile(
    rf"\b({'|'.join(sorted(NO_NOUNS))})\b\s*(=|,|:|\)|\(| in\b|$)|\"\"\"{OPENING.pattern}", re.MULTILINE
)
# Docstrings, except those with such an opening; comments without quotes, as "#" may be in a string; an import.
PROSE = re.compile(
    rf"\"\"\"(?!{OPENING.pattern}).*?\"\"\"|(^ *|  )# [^\"'\n]*$|^from hypothesis import given\b",
    re.DOTALL | re.MULTILINE,
)


def is_suspect(source: str) -> bool:
    """Return False if a module certainly has no fault: parsing takes long."""
    return SUSPECT.search(source if source.count('"""') % 2 else PROSE.sub("", source)) is not None


def sources() -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", "*.py"], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def names(tree: ast.AST) -> Iterator[tuple[int, str]]:
    """(line, name) of each variable, argument, attribute, function and class that a module binds."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
            yield node.lineno, node.attr
        elif isinstance(node, ast.arg):
            yield node.lineno, node.arg
        elif isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef | ast.ExceptHandler | ast.MatchAs):
            yield node.lineno, node.name or ""


def complaints(file: str, source: str, *, kernel: bool = False) -> list[str]:
    """Return the names and docstrings of a module that need a second reading.

    A cubin's digest is of its source's names, so those of a ``kernel`` stay.
    """
    tree = ast.parse(source, file)
    lines = [] if kernel else [(line, f"{name} is no noun") for line, name in names(tree) if name in NO_NOUNS]
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            match = OPENING.match(ast.get_docstring(node) or "")
            if match:
                lines.append((node.body[0].lineno, f"a docstring begins with {match[0]!r}"))
    return [f"{file}:{line}: {what}" for line, what in sorted(lines)]


def test_names_are_nouns_and_docstrings_begin_with_a_verb_or_a_noun() -> None:
    faults = []
    for file in sources():
        source = (ROOT / file).read_text(encoding="utf-8")
        if not is_suspect(source):
            continue
        kernel = file.startswith("kernels/") and re.search(r"^(import|from) triton", source, re.MULTILINE) is not None
        faults += complaints(file, source, kernel=kernel)
    assert faults == []


@pytest.mark.parametrize(
    ("source", "what"),
    [
        ("for one in cells:\n    pass", "1: one is no noun"),
        ("x = 1\ny = [made.N for made in x]", "2: made is no noun"),
        ("def f(given):\n    pass", "1: given is no noun"),
        ("self.told = []", "1: told is no noun"),
        ("def found():\n    pass", "1: found is no noun"),
        ('def f():\n    """The same of dW."""', "2: a docstring begins with 'The same'"),
        ('"""What is there."""', "1: a docstring begins with 'What'"),
    ],
)
def test_a_fault_is_reported_with_its_line(source: str, what: str) -> None:
    assert is_suspect(source)
    assert complaints("a.py", source) == [f"a.py:{what}"]


def test_names_of_kernels_and_of_libraries_may_stay() -> None:
    assert complaints("a.py", "one = 1", kernel=True) == []
    assert complaints("a.py", "from hypothesis import given\nf(known=1)\n'Asks.'") == []
