"""Few bytes that claim to be many, in each file that is read: refused, in memory and work that don't follow that."""

from __future__ import annotations

import lzma
import subprocess
import sys
import tracemalloc
import zlib
from collections.abc import Callable
from pathlib import Path

import golden_bundles
import pytest

from pretuned.aot.journal import file as journals
from pretuned.aot.journal.file import Header, open_journal, read_journal
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt, BundleTooNew, InputError
from pretuned.artifacts.records import Gpu
from pretuned.runtime.dispatch.places import ENTRY_POINTS, _entry_points

sys.path.append(str(Path(__file__).parent))
from test_journals import HEADER, MEASURED, line, written

MANY = 300  # MiB


def pressed(path: Path, *parts: bytes, mib: int = MANY, of: bytes = b"\0") -> Path:
    """An xz file of these parts and then ``mib`` MiB of one byte: some 50 KB.

    A MiB is compressed once, and stands in the file so many times: a chunk of LZMA2 that begins with a new state and
    names the byte before it alone means the same wherever it stands.
    """
    text = b"".join(parts)
    first = [text[i : i + 65536] for i in range(0, len(text), 65536)]
    stored = [bytes([2 if i else 1]) + (len(part) - 1).to_bytes(2, "big") + part for i, part in enumerate(first)]
    filters = [{"id": lzma.FILTER_LZMA2, "preset": 1}]
    chunk = lzma.compress(of * (1 << 20), lzma.FORMAT_RAW, filters=filters)[:-1]  # less the end's mark
    assert chunk[0] & 0xE0 == 0xE0  # new dictionary, properties and state; then only the latter two
    again = bytes([chunk[0] & 0xDF]) + chunk[1:]
    body = b"".join([*stored, again if first else chunk, again * (mib - 1), b"\0"])

    def checked(data: bytes) -> bytes:
        return data + zlib.crc32(data).to_bytes(4, "little")

    def number(value: int) -> bytes:
        results = []
        while value >= 0x80:
            results.append(value & 0x7F | 0x80)
            value >>= 7
        return bytes([*results, value])

    flags = b"\0\0"  # without a check
    block = checked(b"\x02\0\x21\x01\x10" + bytes(3))  # LZMA2, of a dictionary of 1 MiB
    index = b"\0" + number(1) + number(len(block) + len(body)) + number(len(text) + (mib << 20))
    index = checked(index + bytes(-len(index) % 4))
    foot = (len(index) // 4 - 1).to_bytes(4, "little") + flags
    path.write_bytes(
        b"\xfd7zXZ\0"
        + checked(flags)
        + block
        + body
        + bytes(-len(body) % 4)
        + index
        + zlib.crc32(foot).to_bytes(4, "little")
        + foot
        + b"YZ"
    )
    return path


def peak_mib(read: Callable[[], object]) -> float:
    tracemalloc.start()
    try:
        read()
        return tracemalloc.get_traced_memory()[1] / (1 << 20)
    finally:
        tracemalloc.stop()


def test_a_compressed_bundle_takes_no_more_than_its_header_says(tmp_path: Path) -> None:
    data = codec.encode(golden_bundles.small())
    bombs = {
        "it is no bundle: it begins with": (),
        f"it unpacks to more than the {len(data)} bytes that its header says": (data,),
        "file is 268435457 bytes, the limit is 268435456": (data[:16] + (1 << 28 | 1).to_bytes(8, "big") + data[24:],),
    }
    for message, parts in bombs.items():
        path = pressed(tmp_path / "one.msgpack.xz", *parts, mib=64)
        assert path.stat().st_size < 20_000

        def refused(path: Path = path, message: str = message) -> None:
            with pytest.raises(BundleCorrupt, match=message):
                open_bundle(path)

        assert peak_mib(refused) < 16


@pytest.mark.slow  # half a gigabyte, unpacked
def test_bundles_before_the_wanted_one_are_skipped_in_little_memory(tmp_path: Path) -> None:
    """A header that claims 255 MiB is unpacked in pieces, and no second such one is."""
    data = codec.encode(golden_bundles.small())
    head = data[:16] + (255 << 20).to_bytes(8, "big") + data[24:]
    for mib, message in (
        (255, "file is [0-9]* bytes, header says"),
        (300, "it unpacks to more than the 267386880 bytes that"),
    ):
        path = pressed(tmp_path / "all.msgpack.xz", head, mib=mib - (mib == 255))

        def refused(path: Path = path, message: str = message) -> None:
            with pytest.raises(BundleCorrupt, match=message):
                open_bundle(f"{path}#sm103")

        assert peak_mib(refused) < 16


def test_a_window_beyond_the_limit_is_refused(tmp_path: Path) -> None:
    data = codec.encode(golden_bundles.small())
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(lzma.compress(data, filters=[{"id": lzma.FILTER_LZMA2, "preset": 0, "dict_size": 300 << 20}]))
    with pytest.raises(BundleCorrupt, match="it can't be unpacked: Memory usage limit exceeded"):
        open_bundle(path)


def test_a_compressed_bundle_of_a_later_format_is_reported_at_once(tmp_path: Path) -> None:
    data = codec.encode(golden_bundles.small())
    path = pressed(tmp_path / "one.msgpack.xz", data[:11] + (7).to_bytes(4, "big") + data[15:])
    with pytest.raises(BundleTooNew, match="format 7, this version reads 2"):
        open_bundle(path)


@pytest.mark.slow
@pytest.mark.parametrize("of", [b"\n", b"x"])
def test_a_compressed_journal_is_read_in_pieces(tmp_path: Path, of: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(journals, "MAX_LINES", 1 << 16)  # its own, in test_journals.py: tracemalloc makes lines slow
    path = pressed(tmp_path / "journal.xz", written(tmp_path / "j", HEADER, MEASURED).read_bytes(), of=of)

    def read() -> None:
        if of == b"x":  # one line that never ends
            assert len(read_journal(path).records) == 1
        else:
            with pytest.raises(InputError, match="over 65,536 lines, which is the limit"):
                read_journal(path)

    assert peak_mib(read) < 32


def test_a_compressed_journal_has_a_limit_too(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = pressed(tmp_path / "journal.xz", written(tmp_path / "j", HEADER).read_bytes(), mib=8, of=b"x")
    monkeypatch.setattr(journals, "MAX_BYTES", 4 << 20)
    with pytest.raises(InputError, match="over 4194304 bytes, which is the limit"):
        read_journal(path)


def test_a_line_that_is_too_long_is_left_out_although_its_checksum_is_right(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", HEADER, MEASURED)
    text = b'{"record":"' + b"x" * (8 << 20) + b'"}'
    with path.open("ab") as file:
        file.write(b"%08x %s\n" % (zlib.crc32(text), text))
        file.write(path.read_bytes().splitlines(keepends=True)[1])
    size = path.stat().st_size
    contents = read_journal(path)
    assert (len(contents.records), contents.damaged, contents.sound_bytes) == (2, 1, size)


def test_a_journal_to_go_on_with_is_read_in_pieces_too(tmp_path: Path) -> None:
    header = Header(90, Gpu("NVIDIA H200", 132, 143771, 13000), ())
    path = tmp_path / "journal"
    with open_journal(path, header):
        pass
    sound = path.read_bytes()
    with path.open("ab") as file:
        for _ in range(40):
            file.write(b"x" * (1 << 20))

    def go_on() -> None:
        with open_journal(path, header) as journal:
            assert journal.contents.damaged == 0

    assert peak_mib(go_on) < 16
    assert path.read_bytes() == sound  # the line that was cut is gone


BLANKS = """
import resource
from pretuned.artifacts.signature import _public
resource.setrlimit(resource.RLIMIT_CPU, (60, 60))
for begin in (b"", b"-----BEGIN PUBLIC KEY-----", b"ssh-ed25519 ", b"ssh-ed25519 AAAA "):
    for blank in (b" ", b"\\n"):
        assert _public(begin + blank * 1_000_000 + b"-----") == b""
"""


def test_blanks_in_a_key_cost_what_they_are() -> None:
    """8 KB of them took a fifth of a second, in each of 256 keys; a megabyte would take an hour."""
    subprocess.run([sys.executable, "-c", BLANKS], check=True)


def test_lines_of_a_journal_are_of_any_length_and_pieces_end_anywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = written(tmp_path / "journal", HEADER, MEASURED, MEASURED)
    whole = read_journal(path)
    for size in (1, 7, 100, 4096):
        monkeypatch.setattr(journals, "_PIECE_BYTES", size)
        assert read_journal(path) == whole
    assert whole.sound_bytes == path.stat().st_size
    monkeypatch.setattr(journals, "_LONGEST_LINE", len(line("")) - 10 + max(map(len, path.read_bytes().split(b"\n"))))
    assert read_journal(path).damaged == 0


def test_a_package_with_entry_points_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Each is looked for, and told where it is not found: so those of one package are few."""
    for name, count in (("evil", 30_000), ("huge", 200_000), ("good", 3)):
        (tmp_path / f"{name}-1.0.dist-info").mkdir()
        lines = "".join(f"{name}{i:05d} = no_{name}_{i}\n" for i in range(count))
        (tmp_path / f"{name}-1.0.dist-info" / "entry_points.txt").write_text(f"[{ENTRY_POINTS}]\n{lines}")
    monkeypatch.setattr(sys, "path", [str(tmp_path)])
    names = [point.name for point in _entry_points()]
    assert [name for name in names if name.startswith("good")] == ["good00000", "good00001", "good00002"]
    assert len(names) == 67
    messages = sorted(record.getMessage() for record in caplog.records)
    assert len(messages) == 2
    assert (
        f"{tmp_path}/evil-1.0.dist-info has 30000 entry points pretuned.bundles: the first 64 are asked" in messages[0]
    )
    assert "huge-1.0.dist-info can't be read: entry_points.txt is" in messages[1]


LONG_NAMES = """
import itertools, resource, struct
from pretuned.artifacts.cubin import fault
from pretuned.artifacts.records import Target
resource.setrlimit(resource.RLIMIT_CPU, (30, 30))
COUNT = 65535
def cubin(*texts):
    names = b"\\0".join(texts)
    at = 64 + len(names)
    head = struct.pack("<4sBBBBB7xHHIQQQIHHHHHH", b"\\x7fELF", 2, 1, 1, 0x33, 7, 2, 190, 1, 0, 0, at, 80, 64, 0, 0, 64,
                       COUNT, 0)
    sections = [struct.pack("<I20xQQ24x", 0, 64, len(names))]
    begins = [0, *itertools.accumulate(len(one) + 1 for one in texts)]
    sections += [struct.pack("<I20xQQ24x", begins[i % len(texts)], 64, 0) for i in range(COUNT - 1)]
    return head + names + b"".join(sections)
for texts in ([b".nv.info." + b"a" * (3 << 20)], [b".nv.info." + b"a" * 190 + b"%05d" % i for i in range(20_000)]):
    code = cubin(*texts)
    told = fault(code, Target(90, True), "rows", (8,), 128, 255)
    assert told.startswith("no cubin: it says something of "), told
    assert len(told) <= 300
"""


def test_code_whose_sections_all_have_one_long_name() -> None:
    """65,535 of 3 MiB took minutes."""
    subprocess.run([sys.executable, "-c", LONG_NAMES], check=True)
