"""Is the place safe to load code from: each untrusted one is refused, each normal one passes. Real files and uids."""

from __future__ import annotations

import contextlib
import os
import shutil
import struct
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any

import pytest

import pretuned.artifacts
import pretuned.artifacts.bundle_file  # before a fork
from pretuned.artifacts import trust

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork:DeprecationWarning")
GOLDEN = Path(__file__).parents[1] / "golden" / "format2-small.msgpack"
ME, OTHER, THIRD, GROUP = 23456, 34567, 45678, 56789  # nobody has these
RANDOM_UID = 1000650000  # as OpenShift gives

READ = """
import ctypes, grp, os, pwd, shlex, sys  # all imports before the rights to read them go
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleError
if len(sys.argv) > 2:
    os.setgroups([])
    os.setgid(int(sys.argv[3]))
    os.setuid(int(sys.argv[2]))
if len(sys.argv) > 4:  # a user namespace of its own, in which it is root, as by `unshare -U -r`
    libc, who = ctypes.CDLL(None, use_errno=True), (os.geteuid(), os.getegid())
    libc.prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: else /proc/self is root's since setuid
    if libc.unshare(0x10000000):  # CLONE_NEWUSER
        sys.exit(f"no user namespace: {os.strerror(ctypes.get_errno())}")
    for name, text in (("setgroups", "deny"), ("uid_map", f"0 {who[0]} 1"), ("gid_map", f"0 {who[1]} 1")):
        with open("/proc/self/" + name, "w") as file:
            file.write(text)
try:
    open_bundle(sys.argv[1]).load()
except BundleError as error:
    print(type(error).__name__, error)
else:
    print("ok")
"""


@pytest.fixture
def root(request):
    """A directory of root's, mode 0755, that every uid can reach (tmp_path is the tester's alone)."""
    if os.geteuid() != 0:
        if request.config.getoption("--without-namespaces"):
            pytest.skip("needs root")
        pytest.fail("these tests make files of other users: run as root, or with --without-namespaces")
    folder = Path(tempfile.mkdtemp(prefix="pretuned-places-"))
    folder.chmod(0o755)
    yield folder
    shutil.rmtree(folder)


def put(path: Path, mode: int = 0o644, uid: int = 0, gid: int = 0) -> Path:
    """A valid bundle."""
    shutil.copyfile(GOLDEN, path)
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def folder(path: Path, mode: int = 0o755, uid: int = 0, gid: int = 0) -> Path:
    """A directory."""
    path.mkdir()
    os.chown(path, uid, gid)
    path.chmod(mode)
    return path


def install(path: Path, mode: int, uid: int, gid: int) -> Path:
    """The package as another user's pip would install it under ``path``."""
    shutil.copytree(Path(pretuned.artifacts.__file__).parent, path / "pretuned" / "artifacts")
    (path / "pretuned" / "__init__.py").touch()  # else another place of the path that has one goes before
    for part in [path, *path.rglob("*")]:
        os.chown(part, uid, gid)
        part.chmod(mode if part.is_dir() else mode & 0o666)
    return path


