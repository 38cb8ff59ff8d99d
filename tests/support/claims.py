"""Bundles made of real cubins, with choices as a test wants them."""

from __future__ import annotations

from collections.abc import Mapping

from pretuned.artifacts.records import Bundle, Choice, Gpu, Kernel, Op, Problem, Source

H200 = Gpu("NVIDIA H200", 132, 143771, 12080)
H100 = Gpu("NVIDIA H100 80GB HBM3", 132, 81559, 12080)


def able(bundle: Bundle, problem: Problem) -> list[int]:
    """The variants that a choice for ``problem`` may name, fallbacks last."""
    found = [
        i
        for i, one in enumerate(bundle.variants)
        if (one.op, one.dtype, one.layout, one.fusion) == (problem.op, problem.dtype, problem.layout, problem.fusion)
        and one.max_experts >= problem.E
    ]
    return sorted(found, key=lambda i: -bundle.variants[i].alignment)


def with_twins(bundle: Bundle) -> Bundle:
    """Each aligned variant once more, after the others, as one of another config: something to choose from."""
    twins = [
        (one._replace(config=tuple((name, 1 if name == "group_m" else value) for name, value in one.config)), cubin)
        for one, cubin in zip(bundle.variants, bundle.cubins, strict=True)
        if one.alignment > 1 and isinstance(one.op, Op)
    ]
    assert not {one for one, _ in twins} & set(bundle.variants)
    return bundle._replace(
        variants=(*bundle.variants, *(one for one, _ in twins)),
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
    made = {problem: tuple(sorted(row, key=lambda one: one.bucket)) for problem, row in rows.items()}
    models = tuple(model._replace(problems=tuple(p for p in model.problems if p in made)) for model in bundle.models)
    return bundle._replace(choices=made, gpus=gpus, models=tuple(model for model in models if model.problems), **fields)


def revised(bundle: Bundle, by: int = 1) -> Bundle:
    """As if every kernel had changed: later revisions of other sources."""
    return bundle._replace(
        kernels=tuple(
            Kernel(one.name, one.revision + by, bytes([by]) + one.source_sha256[1:]) for one in bundle.kernels
        ),
        variants=tuple(one._replace(revision=one.revision + by) for one in bundle.variants),
    )
