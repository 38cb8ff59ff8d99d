"""Gluon as Triton's interpreter can run it, for kernels that do not specialise their warps.

A layout says which thread has an element, and changes no number. So each function is Triton's without it.
"""

from __future__ import annotations

import importlib
import sys
from types import ModuleType
from typing import Any

import numpy as np
import triton
import triton.language as tl
from triton.runtime import interpreter

WARPS = 8
_SAME = [
    "abs",
    "associative_scan",
    "bfloat16",
    "cdiv",
    "constexpr",
    "div_rn",
    "float32",
    "int32",
    "int64",
    "join",
    "load",
    "max",
    "maximum",
    "minimum",
    "num_programs",
    "pointer_type",
    "program_id",
    "reduce",
    "reshape",
    "store",
    "sum",
    "uint32",
    "uint8",
    "where",
    "zeros_like",
]


def _without_layout(name: str) -> Any:
    def word(*args: Any, layout: Any = None, **more: Any) -> Any:
        return getattr(tl, name)(*args, **more)

    return word


def _now(name: str) -> Any:
    """Triton's function as it is at the call: the interpreter replaces it for a launch."""
    return lambda *args, **more: getattr(tl, name)(*args, **more)


def _layout(*_args: Any, **_more: Any) -> None:
    return None


class Shared:
    """Shared memory: what is stored is a copy, and an index is of its first dimension."""

    def __init__(self, values: np.ndarray, dtype: Any) -> None:
        self.values, self.dtype = values, dtype

    def index(self, i: Any) -> Shared:
        number = int(i.handle.data.item()) if isinstance(i, tl.tensor) else int(getattr(i, "value", i))
        return Shared(self.values[number], self.dtype)

    def store(self, value: Any) -> None:
        self.values[...] = value.handle.data

    def load(self, _layout: Any) -> Any:
        kind = tl.block_type(self.dtype, list(self.values.shape))
        return tl.tensor(interpreter.TensorHandle(self.values.copy(), self.dtype), kind)


def _room(dtype: Any, shape: Any, _layout: Any) -> Shared:
    sizes = [getattr(size, "value", size) for size in shape]
    return Shared(np.zeros(sizes, interpreter._get_np_dtype(dtype)), dtype)


def _view(shared: Shared, dtype: Any, shape: Any, _layout: Any) -> Shared:
    return Shared(shared.values.reshape([getattr(size, "value", size) for size in shape]), dtype)


def _async_load(shared: Shared, at: Any, mask: Any) -> None:
    shared.store(tl.load(at, mask=mask, other=0))


def language() -> ModuleType:
    """The module that stands for ``triton.experimental.gluon.language``."""
    gl = ModuleType("triton.experimental.gluon.language")
    for name in _SAME:
        value = getattr(tl, name)
        is_type = isinstance(value, (tl.dtype, type))
        setattr(gl, name, value if is_type else _now(name))
    for name in ("arange", "full", "zeros"):
        setattr(gl, name, _without_layout(name))
    gl.full = lambda shape, value, dtype, layout=None: tl.full(shape, value, dtype)
    gl.convert_layout = lambda value, layout: value
    gl.num_warps = lambda: WARPS
    for name in ("BlockedLayout", "SliceLayout", "SwizzledSharedLayout"):
        setattr(gl, name, _layout)
    gl.shared_memory_descriptor = ModuleType("reinterpret")
    gl.shared_memory_descriptor.reinterpret = _view
    gl.allocate_shared_memory, gl.barrier = _room, _layout
    return gl


def modules(*names: str) -> list[ModuleType]:
    """Import modules of pretuned.kernels that nobody has imported, so that the interpreter can run their kernels."""
    gluon = ModuleType("triton.experimental.gluon")
    gluon.jit, gluon.language = triton.jit, language()
    hopper = ModuleType("triton.experimental.gluon.language.nvidia.hopper")
    for name in ("async_copy", "mbarrier", "tma"):
        part = ModuleType(name)
        part.__getattr__ = lambda _name: _layout
        setattr(hopper, name, part)
    hopper.async_copy.async_load = _async_load
    tl.block_type.layout = None
    stand_in = {
        gluon.__name__: gluon,
        gluon.language.__name__: gluon.language,
        "triton.experimental.gluon.language.nvidia": ModuleType("nvidia"),
        hopper.__name__: hopper,
    }
    before = {name: sys.modules.get(name) for name in stand_in}
    sys.modules |= stand_in
    imported = [importlib.import_module(f"pretuned.kernels.{name}") for name in ("gluon.pipeline", *names)]
    for name, module in before.items():
        if module is None:
            del sys.modules[name]
        else:
            sys.modules[name] = module
    for module in imported:  # the interpreter looks for the language among a function's globals
        module.tl = tl
    return imported[1:]
