"""Check that nobody untrusted can write a bundle or a directory above it: its code runs in this process.

Trusted are root, the effective user, and whoever can write the installed package: they can run code here anyway.
"""

from __future__ import annotations

import errno
import functools
import os
import stat
import struct
from collections import deque
from pathlib import Path

from .errors import BundleUnreadable, BundleUntrusted
from .limits import MAX_LINKS
from .tuples import NamedTuple

_NO_GROUP = "chmod g-w"
_UNMAPPED = 2**32 - 1  # the id in an ACL of a user or group that the user namespace does not map
_ACL = "system.posix_acl_access"
_ACL_VERSION = 2
_ACL_USER, _ACL_OWN_GROUP, _ACL_GROUP, _ACL_MASK = 2, 4, 8, 16  # tags, as in linux/posix_acl.h
_ACL_WRITE = 2
_NO_ACL = {errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS}  # no ACL here, or none on this file system


def resolve(path: str, what: str = "bundle", *, signed: bool = False) -> str:
    """Return the absolute path with all symbolic links followed, if each of its components can be trusted.

    ``what`` names the kind of file in errors. ``signed``: the content's signature is checked elsewhere, so a group may
    write the file.

    Raises
    ------
    BundleUntrusted
        if a component can't be trusted; the message names it, its owner and its mode.
    BundleUnreadable
        if a component is missing or can't be read.
    """
    if "\0" in path:
        raise BundleUnreadable(f"{what} {path!r}: the path holds a NUL byte")
    here, links = "/", 0
    try:
        # '..' is kept here and resolved below. An absolute path needs no working directory, which may be gone.
        todo = deque((path if path.startswith("/") else f"{os.getcwd()}/{path}").split("/"))  # noqa: PTH109
        check(here, os.lstat(here), path, what=what, signed=signed)
        while todo:
            part = todo.popleft()
            if part in ("", "."):
                continue
            if part == "..":  # `here` holds no link any more, so its parent is in its name
                here = os.path.dirname(here)  # noqa: PTH120
                continue
            component = os.path.join(here, part)  # noqa: PTH118
            status = os.lstat(component)
            check(component, status, path, what=what, signed=signed)
            if not stat.S_ISLNK(status.st_mode):
                here = component
                continue
            links += 1
            if links > MAX_LINKS:
                raise BundleUnreadable(f"{what} {path!r}: more than {MAX_LINKS} symbolic links, at {component!r}")
            target = os.readlink(component)  # noqa: PTH115 - a path would lose what '..' means here
            here = "/" if target.startswith("/") else here
            todo.extendleft(reversed(target.split("/")))
    except OSError as error:
        if isinstance(error, (BundleUntrusted, BundleUnreadable)):
            raise
        raise unreadable(path, error, what) from error
    return here


def unreadable(path: str, error: OSError, what: str = "bundle") -> BundleUnreadable:
    """Return the error for a file that the system doesn't let this process read."""
    return BundleUnreadable(f"{what} {path!r}: can't be read: {error.strerror or error}")


def check(
    component: str,
    status: os.stat_result,
    path: str,
    fd: int | None = None,
    what: str = "bundle",
    *,
    signed: bool = False,
) -> None:
    """Check owner, mode and ACL of one component of ``path``; ``fd`` is the component's descriptor if it is open.

    ``what`` and ``signed``: see ``resolve``.

    Raises
    ------
    BundleUntrusted
        if the component can't be trusted; the message has the command that mends it.
    BundleUnreadable
        for a device, a FIFO or a socket.
    """
    if stat.S_IFMT(status.st_mode) not in (stat.S_IFREG, stat.S_IFDIR, stat.S_IFLNK):
        raise BundleUnreadable(f"{what} {path!r}: {component!r} is no regular file (mode {status.st_mode:o})")
    try:
        fault, command = _fault(component, status, component if fd is None else fd, signed)
    except OSError as error:  # its ACL can't be read
        raise unreadable(path, error, what) from error
    if fault:
        import shlex  # here, because few processes need it

        mend = f"run: {command} {shlex.quote(component)}" if command else "have a user write it who is known here"
        sign = ", sign it and set PRETUNED_TRUSTED_KEYS" if command == _NO_GROUP and what == "bundle" else ""
        raise BundleUntrusted(
            f"{what} {path!r}: {component!r} (uid {status.st_uid}, gid {status.st_gid}, "
            f"mode {stat.S_IMODE(status.st_mode):04o}) is no safe place to load code from: {fault}. "
            f"Move the {what}{sign}, or {mend}"
        )


