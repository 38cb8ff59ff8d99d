"""Rows of x gathered by a row operation, then the plain product of them. ``dispatch/gather.py`` says when."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch

from ...artifacts.records.problem import Fusion, Problem
from ...kernels.contract.rowops import BY_TOKEN, NOTED_ROWS, NOTES, USED
from ..dispatch.gather_by_token import by_token
from ..driver.device import Allocator, allocator, local_gpu

if TYPE_CHECKING:
    from ..dispatch.snapshot import Snapshot, Usable
    from ..driver.launcher import Launcher
    from .gemm import LoadedKernel


class _Packed(NamedTuple):
    """A call of ``GatherFirst``: memory for the rows, what the pass reads, and the product's packed words."""

    scratch: torch.Tensor
    x: int
    index_at: int
    used: int
    slots: int
    product: bytes


class GatherFirst:
    """Launches the pass and then the product of its rows: used as a ``Launcher`` is, with three words more.

    The address ``index_in_range`` is read by the pass, and unlike ``index`` has no entry that x has no row for; 0 says
    that index is such. At the address ``used`` stands how many rows belong to an expert, the others are not gathered; 0
    for all of them. ``slots`` is the number of x's rows times the divisor.
    The scratch is torch's, of its current stream, which ``stream`` has to be: in a graph capture, of the graph's pool.
    """

    __slots__ = (
        "_columns",
        "_divisor",
        "_dtype",
        "_empty",
        "_gather",
        "_indexed",
        "_picks",
        "_product",
        "_step",
        "zeroes",
    )

    def __init__(
        self, gather: Gather, product: Launcher, like: torch.Tensor, columns: int, divisor: int,
        index_step: int, fusion: Fusion,
    ) -> None:  # fmt: skip
        self._gather, self._product = gather, product
        self._empty, self._dtype, self._columns = allocator(like.device), like.dtype, columns
        self._divisor, self._step = divisor, index_step
        self._indexed = bool(fusion & ~Fusion.SILU)
        self._picks = bool(fusion & (Fusion.SCATTER | Fusion.WEIGHT))
        self.zeroes = product.zeroes

    def pack(
        self, *, x: int, M: int, index: int, slots: int, index_in_range: int = 0, used: int = 0, index_end: int = 0,
        **words: int,
    ) -> _Packed:  # fmt: skip
        """The call, with memory for its rows; nothing is launched yet."""
        K = self._columns
        scratch = self._empty((M, K), (K, 1), self._dtype)
        words |= {"x": scratch.data_ptr(), "M": M, "stride_x_m": K, "index": index if self._picks else 0,
                  "index_end": index_end if self._indexed else 0}  # fmt: skip
        return _Packed(scratch, x, index_in_range or index, used, slots, self._product.pack(**words))

    def start(self, packed: _Packed, result: int, m_sizes: int, stream: int) -> None:
        """Launch both."""
        scratch = packed.scratch
        gather(
            self._gather, self._empty, packed.x, packed.index_at, packed.used, scratch.data_ptr(), M=scratch.shape[0],
            columns=self._columns, itemsize=self._dtype.itemsize, slots=packed.slots, top_k=self._divisor,
            index_step=self._step,
        )  # fmt: skip
        self._product.start(packed.product, result, m_sizes, stream)

    def __call__(self, result: int, m_sizes: int, stream: int, **words: int) -> None:
        self.start(self.pack(**words), result, m_sizes, stream)


class Launch(Protocol):
    """What launches a product: a ``Launcher``, or a ``GatherFirst``, which is used alike."""

    @property
    def pack(self) -> Callable[..., Any]: ...
    @property
    def start(self) -> Callable[[Any, int, int, int], None]: ...
    @property
    def zeroes(self) -> bool: ...
    def __call__(self, result: int, m_sizes: int, stream: int, **words: int) -> None: ...


def in_range(index: torch.Tensor, rows: int, divisor: int) -> torch.Tensor:
    """The index as the pass may read it: one that x [rows, K] has no row for becomes another, whose row is not used."""
    return index.clamp(0, rows * divisor - 1)


def kernel(
    snapshot: Snapshot, problem: Problem, M: int, device: int, *, top_k: int, fusion: Fusion = Fusion.GATHER,
    aligned: bool = True, checks: bool = False,
) -> LoadedKernel | None:  # fmt: skip
    """The variant that ``verdict`` names, loaded on ``cuda:device``; None where the code that gathers is to run."""
    from ..dispatch.gather import verdict  # here, as only a first launch needs them
    from .loader import load_first

    local = local_gpu(device)

    def choose() -> tuple[Usable, int] | None:
        chosen = verdict(snapshot, problem, M, local, top_k=top_k, fusion=fusion, aligned=aligned, checks=checks).chosen
        return None if chosen is None else (chosen.usable, chosen.index)

    return load_first(snapshot, choose, local, device)


class Gather(Protocol):
    """A ``PassLauncher`` of Pass.GATHER."""

    def __call__(self, rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None: ...


def gather(
    launch: Gather, empty: Allocator, x: int, index: int, used: int, out: int, *, M: int, columns: int, itemsize: int,
    slots: int, top_k: int, index_step: int,
) -> None:  # fmt: skip
    """out[i] = x[index[i] // top_k] for the addresses of dense x [slots // top_k, columns], index [M] and out.

    Each index is within [0, slots). At ``used`` stands how many of the rows count, 0 for all. ``empty`` makes scratch
    memory on the current stream.
    """
    flags = USED if used else 0
    if not by_token(M, columns * itemsize, slots, top_k):
        launch(M, columns, (x, index, used, out), (M, columns, top_k, index_step, flags))
        return
    noted = empty((1 + slots,), (1,), torch.int32)
    words, looks = noted.data_ptr(), -(-M // NOTED_ROWS)
    launch(looks, columns, (x, index, used, words), (M, columns, slots, index_step, flags | NOTES))
    tokens = slots // top_k
    launch(tokens + looks, columns, (x, index, words, out), (M, columns, top_k, index_step, BY_TOKEN))
