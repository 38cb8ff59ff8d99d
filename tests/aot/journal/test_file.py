from __future__ import annotations

import json
import lzma
import os
import signal
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pretuned.aot.journal.file import Header, OtherJournal, open_journal, read_journal
from pretuned.aot.journal.records import Failure, Incumbent, Measured, Record, Rematch, Timing, from_value, to_value
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.format import INDEXED
from pretuned.artifacts.records import DType, Fusion, Gpu, Kernel, Layout, Op, Problem

H200 = Gpu("NVIDIA H200", 132, 143771, 13000)
HEADER = Header(90, H200, (Kernel("rows", 1, b"\1" * 32), Kernel("weight", 2, b"\2" * 32)))

shas = st.binary(min_size=32, max_size=32)
times = st.lists(st.integers(1, 10**12), min_size=1, max_size=3).map(tuple)
small = st.floats(0, 1, allow_nan=False)
problems = st.builds(
    Problem,
    st.sampled_from(Op),
    st.sampled_from(DType),
    st.integers(1, 512),
    st.integers(1, 9999),
    st.integers(1, 9999),
    st.sampled_from(Layout),
    st.sampled_from(list(Fusion)),
    st.integers(0, 8),
).map(lambda problem: problem if problem.fusion & INDEXED else problem._replace(top_k=0))
timings = st.builds(Timing, shas, times, small, st.integers(1, 50), small)
duels = st.builds(Rematch, shas, shas, times, times, small, small)
buckets = st.integers(0, 31).map(lambda power: 1 << power)
records: st.SearchStrategy[Record] = st.one_of(
    st.builds(
        Measured,
        problems,
        buckets,
        shas,
        st.lists(timings, max_size=4).map(tuple),
        st.none() | duels,
        st.none() | times,
        small,
        st.integers(0, 20000),
        st.none() | st.tuples(shas, times),
        st.lists(st.builds(Incumbent, shas, shas), max_size=2).map(tuple),
    ),
    st.builds(Failure, problems, buckets, shas, st.sampled_from(["wrong", "hung"]), st.text(max_size=80)),
)


def measured(bucket: int = 16) -> Measured:
    timing = Timing(b"\3" * 32, (10_000, 11_000), 0.001, 20, 0.0017)
    return Measured(Problem(Op.DX, DType.BF16, 8, 256, 128), bucket, b"\3" * 32, (timing,), None, None, 1.01, 13000)


@given(records)
def test_a_record_survives_json(record: Record) -> None:
    assert from_value(json.loads(json.dumps(to_value(record)))) == record


def test_what_ran_before_is_written_only_where_something_did() -> None:
    """So a journal of before, and what an earlier version makes of a new one, are as ever."""
    assert "incumbents" not in to_value(measured())
    value = to_value(replace(measured(), incumbents=(Incumbent(b"\3" * 32, b"\4" * 32),)))
    assert value["incumbents"] == [["03" * 32, "04" * 32]]
    for wrong in ([["03"]], [["03" * 32, 4]], 7, [["03" * 32, "04" * 32, "05" * 32]]):
        with pytest.raises((ValueError, TypeError)):
            from_value({**value, "incumbents": wrong})


def test_a_number_of_another_type_is_refused_after_one_that_equals_it() -> None:
    """Names that were read before are not read anew, and 1, 1.0 and True are one key of a dictionary."""
    value = to_value(replace(measured(), problem=measured().problem._replace(E=1)))
    assert isinstance(from_value(value), Measured)
    for other in (True, 1.0):
        problem = [other if field == 1 and type(field) is int else field for field in value["problem"]]  # type: ignore[attr-defined]
        with pytest.raises(ValueError, match=r"problem\.E is"):
            from_value({**value, "problem": problem})


def test_what_is_appended_is_read_and_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "deep" / "h200.journal"
    with open_journal(path, HEADER) as journal:
        journal.append([measured(1)])
        assert read_journal(path).records == (measured(1),)  # readers need no lock
        journal.append([measured(2), measured(4)])
    with open_journal(path, HEADER) as journal:
        assert journal.contents.records == (measured(1), measured(2), measured(4))
        journal.append([measured(8)])
    contents = read_journal(path)
    assert [record.bucket for record in contents.records] == [1, 2, 4, 8]
    assert contents.damaged == 0
    assert contents.header.kernels == HEADER.kernels
    assert contents.header.gpu == H200
    first = path.read_text().splitlines()[0]
    assert int(first[:8], 16) == zlib.crc32(first[9:].encode())


@pytest.mark.slow
def test_every_cut_is_a_journal_with_fewer_records(tmp_path: Path) -> None:
    path, cut = tmp_path / "whole", tmp_path / "cut"
    with open_journal(path, HEADER) as journal:
        header_bytes = path.stat().st_size
        journal.append([measured(1), measured(2)])
    data = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(data) if byte == ord("\n")]
    for size in range(len(data)):
        cut.write_bytes(data[:size])
        if size >= header_bytes:
            assert len(read_journal(cut).records) == sum(end <= size for end in ends) - 1
        with open_journal(cut, HEADER) as journal:
            kept = list(journal.contents.records)
            journal.append([measured(64)])
        assert list(read_journal(cut).records) == [*kept, measured(64)]
        assert len(kept) == max(0, sum(end <= size for end in ends) - 1)


