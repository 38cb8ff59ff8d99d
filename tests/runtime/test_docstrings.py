"""Public docstrings against signatures: every parameter is described, and so are the result and the errors."""

import inspect
import re
from collections.abc import Callable
from typing import Any

import pytest

import pretuned
import pretuned.runtime
from pretuned.artifacts import errors

PUBLIC = sorted({*pretuned.__all__, *pretuned.runtime.__all__} - {"__version__"})
FUNCTIONS = [name for name in PUBLIC if inspect.isfunction(getattr(pretuned.runtime, name))]
CLASSES = [name for name in PUBLIC if inspect.isclass(getattr(pretuned.runtime, name))]
RAISE_NOTHING = {"register_compiler", "register_tuner", "reload", "reuse_fp8_weights"}


def sections(text: str) -> dict[str, list[str]]:
    """The lines of each underlined section of a docstring in numpy's style."""
    parts: dict[str, list[str]] = {}
    lines = text.splitlines()
    title = ""
    for line, following in zip(lines, [*lines[1:], ""], strict=True):
        if line and re.fullmatch("-+", following) and len(line) == len(following):
            title = line
            parts[title] = []
        elif title and not re.fullmatch("-+", line):
            parts[title].append(line)
    return parts


def headings(lines: list[str]) -> list[str]:
    """The comma-separated names of a section's unindented lines."""
    return [name for line in lines if line and line[0] != " " for name in line.split(", ")]


def complaints(function: Callable[..., Any]) -> list[str]:
    """Return the parts that a function's docstring lacks, or has too much, by its signature."""
    signature, parts = inspect.signature(function), sections(inspect.getdoc(function) or "")
    described = headings(parts.get("Parameters", []))
    faults = [f"no parameter {name}" for name in signature.parameters if name not in described]
    faults += [f"describes {name}, which it does not take" for name in described if name not in signature.parameters]
    faults += [f"describes {name} twice" for name in sorted({*described}) if described.count(name) > 1]
    returns = signature.return_annotation not in (None, "None")
    if returns != bool(headings(parts.get("Returns", []))):
        faults.append("no Returns" if returns else "Returns of nothing")
    return faults


def test_every_public_name_is_a_function_or_a_class() -> None:
    assert sorted(FUNCTIONS + CLASSES) == PUBLIC
    assert len(FUNCTIONS) > 12


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_function_s_docstring_describes_its_parameters_result_and_errors(name: str) -> None:
    function = getattr(pretuned.runtime, name)
    assert complaints(function) == []
    raised = headings(sections(inspect.getdoc(function) or "").get("Raises", []))
    assert bool(raised) == (name not in RAISE_NOTHING)
    for error in raised:
        assert hasattr(errors, error), error


@pytest.mark.parametrize("name", CLASSES)
def test_a_class_s_docstring_names_what_it_is_made_of(name: str) -> None:
    kind = getattr(pretuned.runtime, name)
    text = inspect.getdoc(kind) or ""
    made_of = [field for field in inspect.signature(kind).parameters if not field.startswith("_")]
    assert made_of
    assert [field for field in made_of if not re.search(rf"\b{field}\b", text)] == []


def test_a_docstring_s_faults_are_named() -> None:
    def function(x: int, *, y: int) -> int:
        """Add.

        Parameters
        ----------
        x, z
            Numbers.
        x
            A number.
        """
        return x + y

    assert complaints(function) == [
        "no parameter y",
        "describes z, which it does not take",
        "describes x twice",
        "no Returns",
    ]
