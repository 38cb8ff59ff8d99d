"""Which kernel of a pass runs, and what its launch is made of."""

from __future__ import annotations

import hashlib
import sys
import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import emulated_kernels
import pytest
from emulated_driver import EmulatedGpu, Launch, emulated
from small_bundles import ELF, ON_A100, ON_H200, ON_L40S, PROBLEM, WIDE, bundle, modelled, snapshot

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import CudaError, InputError
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Fusion, Kernel, Layout, LocalGpu, RowOp, Variant
from pretuned.kernels import rowops
from pretuned.kernels.registry import ENTRIES, unlaunchable
from pretuned.kernels.rowops import RowOpSpec
from pretuned.runtime import reload
from pretuned.runtime.dispatch import rowops as dispatch_rowops
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.driver.rowops import RowOpLauncher
from pretuned.runtime.inspect.preload import passes_of
from pretuned.runtime.launch import rowops as launch_rowops


def record(op: RowOp, cubin: bytes = ELF, *, alignment: int = 16, revision: int = 0, **fields: Any) -> Variant:
    spec = RowOpSpec(op, DType.BF16, alignment)
    variant = Variant(
        op.value,
        revision or ENTRIES[op.value].revision,
        1,
        op,
        spec.dtype,
        Layout.NK,
        Fusion.NONE,
        alignment,
        spec.max_experts,
        spec.config.pairs(),
        op.value,
        rowops.arguments(op),
        (),
        256,
        0,
        40,
        0,
        0,
        len(cubin),
        hashlib.sha256(cubin).digest(),
    )
    return variant._replace(**fields)


def write(path: Path, variants: Sequence[Variant], sm: int = 90) -> Path:
    """A bundle of a GEMM's choice, and these variants after its own."""
    base = bundle({PROBLEM: [modelled(64, WIDE)]}, sm=sm, tag=path.stem)
    path.parent.mkdir(parents=True, exist_ok=True)
    kernels = {(variant.kernel, variant.revision) for variant in variants}
    whole = base._replace(
        variants=(*base.variants, *variants),
        cubins=(*base.cubins, *[ELF] * len(variants)),
        kernels=(*base.kernels, *(Kernel(*pair, hashlib.sha256(b"source").digest()) for pair in sorted(kernels))),
    )
    publish(path, encode(whole))
    return path


def best(
    paths: Sequence[Path], local: LocalGpu = ON_H200, op: RowOp = RowOp.COMBINE, *, aligned: bool = True
) -> list[tuple[str, int]]:
    listed = dispatch_rowops.ranked(snapshot(*paths), op, rowops.dtype_of(DType.BF16, op), local, aligned=aligned)
    return [(usable.path.name, index - 3) for usable, index in listed]


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
    bundle_set = snapshot(without, installed=[tmp_path / "package"])
    ((usable, _),) = dispatch_rowops.ranked(bundle_set, RowOp.COMBINE, DType.BF16, ON_H200, aligned=True)
    assert usable.path.name == "b.msgpack"


def test_a_bundle_that_an_earlier_version_built_hides_no_later_revision(tmp_path: Path) -> None:
    now = ENTRIES["combine"].revision
    write(tmp_path / "package" / "ships.msgpack", [record(RowOp.COMBINE)])
    for revision, runs in ((now - 1, "ships.msgpack"), (now, "own.msgpack"), (now + 1, "own.msgpack")):
        own = write(tmp_path / str(revision) / "own.msgpack", [record(RowOp.COMBINE, revision=revision)])
        bundle_set = snapshot(own, installed=[tmp_path / "package"])
        first, *_ = dispatch_rowops.ranked(bundle_set, RowOp.COMBINE, DType.BF16, ON_H200, aligned=True)
        assert first[0].path.name == runs


