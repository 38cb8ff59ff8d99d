"""Checks tensors that a backward gets back: hooks on saved tensors may return others than the forward saved.

``torch.autograd.graph.saved_tensors_hooks`` lets anyone offload, compress or replace what a forward saves. A kernel
reads addresses, so another dtype or shape would be read as other numbers, and past a tensor's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.tuples import NamedTuple
from .tensors import PLAIN, in_memory, rows_usable

INDICES = (torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# Of each saved tensor, None of none.
Kinds: TypeAlias = "tuple[tuple[torch.dtype, torch.Size, torch.device] | None, ...]"


def kinds_of(every: Sequence[torch.Tensor | None]) -> Kinds:
    """The properties that ``as_kept`` compares. Reading them takes time: hot calls derive them from other tensors."""
    return tuple(None if one is None else (one.dtype, one.shape, one.device) for one in every)


def as_kept(call: str, names: str, every: Sequence[torch.Tensor | None], kinds: Kinds) -> list[torch.Tensor | None]:
    """Saved tensors with rows that a call takes; InputError names the first that a hook made another tensor of.

    While a graph is traced there are no hooks, and nothing is compared.
    """
    if any(one is not None and type(one) not in PLAIN for one in every):
        return list(every)
    found: list[torch.Tensor | None] = []
    for name, one, kind in zip(names.split(), every, kinds, strict=True):
        if one is not None and kind is not None:
            dtype, shape, device = kind
            one = Saved(call, dtype, device)._checked(name, one, tuple(shape), (dtype,))
            one = one if not one.dim() or one.shape[-1] <= 1 or one.stride(-1) == 1 else one.contiguous()
        found.append(one)
    return found


class Saved(NamedTuple):
    """The common properties of one backward's saved tensors: the ``call``'s name, its element type and device."""

    call: str
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def beside(cls, call: str, dy: torch.Tensor) -> Saved:
        """Saved tensors of a call whose result has the gradient ``dy``: autograd has compared the two."""
        return cls(call, dy.dtype, dy.device)

    def whole(
        self, name: str, one: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.Tensor:
        """The tensor, contiguous.

        Parameters
        ----------
        name
            What the caller knows it by.
        shape
            What the forward saved; -1 stands for any size.
        dtypes
            What the forward may have saved; none: the dtype of the call.

        Raises
        ------
        InputError
            for another shape, dtype or device.
        """
        return self._checked(name, one, shape, dtypes).contiguous()

    def of_dtype(self, name: str, one: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, if it has this dtype; else InputError."""
        return one if one.dtype is dtype else self._checked(name, one, tuple(one.shape), (dtype,))

    def rows(self, name: str, one: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """A matrix, checked like ``whole``; its rows may be apart."""
        one = self._checked(name, one, shape, ())
        return one if rows_usable(one) else one.contiguous()

    def weights(self, name: str, one: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Experts' matrices, checked like ``whole``; rows and matrices may be apart."""
        one = self._checked(name, one, shape, ())
        return one if one.shape[2] <= 1 or one.stride(2) == 1 else one.contiguous()

    def _checked(
        self, name: str, one: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor:
        dtypes = dtypes or (self.dtype,)
        same = len(shape) == one.dim() and all(size in (-1, own) for size, own in zip(shape, one.shape, strict=True))
        if one.dtype in dtypes and same and one.device == self.device:
            return in_memory(name, one, self.call)
        wanted = " or ".join(map(str, dtypes))
        raise InputError(
            f"{self.call}: a hook on saved tensors made {one.dtype} {list(one.shape)} on {one.device} of {name}, "
            f"wanted {wanted} {['any' if size < 0 else size for size in shape]} on {self.device}: the unpack_hook of "
            "torch.autograd.graph.saved_tensors_hooks has to return a tensor equal to what was packed"
        )
