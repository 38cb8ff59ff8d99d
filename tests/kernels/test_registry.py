"""One entry a kernel: what it says of itself is what there is, and whoever asks is answered from it."""

from __future__ import annotations

import itertools
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import DType, Fusion, Layout, Op, RowOp
from pretuned.kernels import registry
from pretuned.kernels.entry import KernelEntry, Limits, Tiles
from pretuned.kernels.registry import ENTRIES, KERNELS, refusal
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import (
    FIELDS,
    MAX_EXPERTS,
    MAX_EXPERTS_FALLBACK,
    RANGES,
    Cache,
    Config,
    Edge,
    Loads,
    Schedule,
    Spec,
    TileRows,
    code_of,
)

SHIPPED = sorted((Path(__file__).parents[2] / "artifacts" / "bundles").glob("*.msgpack"))
KINDS = {"loads": Loads, "schedule": Schedule, "cache": Cache, "edge": Edge, "rows": TileRows}
EVERY = [(entry, tiles) for entry in KERNELS for tiles in entry.tiles]


def first(tiles: Tiles) -> Config:
    """A config of these tiles."""
    return Config(**{knob: tiles.allowed(knob)[-1] for knob in FIELDS})


def specs(entry: KernelEntry, tiles: Tiles) -> list[Spec]:
    return [
        Spec(op, dtype, first(tiles), layout, fusion)
        for op in sorted(tiles.ops or entry.ops, key=lambda op: op.value)
        for dtype in DType
        if dtype in (tiles.dtypes or entry.dtypes)
        for fusion in (tiles.fusions or entry.fusions)
        for layout in sorted(entry.layouts(op), key=lambda layout: layout.value)
    ]


def test_a_folder_is_of_plain_dtypes_or_of_none() -> None:
    """Of a plain dtype no other folder is asked, and so none is imported."""
    for name in registry.FOLDERS:
        folder = import_module(f"pretuned.kernels.{name}")
        assert {dtype.quantised for entry in folder.ENTRIES for dtype in entry.dtypes} == {name not in registry._PLAIN}


def test_every_entry_is_found_by_its_name() -> None:
    for name, entry in ENTRIES.items():
        assert registry.entry_named(name) is entry
    assert registry.entry_named("no_such_kernel") is None
    with pytest.raises(AttributeError, match="NO_KERNELS"):
        _ = registry.NO_KERNELS


