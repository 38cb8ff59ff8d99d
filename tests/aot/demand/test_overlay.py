"""The overlay's file: bounded, pruned, whole under concurrent writers."""

from __future__ import annotations

import errno
import multiprocessing
import os
from collections.abc import Callable
from pathlib import Path

import fakemeasure
import pytest
from fakemeasure import CONFIG, H100, H200

from pretuned.aot.demand import tuner
from pretuned.aot.models.layer import LayerShard
from pretuned.aot.plan.plan import BuildPlan, plan
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import HostError
from pretuned.artifacts.locking import lock
from pretuned.artifacts.records import Bundle, DType, Gpu, Op, Problem
from pretuned.kernels.registry import ENTRIES
from pretuned.kernels.spec import Config, Loads

OTHER = Config(128, 128, 64, 8, 3, loads=Loads.TMA)


def planned(E: int, tokens: int = 64) -> BuildPlan:
    shape = LayerShard(f"E{E}", E, 2, 256, 128, 0, True, (DType.BF16,), 1, 1, (tokens, tokens), tuple(Op))
    return plan([shape])


def problems(bundle: Bundle) -> set[int]:
    return {problem.E for problem in bundle.choices}


def test_the_first_entry_and_what_is_added(tmp_path: Path) -> None:
    path = tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8)))
    assert path == tuner.path_of(tmp_path, 90, H200)
    assert path.name == "tuned-f2-a1-sm90-nvidia-h200-132.msgpack"
    tuner.add(tmp_path, H200, fakemeasure.bundle(planned(16), config=OTHER))
    tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8, 4096)))
    with open_bundle(path) as file:
        held = file.load()
    assert problems(held) == {8, 16}
    assert [model.name for model in held.models] == [f"on-demand/{i:08d} E{E}" for i, E in ((1, 8), (2, 16), (3, 8))]
    some = next(problem for problem in held.choices if problem.E == 8)
    assert [choice.bucket for choice in held.choices[some]] == [128, 8192]
    assert codec.encode(held) == path.read_bytes()


def test_what_is_measured_again_replaces_what_was_there(tmp_path: Path) -> None:
    slower = fakemeasure.bundle(planned(8), config=OTHER)
    slower = slower._replace(
        choices={
            problem: tuple(choice._replace(time_ns=9000) for choice in row) for problem, row in slower.choices.items()
        },
    )
    both = tuner.joined(slower, tuner.joined(fakemeasure.bundle(planned(8)), None))
    assert {choice.time_ns for row in both.choices.values() for choice in row} == {9000}
    used = {both.variants[choice.variant].config for row in both.choices.values() for choice in row}
    assert used == {OTHER.pairs()}


def test_entries_of_earlier_revisions_go() -> None:
    old = tuner.joined(fakemeasure.bundle(planned(8), revision=0), None)
    new = tuner.joined(fakemeasure.bundle(planned(16)), old)
    assert problems(new) == {16}
    assert new.variants
    assert all(variant.revision == ENTRIES[variant.kernel].revision for variant in new.variants)


def test_entries_of_a_later_revision_stay() -> None:
    later = max(entry.revision for entry in ENTRIES.values()) + 1
    old = tuner.joined(fakemeasure.bundle(planned(8), revision=later), None)
    assert problems(tuner.joined(fakemeasure.bundle(planned(16)), old)) == {8, 16}


def test_the_oldest_entries_go_where_there_are_too_many() -> None:
    held: Bundle | None = None
    for E in range(8, 20):
        held = tuner.joined(fakemeasure.bundle(planned(E)), held, max_entries=5)
    assert held is not None
    assert problems(held) == {15, 16, 17, 18, 19}
    assert len(held.models) == 5


@pytest.mark.slow
def test_the_oldest_entries_go_where_the_file_grows_too_large() -> None:
    held: Bundle | None = None
    sizes = []
    for E in range(8, 24):
        config = Config(16 << E % 4, 16 << E // 4 % 4, 64, 4, 3, loads=Loads.TMA)
        bundle = fakemeasure.bundle(planned(E), config=config, code_bytes=32 << 10)
        held = tuner.joined(bundle, held, max_bytes=4 << 20)
        sizes.append(len(codec.encode(held)))
    assert held is not None
    assert max(sizes) <= 4 << 20
    assert 23 in problems(held)
    assert 2 <= len(held.models) < 12
    assert min(problems(held)) == 24 - len(held.models)  # the newest ones stayed
    alone = tuner.joined(fakemeasure.bundle(planned(99), code_bytes=1 << 20), held, max_bytes=1 << 20)
    assert problems(alone) == {99}


def test_each_kind_of_gpu_has_its_file(tmp_path: Path) -> None:
    mig = Gpu("NVIDIA H200 MIG 1g.18gb", 16, 18000, 12080)
    names = {tuner.path_of(tmp_path, 90, gpu).name for gpu in (H100, H200, mig)}
    assert len(names) == 3
    assert all(name.startswith("tuned-f2-a1-sm90-nvidia-h") for name in names)


def test_a_damaged_file_is_begun_anew(tmp_path: Path) -> None:
    path = tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8)))
    path.write_bytes(path.read_bytes()[:-1])
    messages: list[str] = []
    tuner.add(tmp_path, H200, fakemeasure.bundle(planned(16)), note=messages.append)
    with open_bundle(path) as file:
        assert problems(file.load()) == {16}
    assert len(messages) == 1
    assert "can't be kept" in messages[0]


