"""A Dask worker's answers, sent and read back, and malformed answers."""

from __future__ import annotations

import pickle

import msgpack
import pytest

from pretuned.aot.executors.dask_worker import info_bytes, info_of, result_bytes, result_of
from pretuned.aot.journal.records import DIED, Failure, Incumbent, Measured, Rematch, Timing
from pretuned.aot.measure.job import MeasureResult, WorkerInfo
from pretuned.artifacts.records import DType, Gpu, Op, Problem

PROBLEM = Problem(Op.FORWARD, DType.BF16, 8, 1024, 768)
A, B = b"\1" * 32, b"\2" * 32
INFO = WorkerInfo(90, Gpu("NVIDIA H200", 132, 143771, 12080), ("its clock is low",), "GPU-1")
MEASURED = Measured(
    PROBLEM,
    64,
    A,
    (Timing(A, (10, 11), 0.1, 20, 0.01), Timing(B, (9, 9), 0.1, 20, 0.01)),
    Rematch(B, A, (9, 9), (10, 11), 0.9, 0.02),
    (30,),
    1.01,
    12080,
    (A, (5,)),
    (Incumbent(A, B),),
)
RESULT = MeasureResult(MEASURED, (Failure(PROBLEM, 64, B, DIED, "it died"),), True, ("a note",))


def test_there_and_back() -> None:
    assert info_of(info_bytes(INFO)) == INFO
    assert result_of(result_bytes(RESULT)) == RESULT
    assert result_of(result_bytes(MeasureResult(None))) == MeasureResult(None)


@pytest.mark.parametrize(
    "answer",
    [
        None,
        INFO,
        RESULT,
        [1],
        "text",
        b"",
        b"\xc1",
        pickle.dumps(RESULT),
        b"\xdd\xff\xff\xff\xff",
        b"\x91" * 5000,
        msgpack.packb(["result"]),
        msgpack.packb(["result", 1, [], False, []]),
        msgpack.packb(["result", {}, [], False, []]),
        msgpack.packb(["result", None, None, False, []]),
        msgpack.packb(["result", None, [None], False, []]),
        msgpack.packb(["result", None, [], 0, []]),
        msgpack.packb(["result", None, [], False, [1]]),
        msgpack.packb(["result", None, [], False, ["x" * 70_000]]),
        msgpack.packb(["info", 90, [], [], ""]),
        msgpack.packb(["info", 90, ["x", 1, 2], [], ""]),
        msgpack.packb(["info", 90, ["x", 1, 2, -3], [], ""]),
        msgpack.packb(["info", True, ["x", 1, 2, 3], [], ""]),
        msgpack.packb(["info", 90, [1, 1, 2, 3], [], ""]),
        msgpack.packb(["info", 90, ["x", 1, 2, 3], "note", ""]),
        msgpack.packb(["info", 90, "abcd", [], ""]),
        msgpack.packb(["info", 90, ["x", 1, 2, 3], [], None]),
    ],
)
def test_an_answer_that_is_none(answer: object) -> None:
    for read in (info_of, result_of):
        with pytest.raises(ValueError, match=r"."):
            read(answer)


def test_records_in_each_others_place() -> None:
    whole = msgpack.unpackb(result_bytes(RESULT))
    for swapped in (
        [*whole[:1], whole[2][0], *whole[2:]],
        [*whole[:2], [whole[1]], *whole[3:]],
    ):
        with pytest.raises(ValueError, match="in each other's place"):
            result_of(msgpack.packb(swapped))