def verdict(
    path: Path,
    uid: int = ME,
    gid: int = GROUP,
    package: Path | None = None,
    *,
    namespace: bool = False,
    accounts: Path | None = None,
) -> str:
    """Return "ok" or the error that a process of this user gets. ``namespace``: as the root of a user namespace.

    ``accounts``: a directory whose passwd and group are those of /etc.
    """
    words = [str(path), str(uid), str(gid), *(["namespace"] if namespace else [])]
    if not accounts and not package and not namespace:
        return _forked(words)
    etc = 'mount --bind "$0/passwd" /etc/passwd && mount --bind "$0/group" /etc/group && exec "$@"'
    before = ["unshare", "-m", "sh", "-c", etc, str(accounts)] if accounts else []
    environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": "1"} | ({"PYTHONPATH": str(package)} if package else {})
    done = subprocess.run(
        [*before, sys.executable, "-c", READ, *words], capture_output=True, text=True, env=environment, cwd="/"
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip()


def _forked(words: list[str]) -> str:
    """Return the output of ``READ`` in a fork of this process, which has imported everything already."""
    read, write = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            with os.fdopen(write, "w") as out, contextlib.redirect_stdout(out):
                try:
                    os.chdir("/")
                    sys.argv = ["-c", *words]
                    trust._package.cache_clear()
                    trust._own_group.cache_clear()
                    exec(READ, {"__name__": "__main__"})
                    code = 0
                except BaseException:
                    traceback.print_exc(file=out)
        finally:
            os._exit(code)
    os.close(write)
    with os.fdopen(read) as pipe:
        printed = pipe.read().strip()
    assert os.waitpid(child, 0)[1] == 0, printed
    return printed


def refused(path: Path, component: Path, mode: str, **who: Any) -> None:
    """The error names the component that is at fault, and its mode."""
    got = verdict(path, **who)
    assert got.startswith("BundleUntrusted"), got
    assert f"{str(component)!r} (uid " in got
    assert f"mode {mode})" in got


def test_roots_files_pass(root):
    assert verdict(put(root / "b")) == "ok"
    assert verdict(put(root / "c"), uid=0, gid=0) == "ok"


def test_ones_own_files_pass(root):
    home = folder(root / "home", 0o700, ME, GROUP)
    assert verdict(put(home / "b", 0o600, ME, GROUP)) == "ok"


def test_a_relative_path(root):
    put(root / "b")
    code = f"import os; os.chdir({str(root)!r})\n" + READ
    done = subprocess.run([sys.executable, "-c", code, "x/../b"], capture_output=True, text=True, check=True)
    assert done.stdout.startswith("BundleUnreadable")  # x is not there, as for the kernel
    folder(root / "x")
    done = subprocess.run([sys.executable, "-c", code, "x/../b"], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "ok"


@pytest.mark.parametrize("mode", [0o666, 0o646, 0o777])
def test_a_file_that_everybody_can_write(root, mode):
    path = put(root / "b", mode)
    refused(path, path, f"{mode:04o}")


def test_a_directory_that_everybody_can_write(root):
    place = folder(root / "open", 0o777)
    refused(put(place / "b"), place, "0777")
    deeper = folder(place / "closed")
    refused(put(deeper / "b"), place, "0777")


def test_a_sticky_directory_passes(root):
    place = folder(root / "tmp", 0o1777)
    assert verdict(put(place / "b")) == "ok"
    assert verdict(put(place / "c", 0o600, ME, GROUP)) == "ok"


def test_a_squatted_place_in_tmp(root):
    place = folder(root / "tmp", 0o1777)
    path = put(place / "b", uid=OTHER, gid=OTHER)
    refused(path, path, "0644")
    refused(path, path, "0644", uid=0, gid=0)
    squatted = folder(place / "pretuned", uid=OTHER, gid=OTHER)
    refused(put(squatted / "b", uid=ME), squatted, "0755")


@pytest.mark.parametrize("mode", [0o664, 0o660])
def test_a_file_that_a_strange_group_can_write(root, mode):
    path = put(root / "b", mode, ME, THIRD)
    refused(path, path, f"{mode:04o}")


def test_a_directory_that_a_strange_group_can_write(root):
    place = folder(root / "shared", 0o2775, 0, THIRD)
    refused(put(place / "b"), place, "2775")


def test_a_link_in_a_directory_that_everybody_can_write(root):
    safe, place = put(root / "safe"), folder(root / "open", 0o777)
    (place / "b").symlink_to(safe)
    refused(place / "b", place, "0777")


def test_a_strangers_link_in_tmp(root):
    safe, place = put(root / "safe"), folder(root / "tmp", 0o1777)
    (place / "b").symlink_to(safe)
    assert verdict(place / "b") == "ok"
    os.chown(place / "b", OTHER, OTHER, follow_symlinks=False)
    refused(place / "b", place / "b", "0777")


def test_a_link_into_an_untrusted_place(root):
    place = folder(root / "open", 0o777)
    put(place / "b")
    (root / "file").symlink_to(place / "b")
    (root / "folder").symlink_to("open")
    refused(root / "file", place, "0777")
    refused(root / "folder" / "b", place, "0777")


def test_a_link_with_dots(root):
    folder(root / "a")
    folder(root / "c")
    put(root / "b")
    (root / "a" / "up").symlink_to("./../c/../b")
    (root / "elsewhere").symlink_to("a")
    assert verdict(root / "elsewhere" / "up") == "ok"
    assert verdict(root / "elsewhere" / ".." / "b") == "ok"


def test_umask_002_inside_a_venv(root):
    package = install(root / "venv", 0o775, OTHER, THIRD)
    inside = put(package / "pretuned" / "artifacts" / "b", 0o664, OTHER, THIRD)
    assert verdict(inside, package=package) == "ok"
    refused(inside, package, "0775")  # the same file, for a package that is installed elsewhere
    inside.chmod(0o666)
    assert verdict(inside, package=package).startswith("BundleUntrusted")


def test_the_owner_of_the_package_is_trusted(root):
    package = install(root / "venv", 0o755, OTHER, OTHER)
    place = folder(root / "bundles", 0o755, OTHER, OTHER)
    path = put(place / "b", 0o644, OTHER, OTHER)
    assert verdict(path, package=package) == "ok"
    refused(path, place, "0755")


def test_an_image_of_group_root_and_a_random_uid(root):
    package = install(root / "app", 0o775, 1001, 0)
    place = folder(root / "bundles", 0o775, 1001, 0)
    assert verdict(put(place / "b", 0o664, 1001, 0), uid=RANDOM_UID, gid=0, package=package) == "ok"


def test_a_setgid_project_directory(root):
    project = folder(root / "project", 0o2775, 0, THIRD)
    package = install(project / "venv", 0o2775, ME, THIRD)
    place = folder(project / "bundles", 0o2775, ME, THIRD)
    path = put(place / "b", 0o664, ME, THIRD)
    assert verdict(path, package=package) == "ok"
    refused(path, project, "2775")  # for a package that the group can't write


def test_a_users_private_group(root):
    path = put(root / "b", 0o664, 1, 1)  # daemon, whose group is daemon
    assert verdict(path, uid=1, gid=1) == "ok"
    path = put(root / "c", 0o664, ME, ME)  # a uid and a group without names
    assert verdict(path) == "ok"
    path = put(root / "d", 0o664, ME, 1)
    refused(path, path, "0664")
    path = put(root / "e", 0o664, 1, ME)
    refused(path, path, "0664", uid=1, gid=1)


def test_root_of_a_user_namespace(root):
    assert verdict(put(root / "b"), uid=0, gid=0, namespace=True) == "ok"  # root's own, mapped


def test_whom_a_user_namespace_does_not_map_is_no_owner_of_the_package(root):
    package = install(root / "venv", 0o755, OTHER, OTHER)
    place = folder(root / "bundles", 0o755, THIRD, THIRD)
    path = put(place / "b", 0o644, THIRD, THIRD)
    refused(path, place, "0755", uid=0, gid=0, package=package)
    refused(path, place, "0755", uid=0, gid=0, package=package, namespace=True)  # both owners look like 65534 there


def test_the_overflow_ids_are_nobodys(root):
    path = put(root / "b", 0o644, 65534, 65534)
    refused(path, path, "0644", uid=65534, gid=65534)
    path = put(root / "c", 0o664, 0, 65534)
    refused(path, path, "0664")
    package = install(root / "venv", 0o775, 0, 65534)
    inside = put(package / "pretuned" / "artifacts" / "b", 0o644)
    refused(inside, package, "0775", package=package)


def test_a_shared_group_is_no_roots_group_in_a_user_namespace(root):
    path = put(root / "b", 0o664, 0, THIRD)
    refused(path, path, "0664", uid=0, gid=THIRD)
    refused(path, path, "0664", uid=0, gid=THIRD, namespace=True)  # there it looks like gid 0's


def grant(path: Path, *entries: tuple[int, int, int], mask: int = 7) -> Path:
    """An ACL beside the mode: entries of (tag, rights, id), 2 a user's and 8 a group's, as setfacl writes them."""
    mode = path.stat().st_mode
    rows = [(1, mode >> 6 & 7, -1), *entries, (4, mode >> 3 & 7, -1), (16, mask, -1), (32, mode & 7, -1)]
    value = struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *row) for row in sorted(rows, key=lambda row: row[0]))
    try:
        os.setxattr(path, "system.posix_acl_access", value)
    except OSError as error:
        pytest.skip(f"this file system has no POSIX ACLs: {error}")
    return path


