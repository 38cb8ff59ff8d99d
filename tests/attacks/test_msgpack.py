"""Malicious msgpack under right digests: depth, claimed lengths, duplicate keys, extensions, NaN, bool as int.

Each is BundleCorrupt in less than 0.1 s and 64 MB, from the strict reader and from the lazy one.
"""

from __future__ import annotations

import json
import struct
import subprocess
import sys
from pathlib import Path

import craft
import msgpack
import pytest

SMALL = (Path(__file__).parents[1] / "golden" / "format2-small.msgpack").read_bytes()
INDEX, CUBINS = craft.parts(SMALL)
RAW = msgpack.packb(INDEX)
FIELDS = list(INDEX)
MEASURE = Path(__file__).with_name("measure.py")


def field(name: str, raw: bytes) -> bytes:
    """The index with the value of one field replaced by raw bytes."""
    items = [msgpack.packb(key) + (raw if key == name else msgpack.packb(INDEX[key])) for key in FIELDS]
    return b"\x89" + b"".join(items)


def variant(name: str, raw: bytes) -> bytes:
    """The index with one field of the first variant replaced by raw bytes."""
    values = msgpack.unpackb(INDEX["variants"][0])
    items = [msgpack.packb(key) + (raw if key == name else msgpack.packb(values[key])) for key in values]
    record = struct.pack(">BH", 0xDE, len(values)) + b"".join(items)
    return field("variants", b"\x91" + msgpack.packb(record))


def choice(raw: bytes) -> bytes:
    """The index with the one problem's choices replaced by raw bytes."""
    (key,) = INDEX["problems"]
    return field("problems", b"\x81" + msgpack.packb(key) + msgpack.packb(raw))


