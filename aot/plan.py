"""Shards -> the problems and buckets of one bundle: pure, the same for every capability."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from ..artifacts.types import DType, Fusion, Layout, Model, Op, Problem, bucket_of
from ..kernels.abi import code_of
from .modelshape import ModelShape

# What a layer does beside the product of GEMM 1 and of GEMM 2: GEMM 1 reads hidden states in token order, GEMM 2
# writes them there, and what is gathered going forward is scattered coming back.
_MOVES = {Op.FORWARD: (Fusion.GATHER, Fusion.SCATTER), Op.DX: (Fusion.SCATTER, Fusion.GATHER)}


@dataclass(frozen=True, slots=True)
class Plan:
    """What to choose variants for.

    ``buckets`` is problem -> its buckets of M, ascending; the problems are in ``sort_key`` order and
    each is there once, whatever number of models share it. ``models`` has one entry a shard and dtype.
    """

    buckets: Mapping[Problem, tuple[int, ...]]
    models: tuple[Model, ...]

    @property
    def problems(self) -> tuple[Problem, ...]:
        """The distinct problems, in their order."""
        return tuple(self.buckets)

    @property
    def choices(self) -> int:
        """The number of (problem, bucket) pairs: the choices that a finished bundle holds."""
        return sum(len(buckets) for buckets in self.buckets.values())


def plan(shapes: Iterable[ModelShape]) -> Plan:
    """The distinct problems of ``shapes``, their buckets, and the models they serve.

    A shard has, for each of its dtypes, layouts and ops, a problem for each of its two GEMMs, and of the forward
    and dX one more for each, with the rows moved on the way. Its buckets are the powers of two that its
    M = tokens * k / ep falls in, from the least to the most tokens, the same for every op.
    """
    buckets: dict[Problem, set[int]] = {}
    models: dict[tuple[str, int, int, int, DType], set[Problem]] = {}
    for shape in shapes:
        wanted = buckets_between(*shape.rows)
        for dtype in shape.dtypes:
            problems = set(problems_of(shape, dtype))
            for problem in problems:
                buckets.setdefault(problem, set()).update(wanted)
            key = (shape.name, shape.tp, shape.ep, shape.experts_per_token, dtype)
            models.setdefault(key, set()).update(problems)
    return Plan(
        MappingProxyType({one: tuple(sorted(buckets[one])) for one in sorted(buckets, key=lambda one: one.sort_key)}),
        tuple(
            Model(*key, problems=tuple(sorted(models[key], key=lambda one: one.sort_key)))
            for key in sorted(models, key=lambda key: (*key[:4], key[4].value))
        ),
    )


def problems_of(shape: ModelShape, dtype: DType) -> Iterator[Problem]:
    """What one shard computes in one dtype; ``abi.code_of`` says which forms of a call share a problem.

    dW of w [E, K, N] is dW of w [E, N, K] with x and dy, N and K exchanged, and is planned as that.
    """
    for op in shape.ops:
        for layout in shape.layouts:
            for gemm, moves in zip(shape.gemms(), _MOVES.get(op, (Fusion.NONE, Fusion.NONE)), strict=True):
                if op is Op.DW and layout is Layout.KN:
                    yield Problem(op, dtype, gemm.E, gemm.K, gemm.N)
                    continue
                for fusion in (Fusion.NONE, code_of(op, moves)):
                    yield Problem(op, dtype, gemm.E, gemm.N, gemm.K, layout, fusion)


def buckets_between(least: int, most: int) -> tuple[int, ...]:
    """Every bucket from that of ``least`` rows to that of ``most``, ascending."""
    first, last = bucket_of(least), bucket_of(most)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))