def test_a_file_that_an_acl_lets_a_stranger_write(root):
    path = grant(put(root / "b"), (2, 6, OTHER))
    refused(path, path, "0674", uid=0, gid=0)
    refused(path, path, "0674", uid=0, gid=0, namespace=True)  # where the kernel tells no number of his
    assert verdict(grant(put(root / "c"), (2, 4, OTHER))) == "ok"
    assert verdict(grant(put(root / "d"), (2, 6, OTHER), mask=4)) == "ok"  # the mask takes it away
    assert verdict(grant(put(root / "e"), (2, 6, ME))) == "ok"
    assert verdict(grant(put(root / "f"), (2, 6, 0), (8, 6, 0))) == "ok"


def test_a_directory_that_an_acl_lets_a_stranger_write(root):
    place = grant(folder(root / "place"), (2, 7, OTHER))
    refused(put(place / "b"), place, "0775", uid=0, gid=0)
    another = grant(folder(root / "another"), (8, 7, THIRD))
    refused(put(another / "b"), another, "0775", uid=0, gid=0)


def test_an_acl_that_takes_from_the_group_what_the_mode_seems_to_give(root):
    path = put(root / "b", 0o644, 0, THIRD)
    assert verdict(grant(path, (8, 6, 0))) == "ok"
    assert path.stat().st_mode & 0o777 == 0o674
    # A package in a directory whose mode, not its ACL, lets its group write: that group's bundles are strangers'.
    package = install(root / "venv", 0o755, OTHER, THIRD)
    grant(package, (2, 7, OTHER))
    path = put(root / "c", 0o664, 0, THIRD)
    refused(path, path, "0664", package=package)


