"""A kernel whose source changed has a new revision: bundles of the old source say so."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pretuned.aot.compile import revisions
from pretuned.aot.compile.revisions import KERNELS, sha256_of, source_sha256, sources
from pretuned.kernels.registry import ENTRIES


@pytest.mark.parametrize("kernel", ENTRIES)
def test_the_recorded_digest_is_that_of_the_source(kernel: str) -> None:
    now, recorded = source_sha256(kernel), ENTRIES[kernel]
    assert now == recorded.sha256, (
        f"the source of {kernel} changed: in its entry (the folder's __init__.py) raise its revision "
        f"(now {recorded.revision}; a revision that was never released may stay) and set its sha256 to {now}"
    )


def test_every_kernel_file_belongs_to_a_kernel() -> None:
    with_kernels = {path for path in KERNELS.rglob("*.py") if re.search(r"@(triton|gluon)\.jit", path.read_text())}
    read = {path for kernel in ENTRIES for path in sources(kernel)}
    assert with_kernels <= read
    assert read - with_kernels == {KERNELS / "codes.py"}  # how codes lie


def test_the_sources_are_what_the_home_imports() -> None:
    names = {path.relative_to(KERNELS).as_posix() for path in sources("clear")}
    assert names == {"rowops/zero_rows.py", "portable_plain/tiles.py"}


def test_a_moved_file_or_a_changed_comment_changes_no_digest(tmp_path: Path) -> None:
    """Other folders, names of modules, import lines, comments: the same digest. One more statement is another."""
    moved = tmp_path / "elsewhere"
    moved.mkdir()
    texts = {
        name: (KERNELS / old).read_text()
        for name, old in (("a.py", "rowops/zero_rows.py"), ("b.py", "portable_plain/tiles.py"))
    }
    (moved / "a.py").write_text(texts["a.py"].replace("from ..portable_plain.tiles import", "from .b import"))
    (moved / "b.py").write_text(texts["b.py"] + "\n# One more comment.\n")
    assert sha256_of(moved / "a.py") == ENTRIES["clear"].sha256
    (moved / "b.py").write_text(texts["b.py"] + "\nONE_MORE = 1\n")
    assert sha256_of(moved / "a.py") != ENTRIES["clear"].sha256


def test_main_prints_each_kernel_and_marks_a_stale_entry(capsys: pytest.CaptureFixture[str]) -> None:
    revisions.main(ENTRIES | {"clear": ENTRIES["clear"]._replace(sha256="0" * 64)})
    expected = {name: f"{name} {source_sha256(name)}" for name in ENTRIES}
    expected["clear"] += f" (the entry has {'0' * 64})"
    assert capsys.readouterr().out.splitlines() == list(expected.values())