def test_preload_takes_every_pass_for_tensors_that_are_aligned_and_not(tmp_path: Path) -> None:
    kinds = [op for op in RowOp if op not in (*rowops.WITHOUT_DTYPE, *rowops.WEIGHT_OPS)]
    of_rows = [record(op, alignment=alignment) for op in kinds for alignment in (16, 1)]
    of_none = [
        record(RowOp.PLACE_ROWS, dtype=DType.FP32, alignment=1),
        record(RowOp.SORT_SLOTS, dtype=DType.FP32, alignment=1),
        record(RowOp.CLEAR, dtype=DType.FP32),
    ]  # no dtype
    taken = snapshot(write(tmp_path / "a.msgpack", [*of_rows, *of_none, record(RowOp.COMBINE, dtype=DType.FP16)]))
    first, end = 3 + len(of_rows), 3 + len(of_rows) + len(of_none)
    assert sorted(index for _, index in passes_of([PROBLEM], taken, ON_H200)) == list(range(3, end))
    quantised = PROBLEM._replace(dtype=DType.MXFP4)  # its x and y are bf16
    assert passes_of([quantised], taken, ON_H200) == passes_of([PROBLEM], taken, ON_H200)
    tf32 = passes_of([PROBLEM._replace(dtype=DType.TF32)], taken, ON_H200)
    assert sorted(index for _, index in tf32) == list(range(first, end))


