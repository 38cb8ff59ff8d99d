"""Configs that a caller keeps under a name of its own: in memory, and a file of JSON each below the overlay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import logging
from pathlib import Path
from typing import Any

from ...artifacts.errors import HostError, InputError
from ...artifacts.files.blob import read_checked, write_checked
from ...artifacts.files.lock import check_cache
from ...artifacts.files.publish import make_folder
from ...runtime.dispatch.pin import KernelPair
from ...runtime.settings import settings

_DIRECTORY = "unsloth"
_memory: dict[str, dict[str, Any]] = {}
_log = logging.getLogger(__name__)


def load_cached_config(cache_key: str) -> dict[str, Any] | None:
    """What ``save_cached_config`` kept under a key, here or in an earlier process; None if there is nothing.

    A dict with ``config_fwd``, ``config_bwd_dx``, ``config_bwd_dw`` (each a dict of its fields) and ``metadata``.
    """
    known = _memory.get(cache_key)
    if known is None:
        path = _path(cache_key)
        payload = None if path is None else read_checked(path)
        if payload is None:
            return None
        try:
            found = json.loads(payload)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.pop("cache_key", None) != cache_key:
            return None
        known = _memory[cache_key] = found
    return dict(known)


def save_cached_config(
    cache_key: str, config_fwd: Any, config_bwd_dx: Any, config_bwd_dw: Any, metadata: dict[str, Any] | None = None
) -> None:
    """Keep three configs under a key, for this process and later ones. A place that can't be written costs the file,
    and so do PRETUNED_DISABLE_AUTOTUNE=1 and PRETUNED_TRUSTED_KEYS.

    Raises
    ------
    InputError
        for a config or metadata that is nothing JSON can say.
    """
    named = {"config_fwd": config_fwd, "config_bwd_dx": config_bwd_dx, "config_bwd_dw": config_bwd_dw}
    kept = {name: _plain(name, one) for name, one in named.items()} | {"metadata": metadata or {}}
    try:
        payload = json.dumps({"cache_key": cache_key, **kept}).encode()
    except TypeError as error:
        raise InputError(f"save_cached_config: metadata is {metadata!r}, wanted what JSON can say: {error}") from None
    _memory[cache_key] = json.loads(payload)
    del _memory[cache_key]["cache_key"]
    path = _path(cache_key)
    if path is None or settings().disable_autotune:  # which says that nothing is written
        return
    try:
        check_cache(path.parent)
        make_folder(path.parent)
        write_checked(path, payload)
    except (OSError, HostError) as error:
        _log.info("pretuned: the configs are not kept: %s", error)


def clear_cache() -> None:
    """Forget what this process has in memory; files stay."""
    _memory.clear()


def _plain(name: str, config: Any) -> dict[str, Any]:
    if isinstance(config, KernelPair):
        gemms = {"first": config.first, "second": config.second}
        forms = {which: [[int(form.value), dict(one.pairs())] for form, one in half.configs]
                 for which, half in gemms.items()}  # fmt: skip
        return {"op": config.op.value, **forms}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if isinstance(config, dict):
        return dict(config)
    raise InputError(f"save_cached_config: {name} is a {type(config).__name__}, wanted a KernelConfig, a dict of its "
                     "fields, or a KernelPair of get_or_autotune_moe_kernels")  # fmt: skip


def _path(cache_key: str) -> Path | None:
    place = settings().records
    return None if place is None else place / _DIRECTORY / (hashlib.sha256(cache_key.encode()).hexdigest() + ".json")
