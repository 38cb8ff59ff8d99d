"""Who can write the installed package, and what the system calls nobody. (Places: tests/attacks/test_places.py.)"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from pretuned.artifacts.files import acl, trust

GROUP = 56789


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """Where the package is as if it were: below a directory of a group that can write it."""
    if os.geteuid():
        pytest.skip("needs root")
    folder = tmp_path / "venv" / "artifacts" / "files"
    folder.mkdir(parents=True)
    (folder / "trust.py").touch()
    os.chown(tmp_path / "venv", 0, GROUP)
    (tmp_path / "venv").chmod(0o775)
    monkeypatch.setattr(trust, "__file__", str(folder / "trust.py"))
    trust._package.cache_clear()
    yield tmp_path / "venv"
    monkeypatch.undo()
    trust._package.cache_clear()


def test_a_group_that_can_write_the_package_is_trusted(package: Path) -> None:
    owners, groups, where = trust._package()
    assert (owners, where) == (frozenset((0,)), f"{package}/artifacts/files")
    assert GROUP in groups
    path = package.parent / "b"
    path.touch()
    os.chown(path, 0, GROUP)
    path.chmod(0o664)
    trust.check(str(path), os.lstat(path), "b")


def test_not_where_an_acl_takes_that_from_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(acl, "writers", lambda file: acl.Writers(frozenset((7,)), frozenset(), False))
    assert GROUP not in trust._package()[1]


def test_nor_where_its_acl_can_not_be_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def unreadable(file: int | str) -> acl.Writers | None:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(acl, "writers", unreadable)
    assert GROUP not in trust._package()[1]


def test_whom_the_kernel_does_not_know_is_65534_where_it_does_not_say() -> None:
    trust._overflow.cache_clear()
    assert trust._overflow("uid") == int(Path("/proc/sys/kernel/overflowuid").read_text())
    assert trust._overflow("nothing") == 65534
    trust._overflow.cache_clear()
