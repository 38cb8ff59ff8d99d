"""The digest of a syntax tree: what keeps it, what changes it, and that each Python computes the same."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from pretuned.artifacts import syntax
from pretuned.artifacts.syntax import canonical, function_sha256, syntax_sha256
from pretuned.kernels.registry import ENTRIES

ROOT = Path(__file__).resolve().parents[2]
PYTHONS = ("3.10", "3.11", "3.12", "3.13", "3.14")
# Each part is "#: name digest", and code that every Python from 3.10 on parses.
ZOO = {
    name: (digest, text)
    for name, digest, text in re.findall(
        r"^#: ([^\n]+) (\w+)\n(.*?)(?=^#: |\Z)",
        (ROOT / "tests/golden/syntax-zoo.txt").read_text(encoding="utf-8"),
        re.MULTILINE | re.DOTALL,
    )
}
KERNEL = '''\
"""A module."""

from __future__ import annotations

import triton
import triton.language as tl

FEW: tl.constexpr = tl.constexpr(32)  # rows


@triton.jit(do_not_specialize=["M"])
def rows(x, M, BLOCK: tl.constexpr, TURNED: tl.constexpr = False):
    """Rows."""
    # A step.
    for k in tl.range(0, tl.cdiv(M, BLOCK), num_stages=1):
        x += tl.load(x + k * 2, mask=k < M, other=0.0)
    return "a" "b", None


class Kept:
    """A class."""

    size: int
'''


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("# A step.", "# Another step."),
        ("    # A step.\n", ""),
        ('"""A module."""\n\n', ""),
        ('"""Rows."""', '"""Lines.\n\n    More of them.\n    """'),
        ('    """Rows."""\n', ""),
        ('"""A class."""', '"A" " class."'),
        ("\n\n\n", "\n"),
        ("import triton\nimport triton.language as tl", "import triton.language as tl\nimport triton"),
        ("import triton\n", "from .elsewhere import tile\n"),
        ("(x, M, BLOCK: tl.constexpr, TURNED", "(\n    x, M,  # both\n    BLOCK: tl.constexpr, TURNED"),
        ('"a" "b"', "('a'\n        'b')"),
        ('"a" "b"', 'u"ab"'),
        ("x + k * 2", "(x + (k * 2))"),
        ("0.0", "0.00"),
        ("32", "0x20"),
        ("\n", "\r\n"),
    ],
)
def test_what_no_kernel_depends_on_keeps_the_digest(old: str, new: str) -> None:
    assert KERNEL.replace(old, new) != KERNEL
    assert canonical(KERNEL.replace(old, new)) == canonical(KERNEL)
    assert syntax_sha256(KERNEL.replace(old, new).encode()) == syntax_sha256(KERNEL)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("k * 2", "k + 2"),
        ("k < M", "k <= M"),
        ("+=", "-="),
        ("x + k * 2", "(x + k) * 2"),
        ("num_stages=1", "num_stages=2"),
        ("num_stages=1", "num_stages=1.0"),
        ("num_stages=1", "num_stages=True"),
        ("num_stages=1", 'num_stages="1"'),
        ("num_stages=1", "num_stages=b'1'"),
        ("num_stages=1", "num_stages=1j"),
        ("num_stages=1", "stages=1"),
        (", num_stages=1", ", 1"),
        (", num_stages=1", ""),
        ("0.0", "-0.0"),
        ("None", "..."),
        ("None", '"None"'),
        (", None", ""),
        ('"a" "b"', 'b"a" b"b"'),
        ('"a" "b"', 'f"ab"'),
        ('"a" "b"', '"a", "b"'),
        ("BLOCK: tl.constexpr", "BLOCK"),
        ("BLOCK: tl.constexpr", "BLOCK: 'tl.constexpr'"),
        ("(x, M, BLOCK", "(x, M, *, BLOCK"),
        ("(x, M, BLOCK", "(M, x, BLOCK"),
        ("TURNED: tl.constexpr = False", "TURNED: tl.constexpr"),
        ("TURNED: tl.constexpr = False", "TURNED: tl.constexpr = 0"),
        ('@triton.jit(do_not_specialize=["M"])', "@triton.jit"),
        ('@triton.jit(do_not_specialize=["M"])\n', ""),
        ("FEW: tl.constexpr = tl", "FEW = tl"),
        ("size: int", "size: float"),
        ("size: int", '"A string that is no docstring."\n    size: int'),
        ("    return", "    import triton.runtime\n    return"),
    ],
)
def test_what_a_kernel_may_depend_on_changes_the_digest(old: str, new: str) -> None:
    assert KERNEL.replace(old, new) != KERNEL
    assert syntax_sha256(KERNEL.replace(old, new)) != syntax_sha256(KERNEL)


def test_a_string_after_an_import_is_no_docstring() -> None:
    assert canonical('import triton\n"A string."\n') == canonical('"A docstring."\n"A string."\n') != ""


def test_an_f_string_is_as_its_text_and_not_as_it_is_split() -> None:
    assert canonical('f"a{x}" "b" f"" f"c"') == canonical('f"a{x}bc"')
    for other in ('f"a{x!r}bc"', 'f"a{y}bc"', 'f"a{x:b}c"', 'f"a{{x}}bc"', 'f"{x}abc"'):
        assert canonical(other) != canonical('f"a{x}bc"')


def test_this_python_has_the_digests_of_the_zoo() -> None:
    assert len(ZOO) == 11
    now = {name: syntax_sha256(text).hex()[: len(digest)] for name, (digest, text) in ZOO.items()}
    assert now == {name: digest for name, (digest, _) in ZOO.items()}, (
        "either this Python parses otherwise than those before, or artifacts/syntax.py has changed: then write "
        "these into tests/golden/syntax-zoo.txt"
    )


def python(version: str) -> str:
    """A Python of this version; the test is skipped where there is none."""
    by_pyenv = sorted((Path.home() / ".pyenv/versions").glob(f"{version}.*/bin/python"))
    for python in (shutil.which(f"python{version}"), *map(str, by_pyenv)):
        if python and run(python, "import sys; print('%d.%d' % sys.version_info[:2])", check=False).strip() == version:
            return python
    pytest.skip(f"no Python {version} here")


def run(python: str, *code: str, check: bool = True, stdin: str = "") -> str:
    command = [python, "-S", "-c", *code]
    return subprocess.run(command, input=stdin, capture_output=True, text=True, check=check, encoding="utf-8").stdout


@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_has_the_digests_of_the_zoo(version: str) -> None:
    """``artifacts/syntax.py`` by itself, without a package of ours or another's."""
    program = (
        "import json, runpy, sys; digest = runpy.run_path(sys.argv[1])['syntax_sha256']; "
        "print(json.dumps([digest(one).hex() for one in json.load(sys.stdin)]))"
    )
    stdin = json.dumps([text for _, text in ZOO.values()])
    results = json.loads(run(python(version), program, str(syntax.__file__), stdin=stdin))
    assert results == [syntax_sha256(text).hex() for _, text in ZOO.values()]


