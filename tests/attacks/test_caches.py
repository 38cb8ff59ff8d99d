"""The user's own caches, damaged or forged under right digests: they are built again, and nothing else happens."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import golden_bundles
import msgpack
import pytest

from pretuned.aot.compile.cache import CompileCache
from pretuned.aot.compile.triton import Compiled
from pretuned.aot.demand import tuner
from pretuned.aot.demand.tuner import CacheKey, decode, encode
from pretuned.aot.process.output import check_out, check_page, is_bundle
from pretuned.artifacts import codec, packed
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.publishing import read_checked, write_checked
from pretuned.artifacts.records import DType, Fusion, Op, Variant
from pretuned.artifacts.wire import MAGIC
from pretuned.kernels import registry, spec
from pretuned.kernels.spec import Config
from pretuned.runtime.dispatch.pin import KernelPair, Preference

SPEC = spec.Spec(Op.FORWARD, DType.BF16, Config(64, 64, 64, 4, 3))
CUBIN = b"\x7fELF code"
COMPILED = Compiled(
    Variant(
        "rows",
        1,
        1,
        SPEC.op,
        SPEC.dtype,
        SPEC.layout,
        SPEC.fusion,
        SPEC.alignment,
        SPEC.max_experts,
        SPEC.config.pairs(),
        "rows",
        registry.arguments(SPEC),
        (),
        128,
        49152,
        128,
        0,
        0,
        len(CUBIN),
        hashlib.sha256(CUBIN).digest(),
    ),
    CUBIN,
)
NESTED = b"\xdd\x00\x07\xff\xff" * 511

VALUES: dict[str, tuple[str, object]] = {
    "another kernel": ("kernel", "weight"),
    "a kernel's name of two lines": ("kernel", "rows\nrows"),
    "revision nil": ("revision", None),
    "revision -1": ("revision", -1),
    "abi a string": ("abi", "1"),
    "another op": ("op", "dX"),
    "an op that is none": ("op", "sideways"),
    "another dtype": ("dtype", "fp16"),
    "another layout": ("layout", "kn"),
    "another fusion": ("fusion", 1),
    "alignment 3": ("alignment", 3),
    "alignment 1": ("alignment", 1),
    "another max_experts": ("max_experts", 4096),
    "another config": ("config", [("block_m", 1)]),
    "an entry of bytes": ("entry", b"rows"),
    "an entry with a blank": ("entry", "rows rows"),
    "no arguments": ("arguments", []),
    "an argument too many": ("arguments", [*registry.arguments(SPEC), ("z", "ptr")]),
    "arguments a number": ("arguments", 5),
    "maps of nothing": ("tensor_maps", [()]),
    "a map for a pointer": ("tensor_maps", [("x", 9, (64, 64), 3)]),
    "maps a number": ("tensor_maps", 1),
    "threads 0": ("threads", 0),
    "threads 2**63": ("threads", 2**63),
    "shared 2**40": ("shared_bytes", 2**40),
    "registers true": ("registers", True),
    "spills 1.5": ("spill_bytes", 1.5),
    "scratch nil": ("scratch_bytes", None),
    "another digest": ("cubin_sha256", bytes(32)),
}


@pytest.fixture
def compiled(tmp_path: Path) -> tuple[CompileCache, Path, dict[str, object]]:
    """A cache of one entry, the entry's file, and its fields."""
    cache = CompileCache(tmp_path)
    cache.put(SPEC, 90, COMPILED)
    (path,) = tmp_path.glob("*/*.bin")
    assert cache.get(SPEC, 90) == COMPILED
    record, cubin = msgpack.unpackb(read_checked(path))
    assert cubin == CUBIN
    return cache, path, msgpack.unpackb(record)


@pytest.mark.parametrize("name", VALUES)
def test_a_compiled_variant_that_is_not_what_was_asked_for(
    compiled: tuple[CompileCache, Path, dict[str, object]], name: str
) -> None:
    cache, path, fields = compiled
    field, value = VALUES[name]
    fields[field] = value
    write_checked(path, msgpack.packb((msgpack.packb(fields), CUBIN)))
    assert cache.get(SPEC, 90) is None


PAYLOADS = {
    "nothing": b"",
    "nil": b"\xc0",
    "the reserved byte": b"\xc1",
    "deep": b"\x91" * 100_000,
    "nested claims": NESTED + bytes(1 << 19),
    "a map": b"\x80",
    "an extension": b"\xd4\x01\x00",
    "a number": b"\x01",
    "a string": b"\xa2ab",
    "bytes after it": b"\x92\x90\xc4\x00\xc0",
    "no fields": b"\x92\x90\xc4\x00",
    "a string for code": msgpack.packb(([0] * 18, "code")),
}


