"""Checks the saved tensors of a backward: hooks may return other tensors than the forward saved.

``torch.autograd.graph.saved_tensors_hooks`` lets anyone offload, compress or replace what a forward saves. A kernel
reads addresses, so with another dtype or shape it would read wrong numbers, or past a tensor's end.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, TypeAlias

import torch

from ...artifacts.errors import InputError
from ...artifacts.tuples import NamedTuple
from .tensors import PLAIN, in_memory, rows_usable

if TYPE_CHECKING:
    from ..weights.expert_weights import ExpertWeights

INDICES = (torch.int32, torch.int64)
FLOATS = (torch.bfloat16, torch.float16, torch.float32, torch.float64)


# The dtype, shape and device of each saved tensor; None for a tensor that is None.
Kinds: TypeAlias = "tuple[tuple[torch.dtype, torch.Size, torch.device] | None, ...]"


def kinds_of(tensors: Sequence[torch.Tensor | None]) -> Kinds:
    """The properties that ``as_kept`` compares. Reading them takes time: hot calls derive them from other tensors."""
    return tuple(None if tensor is None else (tensor.dtype, tensor.shape, tensor.device) for tensor in tensors)


def as_kept(call: str, names: str, tensors: Sequence[torch.Tensor | None], kinds: Kinds) -> list[torch.Tensor | None]:
    """Saved tensors as kernels read them. InputError if a hook changed a tensor's dtype, shape or device.

    While torch traces a graph, no hooks run, and nothing is compared.
    """
    if any(tensor is not None and type(tensor) not in PLAIN for tensor in tensors):
        return list(tensors)
    checked: list[torch.Tensor | None] = []
    for name, tensor, kind in zip(names.split(), tensors, kinds, strict=True):
        if tensor is not None and kind is not None:
            dtype, shape, device = kind
            tensor = Saved(call, dtype, device)._checked(name, tensor, tuple(shape), (dtype,))
            if tensor.dim() and tensor.shape[-1] > 1 and tensor.stride(-1) != 1:
                tensor = tensor.contiguous()
        checked.append(tensor)
    return checked


class Frozen(NamedTuple):
    """Quantised weights that a forward saves, and how often their codes and scales had been written by then.

    torch compares versions of the tensors that a function saves; ``ExpertWeights`` is not a tensor.
    """

    weights: ExpertWeights
    writes: int

    @classmethod
    def of(cls, w: ExpertWeights) -> Frozen:
        """The weights, with their present number of writes."""
        return cls(w, _writes(w))

    def unchanged(self) -> ExpertWeights:
        """Return the weights, which must not have been written since the forward.

        Raises
        ------
        InputError
            if codes or scales were written since the forward: the gradients would be of other weights.
        """
        if _writes(self.weights) != self.writes:
            raise InputError(
                "quantised weights were written after a forward that a backward still has to read: gradients would be "
                "those of the new numbers. Run the backward before copy_, quantize(out=), prepare_in_place or "
                "restore_in_place, or the forward again"
            )
        return self.weights


def _writes(w: ExpertWeights) -> int:
    """The number of writes to codes and scales; torch counts no writes to inference tensors."""
    return sum(0 if tensor.is_inference() else tensor._version for tensor in (w.codes, w.scale))


class Saved(NamedTuple):
    """The common properties of one backward's saved tensors: the ``call``'s name, its element type and device."""

    call: str
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def beside(cls, call: str, dy: torch.Tensor) -> Saved:
        """The properties that saved tensors must have: dtype and device of ``dy``, which autograd compared with y's."""
        return cls(call, dy.dtype, dy.device)

    def whole(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = ()
    ) -> torch.Tensor:
        """Check a tensor and return it contiguous.

        Parameters
        ----------
        name
            Its name in error messages.
        shape
            The shape that the forward saved; -1 means any size.
        dtypes
            The dtypes that the forward may have saved; empty: the call's dtype.

        Raises
        ------
        InputError
            for another shape, dtype or device.
        """
        return self._checked(name, tensor, shape, dtypes).contiguous()

    def of_dtype(self, name: str, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """The tensor, if it has this dtype; else InputError."""
        return tensor if tensor.dtype is dtype else self._checked(name, tensor, tuple(tensor.shape), (dtype,))

    def rows(self, name: str, tensor: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
        """Return a matrix, checked like ``whole``; its rows may be strided."""
        tensor = self._checked(name, tensor, shape, ())
        return tensor if rows_usable(tensor) else tensor.contiguous()

    def weights(self, name: str, tensor: torch.Tensor, shape: tuple[int, int, int]) -> torch.Tensor:
        """Return experts' matrices, checked like ``whole``; rows and matrices may be strided."""
        tensor = self._checked(name, tensor, shape, ())
        return tensor if tensor.shape[2] <= 1 or tensor.stride(2) == 1 else tensor.contiguous()

    def _checked(
        self, name: str, tensor: torch.Tensor, shape: tuple[int, ...], dtypes: tuple[torch.dtype, ...]
    ) -> torch.Tensor:
        dtypes = dtypes or (self.dtype,)
        same = len(shape) == tensor.dim() and all(
            size in (-1, own) for size, own in zip(shape, tensor.shape, strict=True)
        )
        if tensor.dtype in dtypes and same and tensor.device == self.device:
            return in_memory(name, tensor, self.call)
        wanted = " or ".join(map(str, dtypes))
        raise InputError(
            f"{self.call}: a hook on saved tensors made {tensor.dtype} {list(tensor.shape)} on {tensor.device} "
            f"of {name}, wanted {wanted} {['any' if size < 0 else size for size in shape]} on {self.device}: the "
            "unpack_hook of torch.autograd.graph.saved_tensors_hooks has to return a tensor equal to what was packed"
        )
