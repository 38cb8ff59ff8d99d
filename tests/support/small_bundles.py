"""Small valid bundles with made-up code, and the GPUs to choose for."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pretuned.artifacts.codec import encode
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import (
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    LocalGpu,
    Model,
    Op,
    Problem,
    Producer,
    Source,
    Target,
    Variant,
)
from pretuned.kernels.plans import with_plans
from pretuned.kernels.spec import Config
from pretuned.runtime.dispatch.places import Kind, Place
from pretuned.runtime.dispatch.snapshot import Snapshot

ELF = bytes.fromhex("7f454c46020133070000000000000000")
DRIVER = 12080

H200 = Gpu("NVIDIA H200", 132, 143771, DRIVER)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 81559, DRIVER)
A100 = Gpu("NVIDIA A100-SXM4-80GB", 108, 81920, DRIVER)
L40S = Gpu("NVIDIA L40S", 142, 46068, DRIVER)
ON_H200, ON_H100, ON_A100, ON_L40S = LocalGpu(90, H200), LocalGpu(90, H100), LocalGpu(80, A100), LocalGpu(89, L40S)

# The Hopper GPUs that people have: SMs, and MiB as the driver says. Choices were measured on the first two.
HOPPERS = (
    H100,
    H200,
    Gpu("NVIDIA H100 NVL", 132, 95830, DRIVER),
    Gpu("NVIDIA H100 PCIe", 114, 81559, DRIVER),
    Gpu("NVIDIA GH200 480GB", 132, 97871, DRIVER),
    Gpu("NVIDIA H20", 78, 97871, DRIVER),
    Gpu("NVIDIA H800", 132, 81559, DRIVER),
)

PROBLEM = Problem(Op.FORWARD, DType.BF16, 8, 1024, 768)
OTHER = Problem(Op.FORWARD, DType.BF16, 16, 2048, 768)

# By index: a wide tile, a narrow one, one for any alignment.
WIDE, NARROW, ANY = 0, 1, 2


@dataclass(frozen=True)
class Spec:
    """A variant to make."""

    config: Config
    alignment: int = 16
    shared_bytes: int = 49152
    max_experts: int = 512
    abi: int = 1
    dtype: DType = DType.BF16
    fusion: Fusion = Fusion.NONE
    op: Op = Op.FORWARD
    layout: Layout = Layout.NK


SPECS = (
    Spec(Config(128, 128, 64, 8, 3)),
    Spec(Config(16, 64, 128, 4, 3)),
    Spec(Config(64, 64, 32, 4, 2), alignment=1, max_experts=4096),
)


def variant(spec: Spec, cubin: bytes) -> Variant:
    return Variant(
        "rows_pointer",
        1,
        spec.abi,
        spec.op,
        spec.dtype,
        spec.layout,
        spec.fusion,
        spec.alignment,
        spec.max_experts,
        spec.config.pairs(),
        "rows_pointer",
        (("x", "ptr"), ("M", "i32")),
        (),
        32 * spec.config.num_warps,
        spec.shared_bytes,
        128,
        0,
        0,
        len(cubin),
        hashlib.sha256(cubin).digest(),
    )


def measured(bucket: int, index: int, time_us: float, gpu: int = 0, second: int | None = None) -> Choice:
    second_ns = None if second is None else int(time_us * 1100)
    return Choice(bucket, index, Source.MEASURED, int(time_us * 1000), second, second_ns, gpu)


def modelled(bucket: int, index: int, time_us: float = 10, second: int | None = None) -> Choice:
    second_ns = None if second is None else int(time_us * 1100)
    return Choice(bucket, index, Source.MODELLED, int(time_us * 1000), second, second_ns)


def bundle(
    choices: Mapping[Problem, Sequence[Choice]],
    *,
    sm: int = 90,
    gpus: Sequence[Gpu] = (),
    specs: Sequence[Spec] = SPECS,
    min_driver: int = DRIVER,
    models: Sequence[Model] = (),
    tag: str = "",
) -> Bundle:
    """A bundle; ``tag`` makes its code, and so its digest, another."""
    cubins = tuple(ELF + f"{tag} {sm} {i}".encode() for i in range(len(specs)))
    bundle = Bundle(
        Target(sm, sm >= 90),
        min_driver,
        Producer("0.1.0", "3.7.1", "12.8.93", ()),
        (Kernel("rows_pointer", 1, hashlib.sha256(b"source").digest()),),
        tuple(gpus),
        tuple(variant(spec, cubin) for spec, cubin in zip(specs, cubins, strict=True)),
        cubins,
        {problem: tuple(rows) for problem, rows in choices.items()},
        tuple(models),
    )
    return with_plans(bundle)


def write(path: Path, choices: Mapping[Problem, Sequence[Choice]], **how: object) -> Path:
    """Publish a bundle at ``path``."""
    path.parent.mkdir(parents=True, exist_ok=True)
    publish(path, encode(bundle(choices, **how)))  # type: ignore[arg-type]
    return path


def places(*paths: Path) -> tuple[Place, ...]:
    """These directories or files, as PRETUNED_BUNDLES would name them."""
    return tuple(Place(Kind.NAMED, path) for path in paths)


def snapshot(*paths: Path, installed: Sequence[Path] = ()) -> Snapshot:
    """A snapshot of these places alone."""
    return Snapshot(places(*paths), lambda: [Place(Kind.INSTALLED, path) for path in installed])
