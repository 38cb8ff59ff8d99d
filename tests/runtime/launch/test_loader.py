"""Calls of the driver when a kernel is loaded, and results that are cached."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from emulated_driver import EmulatedGpu, emulated
from emulated_kernels import variant_and_code, write

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.records import DType, Op
from pretuned.kernels.spec import Config, Spec
from pretuned.runtime.launch.loader import loaded, loaded_count

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"


@pytest.fixture
def gpu() -> Iterator[EmulatedGpu]:
    """Two GPUs that load what ships."""
    with emulated(EmulatedGpu(count=2)) as gpu:
        gpu.know(SHIPPED / "catalogue-sm90.msgpack", SHIPPED / "quantised-sm90.msgpack")
        yield gpu


def test_a_variant_of_two_bundles_is_loaded_once_a_device(gpu: EmulatedGpu) -> None:
    with (
        open_bundle(SHIPPED / "catalogue-sm90.msgpack") as opened,
        open_bundle(SHIPPED / "quantised-sm90.msgpack") as two,
    ):
        there = {variant: i for i, variant in enumerate(two.variants())}
        variants = opened.variants()
        shared = [(i, there[variant]) for i, variant in enumerate(variants) if variant in there]
        assert 5 < len(shared) < len(variants)
        for i, j in shared:
            kernel = loaded(opened, i, 0, 132)
            assert loaded(two, j, 0, 132) is kernel
            assert loaded(opened, i, 0, 132) is kernel
        assert loaded_count() == len(gpu.loads) == len(shared)
        alone = next(i for i, variant in enumerate(variants) if variant not in there)
        assert loaded(opened, alone, 0, 132) is not loaded(opened, alone, 1, 132)
        assert len(gpu.loads) == len(shared) + 2


def test_code_that_is_known_is_not_read_from_a_damaged_bundle(gpu: EmulatedGpu, tmp_path: Path) -> None:
    """It has the same code in another bundle. (A copy of one bundle is passed over from the start.)"""
    config = Config(16, 64, 64, 4, 2)
    shared, other = (variant_and_code(Spec(Op.FORWARD, dtype, config)) for dtype in (DType.FP32, DType.BF16))
    whole = write(tmp_path / "whole.msgpack", [shared])
    path = write(tmp_path / "damaged.msgpack", [shared, other])
    data, cubin = path.read_bytes(), shared[1]
    assert data.count(cubin) == 1
    path.write_bytes(data.replace(cubin, cubin[:-1] + b"?"))
    with open_bundle(whole) as opened, open_bundle(path) as damaged:
        with pytest.raises(BundleCorrupt):
            loaded(damaged, 0, 0, 132)
        assert gpu.loads == []
        kernel = loaded(opened, 0, 0, 132)
        assert loaded(damaged, 0, 0, 132) is kernel
    assert len(gpu.loads) == 1
