"""Results of self-tests of kernels that were never run on a GPU's capability: right, or wrong.

Wrong means that the kernel computed a wrong value, that the GPU faulted, or that the test hung. If a test fails for
another reason (a file vanishes, the process is killed), there is no result, and nothing is stored.

A result is for one variant (its whole record, with its cubin's digest), one kind of GPU and one driver. It is stored in
the process, and in a small file of the user's overlay; there is one file for each kind of GPU and driver. If two
results disagree, the variant counts as wrong. ``launch/self_test.py`` runs the tests.
"""

from __future__ import annotations

import hashlib
import json
import logging
import re
import time
from pathlib import Path
from typing import TYPE_CHECKING, TypeAlias

from ..artifacts.errors import HostError, LockBusy
from ..artifacts.tuples import NamedTuple
from . import hooks
from .settings import lock, settings

if TYPE_CHECKING:
    from ..artifacts.records import Gpu, LocalGpu, Variant

_FORM = 2  # version of the file's format
_MOST = 4096  # most results in a file
_MOST_CHARS = 400  # longest stored reason
_LOCK_TIMEOUT_S = 2.0  # waited once in a process: a holder of the overlay's lock that needs longer may never release it

_log = logging.getLogger(__name__)


class Result(NamedTuple):
    """A self-test's result: right or wrong, the day (UTC) of the test, and the fault."""

    right: bool
    day: str
    why: str = ""


_Results: TypeAlias = "dict[bytes, Result]"  # by the digest of a variant's record


class _Memory:
    """The test results that this process has read or made."""

    def __init__(self) -> None:
        self.results: dict[tuple[int, Gpu], _Results] = {}  # by capability and GPU, driver included
        self.wrong: dict[tuple[int, Gpu], set[bytes]] = {}  # also variants that could not be tested
        self.read: set[tuple[int, Gpu]] = set()  # the GPUs whose file was read
        self.logged: set[Path] = set()  # files that could not be written
        self.wait_s = _LOCK_TIMEOUT_S  # for the next lock


_memory = _Memory()


def result_of_today(right: bool, why: str = "") -> Result:
    """Return a result with today's date (UTC)."""
    return Result(right, time.strftime("%Y-%m-%d", time.gmtime()), why[:_MOST_CHARS])


def recorded(variant: Variant, local: LocalGpu) -> Result | None:
    """The variant's result on this kind of GPU, from this process or the file; None if it was not tested."""
    recall(local)
    return _memory.results.get((local.sm, local.gpu), {}).get(_digest(variant))


def is_wrong(variant: Variant, local: LocalGpu) -> bool:
    """True if the variant failed its test on this kind of GPU, or was left out. Reads no file: ``recall`` does."""
    wrong = _memory.wrong.get((local.sm, local.gpu))
    return wrong is not None and _digest(variant) in wrong


def left_out(local: LocalGpu) -> tuple[bytes, ...]:
    """Digests of all variants that are wrong on this kind of GPU, or left out, ascending."""
    recall(local)
    return tuple(sorted(_memory.wrong.get((local.sm, local.gpu), ())))


def recall(local: LocalGpu) -> None:
    """Read the results of this kind of GPU from its file, unless they were read before."""
    key = local.sm, local.gpu
    if key not in _memory.read:
        path = path_of(local)
        results = {} if path is None else _load(path, local)
        with lock("self-test results"):
            for digest, result in results.items():
                _keep(local, digest, result)
            _memory.read.add(key)


def leave_out(variant: Variant, local: LocalGpu) -> None:
    """Leave out a variant that could not be tested, in this process. The next process tests it again."""
    with lock("self-test results"):
        _memory.wrong.setdefault((local.sm, local.gpu), set()).add(_digest(variant))


def note(variant: Variant, local: LocalGpu, result: Result) -> None:
    """Store a result, and write all of this process's results into the file. A failed write is logged once, at INFO.

    Only the first call that finds the overlay's lock busy waits for it; later calls try it without waiting.
    """
    with lock("self-test results"):
        _keep(local, _digest(variant), result)
    path = path_of(local)
    if path is None or settings().disable_autotune:
        return
    from ..artifacts.locking import check_cache
    from ..artifacts.locking import lock as directory_lock  # imported here: most processes write nothing

    try:
        check_cache(path.parent)
        with directory_lock(path.parent, _memory.wait_s, required=True):
            results = _load(path, local)
            with lock("self-test results"):
                for digest, noted in _memory.results[local.sm, local.gpu].items():
                    _merge(results, digest, noted)
            _save(path, local, results)
    except (HostError, OSError) as error:
        if isinstance(error, LockBusy):
            _memory.wait_s = 0.0
        if path not in _memory.logged:
            _memory.logged.add(path)
            _log.info("pretuned: results of self-tests are not kept: %s", error)


def path_of(local: LocalGpu) -> Path | None:
    """The file of one kind of GPU and driver; None if there is no overlay, or if all files must be signed."""
    overlay, gpu = settings().records, local.gpu
    if overlay is None:
        return None
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:80]
    return overlay / f"self-test-sm{local.sm}-{name}-{gpu.sm_count}-{gpu.driver}.results"


def forget() -> None:
    """Have the next ``recall`` read the file again: the environment may name another overlay."""
    _memory.read.clear()


hooks.on_reload(forget)


def _digest(variant: Variant) -> bytes:
    from ..artifacts.codec import pack_variant

    return hashlib.sha256(pack_variant(variant)).digest()


def _keep(local: LocalGpu, digest: bytes, result: Result) -> None:
    key = local.sm, local.gpu
    if not _merge(_memory.results.setdefault(key, {}), digest, result).right:
        _memory.wrong.setdefault(key, set()).add(digest)


def _merge(results: _Results, digest: bytes, result: Result) -> Result:
    """Add a result, unless a wrong one is stored: wrong stays."""
    before = results.get(digest)
    if before is None or before.right:
        results[digest] = result
    return results[digest]


def _head(local: LocalGpu) -> list[object]:
    gpu = local.gpu
    return [_FORM, local.sm, gpu.name, gpu.sm_count, gpu.driver]


def _load(path: Path, local: LocalGpu) -> _Results:
    """A file's results; none if it is missing, damaged, of another GPU, or in a directory that others can write."""
    from ..artifacts.publishing import read_checked

    payload = read_checked(path)
    try:
        head, rows = json.loads(payload or b"")
        return dict(map(_row, rows)) if head == _head(local) else {}
    except (ValueError, TypeError, RecursionError):
        return {}


def _row(row: list[object]) -> tuple[bytes, Result]:
    digest, right, day, why = row
    if not (isinstance(digest, str) and isinstance(right, bool) and isinstance(day, str) and isinstance(why, str)):
        raise ValueError(f"no test result: {row}")
    return bytes.fromhex(digest), Result(right, day, why)


def _save(path: Path, local: LocalGpu, results: _Results) -> None:
    """Write results to a file. Beyond ``_MOST`` of them, the wrong ones stay, and the newest of the others."""
    from ..artifacts.publishing import write_checked

    rows = sorted(results.items(), key=lambda row: (not row[1].right, row[1].day), reverse=True)[:_MOST]
    content = [_head(local), [[digest.hex(), *result] for digest, result in rows]]
    write_checked(path, json.dumps(content).encode())
