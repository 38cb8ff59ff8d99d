"""Modules as another process has them."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from types import ModuleType
from typing import Any

from pretuned.runtime import hooks


def copy_of(module: ModuleType, path: Path | None = None) -> Any:
    """A second copy of a module, which knows nothing yet; from ``path``, if not from the module's own file.

    Type it as Any: its functions are called.
    """
    spec = importlib.util.spec_from_file_location(module.__name__, path or module.__file__)
    assert spec is not None
    assert spec.loader is not None
    before = [*hooks._forget]
    loaded_module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded_module)
    hooks._forget[:] = before
    return loaded_module