def _fault(component: str, status: os.stat_result, file: int | str, signed: bool) -> tuple[str, str]:
    """Return a component's fault and the command that mends it; two empty texts if it can be trusted."""
    mode = stat.S_IMODE(status.st_mode)
    if status.st_uid == _overflow("uid"):
        return "its owner is the id that stands for all whom this user namespace does not know", ""
    if not _trusted_user(status.st_uid):
        fault = "its owner is neither root, nor you, nor the owner of the installed pretuned"
        return fault, "chown -h root" if stat.S_ISLNK(status.st_mode) else "chown root"
    if stat.S_ISLNK(status.st_mode) or (stat.S_ISDIR(status.st_mode) and mode & stat.S_ISVTX):
        return "", ""  # a link has no mode of its own; in a sticky directory others can't replace what is not theirs
    if mode & stat.S_IWOTH and not _on_read_only_mount(component, status):
        return "everybody can write it", "chmod go-w" if mode & stat.S_IWGRP else "chmod o-w"
    if not mode & stat.S_IWGRP:  # the bit is also the mask of an ACL: without it no entry lets anybody write
        return "", ""
    listed = acl_writers(file)
    own_group = not signed and (listed is None or listed.own_group)
    if own_group and not _trusted_group(status.st_gid, status.st_uid):
        return f"group {status.st_gid} can write it", _NO_GROUP
    for who in () if listed is None else listed.users:
        if who in (_overflow("uid"), _UNMAPPED) or not _trusted_user(who):
            return _by_acl("user", who)
    for who in () if listed is None else listed.groups:
        if not _trusted_group(who, status.st_uid):
            return _by_acl("group", who)
    return "", ""


def _by_acl(kind: str, who: int) -> tuple[str, str]:
    if who == _UNMAPPED:
        return f"its ACL lets a {kind} write it who is unknown here", "setfacl -b"
    return f"its ACL lets {kind} {who} write it", f"setfacl -x {kind[0]}:{who}"


def _trusted_user(uid: int) -> bool:
    return uid in (0, os.geteuid()) or uid in _package()[0]


@functools.cache
def _package() -> tuple[frozenset[int], frozenset[int]]:
    """Return the users and the groups who can write the installed package.

    In a sticky directory a group can't replace other users' files: such directories don't count.
    """
    package = Path(__file__).resolve().parent
    chain = [(folder, folder.stat()) for folder in (package, *package.parents)]
    group_bits = stat.S_IWGRP | stat.S_ISVTX
    shared = [(folder, status) for folder, status in chain if status.st_mode & group_bits == stat.S_IWGRP]
    groups = {status.st_gid for folder, status in shared if _has_group(folder)}
    return frozenset({chain[0][1].st_uid}), frozenset(groups)


def _has_group(folder: Path) -> bool:
    """Return whether a group-writable directory lets its own group write: an ACL may allow other groups instead."""
    try:
        listed = acl_writers(str(folder))
    except OSError:
        return False
    return listed is None or listed.own_group


def _trusted_group(gid: int, owner: int) -> bool:
    """Return whether a group is trusted: root's, the package's, or the owner's private group."""
    if gid in (_overflow("gid"), _UNMAPPED):
        return False
    if gid == 0 and not _is_anothers_group(0):
        return True
    return gid in _package()[1] or _own_group(owner, gid)


@functools.cache
def _overflow(kind: str) -> int:
    """Return the uid or gid that the kernel shows for all ids that a user namespace doesn't map: never trusted."""
    try:
        return int(Path(f"/proc/sys/kernel/overflow{kind}").read_bytes())
    except (OSError, ValueError):
        return 65534


