"""Read which users and groups a file's POSIX ACL lets write (acl(5)); the mode's group bits only show its mask."""

from __future__ import annotations

import errno
import os
import struct

from ..tuples import NamedTuple

_NAME = "system.posix_acl_access"
_VERSION = 2
_USER, _GROUP_OBJ, _GROUP, _MASK = 2, 4, 8, 16  # tags, as in linux/posix_acl.h
_WRITE = 2
_NONE = {errno.ENODATA, errno.EOPNOTSUPP, errno.ENOSYS}  # no ACL here, or none on this file system


class Writers(NamedTuple):
    """The users and groups that an ACL lets write, and whether the file's own group may. Owner and others excluded."""

    users: frozenset[int]
    groups: frozenset[int]
    own_group: bool


def writers(file: int | str) -> Writers | None:
    """Return the writers in the ACL of an open file or a path (links are followed), None if there is no ACL.

    Raises
    ------
    OSError
        if the ACL can't be read, or has an unknown form.
    """
    if not hasattr(os, "getxattr"):  # not Linux
        return None
    try:
        value = os.getxattr(file, _NAME)
    except OSError as error:
        if error.errno in _NONE:
            return None
        raise
    head, body = value[:4], value[4:]
    if head != struct.pack("<I", _VERSION) or len(body) % 8:
        raise OSError(errno.EINVAL, "its POSIX ACL is of no known form")
    entries = list(struct.iter_unpack("<HHI", body))
    mask = next((perm for tag, perm, _ in entries if tag == _MASK), _WRITE)
    able = [(tag, who) for tag, perm, who in entries if perm & mask & _WRITE]
    return Writers(
        frozenset(who for tag, who in able if tag == _USER),
        frozenset(who for tag, who in able if tag == _GROUP),
        any(tag == _GROUP_OBJ for tag, _ in able),
    )