@pytest.mark.parametrize("version", PYTHONS)
def test_each_python_has_the_digests_of_the_kernels(version: str) -> None:
    """``python -m pretuned.aot.compile.revisions``, in a Python without torch and Triton."""
    program = (
        "import runpy, sys; sys.path.insert(0, sys.argv[1]); sys.dont_write_bytecode = True; "
        "runpy.run_module('pretuned.aot.compile.revisions', run_name='__main__')"
    )
    output = run(python(version), program, str(ROOT / "src"))
    assert output.splitlines() == [f"{name} {entry.sha256}" for name, entry in ENTRIES.items()]


def test_a_function_is_its_arguments_and_statements() -> None:
    digest = function_sha256("def f(self, h: Tensor) -> Tensor:\n    'Words.'\n    return h * 1.5  # why\n")
    assert function_sha256("@wrap\ndef other(self, h):\n    return (h\n            * 1.5)") == digest
    for text in (
        "return h * 1.25",
        "return h * 1",
        "return self * 1.5",
        "return h * 1.5, h",
        "h = h * 1.5\n    return h",
    ):
        assert function_sha256(f"def f(self, h):\n    {text}\n") != digest
    assert function_sha256("def f(self, x):\n    return h * 1.5\n") != digest
    assert function_sha256("def f(self, h=1):\n    return h * 1.5\n") != digest
    for text in ("x = 1\ny = 2", "class A: pass", ""):
        with pytest.raises(ValueError, match=r"wanted a function|values to unpack"):
            function_sha256(text)
