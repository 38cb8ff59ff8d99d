"""Counters by which a kernel's programs take tiles: an int32 each on the device, zero before and after each launch.

Launches of one stream run one after another, so each stream has a counter. A launch that a graph captures has its own
counter: the graph may be replayed on any stream.
"""

from __future__ import annotations

import threading

import torch

from ..settings import lock
from . import cuda

_BLOCK_WORDS = 16384  # 64 KiB of device memory at a time
_WORD_BYTES = 4
_PER_THREAD_STREAM = 2  # cudaStreamPerThread: one handle, but a different stream in each thread


class Counters:
    """The counters of one device. Any thread may take one."""

    def __init__(self, device: int) -> None:
        self._device = device
        self._by_stream: dict[tuple[int, int], int] = {}
        self._next = self._end = 0

    def take(self, stream: int) -> int:
        """The address of a zeroed counter for a launch on ``stream``, which must be torch's current stream.

        Raises
        ------
        CudaError
            if the driver refuses new memory.
        """
        if torch.cuda.is_current_stream_capturing():
            return self._new()
        key = stream, threading.get_ident() if stream == _PER_THREAD_STREAM else 0
        word = self._by_stream.get(key)
        if word is None:
            word = self._by_stream.setdefault(key, self._new())
        return word

    def forget(self, stream: int) -> None:
        """Have the next launch on ``stream`` take another counter: its present one may not be zero."""
        for key in [key for key in self._by_stream if key[0] == stream]:
            self._by_stream.pop(key, None)

    def _new(self) -> int:
        with lock("counters"):
            if self._next == self._end:
                self._next = cuda.zeroed(_BLOCK_WORDS * _WORD_BYTES, self._device)
                self._end = self._next + _BLOCK_WORDS * _WORD_BYTES
            word = self._next
            self._next += _WORD_BYTES
            return word
