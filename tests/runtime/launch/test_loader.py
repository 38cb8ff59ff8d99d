"""What is given to the driver, and what is known already."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.files.bundle_file import BundleFile, open_bundle
from pretuned.runtime.launch.loader import loaded, loaded_count

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    """Two GPUs that load what ships."""
    with emulated(EmulatedGpu(count=2)) as found:
        found.know(SHIPPED / "catalogue-sm90.msgpack", SHIPPED / "quantised-sm90.msgpack")
        yield found


def test_a_variant_of_two_bundles_is_loaded_once_a_device(gpu: EmulatedGpu) -> None:
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
        assert loaded_count() == len(gpu.loads) == len(shared)
        alone = next(i for i, variant in enumerate(every) if variant not in there)
        assert loaded(one, alone, 0, 132) is not loaded(one, alone, 1, 132)
        assert len(gpu.loads) == len(shared) + 2


def test_code_that_is_known_is_not_read_from_a_damaged_copy(
    gpu: EmulatedGpu, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
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
            assert gpu.loads == []
            kernel = loaded(one, 3, 0, 132)
            # (Its index is whole, and has the digest of the other's: such a copy is passed over from the start.)
            monkeypatch.setattr(BundleFile, "digest", property(lambda file: file.path.encode()))
            assert loaded(damaged, 3, 0, 132) is kernel
    assert len(gpu.loads) == 1
