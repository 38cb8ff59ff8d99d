"""A bundle put together from parts of others: variants by their content, choices free of any bundle's numbering."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from ...artifacts.names import is_text
from ...artifacts.records.bundle import Bundle, Choice, Kernel, Model, Producer, Source, Variant
from ...artifacts.records.problem import Problem
from ...artifacts.records.target import Gpu, Target
from ...kernels.contract.config import Config
from ...kernels.plans import with_plans
from ..plan.families import Family


@dataclass(frozen=True, slots=True)
class Code:
    """A variant and its cubin. Two are the same where every field is, the cubin's digest among them."""

    variant: Variant
    cubin: bytes

    @property
    def sort_key(self) -> tuple[object, ...]:
        """The one order of the variants of an assembled bundle, whatever they came from."""
        one = self.variant
        return (
            one.op.value,
            one.dtype.value,
            one.layout.value,
            one.fusion.value,
            -one.alignment,
            one.max_experts,
            one.config,
            one.kernel,
            -one.revision,
            one.cubin_sha256,
            repr(one),
        )


@dataclass(frozen=True, slots=True)
class BundleChoice:
    """A choice whose ``variant`` and ``runner_up`` are places in a ``VariantTable``, and whose GPU is written out."""

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
        """Where each variant of one of the bundles is."""
        return self._places[id(bundle)]

    def claim(self, bundle: Bundle, choice: Choice) -> BundleChoice:
        """A choice of one of the bundles."""
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
    """What an assembled bundle takes over as it is."""

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    models: tuple[Model, ...]


def assemble(
    making: Provenance,
    codes: VariantTable,
    claims: Mapping[Problem, Sequence[BundleChoice]],
    fallbacks: Iterable[int],
) -> Bundle:
    """The bundle of these claims (of each bucket one a GPU, or one that is modelled) and fallbacks, and what they use.

    Variants, GPUs, kernels, problems and choices are in one order, so equal parts give equal bytes. Plans are
    made anew.
    """
    every = [claim for row in claims.values() for claim in row]
    used = {claim.variant for claim in every} | {claim.runner_up for claim in every if claim.runner_up is not None}
    ships = sorted(used.union(fallbacks))
    number = {place: i for i, place in enumerate(ships)}
    gpus = sorted({claim.gpu for claim in every if claim.gpu}, key=gpu_key)
    kernels = {(codes[place].kernel, codes[place].revision) for place in ships}
    bundle = Bundle(
        target=making.target,
        min_driver=making.min_driver,
        producer=making.producer,
        kernels=tuple(
            sorted(
                (one for one in making.kernels if (one.name, one.revision) in kernels),
                key=lambda one: (one.name, one.revision),
            )
        ),
        gpus=tuple(gpus),
        variants=tuple(codes[place] for place in ships),
        cubins=tuple(codes.codes[place].cubin for place in ships),
        choices={
            problem: tuple(
                sorted((_choice(one, number, gpus) for one in claims[problem]), key=lambda choice: choice.sort_key)
            )
            for problem in sorted(claims, key=lambda one: one.sort_key)
        },
        models=making.models,
    )
    return with_plans(bundle)


def gpu_key(gpu: Gpu) -> tuple[str, int, int, int]:
    """The one order of GPUs."""
    return (gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver)


def united(models: Iterable[Model]) -> tuple[Model, ...]:
    """One model for each that differs in more than its problems, with the problems of all, as a plan sorts them."""
    problems: dict[Model, set[Problem]] = {}
    for model in models:
        problems.setdefault(model._replace(problems=()), set()).update(model.problems)
    order = sorted(problems, key=_model_key)
    return tuple(
        model._replace(problems=tuple(sorted(problems[model], key=lambda one: one.sort_key))) for model in order
    )


def version(text: str) -> tuple[int, ...]:
    """The latest version in a producer's text: a bundle of several has several."""
    return max((tuple(map(int, re.findall(r"\d+", part))) for part in text.split(",")), default=())


def combined(producers: Sequence[Producer]) -> Producer:
    """All versions, the options that every variant shares, and all that they were held against."""
    shared = set.intersection(*(set(one.compile_options) for one in producers))
    made = Producer(
        _listed([one.pretuned for one in producers]),
        _listed([one.triton for one in producers]),
        _listed([one.ptxas for one in producers]),
        tuple(sorted(shared)),
    )
    return made.with_held_against(digits for one in producers for digits in one.held_against)


def _listed(texts: Sequence[str]) -> str:
    """The distinct versions, latest first; the oldest are left out where a name would get too long."""
    parts = sorted({part.strip() for text in texts for part in text.split(",")}, key=lambda one: (version(one), one))
    text = ", ".join(reversed(parts))
    while not is_text(text) and len(parts) > 1:
        parts = parts[1:]
        text = ", ".join(reversed(parts))
    return text


def _model_key(model: Model) -> tuple[object, ...]:
    values = model._replace(problems=())
    return tuple(value.value if isinstance(value, enum.Enum) else value for value in values)


def is_fallback(variant: Variant) -> bool:
    """Whether any N and K run on it: it ships although no choice may name it."""
    return variant.alignment == 1


def label(variant: Variant) -> str:
    """A variant as tables name it: its family, its config and what sets a fallback apart."""
    text = f"{Family.of(variant)} {config_text(variant)}"
    return text + (" unaligned" if is_fallback(variant) else "")


def config_text(variant: Variant) -> str:
    """The config of a variant, in the short form of tables; its plain pairs where this version can't read them."""
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
