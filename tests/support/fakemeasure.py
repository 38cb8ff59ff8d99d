"""A stand-in for a GPU that measures: bundles with made-up code and times, and a count of the calls."""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path
from typing import Any

from pretuned.aot.demand.tuner import OnDemand
from pretuned.aot.plan.families import Pool, families
from pretuned.aot.plan.plan import BuildPlan
from pretuned.artifacts.records import Bundle, Choice, Gpu, Kernel, LocalGpu, Problem, Producer, Source, Target, Variant
from pretuned.kernels.entry import LAUNCH_ABI
from pretuned.kernels.plans import with_plans
from pretuned.kernels.registry import ENTRIES, entry_of
from pretuned.kernels.spec import Config, Loads, Spec

H200 = Gpu("NVIDIA H200", 132, 143771, 12080)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 12080)
ON_H200 = LocalGpu(90, H200)
CONFIG = Config(64, 128, 64, 4, 4, loads=Loads.TMA)


def bundle(
    planned: BuildPlan,
    *,
    gpu: Gpu = H200,
    config: Config = CONFIG,
    revision: int | None = None,
    code_bytes: int = 64,
    modelled: bool = False,
    sm: int = 90,
    plain_ns: int = 5000,
) -> Bundle:
    """Every cell measured, with one variant a family and a fallback of each; of codes by the first of their configs.

    ``plain_ns`` is the time of products that leave x as it is.
    """
    variants: list[Variant] = []
    cubins: list[bytes] = []
    number: dict[object, int] = {}
    for family in families(planned.problems):
        runs = next(iter(Pool().candidates(family, sm))) if family.dtype.quantised else config
        kernel = entry_of(Spec(family.op, family.dtype, runs, family.layout, family.fusion)).name
        for alignment in (16, 1):
            seed = f"{family} {runs} {alignment} {revision}".encode()
            cubin = hashlib.sha256(seed).digest() * (code_bytes // 32)
            if alignment == 16:
                number[family] = len(variants)
            variants.append(
                Variant(
                    kernel,
                    ENTRIES[kernel].revision if revision is None else revision,
                    LAUNCH_ABI,
                    family.op,
                    family.dtype,
                    family.layout,
                    family.fusion,
                    alignment,
                    4096,
                    runs.pairs(),
                    kernel,
                    (("x", "ptr"), ("M", "i32")),
                    (),
                    128,
                    4096,
                    100,
                    0,
                    0,
                    len(cubin),
                    hashlib.sha256(cubin).digest(),
                )
            )
            cubins.append(cubin)
    source, at = (Source.MODELLED, None) if modelled else (Source.MEASURED, 0)
    choices: dict[Problem, tuple[Choice, ...]] = {}
    for family, problems in families(planned.problems).items():
        for problem in problems:
            rows = planned.buckets[problem]
            ns = 5000 if family.dtype.quantises_x else plain_ns
            choices[problem] = tuple(Choice(bucket, number[family], source, ns, gpu=at) for bucket in rows)
    names = sorted({(variant.kernel, variant.revision) for variant in variants})
    bundle = Bundle(
        Target(sm, sm >= 90),
        12080,
        Producer("0.1.0", "3.7.1", "12.8", ()),
        tuple(Kernel(name, number, hashlib.sha256(name.encode()).digest()) for name, number in names),
        () if modelled else (gpu,),
        tuple(variants),
        tuple(cubins),
        choices,
        planned.models,
    )
    return with_plans(bundle)


class Counted:
    """Measures by making a bundle up, and writes a line into a file for each call."""

    def __init__(self, log: Path, seconds: float = 0.0, **how: Any) -> None:
        self.log, self.seconds, self.how = log, seconds, how

    def __call__(self, planned: BuildPlan, sm: int, device: int) -> Bundle:
        with self.log.open("a") as file:
            file.write(f"{os.getpid()}\n")
        time.sleep(self.seconds)
        return bundle(planned, **self.how)

    @property
    def calls(self) -> int:
        """Return the number of measurements."""
        return len(self.log.read_text().splitlines()) if self.log.exists() else 0


def on_demand(log: Path, seconds: float = 0.0, **how: Any) -> OnDemand:
    """Tuning on demand on an H200 that isn't there; ``how`` is as of ``bundle``."""
    return OnDemand(Counted(log, seconds, **how), lambda device: ON_H200)
