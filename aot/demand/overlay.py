"""The user's overlay: the results of tuning on demand, in one bundle for each kind of GPU.

Readers need no lock. Writers take turns under the directory's lock, and replace the file by rename. A file stays small:
entries of earlier kernel revisions are dropped, then the oldest ones. Its name holds the format and the launch ABI, so
versions of pretuned that read both share it, and others leave it alone.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from ...artifacts import codec
from ...artifacts.bundle_file import open_bundle
from ...artifacts.errors import BundleError, BundleUnreadable, BundleUntrusted, HostError, PretunedError
from ...artifacts.limits import FORMAT, MAX_INDEX_BYTES, MAX_NAME_CHARS, OLDEST_FORMAT
from ...artifacts.locking import check_cache, lock
from ...artifacts.publishing import publish
from ...artifacts.records import Bundle, Gpu, Model, Problem, Variant
from ...kernels.entry import LAUNCH_ABI, READS_ABI
from ...kernels.registry import ENTRIES
from ..bundle.assemble import BundleChoice, Provenance, VariantTable, assemble, is_fallback
from ..bundle.merge import merge

MAX_BYTES = 32 << 20  # of one file: a few hundred shapes
MAX_ENTRIES = 512  # tuned shapes; their choices stay far below an index's limit
LOCK_TIMEOUT_S = 10.0

_ENTRY = "on-demand"
_LAST_NUMBER = 10**8 - 1
_NUMBER = re.compile(rf"{_ENTRY}/(\d{{8}}) ")
_FILE = re.compile(r"tuned-f(\d+)-a(\d+)-.*\.msgpack")


def path_of(directory: Path, sm: int, gpu: Gpu) -> Path:
    """The overlay's file for one kind of GPU."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:80]
    return directory / f"tuned-f{FORMAT}-a{LAUNCH_ABI}-sm{sm}-{name}-{gpu.sm_count}.msgpack"


def add(
    directory: Path,
    gpu: Gpu,
    tuned: Bundle,
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Add a tuned bundle to the overlay of ``gpu`` and return its file; ``note`` is called for lost entries.

    Raises
    ------
    HostError
        if the directory can't be made, locked within ``timeout_s``, or written, or its file can't be read or trusted;
        the file is then unchanged.
    """
    path = path_of(directory, tuned.target.sm, gpu)
    check_cache(directory)
    with lock(directory, timeout_s, required=True):
        old = _read(path, note)
        publish(path, codec.encode(joined(tuned, old, note)))
        _remove_outdated(directory)
    return path


def clear(directory: Path) -> None:
    """Remove everything that this version tuned.

    Raises
    ------
    HostError
        if the directory can't be locked or written.
    """
    if not directory.is_dir():
        return
    check_cache(directory)
    with lock(directory, LOCK_TIMEOUT_S, required=True):
        for path in directory.glob(f"tuned-f{FORMAT}-a{LAUNCH_ABI}-*.msgpack"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise HostError(f"can't remove '{path}': {error.strerror}") from error


def joined(
    tuned: Bundle,
    old: Bundle | None,
    note: Callable[[str], None] = lambda text: None,
    *,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
) -> Bundle:
    """Merge ``tuned``, as the newest entry, with the entries of ``old`` that fit."""
    entries = [] if old is None else _entries(old)
    last = max((_number(entry) for entry in entries), default=0)
    if last >= _LAST_NUMBER:  # no machine tunes that often: the file is damaged, or made by hand
        note(f"what was tuned before can't be kept: its last entry has the number {last}")
        entries, last = [], 0
    tuned = tuned._replace(models=_numbered(tuned, last + 1))
    if old is None or not entries:
        return tuned
    anew = {(problem, choice.bucket) for problem, row in tuned.choices.items() for choice in row}
    entries = entries[-(max_entries - 1) :] if max_entries > 1 else []
    while entries:
        earlier = _part(old, entries, anew)
        if earlier is None:
            return tuned
        try:
            bundle = merge({"what was tuned": tuned, "the overlay": earlier}).bundle
        except PretunedError as error:  # other sources, or another ABI under this name
            note(f"what was tuned before can't be kept: {error}")
            return tuned
        data = codec.encode(bundle)
        if len(data) <= max_bytes and len(data) - sum(map(len, bundle.cubins)) <= MAX_INDEX_BYTES // 2:
            return bundle
        entries = entries[max(1, len(entries) // 8) :]
    return tuned


def _numbered(tuned: Bundle, number: int) -> tuple[Model, ...]:
    """The models of a new entry, named so that they sort by age."""
    return tuple(
        model._replace(name=f"{_ENTRY}/{number:08d} {model.name.replace('/', ' ')}"[:MAX_NAME_CHARS])
        for model in tuned.models
    )


def _entries(bundle: Bundle) -> list[Model]:
    """The models of an overlay, oldest first."""
    return sorted((model for model in bundle.models if _NUMBER.match(model.name)), key=_number)


def _number(model: Model) -> int:
    match = _NUMBER.match(model.name)
    return int(match[1]) if match else 0


def _part(old: Bundle, entries: list[Model], anew: set[tuple[Problem, int]]) -> Bundle | None:
    """The part of an overlay that these entries need, less cells in ``anew`` and earlier kernel revisions."""
    codes = VariantTable([old])
    claims: dict[Problem, list[BundleChoice]] = {}
    for problem in {problem for entry in entries for problem in entry.problems}:
        row = [
            _current(claim, codes)
            for claim in (codes.claim(old, choice) for choice in old.choices[problem])
            if (problem, claim.bucket) not in anew and is_current(codes[claim.variant])
        ]
        if row:
            claims[problem] = row
    if not claims:
        return None
    models = [
        entry._replace(problems=tuple(problem for problem in entry.problems if problem in claims)) for entry in entries
    ]
    fallbacks = [
        place for place, code in enumerate(codes.codes) if is_fallback(code.variant) and is_current(code.variant)
    ]
    making = Provenance(
        old.target, old.min_driver, old.producer, old.kernels, tuple(model for model in models if model.problems)
    )
    return assemble(making, codes, claims, fallbacks)


def _current(claim: BundleChoice, codes: VariantTable) -> BundleChoice:
    """The claim, without a runner-up of an earlier revision."""
    if claim.runner_up is None or is_current(codes[claim.runner_up]):
        return claim
    return replace(claim, runner_up=None, runner_up_ns=None)


def is_current(variant: Variant) -> bool:
    """True if a variant is of this version's kernel revision or a later one."""
    entry = ENTRIES.get(variant.kernel)
    return entry is None or variant.revision >= entry.revision


def _read(path: Path, note: Callable[[str], None]) -> Bundle | None:
    """Read the overlay's file; None if it is missing or damaged, and is then begun anew."""
    if not path.exists():
        return None
    try:
        with open_bundle(path) as file:
            return file.load()
    except (BundleUntrusted, BundleUnreadable) as error:  # the file may be intact
        raise HostError(f"nothing can be added to '{path}': {error}") from error
    except BundleError as error:
        note(f"what was tuned before can't be kept: {error}")
        return None


def _remove_outdated(directory: Path) -> None:
    """Remove files of formats and launch ABIs that this version no longer reads."""
    for path in directory.glob("tuned-f*.msgpack"):
        match = _FILE.fullmatch(path.name)
        if match and (int(match[1]) < OLDEST_FORMAT or int(match[2]) < READS_ABI[0]):
            with contextlib.suppress(OSError):  # the next writer tries again
                path.unlink()