def test_a_damaged_record_is_left_out_and_told(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_journal(path, HEADER) as journal:
        journal.append([measured(1), measured(2), measured(4)])
    lines = path.read_bytes().splitlines(keepends=True)
    for position in range(len(lines[2]) - 1):
        flipped = bytearray(lines[2])
        flipped[position] ^= 4
        path.write_bytes(b"".join([*lines[:2], bytes(flipped), *lines[3:]]))
        contents = read_journal(path)
        assert [record.bucket for record in contents.records] == [1, 4]
        assert contents.damaged >= 1
    notes: list[str] = []
    with open_journal(path, HEADER, notes.append):
        pass
    assert "damaged records are left out" in notes[0]


def test_a_journal_of_other_routings_is_read_and_not_gone_on_with(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_journal(path, replace(HEADER, routings=("skewed", "even"))) as journal:
        journal.append([measured()])
    contents = read_journal(path)
    assert contents.records == (measured(),)
    assert contents.header.routings == ("skewed", "even")
    before = path.read_bytes()
    wanted = "skewed and even rows.*skewed and uniform ones.*--journal"
    with pytest.raises(InputError, match=wanted), open_journal(path, HEADER):
        pass
    assert path.read_bytes() == before


@pytest.mark.parametrize("routings", [None, [], "skewed", [1], ["\n"]])
def test_routings_that_are_none_are_reported(tmp_path: Path, routings: object) -> None:
    path = tmp_path / "journal"
    with open_journal(path, HEADER):
        pass
    header = json.loads(path.read_bytes()[9:]) | {"routings": routings}
    text = json.dumps(header).encode()
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(InputError, match=r"header can't be read: .*routing"):
        read_journal(path)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        (replace(HEADER, gpu=H200._replace(name="NVIDIA H100")), "measured on NVIDIA H200 .*, this is NVIDIA H100"),
        (replace(HEADER, gpu=H200._replace(sm_count=114)), r"132 SMs.*this is .*114 SMs"),
        (replace(HEADER, gpu=H200._replace(memory_mib=96_000)), "this is .*96000 MiB.*--journal"),
        (replace(HEADER, sm=100), "sm_90.*sm_100"),
        (replace(HEADER, kernels=(Kernel("rows", 2, b"\1" * 32),)), "revision 1 of the kernel rows.*have revision 2"),
        (replace(HEADER, kernels=(Kernel("rows", 1, b"\7" * 32),)), "source 010101.*source 070707"),
    ],
)
def test_another_gpu_or_kernel_is_refused(tmp_path: Path, header: Header, message: str) -> None:
    path = tmp_path / "journal"
    with open_journal(path, HEADER) as journal:
        journal.append([measured()])
    before = path.read_bytes()
    with pytest.raises(InputError, match=message), open_journal(path, header):
        pass
    assert path.read_bytes() == before


def test_another_driver_or_a_little_memory_is_the_same_gpu(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    with open_journal(path, HEADER):
        pass
    later = replace(HEADER, gpu=H200._replace(driver=13020, memory_mib=143_000), pretuned="9.9")
    with open_journal(path, later) as journal:
        assert journal.contents.header.gpu.driver == 13000


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"hello\n", "no journal, or its first line is damaged"),
        (b"\x82\xa6bundle\n\n", "no journal"),
        (b"not one line of it", "it is no journal"),
        (b"1", "it is no journal"),
        (b"12345", "it is no journal"),
        (b"deadbeef is all that stands in these notes", "it is no journal"),
        (b"20261125 buy milk", "it is no journal"),
        (b"\0" * 300, "it is no journal"),
    ],
)
def test_another_file_is_refused_and_left_alone(tmp_path: Path, data: bytes, message: str) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(InputError, match=message), open_journal(path, HEADER):
        pass
    assert path.read_bytes() == data


def test_another_file_of_the_locks_name_is_refused_and_left_alone(tmp_path: Path) -> None:
    (tmp_path / "uv.lock").write_text("version = 1\n")
    with pytest.raises(InputError, match="is there and is no lock"), open_journal(tmp_path / "uv", HEADER):
        pass
    assert (tmp_path / "uv.lock").read_text() == "version = 1\n"
    assert not (tmp_path / "uv").exists()
    (tmp_path / "uv.lock").write_text("4711\n")
    with open_journal(tmp_path / "uv", HEADER):
        pass


