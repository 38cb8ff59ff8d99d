"""Which kernel of a pass runs, and what its launch is made of."""

from __future__ import annotations

import ctypes
import hashlib
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from made import ELF, ON_A100, ON_H200, ON_L40S, PROBLEM, WIDE, bundle, modelled, snapshot

from pretuned.artifacts.codec import encode
from pretuned.artifacts.store import publish
from pretuned.artifacts.types import DType, Fusion, Kernel, Layout, Pass, Variant
from pretuned.kernels import passes as words
from pretuned.kernels.passes import Block, PassSpec
from pretuned.runtime import passes
from pretuned.runtime.device import LocalGpu
from pretuned.runtime.driver import Function, LaunchConfig
from pretuned.runtime.launch import LoadedKernel
from pretuned.runtime.launchable import unlaunchable
from pretuned.runtime.warmup import passes_of


def record(op: Pass, cubin: bytes = ELF, *, alignment: int = 16, revision: int = 1, **fields: Any) -> Variant:
    spec = PassSpec(op, DType.BF16, alignment)
    one = Variant(
        op.value, revision, 1, op, spec.dtype, Layout.NK, Fusion.NONE, alignment, spec.max_experts,
        spec.config.pairs(), op.value, words.arguments(op), (), 256, 0, 40, 0, 0, len(cubin),
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


def best(paths: Sequence[Path], local: LocalGpu = ON_H200, *, aligned: bool = True) -> list[tuple[str, int]]:
    found = passes.ranked(snapshot(*paths), Pass.COMBINE, DType.BF16, local, aligned=aligned)
    return [(usable.path.name, index - 3) for usable, index in found]


def test_aligned_code_first_then_the_later_revision_then_the_place(tmp_path: Path) -> None:
    any_row, old, new = record(Pass.COMBINE, alignment=1), record(Pass.COMBINE), record(Pass.COMBINE, revision=2)
    a, b = write(tmp_path / "a.msgpack", [any_row, old]), write(tmp_path / "b.msgpack", [any_row, new])
    assert best([a, b]) == [("b.msgpack", 1), ("a.msgpack", 1), ("a.msgpack", 0), ("b.msgpack", 0)]
    assert best([a, b], aligned=False) == [("a.msgpack", 0), ("b.msgpack", 0)]


def test_code_for_the_very_capability_before_a_compatible_one(tmp_path: Path) -> None:
    older = write(tmp_path / "80.msgpack", [record(Pass.COMBINE)], sm=80)
    newer = write(tmp_path / "89.msgpack", [record(Pass.COMBINE, alignment=1)], sm=89)
    assert best([older, newer], ON_L40S) == [("89.msgpack", 0), ("80.msgpack", 0)]
    assert best([older, newer], ON_A100) == [("80.msgpack", 0)]
    assert best([older, newer], ON_H200) == []


@pytest.mark.parametrize(
    "fields",
    [
        {"abi": 2},
        {"arguments": (("y", "ptr"),)},
        {"arguments": tuple(reversed(words.arguments(Pass.COMBINE)))},
        {"config": (("block", 0), ("num_warps", 8))},
        {"config": (("num_warps", 8),)},
        {"threads": 100},
        {"shared_bytes": 300 << 10},
        {"dtype": DType.FP16},
    ],
)
def test_what_can_not_be_launched_is_passed_over(tmp_path: Path, fields: dict[str, Any]) -> None:
    wrong = record(Pass.COMBINE, **fields)
    path = write(tmp_path / "a.msgpack", [wrong, record(Pass.COMBINE, alignment=1)])
    assert best([path]) == [("a.msgpack", 1)]
    assert unlaunchable(wrong) or set(fields) & {"abi", "shared_bytes", "dtype"}


def test_installed_bundles_are_asked_where_no_other_has_it(tmp_path: Path) -> None:
    without = write(tmp_path / "own" / "a.msgpack", [])
    write(tmp_path / "package" / "b.msgpack", [record(Pass.COMBINE)])
    found = snapshot(without, installed=[tmp_path / "package"])
    ((usable, _),) = passes.ranked(found, Pass.COMBINE, DType.BF16, ON_H200, aligned=True)
    assert usable.path.name == "b.msgpack"


def test_preload_takes_every_pass_for_tensors_that_are_aligned_and_not(tmp_path: Path) -> None:
    every = [record(op, alignment=alignment) for op in Pass for alignment in (16, 1)]
    taken = snapshot(write(tmp_path / "a.msgpack", [*every, record(Pass.COMBINE, dtype=DType.FP16)]))
    assert sorted(index for _, index in passes_of([PROBLEM], taken, ON_H200)) == [3, 4, 5, 6, 7, 8]
    assert passes_of([replace(PROBLEM, dtype=DType.TF32)], taken, ON_H200) == []


@pytest.mark.parametrize("op", Pass)
def test_the_driver_gets_every_argument_and_the_grid(op: Pass, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = words.arguments(op)
    pointers = tuple(1000 + i for i, (_, kind) in enumerate(kinds) if kind == "ptr")
    rows, columns = 70, 3000
    sizes = {"M": rows, "columns": columns}
    numbers = tuple(sizes.get(name, -i) for i, (name, kind) in enumerate(kinds) if kind != "ptr")
    seen: list[Any] = []

    def launch(config: Any, handle: Any, arguments: Any, extra: None) -> int:
        found = LaunchConfig.from_address(ctypes.cast(config, ctypes.c_void_p).value or 0)
        at = ctypes.cast(arguments, ctypes.POINTER(ctypes.c_void_p))
        values = []
        for i, (_, kind) in enumerate(kinds):
            kind_of = ctypes.c_uint64 if kind == "ptr" else ctypes.c_int32
            values.append(kind_of.from_address(at[i] or 0).value)
        scratch = [ctypes.c_uint64.from_address(at[len(kinds) + i] or 0).value for i in range(2)]
        blocks = [found.grid_x, found.grid_y, found.grid_z, found.block_x, found.block_y, found.block_z]
        rest = (found.shared_bytes, found.stream, found.attributes, found.attribute_count)
        seen.append((values, scratch, blocks, *rest))
        return 0

    monkeypatch.setattr(passes.driver, "launch_kernel", lambda: launch)
    monkeypatch.setattr(passes.driver, "argument", lambda address: ctypes.c_void_p(address))
    monkeypatch.setattr(passes, "current_stream", lambda device: 77 + device)
    kernel = LoadedKernel(record(op), Function(5, 6, 2, 256, 4096, 8), 132)
    launcher = passes.PassLauncher(kernel, op)
    for _ in range(2):
        launcher(rows, columns, pointers, numbers)
    block = Block.from_pairs(kernel.variant.config).block
    grid = words.programs(op, rows, columns, block)
    assert grid == (rows if op is Pass.ACTIVATION_GRAD else rows * 3)
    wanted = ([*pointers, *numbers], [0, 0], [grid, 1, 1, 256, 1, 1], 4096, 79, None, 0)
    assert seen == [wanted] * 2
