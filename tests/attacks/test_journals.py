"""Journals that lie under right checksums: a bad record is left out, a bad header is an error, nothing else happens."""

from __future__ import annotations

import itertools
import json
import os
import time
import tracemalloc
import zlib
from pathlib import Path
from typing import Any

import pytest

from pretuned.aot.journal.file import Header, open_journal, read_journal
from pretuned.aot.journal.timings import Timings
from pretuned.aot.report.page import page
from pretuned.aot.report.sheets import sheet
from pretuned.artifacts.errors import HostError, InputError
from pretuned.artifacts.limits import MAX_TIME_NS
from pretuned.artifacts.records import Gpu, Kernel

SHA, OTHER = "03" * 32, "04" * 32
HEADER: dict[str, Any] = {
    "routings": ["skewed", "uniform"],
    "record": "header",
    "format": 1,
    "pretuned": "0.1.0",
    "kernels": [["rows", 1, "01" * 32]],
    "sm": 90,
    "gpu": {"name": "NVIDIA H200", "sm_count": 132, "memory_mib": 143771},
    "driver": 13000,
}
MEASURED: dict[str, Any] = {
    "plain": None,
    "record": "measured",
    "problem": ["dX", "bf16", 8, 256, 128, "nk", 0, 0],
    "bucket": 16,
    "modelled": SHA,
    "timings": [[SHA, [10_000, 11_000], 0.001, 20, 0.0017], [OTHER, [9_000, 9_500], 0.001, 20, 0.0017]],
    "duel": [OTHER, SHA, [9_000], [10_000], 0.9, 0.01],
    "torch_ns": [20_000],
    "drift": 1.01,
    "driver": 13000,
}
FAILED: dict[str, Any] = {
    "record": "failed",
    "problem": ["dX", "bf16", 8, 256, 128, "nk", 0, 0],
    "bucket": 16,
    "variant": SHA,
    "kind": "wrong",
    "reason": "off by 1",
}


def line(text: str) -> bytes:
    data = text.encode()
    return b"%08x %s\n" % (zlib.crc32(data), data)


def written(path: Path, *values: object) -> Path:
    """A journal of these values; NaN and infinity as Python's json writes them."""
    path.write_bytes(b"".join(line(value if isinstance(value, str) else json.dumps(value)) for value in values))
    return path


def timing(**fields: Any) -> dict[str, Any]:
    """The measured record with these parts of its first timing replaced."""
    names = ("variant", "ns", "noise", "rounds", "error")
    first = [fields.get(name, value) for name, value in zip(names, MEASURED["timings"][0], strict=True)]
    return {**MEASURED, "timings": [first, *MEASURED["timings"][1:]]}


def duel(**fields: Any) -> dict[str, Any]:
    names = ("challenger", "modelled", "challenger_ns", "modelled_ns", "ratio", "band")
    return {**MEASURED, "duel": [fields.get(name, value) for name, value in zip(names, MEASURED["duel"], strict=True)]}


def problem(at: int, value: object) -> dict[str, Any]:
    values = list(MEASURED["problem"])
    values[at] = value
    return {**MEASURED, "problem": values}


