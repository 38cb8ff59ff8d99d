"""Which kernel of a pass runs, and what its launch is made of."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cudaconfig import Launch, LaunchConfig, parameters, read_launches
from made import ELF, ON_A100, ON_H200, ON_L40S, PROBLEM, WIDE, bundle, modelled, snapshot

from pretuned.artifacts.errors import BundleCorrupt, CudaError, InputError
from pretuned.artifacts.files.bundle_file import BundleFile
from pretuned.artifacts.files.publish import publish
from pretuned.artifacts.format.codec import encode
from pretuned.artifacts.records.bundle import Kernel, Variant
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Fusion, Layout, RowOp
from pretuned.artifacts.records.target import LocalGpu
from pretuned.kernels.contract import rowops
from pretuned.kernels.contract.launchable import unlaunchable
from pretuned.kernels.contract.registry import ENTRIES
from pretuned.kernels.contract.rowops import Block, RowOpSpec
from pretuned.runtime.dispatch import rowops as dispatch_rowops
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.cuda import Function
from pretuned.runtime.driver.launcher import RowOpLauncher
from pretuned.runtime.inspect.preload import passes_of
from pretuned.runtime.launch import loader, proof
from pretuned.runtime.launch import rowops as launch_rowops
from pretuned.runtime.launch.gemm import LoadedKernel


def record(op: RowOp, cubin: bytes = ELF, *, alignment: int = 16, revision: int = 0, **fields: Any) -> Variant:
    spec = RowOpSpec(op, DType.BF16, alignment)
    one = Variant(
        op.value, revision or ENTRIES[op.value].revision, 1, op, spec.dtype, Layout.NK, Fusion.NONE, alignment,
        spec.max_experts,
        spec.config.pairs(), op.value, rowops.arguments(op), (), 256, 0, 40, 0, 0, len(cubin),
        hashlib.sha256(cubin).digest(),
    )  # fmt: skip
    return replace(one, **fields)


def write(path: Path, variants: Sequence[Variant], sm: int = 90) -> Path:
    """A bundle of a GEMM's choice, and these variants after its own."""
    base = bundle({PROBLEM: [modelled(64, WIDE)]}, sm=sm, tag=path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    kernels = {(one.kernel, one.revision) for one in variants}
    every = replace(
        base, variants=(*base.variants, *variants), cubins=(*base.cubins, *[ELF] * len(variants)),
        kernels=(*base.kernels, *(Kernel(*one, hashlib.sha256(b"source").digest()) for one in sorted(kernels))),
    )  # fmt: skip
    publish(path, encode(every))
    return path


def best(
    paths: Sequence[Path], local: LocalGpu = ON_H200, op: RowOp = RowOp.COMBINE, *, aligned: bool = True
) -> list[tuple[str, int]]:
    found = dispatch_rowops.ranked(snapshot(*paths), op, rowops.dtype_of(DType.BF16, op), local, aligned=aligned)
    return [(usable.path.name, index - 3) for usable, index in found]


def test_aligned_code_first_then_the_later_revision_then_the_place(tmp_path: Path) -> None:
    any_row, old, new = record(RowOp.COMBINE, alignment=1), record(RowOp.COMBINE), record(RowOp.COMBINE, revision=9)
    a, b = write(tmp_path / "a.msgpack", [any_row, old]), write(tmp_path / "b.msgpack", [any_row, new])
    assert best([a, b]) == [("b.msgpack", 1), ("a.msgpack", 1), ("a.msgpack", 0), ("b.msgpack", 0)]
    assert best([a, b], aligned=False) == [("a.msgpack", 0), ("b.msgpack", 0)]


def test_code_for_the_very_capability_before_a_compatible_one(tmp_path: Path) -> None:
    older = write(tmp_path / "80.msgpack", [record(RowOp.COMBINE)], sm=80)
    newer = write(tmp_path / "89.msgpack", [record(RowOp.COMBINE, alignment=1)], sm=89)
    assert best([older, newer], ON_L40S) == [("89.msgpack", 0), ("80.msgpack", 0)]
    assert best([older, newer], ON_A100) == [("80.msgpack", 0)]
    assert best([older, newer], ON_H200) == []


@pytest.mark.parametrize("op", [RowOp.COMBINE, RowOp.CLEAR])
@pytest.mark.parametrize(
    "fields",
    [
        {"abi": 2},
        {"arguments": (("y", "ptr"),)},
        {"arguments": rowops.arguments(RowOp.ACTIVATION)},
        {"arguments": tuple(reversed(rowops.arguments(RowOp.COMBINE)))},
        {"config": (("block", 0), ("num_warps", 8))},
        {"config": (("num_warps", 8),)},
        {"threads": 100},
        {"shared_bytes": 300 << 10},
        {"dtype": DType.FP16},
    ],
)
def test_what_can_not_be_launched_is_passed_over(tmp_path: Path, fields: dict[str, Any], op: RowOp) -> None:
    kind = {"dtype": rowops.dtype_of(DType.BF16, op)}
    wrong = record(op, **kind | fields)
    path = write(tmp_path / "a.msgpack", [wrong, record(op, alignment=1, **kind)])
    assert best([path], op=op) == [("a.msgpack", 1)]
    assert unlaunchable(wrong) or set(fields) & {"abi", "shared_bytes", "dtype"}


def test_installed_bundles_are_asked_where_no_other_has_it(tmp_path: Path) -> None:
    without = write(tmp_path / "own" / "a.msgpack", [])
    write(tmp_path / "package" / "b.msgpack", [record(RowOp.COMBINE)])
    found = snapshot(without, installed=[tmp_path / "package"])
    ((usable, _),) = dispatch_rowops.ranked(found, RowOp.COMBINE, DType.BF16, ON_H200, aligned=True)
    assert usable.path.name == "b.msgpack"


def test_a_bundle_that_an_earlier_version_built_hides_no_later_revision(tmp_path: Path) -> None:
    now = ENTRIES["combine"].revision
    write(tmp_path / "package" / "ships.msgpack", [record(RowOp.COMBINE)])
    for revision, runs in ((now - 1, "ships.msgpack"), (now, "own.msgpack"), (now + 1, "own.msgpack")):
        own = write(tmp_path / str(revision) / "own.msgpack", [record(RowOp.COMBINE, revision=revision)])
        found = snapshot(own, installed=[tmp_path / "package"])
        first, *_ = dispatch_rowops.ranked(found, RowOp.COMBINE, DType.BF16, ON_H200, aligned=True)
        assert first[0].path.name == runs


def test_preload_takes_every_pass_for_tensors_that_are_aligned_and_not(tmp_path: Path) -> None:
    kinds = [op for op in RowOp if op not in (RowOp.SORT_SLOTS, RowOp.CLEAR)]
    of_rows = [record(op, alignment=alignment) for op in kinds for alignment in (16, 1)]
    of_none = [
        record(RowOp.SORT_SLOTS, dtype=DType.FP32, alignment=1),
        record(RowOp.CLEAR, dtype=DType.FP32),
    ]  # no dtype
    taken = snapshot(write(tmp_path / "a.msgpack", [*of_rows, *of_none, record(RowOp.COMBINE, dtype=DType.FP16)]))
    first, end = 3 + len(of_rows), 3 + len(of_rows) + len(of_none)
    assert sorted(index for _, index in passes_of([PROBLEM], taken, ON_H200)) == list(range(3, end))
    quantised = replace(PROBLEM, dtype=DType.MXFP4)  # its x and y are bf16
    assert passes_of([quantised], taken, ON_H200) == passes_of([PROBLEM], taken, ON_H200)
    tf32 = passes_of([replace(PROBLEM, dtype=DType.TF32)], taken, ON_H200)
    assert sorted(index for _, index in tf32) == list(range(first, end))


@pytest.mark.parametrize("op", RowOp)
def test_the_driver_gets_every_argument_and_the_grid(op: RowOp, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = rowops.arguments(op)
    pointers = tuple(1000 + i for i, (_, kind) in enumerate(kinds) if kind == "ptr")
    rows, columns = 70, 3000
    sizes = {"M": rows, "columns": columns}
    numbers = tuple(sizes.get(name, -i) for i, (name, kind) in enumerate(kinds) if kind != "ptr")
    seen: list[Any] = []

    def read(launch: Launch) -> None:
        found = LaunchConfig.from_address(launch.config)
        *values, first, second = launch.values(parameters(kinds)[1])
        scratch = [first, second]
        blocks = [found.grid_x, found.grid_y, found.grid_z, found.block_x, found.block_y, found.block_z]
        rest = (found.shared_bytes, found.stream, found.attributes, found.attribute_count)
        seen.append((values, scratch, blocks, *rest))

    read_launches(monkeypatch, read)
    kernel = LoadedKernel(record(op), Function(5, 6, 2, 256, 4096, 8), 132)
    launcher = RowOpLauncher(kernel.variant, kernel.function, op)
    for _ in range(2):
        launcher(rows, columns, pointers, numbers, 79)
    block = Block.from_pairs(kernel.variant.config).block
    side_by_side = {RowOp.ACTIVATION: 4, RowOp.ACTIVATION_CODES: 8, RowOp.ACTIVATION_ROW_CODES: 2}.get(op, 1)
    grid = rowops.programs(op, rows, columns, block, side_by_side)
    if op is RowOp.ACTIVATION_ROW_CODES and columns > block:
        side_by_side = 1  # of wider rows
    by_block = op in (RowOp.ACTIVATION, RowOp.ACTIVATION_CODES, RowOp.COMBINE)
    assert grid == -(-rows // side_by_side) * (-(-columns // block) if by_block else 1)
    wanted = ([*pointers, *numbers], [0, 0], [grid, 1, 1, 256, 1, 1], 4096, 79, None, 0)
    assert seen == [wanted] * 2


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The codes that the next launches return, then success; a GPU that loads every variant but damaged ones."""
    codes: list[int] = []
    read_launches(monkeypatch, lambda _: codes.pop(0) if codes else 0)
    monkeypatch.setattr(cuda, "make_current", lambda device: codes.append(0))
    monkeypatch.setattr(launch_rowops, "platform_supported", lambda: True)
    monkeypatch.setattr(launch_rowops, "local_gpu", lambda device: ON_H200)

    def loaded(bundle: BundleFile, index: int, device: int, sm_count: int) -> LoadedKernel:
        if "damaged" in Path(bundle.path).name:
            raise BundleCorrupt("its cubin is not what the index says")
        return LoadedKernel(bundle.variant(index), Function(5, 6, device, 256, 0, 8), sm_count)

    monkeypatch.setattr(loader, "loaded", loaded)
    monkeypatch.setattr(proof, "stands", lambda *_: True)
    return codes


GIVEN = (1, 2, 3, 4, 5, 6), (2, 3, 1, 0), 0  # pointers and numbers of COMBINE, a stream


def made(op: RowOp = RowOp.COMBINE) -> RowOpLauncher:
    return RowOpLauncher(record(op), Function(5, 6, 0, 256, 0, 8), op)


def test_a_damaged_bundle_is_dropped_and_the_next_one_taken(
    tmp_path: Path, driver: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    paths = [write(tmp_path / name, [record(RowOp.COMBINE)]) for name in ("a-damaged.msgpack", "b.msgpack")]
    here = snapshot(*paths)
    monkeypatch.setattr(launch_rowops.dispatch_snapshot, "snapshot", lambda: here)
    first = launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True)
    assert first is not None
    assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is first
    assert [skipped.path.name for skipped in here.view(ON_H200, installed=False).skipped] == ["a-damaged.msgpack"]


def test_where_no_bundle_has_it_that_is_told_once(
    tmp_path: Path, driver: list[int], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    here = snapshot(write(tmp_path / "a.msgpack", []))
    monkeypatch.setattr(launch_rowops.dispatch_snapshot, "snapshot", lambda: here)
    with caplog.at_level("INFO", "pretuned.runtime.launch.rowops"):
        for _ in range(2):
            assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is None
    assert len(caplog.records) == 1
    assert "no usable bundle has a kernel for combine bf16" in caplog.text
    monkeypatch.setattr(launch_rowops, "platform_supported", lambda: False)
    assert launch_rowops.launcher(RowOp.ACTIVATION, DType.BF16, 0, aligned=True) is None


def test_what_was_chosen_before_a_reload_is_not_kept_after_it(
    tmp_path: Path, driver: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = snapshot(write(tmp_path / "a.msgpack", []))
    after = snapshot(write(tmp_path / "b.msgpack", [record(RowOp.COMBINE)]))
    real = loader.load_first

    def interrupted(*given: Any) -> Any:
        monkeypatch.setattr(launch_rowops.dispatch_snapshot, "snapshot", lambda: after)  # another thread reloads
        return real(*given)

    monkeypatch.setattr(loader, "load_first", interrupted)
    monkeypatch.setattr(launch_rowops.dispatch_snapshot, "snapshot", lambda: before)
    assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is None
    assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is not None
    assert (list(before.passes.values()), len(after.passes)) == ([None], 1)


def test_what_the_driver_refuses_is_an_error_with_the_kernels_name(
    driver: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def check(code: int, call: str) -> None:
        if code:
            raise CudaError(f"{call}: CUDA error {code}")

    monkeypatch.setattr(cuda, "check", check)
    launch = made()
    driver.append(700)
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx\(combine\): CUDA error 700"):
        launch(2, 3, *GIVEN)
    launch(2, 3, *GIVEN)
    driver.append(cuda.INVALID_CONTEXT)  # a thread that has not touched CUDA: once more
    launch(2, 3, *GIVEN)
    assert driver == []


def test_two_threads_never_share_a_block(driver: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def read(launch: Launch) -> None:
        seen.append(launch.pointers)
        if len(seen) == 1:  # another thread, while the first is in the driver
            other(2, 3, *GIVEN)

    read_launches(monkeypatch, read)
    other = made()
    other(2, 3, *GIVEN)
    assert len(set(seen)) == 2


def test_more_programs_than_a_launch_can_have(driver: list[int]) -> None:
    with pytest.raises(InputError, match=r"2147483648 rows of 5 columns make 2147483648 programs.*split them"):
        made()(2**31, 5, (1, 2, 3), (2**31 - 1, 5, 1, 1), 0)