def test_a_project_directory_with_an_acl_of_the_group_that_can_write_the_package(root):
    package = install(root / "venv", 0o775, OTHER, THIRD)
    inside = grant(put(package / "pretuned" / "artifacts" / "b", 0o664, OTHER, THIRD), (8, 6, THIRD))
    assert verdict(inside, package=package) == "ok"
    assert verdict(grant(put(root / "c", 0o644), (8, 6, THIRD)), package=package) == "ok"


def test_the_command_that_an_error_names_mends_it(root):
    place = folder(root / "a place", 0o777)
    paths = [put(place / "b"), put(root / "c", 0o664, ME, THIRD), put(root / "d", 0o644, OTHER)]
    if shutil.which("setfacl"):
        paths.append(grant(put(root / "f"), (2, 6, OTHER)))
    (root / "tmp").mkdir()
    (root / "tmp" / "link").symlink_to(paths[0])
    os.chown(root / "tmp" / "link", OTHER, OTHER, follow_symlinks=False)
    for path in [*paths, root / "tmp" / "link"]:
        got = verdict(path)
        assert got.startswith("BundleUntrusted"), got
        subprocess.run(got.rpartition(" or run: ")[2], shell=True, check=True)
        assert verdict(path) == "ok"


def test_a_group_that_is_another_accounts_first_one_is_not_private(root):
    etc = folder(root / "etc")
    (etc / "group").write_text(f"me:x:{THIRD}:\n")
    passwd = f"root:x:0:0::/:/bin/sh\nme:x:{ME}:{THIRD}::/:/bin/sh\n"
    (etc / "passwd").write_text(passwd)
    path = put(root / "b", 0o664, ME, THIRD)
    assert verdict(path, accounts=etc) == "ok"
    (etc / "passwd").write_text(passwd + f"another:x:{OTHER}:{THIRD}::/:/bin/sh\n")
    refused(path, path, "0664", accounts=etc)
    (etc / "group").write_text("")  # and it has no name
    path = put(root / "c", 0o664, ME, ME)
    assert verdict(path, accounts=etc) == "ok"
    (etc / "passwd").write_text(passwd + f"another:x:{OTHER}:{ME}::/:/bin/sh\n")
    refused(path, path, "0664", accounts=etc)


