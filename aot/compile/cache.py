"""The compile cache: variants that were compiled here, by everything that decides their bytes."""

from __future__ import annotations

import hashlib
from collections.abc import Hashable
from pathlib import Path

import msgpack

from ...artifacts.codec import pack_variant
from ...artifacts.errors import BundleUntrusted
from ...artifacts.format import read_variant
from ...artifacts.limits import MAX_CUBIN_BYTES
from ...artifacts.locking import cache_fault
from ...artifacts.publishing import make_folder, read_checked, read_or_say, write_checked
from ...artifacts.records import Variant
from ...kernels.registry import entry_of
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from .triton import Compiled, arguments_of, job_key


def default_dir() -> Path | None:
    """The user's cache (``$XDG_CACHE_HOME/pretuned/compiled``), or None without a home directory."""
    from platformdirs import user_cache_path

    try:
        path = user_cache_path("pretuned") / "compiled"
    except RuntimeError:  # a user whom no passwd file knows, and no HOME; older platformdirs leave the ~ in
        return None
    return path if path.is_absolute() else None


class CompileCache:
    """Compiled variants in a directory. Entries are published by rename: any number of builds may share it.

    Nothing is ever removed: delete the directory to clear it. ``trouble`` is empty, or says why the cache can't be
    written; it is then only read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        self.trouble = ""

    def get(self, spec: Spec | RowOpSpec, sm: int) -> Compiled | None:
        """The compiled variant; None if it is missing or damaged, or if others can write its file."""
        payload = read_checked(self._path(spec, sm))
        return None if payload is None else _unpack(payload, spec)

    def has(self, spec: Spec | RowOpSpec, sm: int) -> bool:
        """True if ``get`` returns the variant."""
        return self.get(spec, sm) is not None

    def put(self, spec: Spec | RowOpSpec, sm: int, compiled: Compiled) -> None:
        """Keep the variant. If the cache can't be written, the next run compiles again and this one goes on."""
        self.trouble = self.trouble or cache_fault(self.directory)
        if self.trouble:
            return
        path = self._path(spec, sm)
        try:
            make_folder(path.parent)
            write_checked(path, _pack(compiled))
        except OSError as error:
            self.trouble = f"the compile cache {self.directory} can't be written: {error}"
            return
        try:
            read_or_say(path)
        except BundleUntrusted:
            self.trouble = (
                f"the compile cache {self.directory} is not read, as others can write it: all is compiled anew "
                "each time. chmod go-w makes it this user's, --cache-dir names another"
            )
        except OSError as error:
            self.trouble = (
                f"the compile cache {self.directory} can't be read again, {path}: {error.strerror or error}. "
                "It must be readable, or all is compiled anew each time; --cache-dir names another"
            )

    def _path(self, spec: Spec | RowOpSpec, sm: int) -> Path:
        key = job_key(spec, sm)
        return self.directory / key[:2] / f"{key}.bin"


def _pack(compiled: Compiled) -> bytes:
    packed: bytes = msgpack.packb((pack_variant(compiled.variant), compiled.cubin))
    return packed


def _unpack(payload: bytes, spec: Spec | RowOpSpec) -> Compiled | None:
    """Unpack an entry; None if another version wrote it in another format, so that it is compiled again."""
    try:
        record, cubin = msgpack.unpackb(
            payload, use_list=False, max_bin_len=MAX_CUBIN_BYTES, max_array_len=2, max_map_len=0, max_ext_len=0
        )
        variant = read_variant(record, len(cubin))  # checks each field's type and range, like a bundle's reader
        if variant.cubin_sha256 != hashlib.sha256(cubin).digest():
            return None
    except (ValueError, TypeError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    return Compiled(variant, cubin) if made_of(variant) == asked_for(spec) else None


def made_of(variant: Variant) -> Hashable:
    """Everything that a variant is compiled from, except sources and capability; compare with ``asked_for``."""
    return (
        variant.kernel,
        variant.op,
        variant.dtype,
        variant.layout,
        variant.fusion,
        variant.alignment,
        variant.max_experts,
        variant.config,
        variant.arguments,
    )


def asked_for(spec: Spec | RowOpSpec) -> Hashable:
    """Everything that a spec is compiled from, except sources and capability; compare with ``made_of``."""
    return (
        entry_of(spec).name,
        spec.op,
        spec.dtype,
        spec.layout,
        spec.fusion,
        spec.alignment,
        spec.max_experts,
        spec.config.pairs(),
        arguments_of(spec),
    )
