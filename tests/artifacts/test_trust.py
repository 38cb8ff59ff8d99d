"""Users that can write the package, POSIX ACLs, and the ids of nobody. (Places: tests/attacks/test_places.py.)"""

from __future__ import annotations

import errno
import os
import shutil
import socket
import struct
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
from processes import copy_of

from pretuned.artifacts import trust
from pretuned.artifacts.errors import BundleUnreadable, BundleUntrusted
from pretuned.artifacts.limits import MAX_LINKS
from pretuned.artifacts.trust import AclWriters, acl_writers

GROUP, OTHER, OWNER = 56789, 56790, 56791
UNMAPPED = 4294967295  # (uid_t)-1


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A copy of the module below a directory of a group that can write it."""
    if os.geteuid():
        pytest.skip("needs root")
    folder = tmp_path / "venv" / "artifacts"
    folder.mkdir(parents=True)
    shutil.copy(trust.__file__, folder)
    os.chown(tmp_path / "venv", 0, GROUP)
    (tmp_path / "venv").chmod(0o775)
    return tmp_path / "venv"


def installed(package: Path) -> Any:
    """The module as it is in this package."""
    return copy_of(trust, package / "artifacts" / "trust.py")


def has_acl(
    patch: pytest.MonkeyPatch,
    path: Path,
    *,
    users: Iterable[int] = (),
    groups: Iterable[int] = (),
    own_group: bool = False,
) -> None:
    """Have the kernel say that these can write a file, by its ACL (acl(5))."""
    entries = [(1, 6, UNMAPPED), *((2, 6, who) for who in users), (4, 6 if own_group else 4, UNMAPPED)]
    entries += [*((8, 6, who) for who in groups), (16, 6, UNMAPPED), (32, 4, UNMAPPED)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *entry) for entry in entries)

    def getxattr(file: int | str, name: str, real: Callable[[int | str, str], bytes] = os.getxattr) -> bytes:
        return value if file == str(path) and name == "system.posix_acl_access" else real(file, name)

    patch.setattr(os, "getxattr", getxattr)


def has_an_unreadable_acl(patch: pytest.MonkeyPatch, path: Path) -> None:
    def getxattr(file: int | str, name: str, real: Callable[[int | str, str], bytes] = os.getxattr) -> bytes:
        if file == str(path):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(file, name)

    patch.setattr(os, "getxattr", getxattr)


def test_a_group_that_can_write_the_package_is_trusted(package: Path) -> None:
    owners, groups = installed(package)._package()
    assert owners == frozenset((0,))
    assert GROUP in groups
    path = package.parent / "b"
    path.touch()
    os.chown(path, 0, GROUP)
    path.chmod(0o664)
    installed(package).check(str(path), os.lstat(path), "b")


def test_nor_where_it_is_sticky(package: Path) -> None:
    """There a group can't replace what is another's, so it can't write the package."""
    package.chmod(0o1775)
    assert GROUP not in installed(package)._package()[1]


def test_the_owner_of_the_package_is_that_of_its_own_directory(package: Path) -> None:
    os.chown(package / "artifacts", OWNER, 0)
    assert installed(package)._package()[0] == frozenset((OWNER,))
    path = package.parent / "b"
    path.touch()
    os.chown(path, OWNER, 0)
    installed(package).check(str(path), os.lstat(path), "b")


@pytest.mark.parametrize("inside", ["b", "bundles/b"])
def test_a_group_that_can_write_a_file_in_the_package_but_not_the_package_is_not_trusted(
    package: Path, inside: str
) -> None:
    place = package / "artifacts" / inside
    place.parent.mkdir(exist_ok=True)
    place.touch()
    os.chown(place, 0, OTHER)
    place.chmod(0o664)
    with pytest.raises(BundleUntrusted, match=f"group {OTHER} can write it"):
        installed(package).check(str(place), os.lstat(place), "b")


