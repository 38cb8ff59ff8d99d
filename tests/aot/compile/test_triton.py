from __future__ import annotations

import errno
import os
import subprocess
import sys
from typing import Any

import pytest

from pretuned.aot.compile import triton
from pretuned.aot.compile.ptx import source_of_rewrites_sha256
from pretuned.aot.compile.triton import inputs_of, job_key
from pretuned.artifacts.errors import CompileError
from pretuned.artifacts.records import DType, Op, RowOp
from pretuned.kernels import rowops
from pretuned.kernels.rowops import RowOpSpec
from pretuned.kernels.spec import Config, Loads, Schedule, Spec, TileRows

SPEC = Spec(Op.FORWARD, DType.BF16, Config(128, 128, 64, 8, 6, loads=Loads.TMA, schedule=Schedule.COOPERATIVE))


PASS = RowOpSpec(RowOp.COMBINE, DType.BF16)
FITTED = SPEC._replace(config=SPEC.config._replace(rows=TileRows.FITTED, block_n=256))


@pytest.mark.parametrize("spec", [SPEC, PASS, FITTED])
def test_what_the_compiler_is_reported_is_in_the_name_of_a_cached_cubin(spec: Spec | RowOpSpec) -> None:
    """No kernel's source changes with it, so a cubin of before would be taken for one of now."""
    inputs = inputs_of(spec, 90)
    others = {"constants": {"SLOTS": 7}, "divisible": {"M": 7}}
    others |= {"types": {"y": "*fp32"}} if spec is PASS else {"boxes": {"x": (7, 7)}}
    others |= {"rewrites": "of another day"} if spec is FITTED else {}
    assert inputs.rewrites == (source_of_rewrites_sha256() if spec is FITTED else "")
    assert job_key(spec, 90) == job_key(spec, 90, inputs)
    keys = {job_key(spec, 90, inputs._replace(**{name: other})) for name, other in others.items()}
    assert len({job_key(spec, 90), *keys}) == 1 + len(others)


def test_what_each_pointer_of_a_kernel_points_at_is_said() -> None:
    """A name that nobody gave a type would be compiled as a pointer to rows, and read anything."""
    with pytest.raises(KeyError, match="unheard_of"):
        triton._triton_type("unheard_of", "ptr", PASS, {})
    words = {"index", "experts", "places", "used", "ids", "bounds", "m_sizes", "counts", "starts", "across_words"}
    scales = {
        "row_weights",
        "dweights",
        "scale",
        "x_scale",
        "column_scale",
        "a_scale",
        "dots",
        "across_scales",
        "outer",
    }
    of_weights = {"w": "*i16", "words": "*i32", "stored": "*u8", "scales": "*u8", "zeros": "*i8", "most": "*i32"}
    for op in RowOp:
        for name, kind in rowops.arguments(op):
            wanted = "*i32" if name in words else {"order": "*i64", "named": "*i8"}.get(name, "*bf16")
            wanted = "*u8" if name in ("codes", "x_codes", "column_codes", "a_codes") else wanted
            wanted = "*fp32" if name in scales else wanted
            wanted = of_weights.get(name, wanted)
            text = triton._triton_type(name, kind, RowOpSpec(op, DType.BF16), {})
            assert text == (wanted if kind == "ptr" else kind), (op, name)


DIGEST = """
import hashlib
from pretuned.aot.compile.triton import compile_variant
from pretuned.artifacts.records import DType, Op
from pretuned.kernels.registry import Spec
from pretuned.kernels.spec import Config, Loads
config = Config(64, 64, 64, 4, 2, loads=Loads.TMA)  # on wgmma
print(hashlib.sha256(compile_variant(Spec(Op.FORWARD, DType.BF16, config), 90).cubin).hexdigest())
"""


def compiled_with(**environment: str) -> str:
    """In a process of its own: some variables are read once, when Triton is imported."""
    done = subprocess.run(
        [sys.executable, "-c", DIGEST], env=os.environ | environment, capture_output=True, text=True, check=True
    )
    return done.stdout


@pytest.fixture(scope="module")
def clean() -> str:
    return compiled_with()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "value"),
    [("DISABLE_LLVM_OPT", "1"), ("DISABLE_PTXAS_OPT", "1"), ("DISABLE_MMA_V3", "1"), ("PTXAS_OPTIONS", "-O0")],
)
def test_what_a_debugger_sets_for_triton_changes_no_code(name: str, value: str, clean: str) -> None:
    """It is in no job's name: what it made would be every later build's."""
    assert compiled_with(**{name: value}) == clean


class Wrapped(Exception):
    """An error that wraps another without its text, like Triton's and MLIR's own."""


def failing(text: str, cause: BaseException | None) -> Any:
    def compile_(*args: object, **how: object) -> None:
        os.write(2, text.encode())
        raise Wrapped("no code") from cause

    return compile_


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", PermissionError(errno.EACCES, "Permission denied", "/scratch/x.ptx")),
        ("", Wrapped(OSError(errno.ENOSPC, "No space left on device"))),
        ("ptxas fatal   : can't write x.cubin: Input/output error\n", None),
        ("", MemoryError()),
    ],
)
def test_a_variant_that_the_machine_kept_from_compiling_stops_the_build(
    text: str, cause: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.compile", failing(text, cause))
    with pytest.raises(OSError, match=r"denied|No space|Input/output|no code"):
        triton.compile_variant(SPEC, 90)


@pytest.mark.parametrize("cause", [None, FileNotFoundError(errno.ENOENT, "No such file"), ValueError("odd")])
def test_one_that_the_compiler_refuses_is_lost_alone(
    cause: BaseException | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("triton.compile", failing("error: no such instruction\n", cause))
    with pytest.raises(CompileError, match="no such instruction"):
        triton.compile_variant(SPEC, 90)


@pytest.mark.slow
def test_no_digest_of_triton_is_made_nor_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    from triton.runtime import cache

    spec = Spec(Op.FORWARD, DType.BF16, Config(16, 32, 32, 4, 2))

    def asked() -> str:
        pytest.fail("it read all of Triton")

    monkeypatch.setattr(cache, "triton_key", asked)
    compiled = triton.compile_variant(spec, 80)
    assert cache.triton_key is asked
    monkeypatch.delattr(cache, "triton_key")
    assert triton.compile_variant(spec, 80) == compiled