@pytest.mark.parametrize(
    ("group", "others", "trusted"),
    [
        ("me:x:{gid}:", "", True),
        ("me:x:{gid}:me", "", True),
        ("me:x:{gid}:", "toor:x:0:{gid}::/:/bin/sh", True),  # root may be of it: it could write anyway
        ("me:x:{gid}:", "daemon:x:1:{gid}::/:/bin/sh", False),
        ("me:x:{gid}:me,another", "", False),
        ("team:x:{gid}:", "", False),
        ("me:x:1:", "", False),  # a group without a name
    ],
)
def test_which_group_is_a_users_own(root, group, others, trusted):
    etc = folder(root / "etc")
    (etc / "group").write_text(group.format(gid=THIRD) + "\n")
    me = f"root:x:0:0::/:/bin/sh\nme:x:{ME}:{THIRD}::/:/bin/sh\n"
    (etc / "passwd").write_text(me + (others.format(gid=THIRD) + "\n" if others else ""))
    path = put(root / "b", 0o664, ME, THIRD)
    if trusted:
        assert verdict(path, accounts=etc) == "ok"
    else:
        refused(path, path, "0664", accounts=etc)


def kubernetes(place: Path) -> Path:
    """Write a volume like the kubelet's atomic writer does."""
    version = folder(place / "..2026_11_20_21_00_00.123", 0o755)
    put(version / "b.msgpack")
    (place / "..data").symlink_to(version.name)
    (place / "b.msgpack").symlink_to("..data/b.msgpack")
    return place / "b.msgpack"


def test_kubernetes_links(root):
    assert verdict(kubernetes(folder(root / "volume", 0o1777)), uid=RANDOM_UID) == "ok"
    assert verdict(kubernetes(folder(root / "closed", 0o755)), uid=RANDOM_UID) == "ok"


def test_kubernetes_config_map_on_a_read_only_mount(root):
    place = folder(root / "volume")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        place.chmod(0o777)  # as the kubelet leaves it
        path = kubernetes(place)
        refused(path, place, "0777")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert verdict(path, uid=RANDOM_UID) == "ok"
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_read_only_bind_mount_of_what_everybody_can_write(root):
    """Whoever can write the directory by its own path swaps its files: for an older bundle, or for none."""
    own, place = folder(root / "own", 0o777), folder(root / "place")
    put(own / "b")
    subprocess.run(["mount", "--bind", own, place], check=True)
    try:
        subprocess.run(["mount", "-o", "remount,bind,ro", place], check=True)
        refused(place / "b", place, "0777")
        kubernetes(own)  # a config map is mounted so, and nobody reaches where it lies
        assert verdict(place / "b.msgpack", uid=RANDOM_UID) == "ok"
        (own / "..data").unlink()
        (own / "..data").symlink_to(own)
        os.chown(own / "..data", OTHER, OTHER, follow_symlinks=False)
        refused(place / "b", place, "0777")
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_read_only_file_system(root):
    place = folder(root / "volume")
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k", "none", place], check=True)
    try:
        place.chmod(0o777)
        path = put(place / "b")
        refused(path, place, "0777")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert verdict(path, uid=RANDOM_UID) == "ok"
    finally:
        subprocess.run(["umount", place], check=True)


def test_a_place_that_can_not_be_searched(root):
    place = folder(root / "closed", 0o700)
    got = verdict(put(place / "b"))
    assert got.startswith("BundleUnreadable")
    assert "Permission denied" in got


def test_a_process_without_proc(root):
    """Nothing can be told of the user namespace or of mounts: what stands on them is not believed."""
    hidden = folder(root / "hidden")
    hide = f'mount --bind "{hidden}" /proc && exec "$@"'
    shared, place = put(root / "shared", 0o664, 0, THIRD), folder(root / "volume", 0o777)
    own = put(root / "own", 0o664, 0, 0)

    def got(path: Path) -> str:
        command = ["unshare", "-m", "sh", "-c", hide, "sh", sys.executable, "-c", READ, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, cwd="/", check=True)
        return done.stdout.strip()

    assert got(own) == "ok"
    assert got(put(root / "nobodys", 0o644, 65534, 65534)).startswith("BundleUntrusted")
    assert f"group {THIRD} can write it" in got(shared)
    subprocess.run(["mount", "-t", "tmpfs", "-o", "size=64k,mode=777", "none", place], check=True)
    try:
        put(place / "b")
        subprocess.run(["mount", "-o", "remount,ro", place], check=True)
        assert verdict(place / "b") == "ok"
        assert "everybody can write it" in got(place / "b")
    finally:
        subprocess.run(["umount", place], check=True)