def test_not_where_an_acl_takes_that_from_it(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_acl(monkeypatch, package, users=[7])
    assert GROUP not in installed(package)._package()[1]


def test_nor_where_its_acl_can_not_be_read(package: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    has_an_unreadable_acl(monkeypatch, package)
    assert GROUP not in installed(package)._package()[1]


def test_whom_the_kernel_does_not_know_is_65534_where_it_does_not_say() -> None:
    trust._overflow.cache_clear()
    assert trust._overflow("uid") == int(Path("/proc/sys/kernel/overflowuid").read_text())
    assert trust._overflow("nothing") == 65534
    trust._overflow.cache_clear()


def test_a_path_with_a_nul_and_one_that_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(BundleUnreadable, match="the path holds a NUL byte"):
        trust.resolve("a\0b")
    with pytest.raises(BundleUnreadable, match=f"key '{tmp_path}/no': can't be read: No such file"):
        trust.resolve(f"{tmp_path}/no", "key")


@pytest.mark.parametrize("what", ["bundle", "key"])
def test_a_device_a_fifo_and_a_socket_are_no_files_whoever_can_write_them(tmp_path: Path, what: str) -> None:
    """Nobody is told to change the mode of /dev/zero, which all of the machine reads."""
    (tmp_path / "device").symlink_to("/dev/zero")
    os.mkfifo(tmp_path / "fifo")
    (tmp_path / "fifo").chmod(0o666)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tmp_path / "socket"))
    for name, real in (("device", "/dev/zero"), ("fifo", f"{tmp_path}/fifo"), ("socket", f"{tmp_path}/socket")):
        mode = f"{os.lstat(real).st_mode:o}"
        with pytest.raises(BundleUnreadable) as error:
            trust.resolve(f"{tmp_path}/{name}", what)
        assert str(error.value) == f"{what} '{tmp_path}/{name}': {real!r} is no regular file (mode {mode})"


def test_what_is_opened_is_no_device_either() -> None:
    """The path may be another thing by then."""
    fd = os.open("/dev/null", os.O_RDONLY)
    try:
        with pytest.raises(BundleUnreadable, match=r"bundle '/b': '/c' is no regular file \(mode 20666\)"):
            trust.check("/c", os.fstat(fd), "/b", fd)
    finally:
        os.close(fd)


def test_the_most_links(tmp_path: Path) -> None:
    """Links are followed as often as Linux does, each once."""
    (tmp_path / "0").touch()
    for i in range(1, MAX_LINKS + 2):
        (tmp_path / str(i)).symlink_to(str(i - 1))
    assert trust.resolve(f"{tmp_path}/{MAX_LINKS}") == f"{tmp_path}/0"
    assert (tmp_path / str(MAX_LINKS)).samefile(tmp_path / "0")
    with pytest.raises(BundleUnreadable, match=f"more than {MAX_LINKS} symbolic links, at '{tmp_path}/1'"):
        trust.resolve(f"{tmp_path}/{MAX_LINKS + 1}")


CHROOT = """
import encodings.ascii, os, shlex, sys
from pretuned.artifacts.errors import BundleUntrusted
from pretuned.artifacts import trust
trust._package()
os.chroot(sys.argv[1])
for mode in (0o755, 0o777):
    os.chmod("/", mode)
    try:
        print(trust.resolve("/b"))
    except BundleUntrusted as error:
        print(error)
"""


def test_the_root_of_all_is_looked_at_too(tmp_path: Path) -> None:
    if os.geteuid():
        pytest.skip("needs root")
    (tmp_path / "b").touch()
    done = subprocess.run([sys.executable, "-c", CHROOT, str(tmp_path)], capture_output=True, text=True, check=True)
    passed, refused = done.stdout.splitlines()
    assert passed == "/b"
    assert "'/' (uid 0, gid 0, mode 0777) is no safe place" in refused


@pytest.mark.parametrize(
    ("mode", "command"), [(0o602, "chmod o-w"), (0o646, "chmod o-w"), (0o666, "chmod go-w"), (0o622, "chmod go-w")]
)
def test_the_command_takes_from_the_group_what_it_has(tmp_path: Path, mode: int, command: str) -> None:
    path = tmp_path / "b"
    path.touch()
    path.chmod(mode)
    with pytest.raises(BundleUntrusted, match=f"everybody can write it. Move the bundle, or run: {command} {path}$"):
        trust.check(str(path), os.lstat(path), "b")


@pytest.mark.parametrize(
    ("users", "groups", "message"),
    [
        ((UNMAPPED,), (), "its ACL lets a user write it who is unknown here. Move the bundle, or run: setfacl -b"),
        ((), (UNMAPPED,), "its ACL lets a group write it who is unknown here. Move the bundle, or run: setfacl -b"),
        ((OTHER,), (), f"its ACL lets user {OTHER} write it. Move the bundle, or run: setfacl -x u:{OTHER}"),
        ((), (OTHER,), f"its ACL lets group {OTHER} write it. Move the bundle, or run: setfacl -x g:{OTHER}"),
    ],
)
def test_whom_an_acl_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, users: tuple[int, ...], groups: tuple[int, ...], message: str
) -> None:
    path = tmp_path / "b"
    path.touch()
    path.chmod(0o664)
    has_acl(monkeypatch, path, users=users, groups=groups)
    with pytest.raises(BundleUntrusted, match=message):
        trust.check(str(path), os.lstat(path), "b")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root")
