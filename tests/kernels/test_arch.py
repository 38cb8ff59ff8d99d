from __future__ import annotations

import pytest

from pretuned.artifacts.records import Target
from pretuned.kernels.arch import ARCHS, REFUSED, Feature, Generation, arch_of, supported, torch_groups


def having(feature: Feature) -> tuple[int, ...]:
    return tuple(sm for sm in supported() if arch_of(sm).has(feature))


@pytest.mark.parametrize(
    ("feature", "sms"),
    [
        (Feature.TMA, (90, 100, 103, 120, 121)),
        (Feature.WGMMA, (90,)),
        (Feature.TCGEN05, (100, 103)),
        (Feature.MMA_ASYNC, (90, 100, 103)),
        (Feature.FP8, (89, 90, 100, 103, 120, 121)),
        (Feature.FP4, (100, 103, 120, 121)),
        (Feature.FAR_TMA, (100, 103, 120, 121)),
    ],
)
def test_who_can_do_what(feature: Feature, sms: tuple[int, ...]) -> None:
    assert having(feature) == sms


def test_products_that_go_on_alone_are_wgmma_or_tcgen05() -> None:
    for row in ARCHS.values():
        assert row.has(Feature.MMA_ASYNC) == (row.has(Feature.WGMMA) or row.has(Feature.TCGEN05))


def test_generations() -> None:
    kept: dict[Generation, list[int]] = {generation: [] for generation in Generation}
    for sm in supported():
        kept[arch_of(sm).generation].append(sm)
    assert kept == {
        Generation.AMPERE: [80],
        Generation.AMPERE_SMALL: [86, 87, 89, 120, 121],
        Generation.HOPPER: [90],
        Generation.BLACKWELL: [100, 103],
    }


def test_a_row_is_named_as_the_compiler_names_it() -> None:
    assert [arch_of(sm).name for sm in (80, 89, 90, 121)] == ["sm_80", "sm_89", "sm_90a", "sm_121a"]
    assert str(arch_of(90)) == "sm_90a"
    assert arch_of(90).target == Target(90, arch_specific=True)
    assert arch_of(86).target == Target(86, arch_specific=False)


def test_code_of_one_architecture_runs_there_alone_other_code_on_later_minor_revisions_too() -> None:
    runs = {sm: [other for other in supported() if arch_of(sm).runs_on(other)] for sm in supported()}
    assert runs[80] == [80, 86, 89]
    assert runs[86] == [86, 89]
    assert runs[87] == [87], "Tegra's code and that of other GPUs are not compatible"
    assert all(runs[sm] == [sm] for sm in (89, 90, 100, 103, 120, 121))


def test_which_drivers_must_know_the_code_by_name() -> None:
    assert [sm for sm in supported() if arch_of(sm).named_to_driver] == [100, 103, 120, 121]


def test_torch_groups_on_any_9_and_10_in_the_table_or_not() -> None:
    assert [sm for sm in (0, 75, 80, 89, 90, 91, 99, 100, 101, 103, 107, 110, 120) if torch_groups(sm)] == [
        90,
        91,
        99,
        100,
        101,
        103,
        107,
    ]


def test_what_is_refused_is_not_supported() -> None:
    assert not REFUSED.keys() & ARCHS.keys()
