"""Triton's interpreter with less to do: the programs that interpret kernels import it for that.

By itself it reduces and scans with a kernel's own function element by element; here it takes whole axes, as compiled
code may: the functions are associative. And it puts its own functions into ``triton.language`` at each call of one
function by another; here once a launch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import triton.language as tl
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


def launched(self: Any, *args: Any, **kwargs: Any) -> None:
    """A kernel."""
    _patched.clear()
    _LAUNCH(self, *args, **kwargs)


def called(self: Any, *args: Any, **kwargs: Any) -> Any:
    """One function by another."""
    seen = {id(one) for one in self.fn.__globals__.values() if one is tl or one is tl.core}
    if not seen <= _patched:
        interpreter._patch_lang(self.fn)
        _patched.update(seen)
    return self.rewrite()(*args, **kwargs)


interpreter.GridExecutor.__call__ = launched
interpreter.InterpretedFunction.__call__ = called
interpreter.ReduceOps.generic_reduce = generic_reduce
interpreter.ScanOps.generic_scan = generic_scan
