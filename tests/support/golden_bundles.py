"""Synthetic but valid bundles, the same on every call: what the golden files were written from."""

from __future__ import annotations

import hashlib
import random

from pretuned.artifacts.records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    Model,
    Op,
    PlanRow,
    Problem,
    Producer,
    Source,
    Target,
    TensorMap,
    Variant,
    Way,
)

ELF = bytes.fromhex("7f454c46020133070000000000000000")  # 64-bit, little-endian, NVIDIA's OS ABI


def variant(cubin: bytes, op: Op = Op.FORWARD, dtype: DType = DType.BF16, **fields: object) -> Variant:
    """A plausible variant of this cubin."""
    values: dict[str, object] = {
        "kernel": "grouped_" + op.name.lower(),
        "revision": 1,
        "abi": 1,
        "op": op,
        "dtype": dtype,
        "layout": Layout.NK,
        "fusion": Fusion.NONE,
        "alignment": 16,
        "max_experts": 512,
        "config": (("block_k", 64), ("block_m", 128), ("block_n", 128), ("num_warps", 8), ("persistent", 1)),
        "entry": "grouped_" + op.name.lower() + "_kernel",
        "arguments": (("x", "desc2"), ("w", "desc3"), ("y", "ptr"), ("m_sizes", "ptr"), ("M", "i32"), ("s", "i64")),
        "tensor_maps": (TensorMap("x", 9, (128, 64), 3), TensorMap("w", 9, (1, 128, 64), 3)),
        "threads": 256,
        "shared_bytes": 196608,
        "registers": 168,
        "spill_bytes": 0,
        "scratch_bytes": 0,
        "cubin_bytes": len(cubin),
        "cubin_sha256": hashlib.sha256(cubin).digest(),
    }
    return Variant(**{**values, **fields})  # type: ignore[arg-type]


def kernel(op: Op) -> Kernel:
    """The kernel of ``variant``."""
    return Kernel("grouped_" + op.name.lower(), 1, hashlib.sha256(op.value.encode()).digest())


def small() -> Bundle:
    """One kernel, one variant, one problem, one modelled choice: the worked example of FORMAT.md."""
    cubin = ELF
    problem = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048)
    return Bundle(
        Target(80, False),
        12080,
        Producer("0.1.0", "3.7.1", "12.9.86", ()),
        (kernel(Op.FORWARD),),
        (),
        (variant(cubin, arguments=(("x", "ptr"), ("M", "i32")), tensor_maps=(), config=(("block_m", 16),)),),
        (cubin,),
        {problem: (Choice(1, 0, Source.MODELLED, 5000),)},
        (Model("Qwen/Qwen3-30B-A3B", 1, 1, 8, DType.BF16, (problem,)),),
    )


