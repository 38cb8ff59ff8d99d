"""Bundles made of real cubins, with choices as a test wants them."""

from __future__ import annotations

from collections.abc import Mapping

from pretuned.artifacts.records import Bundle, Choice, Gpu, Kernel, Op, Problem, Source

H200 = Gpu("NVIDIA H200", 132, 143771, 12080)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 12080)


def able(bundle: Bundle, problem: Problem) -> list[int]:
    """The variants that a choice for ``problem`` may name, fallbacks last."""
    taken = [
        i
        for i, variant in enumerate(bundle.variants)
        if (variant.op, variant.dtype, variant.layout, variant.fusion)
        == (problem.op, problem.dtype, problem.layout, problem.fusion)
        and variant.max_experts >= problem.E
    ]
    return sorted(taken, key=lambda i: -bundle.variants[i].alignment)


def with_twins(bundle: Bundle) -> Bundle:
    """Each aligned variant once more, after the others, as one of another config: something to choose from."""
    twins = [
        (
            variant._replace(config=tuple((name, 1 if name == "group_m" else value) for name, value in variant.config)),
            cubin,
        )
        for variant, cubin in zip(bundle.variants, bundle.cubins, strict=True)
        if variant.alignment > 1 and isinstance(variant.op, Op)
    ]
    assert not {variant for variant, _ in twins} & set(bundle.variants)
    return bundle._replace(
        variants=(*bundle.variants, *(variant for variant, _ in twins)),
        cubins=(*bundle.cubins, *(cubin for _, cubin in twins)),
    )


def chosen(
    bundle: Bundle, choices: Mapping[tuple[Problem, int], tuple[int, int, Gpu | None]], **fields: object
) -> Bundle:
    """``bundle`` with only these choices, (problem, bucket) -> (n-th able variant, time in ns, GPU if measured)."""
    gpus = tuple(dict.fromkeys(gpu for _, _, gpu in choices.values() if gpu))
    rows: dict[Problem, list[Choice]] = {}
    for (problem, bucket), (n, time_ns, gpu) in choices.items():
        index = able(bundle, problem)[n]
        source = Source.MEASURED if gpu else Source.MODELLED
        rows.setdefault(problem, []).append(
            Choice(bucket, index, source, time_ns, gpu=gpus.index(gpu) if gpu else None)
        )
    sorted_choices = {problem: tuple(sorted(row, key=lambda choice: choice.bucket)) for problem, row in rows.items()}
    models = tuple(
        model._replace(problems=tuple(p for p in model.problems if p in sorted_choices)) for model in bundle.models
    )
    return bundle._replace(
        choices=sorted_choices, gpus=gpus, models=tuple(model for model in models if model.problems), **fields
    )


def revised(bundle: Bundle, by: int = 1) -> Bundle:
    """Return a bundle in which every kernel has changed: later revisions of other sources."""
    return bundle._replace(
        kernels=tuple(
            Kernel(kernel.name, kernel.revision + by, bytes([by]) + kernel.source_sha256[1:])
            for kernel in bundle.kernels
        ),
        variants=tuple(variant._replace(revision=variant.revision + by) for variant in bundle.variants),
    )