@pytest.mark.parametrize("own_group", [False, True])
def test_whether_an_acl_lets_the_own_group_write(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own_group: bool
) -> None:
    path = tmp_path / "b"
    path.touch()
    os.chown(path, 0, OTHER)
    path.chmod(0o664)
    has_acl(monkeypatch, path, users=[0], own_group=own_group)
    if own_group:
        with pytest.raises(BundleUntrusted, match=f"group {OTHER} can write it"):
            trust.check(str(path), os.lstat(path), "b")
    else:
        trust.check(str(path), os.lstat(path), "b")


NAMESPACE = """
import ctypes, os, sys
from pretuned.artifacts import trust
made, mapped = os.pipe(), os.pipe()
child = os.fork()
if not child:
    if ctypes.CDLL(None, use_errno=True).unshare(0x10000000):  # CLONE_NEWUSER
        os._exit(3)
    os.write(made[1], b".")
    os.read(mapped[0], 1)
    print([gid for gid in (0, 5, 10, 11, 12) if trust._is_anothers_group(gid)], flush=True)
    os._exit(0)
os.close(made[1])
if os.read(made[0], 1):
    with open(f"/proc/{child}/gid_map", "w") as file:
        file.write("0 1000 1\\n5 5 1\\n10 2000 2\\n")
    os.write(mapped[1], b".")
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def test_the_one_group_that_a_user_maps_to_another_number() -> None:
    """And not one that keeps its own, nor a range, which root allotted."""
    if os.geteuid():
        pytest.skip("needs root")
    done = subprocess.run([sys.executable, "-c", NAMESPACE], capture_output=True, text=True, check=False)
    if done.returncode == 3:
        pytest.skip("no user namespaces here")
    assert (done.returncode, done.stdout) == (0, "[0]\n"), done.stderr


NAME = "system.posix_acl_access"


def entries(*rows: tuple[int, int, int]) -> bytes:
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHI", *row) for row in rows)


def test_a_file_without_one(tmp_path):
    (tmp_path / "file").touch()
    assert acl_writers(str(tmp_path / "file")) is None


def test_who_may_write(tmp_path):
    """The owner, user 4242 (rwx), the file's group (r), group 77 (rw), a mask, others."""
    path = tmp_path / "file"
    path.touch()
    none = 2**32 - 1
    rows = [(1, 6, none), (2, 7, 4242), (4, 4, none), (8, 6, 77), (16, 7, none), (32, 4, none)]
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset({4242}), frozenset({77}), False)
    with path.open() as file:
        assert acl_writers(file.fileno()) == acl_writers(str(path))
    rows[4] = (16, 4, none)  # the mask takes it away from all of them
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), False)


def test_the_files_own_group_may_write(tmp_path):
    """The mode alone can't say it: with an ACL its group bits are the mask."""
    path = tmp_path / "file"
    path.touch()
    none = 2**32 - 1
    rows = [(1, 6, none), (2, 4, 4242), (4, 6, none), (16, 6, none), (32, 4, none)]
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), True)
    rows[3] = (16, 4, none)
    os.setxattr(path, NAME, entries(*rows))
    assert acl_writers(str(path)) == AclWriters(frozenset(), frozenset(), False)


@pytest.mark.parametrize("value", [b"", b"\1\0\0\0", struct.pack("<I", 3) + bytes(8), entries((1, 6, 0)) + b"x"])
def test_what_is_none(value, monkeypatch):
    """(The kernel makes no such ones; a file system in user space may.)"""
    monkeypatch.setattr(os, "getxattr", lambda file, name: value)
    with pytest.raises(OSError, match="of no known form"):
        acl_writers("/")


def test_one_that_can_not_be_read_is_not_taken_for_none(tmp_path, monkeypatch):
    def refused(file, name):
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    path = tmp_path / "file"
    path.touch()
    path.chmod(0o664)  # without group-write it is not asked for
    monkeypatch.setattr(os, "getxattr", refused)
    with pytest.raises(OSError, match="Input/output error"):
        acl_writers(str(path))
    with pytest.raises(BundleUnreadable, match="can't be read: Input/output error"):
        trust.check(str(path), path.stat(), str(path))


def test_where_there_are_no_extended_attributes(monkeypatch):
    monkeypatch.delattr(os, "getxattr")
    assert acl_writers("/") is None