HUGE = b"\xff\xff\xff\xff"
SLOWER = {"models: eight million rows"}  # 8 MB that are well formed: three times the size, and 64 MB
MANY = b"".join(b"\xc4\x02" + struct.pack(">H", i) + b"\xc4\x00" for i in range(65536))
ATTACKS = {
    "no index": b"",
    "not a map": b"\xc0",
    "the reserved byte": b"\xc1",
    "arrays 15 MB deep": b"\x91" * (15 << 20),
    "maps 15 MB deep": b"\x81\xa1a" * (5 << 20),
    "millions of arrays of 4096 each": b"\xdc\x10\x00" * (5 << 20),
    "a thousand arrays of 4096 each": field("kernels", b"\xdc\x10\x00" * 1000),
    "arrays of 4096 side by side": b"\x89" + b"\xa1a\xdc\x40\x00" * (1 << 20),
    "array of 2**32-1": b"\xdd" + HUGE,
    "map of 2**32-1": b"\xdf" + HUGE,
    "str of 2**32-1": b"\xdb" + HUGE,
    "bin of 2**32-1": b"\xc6" + HUGE,
    "ext of 2**32-1": b"\xc9" + HUGE + b"\x01",
    "kernels of 2**32-1": field("kernels", b"\xdd" + HUGE),
    "problems of 2**32-1": field("problems", b"\xdd" + HUGE),
    "a million kernels": field("kernels", b"\xdd\x00\x10\x00\x00" + b"\xc0" * (1 << 20)),
    "a million empty strings": field("problems", b"\xdd\x00\x10\x00\x00" + b"\xa0" * (1 << 20)),
    "a thousand maps of 65535 each": field("problems", b"\xde\xff\xff" * 1000),
    "maps of 65535 side by side": b"\x89" + b"\xa1a\xde\xff\xff" * (1 << 20),
    "65536 problems": field("problems", b"\xdf\x00\x01\x00\x00" + MANY),
    "a problem twice": field("problems", b"\x82" + 2 * msgpack.packb(INDEX["problems"])[1:]),
    "a string of 1 MB": field("models", b"\xdb\x00\x10\x00\x00" + b"a" * (1 << 20)),
    "a record of 15 MB": field("variants", b"\x91\xc6" + struct.pack(">I", 15 << 20) + bytes(15 << 20)),
    "models of 9 MB": field("models", b"\xc6" + struct.pack(">I", 9 << 20) + bytes(9 << 20)),
    "duplicate key": b"\x8a" + RAW[1:] + msgpack.packb("models") + msgpack.packb(INDEX["models"]),
    "duplicate key, one missing": b"\x89" + RAW[1 : RAW.index(b"\xa6models")] + b"\xa6target\xc0",
    "nested duplicate key": field("target", b"\x83\xa2sm\x50\xadarch_specific\xc2\xa2sm\x50"),
    "integer key": field("target", b"\x82\x01\x50\xadarch_specific\xc2"),
    "nil key": field("target", b"\x82\xc0\x50\xadarch_specific\xc2"),
    "array as a key": field("target", b"\x82\x90\x50\xadarch_specific\xc2"),
    "a fixext": field("min_driver", b"\xd4\x01\x00"),
    "an ext8": field("min_driver", b"\xc7\x01\x05\x00"),
    "an empty ext": field("min_driver", b"\xc7\x00\x05"),
    "a timestamp": field("min_driver", b"\xd6\xff\x00\x00\x00\x00"),
    "a NaN": field("min_driver", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    "a float": field("min_driver", b"\xcb" + struct.pack(">d", 12080.0)),
    "a float32": field("min_driver", b"\xca" + struct.pack(">f", 12080.0)),
    "bool as int": field("min_driver", b"\xc3"),
    "int as bool": field("target", b"\x82\xa2sm\x50\xadarch_specific\x00"),
    "nil as int": field("min_driver", b"\xc0"),
    "a long integer": field("min_driver", b"\xce\x00\x00\x2f\x30"),
    "a signed long integer": field("target", b"\x82\xa2sm\xd0\x50\xadarch_specific\xc2"),
    "2**64-1": field("min_driver", b"\xcf" + b"\xff" * 8),
    "-2**63": field("min_driver", b"\xd3\x80" + bytes(7)),
    "a long string header": field("producer", msgpack.packb(INDEX["producer"]).replace(b"\xa50.1.0", b"\xd9\x050.1.0")),
    "a long array header": field("gpus", b"\xdc\x00\x00"),
    "a long bin header": field("models", b"\xc5\x00\x01\x90"),
    "bytes that are no UTF-8": field("producer", msgpack.packb(INDEX["producer"]).replace(b"0.1.0", b"0.1.\xff")),
    "a lone surrogate": field("producer", msgpack.packb(INDEX["producer"]).replace(b"0.1.0", b"0.\xed\xa0\x80")),
    "str for bin": field("models", b"\xa1\x90"),
    "bin for str": field("producer", msgpack.packb(INDEX["producer"]).replace(b"\xa50.1.0", b"\xc4\x050.1.0")),
    "bytes after the index": RAW + b"\xc0",
    "the index cut": RAW[:-1],
    "variant: bool as int": variant("threads", b"\xc3"),
    "variant: a NaN": variant("threads", b"\xcb\x7f\xf8\x00\x00\x00\x00\x00\x00"),
    "variant: config of 2**32-1": variant("config", b"\xdd" + HUGE),
    "variant: a long integer": variant("threads", b"\xce\x00\x00\x01\x00"),
    "variant: deep": variant("config", b"\x91" * 60000),
    "choices: deep": choice(b"\x91" * 60000),
    "choices: 2**32-1": choice(b"\xdd" + HUGE),
    "choices: bool as int": choice(b"\x91\x97\xc2\x00\x00\x01\xc0\xc0\xc0"),
    "choices: bool as source": choice(b"\x91\x97\x00\x00\xc2\x01\xc0\xc0\xc0"),
    "choices: a timestamp": choice(b"\x91\x97\x00\x00\x00\xd6\xff\x00\x00\x00\x00\xc0\xc0\xc0"),
    "choices: an empty record": choice(b""),
    "models: deep": field("models", b"\xc6" + struct.pack(">I", 8 << 20) + b"\x91" * (8 << 20)),
    "models: arrays of 4096 each": field("models", b"\xc5" + struct.pack(">H", 60000) + b"\xdc\x10\x00" * 20000),
    "models: a row that is not there": field(
        "models",
        msgpack.packb(msgpack.packb([{"name": "m", "tp": 1, "ep": 1, "top_k": 1, "dtype": "bf16", "problems": [1]}])),
    ),
    "models: eight million rows": lambda: field(
        "models",
        msgpack.packb(
            msgpack.packb([{"name": "m", "tp": 1, "ep": 1, "top_k": 1, "dtype": "bf16", "problems": [0] * 4000}] * 2000)
        ),
    ),
}


def crossed() -> bytes:
    """2000 problems that each name 64 of 200 long variant records: valid, and much to check."""
    names = [[f"k{i:02}{'a' * 150}", 1] for i in range(64)]
    records = [msgpack.packb({**msgpack.unpackb(INDEX["variants"][0]), "config": names})] * 200
    problems = {}
    for i in range(2000):
        rows = [[b, (64 * i + 2 * b) % 200, 0, 1, (64 * i + 2 * b + 1) % 200, 1, None] for b in range(32)]
        problems[msgpack.packb(["forward", "bf16", 1, 16 + i, 64, "nk", 0, 0])] = msgpack.packb(rows)
    index = {
        **INDEX,
        "variants": records,
        "cubin_bytes": [len(CUBINS)] * len(records),
        "problems": dict(sorted(problems.items())),
        "models": msgpack.packb([]),
    }
    return craft.seal(msgpack.packb(index), CUBINS * len(records))


def measured(folder: Path) -> dict[str, dict[str, tuple[str | None, float, float]]]:
    """Return each reader's error, time and memory for each attack, measured in a process of its own."""
    for i, index in enumerate(ATTACKS.values()):
        (folder / f"{i}.msgpack").write_bytes(craft.seal(index() if callable(index) else index, CUBINS))
    (folder / "valid.msgpack").write_bytes(craft.seal(RAW, CUBINS))
    (folder / "crossed.msgpack").write_bytes(crossed())
    done = subprocess.run([sys.executable, MEASURE, folder], capture_output=True, text=True, check=True)
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def verdicts(tmp_path_factory):
    return measured(tmp_path_factory.mktemp("attacks"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ATTACKS)
def test_refused_quickly_and_in_little_memory(verdicts, name):
    for reader, (error, seconds, peak_mib) in verdicts[f"{list(ATTACKS).index(name)}.msgpack"].items():
        assert error == "BundleCorrupt" or reader == "glance", reader  # that sees no more than what it begins with
        assert seconds < (4 if name in SLOWER else 0.2), (
            reader
        )  # a busy machine may take twice the 0.1 s of the long run
        assert peak_mib < (64 + 3 * 8 if name in SLOWER else 64), reader


@pytest.mark.slow
def test_a_record_is_parsed_once_however_many_choices_name_it(verdicts):
    for reader, (error, seconds, peak_mib) in verdicts["crossed.msgpack"].items():
        assert error is None, reader
        assert seconds < 4, reader
        assert peak_mib < 64, reader


@pytest.mark.slow
def test_what_the_attacks_were_made_from_is_valid(verdicts):
    assert craft.seal(RAW, CUBINS) == SMALL
    assert [error for error, _, _ in verdicts["valid.msgpack"].values()] == [None, None, None]
