"""Bundles pressed with xz: the same content, and nothing but an error of the tree where they are damaged."""

from __future__ import annotations

import hashlib
import lzma
from pathlib import Path

import pytest
import small_bundles

from pretuned.artifacts import packed
from pretuned.artifacts.bundle_file import members, open_bundle
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import BundleCorrupt, BundleTooNew, BundleUnreadable, BundleUntrusted, TargetMismatch
from pretuned.artifacts.limits import MAX_FILE_BYTES
from pretuned.artifacts.wire import PREAMBLE_BYTES, pack_preamble

SHIPPED = Path(__file__).parents[2] / "artifacts" / "bundles" / "catalogue-sm80.msgpack"


SMS = (80, 86, 89)


def of(sm: int) -> bytes:
    return encode(small_bundles.bundle({small_bundles.PROBLEM: [small_bundles.modelled(64, 0)]}, sm=sm))


def whole(data: bytes, sm: int | None = None) -> bytes:
    return b"".join(packed.unpack(data, "it", sm))


@pytest.fixture
def data() -> bytes:
    return encode(small_bundles.bundle({small_bundles.PROBLEM: [small_bundles.modelled(64, 0)]}))


def test_a_packed_bundle_is_the_bundle(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(packed.pack(data))
    with open_bundle(path) as bundle:
        assert encode(bundle.load()) == data
        assert bundle.path == str(path)
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    with open_bundle(path, sha256=pin) as bundle:
        assert bundle.size_bytes == len(data)
    with pytest.raises(BundleUntrusted, match="the pin says"):
        open_bundle(path, sha256="0" * 64)


@pytest.mark.parametrize("damage", ["cut", "appended", "flipped", "other", "empty", "inside"])
def test_what_is_damaged_is_refused(tmp_path: Path, data: bytes, damage: str) -> None:
    pressed = packed.pack(data)
    changed = {
        "cut": pressed[:-20],
        "appended": pressed + b"\0\0\0\0more",
        "flipped": pressed[:40] + bytes([pressed[40] ^ 1]) + pressed[41:],
        "other": data,
        "empty": b"",
        "inside": packed.pack(data[:-1]),
    }
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(changed[damage])
    with pytest.raises(BundleCorrupt, match=r"one\.msgpack\.xz"):
        open_bundle(path)


def test_it_unpacks_to_what_its_header_says(data: bytes) -> None:
    assert whole(lzma.compress(data)) == data
    with pytest.raises(BundleCorrupt, match=f"more than the {len(data)} bytes that its header says"):
        whole(lzma.compress(data + b"\0"))
    for short in (b"", data[:62]):
        with pytest.raises(BundleCorrupt, match=f"file is {len(short)} bytes, the preamble alone says 63"):
            whole(lzma.compress(short))


def test_one_that_ends_before_its_header_says(tmp_path: Path, data: bytes) -> None:
    for count in (63, 64, len(data) - 1):
        (tmp_path / "one.msgpack.xz").write_bytes(lzma.compress(data[:count]))
        with pytest.raises(BundleCorrupt, match=f"file is {count} bytes, header says {len(data)}|end of stream"):
            open_bundle(tmp_path / "one.msgpack.xz")


def test_others_can_not_write_it(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(packed.pack(data))
    path.chmod(0o666)
    with pytest.raises(BundleUntrusted, match="everybody can write it"):
        open_bundle(path)


def test_code_is_compressed_harder_than_xz_does_unasked() -> None:
    code = SHIPPED.read_bytes()[-400_000:]  # cubins lie behind the index
    pressed = packed.pack(code)
    assert len(pressed) < 0.97 * len(lzma.compress(code, preset=9 | lzma.PRESET_EXTREME))
    assert packed.pack(code) == pressed
    assert lzma.decompress(pressed) == code


def test_a_path_names_a_file_or_one_bundle_of_several_in_it() -> None:
    assert packed.split("a.msgpack.xz") == ("a.msgpack.xz", None)
    assert packed.split("/b#sm80/a.msgpack.xz#sm103") == ("/b#sm80/a.msgpack.xz", 103)
    for plain in ("a.msgpack#sm80", "a.msgpack.xz#sm", "a.msgpack.xz#smx", "a.msgpack.xz#sm80/b", "a.msgpack.xz#sm80 "):
        assert packed.split(plain) == (plain, None)
    assert packed.is_packed("a.msgpack.xz#sm80")
    assert not packed.is_packed("a.msgpack#sm80")


def test_of_several_each_is_read_alone(tmp_path: Path) -> None:
    several = {sm: of(sm) for sm in SMS}
    path = tmp_path / "all.msgpack.xz"
    path.write_bytes(packed.pack(*several.values()))
    assert members(path) == tuple(f"{path}#sm{sm}" for sm in SMS)
    pin = hashlib.sha256(path.read_bytes()).hexdigest()
    for sm, data in several.items():
        for how in ({}, {"sha256": pin}):
            with open_bundle(f"{path}#sm{sm}", **how) as bundle:
                assert (encode(bundle.load()), bundle.target.sm) == (data, sm)
                assert (bundle.path, bundle.size_bytes) == (f"{path}#sm{sm}", len(data))
    with pytest.raises(TargetMismatch, match="holds none for sm_90, but for sm_80, sm_86, sm_89"):
        open_bundle(f"{path}#sm90")
    with pytest.raises(BundleUnreadable, match=r"holds several: name one, as in '.*all\.msgpack\.xz#sm80'"):
        open_bundle(path)
    for name in (f"{path}#sm80", path):
        with pytest.raises(BundleUntrusted, match="the pin says"):
            open_bundle(name, sha256="0" * 64)


def test_a_file_of_one_may_be_named_with_its_capability(tmp_path: Path) -> None:
    path = tmp_path / "one.msgpack.xz"
    path.write_bytes(packed.pack(of(80)))
    assert members(path) == (str(path),)
    with open_bundle(f"{path}#sm80") as bundle:
        assert encode(bundle.load()) == of(80)


def test_damage_among_several_is_refused() -> None:
    first, two, three = map(of, SMS)
    too_new = two[:11] + (7).to_bytes(4, "big") + two[15:]
    longer = two[:16] + (len(two) + 1).to_bytes(8, "big") + two[24:]
    refused = {
        "two of its bundles are for sm_80": lzma.compress(first + first),
        f"more than the {len(first)} bytes that its header says": lzma.compress(first + b"\0" + two),
        f"more than the {len(two)} bytes that its header says": lzma.compress(first + two + b"more"),
        f"file is {len(two)} bytes, header says {len(two) + 1}": lzma.compress(first + longer),
        "the preamble alone says 63": lzma.compress(first + two[:20]),
        "file is 100 bytes, header says": lzma.compress(first + two[:100]),
        "it is cut off, or something follows it": packed.pack(first, two) + b"\0\0\0\0more",
        "it is cut off": packed.pack(first, two)[:-20],
    }
    for message, data in refused.items():
        with pytest.raises(BundleCorrupt, match=message):
            whole(data, 80 if "for sm_80" in message else 86)
        with pytest.raises(BundleCorrupt, match=message):
            packed.capabilities(data, "it")
        with pytest.raises((BundleCorrupt, BundleUnreadable)):
            whole(data)
    with pytest.raises(BundleTooNew, match="format 7"):
        whole(lzma.compress(first + too_new + three), 89)


def test_a_byte_that_changes_in_the_wanted_one_is_found(tmp_path: Path) -> None:
    first, two, three = map(of, SMS)
    path = tmp_path / "all.msgpack.xz"
    for at in range(63, len(two), max(1, len(two) // 40)):
        path.write_bytes(lzma.compress(first + two[:at] + bytes([two[at] ^ 1]) + two[at + 1 :] + three, preset=0))
        with pytest.raises((BundleCorrupt, TargetMismatch)):
            open_bundle(f"{path}#sm86").load()


def test_what_comes_after_the_wanted_one_is_not_unpacked(tmp_path: Path) -> None:
    first, two, three = map(of, SMS)
    changed = three[:-1] + bytes([three[-1] ^ 1])
    data = lzma.compress(first + two + changed)
    assert whole(data, 80) == first
    assert whole(data, 86) == two
    assert packed.capabilities(data, "it") == SMS  # aot verify then opens each


def test_several_take_no_more_than_the_limit_of_one() -> None:
    """By the size that the second says of itself."""
    bundle, index = of(80), of(86)[PREAMBLE_BYTES:]
    for total, message in (
        (MAX_FILE_BYTES, "^(?!.*limit)"),  # it ends too early
        (MAX_FILE_BYTES + 1, f"its bundles are {MAX_FILE_BYTES + 1} bytes or more together, the limit is"),
    ):
        data = lzma.compress(bundle + pack_preamble(total - len(bundle), index) + index)
        with pytest.raises(BundleCorrupt, match=message):
            whole(data, 86)


def test_a_bundle_that_is_not_compressed_is_all_that_its_file_holds() -> None:
    assert members(SHIPPED) == (str(SHIPPED),)
    assert members(f"{SHIPPED}.xz#sm80") == (f"{SHIPPED}.xz#sm80",)


@pytest.mark.slow
def test_a_large_bundle_comes_in_few_pieces_and_is_reported_where_it_is_cut_off() -> None:
    whole = SHIPPED.read_bytes()
    pressed = packed.pack(whole)
    pieces = [*packed.unpack(pressed, "it")]
    assert b"".join(pieces) == whole
    assert 2 < len(pieces) < 8
    with pytest.raises(BundleCorrupt, match="it is cut off"):
        b"".join(packed.unpack(pressed[: len(pressed) // 2], "it"))
    left = len(whole) - 1000
    with pytest.raises(BundleCorrupt, match=f"file is {left} bytes, header says {len(whole)}"):
        b"".join(packed.unpack(packed.pack(whole[:left]), "it"))


def test_a_copy_is_reported_by_its_digest(tmp_path: Path) -> None:
    plain, compressed = tmp_path / "it.msgpack", tmp_path / "it.msgpack.xz"
    plain.write_bytes(of(80))
    compressed.write_bytes(packed.pack(of(80)))
    assert packed.is_copy(str(plain), str(compressed))
    for other in (of(86), of(80)[:40], b""):
        plain.write_bytes(other)
        assert not packed.is_copy(str(plain), str(compressed))
    plain.write_bytes(of(80))
    for damaged in (b"", b"no xz", compressed.read_bytes()[:20]):
        compressed.write_bytes(damaged)
        assert not packed.is_copy(str(plain), str(compressed))
    compressed.unlink()
    assert not packed.is_copy(str(plain), str(compressed))