NAN, INF = float("nan"), float("inf")
RECORDS: dict[str, object] = {
    "arrays 100,000 deep": "[" * 100_000,
    "objects 100,000 deep": '{"a":' * 100_000,
    "a number of a million digits": '{"record":"measured","bucket":' + "9" * 1_000_000 + "}",
    "a list": [1, 2],
    "a string": '"measured"',
    "of no kind": {**MEASURED, "record": "praise"},
    "problem: E is 0": problem(2, 0),
    "problem: E is 2**40": problem(2, 2**40),
    "problem: N is 0": problem(3, 0),
    "problem: K is 10**300": problem(4, 10**300),
    "problem: N is true": problem(3, True),
    "problem: N is a float": problem(3, 256.0),
    "problem: a fusion of 2**70": problem(6, 2**70),
    "problem: top_k is 2**40": problem(7, 2**40),
    "problem: no op": problem(0, "sideways"),
    "problem: a list for an op": problem(0, []),
    "problem: a string": {**MEASURED, "problem": "dX bf16"},
    "problem: null": {**MEASURED, "problem": None},
    "bucket 0": {**MEASURED, "bucket": 0},
    "bucket 3": {**MEASURED, "bucket": 3},
    "bucket 2**32": {**MEASURED, "bucket": 2**32},
    "bucket 1e308": {**MEASURED, "bucket": 1e308},
    "time 0": timing(ns=[0]),
    "time -1": timing(ns=[-1, 5]),
    "time 2**53": timing(ns=[2**53]),
    "time 10**400": timing(ns=[10**400]),
    "time NaN": timing(ns=[NAN]),
    "time as a string": timing(ns="12"),
    "time true": timing(ns=[True]),
    "no times": timing(ns=[]),
    "times null": timing(ns=None),
    "noise NaN": timing(noise=NAN),
    "noise infinite": timing(noise=INF),
    "noise -1": timing(noise=-1.0),
    "noise as a string": timing(noise="nan"),
    "noise true": timing(noise=True),
    "noise 10**400": timing(noise=10**400),
    "error NaN": timing(error=NAN),
    "error -1e308": timing(error=-1e308),
    "rounds -1": timing(rounds=-1),
    "rounds 10**400": timing(rounds=10**400),
    "a short sha256": timing(variant="03" * 31),
    "a sha256 with blanks": timing(variant=" ".join(["03"] * 32)),
    "a sha256 that is a number": timing(variant=3),
    "timings: an object": {**MEASURED, "timings": {"a": 1}},
    "timings: a number": {**MEASURED, "timings": 7},
    "timings: strings of five": {**MEASURED, "timings": ["abcde"]},
    "duel: ratio NaN": duel(ratio=NAN),
    "duel: ratio -1e308": duel(ratio=-1e308),
    "duel: band NaN": duel(band=NAN),
    "duel: band infinite": duel(band=INF),
    "duel: times of nothing": duel(challenger_ns=[]),
    "duel: false": {**MEASURED, "duel": False},
    "duel: a string": {**MEASURED, "duel": "abcdef"},
    "torch: 10**400": {**MEASURED, "torch_ns": [10**400]},
    "torch: empty": {**MEASURED, "torch_ns": []},
    "plain: 10**400": {**MEASURED, "plain": [SHA, [10**400]]},
    "plain: 0": {**MEASURED, "plain": [SHA, [0]]},
    "plain: empty": {**MEASURED, "plain": [SHA, []]},
    "plain: no times": {**MEASURED, "plain": [SHA]},
    "plain: of a short sha256": {**MEASURED, "plain": ["03" * 31, [10_000]]},
    "plain: false": {**MEASURED, "plain": False},
    "drift NaN": {**MEASURED, "drift": NAN},
    "drift infinite": {**MEASURED, "drift": -INF},
    "driver 2**31": {**MEASURED, "driver": 2**31},
    "driver 10**400": {**MEASURED, "driver": 10**400},
    "driver null": {**MEASURED, "driver": None},
    "failed: of a kind that is none": {**FAILED, "kind": "tired\x1b[2J"},
    "failed: kind null": {**FAILED, "kind": None},
    "failed: reason of half a letter": {**FAILED, "reason": "\ud800"},
    "failed: reason a list": {**FAILED, "reason": ["x"]},
    "failed: reason of a megabyte": {**FAILED, "reason": "x" * (1 << 20)},
}


@pytest.mark.parametrize("name", RECORDS)
def test_a_bad_record_is_left_out_and_the_rest_is_read(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "journal", HEADER, RECORDS[name], MEASURED)
    contents = read_journal(path)
    assert contents.damaged == 1
    assert len(contents.records) == 1
    assert Timings.of(contents).gpus[0].driver == 13000