@pytest.mark.parametrize("how", ["untrusted", "unreadable"])
def test_a_file_that_may_be_as_good_as_ever_is_left_alone(
    tmp_path: Path, how: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tuner.add(tmp_path / "a", H200, fakemeasure.bundle(planned(8)))
    if how == "untrusted":
        tmp_path.chmod(0o777)
    else:

        def opened(name: str, *how: int, real: Callable[..., int] = os.open, **more: int) -> int:
            if name == str(path):
                raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))
            return real(name, *how, **more)

        monkeypatch.setattr(os, "open", opened)
    with pytest.raises(HostError, match="nothing can be added to"):
        tuner.add(tmp_path / "a", H200, fakemeasure.bundle(planned(16)))
    monkeypatch.undo()
    tmp_path.chmod(0o755)
    with open_bundle(path) as file:
        assert problems(file.load()) == {8}


def test_other_sources_under_one_revision_are_dropped() -> None:
    old = tuner.joined(fakemeasure.bundle(planned(8)), None)
    changed = tuple(kernel._replace(source_sha256=bytes(32)) for kernel in old.kernels)
    messages: list[str] = []
    new = tuner.joined(fakemeasure.bundle(planned(16)), old._replace(kernels=changed), messages.append)
    assert problems(new) == {16}
    assert "changed sources" in messages[0]


def test_files_that_nothing_reads_any_more_are_removed(tmp_path: Path) -> None:
    outdated = tmp_path / "tuned-f1-a1-sm90-x-1.msgpack", tmp_path / "tuned-f2-a0-sm90-x-1.msgpack"
    others = tmp_path / "tuned-f9-a9-sm90-x-1.msgpack", tmp_path / "mine.msgpack"
    for path in (*outdated, *others):
        path.write_bytes(b"")
    tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8)))
    assert not any(path.exists() for path in outdated)
    assert all(path.exists() for path in others)


def test_a_lock_that_does_not_come_costs_the_entry(tmp_path: Path) -> None:
    tuned = fakemeasure.bundle(planned(8))
    with lock(tmp_path, 0.0), pytest.raises(HostError, match="can't lock"):
        tuner.add(tmp_path, H200, tuned, timeout_s=0.1)
    assert not list(tmp_path.glob("*.msgpack"))


def test_clear_removes_this_versions_files_alone(tmp_path: Path) -> None:
    path = tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8)))
    (tmp_path / "tuned-f9-a9-sm90-x-1.msgpack").write_bytes(b"")
    (tmp_path / "mine.msgpack").write_bytes(b"")
    tuner.clear(tmp_path)
    assert not path.exists()
    assert sorted(path.name for path in tmp_path.glob("*.msgpack")) == ["mine.msgpack", "tuned-f9-a9-sm90-x-1.msgpack"]
    tuner.clear(tmp_path / "nowhere")


def add_some(folder: Path, first: int) -> None:
    """A writer of four entries."""
    for E in range(first, first + 4):
        tuner.add(folder, H200, fakemeasure.bundle(planned(E)), timeout_s=60.0)


@pytest.mark.slow
def test_writers_take_turns_and_lose_nothing(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=add_some, args=(tmp_path, 10 * i)) for i in range(1, 7)]
    for writer in writers:
        writer.start()
    path = tuner.path_of(tmp_path, 90, H200)
    while any(writer.is_alive() for writer in writers):  # a reader never sees half a file
        if path.exists():
            with open_bundle(path) as file:
                file.load()
    assert [writer.exitcode for writer in writers] == [0] * 6
    with open_bundle(path) as file:
        held = file.load()
    assert problems(held) == {10 * i + j for i in range(1, 7) for j in range(4)}
    assert len({model.name[:18] for model in held.models}) == 24


def test_an_entry_serves_dispatch(tmp_path: Path) -> None:
    from pretuned.runtime.dispatch.decide import Decision, Origin, decide
    from pretuned.runtime.dispatch.places import Kind, Place
    from pretuned.runtime.dispatch.snapshot import Snapshot

    tuner.add(tmp_path, H200, fakemeasure.bundle(planned(8)))
    choice = decide(
        Snapshot([Place(Kind.OVERLAY, tmp_path)]), Problem(Op.DX, DType.BF16, 8, 256, 128), 128, fakemeasure.ON_H200
    )
    assert isinstance(choice, Decision)
    assert choice.chosen.origin is Origin.THIS_GPU
    assert choice.chosen.config == CONFIG
