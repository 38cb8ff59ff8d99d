"""Installations of pretuned that differ from this one."""

from __future__ import annotations

from importlib.machinery import ModuleSpec
from types import ModuleType

BUNDLES = "pretuned.artifacts.bundles"  # the module whose directory has the shipped bundles


def without_bundles() -> dict[str, ModuleType]:
    """sys.modules of a pretuned whose packager left the shipped bundles out: their module has no directory."""
    module = ModuleType(BUNDLES)
    module.__spec__ = ModuleSpec(BUNDLES, None)
    return {BUNDLES: module}
