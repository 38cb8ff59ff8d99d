"""The argument block, read back through its pointers as the driver reads it."""

from __future__ import annotations

from ctypes import c_uint32, c_uint64

import pytest
from cudaconfig import Launch, LaunchConfig, words_of

from pretuned.kernels.entry import parameter_bytes
from pretuned.runtime.driver.launcher import BlockLayout, Memory, Words

MAPS = bytes(range(128)), bytes(range(128, 256)), bytes(range(64, 192))
BIG = 1 << 40  # what must not be cut to 32 bits
GIVEN: Words = (("x", "ptr"), ("w", "ptr"), ("stride", "i64"), ("M", "i32"))
LATE: Words = (("y", "ptr"), ("m_sizes", "ptr"))
FIXED = {"N": 5, "E": 7, "far": -BIG}
MAPPED = {
    "x": ("M", "N", "stride", "one"),
    "w": ("E", "N", "M", "far", "stride", "one"),
    "y": ("null",) * 4 + ("one",) * 4,
}
NUMBERS: Words = (("M", "i32"), ("N", "i32"), ("E", "i32"), ("stride", "i64"), ("far", "i64"))
KERNELS: dict[str, Words] = {
    "pointers": (("x", "ptr"), ("w", "ptr"), ("y", "ptr"), ("m_sizes", "ptr"), *NUMBERS),
    "another order": (*reversed(NUMBERS), ("m_sizes", "ptr"), ("y", "ptr"), ("w", "ptr"), ("x", "ptr")),
    "descriptors": (("x", "desc2"), ("w", "desc3"), ("y", "ptr"), ("m_sizes", "ptr"), *NUMBERS),
    "one descriptor": (("x", "ptr"), ("w", "desc3"), ("y", "ptr"), ("m_sizes", "ptr"), *NUMBERS),
    "a result's": (("x", "desc2"), ("w", "desc3"), ("y", "desc4"), ("m_sizes", "ptr"), *NUMBERS),
    "few": (("w", "ptr"), ("M", "i32")),
}


def layout_of(kernel: Words) -> BlockLayout:
    return BlockLayout(kernel, early=GIVEN, late=LATE, fixed=FIXED, maps=MAPPED, threads=256, shared_bytes=70_000)


def values(kernel: Words) -> dict[str, int | bytes]:
    """Return a value for each word."""
    kinds = dict(kernel)
    inputs: dict[str, int | bytes] = {"x": BIG + 1, "w": BIG + 2, "y": BIG + 3}
    for name, tensor_map in zip(("x", "w", "y"), MAPS, strict=True):
        inputs |= {name: tensor_map} if kinds.get(name, "ptr") != "ptr" else {}
    return inputs | {"stride": BIG + 4, "M": 3, "m_sizes": BIG + 5}


def split(inputs: dict[str, int | bytes], words: Words) -> list[int | bytes]:
    """The values of these words, of a descriptor its first eight bytes as a number and the rest."""
    parts: list[int | bytes] = []
    for name, _ in words:
        value = inputs[name]
        parts += [value] if isinstance(value, int) else [int.from_bytes(value[:8], "little"), value[8:]]
    return parts


def packed(layout: BlockLayout, inputs: dict[str, int | bytes]) -> Memory:
    block = layout.new()
    call = [*split(inputs, GIVEN), 1234, layout.tail]
    layout.whole.pack_into(block[0], block[1], *call, BIG + 20, *split(inputs, LATE))
    return block


def read(kernel: Words, block: Memory) -> dict[str, int | bytes]:
    return words_of(kernel, Launch(block[2], 0, block[3]))


@pytest.mark.parametrize("name", KERNELS)
def test_every_word_is_read_where_the_kernel_has_it(name: str) -> None:
    kernel = KERNELS[name]
    inputs = values(kernel)
    block = packed(layout_of(kernel), inputs)
    wanted: dict[str, int | bytes] = {}
    all_values = inputs | FIXED | {"one": 1, "null": 0}
    for word, kind in kernel:
        wanted[word] = all_values[word]
        if kind.startswith("desc"):
            rank = int(kind[4:])
            names = [f"{word} size {i}" for i in range(rank)] + [f"{word} stride {i}" for i in range(rank)]
            wanted |= {part: all_values[key] for part, key in zip(names, MAPPED[word], strict=True)}
    got = read(kernel, block)
    assert {got.pop("scratch"), got.pop("scratch 2")} == {0}
    assert got == wanted
    assert len(got) + 2 == len(parameter_bytes(kernel))


@pytest.mark.parametrize("name", KERNELS)
def test_the_launch_configuration_is_the_drivers(name: str) -> None:
    layout = layout_of(KERNELS[name])
    config = LaunchConfig.from_address(packed(layout, values(KERNELS[name]))[2])
    assert (config.grid_x, config.grid_y, config.grid_z) == (1234, 1, 1)
    assert (config.block_x, config.block_y, config.block_z) == (256, 1, 1)
    assert (config.shared_bytes, config.stream) == (70_000, BIG + 20)
    assert (config.attributes, config.attribute_count) == (None, 0)


def test_a_call_packs_nothing_that_stays_as_it_is() -> None:
    """So another call's bytes leave the fixed words as they are: a block is filled once with them."""
    kernel = KERNELS["descriptors"]
    layout, inputs = layout_of(kernel), values(kernel)
    block = packed(layout, inputs)
    maps = split(inputs, GIVEN[:2])
    layout.whole.pack_into(block[0], block[1], *maps, 9, 8, 7, layout.tail, 6, 5, 4)
    got = read(kernel, block)
    assert (got["M"], got["stride"], got["y"], got["m_sizes"]) == (8, 9, 5, 4)
    assert {name: got[name] for name in FIXED} == FIXED


@pytest.mark.parametrize("value", [1 << 31, -(1 << 31) - 1])
def test_a_word_that_does_not_fit_is_no_silent_other_one(value: int) -> None:
    layout = layout_of(KERNELS["pointers"])
    with pytest.raises(Exception, match="format requires"):
        layout.whole.pack(1, 2, 3, value, 4, layout.tail, 5, 6, 7)


def test_every_block_has_its_own_aligned_memory() -> None:
    kernel = KERNELS["one descriptor"]
    layout, inputs = layout_of(kernel), values(kernel)
    blocks = [packed(layout, inputs) for _ in range(20)]
    places = [c_uint64.from_address(block[3] + 8).value for block in blocks]  # of w, behind x
    assert not any(place % 64 for place in places)
    assert len(set(places)) == 20
    assert c_uint32.from_address(places[0]).value == int.from_bytes(MAPS[1][:4], "little")