@pytest.fixture
def gpu(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    """A GPU whose launches store nothing, of code that needs no self-test."""
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(EmulatedGpu()) as gpu:
        gpu.computes = False
        yield gpu


def load(gpu: EmulatedGpu, op: RowOp = RowOp.COMBINE) -> RowOpLauncher:
    kernel = gpu.load(RowOpSpec(op, DType.BF16))
    return RowOpLauncher(kernel.variant, kernel.function, op)


def combine(path: Path, tag: str = "") -> Path:
    """A bundle of the row kernel that adds up."""
    return emulated_kernels.write(
        path, [emulated_kernels.variant_and_code(RowOpSpec(RowOp.COMBINE, DType.BF16), tag=tag)]
    )


@pytest.mark.parametrize("op", [op for op in RowOp if op not in rowops.WEIGHT_OPS])
def test_the_driver_gets_every_argument_and_the_grid(op: RowOp, gpu: EmulatedGpu) -> None:
    gpu.per_sm = 16
    kinds = rowops.arguments(op)
    rows, columns = 70, 3000
    sizes = {"M": rows, "columns": columns}
    words = {name: 1000 + i if kind == "ptr" else sizes.get(name, -i) for i, (name, kind) in enumerate(kinds)}
    launcher = load(gpu, op)
    launcher(rows, 79, words)
    numbers = {name: words[name] for name, kind in kinds if kind != "ptr" and name != "M"}
    launcher.bind(**numbers)(rows, 79, *(words[name] for name in launcher.operands))
    block = RowOpSpec(op, DType.BF16).config.block
    side_by_side = {RowOp.ACTIVATION: 4, RowOp.ACTIVATION_CODES: 8, RowOp.ACTIVATION_ROW_CODES: 2}.get(op, 1)
    grid = rowops.programs(op, rows, columns, block, side_by_side)
    if op is RowOp.ACTIVATION_ROW_CODES and columns > block:
        side_by_side = 1  # of wider rows
    by_block = op in (RowOp.ACTIVATION, RowOp.ACTIVATION_CODES, RowOp.COMBINE)
    assert grid == -(-rows // side_by_side) * (-(-columns // block) if by_block else 1)
    assert [launch.words for launch in gpu.launches] == [words | {"scratch": 0, "scratch 2": 0}] * 2
    assert [(launch.grid, launch.threads, launch.stream) for launch in gpu.launches] == [
        (grid, 32 * RowOpSpec(op, DType.BF16).config.num_warps, 79)
    ] * 2


@pytest.mark.parametrize("op", [op for op in RowOp if op not in rowops.WEIGHT_OPS])
def test_a_launch_of_many_rows_has_no_more_programs_than_the_gpu_takes_at_a_time(op: RowOp, gpu: EmulatedGpu) -> None:
    """But for kernels that do not loop over rows: theirs are counted by the caller."""
    gpu.per_sm = 3
    launcher, columns, most = load(gpu, op), 1024, rowops.WAVES * 3 * gpu.gpu.sm_count
    run = launcher.bind(**{name: columns for name, kind in rowops.arguments(op) if kind != "ptr" and name != "M"})
    loops = op not in (*rowops.WITHOUT_DTYPE, RowOp.QUANTIZE_BLOCKS)
    for rows in (1, 5, 1 << 10, 1 << 20):
        gpu.launches.clear()
        run(rows, 0, *range(1, 1 + len(launcher.operands)))
        count = rowops.programs(op, rows, columns, launcher.block, rowops.rows_at_once(op))
        assert [(launch.grid, launch.words["M"]) for launch in gpu.launches] == [
            (min(count, most) if loops else count, rows)
        ]


GIVEN = {"y": 1, "places": 2, "out": 6, "M": 2, "columns": 3, "top_k": 1, "flags": 0}  # of COMBINE


def test_a_damaged_bundle_is_dropped_and_the_next_one_taken(clean_places: Path, gpu: EmulatedGpu) -> None:
    damaged = combine(clean_places / "a-damaged.msgpack", "a")
    combine(clean_places / "b.msgpack", "b")
    data = bytearray(damaged.read_bytes())
    data[data.rindex(b"combine")] ^= 1  # in the cubin, which is the last
    damaged.unlink()
    damaged.write_bytes(data)
    reload()
    first = launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True)
    assert first is not None
    assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is first
    skipped = dispatch_snapshot.snapshot().view(gpu.local, installed=False).skipped
    assert [skip.path.name for skip in skipped] == ["a-damaged.msgpack"]


def test_where_no_bundle_has_it_that_is_reported_once(
    gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level("INFO", "pretuned.runtime.launch.rowops"):
        for _ in range(2):
            assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is None
    assert caplog.text.count("no usable bundle has a kernel for combine bf16") == 1
    monkeypatch.setattr(sys, "platform", "darwin")
    assert launch_rowops.launcher(RowOp.ACTIVATION, DType.BF16, 0, aligned=True) is None


def test_what_was_chosen_before_a_reload_is_not_kept_after_it(clean_places: Path, gpu: EmulatedGpu) -> None:
    """Another thread reloads while a kernel is looked for."""
    combine(clean_places / "a.msgpack")
    before = dispatch_snapshot.snapshot()

    def reloaded() -> None:
        reload()
        dispatch_snapshot.snapshot()

    gpu.on_load = reloaded
    assert launch_rowops.launcher(RowOp.COMBINE, DType.BF16, 0, aligned=True) is not None
    after = dispatch_snapshot.snapshot()
    assert after is not before
    assert (len(before.passes), len(after.passes)) == (1, 0)


def test_what_the_driver_refuses_is_an_error_with_the_kernels_name(gpu: EmulatedGpu) -> None:
    launch = load(gpu)
    gpu.fails["cuLaunchKernelEx"] = 700
    with pytest.raises(CudaError, match=r"cuLaunchKernelEx\(combine\): CUDA error 700"):
        launch(2, 0, GIVEN)
    gpu.fails.clear()
    launch(2, 0, GIVEN)
    gpu.contexts = False  # a thread that has not touched CUDA: once more
    launch(2, 0, GIVEN)
    assert len(gpu.launches) == 2


def test_two_threads_never_share_a_block(gpu: EmulatedGpu) -> None:
    """The second launches while the first is in the driver, which still reads its own words after that."""
    launch = load(gpu)
    read: list[int] = []

    def again(first: Launch) -> None:
        read.append(first.words["M"])
        if len(read) == 1:
            other = threading.Thread(target=launch, args=(2, 0, GIVEN | {"M": 5}))
            other.start()
            other.join()
            read.append(first.read()["M"])

    gpu.after[gpu.loaded[-1].digest] = again
    launch(2, 0, GIVEN)
    assert read == [2, 5, 2]


def test_more_programs_than_a_launch_can_have(gpu: EmulatedGpu) -> None:
    with pytest.raises(InputError, match=r"2147483648 rows of 5 columns make 2147483648 programs.*split them"):
        load(gpu)(2**31, 0, GIVEN | {"columns": 5})
