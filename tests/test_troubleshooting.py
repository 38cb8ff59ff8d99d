"""docs/use/troubleshooting.md has every warning that the runtime logs and every error that it raises."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.artifacts import errors

ROOT = Path(__file__).resolve().parents[1]
PAGE = "docs/use/troubleshooting.md"
LEVELS = ("warning", "error", "critical", "exception", "log")


def warnings(source: str) -> Iterator[tuple[int, str]]:
    """(line, format) of each call of a logger, of ``_tell("...")`` too; "" where it is no text that stands there."""
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        if (
            isinstance(node.func, ast.Attribute)
            and isinstance(node.func.value, ast.Name)
            and node.func.value.id == "_log"
        ):
            if node.func.attr in LEVELS:
                said = node.args[1 if node.func.attr == "log" else 0]
                yield node.lineno, "".join(_texts(said))
        elif isinstance(node.func, ast.Name) and node.func.id == "_tell" and node.args:
            yield node.lineno, "".join(_texts(node.args[0]))


def _texts(node: ast.expr) -> Iterator[str]:
    parts = node.values if isinstance(node, ast.JoinedStr) else [node]
    for part in parts:
        yield part.value if isinstance(part, ast.Constant) and isinstance(part.value, str) else "%s"


def longest(form: str) -> str:
    """The longest piece that every such message has."""
    pieces = re.split(r"%[srd]", form.removeprefix("pretuned: "))
    return max((piece.strip(" :,.()=") for piece in pieces), key=len)


def missing(page: str, source: str, where: str) -> list[str]:
    said = " ".join(page.split())
    return [
        f"{where}:{line}: the page has nothing like {form!r}"
        for line, form in warnings(source)
        if len(longest(form)) > 3 and longest(form) not in said
    ]


def test_every_warning_stands_on_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    files = [*(ROOT / "runtime").rglob("*.py"), *(ROOT / "artifacts").rglob("*.py")]
    sources = {str(path): path.read_text(encoding="utf-8") for path in files}
    sources = {path: source for path, source in sources.items() if re.search(r"\b_(log|tell)\b", source)}
    assert [complaint for path, source in sources.items() for complaint in missing(page, source, path)] == []
    warned = [form for source in sources.values() for _, form in warnings(source)]
    assert len(warned) > 20
    assert "bundles run on linux x86_64 and aarch64, this is" in page  # whose text is a variable


def test_every_error_stands_on_the_page():
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    classes = [name for name, value in vars(errors).items() if inspect.isclass(value) and issubclass(value, Exception)]
    assert len(classes) > 10
    assert [name for name in classes if f"`{name}`" not in page and name != "BundleError"] == []


@pytest.mark.parametrize(
    "source",
    [
        '_log.warning("pretuned: a new trouble with %s", x)',
        'def f():\n    _tell(f"a new trouble: {x}")',
        '_log.log(level, "pretuned: a new trouble %s", x)',
    ],
)
def test_a_warning_that_is_not_there_is_reported(source):
    page = (ROOT / PAGE).read_text(encoding="utf-8")
    (complaint,) = missing(page, source, "x.py")
    assert "a new trouble" in complaint