@pytest.mark.parametrize("links", [20, 60, 400])
def test_a_chain_of_records_that_grows_without_end_grows_to_an_end(tmp_path: Path, links: int) -> None:
    """Each record has a variant of the one before at the least time, and the next at the largest."""
    shas = [bytes([i % 256, i // 256]).hex() * 16 for i in range(links + 1)]
    records = []
    for before, after in itertools.pairwise(shas):
        few, most = ([sha, [ns, ns], 0.001, 5, 0.001] for sha, ns in ((before, 1), (after, MAX_TIME_NS)))
        records.append({**MEASURED, "modelled": before, "timings": [few, most], "duel": None})
    contents = read_journal(written(tmp_path / "journal", HEADER, *records))
    assert len(contents.records) == links
    (cell,) = Timings.of(contents).cells.values()
    assert len(cell.times_ns) == links + 1
    assert all(1 <= ns <= MAX_TIME_NS for ns in cell.times_ns.values())


HEADERS: dict[str, object] = {
    "arrays deep": "[" * 100_000,
    "format true": {**HEADER, "format": True},
    "format 1.0": {**HEADER, "format": 1.0},
    "sm 0": {**HEADER, "sm": 0},
    "sm 10**400": {**HEADER, "sm": 10**400},
    "sm of no GPU": {**HEADER, "sm": 85},
    "sm true": {**HEADER, "sm": True},
    "driver -1": {**HEADER, "driver": -1},
    "driver 10**400": {**HEADER, "driver": 10**400},
    "gpu null": {**HEADER, "gpu": None},
    "gpu a list": {**HEADER, "gpu": []},
    "gpu of 0 SMs": {**HEADER, "gpu": {**HEADER["gpu"], "sm_count": 0}},
    "gpu of -1 SMs": {**HEADER, "gpu": {**HEADER["gpu"], "sm_count": -1}},
    "gpu of 10**400 SMs": {**HEADER, "gpu": {**HEADER["gpu"], "sm_count": 10**400}},
    "gpu of 1.5 SMs": {**HEADER, "gpu": {**HEADER["gpu"], "sm_count": 1.5}},
    "gpu without memory": {**HEADER, "gpu": {**HEADER["gpu"], "memory_mib": 0}},
    "gpu's name a list": {**HEADER, "gpu": {**HEADER["gpu"], "name": ["x"]}},
    "gpu's name HTML": {**HEADER, "gpu": {**HEADER["gpu"], "name": "<script>alert(1)</script>"}},
    "gpu's name an escape": {**HEADER, "gpu": {**HEADER["gpu"], "name": "H200\x1b[2J"}},
    "gpu's name two lines": {**HEADER, "gpu": {**HEADER["gpu"], "name": "H200\nroot@host:~#"}},
    "gpu's name half a letter": {**HEADER, "gpu": {**HEADER["gpu"], "name": "\udcff"}},
    "gpu's name of a megabyte": {**HEADER, "gpu": {**HEADER["gpu"], "name": "x" * (1 << 20)}},
    "kernels null": {**HEADER, "kernels": None},
    "kernels a number": {**HEADER, "kernels": 5},
    "a kernel of two": {**HEADER, "kernels": [["rows", 1]]},
    "a kernel's name an escape": {**HEADER, "kernels": [["\x1b]0;x\x07", 1, "01" * 32]]},
    "a kernel's source a number": {**HEADER, "kernels": [["rows", 1, 5]]},
    "a kernel's source short": {**HEADER, "kernels": [["rows", 1, "01"]]},
    "a kernel's revision NaN": {**HEADER, "kernels": [["rows", NAN, "01" * 32]]},
    "a kernel's revision infinite": {**HEADER, "kernels": [["rows", INF, "01" * 32]]},
    "a kernel's revision negative": {**HEADER, "kernels": [["rows", -1, "01" * 32]]},
    "pretuned an escape": {**HEADER, "pretuned": "\x1b[2J"},
}


@pytest.mark.parametrize("name", HEADERS)
def test_a_bad_header_is_one_clear_error(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / "journal", HEADERS[name], MEASURED)
    with pytest.raises(InputError, match="journal") as caught:
        read_journal(path)
    text = str(caught.value)
    assert len(text) < 1000
    assert text.isprintable()
    mine = Header(90, Gpu("NVIDIA H200", 132, 143771, 13000), (Kernel("rows", 1, b"\1" * 32),))
    before = path.read_bytes()
    with pytest.raises(InputError), open_journal(path, mine):
        pass
    assert path.read_bytes() == before


def test_what_the_attacks_were_made_from_is_sound(tmp_path: Path) -> None:
    path = written(tmp_path / "journal", HEADER, MEASURED, FAILED)
    contents = read_journal(path)
    assert contents.damaged == 0
    assert len(contents.records) == 2


@pytest.mark.parametrize("kind", ["fifo", "device", "directory", "sparse"])
def test_no_regular_file_is_read_or_waited_for(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "journal"
    if kind == "fifo":
        os.mkfifo(path)
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "directory":
        path.mkdir()
    else:
        with path.open("wb") as file:
            file.truncate(1 << 40)
    with pytest.raises(InputError, match="journal"):
        read_journal(path)
    with pytest.raises((InputError, HostError), match="journal"), open_journal(path, Header(90, Gpu("G", 1, 1, 1), ())):
        pass


def test_a_reason_with_markup_stays_text(tmp_path: Path) -> None:
    evil = "</ul><script>alert(1)</script><img src=x onerror=alert(1)>\x1b[2J\x00\x0b"
    path = written(tmp_path / "journal", HEADER, MEASURED, {**FAILED, "reason": evil})
    contents = read_journal(path)
    text = page(sheet("<script>t</script>", {"file": evil}, None, [contents], None))
    text.encode()
    assert "<script>alert" not in text
    assert "<script>t" not in text
    assert "<img" not in text
    assert not {"\x1b", "\x00", "\x0b"} & set(text)


def test_a_cell_with_the_most_and_the_least_of_everything_is_drawn(tmp_path: Path) -> None:
    most, least = 2**53 - 1, 1
    records = [
        {
            **MEASURED,
            "problem": ["forward", "fp32", 65536, 2**31 - 1, 2**31 - 1, "kn", 15, 65536],
            "bucket": 2**31,
            "timings": [[SHA, [most], 1e308, 1, 1e308], [OTHER, [least], 0.0, 1, 0.0]],
            "duel": [OTHER, SHA, [least], [most], 1e308, 1e308],
            "torch_ns": [most],
            "drift": 1e308,
        },
        {
            **MEASURED,
            "problem": ["dW", "bf16", 1, 1, 1, "nk", 0, 0],
            "bucket": 1,
            "timings": [[SHA, [least], 0.0, 1, 0.0], [OTHER, [most], 0.0, 0, 0.0]],
            "duel": [SHA, OTHER, [most], [least], 0.0, 0.0],
            "torch_ns": [least],
            "drift": 0.0,
        },
    ]
    contents = read_journal(written(tmp_path / "journal", HEADER, *records))
    assert contents.damaged == 0
    assert "<svg" in page(sheet("t", {}, None, [contents], None))


@pytest.mark.slow
def test_a_journal_of_a_hundred_million_empty_lines(tmp_path: Path) -> None:
    path = written(tmp_path / "j", HEADER)
    with path.open("ab") as file:
        for _ in range(100):
            file.write(b"\n" * 1_000_000)
    begin = time.perf_counter()
    with pytest.raises(InputError, match="over 1,048,576 lines, which is the limit"):
        read_journal(path)
    assert time.perf_counter() - begin < 10


def test_a_line_that_is_most_of_the_file_is_not_copied(tmp_path: Path) -> None:
    path = written(tmp_path / "j", HEADER, MEASURED)
    with path.open("ab") as file:
        file.write(b"00000000 " + b"x" * (32 << 20) + b"\n")
    tracemalloc.start()
    try:
        contents = read_journal(path)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert (len(contents.records), contents.damaged) == (1, 1)
    assert peak < 16 << 20