@pytest.mark.parametrize("name", PAYLOADS)
def test_a_compiled_entry_of_other_bytes(compiled: tuple[CompileCache, Path, dict[str, object]], name: str) -> None:
    cache, path, _ = compiled
    write_checked(path, PAYLOADS[name])
    assert cache.get(SPEC, 90) is None


KEY = CacheKey("NVIDIA H200", 90, 132, 140, (("rows", 1),), ("forward",), 8, 256, 128, 2, "bf16", 64)
PAIRS = tuple(KernelPair(op, *[Preference(((Fusion.NONE, SPEC.config),))] * 2) for op in Op)
CONFIGS: dict[str, object] = {
    "another key": ("key", *[("forward", (), ())] * 3),
    "one op three times": (repr(KEY), *[("forward", (), ())] * 3),
    "two ops": (repr(KEY), ("forward", (), ()), ("dX", (), ())),
    "a fusion of 2**63": (repr(KEY), *[(op.value, ((2**63, SPEC.config.pairs()),), ()) for op in Op]),
    "an unknown knob": (repr(KEY), *[(op.value, ((0, (("block_q", 1),)),), ()) for op in Op]),
    "a block of 0": (repr(KEY), *[(op.value, ((0, (*SPEC.config.pairs()[1:], ("block_k", 0))),), ()) for op in Op]),
    "a block of nil": (
        repr(KEY),
        *[(op.value, ((0, (*SPEC.config.pairs()[1:], ("block_k", None))),), ()) for op in Op],
    ),
    "pairs of three": (repr(KEY), *[(op.value, ((0, ((1, 2, 3),)),), ()) for op in Op]),
    "numbers": (1, 2, 3, 4),
    "a thousand pairs": (repr(KEY), *[("forward", (), ())] * 1000),
}


def test_a_cache_that_others_can_write_is_not_said_to_have_anything(tmp_path: Path) -> None:
    cache = CompileCache(tmp_path / "cache")
    cache.put(SPEC, 80, COMPILED)
    assert cache.has(SPEC, 80)
    assert not cache.trouble
    (tmp_path / "cache").chmod(0o777)
    assert not cache.has(SPEC, 80)
    cache.put(SPEC, 80, COMPILED)
    assert "is not read, as others can write it" in cache.trouble


@pytest.mark.parametrize("name", [*CONFIGS, *PAYLOADS])
def test_configs_that_are_none(name: str) -> None:
    assert decode(KEY, encode(KEY, (PAIRS[0], PAIRS[1], PAIRS[2]))) == PAIRS
    assert decode(KEY, PAYLOADS[name] if name in PAYLOADS else msgpack.packb(CONFIGS[name])) is None


@pytest.mark.parametrize("check", [check_out, check_page])
def test_an_output_that_is_a_fifo_is_refused_and_not_waited_for(tmp_path: Path, check) -> None:
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(InputError, match="not overwritten"):
        check(tmp_path / "fifo")
    assert not is_bundle(tmp_path / "fifo")


def test_an_overlay_whose_numbers_have_run_out_is_begun_anew() -> None:
    bundle = golden_bundles.medium(seed=0)
    used = tuple(model._replace(name=f"on-demand/99999999 {model.name.replace('/', ' ')}") for model in bundle.models)
    notes: list[str] = []
    joined = tuner.joined(bundle, bundle._replace(models=used), notes.append)
    codec.encode(joined)
    assert all(model.name.startswith("on-demand/00000001 ") for model in joined.models)
    assert "99999999" in notes[0]


def test_the_longest_name_of_a_model_still_fits_an_overlay() -> None:
    bundle = golden_bundles.medium(seed=0)
    tuned = bundle._replace(models=tuple(model._replace(name="m" * 200) for model in bundle.models[:1]))
    codec.encode(tuned)
    codec.encode(tuner.joined(tuned, None))


def test_a_compressed_bundle_takes_the_place_of_one_alone(tmp_path: Path) -> None:
    path = tmp_path / f"candidates{packed.SUFFIX}"
    check_out(path)
    path.write_bytes(packed.pack(b"a bundle before"))
    check_out(path)
    for other in (b"notes", MAGIC):
        path.write_bytes(other)
        with pytest.raises(InputError, match="no bundle that is compressed with xz"):
            check_out(path)
