"""A kernel that the caller names: found in a bundle, or the nearest are listed."""

from __future__ import annotations

from pathlib import Path

import pytest
from small_bundles import ANY, NARROW, ON_A100, ON_H200, PROBLEM, SPECS, WIDE, measured, modelled, snapshot, write

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Op
from pretuned.kernels.spec import FIELDS, Cache, Config, Edge, Loads, Schedule, TileRows
from pretuned.runtime.dispatch.pin import (
    NOTHING,
    KernelPair,
    Preference,
    _distance,
    check_pin,
    find,
    nearest,
    preferred,
)
from pretuned.runtime.dispatch.snapshot import Snapshot


@pytest.fixture
def bundle_set(tmp_path: Path) -> Snapshot:
    write(tmp_path / "1/a.msgpack", {PROBLEM: [modelled(64, WIDE)]}, tag="a")
    write(tmp_path / "2/b.msgpack", {PROBLEM: [modelled(64, NARROW), modelled(128, ANY)]}, tag="b")
    return snapshot(tmp_path / "1", tmp_path / "2")


@pytest.mark.parametrize("index", [WIDE, NARROW, ANY])
def test_a_config_is_found_in_the_first_bundle_that_has_it(bundle_set: Snapshot, index: int) -> None:
    usable, at = find(bundle_set, SPECS[index].config, PROBLEM, ON_H200, aligned=True)
    assert (usable.path.stem, at) == ("a", index)


def test_a_choice_is_found_in_the_bundle_that_made_it(bundle_set: Snapshot) -> None:
    for choice, name in ((modelled(64, WIDE), "a"), (modelled(64, NARROW), "b"), (modelled(128, ANY), "b")):
        usable, at = find(bundle_set, choice, PROBLEM, ON_H200, aligned=True)
        assert (usable.path.stem, at) == (name, choice.variant)


def test_what_is_not_there_lists_the_nearest(bundle_set: Snapshot) -> None:
    near = SPECS[NARROW].config._replace(block_m=32)
    with pytest.raises(InputError, match=rf"no usable bundle has a variant {near} .* nearest of 3: 16x64x128 w4"):
        find(bundle_set, near, PROBLEM, ON_H200, aligned=True)
    with pytest.raises(InputError, match="no usable bundle has the choice"):
        find(bundle_set, measured(64, WIDE, 3), PROBLEM, ON_H200, aligned=True)


def test_a_variant_that_cannot_run_the_call_is_not_there(bundle_set: Snapshot) -> None:
    with pytest.raises(InputError, match="nearest of 1: 64x64x32"):
        find(bundle_set, SPECS[WIDE].config, PROBLEM, ON_H200, aligned=False)
    with pytest.raises(InputError, match="its variant can't run here"):
        find(bundle_set, modelled(64, WIDE), PROBLEM, ON_H200, aligned=False)
    for problem, local in ((PROBLEM, ON_A100), (PROBLEM._replace(op=Op.DW), ON_H200)):
        with pytest.raises(InputError, match="there are none for this kind of problem"):
            find(bundle_set, Config(64, 64, 64, 4, 3), problem, local, aligned=True)


def test_configs_that_differ_are_apart() -> None:
    """Whichever knob they differ by: an enum's counts one, a number's its doublings."""
    config = Config(64, 64, 64, 4, 4)
    others = {
        "block_m": 32,
        "block_n": 128,
        "block_k": 256,
        "num_warps": 8,
        "num_stages": 3,
        "group_m": 16,
        "loads": Loads.TMA,
        "schedule": Schedule.PINGPONG,
        "cache": Cache.EVICT_FIRST,
        "edge": Edge.HALF,
        "rows": TileRows.FITTED,
    }
    assert set(others) == set(FIELDS)
    same = {name: getattr(config, name) for name in FIELDS}
    distances = {name: _distance(config, {**same, name: value}) for name, value in others.items()}
    assert _distance(config, same) == 0.0
    assert min(distances.values()) > 0.4
    assert {distances[name] for name in ("block_m", "loads", "schedule", "cache", "edge", "rows")} == {1.0}
    assert distances["block_k"] == 2.0


def test_a_wish_gets_the_nearest_that_can_run(bundle_set: Snapshot) -> None:
    wishes = {WIDE: {"block_m": 256, "block_n": 256}, NARROW: {"block_m": 16}, ANY: {"block_k": 16, "num_stages": 2}}
    for index, wish in wishes.items():
        assert nearest(bundle_set, wish, PROBLEM, ON_H200, aligned=True) == SPECS[index].config
    assert nearest(bundle_set, wishes[WIDE], PROBLEM, ON_H200, aligned=False) == SPECS[ANY].config
    assert nearest(bundle_set, {}, PROBLEM, ON_A100, aligned=True) is None


def test_a_preference_is_of_a_form_and_only_where_a_bundle_has_it(bundle_set: Snapshot) -> None:
    wide, narrow = SPECS[WIDE].config, SPECS[NARROW].config
    pin = Preference(((Fusion.NONE, wide), (Fusion.GATHER, narrow)))
    assert (pin.config, pin.of(Fusion.GATHER), pin.of(Fusion.SCATTER)) == (wide, narrow, None)
    assert NOTHING.config is None
    assert preferred(bundle_set, pin, PROBLEM, ON_H200, aligned=True) == wide
    assert preferred(bundle_set, pin, PROBLEM, ON_H200, aligned=False) is None
    assert preferred(bundle_set, pin, PROBLEM, ON_A100, aligned=True) is None
    assert preferred(bundle_set, NOTHING, PROBLEM, ON_H200, aligned=True) is None


def test_a_bundle_that_is_damaged_is_dropped_and_the_others_asked(bundle_set: Snapshot, tmp_path: Path) -> None:
    bundle_set.view(ON_H200, installed=True)
    data = bytearray((tmp_path / "1/a.msgpack").read_bytes())
    del data[200:]
    (tmp_path / "1/a.msgpack").write_bytes(data)
    pin = Preference(((Fusion.NONE, SPECS[WIDE].config),))
    assert preferred(bundle_set, pin, PROBLEM, ON_H200, aligned=True) == SPECS[WIDE].config


def test_what_can_name_a_variant() -> None:
    config, choice = SPECS[WIDE].config, modelled(64, WIDE)
    first, second = (Preference(((Fusion.NONE, SPECS[index].config),)) for index in (WIDE, NARROW))
    pair = KernelPair(Op.DX, first, second)
    assert check_pin("kernel_config_fwd", None) is None
    for pin in (config, choice, first):
        assert check_pin("kernel_config_fwd", pin) is pin
    assert check_pin("kernel_config_bwd_dX", pair) is first
    assert check_pin("kernel_config_bwd_dX", pair, is_first_gemm=False) is second
    with pytest.raises(InputError, match="kernel_config_bwd_dW is a KernelPair of dX, wanted dW's"):
        check_pin("kernel_config_bwd_dW", pair)
    with pytest.raises(InputError, match="kernel_config_fwd is a dict, wanted a pretuned"):
        check_pin("kernel_config_fwd", {"block_m": 128})
