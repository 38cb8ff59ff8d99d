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
    op: Any, first: Sequence[np.ndarray], second: Sequence[np.ndarray], dtypes: list[Any]
) -> list[np.ndarray]:
    """Return the function's result on two rows of elements, the earlier ones first."""
    values = [op.to_tensor(data, dtype) for data, dtype in zip((*first, *second), dtypes * 2, strict=True)]
    combined = op.combine_fn.fn(*values)
    combined = combined if isinstance(combined, tuple) else (combined,)
    return [each.handle.data.astype(data.dtype) for each, data in zip(combined, first, strict=True)]


def generic_reduce(self: Any, inputs: Any) -> list[Any]:
    """Neighbours joined, then what they came to, until one is left."""
    whole = inputs[0].handle.data.shape
    dtypes = [tensor.dtype for tensor in inputs]
    inputs, axis = self.unravel(inputs, self.axis)
    rows = [np.moveaxis(operand.handle.data, axis, 0) for operand in inputs]
    while rows[0].shape[0] > 1:
        rows = _combined(self, [row[0::2] for row in rows], [row[1::2] for row in rows], dtypes)
    results = [row[0] for row in rows]
    if self.keep_dims:
        results = [
            tensor.reshape([1] * len(whole) if self.axis is None else _with(tensor.shape, axis)) for tensor in results
        ]
    return [
        self.to_tensor(array if array.shape else array.item(), dtype)
        for array, dtype in zip(results, dtypes, strict=True)
    ]


def _with(shape: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return (*shape[:axis], 1, *shape[axis:])


def generic_scan(self: Any, inputs: Any) -> list[Any]:
    """Each joined with the one before it, then with the second before, the fourth, the eighth."""
    dtypes = [tensor.dtype for tensor in inputs]
    rows = [np.moveaxis(operand.handle.data, self.axis, 0) for operand in inputs]
    count, step = rows[0].shape[0], 1
    while step < count:
        joined = _combined(self, [np.roll(row, step, 0) for row in rows], rows, dtypes)
        rows = [np.concatenate([row[:step], new[step:]]) for row, new in zip(rows, joined, strict=True)]
        step *= 2
    return [self.to_tensor(np.moveaxis(row, 0, self.axis), dtype) for row, dtype in zip(rows, dtypes, strict=True)]


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
        seen = {id(value) for value in self.fn.__globals__.values() if value is tl or value is tl.core}
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


def np_dtype(dtype: Any) -> Any:
    """Numpy's for a type of Triton's."""
    name = dtype.scalar.name
    if name not in _np_dtypes:
        _np_dtypes[name] = _NP_DTYPE(dtype)
    return _np_dtypes[name]


_BLOCK_TYPE = tl.block_type.__init__
_BROADCAST = TritonSemantic.broadcast_impl_value
_blocks: dict[tuple[Any, ...], tuple[Any, int, str, tuple[Any, Any]]] = {}
_shapes: dict[tuple[int, ...], tuple[Any, tuple[Any, Any]]] = {}
_SCALAR = tl.constexpr(1), tl.tuple([])


def block_type(self: Any, element_ty: Any, shape: Any) -> None:
    """The type of a block; two of one shape hold the same object for it."""
    sizes = tuple([size.value if isinstance(size, tl.constexpr) else size for size in shape])
    cached = _blocks.get((element_ty.name, sizes))
    if cached is None:
        _BLOCK_TYPE(self, element_ty, shape)
        if sizes not in _shapes:
            of_tensors = tl.constexpr(math.prod(sizes)), tl.tuple([tl.constexpr(size) for size in sizes])
            _shapes[sizes] = self.shape, of_tensors
        same, of_tensors = _shapes[sizes]
        cached = _blocks[element_ty.name, sizes] = same, self.numel, self.name, of_tensors
    self.element_ty = element_ty
    self.shape, self.numel, self.name, self.of_tensors = cached


def tensor(self: Any, handle: Any, type: Any) -> None:
    """A value and its type."""
    self.handle, self.type, self.dtype = handle, type, type.scalar
    self.numel, self.shape = type.of_tensors if type.is_block() else _SCALAR


def broadcast(self: Any, first: Any, other: Any) -> tuple[Any, Any]:
    """Two values in one shape."""
    if first.type.is_block() and other.type.is_block() and first.type.shape is other.type.shape:
        return first, other
    pair: tuple[Any, Any] = _BROADCAST(self, first, other)
    return pair


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