def test_a_plain_product_imports_no_other_kernels() -> None:
    code = """if True:
        import sys
        from pretuned.artifacts.records import Op
        from pretuned.kernels import registry
        from pretuned.kernels.spec import Config
        assert registry.kernel_of(Op.FORWARD, Config(16, 64, 64, 4, 2)).name == registry.entry_named("rows").name
        print(*(name for name in registry.FOLDERS if f"pretuned.kernels.{name}" in sys.modules))"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert tuple(done.stdout.split()) == registry._PLAIN


@pytest.mark.parametrize(("entry", "tiles"), EVERY)
def test_what_an_entry_declares_is_not_refused(entry: KernelEntry, tiles: Tiles) -> None:
    assert specs(entry, tiles)
    for spec in specs(entry, tiles):
        assert refusal(spec) is None
        assert registry.entry_of(spec) is entry
        assert registry.tiles_of(spec.op, spec.config, spec.dtype) is not None


@pytest.mark.parametrize(("entry", "tiles"), EVERY)
def test_what_it_does_not_declare_is_refused(entry: KernelEntry, tiles: Tiles) -> None:
    spec = specs(entry, tiles)[0]
    for knob in FIELDS:
        allowed = tiles.allowed(knob)
        for value in KINDS.get(knob, {*range(17), 32, 48, 64, 128, 192, 256, 1024, 1025}):
            config = spec.config._replace(**{knob: value})
            reason = refusal(spec._replace(config=config))
            if value in allowed:
                assert reason is None or "format 1 has no other" in reason
            elif all(any(tile.misfits(config)) for tile in entry.tiles):
                assert reason is not None
    for other in {*DType} - entry.dtypes:
        reason = refusal(spec._replace(dtype=other))
        another = registry.kernel_of(spec.op, spec.config, other)
        if another is entry:
            assert f"its dtypes are {', '.join(sorted(dtype.value for dtype in entry.dtypes))}" in str(reason)
        else:  # two kernels have such tiles: of w as it is, and of its codes
            assert another is not None
            assert reason is None or f"{another.name} has no code" in reason
    for layout in {*Layout} - entry.layouts(spec.op):
        assert f"w is {layout.value}, wanted" in str(refusal(spec._replace(layout=layout)))
    for other in {Fusion.GATHER, Fusion.SILU, Fusion.LOW_RANK} - entry.fusions:
        assert "its forms are " in str(refusal(spec._replace(fusion=other)))


def test_no_kernel_has_every_schedule() -> None:
    config = Config(64, 64, 64, 4, 3, rows=TileRows.FITTED)
    assert "no kernel of forward has such a schedule" in str(refusal(Spec(Op.FORWARD, DType.BF16, config)))
    with pytest.raises(LookupError, match="no kernel of forward has such a schedule"):
        registry.entry_of(Spec(Op.FORWARD, DType.BF16, config))
    fits = Config(256, 128, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, rows=TileRows.FITTED)
    assert refusal(Spec(Op.FORWARD, DType.BF16, fits)) is None
    assert "no kernel of dW has such a schedule" in str(refusal(Spec(Op.DW, DType.BF16, fits)))


@pytest.mark.parametrize(("sm", "lacking"), [(80, ["tma", "wgmma"]), (90, []), (100, ["wgmma"]), (120, ["wgmma"])])
def test_an_architecture_lacks_what_a_kernel_needs(sm: int, lacking: list[str]) -> None:
    pointers = Config(64, 64, 64, 4, 3)
    assert refusal(Spec(Op.FORWARD, DType.BF16, pointers), sm) is None
    through_tma = refusal(Spec(Op.FORWARD, DType.BF16, pointers._replace(loads=Loads.TMA)), sm)
    assert through_tma is None or "sm_80 has no tma" in through_tma
    assert (through_tma is None) is ("tma" not in lacking)
    special = Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
    reason = refusal(Spec(Op.FORWARD, DType.BF16, special), sm)
    assert all(f"has no {word}" in str(reason) for word in lacking)
    assert (reason is None) is (not lacking)


def test_experts_beyond_what_a_kernel_counts_are_refused() -> None:
    for dtype, layout, config, most in (
        (DType.BF16, Layout.NK, Config(64, 64, 64, 4, 3), MAX_EXPERTS_FALLBACK),
        (DType.BF16, Layout.NK, Config(64, 64, 64, 4, 3, schedule=Schedule.TILE), MAX_EXPERTS),
        (DType.MXFP4, Layout.STORED, Config(64, 64, 64, 4, 3, schedule=Schedule.TILE), MAX_EXPERTS),
        (
            DType.BF16,
            Layout.NK,
            Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE),
            MAX_EXPERTS,
        ),
    ):
        spec = Spec(Op.FORWARD, dtype, config, layout, max_experts=most)
        assert registry.limits_of(spec.op, config, dtype).experts == most
        assert refusal(spec) is None
        assert f"it counts {most} experts at most, not {most + 1}" in str(refusal(spec._replace(max_experts=most + 1)))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_what_the_entries_say(path: Path) -> None:
    """Today's entries would compile each variant with the same arguments, descriptors and threads."""
    with open_bundle(path) as file:
        for variant in file.variants():
            if isinstance(variant.op, RowOp):
                assert variant.kernel == registry.entry_of(RowOpSpec(variant.op, variant.dtype, variant.alignment)).name
                continue
            config = Config.from_pairs(variant.config)
            spec = Spec(
                variant.op,
                variant.dtype,
                config,
                variant.layout,
                variant.fusion,
                variant.alignment,
                variant.max_experts,
            )
            assert refusal(spec, file.target.sm) is None
            assert variant.kernel == registry.entry_of(spec).name
            assert variant.arguments == registry.arguments(spec)
            assert variant.threads == registry.threads(spec)
            assert {tensor_map.argument for tensor_map in variant.tensor_maps} == set(registry.boxes(spec))


@pytest.mark.parametrize("entry", ENTRIES.values(), ids=ENTRIES)
def test_an_entry_names_a_kernel_that_its_home_has(entry: KernelEntry) -> None:
    function = getattr(import_module(f"pretuned.kernels.{entry.home}"), entry.name)
    if not isinstance(entry, KernelEntry):
        return
    names = list(function.arg_names)
    for spec in itertools.chain.from_iterable(specs(entry, tiles) for tiles in entry.tiles):
        argument_names = [name for name, _ in registry.arguments(spec)]
        constants = registry.constants(spec, 90)
        assert [name for name in names if name not in constants] == argument_names
        assert set(names) == {*argument_names, *constants}
        assert set(registry.boxes(spec)) == {name for name, kind in registry.arguments(spec) if kind[:4] == "desc"}


def test_a_knob_that_no_tiles_speak_of_has_its_default() -> None:
    """So a new one is refused but where a kernel says that it has it."""
    silent = Tiles(Limits(8), {})
    assert {knob for knob in FIELDS if len(silent.allowed(knob)) == 1} == set(KINDS) == set(FIELDS) - set(RANGES)
    plain = Config(64, 64, 64, 4, 3)
    assert not list(silent.misfits(plain))
    for knob, kind in KINDS.items():
        for value in set(kind) - {getattr(plain, knob)}:
            (misfit,) = silent.misfits(plain._replace(**{knob: value}))
            assert misfit == f"{knob} is {value.name}, wanted {getattr(plain, knob).name}"


def test_a_low_rank_part_is_code_of_its_own() -> None:
    """It goes with a product that moves nothing, or whose rows are gathered, whatever else is done to them."""
    low = Fusion.LOW_RANK
    assert code_of(Op.DX, low) is low
    assert code_of(Op.FORWARD, low | Fusion.GATHER | Fusion.BIAS) is low | Fusion.GATHER
    for op, beside in ((Op.DW, Fusion.NONE), (Op.FORWARD, Fusion.SCATTER), (Op.FORWARD, Fusion.SILU)):
        with pytest.raises(ValueError, match="LOW_RANK goes alone, or with GATHER"):
            code_of(op, low | beside)