def test_a_later_format_and_a_missing_file_are_reported(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    text = b'{"record":"header","format":2}'
    path.write_bytes(b"%08x %s\n" % (zlib.crc32(text), text))
    with pytest.raises(InputError, match="format 2, this version reads 1"):
        read_journal(path)
    with pytest.raises(InputError, match=r"none': No such file or directory; aot measure writes one"):
        read_journal(tmp_path / "none")


_FULL = """
import resource, signal, sys
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_file import HEADER, measured
from pretuned.aot.journal.file import open_journal
path = Path(sys.argv[1])
with open_journal(path, HEADER) as journal:
    journal.append([measured(1)])
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (path.stat().st_size + 100,) * 2)  # room for part of a record
    try:
        journal.append([measured(2), measured(4)])
    except OSError as error:
        sys.exit(f"{type(error).__name__}: {error}")
"""


def test_a_disk_without_room_costs_the_record_and_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    done = subprocess.run(
        [sys.executable, "-c", _FULL, str(path), str(Path(__file__).parent)],
        capture_output=True,
        text=True,
        check=False,
    )
    assert "HostError: can't write the journal" in done.stderr
    assert "File too large" in done.stderr
    contents = read_journal(path)
    assert contents.records == (measured(1),)
    assert path.stat().st_size == contents.sound_bytes  # not even a part of it is left


def test_a_place_that_can_not_be_written_is_the_machines_fault(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with (
        pytest.raises(HostError, match="can't make the directory"),
        open_journal(tmp_path / "file" / "journal", HEADER),
    ):
        pass
    (tmp_path / "folder").mkdir()
    with (
        pytest.raises(HostError, match=r"can't open the journal .*Is a directory"),
        open_journal(tmp_path / "folder", HEADER),
    ):
        pass


_HOLD = """
import sys, time
from pathlib import Path
sys.path.insert(0, sys.argv[2])
from test_file import HEADER, measured
from pretuned.aot.journal.file import open_journal
with open_journal(Path(sys.argv[1]), HEADER) as journal:
    journal.append([measured(1)])
    print("held", flush=True)
    time.sleep(60)
"""


def test_a_killed_holder_is_waited_for_no_longer(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    other = subprocess.Popen(
        [sys.executable, "-c", _HOLD, str(path), str(Path(__file__).parent)], stdout=subprocess.PIPE, text=True
    )
    assert other.stdout is not None
    assert other.stdout.readline() == "held\n"
    notes: list[str] = []

    def note(text: str) -> None:
        notes.append(text)
        os.kill(other.pid, signal.SIGKILL)

    with open_journal(path, HEADER, note) as journal:
        assert journal.contents.records == (measured(1),)
    other.wait()
    other.stdout.close()
    assert notes == [f"another tuner (process {other.pid}) writes '{path}': waiting for it"]


def compressed(path: Path, data: bytes) -> Path:
    path.write_bytes(lzma.compress(data, preset=9))
    return path


def test_a_compressed_journal_reads_as_what_was_compressed(tmp_path: Path) -> None:
    path = tmp_path / "h200.journal"
    with open_journal(path, HEADER) as journal:
        journal.append([measured(1), measured(2)])
    assert read_journal(compressed(tmp_path / "h200.journal.xz", path.read_bytes())) == read_journal(path)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda data: data[:-20], "cut off"),
        (lambda data: data[:60] + bytes([data[60] ^ 255]) + data[61:], "[Cc]orrupt"),
        (lambda data: b"no xz at all", "format not supported"),
        (lambda data: data + b"more", "follows its end"),
        (lambda data: b"", "cut off"),
    ],
    ids=["cut", "flipped", "other", "longer", "empty"],
)
def test_a_damaged_compressed_journal_is_one_clear_error(
    tmp_path: Path, change: Callable[[bytes], bytes], reason: str
) -> None:
    path, packed = tmp_path / "plain", tmp_path / "h200.journal.xz"
    with open_journal(path, HEADER) as journal:
        journal.append([measured(1)])
    packed.write_bytes(change(lzma.compress(path.read_bytes())))
    with pytest.raises(InputError, match=rf"journal '.*h200.journal.xz': .*decompressed: .*{reason}"):
        read_journal(packed)


def test_a_compressed_journal_that_grows_beyond_the_limit_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three kilobytes that become 20 MiB: no more than the limit is made of them."""
    monkeypatch.setattr("pretuned.aot.journal.file.MAX_BYTES", 1 << 20)
    path = tmp_path / "bomb.journal.xz"
    path.write_bytes(lzma.compress(bytes(20 << 20), preset=0))
    assert path.stat().st_size < 4096
    tracemalloc.start()
    try:
        with pytest.raises(InputError, match="over 1048576 bytes, which is the limit"):
            read_journal(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()


def test_a_compressed_journal_is_not_gone_on_with(tmp_path: Path) -> None:
    plain = tmp_path / "plain"
    with open_journal(plain, HEADER):
        pass
    path = compressed(tmp_path / "h200.journal.xz", plain.read_bytes())
    before = path.read_bytes()
    with pytest.raises(OtherJournal, match=r"decompress it first .* name '.*/h200.journal' with"):
        open_journal(path, HEADER).__enter__()
    assert path.read_bytes() == before
    assert sorted(path.name for path in tmp_path.glob("h200*")) == ["h200.journal.xz"]  # no lock beside it either
