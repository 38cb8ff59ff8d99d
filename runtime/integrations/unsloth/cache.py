"""Configs that a caller saves under a key of its own: in memory, and each in a JSON file in the user's overlay."""

from __future__ import annotations

import dataclasses
import hashlib
import json
from typing import Any, TypeAlias

from ...artifacts.errors import InputError
from ...runtime.config_cache import ConfigCache
from ...runtime.dispatch.pin import KernelPair

Saved: TypeAlias = "dict[str, Any]"


def load_cached_config(cache_key: str) -> Saved | None:
    """The configs that ``save_cached_config`` saved, here or in an earlier process; None if there are none.

    The result is a dict with ``config_fwd``, ``config_bwd_dx``, ``config_bwd_dw`` (each a dict of the config's fields)
    and ``metadata``.
    """
    saved = _cache.load(cache_key)
    return None if saved is None else dict(saved)


def save_cached_config(
    cache_key: str, config_fwd: Any, config_bwd_dx: Any, config_bwd_dw: Any, metadata: dict[str, Any] | None = None
) -> None:
    """Save three configs under a key, for this process and, in a file, for later processes.

    No file is written with PRETUNED_DISABLE_AUTOTUNE=1 or PRETUNED_TRUSTED_KEYS, or if the overlay can't be written.

    Raises
    ------
    InputError
        for a config or metadata that JSON can't represent.
    """
    named = {"config_fwd": config_fwd, "config_bwd_dx": config_bwd_dx, "config_bwd_dw": config_bwd_dw}
    configs = {name: _plain(name, config) for name, config in named.items()} | {"metadata": metadata or {}}
    try:
        _cache.save(cache_key, json.loads(json.dumps(configs)))
    except TypeError as error:
        raise InputError(f"save_cached_config: metadata is {metadata!r}, wanted what JSON can say: {error}") from None


def clear_cache() -> None:
    """Clear this process's memory cache; files stay."""
    _cache.clear(files=False)


def _file_name(cache_key: str) -> str:
    return hashlib.sha256(cache_key.encode()).hexdigest() + ".json"


def _encode(cache_key: str, saved: Saved) -> bytes:
    return json.dumps({"cache_key": cache_key, **saved}).encode()


def _decode(cache_key: str, payload: bytes) -> Saved | None:
    try:
        saved = json.loads(payload)
    except (ValueError, RecursionError):
        return None
    return saved if isinstance(saved, dict) and saved.pop("cache_key", None) == cache_key else None


_cache: ConfigCache[str, Saved] = ConfigCache("unsloth", _file_name, _encode, _decode)


def _plain(name: str, config: Any) -> dict[str, Any]:
    if isinstance(config, KernelPair):
        gemms = {"first": config.first, "second": config.second}
        forms = {
            which: [[int(form.value), dict(chosen.pairs())] for form, chosen in half.configs]
            for which, half in gemms.items()
        }
        return {"op": config.op.value, **forms}
    if dataclasses.is_dataclass(config) and not isinstance(config, type):
        return dataclasses.asdict(config)
    if isinstance(config, dict):
        return dict(config)
    raise InputError(
        f"save_cached_config: {name} is a {type(config).__name__}, wanted a KernelConfig, a dict of its "
        "fields, or a KernelPair of get_or_autotune_moe_kernels"
    )
