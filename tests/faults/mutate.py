"""Random mutations of a bundle, and what a reader must make of each: an error of the tree, or the very same content."""

from __future__ import annotations

import random
import struct
from collections.abc import Callable, Iterator

import craft
import msgpack

from pretuned.artifacts import codec
from pretuned.artifacts.errors import BundleError

INTERESTING = (
    0,
    1,
    0x7F,
    0x80,
    0x90,
    0xC0,
    0xC1,
    0xC2,
    0xC3,
    0xC4,
    0xC6,
    0xC7,
    0xCB,
    0xD4,
    0xD6,
    0xDC,
    0xDD,
    0xDF,
    0xFF,
)
NUMBERS = (-1, 0, 1, 15, 16, 31, 32, 255, 65535, 65536, 2**31 - 1, 2**31, 2**32, 2**53, 2**63, 2**64 - 1)
VALUES = (None, True, False, b"", b"\x90", "", "..", "a", "forward", 1.0, float("nan"), [], {}, [0] * 7)


def mutated(data: bytes, rng: random.Random) -> bytes:
    """``data`` with one to four bytes, or one piece, changed: always other bytes than before."""
    out = bytearray(data)
    kind = rng.randrange(7 if len(out) >= 4 else 6)
    at = rng.randrange(len(out))
    if kind == 0:
        out[at] ^= 1 << rng.randrange(8)
    elif kind == 1:
        for _ in range(rng.randrange(1, 5)):
            out[rng.randrange(len(out))] = rng.choice(INTERESTING)
    elif kind == 2:
        del out[at : at + rng.randrange(1, 9)]
    elif kind == 3:
        out[at:at] = rng.randbytes(rng.randrange(1, 9))
    elif kind == 4:
        end = at + rng.randrange(1, 65)
        out[at:end] = out[at:end][::-1]
    elif kind == 5:
        other = rng.randrange(len(out))
        out[at : at + 8] = out[other : other + 8]
    else:
        struct.pack_into(">I", out, min(at, len(out) - 4), rng.choice((0, 1, len(out), 2**31, 2**32 - 1)))
    return bytes(out)


def inside(data: bytes, rng: random.Random) -> bytes:
    """A mutation of the index or of a nested record that leaves the preamble right."""
    index, cubins = craft.parts(data)
    key = rng.choice(list(index))
    value = index[key]
    if type(value) is list and value and type(value[0]) is bytes:
        value[rng.randrange(len(value))] = record(rng.choice(value), rng)
    elif type(value) is dict and type(next(iter(value))) is bytes:
        row = rng.choice(list(value))
        value[row] = record(value[row], rng)
    elif type(value) is bytes:
        index[key] = record(value, rng)
    else:
        index[key] = changed(value, rng)
    try:
        return craft.seal(msgpack.packb(index), cubins)
    except (ValueError, OverflowError):  # a value that msgpack itself can't write
        return mutated(data, rng)


def record(raw: bytes, rng: random.Random) -> bytes:
    """A nested record with a byte or a value changed."""
    if rng.random() < 0.5:
        return mutated(raw, rng)
    try:
        return msgpack.packb(changed(msgpack.unpackb(raw), rng))
    except (ValueError, OverflowError):
        return mutated(raw, rng)


def changed(value: object, rng: random.Random) -> object:
    """``value`` with one leaf changed."""
    if type(value) is list and value and rng.random() < 0.9:
        i = rng.randrange(len(value))
        return [*value[:i], changed(value[i], rng), *value[i + 1 :]]
    if type(value) is dict and value and rng.random() < 0.9:
        key = rng.choice(list(value))
        return {**value, key: changed(value[key], rng)}
    if type(value) is int and rng.random() < 0.7:
        return rng.choice((value + 1, value - 1, *NUMBERS))
    return rng.choice((*VALUES, *NUMBERS))


def flips(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """R1: plain mutations."""
    while True:
        yield mutated(data, rng)


def sealed(data: bytes, rng: random.Random) -> Iterator[bytes]:
    """R2: mutations whose digest was made right again."""
    while True:
        yield craft.reseal(mutated(data, rng))
        yield inside(data, rng)


def run(inputs: Iterator[bytes], rounds: int, judge: Callable[[bytes], bool]) -> int:
    """How many of ``rounds`` inputs were accepted."""
    return sum(judge(next(inputs)) for _ in range(rounds))


def accepted(data: bytes, *, whole: bool = True) -> bool:
    """Return True if the strict reader accepts ``data``; raise anything but a BundleError or a canonical bundle.

    Without ``whole`` it is encoded without being decoded once more, which is a third of the time.
    """
    try:
        bundle = codec.decode(data, "fuzzed")
    except BundleError:
        return False
    if (codec.encode if whole else codec._encode)(bundle) != data:
        raise AssertionError(f"accepted, but encodes to other bytes: {data.hex()}")
    return True
