"""Calls of the driver, as a C compiler reads them: real variants, through a libcuda that records.

The layouts and calling conventions are the machine's own, so this is what to run on a new kind of machine.
"""

from __future__ import annotations

import json
import os
import shutil
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import launches
import pytest
from launches import FIRST, M_SIZES, RESULT, SECOND, STREAM, STRIDES, E, K, M, N

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.records import Fusion, Layout, Op, RowOp, Variant
from pretuned.kernels.entry import RAGGED_SIZES, ragged_strides
from pretuned.kernels.registry import most_tiles, weight_tiles
from pretuned.kernels.spec import Config, Schedule

BUNDLE = Path(__file__).parents[3] / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
MAP = struct.Struct("=Q5Q4Q5I4i")  # as libcuda.c has it

pytestmark = [pytest.mark.slow, pytest.mark.skipif(shutil.which("cc") is None, reason="needs a C compiler")]


def one_of_each() -> list[tuple[int, str]]:
    """The first variant of each list of arguments, op and layout of w: (index, name)."""
    results: dict[object, tuple[int, str]] = {}
    with open_bundle(BUNDLE) as bundle:
        for index, variant in enumerate(bundle.variants()):
            if not isinstance(variant.op, RowOp) and Fusion.SILU not in variant.fusion:
                name = f"{variant.op.value} {variant.fusion.value} {Config.from_pairs(variant.config)}"
                results.setdefault((variant.op, variant.fusion, variant.arguments, variant.kernel), (index, name))
    return list(results.values())


@pytest.fixture(scope="module")
def launched(tmp_path_factory: pytest.TempPathFactory) -> dict[int, dict[str, dict[str, Any]]]:
    """Of each variant, by its index, what libcuda was called with, by the call."""
    folder = tmp_path_factory.mktemp("driver")
    source = Path(__file__).parents[2] / "support" / "libcuda.c"
    subprocess.run(["cc", "-shared", "-fPIC", "-Wall", "-Werror", "-o", folder / "libcuda.so.1", source], check=True)
    path = os.environ.get("LD_LIBRARY_PATH")
    ran = subprocess.run(
        [sys.executable, launches.__file__, str(BUNDLE), *(str(index) for index, _ in one_of_each())],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"LD_LIBRARY_PATH": f"{folder}:{path}" if path else str(folder)},
    )
    assert ran.returncode == 0, ran.stderr
    results: dict[int, dict[str, dict[str, Any]]] = {}
    for line in map(json.loads, ran.stdout.splitlines()):
        if line["call"] == "variant":
            calls = results[line["index"]] = {}
        else:
            calls[line["call"]] = line
    return results


def wanted(variant: Variant, memory: int) -> list[bytes | dict[str, Any]]:
    """Each parameter in order: its bytes, or of a descriptor what it is made of."""
    backward, kn = variant.op is Op.DW, (variant.layout is Layout.KN) == (variant.op is Op.FORWARD)
    w_sizes, row = ((E, K, N), N) if kn else ((E, N, K), K)
    strides_w = (N * K, row)
    a, b = STRIDES
    if backward:
        addresses = {"dy": FIRST, "x": SECOND, "dw": RESULT, "dy_at": FIRST, "x_at": SECOND}
        maps = {
            "dy": (FIRST, (*RAGGED_SIZES, N), ragged_strides(a)),
            "x": (SECOND, (*RAGGED_SIZES, K), ragged_strides(b)),
            "dw": (RESULT, (E, N, K), (N * K, K)),
        }
        longs = {"stride_dy_m": a, "stride_x_m": b, "stride_dw_e": N * K, "stride_dw_row": K}
    else:
        addresses = {"x": FIRST, "w": SECOND, "y": RESULT}
        maps = {
            "x": (FIRST, (M, K), (a,)),
            "w": (SECOND, w_sizes, strides_w),
            "y_map": (RESULT, (*RAGGED_SIZES, N), ragged_strides(b)),
        }
        longs = {"stride_x_m": a, "stride_y_m": b, "stride_w_e": N * K, "stride_w_row": row}
    addresses |= {"m_sizes": M_SIZES, "index": 0, "row_weights": 0, "bias": 0, "counter": memory}
    ints = {
        "M": M,
        "N": N,
        "K": K,
        "E": E,
        "m_sizes_step": 2,
        "index_step": 1,
        "index_end": 0,
        "x_divisor": 1,
        "flags": 0,
    }
    read = {"x": ((M, K), (a, 1)), "w": (w_sizes, (*strides_w, 1))}  # the sizes and strides that a kernel reads
    results: list[bytes | dict[str, Any]] = []
    for name, kind in variant.arguments:
        if kind.startswith("desc"):
            rank = int(kind[4:])
            address, sizes, strides = maps[name]
            box = next(tensor_map for tensor_map in variant.tensor_maps if tensor_map.argument == name)
            results.append({"address": address, "sizes": sizes, "strides": strides, "map": box})
            expected = read.get(name) if not backward else None
            sizes_told, strides_told = expected if expected is not None else ((0,) * rank, (1,) * rank)
            results += [struct.pack("<i", size) for size in sizes_told]
            results += [struct.pack("<q", stride) for stride in strides_told]
        elif kind == "ptr":
            results.append(struct.pack("<Q", addresses[name]))
        elif kind == "i32":
            results.append(struct.pack("<i", ints[name]))
        else:
            results.append(struct.pack("<q", longs[name]))
    return [*results, bytes(8), bytes(8)]


@pytest.mark.parametrize(("index", "name"), one_of_each(), ids=lambda value: str(value).replace(" ", "-"))
def test_a_launch_is_what_the_driver_reads(
    index: int, name: str, launched: dict[int, dict[str, dict[str, Any]]]
) -> None:
    calls = launched[index]
    with open_bundle(BUNDLE) as bundle:
        variant = bundle.variant(index)
    assert calls["function"]["name"] == variant.entry
    assert calls["occupancy"] == {"call": "occupancy", "threads": variant.threads, "shared": variant.shared_bytes}
    if variant.shared_bytes > 48 * 1024:
        assert calls["shared"] == {"call": "shared", "attribute": 8, "value": variant.shared_bytes}
    launch = calls["launch"]
    assert launch["block"] == [variant.threads, 1, 1]
    assert launch["shared"] == variant.shared_bytes
    assert launch["stream"] == STREAM
    config = Config.from_pairs(variant.config)
    tiles = weight_tiles(N, K, E, config) if variant.op is Op.DW else most_tiles(M, E, N, config)
    assert launch["grid"] == [min(tiles, 2 * 132) if config.schedule is not Schedule.TILE else tiles, 1, 1]
    parameters = [bytes.fromhex(parameter) for parameter in launch["parameters"]]
    for got, want in zip(parameters, wanted(variant, launch["memory"]), strict=True):
        if isinstance(want, bytes):
            assert got == want
            continue
        address, *rest = MAP.unpack(got[: MAP.size])
        sizes, strides, box, last = rest[:5], rest[5:9], rest[9:14], rest[14:]
        rank, size = len(want["sizes"]), variant.dtype.itemsize
        assert address == want["address"]
        assert sizes[:rank] == list(reversed(want["sizes"]))
        assert strides[: rank - 1] == [stride * size for stride in reversed(want["strides"])]
        assert box[:rank] == list(reversed(want["map"].box))
        assert last == [want["map"].element, rank, want["map"].swizzle, 2]
