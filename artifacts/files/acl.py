"""Who else may write a file: its POSIX ACL, of which the mode's group bits show no more than the mask (acl(5))."""

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
    """Those whom an ACL lets write beside the owner and everybody else: users, named groups, the file's own group."""

    users: frozenset[int]
    groups: frozenset[int]
    own_group: bool


def writers(file: int | str) -> Writers | None:
    """Who may write an open file or a path, a link followed; None where it has no ACL: then the mode says all.

    Raises
    ------
    OSError
        where the ACL can't be read, or is none that this knows.
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
