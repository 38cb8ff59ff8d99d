"""Triton's interpreter with less to do: the programs that interpret kernels import it for that.

By itself it reduces and scans with a kernel's own function element by element; here it takes whole axes, as compiled
code may: the functions are associative. It puts its own functions into ``triton.language`` at each call of one
function by another; here once a launch. It makes the type of each value anew; here each is made once. And it computes
each sum of integers again in 64 bits, for an assertion that it leaves out (``debug`` is off); here it does not.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import triton.language as tl
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter


def _combined(
    one: Any, first: Sequence[np.ndarray], second: Sequence[np.ndarray], dtypes: list[Any]
) -> list[np.ndarray]:
    """What the function makes of two rows of elements, the earlier ones first."""
    every = [one.to_tensor(data, dtype) for data, dtype in zip((*first, *second), dtypes * 2, strict=True)]
    found = one.combine_fn.fn(*every)
    found = found if isinstance(found, tuple) else (found,)
    return [each.handle.data.astype(data.dtype) for each, data in zip(found, first, strict=True)]


def generic_reduce(self: Any, given: Any) -> list[Any]:
    """Neighbours joined, then what they came to, until one is left."""
    whole = given[0].handle.data.shape
    dtypes = [one.dtype for one in given]
    given, axis = self.unravel(given, self.axis)
    rows = [np.moveaxis(one.handle.data, axis, 0) for one in given]
    while rows[0].shape[0] > 1:
        rows = _combined(self, [one[0::2] for one in rows], [one[1::2] for one in rows], dtypes)
    found = [one[0] for one in rows]
    if self.keep_dims:
        found = [one.reshape([1] * len(whole) if self.axis is None else _with(one.shape, axis)) for one in found]
    return [self.to_tensor(one if one.shape else one.item(), dtype) for one, dtype in zip(found, dtypes, strict=True)]


def _with(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis:])


def generic_scan(self: Any, given: Any) -> list[Any]:
    """Each joined with the one before it, then with the second before, the fourth, the eighth."""
    dtypes = [one.dtype for one in given]
    rows = [np.moveaxis(one.handle.data, self.axis, 0) for one in given]
    count, step = rows[0].shape[0], 1
    while step < count:
        joined = _combined(self, [np.roll(one, step, 0) for one in rows], rows, dtypes)
        rows = [np.concatenate([one[:step], new[step:]]) for one, new in zip(rows, joined, strict=True)]
        step *= 2
    return [self.to_tensor(np.moveaxis(one, 0, self.axis), dtype) for one, dtype in zip(rows, dtypes, strict=True)]


_LAUNCH = interpreter.GridExecutor.__call__
_patched: set[int] = set()  # which modules of the language, in this launch
_languages: dict[Any, set[int]] = {}  # which a function has among its globals


def launched(self: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel."""
    _patched.clear()
    _LAUNCH(self, *args, **kwargs)


def called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One function by another."""
    if (seen := _languages.get(self.fn)) is None:
        seen = {id(one) for one in self.fn.__globals__.values() if one is tl or one is tl.core}
        _languages[self.fn] = seen
    if not seen <= _patched:
        interpreter._patch_lang(self.fn)
        _patched.update(seen)
    return self.rewrite()(*args, **kwargs)


def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
    """A word of the language, as the interpreter has it."""

    def word(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = interpreter.interpreter_semantic
        return member(*args, **kwargs)

    scope.set_attr(obj, name, word)


_NP_DTYPE = interpreter._get_np_dtype
_np_dtypes: dict[str, Any] = {}


def np_dtype(one: Any) -> Any:
    """Numpy's for a type of Triton's."""
    name = one.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _NP_DTYPE(one)
    return _np_dtypes[name]


_BLOCK_TYPE = tl.block_type.__init__
_BROADCAST = TritonSemantic.broadcast_impl_value
_blocks: dict[tuple[Any, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, tuple[Any, Any]]] = {}
_SCALAR = tl.constexpr(1), tl.tuple([])


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """The type of a block; two of one shape hold the same object for it."""
    sizes = tuple([one.value if isinstance(one, tl.constexpr) else one for one in shape])
    known = _blocks.get((element_ty.name, sizes))
    if known is None:
        _BLOCK_TYPE(self, element_ty, shape)
        if sizes not in _shapes:
            of_tensors = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(one) for one in sizes])
            _shapes[sizes] = self.shape, of_tensors
        same, of_tensors = _shapes[sizes]
        known = _blocks[element_ty.name, sizes] = same, self.numel, self.name, of_tensors
    self.element_ty = element_ty
    self.shape, self.numel, self.name, self.of_tensors = known


def tensor(self: Any, handle: Any, type: Any) -> None:
    """A value and its type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else _SCALAR


def broadcast(self: Any, one: Any, other: Any) -> tuple[Any, Any]:
    """Two values in one shape."""
    if one.type.is_block() and other.type.is_block() and one.type.shape is other.type.shape:
        return one, other
    found: tuple[Any, Any] = _BROADCAST(self, one, other)
    return found


TritonSemantic.broadcast_impl_value = broadcast
tl.block_type.__init__ = block_type
tl.tensor.__init__ = tensor
interpreter._patch_attr = patch
interpreter._get_np_dtype = np_dtype
interpreter.interpreter_builder.options = replace(interpreter.interpreter_builder.options, sanitize_overflow=False)
interpreter.GridExecutor.__call__ = launched
interpreter.InterpretedFunction.__call__ = called
interpreter.ReduceOps.generic_reduce = generic_reduce
interpreter.ScanOps.generic_scan = generic_scan
