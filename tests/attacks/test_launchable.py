"""Records that are well formed and can't be launched: found before the driver sees a byte, never a wild launch."""

from __future__ import annotations

import hashlib
import random
import struct
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path

import golden_bundles
import pytest
import shipped

from pretuned.aot.bundle.verify import sound
from pretuned.artifacts import codec
from pretuned.artifacts.bundle_file import BundleFile, open_bundle, open_bytes
from pretuned.artifacts.cubin import fault
from pretuned.artifacts.errors import BundleCorrupt
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    PLAIN_LAYOUTS,
    Bundle,
    DType,
    Fusion,
    Kernel,
    Layout,
    Op,
    Target,
    TensorMap,
    Variant,
)
from pretuned.kernels.arch import arch_of
from pretuned.kernels.entry import parameter_bytes
from pretuned.kernels.registry import arguments, boxes, entry_of, threads, undeclared, unlaunchable
from pretuned.kernels.spec import MAX_EXPERTS, MAX_EXPERTS_FALLBACK, Config, Edge, Loads, Schedule, Spec, TileRows
from pretuned.runtime.launch.loader import loaded

SHIPPED = sorted((Path(__file__).parents[2] / "artifacts" / "bundles").glob("*.msgpack"))
POINTERS, TMA = Config(64, 64, 64, 4, 3), Config(64, 64, 64, 4, 3, loads=Loads.TMA)
SPECIALIZED = Config(128, 128, 64, 8, 3, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
FRAGMENTS = Config(32, 128, 256, 8, 3, loads=Loads.TMA, schedule=Schedule.COOPERATIVE)
TURNS = Config(128, 192, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG)
WEIGHT_TURNS = Config(32, 128, 192, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)
ACROSS = Config(32, 192, 128, 8, 10, loads=Loads.TMA, schedule=Schedule.PINGPONG)
FITTED = Config(256, 128, 64, 8, 4, loads=Loads.TMA, schedule=Schedule.COOPERATIVE, rows=TileRows.FITTED)
FITTED_TURNS = Config(192, 128, 64, 8, 5, loads=Loads.TMA, schedule=Schedule.PINGPONG, rows=TileRows.FITTED)
ELEMENTS = {DType.BF16: 9, DType.FP16: 6, DType.FP32: 7, DType.TF32: 11}
CUBIN = b"\x7fELF code"


def record(spec: Spec) -> Variant:
    """A variant of this spec as the builder records it."""
    stored = DType.FP32 if spec.dtype is DType.TF32 else spec.dtype
    maps = tuple(
        TensorMap(name, ELEMENTS[stored if name == "dw" else spec.dtype], box, 3) for name, box in boxes(spec).items()
    )
    entry = entry_of(spec)
    return Variant(
        entry.name,
        entry.revision,
        1,
        spec.op,
        spec.dtype,
        spec.layout,
        spec.fusion,
        spec.alignment,
        spec.max_experts,
        spec.config.pairs(),
        entry.name,
        arguments(spec),
        maps,
        threads(spec),
        49152,
        128,
        0,
        0,
        len(CUBIN),
        hashlib.sha256(CUBIN).digest(),
    )


def spec(op: Op = Op.FORWARD, config: Config = TMA, **more: object) -> Spec:
    return Spec(op, DType.BF16, config, **more)  # type: ignore[arg-type]


ROWS, WEIGHT, COUNTED = record(spec()), record(spec(Op.DW)), record(spec(config=SPECIALIZED))
IN_TURNS = record(spec(config=TURNS))
FITS, FITS_IN_TURNS = record(spec(config=FITTED)), record(spec(config=FITTED_TURNS))
FRAGMENT = record(Spec(Op.DW, DType.TF32, FRAGMENTS))


def passed(variant: Variant, **kinds: str | None) -> Variant:
    """The variant with arguments of other kinds, or (None) without them; new names come last."""
    arguments = {**dict(variant.arguments), **kinds}
    plain = {name: kind for name, kind in arguments.items() if kind is not None}
    maps = []
    for name, kind in plain.items():
        if kind.startswith("desc"):
            maps.append(TensorMap(name, 9, (1,) * (int(kind[4:]) - 1) + (64,), 3))
    return variant._replace(arguments=tuple(plain.items()), tensor_maps=tuple(maps))


def configured(variant: Variant, **values: int) -> Variant:
    return variant._replace(config=tuple(sorted((dict(variant.config) | values).items())))


BROKEN = {
    "code of an earlier revision": ROWS._replace(revision=1),
    "no arguments": ROWS._replace(arguments=(), tensor_maps=()),
    "an argument nobody knows": passed(ROWS, z="ptr"),
    "a word of the launcher's own": passed(ROWS, null="ptr"),
    "another word of the launcher's own": passed(ROWS, one="i64"),
    "dW's words in a forward": passed(ROWS, dy="ptr"),
    "a forward's words in dW": passed(WEIGHT, w="ptr"),
    "a pointer as a number": passed(ROWS, y="i64"),
    "a number as a pointer": passed(ROWS, M="ptr"),
    "a count of 64 bits": passed(ROWS, N="i64"),
    "a stride of 32 bits": passed(ROWS, stride_x_m="i32"),
    "x of rank 3": passed(ROWS, x="desc3"),
    "x of rank 5": passed(ROWS, x="desc5"),
    "w of rank 2": passed(ROWS, w="desc2"),
    "y through TMA": passed(ROWS, y="desc2"),
    "m_sizes through TMA": passed(ROWS, m_sizes="desc2"),
    "a stride through TMA": passed(ROWS, stride_w_e="desc2"),
    "dy of rank 2": passed(WEIGHT, dy="desc2", x="desc2"),
    "dy alone through TMA": passed(WEIGHT, x="ptr"),
    "no result": passed(ROWS, y=None),
    "no m_sizes": passed(ROWS, m_sizes=None),
    "no dw": passed(WEIGHT, dw=None),
    "specialized without a counter": passed(COUNTED, counter=None),
    "silu that stores no half of the columns": passed(COUNTED, y_map=None)._replace(fusion=Fusion.SILU),
    "a counter of 32 bits": passed(COUNTED, counter="i32"),
    "specialized for many experts": COUNTED._replace(max_experts=MAX_EXPERTS + 1),
    "one tile a program, for many experts": configured(ROWS, persistent=0)._replace(max_experts=MAX_EXPERTS + 1),
    "specialized without TMA": configured(COUNTED, tma=0),
    "specialized, not persistent": configured(COUNTED, persistent=0),
    "specialized with one stage": configured(COUNTED, num_stages=1),
    "specialized of fp32": record(Spec(Op.DW, DType.FP32, FRAGMENTS)),
    "specialized rows of tf32": record(Spec(Op.DX, DType.TF32, SPECIALIZED)),
    "tf32 in halves of tiles": record(Spec(Op.DW, DType.TF32, FRAGMENTS._replace(edge=Edge.HALF))),
    "tf32 in tiles of 128 columns": record(Spec(Op.DW, DType.TF32, FRAGMENTS._replace(block_k=128))),
    "specialized dW of 64 rows": record(spec(Op.DW, FRAGMENTS._replace(block_n=64))),
    "specialized rows, 64 of them": configured(COUNTED, block_m=64),
    "results rounded to tf32": FRAGMENT._replace(
        tensor_maps=tuple(tensor_map._replace(element=11) for tensor_map in FRAGMENT.tensor_maps)
    ),
    "pingpong of fp32": record(Spec(Op.FORWARD, DType.FP32, TURNS)),
    "pingpong that gathers": IN_TURNS._replace(fusion=Fusion.GATHER),
    "pingpong with silu": IN_TURNS._replace(fusion=Fusion.SILU),
    "pingpong of rows with dW's tiles": IN_TURNS._replace(config=WEIGHT_TURNS.pairs()),
    "pingpong of dW with tiles of rows": record(spec(Op.DW, WEIGHT_TURNS))._replace(config=TURNS.pairs()),
    "pingpong with steps that don't fit its parts": configured(IN_TURNS, block_k=128),
    "pingpong of 64 columns": configured(IN_TURNS, block_n=64),
    "pingpong of 256 columns": configured(IN_TURNS, block_n=256),
    "192 columns, not pingpong": configured(IN_TURNS, pingpong=0),
    "fitted that gathers": FITS._replace(fusion=Fusion.GATHER),
    "fitted that gathers and scatters": FITS_IN_TURNS._replace(fusion=Fusion.GATHER | Fusion.SCATTER),
    "fitted with silu": FITS._replace(fusion=Fusion.SILU),
    "fitted of dW": record(spec(Op.DW, FRAGMENTS))._replace(config=FITTED.pairs()),
    "fitted of fp32": record(Spec(Op.FORWARD, DType.FP32, FITTED)),
    "fitted of 256 rows in turns": configured(FITS, pingpong=1),
    "fitted of 192 rows by both": configured(FITS_IN_TURNS, pingpong=0),
    "fitted by 256 columns": configured(FITS, block_n=256),
    "fitted, 128 deep": configured(FITS, block_k=128),
    "fitted and narrow": configured(FITS, narrow=1),
    "fitted that stores through a pointer": passed(FITS, y_map=None),
    "TMA in a config without": configured(ROWS, tma=0),
    "elements of 8 bytes": ROWS._replace(
        tensor_maps=tuple(tensor_map._replace(element=8) for tensor_map in ROWS.tensor_maps)
    ),
    "elements of a type that is none": WEIGHT._replace(
        tensor_maps=tuple(tensor_map._replace(element=255) for tensor_map in WEIGHT.tensor_maps)
    ),
    "threads of half a warp": ROWS._replace(threads=48),
    "a block of 0": configured(ROWS, block_m=0),
    "a block of 2**31-1": configured(ROWS, block_n=2**31 - 1),
    "a block of 17": configured(ROWS, block_k=17),
    "group_m 0": configured(ROWS, group_m=0),
    "a knob nobody knows": configured(ROWS, block_q=16),
    "no knobs": ROWS._replace(config=()),
}


def bundle(variant: Variant) -> Bundle:
    small = golden_bundles.small()
    kernel = Kernel(variant.kernel, variant.revision, b"\1" * 32)
    return small._replace(kernels=(kernel,), variants=(variant,), cubins=(CUBIN,), choices={}, models=())


def opened(variant: Variant) -> BundleFile:
    return open_bytes(codec.encode(bundle(variant)), "broken")


@pytest.mark.parametrize(
    "variant",
    [
        IN_TURNS,
        FITS,
        FITS_IN_TURNS,
        record(spec(Op.DX, FITTED)),
        record(Spec(Op.DX, DType.BF16, TURNS, fusion=Fusion.SCATTER)),
        record(spec(Op.DX, TURNS)),
        record(spec(Op.FORWARD, TURNS._replace(block_n=128, num_stages=6))),
        *(record(spec(Op.DW, config)) for config in (WEIGHT_TURNS, ACROSS)),
    ],
)
def test_pingpong_and_fitted_as_the_builder_records_it_passes(variant: Variant) -> None:
    assert unlaunchable(variant) is None


@pytest.mark.parametrize("name", BROKEN)
def test_is_refused_before_the_driver_sees_a_byte(name: str) -> None:
    assert unlaunchable(BROKEN[name])  # the record alone: its code is no cubin, and refused for that, too
    with opened(BROKEN[name]) as file, pytest.raises(BundleCorrupt, match="bundle 'broken': variant 0: "):
        loaded(file, 0, 0, 132)


def elf(sm: int, abi: int = 7, machine: int = 190, flags: int = 1 << 11) -> bytes:
    """The head of a cubin for sm_90a, or of something else."""
    return struct.pack("<4sBBBBB7xHHIQQQI", b"\x7fELF", 2, 1, 1, 51, abi, 2, machine, 1, 0, 0, 0, flags | sm)


CODE = {
    "for another capability": elf(80, flags=0),
    "for any GPU of the capability": elf(90, flags=0),
    "of a processor": elf(90, machine=62),
    "an empty header": bytes(64),
    "a cut header": elf(90)[:20],
    "PTX": b".version 8.4\n.target sm_90a\n" + bytes(64),
    "a fatbin": b"\x50\xed\x55\xba" + bytes(64),
}


@pytest.mark.parametrize("name", CODE)
def test_code_of_another_kind_is_refused_by_aot_verify(name: str, tmp_path: Path) -> None:
    cubin = CODE[name]
    variant = ROWS._replace(cubin_bytes=len(cubin), cubin_sha256=hashlib.sha256(cubin).digest())
    built = bundle(variant)._replace(target=Target(90, True), cubins=(cubin,))
    publish(tmp_path / "broken.msgpack", codec.encode(built))
    with pytest.raises(BundleCorrupt, match="variant 0: no cubin: "):
        sound(str(tmp_path / "broken.msgpack"))


@pytest.mark.parametrize("fusion", [Fusion.NONE, Fusion.SCATTER, Fusion.GATHER])
@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
@pytest.mark.parametrize("dtype", [dtype for dtype in DType if not dtype.quantised])
@pytest.mark.parametrize("op", Op)
def test_what_the_builder_records_passes(op: Op, dtype: DType, layout: Layout, fusion: Fusion) -> None:
    specialized = [SPECIALIZED] if dtype.itemsize == 2 else [FRAGMENTS] * ((op, dtype) == (Op.DW, DType.TF32))
    for config in (POINTERS, TMA, *specialized):
        experts = MAX_EXPERTS if config.schedule.warp_specialized else MAX_EXPERTS_FALLBACK
        entry = record(Spec(op, dtype, config, layout, Fusion.NONE if op is Op.DW else fusion, max_experts=experts))
        assert unlaunchable(entry) is None
        with opened(entry) as file:
            assert file.variant(0) == entry


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_passes(path: Path) -> None:
    with open_bundle(path) as file:
        for variant in file.variants():
            assert unlaunchable(variant) is None


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_the_code_that_ships_takes_the_parameters_that_its_record_says(path: Path) -> None:
    with open_bundle(path) as file:
        for i, variant in enumerate(file.variants()):
            sizes = parameter_bytes(variant.arguments)
            assert fault(file.cubin(i), file.target, variant.entry, sizes, variant.threads, variant.registers) is None


OTHERS = {
    "one argument fewer": (
        lambda variant: variant._replace(arguments=variant.arguments[:-1]),
        "takes .. parameters, .* says",
    ),
    "one argument more": (
        lambda variant: variant._replace(arguments=(*variant.arguments, ("m_sizes_", "ptr"))),
        "takes .. parameters, .* says",
    ),
    "two arguments exchanged": (
        lambda variant: variant._replace(
            arguments=(*variant.arguments[:-2], variant.arguments[-1], variant.arguments[-2])
        ),
        "takes [48] bytes, its record says [48]",
    ),
    "a kernel that is not there": (lambda variant: variant._replace(entry="nowhere"), "no kernel 'nowhere', but '"),
}


@pytest.mark.parametrize("name", OTHERS)
@pytest.mark.parametrize(
    "path", [path for path in SHIPPED if path.stem.startswith(("catalogue", "fp16"))], ids=lambda path: path.stem
)
def test_a_record_of_other_parameters_is_refused(path: Path, name: str, tmp_path: Path) -> None:
    change, reason = OTHERS[name]
    whole = shipped.whole(path.stem)
    i = next(i for i, variant in enumerate(whole.variants) if variant.arguments[-1][1] != variant.arguments[-2][1])
    changed = change(whole.variants[i])
    assert "says" in reason or changed.arguments == whole.variants[i].arguments
    built = whole._replace(
        variants=(changed,),
        cubins=(whole.cubins[i],),
        choices={},
        models=(),
        kernels=tuple(
            kernel for kernel in whole.kernels if (kernel.name, kernel.revision) == (changed.kernel, changed.revision)
        ),
    )
    publish(tmp_path / "broken.msgpack", codec.encode(built))
    with pytest.raises(BundleCorrupt, match=f"{reason}|launch ABI 1"):  # (aot verify looks at the names first)
        sound(str(tmp_path / "broken.msgpack"))


def _maps(variant: Variant, **fields: object) -> Variant:
    first, *rest = variant.tensor_maps
    return variant._replace(tensor_maps=(first._replace(**fields), *rest))  # type: ignore[arg-type]


def _swapped(variant: Variant, a: str, b: str) -> Variant:
    """Two arguments of one kind in each other's place."""
    names = {a: b, b: a}
    return variant._replace(arguments=tuple((names.get(name, name), kind) for name, kind in variant.arguments))


LIES: dict[str, tuple[Callable[[Variant], Variant], str]] = {
    "no shared memory": (
        lambda variant: variant._replace(shared_bytes=0),
        "0 bytes of shared memory, its boxes alone take",
    ),
    "more shared memory than there is": (lambda variant: variant._replace(shared_bytes=1 << 20), "a block has 232448"),
    "32 threads": (lambda variant: variant._replace(threads=32), "compiled for .* threads, its record says 32"),
    "1024 threads": (lambda variant: variant._replace(threads=1024), "compiled for .* threads, its record says 1024"),
    "fewer registers": (lambda variant: variant._replace(registers=8), "registers a thread, its record says 8"),
    "two pointers exchanged": (
        lambda variant: _swapped(variant, *[name for name, kind in variant.arguments if kind == "ptr"][:2]),
        "its arguments are not those of",
    ),
    "M and N exchanged": (lambda variant: _swapped(variant, "M", "N"), "its arguments are not those of .*N i32"),
    "K and E exchanged": (lambda variant: _swapped(variant, "K", "E"), "its arguments are not those of .*E i32"),
    "a narrower box": (
        lambda variant: _maps(variant, box=(*variant.tensor_maps[0].box[:-1], 32)),
        "boxes of .*: wanted",
    ),
    "a higher box": (
        lambda variant: _maps(variant, box=(*variant.tensor_maps[0].box[:-2], 256, 64)),
        "boxes of .*: wanted",
    ),
    "no swizzle": (lambda variant: _maps(variant, swizzle=0), "swizzle 0: wanted .*, swizzle [23]"),
    "another swizzle": (lambda variant: _maps(variant, swizzle=1), "swizzle 1: wanted"),
    "another tile's config": (
        lambda variant: variant._replace(config=tuple((k, 2 * v if k == "block_m" else v) for k, v in variant.config)),
        "variant 0",
    ),
}


@pytest.mark.parametrize("name", LIES)
def test_a_record_that_lies_of_its_code_is_refused(name: str, tmp_path: Path) -> None:
    """With digests made right. Of each kernel that goes through TMA, a variant that ships."""
    change, reason = LIES[name]
    whole = shipped.whole("catalogue-sm90")
    kernels = {variant.kernel: i for i, variant in enumerate(whole.variants) if len(variant.tensor_maps) > 1}
    assert len(kernels) == 5
    for i in kernels.values():
        changed = change(whole.variants[i])
        assert changed != whole.variants[i]
        built = whole._replace(
            variants=(changed,),
            cubins=(whole.cubins[i],),
            choices={},
            models=(),
            kernels=tuple(
                kernel
                for kernel in whole.kernels
                if (kernel.name, kernel.revision) == (changed.kernel, changed.revision)
            ),
        )
        if "its record says" not in reason:  # the loader compares the record with the entry, and not with the code
            broken = pytest.raises(BundleCorrupt, match=f"variant 0: .*({reason})" if reason != "variant 0" else reason)
            with open_bytes(codec.encode(built), "broken") as file, broken:
                loaded(file, 0, 0, 132)
        publish(tmp_path / "broken.msgpack", codec.encode(built))
        with pytest.raises(BundleCorrupt):
            sound(str(tmp_path / "broken.msgpack"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: path.stem)
def test_what_ships_is_what_its_kernels_declare_and_is_looked_at_in_no_time(path: Path) -> None:
    with open_bundle(path) as file:
        limits = arch_of(file.target.sm).limits
        took = []
        for variant in file.variants():
            begin = time.perf_counter()
            assert undeclared(variant, limits) is None
            took.append(time.perf_counter() - begin)
        assert sorted(took)[len(took) // 2] < 1e-3


def test_code_that_is_cut_or_changed_is_refused_or_read_and_nothing_else() -> None:
    """Its digest would tell; what reads it must be sound all the same."""
    with open_bundle(SHIPPED[-1]) as file:
        cubin, variant = file.cubin(0), file.variant(0)
    wanted, rng = parameter_bytes(variant.arguments), random.Random(1)
    table = struct.unpack_from("<Q", cubin, 40)[0]
    wrong = Counter[bool]()
    for turn in range(3000):
        changed = bytearray(cubin)
        if turn % 3:
            at = rng.choice((rng.randrange(64), rng.randrange(table, len(cubin)), rng.randrange(len(cubin))))
            changed[at] = rng.randrange(256)
        else:
            del changed[rng.randrange(len(cubin)) :]
        wrong[
            fault(bytes(changed), file.target, variant.entry, wanted, variant.threads, variant.registers) is None
        ] += 1
    assert min(wrong.values()) > 100
