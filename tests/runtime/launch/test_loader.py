"""What is given to the driver, and what is known already. (The driver itself is tested on a GPU.)"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.files.bundle_file import BundleFile, open_bundle
from pretuned.runtime.driver import device
from pretuned.runtime.launch import loader
from pretuned.runtime.launch.loader import loaded, loaded_count

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"


@pytest.fixture
def given(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Any, ...]]:
    """What the driver was given."""
    took: list[tuple[Any, ...]] = []

    def load(*args: Any) -> object:
        took.append(args)
        return object()

    monkeypatch.setattr(loader, "load_kernel", load)
    devices: dict[int, device.Device] = {}
    monkeypatch.setattr(device, "devices", devices)
    monkeypatch.setattr(loader, "devices", devices)
    return took


def test_a_variant_of_two_bundles_is_loaded_once_a_device(given: list[tuple[Any, ...]]) -> None:
    with (
        open_bundle(SHIPPED / "catalogue-sm90.msgpack") as one,
        open_bundle(SHIPPED / "quantised-sm90.msgpack") as two,
    ):
        there = {variant: i for i, variant in enumerate(two.variants())}
        every = one.variants()
        shared = [(i, there[variant]) for i, variant in enumerate(every) if variant in there]
        assert 5 < len(shared) < len(every)
        for i, j in shared:
            kernel = loaded(one, i, 0, 132)
            assert loaded(two, j, 0, 132) is kernel
            assert loaded(one, i, 0, 132) is kernel
        assert loaded_count() == len(given) == len(shared)
        alone = next(i for i, variant in enumerate(every) if variant not in there)
        assert loaded(one, alone, 0, 132) is not loaded(one, alone, 1, 132)
        assert len(given) == len(shared) + 2


def test_code_that_is_known_is_not_read_from_a_damaged_copy(
    given: list[tuple[Any, ...]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = SHIPPED / "catalogue-sm90.msgpack"
    data = bytearray(whole.read_bytes())
    with open_bundle(whole) as one:
        offset, size = one._index.place(3)
        data[offset + size // 2] ^= 1
        path = tmp_path / "damaged.msgpack"
        path.write_bytes(data)
        with open_bundle(path) as damaged:
            with pytest.raises(BundleCorrupt):
                loaded(damaged, 3, 0, 132)
            assert given == []
            kernel = loaded(one, 3, 0, 132)
            # (Its index is whole, and has the digest of the other's: such a copy is passed over from the start.)
            monkeypatch.setattr(BundleFile, "digest", property(lambda file: file.path.encode()))
            assert loaded(damaged, 3, 0, 132) is kernel
    assert len(given) == 1
