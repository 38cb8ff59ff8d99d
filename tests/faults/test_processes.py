"""Many processes, each with many threads, load one bundle: all succeed."""

from __future__ import annotations

import multiprocessing
import threading
from pathlib import Path

import golden_bundles
import pytest

from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.locking import lock
from pretuned.artifacts.publishing import publish

pytestmark = pytest.mark.slow

BUNDLE = golden_bundles.medium()


def load(path: Path, rounds: int, wrong: list[object]) -> None:
    """Open, look up, read a cubin: each time from the start."""
    try:
        for turn in range(rounds):
            with lock(path.parent, 0.1), open_bundle(path) as file:
                problem = file.problems()[turn % 12]
                choices = file.find(problem)
                cubin = file.cubin(choices[0].variant)
            if choices != BUNDLE.choices[problem] or cubin != BUNDLE.cubins[choices[0].variant]:
                wrong.append(problem)
    except BaseException as error:
        wrong.append(error)
        raise


def process(path: Path, threads: int, rounds: int) -> None:
    """One process; its exit status says whether all of its threads got what they should."""
    wrong: list[object] = []
    workers = [threading.Thread(target=load, args=(path, rounds, wrong)) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    raise SystemExit(1 if wrong else 0)


def race(folder: Path, processes: int, threads: int, rounds: int) -> list[int | None]:
    """The exit statuses of so many processes."""
    path = folder / "b.msgpack"
    publish(path, codec.encode(BUNDLE))
    context = multiprocessing.get_context("fork")
    workers = [context.Process(target=process, args=(path, threads, rounds)) for _ in range(processes)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    return [worker.exitcode for worker in workers]


@pytest.mark.parametrize(("processes", "rounds"), [(16, 15), pytest.param(64, 30, marks=pytest.mark.nightly)])
def test_all_succeed(tmp_path, processes, rounds):
    assert race(tmp_path, processes=processes, threads=8, rounds=rounds) == [0] * processes
