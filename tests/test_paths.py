"""Every link of a page leads somewhere, and each path and module that a page, docstring or comment names exists.

Of code also each file named without its folder, and each trial of docs/inside/trials.md.
"""

from __future__ import annotations

import ast
import functools
import io
import re
import subprocess
import tokenize
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("aot", "artifacts", "kernels", "runtime", "tests", "docs", "benchmarks")
CODE = ("aot", "artifacts", "kernels", "runtime", "benchmarks")
LINK = re.compile(r"\]\(([^)\s]+)\)")
# A file below one of our folders, or a folder in backticks; not a pattern, and not the end of some other path.
NAMED = re.compile(
    rf"(?<![\w./-])((?:{'|'.join(FOLDERS)})/[\w./-]*\.(?:py|md|tsv|txt|json|jsonl|xz|png|msgpack))(?![\w*{{/])"
    rf"|`((?:{'|'.join(FOLDERS)})(?:/[\w-]+)+/?)`"
)
MODULE = re.compile(r"(?<![\w./-])pretuned((?:\.\w+)+)")
HOMES = {"integrations": "runtime/integrations"}
FILE = re.compile(r"(?<![\w./*{<-])(\w+\.py)\b")
OTHERS_FILES = {
    "fused_moe.py",
    "quantization/config.py",
    "arg_groups/model_overrides/gpt_oss.py",
}  # of engines, GPTQModel
PART = re.compile(r"(?<![\w./*{<-])((?:\w+/)+\w+\.py)\b")  # the end of a path
TRIALS = "docs/inside/trials.md"
TRIAL = re.compile(rf"{re.escape(TRIALS)}(?:, ([\w-]*\w))?")


class Named(NamedTuple):
    """A path or module, and the line that names it."""

    file: str
    line: int
    name: str
    exists: bool

    def __str__(self) -> str:
        return f"{self.file}:{self.line}: {self.name} does not exist"


