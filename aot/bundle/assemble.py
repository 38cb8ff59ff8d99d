"""Assemble a bundle from parts of others: variants by their content, choices independent of a bundle's numbering."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.limits import is_text
from ...artifacts.records import Bundle, Choice, Gpu, Kernel, Model, Problem, Producer, Source, Target, Variant
from ...kernels.plans import with_plans
from ...kernels.spec import Config
from ..plan.families import Family


@dataclass(frozen=True, slots=True)
class Code:
    """A variant and its cubin. Two are equal if every field is, including the cubin's digest."""

    variant: Variant
    cubin: bytes

    @property
    def sort_key(self) -> tuple[object, ...]:
        """The order of the variants in an assembled bundle, independent of the inputs' order."""
        variant = self.variant
        return (
            variant.op.value,
            variant.dtype.value,
            variant.layout.value,
            variant.fusion.value,
            -variant.alignment,
            variant.max_experts,
            variant.config,
            variant.kernel,
            -variant.revision,
            variant.cubin_sha256,
            repr(variant),
        )


@dataclass(frozen=True, slots=True)
class BundleChoice:
    """A choice whose ``variant`` and ``runner_up`` are indices into a ``VariantTable``, with its GPU's record."""

    bucket: int
    variant: int
    source: Source
    time_ns: int
    runner_up: int | None
    runner_up_ns: int | None
    gpu: Gpu | None
    torch_ns: int | None = None


class VariantTable:
    """The distinct variants of some bundles in the order of ``Code.sort_key``, whatever the bundles' order."""

    def __init__(self, bundles: Sequence[Bundle]) -> None:
        distinct: dict[Variant, bytes] = {}
        for bundle in bundles:
            distinct.update(zip(bundle.variants, bundle.cubins, strict=True))
        self.codes = sorted((Code(*pair) for pair in distinct.items()), key=lambda code: code.sort_key)
        places = {code.variant: place for place, code in enumerate(self.codes)}
        self._places = {id(bundle): [places[variant] for variant in bundle.variants] for bundle in bundles}

    def __getitem__(self, place: int) -> Variant:
        return self.codes[place].variant

    def places(self, bundle: Bundle) -> list[int]:
        """The places of a bundle's variants in this table."""
        return self._places[id(bundle)]

    def claim(self, bundle: Bundle, choice: Choice) -> BundleChoice:
        """Convert a choice of one of the bundles."""
        places = self.places(bundle)
        return BundleChoice(
            choice.bucket,
            places[choice.variant],
            choice.source,
            choice.time_ns,
            None if choice.runner_up is None else places[choice.runner_up],
            choice.runner_up_ns,
            choice.measured_on(bundle.gpus),
            choice.torch_ns,
        )


@dataclass(frozen=True, slots=True)
class Provenance:
    """The parts that an assembled bundle takes over unchanged."""

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    models: tuple[Model, ...]


def assemble(
    making: Provenance, codes: VariantTable, claims: Mapping[Problem, Sequence[BundleChoice]], fallbacks: Iterable[int]
) -> Bundle:
    """Assemble the bundle of these claims and fallbacks, and of all that they use.

    A bucket has one claim for each GPU, or one modelled claim. Variants, GPUs, kernels, problems and choices are
    sorted, so equal parts give equal bytes. Plans are made anew.
    """
    all_claims = [claim for row in claims.values() for claim in row]
    used = {i for claim in all_claims for i in (claim.variant, claim.runner_up) if i is not None}
    ships = sorted(used.union(fallbacks))
    number = {place: i for i, place in enumerate(ships)}
    gpus = sorted({claim.gpu for claim in all_claims if claim.gpu}, key=gpu_key)
    kernels = {(codes[place].kernel, codes[place].revision) for place in ships}
    bundle = Bundle(
        target=making.target,
        min_driver=making.min_driver,
        producer=making.producer,
        kernels=tuple(
            sorted(
                (kernel for kernel in making.kernels if (kernel.name, kernel.revision) in kernels),
                key=lambda kernel: (kernel.name, kernel.revision),
            )
        ),
        gpus=tuple(gpus),
        variants=tuple(codes[place] for place in ships),
        cubins=tuple(codes.codes[place].cubin for place in ships),
        choices={
            problem: tuple(
                sorted((_choice(claim, number, gpus) for claim in claims[problem]), key=lambda choice: choice.sort_key)
            )
            for problem in sorted(claims, key=lambda problem: problem.sort_key)
        },
        models=making.models,
    )
    return with_plans(bundle)


def gpu_key(gpu: Gpu) -> tuple[str, int, int, int]:
    """The sort key of a GPU."""
    return (gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver)


def united(models: Iterable[Model]) -> tuple[Model, ...]:
    """Unite models that differ only in their problems; models and problems are sorted as in a plan."""
    problems: dict[Model, set[Problem]] = {}
    for model in models:
        problems.setdefault(model._replace(problems=()), set()).update(model.problems)
    order = sorted(problems, key=_model_key)
    return tuple(
        model._replace(problems=tuple(sorted(problems[model], key=lambda problem: problem.sort_key))) for model in order
    )


def version(text: str) -> tuple[int, ...]:
    """The latest version in a producer's text, which lists several if a bundle was merged."""
    return max((tuple(map(int, re.findall(r"\d+", part))) for part in text.split(",")), default=())


def combined(producers: Sequence[Producer]) -> Producer:
    """The producer of a merged bundle: all versions, the options shared by all, all bundles compared with."""
    shared = set.intersection(*(set(producer.compile_options) for producer in producers))
    combination = Producer(
        _listed([producer.pretuned for producer in producers]),
        _listed([producer.triton for producer in producers]),
        _listed([producer.ptxas for producer in producers]),
        tuple(sorted(shared)),
    )
    return combination.with_held_against(digits for producer in producers for digits in producer.held_against)


def _listed(texts: Sequence[str]) -> str:
    """List the distinct versions, latest first; the oldest are left out if the text gets too long."""
    parts = sorted({part.strip() for text in texts for part in text.split(",")}, key=lambda part: (version(part), part))
    text = ", ".join(reversed(parts))
    while not is_text(text) and len(parts) > 1:
        parts = parts[1:]
        text = ", ".join(reversed(parts))
    return text


def _model_key(model: Model) -> tuple[object, ...]:
    values = model._replace(problems=())
    return tuple(value.value if isinstance(value, enum.Enum) else value for value in values)


def is_fallback(variant: Variant) -> bool:
    """True for a fallback, which runs any N and K: it ships although no choice may name it."""
    return variant.alignment == 1


def label(variant: Variant) -> str:
    """A variant's name in tables: its family, its config, and a mark for fallbacks."""
    text = f"{Family.of(variant)} {config_text(variant)}"
    return text + (" unaligned" if is_fallback(variant) else "")


def config_text(variant: Variant) -> str:
    """The config of a variant in the short form of tables, or as plain pairs if this version can't read it."""
    try:
        return str(Config.from_pairs(variant.config))
    except ValueError:
        return " ".join(f"{name}={value}" for name, value in variant.config)


def _choice(claim: BundleChoice, number: Mapping[int, int], gpus: Sequence[Gpu]) -> Choice:
    return Choice(
        claim.bucket,
        number[claim.variant],
        claim.source,
        claim.time_ns,
        None if claim.runner_up is None else number[claim.runner_up],
        claim.runner_up_ns,
        None if claim.gpu is None else gpus.index(claim.gpu),
        claim.torch_ns,
    )
