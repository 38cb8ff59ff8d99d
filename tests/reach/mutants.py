"""Which changes of the code no test notices: ``python -m tests.reach --mutants [--files trust,codec] [--sample 200]``.

Each mutant is one file with one thing changed (``changes``), in a copy of the product that the tests, and the
processes that they start, import. Its tests run in a child of ``fork``, those that reach the line first (``chosen``),
and end at the first that fails: then it is killed. One that is not has to be one of ``SAME``, which are no other
programs, or a test is wanting. At least 95 % of a file's have to be killed.
"""

from __future__ import annotations

import argparse
import ast
import contextlib
import copy
import json
import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from . import chosen
from .part import ROOT, keep

_FORMAT = (
    *(f"tests/artifacts/test_{name}.py" for name in ("checks", "codec", "index", "schema", "wire")),
    "tests/faults/test_versions.py",
    "tests/faults/test_truncation.py",
)
_FILE = ("tests/artifacts/test_bundle_file.py",)
_PLACES = "tests/attacks/test_places.py"
# The files that are changed, and the tests that have to notice, the quick ones first.
FILES: dict[str, tuple[str, ...]] = {
    "artifacts/codec.py": _FORMAT,
    "artifacts/wire.py": _FORMAT,
    "artifacts/format.py": (*_FORMAT, *_FILE),
    "artifacts/bundle_file.py": (
        *_FILE,
        "tests/artifacts/test_packed.py",
        "tests/attacks/test_descriptors.py",
        "tests/attacks/test_swap.py",
        _PLACES,
    ),
    "artifacts/locking.py": ("tests/artifacts/test_locking.py", "tests/attacks/test_umask.py"),
    "artifacts/packed.py": ("tests/artifacts/test_packed.py",),
    "artifacts/publishing.py": (
        "tests/artifacts/test_publishing.py",
        "tests/artifacts/test_blob.py",
        "tests/attacks/test_umask.py",
    ),
    "artifacts/signature.py": (
        "tests/artifacts/test_signature.py",
        "tests/attacks/test_signatures.py",
    ),
    "artifacts/trust.py": ("tests/artifacts/test_trust.py", _PLACES),
}
WANTED = 0.95
_PRELOADED = ("pytest", "hypothesis.strategies", "msgpack", "filelock", "lzma", "asyncio", "multiprocessing", "numpy")