def tracked(*patterns: str) -> list[str]:
    done = subprocess.run(["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip("no git checkout")
    return [name for name in done.stdout.split("\0") if name and (ROOT / name).exists()]


def links(file: str, text: str) -> Iterator[Named]:
    """The relative links of a page, from its folder, and the headings that they lead to."""
    for number, line in enumerate(text.splitlines(), 1):
        for target in LINK.findall(line):
            if re.match(r"[a-z]+:", target):
                continue
            name, _, anchor = target.partition("#")
            path = (ROOT / file).parent / name if name else ROOT / file
            there = not name or path.exists()
            if there and anchor and path.suffix == ".md":
                there = anchor in anchors(path.read_text(encoding="utf-8") if name else text)
            yield Named(file, number, target, there)


def anchors(page: str) -> set[str]:
    """Return the anchors of a page: its headings, as mkdocs and GitHub spell them, and ids."""
    page = re.sub(r"```.*?```", "", page, flags=re.DOTALL)
    ids = set(re.findall(r'<a id="([^"]+)"', page))
    for heading in re.findall(r"^#+ (.+)$", page, re.MULTILINE):
        words = re.sub(r"[^\w\s-]", "", heading.replace("`", "")).strip().lower()
        ids.add(re.sub(r"[-\s]+", "-", words))
    return ids


def paths(file: str, number: int, text: str) -> Iterator[Named]:
    """The paths and modules that a text names, which begins at a line."""
    for i, line in enumerate(text.splitlines()):
        for match in NAMED.finditer(line):
            name = match[1] or match[2]
            yield Named(file, number + i, name, (ROOT / name).exists())
        for match in MODULE.finditer(line):
            yield Named(file, number + i, match[0], is_module(match[1][1:].split(".")))


def cited(file: str, number: int, text: str) -> Iterator[Named]:
    """The files without a folder, and the trials, that a comment or docstring names, which begins at a line."""
    for i, line in enumerate(text.splitlines(), number):
        for match in FILE.finditer(line):
            yield Named(file, i, match[1], match[1] in OTHERS_FILES or match[1] in file_names())
        for match in PART.finditer(line):
            yield Named(file, i, match[1], match[1] in OTHERS_FILES or match[1] in path_ends())
        for match in TRIAL.finditer(line):
            yield Named(file, i, f"the trial {match[1] or '(none named)'}", match[1] in trials())


@functools.cache
def file_names() -> set[str]:
    return {Path(name).name for name in tracked("*.py")}


@functools.cache
def path_ends() -> set[str]:
    parts = [Path(name).parts for name in tracked("*.py")]
    return {"/".join(path[i:]) for path in parts for i in range(len(path))}


@functools.cache
def trials() -> set[str]:
    return set(re.findall(r'<a id="([^"]+)"', (ROOT / TRIALS).read_text(encoding="utf-8")))


def is_module(parts: list[str]) -> bool:
    """Return True if ``pretuned.a.b.c`` is a package, a module, or a name in one."""
    first, *rest = parts
    place = ROOT / HOMES.get(first, first)
    if not place.is_dir():
        return first in ("egg", "bundles")  # an entry point's group
    for i, part in enumerate(rest):
        if (place / part).is_dir():
            place /= part
            continue
        source = place / f"{part}.py"
        where, names = (source, rest[i + 1 :]) if source.exists() else (place / "__init__.py", rest[i:])
        return not names or re.search(rf"\b{names[0]}\b", where.read_text()) is not None
    return True


def texts_of(file: str, source: str) -> Iterator[tuple[int, str]]:
    """(line, text) of a module's comments and docstrings."""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.start[0], token.string
    for node in ast.walk(ast.parse(source, file)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node, clean=False)
            if text is not None:
                yield node.body[0].lineno, text


def in_page(file: str, text: str) -> Iterator[Named]:
    yield from links(file, text)
    yield from paths(file, 1, text)


def in_module(file: str, source: str) -> Iterator[Named]:
    """Yield what comments and docstrings name; if all that the source names exists, yield that: it is found faster."""
    everywhere = [*paths(file, 1, source), *cited(file, 1, source)]
    if all(named.exists for named in everywhere):
        yield from everywhere
        return
    for number, text in texts_of(file, source):
        yield from paths(file, number, text)
        yield from cited(file, number, text)


def test_every_path_that_a_page_names_exists() -> None:
    names = [named for file in tracked("*.md") for named in in_page(file, (ROOT / file).read_text())]
    assert len(names) > 200
    missing = [str(named) for named in names if not named.exists]
    assert not missing, "\n".join(missing)


def test_every_path_that_a_docstring_or_comment_names_exists() -> None:
    files = tracked(*(f"{folder}/*.py" for folder in CODE))
    names = [named for file in files for named in in_module(file, (ROOT / file).read_text())]
    assert len(names) > 50
    missing = [str(named) for named in names if not named.exists]
    assert not missing, "\n".join(missing)


@pytest.mark.parametrize(
    "text",
    [
        "see [the page](no-such-page.md)",
        "as aot/nothing.py says",
        "below `runtime/nowhere`",
        "by `pretuned.runtime.no_such_name`",
        "[x](../docs/use/build.md#what-ships) and pretuned.aot.no_name",
    ],
)
def test_a_made_up_path_is_reported_with_its_file_and_line(text: str) -> None:
    (missing,) = [named for named in in_page("docs/page.md", f"first\n{text}\n") if not named.exists]
    assert str(missing).startswith("docs/page.md:2: ")
    assert str(missing).endswith(" does not exist")


def test_a_made_up_heading_is_reported() -> None:
    page = "# One\n\n## Two, and `three`\n\n[a](#two-and-three) [b](../README.md#quick-start) [c](#four)\n"
    missing = [str(named) for named in in_page("docs/page.md", page) if not named.exists]
    assert missing == ["docs/page.md:5: #four does not exist"]


def test_a_made_up_path_in_code_is_reported() -> None:
    source = '"""See docs/no.md."""\n\nX = "docs/text.md"  # and benchmarks/no.py\n'
    missing = {str(named) for named in in_module("aot/x.py", source) if not named.exists}
    assert missing == {"aot/x.py:1: docs/no.md does not exist", "aot/x.py:3: benchmarks/no.py does not exist"}


def test_a_made_up_file_or_trial_in_code_is_reported() -> None:
    source = f'"""As rows.py and turns.py.\n\n(fused_moe.py; {TRIALS}, scatter-beside.)"""\n'
    source += f"# {TRIALS}, no-trial\n# {TRIALS}\n"
    missing = [str(named) for named in in_module("kernels/gluon/x.py", source) if not named.exists]
    assert sorted(missing) == [
        "kernels/gluon/x.py:1: turns.py does not exist",
        "kernels/gluon/x.py:4: the trial no-trial does not exist",
        "kernels/gluon/x.py:5: the trial (none named) does not exist",
    ]