def medium(problems: int = 12, variants: int = 6, buckets: int = 8, seed: int = 0, cubin_bytes: int = 100) -> Bundle:
    """All ops, measured and modelled choices, fusions, two GPUs."""
    rng = random.Random(seed)
    keys = [
        (op, dtype, fusion)
        for op in Op
        for dtype in (DType.BF16, DType.FP16)
        for fusion in (Fusion.NONE, Fusion.GATHER | Fusion.WEIGHT)
    ]
    keys = keys[: max(1, variants // 2)]
    cubins = tuple(ELF + rng.randbytes(rng.randrange(cubin_bytes // 2, cubin_bytes)) for _ in range(variants))
    first_variants = tuple(
        variant(cubin, keys[i % len(keys)][0], keys[i % len(keys)][1], fusion=keys[i % len(keys)][2])
        for i, cubin in enumerate(cubins)
    )
    choices: dict[Problem, tuple[Choice, ...]] = {}
    while len(choices) < problems:
        op, dtype, fusion = keys[len(choices) % len(keys)]
        N, K, E = (64 * rng.randrange(1, 200), 64 * rng.randrange(1, 200), rng.choice((8, 64, 128, 512)))
        fits = [i for i in range(variants) if keys[i % len(keys)] == (op, dtype, fusion)]
        rows = []
        for log2 in range(buckets):
            measured = rng.random() < 0.5
            first, *rest = rng.sample(fits, k=len(fits))
            second = rest[0] if rest else None
            rows.append(
                Choice(
                    1 << log2,
                    first,
                    Source.MEASURED if measured else Source.MODELLED,
                    rng.randrange(1000, 10**7),
                    second,
                    None if second is None else rng.randrange(1000, 10**7),
                    rng.randrange(2) if measured else None,
                )
            )
        problem = Problem(op, dtype, E, N, K, Layout.NK, fusion, 8 if fusion else 0)
        choices[problem] = tuple(rows)
    listed = tuple(choices)
    return Bundle(
        Target(90, True),
        12080,
        Producer("0.1.0", "3.7.1", "12.9.86", ("enable_fp_fusion=True",)),
        tuple(kernel(op) for op in Op),
        (Gpu("NVIDIA H200", 132, 143771, 12080), Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 12080)),
        first_variants,
        cubins,
        choices,
        tuple(Model(f"org/model-{i}", 1 << i % 3, 1, 1 + i, DType.BF16, listed[i::4]) for i in range(4)),
    )


def full() -> Bundle:
    """The size of a real catalogue: 700 problems x 17 buckets, 160 variants."""
    return medium(700, 160, 17, seed=1, cubin_bytes=12000)


def edges() -> Bundle:
    """Every number at one of its ends, every enum's last value, names of the greatest length; and nothing optional."""
    cubin = ELF + bytes(300)
    long = "a" * 200
    scan = variant(
        cubin,
        Op.DW,
        DType.TF32,
        kernel=long,
        revision=2**31 - 1,
        abi=2**31 - 1,
        layout=Layout.KN,
        fusion=Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT | Fusion.BIAS,
        alignment=1,
        max_experts=65536,
        config=(("zero", 0), ("zz", 2**31 - 1)),
        entry="$" * 200,
        arguments=(*((f"a{i}", "i64") for i in range(63)), ("d", "desc5")),
        tensor_maps=(TensorMap("d", 255, (256, 1, 1, 1, 256), 255),),
        threads=1024,
        shared_bytes=1 << 20,
        registers=1024,
        spill_bytes=2**31 - 1,
        scratch_bytes=2**31 - 1,
    )
    problem = Problem(Op.DW, DType.TF32, 65536, 2**31 - 1, 2**31 - 1, Layout.KN, scan.fusion, 65536)
    return Bundle(
        Target(9999, True),
        2**31 - 1,
        Producer("", " ~" * 100, "", ("",) * 64),
        (Kernel(long, 2**31 - 1, bytes(32)),),
        (Gpu("N" * 200, 2**31 - 1, 2**31 - 1, 2**31 - 1),),
        (scan,),
        (cubin,),
        {problem: tuple(Choice(1 << i, 0, Source.MEASURED, 2**53 - 1, None, None, 0) for i in range(32))},
        (Model("a/b/c", 2**31 - 1, 2**31 - 1, 65536, DType.TF32, (problem, problem)),),
    )


def gpus() -> Bundle:
    """Choices of several GPUs over one set of cubins: of a bucket none, one, two; and a modelled one beside them."""
    bundle = medium(problems=2, variants=4, buckets=3, seed=2)
    rows = {}
    for problem, row in bundle.choices.items():
        first, two, three = (choice._replace(source=Source.MEASURED, gpu=0) for choice in row)
        guess = first._replace(source=Source.MODELLED, gpu=None)
        rows[problem] = (guess, first, first._replace(time_ns=first.time_ns + 1, gpu=1), two, three._replace(gpu=1))
    return bundle._replace(choices=rows)


def plans() -> Bundle:
    """Choices with plans: of each way, with a check and without, beside torch's time and without."""
    kinds = (
        (DType.BF16, Fusion.GATHER),
        (DType.BF16, Fusion.NONE),
        (DType.BF16, Fusion.SCATTER),
        (DType.BF16, Fusion.SILU | Fusion.GATHER),
        (DType.BF16, Fusion.SILU),
        (DType.FP8_BLOCK_A16, Fusion.NONE),
        (DType.FP8_BLOCK, Fusion.NONE),
    )
    cubins = tuple(ELF + bytes([i]) * 50 for i in range(len(kinds)))
    variants = tuple(
        variant(cubin, dtype=dtype, fusion=fusion) for cubin, (dtype, fusion) in zip(cubins, kinds, strict=True)
    )
    first = PlanRow(Way.ROWS_FIRST, False, 2, 1), PlanRow(Way.ROWS_FIRST, True, 6, 1)
    by_index = PlanRow(Way.ROWS_FIRST_BY_INDEX, False, 4, 2), PlanRow(Way.ROWS_FIRST_BY_INDEX, True, 0, None)
    silu = PlanRow(Way.FUSED_SILU, False, 0, 3), PlanRow(Way.FUSED_SILU, False, 8, 4)
    gathers = Problem(Op.FORWARD, DType.BF16, 128, 1536, 2048, fusion=Fusion.GATHER)
    plain = gathers._replace(fusion=Fusion.NONE)
    stays = plain._replace(dtype=DType.FP8_BLOCK_A16)
    coded = PlanRow(Way.QUANTISED_X, False, 0, 6), PlanRow(Way.QUANTISED_X, False, 3, None)
    return Bundle(
        Target(90, True),
        12080,
        Producer("0.1.0", "3.7.1", "12.9.86", ()),
        (kernel(Op.FORWARD),),
        (Gpu("NVIDIA H200", 132, 143771, 12080),),
        variants,
        cubins,
        {
            gathers: (
                Choice(1024, 0, Source.MEASURED, 90_000, gpu=0, plan=(*first, *by_index, *silu)),
                Choice(2048, 0, Source.MEASURED, 150_000, gpu=0),
            ),
            plain: (Choice(1024, 1, Source.MEASURED, 70_000, None, None, 0, 60_000, (silu[0]._replace(variant=4),)),),
            stays: (Choice(1024, 5, Source.MODELLED, 70_000, plan=coded),),
        },
        (),
    )


GOLDEN = {
    "small": small,
    "medium": medium,
    "edges": edges,
    "gpus": gpus,
    "plans": plans,
}  # tests/golden/format<n>-<name>.msgpack