def _is_anothers_group(gid: int) -> bool:
    """Return whether this user namespace maps the single gid to another one outside, which users may share.

    A range of gids is root's doing and trusted; without root a user can map only a single group of their own.
    """
    try:
        lines = Path("/proc/self/gid_map").read_text().splitlines()
    except OSError:  # a kernel without user namespaces
        return False
    rows = [tuple(map(int, line.split())) for line in lines]
    return any(count == 1 and inside == gid != outside for inside, outside, count in rows)


def _on_read_only_mount(component: str, status: os.stat_result) -> bool:
    """Return whether a world-writable directory of root is safe because its mount is read-only.

    Kubernetes mounts a config map this way, mode 0777. A read-only file system is safe. A read-only bind mount of a
    writable file system is safe only if the kubelet wrote it, in a directory of the node that users can't reach: the
    directory then has a link ``..data`` that root owns.
    """
    if status.st_uid != 0 or not stat.S_ISDIR(status.st_mode) or not os.statvfs(component).f_flag & os.ST_RDONLY:
        return False
    try:
        link = os.lstat(f"{component}/..data")
        return link.st_uid == 0 and stat.S_ISLNK(link.st_mode)
    except OSError:
        return _read_only_file_system(status.st_dev)


def _read_only_file_system(device: int) -> bool:
    """Return whether the whole file system is read-only, not just this mount; False if unknown."""
    number = f"{os.major(device)}:{os.minor(device)}"
    try:
        lines = Path("/proc/self/mountinfo").read_text(errors="replace").splitlines()
    except OSError:
        return False
    return any(line.split()[2] == number and "ro" in line.rsplit(None, 1)[-1].split(",") for line in lines)


@functools.cache
def _own_group(uid: int, gid: int) -> bool:
    """Return whether the group is the user's private one: no other account is in it.

    A group's member list leaves out the accounts whose primary group it is, so all accounts are searched. Accounts
    that a directory service does not list are not seen.
    """
    import grp
    import pwd

    if _is_anothers_group(gid):  # its name here is not its own
        return False
    if any(account.pw_gid == gid and account.pw_uid not in (0, uid) for account in pwd.getpwall()):
        return False
    try:
        user = pwd.getpwuid(uid)
    except KeyError:  # a container's arbitrary uid
        user = None
    try:
        group = grp.getgrgid(gid)
    except KeyError:
        return uid == gid
    return (
        user is not None
        and user.pw_gid == gid
        and group.gr_name == user.pw_name
        and set(group.gr_mem) <= {user.pw_name}
    )


class AclWriters(NamedTuple):
    """The users and groups that an ACL lets write, and whether the file's own group may. Owner and others excluded."""

    users: frozenset[int]
    groups: frozenset[int]
    own_group: bool


def acl_writers(file: int | str) -> AclWriters | None:
    """Return the writers in the ACL of an open file or a path (links are followed), None if there is no ACL.

    Raises
    ------
    OSError
        if the ACL can't be read, or has an unknown form.
    """
    if not hasattr(os, "getxattr"):  # not Linux
        return None
    try:
        value = os.getxattr(file, _ACL)
    except OSError as error:
        if error.errno in _NO_ACL:
            return None
        raise
    head, body = value[:4], value[4:]
    if head != struct.pack("<I", _ACL_VERSION) or len(body) % 8:
        raise OSError(errno.EINVAL, "its POSIX ACL is of no known form")
    entries = list(struct.iter_unpack("<HHI", body))
    mask = next((perm for tag, perm, _ in entries if tag == _ACL_MASK), _ACL_WRITE)
    able = [(tag, who) for tag, perm, who in entries if perm & mask & _ACL_WRITE]
    return AclWriters(
        frozenset(who for tag, who in able if tag == _ACL_USER),
        frozenset(who for tag, who in able if tag == _ACL_GROUP),
        any(tag == _ACL_OWN_GROUP for tag, _ in able),
    )
