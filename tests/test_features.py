"""Features of an architecture come from its row (kernels/arch.py): nothing else compares its number."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
PRODUCT = ("artifacts", "kernels", "runtime", "aot", "benchmarks")
# The table itself, and the one rule of a record about whose code a GPU runs.
# The last: which PTX a driver compiles for a capability goes by its number.
ALLOWED = {"kernels/arch.py", "artifacts/records.py", "benchmarks/peers/fatbin.py"}
ORDER = (ast.Lt, ast.LtE, ast.Gt, ast.GtE)


def is_sm(node: ast.expr) -> bool:
    """Return True if an expression names a capability: ``sm``, ``chip.sm``, ``native_sm``, or called or indexed."""
    if isinstance(node, (ast.Call, ast.Subscript)):
        node = node.func if isinstance(node, ast.Call) else node.value
    name = node.id if isinstance(node, ast.Name) else node.attr if isinstance(node, ast.Attribute) else ""
    return name == "sm" or (name.endswith("_sm") and not name.endswith("_per_sm"))


def has_number(node: ast.expr) -> bool:
    """Return True if it is a number, or numbers in brackets (an index of a list is none)."""
    if isinstance(node, (ast.Tuple, ast.List, ast.Set)):
        return any(map(has_number, node.elts))
    return isinstance(node, ast.Constant) and type(node.value) is int


def comparisons(source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each place that decides by a capability's number."""
    if not re.search(r"(\b|_)sm\b", source):  # parsing takes long
        return
    for node in ast.walk(ast.parse(source)):
        seen = False
        if isinstance(node, ast.Compare):
            sides = [node.left, *node.comparators]
            others = [side for side in sides if not is_sm(side)]
            seen = len(others) < len(sides) and (
                any(isinstance(op, ORDER) for op in node.ops) or any(map(has_number, others))
            )
        elif isinstance(node, ast.BinOp):
            seen = isinstance(node.op, (ast.FloorDiv, ast.Mod)) and is_sm(node.left)
        elif isinstance(node, ast.Call):
            seen = isinstance(node.func, ast.Name) and node.func.id == "divmod" and is_sm(node.args[0])
        elif isinstance(node, ast.Match):
            seen = is_sm(node.subject)
        elif isinstance(node, ast.Subscript):
            seen = isinstance(node.value, ast.Dict) and is_sm(node.slice)
        if seen:
            yield node.subject.lineno if isinstance(node, ast.Match) else node.lineno, ast.unparse(node).split("\n")[0]


@pytest.mark.parametrize(
    "text",
    [
        "sm == 90",
        "chip.sm == 90",
        "sm >= 90",
        "90 <= sm",
        "sm in (90, 100, 103)",
        "sm not in {80}",
        "local.sm < 89",
        "80 <= self._sm < 90",
        "sm // 10 in (9, 10)",
        "sm // 10",
        "usable.bundle.target.sm % 10",
        "divmod(sm, 10)",
        "FIRST <= sm",
        "sm > FIRST_BLACKWELL_SM",
        "native_sm() != 90",
        "{80: 1, 90: 2}[sm]",
        "chips[0].sm == 90",
        "match sm:\n case 90: pass",
    ],
)
def test_a_decision_by_number_is_found(text: str) -> None:
    assert len(list(comparisons(text))) >= 1


@pytest.mark.parametrize(
    "text",
    [
        "target.sm == local.sm",
        "sm in SUPPORTED",
        "sm not in arch.ARCHS",
        "arch_of(sm).has(Feature.WGMMA)",
        "sm is None",
        "chip.sm_count == 132",
        "wanted = 10 * major + minor",
        "f'sm_{sm}'",
        "abs(sm - number)",
        "fresh and sm == sms[0]",
        "REFUSED[sm]",
        "registers <= limits.registers_per_sm",
    ],
)
def test_what_hands_a_capability_on_is_not_found(text: str) -> None:
    assert list(comparisons(text)) == []


@pytest.mark.parametrize("layer", PRODUCT)
def test_no_code_decides_by_the_number_of_a_capability(layer: str) -> None:
    files = [path for path in sorted((ROOT / layer).rglob("*.py")) if str(path.relative_to(ROOT)) not in ALLOWED]
    assert files
    listed = [
        f"{path.relative_to(ROOT)}:{line}: {text}"
        for path in files
        for line, text in comparisons(path.read_text(encoding="utf-8"))
    ]
    assert not listed, "ask kernels/arch.py's row for a feature, or give it a field:\n" + "\n".join(listed)


def test_the_table_is_looked_at_too_if_it_were_not_allowed() -> None:
    for path in ALLOWED:
        assert list(comparisons((ROOT / path).read_text(encoding="utf-8"))), f"{path} compares nothing: not allowed"
