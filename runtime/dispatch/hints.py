"""What to build, in words: the ``aot build`` line for a problem, and the nearest shapes that are there."""

from __future__ import annotations

import contextlib
import math

from ...artifacts.errors import BundleError
from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Layout, Op, Problem
from ...artifacts.records.target import LocalGpu
from ...kernels.contract.spec import result_columns
from .snapshot import View

_NEAREST = 3
_DEFAULT_TOKENS = 65_536  # what a spec builds for when it does not say
_MOST_TOKENS = 1 << 24  # that a spec may say

# The forms that a layer's first GEMM, of weight [E, I, H], has alone; all others the second, of weight [E, H, I], has.
_FIRST_GEMM = {(Op.FORWARD, Fusion.GATHER), (Op.DX, Fusion.SCATTER)}


def build_line(problem: Problem, bucket: int, sm: int) -> str:
    """The command that builds this very problem, up to ``bucket`` rows and more, for capability ``sm``.

    The problem is written as a GEMM of a layer without a gate: the second, H = N and I = K, or the first, H = K
    and I = N; with silu in its epilogue the first of one with a gate, I = N/2. (top_k decides nothing about a product,
    so it is 1, or what makes so many rows of the tokens that a spec may have.)
    """
    gated = Fusion.SILU in problem.fusion
    first = gated or (problem.op, problem.fusion) in _FIRST_GEMM
    H, width = (problem.K, result_columns(problem.N, problem.fusion)) if first else (problem.N, problem.K)
    options = " gated=0" if first and not gated else ""
    options += "" if problem.dtype is DType.BF16 else f" dtype={problem.dtype.value}"
    options += "" if problem.layout is Layout.NK else f" layout={problem.layout.value}"
    options += f" ops={problem.op.value}"
    k = min(-(-bucket // _MOST_TOKENS), problem.E)
    options += "" if bucket <= _DEFAULT_TOKENS else f" tokens=1..{min(-(-bucket // k), _MOST_TOKENS)}"
    return f'aot build --models "shape:E={problem.E},H={H},I={width},k={k}{options}" --sm {sm}'


def nearest_shapes(problem: Problem, local: LocalGpu, view: View) -> list[str]:
    """Up to three problems of the bundles that are like this one, nearest first, with their rows."""
    found: dict[Problem, set[int]] = {}
    for usable in view.usable:
        if usable.bundle.target.sm != local.sm:
            continue
        with contextlib.suppress(BundleError):  # a damaged record: who needs it will tell
            for one in usable.bundle.problems():
                other = next((name for name in (one, one.transposed) if name and _kind(name) == _kind(problem)), None)
                if other is not None:
                    found.setdefault(other, set()).update(choice.bucket for choice in usable.bundle.find(one))
    near = sorted(found, key=lambda other: (_distance(problem, other), other.sort_key))[:_NEAREST]
    return [f"E={p.E} N={p.N} K={p.K} (M near {', '.join(map(str, sorted(found[p])))})" for p in near if found[p]]


def _kind(problem: Problem) -> tuple[object, ...]:
    return problem.op, problem.dtype, problem.layout, problem.fusion


def _distance(a: Problem, b: Problem) -> float:
    return math.fsum(abs(math.log2(p) - math.log2(q)) for p, q in ((a.E, b.E), (a.N, b.N), (a.K, b.K)))
