from __future__ import annotations

import pytest

from pretuned.kernels.arch import ARCHS, arch_of, limits, supported
from pretuned.kernels.chips import CHIPS, chip_for, chip_named

KNOWN = (80, 86, 87, 89, 90, 100, 103, 120, 121)


def test_every_capability_has_limits_and_a_representative() -> None:
    assert supported() == KNOWN
    for sm in KNOWN:
        assert arch_of(sm).sm == sm
        assert limits(sm) is arch_of(sm).limits
        assert chip_for(sm).sm == sm


@pytest.mark.parametrize("lookup", [arch_of, limits, chip_for])
def test_an_unknown_capability_is_an_error_that_lists_the_known(lookup: object) -> None:
    with pytest.raises(LookupError, match=r"sm_75 is not known; supported: 80, 86, .*121"):
        lookup(75)  # type: ignore[operator]


@pytest.mark.parametrize(
    ("sm", "per_sm_kib", "per_block_kib", "threads", "blocks"),
    [
        (80, 164, 163, 2048, 32),
        (86, 100, 99, 1536, 16),
        (89, 100, 99, 1536, 24),
        (90, 228, 227, 2048, 32),
        (100, 228, 227, 2048, 32),
        (120, 100, 99, 1536, 24),
    ],
)
def test_limits_are_the_programming_guides(
    sm: int, per_sm_kib: int, per_block_kib: int, threads: int, blocks: int
) -> None:
    row = limits(sm)
    assert (row.shared_per_sm_bytes, row.shared_per_block_bytes) == (per_sm_kib * 1024, per_block_kib * 1024)
    assert (row.threads_per_sm, row.blocks_per_sm, row.registers_per_sm) == (threads, blocks, 65536)


def test_representatives() -> None:
    assert chip_for(80).name == "A100 80GB SXM"
    assert chip_for(90).name == "H100 SXM"
    assert chip_for(100).name == "B200"


@pytest.mark.parametrize(
    ("device", "name"),
    [
        ("NVIDIA H200", "H200"),
        ("NVIDIA H100 80GB HBM3", "H100 SXM"),
        ("NVIDIA A100-SXM4-80GB", "A100 80GB SXM"),
        ("nvidia geforce rtx 4090", "RTX 4090"),
        ("NVIDIA L4", "L4"),
        ("NVIDIA L40S", "L40S"),
    ],
)
def test_a_chip_by_its_device_name(device: str, name: str) -> None:
    chip = chip_named(device)
    assert chip is not None
    assert chip.name == name


@pytest.mark.parametrize("device", ["NVIDIA GeForce RTX 4090 D", "NVIDIA H200 MIG 1g.18gb", "Tesla T4", ""])
def test_a_namesake_is_not_taken_for_the_chip(device: str) -> None:
    assert chip_named(device) is None


def test_names_are_unique() -> None:
    names = [name.casefold() for chip in CHIPS for name in chip.names]
    assert len(names) == len(set(names))
    assert len({chip.name for chip in CHIPS}) == len(CHIPS)


@pytest.mark.parametrize("chip", CHIPS, ids=lambda chip: chip.name)
def test_figures_hang_together(chip: object) -> None:
    from pretuned.kernels.chips import Chip

    assert isinstance(chip, Chip)
    assert chip.sm in ARCHS
    assert chip.source
    # A wrong SM count, or a sparse figure taken for a dense one, breaks one of these.
    assert 1.2 < chip.clock_ghz < 2.7
    flops_per_clock_sm = chip.bf16_tflops * 1e3 / (chip.sm_count * chip.clock_ghz)
    assert 480 < flops_per_clock_sm < 8700
    assert 1.6 < chip.bf16_tflops / chip.tf32_tflops < 2.1


def test_another_sm_count_scales_the_rates_and_not_the_memory() -> None:
    whole = chip_for(90)
    half = whole.with_sm_count(66)
    assert half.sm_count == 66
    assert half.bf16_tflops == pytest.approx(whole.bf16_tflops / 2)
    assert half.clock_ghz == pytest.approx(whole.clock_ghz)
    assert half.bandwidth_gbs == whole.bandwidth_gbs
    assert whole.with_sm_count(whole.sm_count) is whole
    with pytest.raises(ValueError, match="sm_count is 0, wanted at least 1"):
        whole.with_sm_count(0)
