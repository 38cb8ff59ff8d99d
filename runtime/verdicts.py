"""Results of self-tests of code that nobody had run on a GPU's capability: right, or wrong.

Wrong means that a result was computed and is wrong, that the GPU faulted, or that the test hung. Anything else that may
go wrong while code is tested (its file vanishes, the process is killed) is no result, and is not kept.

A verdict holds for one variant (all of its record, its cubin's digest among it), one kind of GPU and one driver. It is
kept by the process, and in a small file of the user's overlay, one for each kind of GPU and driver, so that the next
process need not find it out again. Where two disagree, wrong stays. What finds it out is ``launch/proof.py``.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypeAlias

from ..artifacts.errors import HostError
from . import hooks
from .locks import lock
from .settings import settings

if TYPE_CHECKING:
    from ..artifacts.records.bundle import Variant
    from ..artifacts.records.target import Gpu, LocalGpu

_SUFFIX = ".results"
_FORM = 2  # of the file's content
# Form 1 had also "wrong" for files that vanished, processes that were killed and launches that were refused. Of its
# reasons these alone are a computed result, a fault or a hang.
_RESULTS_OF_FORM_1 = re.compile(
    r", wanted | are wrong$| noted wrongly$| were stored$|did not end within \d+ s$|^\S+ \S+ \S+ w="
)
_MOST = 4096  # verdicts in a file
_MOST_CHARS = 400  # of a reason
_LOCK_TIMEOUT_S = 2.0

_log = logging.getLogger(__name__)


class Verdict(NamedTuple):
    """Whether a variant computes what it should; the day (UTC) when that was found out; of a wrong one what it did."""

    right: bool
    day: str
    why: str = ""


_Key: TypeAlias = "tuple[int, Gpu]"  # the capability; a GPU, its driver included
_Kept: TypeAlias = "dict[bytes, Verdict]"

_known: dict[_Key, _Kept] = {}  # what this process knows; all of it stays as long as the process
_wrong: dict[_Key, set[bytes]] = {}  # of these, the wrong ones: a GPU that has none is not here
_read: set[_Key] = set()  # whose file was read
_told: set[Path] = set()  # what could not be written


def verdict(right: bool, why: str = "") -> Verdict:
    """One of today."""
    return Verdict(right, time.strftime("%Y-%m-%d", time.gmtime()), why[:_MOST_CHARS])


def known(variant: Variant, local: LocalGpu) -> Verdict | None:
    """The verdict on this variant on such a GPU, this process's or one that is remembered; None without one."""
    recall(local)
    return _known.get(_key(local), {}).get(_digest(variant))


def is_wrong(variant: Variant, local: LocalGpu) -> bool:
    """Whether the variant is wrong there, or left out. Reads no file: whoever has code made ready has done so."""
    wrong = _wrong.get(_key(local))
    return wrong is not None and _digest(variant) in wrong


def left_out(local: LocalGpu) -> tuple[bytes, ...]:
    """Digests of all that is wrong there or left out, ascending."""
    recall(local)
    return tuple(sorted(_wrong.get(_key(local), ())))


def recall(local: LocalGpu) -> None:
    """Read the file of such a GPU, if that was not done yet."""
    key = _key(local)
    if key not in _read:
        path = path_of(local)
        found = {} if path is None else _load(path, local)
        with lock("verdicts"):
            for digest, one in found.items():
                _keep(key, digest, one)
            _read.add(key)


def leave_out(variant: Variant, local: LocalGpu) -> None:
    """Have this process leave a variant out, which it could not test. The next process tests it again."""
    with lock("verdicts"):
        _wrong.setdefault(_key(local), set()).add(_digest(variant))


def note(variant: Variant, local: LocalGpu, found: Verdict) -> None:
    """Keep a verdict, and write it where there is a place for it; that there is none is told once, at level INFO."""
    key, digest = _key(local), _digest(variant)
    with lock("verdicts"):
        _keep(key, digest, found)
    path = path_of(local)
    if path is None or settings().disable_autotune:
        return
    from ..artifacts.files.lock import check_cache
    from ..artifacts.files.lock import lock as directory_lock  # here, as most processes have nothing to write

    try:
        check_cache(path.parent)
        with directory_lock(path.parent, _LOCK_TIMEOUT_S, required=True):
            every = _load(path, local)
            _merge(every, digest, found)
            _save(path, local, every)
    except (HostError, OSError) as error:
        if path not in _told:
            _told.add(path)
            _log.info("pretuned: results of self-tests are not kept: %s", error)


def path_of(local: LocalGpu) -> Path | None:
    """The file of one kind of GPU and driver; None where there is no overlay, or all must be signed."""
    overlay, gpu = settings().records, local.gpu
    if overlay is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:80]
    return overlay / f"self-test-sm{local.sm}-{name}-{gpu.sm_count}-{gpu.driver}{_SUFFIX}"


def forget() -> None:
    """Makes the next ``recall`` read the file again: the environment may name another."""
    _read.clear()


hooks.on_reload(forget)


def _key(local: LocalGpu) -> _Key:
    return local.sm, local.gpu


def _digest(variant: Variant) -> bytes:
    from ..artifacts.format.schema import pack_variant

    return hashlib.sha256(pack_variant(variant)).digest()


def _keep(key: _Key, digest: bytes, found: Verdict) -> None:
    if not _merge(_known.setdefault(key, {}), digest, found).right:
        _wrong.setdefault(key, set()).add(digest)


def _merge(every: _Kept, digest: bytes, found: Verdict) -> Verdict:
    """Wrong once is wrong for good."""
    before = every.get(digest)
    if before is None or before.right:
        every[digest] = found
    return every[digest]


def _named(local: LocalGpu, form: int) -> list[object]:
    gpu = local.gpu
    return [form, local.sm, gpu.name, gpu.sm_count, gpu.driver]


def _load(path: Path, local: LocalGpu) -> _Kept:
    """What the file says; nothing where it is missing, damaged, of another GPU, or in a place that others can write."""
    from ..artifacts.files.blob import read_checked

    payload = read_checked(path)
    if payload is None:
        return {}
    try:
        named, rows = json.loads(payload)
        if named == _named(local, _FORM):
            return dict(map(_row, rows))
        if named == _named(local, 1):
            return {of: one for of, one in map(_row, rows) if one.right or _RESULTS_OF_FORM_1.search(one.why)}
        return {}
    except (ValueError, TypeError, RecursionError):
        return {}


def _row(row: list[object]) -> tuple[bytes, Verdict]:
    digest, right, day, why = row
    if not (isinstance(digest, str) and isinstance(right, bool) and isinstance(day, str) and isinstance(why, str)):
        raise ValueError(f"no test result: {row}")
    return bytes.fromhex(digest), Verdict(right, day, why)


def _save(path: Path, local: LocalGpu, every: _Kept) -> None:
    """Of very many the wrong ones stay, and the newest of the others."""
    from ..artifacts.files.blob import write_checked

    rows = sorted(every.items(), key=lambda row: (not row[1].right, row[1].day), reverse=True)[:_MOST]
    write_checked(path, json.dumps([_named(local, _FORM), [[digest.hex(), *one] for digest, one in rows]]).encode())
