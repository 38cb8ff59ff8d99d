"""Quantise the weights of a step in fp8 where they are needed, or once in a block in which nobody writes them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch.utils.weak import WeakTensorKeyDictionary

from ...artifacts.records import Layout
from ...artifacts.tuples import NamedTuple
from ..launch.program import EAGER, EagerExecutor
from ..settings import lock
from ..weights.expert_weights import ExpertWeights, version_of
from .fp8_codes import quantise_weights


class Fp8Weights(NamedTuple):
    """w of E experts in fp8 that a block keeps for forwards, [E, N, K], and for their backwards, [E, K, N].

    None if the forward, or the backward, quantises w itself.
    """

    of_forward: ExpertWeights | None
    of_dx: ExpertWeights | None


NOTHING_KEPT = Fp8Weights(None, None)


class _Kept(NamedTuple):
    """A tensor's weights in fp8, and the tensor's state when it was quantised."""

    state: tuple[object, ...]
    weights: Fp8Weights


_blocks = 0  # open blocks of all threads
_kept: WeakTensorKeyDictionary = WeakTensorKeyDictionary()  # weak keys: the callers' tensors are not kept alive


@contextlib.contextmanager
def reuse_fp8_weights() -> Iterator[None]:
    """Quantise each weight once for all ``precision="fp8"`` calls of a ``with`` block, such as a step's micro-batches.

    Until the block ends, no weight may be written: torch does not count every write (``.data``, collectives of FSDP),
    so a write can't be noticed for certain. Close the block before ``optimizer.step()``. A weight whose count, address
    or strides changed is quantised again. The block is the process's, and blocks may be nested.

    Without a block, every forward and every backward quantises the weights that it reads, and keeps none of them. In a
    block both directions are kept until it ends: 2 bytes for each weight.

    Returns
    -------
    contextlib.AbstractContextManager
        The block's context, for ``with``.
    """
    global _blocks
    with lock("fp8 weights"):
        _blocks += 1
    try:
        yield
    finally:
        with lock("fp8 weights"):
            _blocks -= 1
            if not _blocks:
                _kept.clear()


def in_block(owner: torch.Tensor, w: torch.Tensor, layout: Layout, *, learns: bool) -> Fp8Weights:
    """w [E, N, K], or [E, K, N] with ``Layout.KN``, in fp8, as an open block keeps it for ``owner``.

    ``owner`` is the caller's tensor, of which w may be a view. ``learns``: a backward follows. Without a block nothing
    is kept.
    """
    if not _blocks:
        return NOTHING_KEPT
    w = w.detach()
    state = (version_of(owner), owner.data_ptr(), owner.dtype, w.shape, w.stride(), layout, torch.is_inference(owner))
    kept: _Kept | None = _kept.get(owner)  # type: ignore[no-untyped-call]
    if kept is not None and kept.state == state:
        return kept.weights
    if not learns:  # an evaluation's forward needs one direction, and its weights are not kept
        return NOTHING_KEPT
    weights = Fp8Weights(*_both(w, layout))
    with lock("fp8 weights"):
        if _blocks:
            _kept[owner] = _Kept(state, weights)
    return weights


def of_forward(w: torch.Tensor, layout: Layout, executor: EagerExecutor = EAGER) -> ExpertWeights:
    """w in fp8 as y = x @ w.T reads it, [E, N, K]."""
    return _always(w.detach(), layout, executor, transposed=False)


def of_dx(w: torch.Tensor, layout: Layout, executor: EagerExecutor = EAGER) -> ExpertWeights:
    """w in fp8 as dx = dy @ w reads it, [E, K, N]."""
    return _always(w.detach(), layout, executor, transposed=True)


def _always(w: torch.Tensor, layout: Layout, executor: EagerExecutor, *, transposed: bool) -> ExpertWeights:
    """One direction of w."""
    columns = transposed is (layout is Layout.NK)
    pair = quantise_weights(_dense_rows(w), rows=not columns, columns=columns, executor=executor)
    weights = pair[columns]
    if weights is None:
        raise AssertionError("the direction was asked for")
    weights.always_quantises = True
    return weights


def _both(w: torch.Tensor, layout: Layout) -> tuple[ExpertWeights, ExpertWeights]:
    """Quantise w for the forward and for dX in one read."""
    rows, columns = quantise_weights(_dense_rows(w), rows=True, columns=True)
    if rows is None or columns is None:
        raise AssertionError("both directions were asked for")
    rows.always_quantises = columns.always_quantises = True
    return (rows, columns) if layout is Layout.NK else (columns, rows)


def _dense_rows(w: torch.Tensor) -> torch.Tensor:
    return w if w.stride(2) == 1 else w.contiguous()
