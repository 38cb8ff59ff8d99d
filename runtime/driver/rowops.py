"""The launcher of a row kernel: its programs are counted by the kernel's blocks."""

from __future__ import annotations

from collections.abc import Mapping

from ...artifacts.errors import InputError
from ...artifacts.records import RowOp, Variant
from ...kernels.rowops import Block, most_programs, programs, rows_at_once
from . import cuda
from .device import local_gpu
from .launcher import MOST_PROGRAMS, Behind, Launcher, Run, moved_by, shifts_of


class RowOpLauncher(Launcher):
    """Launches one row kernel. It does not synchronise, and any thread may call it.

    Raises
    ------
    InputError
        if a launch can't have so many programs.
    CudaError
        if the driver refuses the launch.
    """

    __slots__ = ("_at_once", "_launch", "_most", "_op", "block", "most_experts")

    def __init__(self, variant: Variant, function: cuda.Function, op: RowOp) -> None:
        super().__init__(variant, function, variant.entry, fixed={}, shapes={}, each=("M",))
        self._launch = self._blocks.whole()
        self._op, self._at_once = op, rows_at_once(op)
        self._most = most_programs(op, local_gpu(function.device).gpu.sm_count * function.per_sm)
        self.block, self.most_experts = Block.from_pairs(variant.config).block, variant.max_experts

    def __call__(self, rows: int, stream: int, words: Mapping[str, int]) -> None:
        """Launch the kernel on ``rows`` rows.

        ``words`` has the arguments by name. Missing pointers are null.
        """
        count = programs(self._op, rows, words.get("columns", 0), self.block, self._at_once)
        if count > MOST_PROGRAMS:
            raise _too_many(rows, words.get("columns", 0), count)
        try:
            addresses = self._pick(words)
        except KeyError:
            addresses = self._pick({**dict.fromkeys(self.operands, 0), **words})
        self._launch((words["M"], *self._numbers(words), count, self._layout.tail, stream, *addresses))

    def _bind(self, *, behind: Behind = (), per: int = 1, **numbers: int) -> Run:
        rest, shifts, launch, tail = (
            self._numbers(numbers),
            shifts_of(behind, self.operands),
            self._launch,
            self._layout.tail,
        )
        columns, op, block, at_once = numbers.get("columns", 0), self._op, self.block, self._at_once
        most = MOST_PROGRAMS if self._most is None else self._most

        def run(M: int, stream: int, *addresses: int) -> None:
            M //= per
            count = programs(op, M, columns, block, at_once)
            if count > MOST_PROGRAMS:
                raise _too_many(M, columns, count)
            moved = moved_by(addresses, shifts, M) if shifts else addresses
            launch((M, *rest, min(count, most), tail, stream, *moved))

        return run


def _too_many(rows: int, columns: int, count: int) -> InputError:
    return InputError(f"{rows} rows of {columns} columns make {count} programs, the most is 2^30: split them")