# (file, the line, what became of it): why that is the same program, as far as anybody can see.
SAME: dict[tuple[str, str, str], str] = {
    (
        "artifacts/format.py",
        "if max(sizes, default=0) > lim.MAX_RECORD_BYTES:",
        "1",
    ): "of no record",
    ("artifacts/bundle_file.py", "_CHUNK_BYTES = 1 << 20", "2"): "how much is read at once",
    ("artifacts/bundle_file.py", "_CHUNK_BYTES = 1 << 20", "21"): "how much is read at once",
    (
        "artifacts/bundle_file.py",
        "held = _Descriptor(os.open(real, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags))",
        "os.O_RDONLY & os.O_CLOEXEC",
    ): "Python sets that flag itself",
    (
        "artifacts/bundle_file.py",
        "begin = _read(fd, 0, PREAMBLE_BYTES + (GLANCED_BYTES if later else 0), where)",
        "1",
    ): "of a byte more, which nobody looks at",
    (
        "artifacts/publishing.py",
        "return os.open(path, flags | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
        "flags & os.O_CLOEXEC",
    ): "who opens so reads, and Python sets that flag itself",
    (
        "artifacts/publishing.py",
        "fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
        "(os.O_RDWR | os.O_CLOEXEC) & os.O_NOFOLLOW",
    ): "a link is not the file that it leads to: it is left alone",
    (
        "artifacts/publishing.py",
        "folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)",
        "os.O_RDONLY & os.O_DIRECTORY",
    ): "of a file the next call says that it is none",
    (
        "artifacts/publishing.py",
        "folder = os.open(final.parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)",
        "(os.O_RDONLY | os.O_DIRECTORY) & os.O_CLOEXEC",
    ): "of a file the next call says that it is none, and Python sets the other flag itself",
    (
        "artifacts/publishing.py",
        "fd = os.open(temp, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)",
        "385",
    ): "a mode that the next lines change, and that lets others no more",
    (
        "artifacts/format.py",
        "GLANCED_BYTES = 4096  # hold what an index begins with: the target, and mostly the GPUs, too",
        "4097",
    ): ("a byte more is looked at"),
    (
        "artifacts/bundle_file.py",
        "digest.update(_read(fd, offset, min(_CHUNK_BYTES, file_bytes - offset), where))",
        "file_bytes + offset",
    ): "a file has no more than its bytes; of one that grew the digest is another either way",
    ("artifacts/format.py", "return problem_of(unpack(record, max_items=8))", "9"): (
        "nine are refused a line later, in other words"
    ),
    (
        "artifacts/publishing.py",
        "fd = os.open(temp, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
        "os.O_RDWR & os.O_CLOEXEC",
    ): "what is read alone can be locked and removed, too",
    (
        "artifacts/locking.py",
        "fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)",
        "os.O_RDONLY & os.O_CLOEXEC",
    ): "Python sets that flag itself",
    (
        "artifacts/wire.py",
        "packed: bytes = msgpack.Packer(use_bin_type=True, strict_types=True, buf_size=size_bytes + 64).pack(value)",
        "65",
    ): "a buffer's first size",
    (
        "artifacts/trust.py",
        'return any(line.split()[2] == number and "ro" in line.rsplit(None, 1)[-1].split(",") for line in lines)',
        "2",
    ): "the last word is the last word, however many are split off",
    (
        "artifacts/signature.py",
        "return os.open(path, flags | os.O_CLOEXEC | os.O_NONBLOCK)",
        "flags & os.O_CLOEXEC",
    ): ("who opens so reads, and Python sets that flag itself"),
    ("artifacts/wire.py", "def pack(value: object, size_bytes: int = 4096) -> bytes:", "4097"): (
        "a buffer's first size"
    ),
    (
        "artifacts/wire.py",
        "max_buffer_size=max(1, len(data)),",
        "2",
    ): "a buffer's least size, of no data",
    ("artifacts/publishing.py", "data = file.read(status.st_size + 1)", "2"): "one byte more tells a file that grew",
    ("artifacts/packed.py", "_MEMORY_BYTES = 256 << 20  # for xz's own window, at most", "257"): "any such limit",
    ("artifacts/packed.py", "_MEMORY_BYTES = 256 << 20  # for xz's own window, at most", "21"): "any such limit",
}

_SWAPPED: dict[type[ast.AST], type[ast.AST]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
    ast.And: ast.Or,
    ast.Or: ast.And,
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.FloorDiv,
    ast.FloorDiv: ast.Mult,
    ast.BitAnd: ast.BitOr,
    ast.BitOr: ast.BitAnd,
    ast.LShift: ast.RShift,
    ast.RShift: ast.LShift,
    ast.Break: ast.Continue,
    ast.Continue: ast.Break,
}
_LEFT = ("annotation", "returns", "decorator_list", "type_comment")  # what no run hangs on


class Mutant(NamedTuple):
    """A file with one thing changed."""

    file: str
    number: int
    line: str
    became: str
    source: str
    lines: range  # of its statement: who comes through one of them may notice


