"""The kernels that the runtime would select for a model's expert layers on a GPU, which need not be in this machine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Op, Problem
from ...kernels.registry import has_code
from ...runtime.inspect.explain import explain_on
from ...runtime.inspect.explanation import Explanation
from ...runtime.inspect.query import suits
from ..models.layer import LayerGemm, LayerShard
from .plan import problems_of, shapes_on


@dataclass(frozen=True, slots=True)
class ExplainedGemm:
    """One GEMM of one shard for a number of tokens, and the explanation of what would run it."""

    shard: LayerShard
    gemm: LayerGemm
    tokens: int
    explanation: Explanation

    def to_dict(self) -> dict[str, Any]:
        """The explanation as plain values, with the shard and GEMM that it is of."""
        shard = self.shard
        return {
            "model": shard.name,
            "tp": shard.tp,
            "ep": shard.ep,
            "gemm": self.gemm.role,
            "tokens": self.tokens,
            **self.explanation.to_dict(),
        }


def explained(shards: Iterable[LayerShard], tokens: Sequence[int], local: LocalGpu) -> Iterator[ExplainedGemm]:
    """Explain each GEMM of each shard, in every op and dtype that the shard is built in, for each number of tokens.

    GEMM 1 of a forward gathers its rows, and has silu in its epilogue if there is code for that, as in ``moe_mlp``.
    """
    for shard in shapes_on(shards, (local.sm,)):
        for dtype in shard.dtypes:
            planned = set(problems_of(shard, dtype))
            is_prepared = dtype.quantised and has_code(Op.FORWARD, dtype, local.sm, Layout.NK)
            for op in shard.ops if not dtype.quantised else [op for op in shard.ops if op is not Op.DW]:
                for place, gemm in enumerate(shard.gemms(dtype if is_prepared else None)):
                    problem = _problem(op, dtype, gemm, shard, planned, first=not place)
                    for count in tokens:
                        rows = replace(shard, tokens=(count, count)).rows[1]
                        top_k = shard.experts_per_token
                        explanation = explain_on(problem, rows, local, aligned=suits(problem), top_k=top_k)
                        yield ExplainedGemm(shard, gemm, count, explanation)


def _problem(
    op: Op, dtype: DType, gemm: LayerGemm, shard: LayerShard, planned: set[Problem], *, first: bool
) -> Problem:
    plain = Problem(op, dtype, gemm.E, gemm.N, gemm.K, shard.layouts[0])
    if op is not Op.FORWARD or not first:
        return plain
    gated = plain._replace(fusion=Fusion.GATHER | Fusion.SILU)
    return gated if gated in planned else plain._replace(fusion=Fusion.GATHER)
