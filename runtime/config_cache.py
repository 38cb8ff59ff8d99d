"""Kernel configs that are cached under a key: in memory, and each in a checked file of the user's overlay directory."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from pathlib import Path
from typing import Generic, TypeVar

from ..artifacts.locking import check_cache
from ..artifacts.publishing import make_folder, read_checked, write_checked
from .settings import settings

MAX_FILES = 1024

K = TypeVar("K")
V = TypeVar("V")

_log = logging.getLogger(__name__)


class ConfigCache(Generic[K, V]):
    """A cache of one kind of configs. ``decode`` returns None for an invalid payload and for one of another key."""

    def __init__(
        self,
        directory: str,
        file_name: Callable[[K], str],
        encode: Callable[[K, V], bytes],
        decode: Callable[[K, bytes], V | None],
    ) -> None:
        self._directory, self._file_name, self._encode, self._decode = directory, file_name, encode, decode
        self._memory: dict[K, V] = {}

    def load(self, key: K) -> V | None:
        """The configs saved under a key, here or in an earlier process; None if there are none."""
        configs, place = self._memory.get(key), self._place()
        if configs is None and place is not None:
            payload = read_checked(place / self._file_name(key))
            configs = None if payload is None else self._decode(key, payload)
            if configs is not None:
                self._memory[key] = configs
        return configs

    def save(self, key: K, configs: V) -> None:
        """Cache configs in memory, and in a file unless the settings forbid files or the directory can't be written."""
        payload, place = self._encode(key, configs), self._place()
        self._memory[key] = configs
        if place is None or settings().disable_autotune:
            return
        try:
            check_cache(place)
            make_folder(place)
            write_checked(place / self._file_name(key), payload)
            _bound(place)
        except OSError as error:  # HostError is an OSError
            _log.info("pretuned: the configs are not kept: %s", error)

    def clear(self, *, files: bool) -> None:
        """Clear this process's memory cache, and remove the files; a file that can't be removed stays."""
        self._memory.clear()
        place = self._place()
        if files and place is not None and not settings().disable_autotune:
            for path in place.glob("*"):
                with contextlib.suppress(OSError):
                    path.unlink()

    def _place(self) -> Path | None:
        records = settings().records
        return None if records is None else records / self._directory


def _bound(place: Path) -> None:
    files = list(place.glob("*"))
    if len(files) > MAX_FILES:
        dated = []
        for path in files:
            with contextlib.suppress(OSError):  # another process removed it
                dated.append((path.stat().st_mtime_ns, path))
        for _, path in sorted(dated)[: len(files) - MAX_FILES]:
            path.unlink(missing_ok=True)