def changes(node: ast.AST) -> Iterator[ast.AST]:
    """Yield a node's mutations: another operator, number or condition, no result, or nothing instead of a statement."""
    for field in ("op", "ops"):
        child = getattr(node, field, None)
        first = child[0] if isinstance(child, list) else child
        if type(first) in _SWAPPED:
            copied = copy.deepcopy(node)
            setattr(
                copied,
                field,
                [_SWAPPED[type(first)](), *child[1:]] if isinstance(child, list) else _SWAPPED[type(first)](),
            )
            yield copied
    if type(node) in (ast.Break, ast.Continue):
        yield _SWAPPED[type(node)]()
    elif isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
        yield node.operand
    elif isinstance(node, ast.Constant) and type(node.value) in (int, bool):
        yield ast.Constant(not node.value if type(node.value) is bool else node.value + 1)
    elif isinstance(node, ast.Return) and not (node.value is None or isinstance(node.value, ast.Constant)):
        yield ast.Return(ast.Constant(None))
    elif isinstance(node, ast.Raise) or (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        yield ast.Pass()
    elif isinstance(node, (ast.If, ast.While)):
        copied = copy.copy(node)
        copied.test = ast.UnaryOp(ast.Not(), node.test)
        yield copied


def _head(node: ast.AST) -> range | None:
    """The lines of a statement, without those that it holds."""
    if not isinstance(node, (ast.stmt, ast.ExceptHandler)):
        return None
    body = [statement.lineno for statement in getattr(node, "body", ())]
    return range(node.lineno, min([*body, (node.end_lineno or node.lineno) + 1]))


def mutants(file: str) -> list[Mutant]:
    """Every one of a file."""
    text = (ROOT / file).read_text(encoding="utf-8")
    tree, lines = ast.parse(text), text.splitlines()
    listed = []

    def walk(parent: ast.AST, head: range) -> None:
        for field, value in ast.iter_fields(parent):
            if field in _LEFT or isinstance(parent, ast.JoinedStr):
                continue
            if isinstance(parent, ast.keyword) and parent.arg == "strict":  # of zip: what is asserted of lengths
                continue
            nodes = value if isinstance(value, list) else [value]
            for i, node in enumerate(nodes):
                if not isinstance(node, ast.AST) or (
                    isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
                ):
                    continue
                of = _head(node) or head
                for change in changes(node) if hasattr(node, "lineno") else ():
                    new = ast.copy_location(change, node)
                    setattr(parent, field, [*value[:i], new, *value[i + 1 :]] if isinstance(value, list) else new)
                    source = ast.unparse(ast.fix_missing_locations(tree))
                    became = ast.unparse(change).splitlines()[0]
                    listed.append(Mutant(file, node.lineno, lines[node.lineno - 1].strip(), became, source, of))
                    setattr(parent, field, value)
                walk(node, of)

    walk(tree, range(0))
    return listed


@contextlib.contextmanager
def product() -> Iterator[Path]:
    """A directory to import ``pretuned`` from, a copy of the product; what ships in it is linked."""
    with tempfile.TemporaryDirectory(prefix="mutants-") as folder:
        Path(folder).chmod(0o755)  # processes of other users import it, too
        whole = Path(folder) / "pretuned"
        out = shutil.ignore_patterns("__pycache__", "bundles")
        shutil.copytree(ROOT / "package", whole, ignore=out)
        for layer in ("artifacts", "kernels", "runtime", "aot"):
            shutil.copytree(ROOT / layer, whole / layer, ignore=out)
        (whole / "integrations").symlink_to("runtime/integrations")
        shutil.copytree(ROOT / "artifacts/bundles", whole / "artifacts/bundles", copy_function=os.symlink)
        yield Path(folder)


def judge(place: Path, mutant: Mutant, tests: list[chosen.Told]) -> bool:
    """Return True if the mutant is killed."""
    path = place / "pretuned" / mutant.file
    whole = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    try:
        return chosen.noticed(place, mutant.lines, tests)
    finally:
        path.write_text(whole, encoding="utf-8")


def main(arguments: list[str], out: Path | None) -> int:
    """0 if enough are killed in each file; the others are printed."""
    parser = argparse.ArgumentParser(prog="python -m tests.reach --mutants", description=__doc__)
    parser.add_argument("--files", default="", help="only those of these names, e.g. trust,codec")
    parser.add_argument("--sample", type=int, help="so many of each file, chosen by --seed; all otherwise")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args(arguments)
    names = options.files.split(",") if options.files else [Path(file).stem for file in FILES]
    for name in _PRELOADED:  # once for all children
        with contextlib.suppress(ImportError):
            __import__(name)
    figures, worst = {}, 1.0
    with product() as place:
        for file in (file for file in FILES if Path(file).stem in names):
            tests = chosen.timed(place, file, FILES[file])
            if tests is None:
                sys.exit(f"the tests of {file} fail as it is: {' '.join(FILES[file])}")
            listed = [mutant for mutant in mutants(file) if (file, mutant.line, mutant.became) not in SAME]
            total = len(listed)
            if options.sample and options.sample < total:
                listed = random.Random(options.seed).sample(listed, options.sample)
            begun, left = time.monotonic(), []
            for mutant in listed:
                if not judge(place, mutant, tests):
                    left.append(mutant)
                    print(f"{file}:{mutant.number}: {mutant.line}  ->  {mutant.became}", flush=True)
            share = 1 - len(left) / len(listed)
            worst = min(worst, share)
            figures[file] = {"mutants": total, "tried": len(listed), "killed": len(listed) - len(left)}
            print(
                f"{file}: {len(listed) - len(left)} of {len(listed)} killed ({share:.1%}), "
                f"{time.monotonic() - begun:.0f} s",
                flush=True,
            )
    print(json.dumps(figures))
    if out:
        keep(out, "mutants", figures)
    return 0 if worst >= WANTED else 1
