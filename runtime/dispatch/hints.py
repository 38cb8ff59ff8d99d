"""Says what to build: the ``aot build`` command for a problem, and the nearest shapes that bundles have."""

from __future__ import annotations

import contextlib
import itertools
import math
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ...artifacts.errors import BundleError
from ...artifacts.limits import MAX_EXPERTS, MAX_WIDTH
from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Model, Op, Problem
from ...kernels.arch import refusal
from ...kernels.registry import has_code
from ...kernels.spec import result_columns
from .snapshot import View

if TYPE_CHECKING:
    from ...artifacts.bundle_file import BundleFile

_NEAREST = 3
_DEFAULT_TOKENS = 65_536  # the most tokens of a spec that names none
_MOST_TOKENS = 1 << 24  # the most tokens of a spec

# Only a layer's first GEMM (weight [E, I, H]) has these fusions; all others count as the second's (weight [E, H, I]).
_FIRST_GEMM = {(Op.FORWARD, Fusion.GATHER), (Op.DX, Fusion.SCATTER)}


def remedy(problem: Problem, bucket: int, sm: int, view: View | None = None) -> str:
    """The advice if no bundle has ``problem``: a sentence without full stop, with the command or why there is none."""
    line = build_line(problem, bucket, sm, view)
    if line is not None:
        return f"Build one with: {line}"
    if refusal(sm) is None and (why := _uncoded(problem, sm)) is not None:
        return f"{why}: torch dequantises them, expert by expert; dequantised weights have kernels (dtype=bf16)"
    return refusal(sm) or (f"aot builds for E up to {MAX_EXPERTS}, and H and I up to {MAX_WIDTH}: torch runs it")


def build_line(problem: Problem, bucket: int, sm: int, view: View | None = None) -> str | None:
    """The command that builds exactly this problem, for at least ``bucket`` rows and capability ``sm``.

    None if ``aot build`` would refuse the capability, the sizes, or weights in a format without kernels.

    The command names a model if a bundle of ``view`` was built for one with this product, in any dtype. Else it writes
    the problem as a GEMM of a layer without a gate: the second, with H = N and I = K, or the first, with H = K and
    I = N. With silu in the epilogue the problem is the first GEMM of a layer with a gate, and I = N/2. A product does
    not depend on top_k, so top_k is the least that reaches ``bucket`` rows with the tokens that a spec may have.
    """
    if refusal(sm) is not None or _uncoded(problem, sm) is not None:
        return None
    spec = None if view is None else _model_spec(problem, bucket, view)
    if spec is not None:
        return f'aot build --models "{spec}" --sm {sm}'
    gated = Fusion.SILU in problem.fusion
    first = gated or (problem.op, problem.fusion) in _FIRST_GEMM
    H, width = (problem.K, result_columns(problem.N, problem.fusion)) if first else (problem.N, problem.K)
    if max(H, width) > MAX_WIDTH or problem.E > MAX_EXPERTS:
        return None
    options = " gated=0" if first and not gated else ""
    options += _options(problem)
    k = min(-(-bucket // _MOST_TOKENS), problem.E)
    options += "" if bucket <= _DEFAULT_TOKENS else f" tokens=1..{min(-(-bucket // k), _MOST_TOKENS)}"
    return f'aot build --models "shape:E={problem.E},H={H},I={width},k={k}{options}" --sm {sm}'


def _uncoded(problem: Problem, sm: int) -> str | None:
    """Why a capability has no kernel for the problem's weights; None if it has one, or if they are not quantised."""
    dtype = problem.dtype
    if not dtype.quantised:
        return None
    if not has_code(problem.op, dtype, sm):
        return f"No kernel is for {problem.op.value} of {dtype.value} weights on sm_{sm}"
    return None


def _options(problem: Problem, *, named: bool = False) -> str:
    """The options of a spec. A model's name without options means the weights as they were published."""
    key = "weights" if problem.dtype.quantised else "dtype"
    options = "" if problem.dtype is DType.BF16 and not named else f" {key}={problem.dtype.value}"
    options += f" layout={problem.layout.value}" if problem.layout is Layout.KN else ""
    return f"{options} ops={problem.op.value}"


def _model_spec(problem: Problem, bucket: int, view: View) -> str | None:
    """The spec of the least sharded model that has this product in any dtype and layout; None if no bundle has one.

    A name with a / is a published model's; other names were given to explicit sizes.
    """
    if problem.op is Op.DW and problem.layout is Layout.KN:  # bundles plan it as another product
        return None
    models: list[Model] = []
    least: dict[str, int] = {}  # name -> least experts of a token, without fused shared ones
    for usable in view.usable:
        with contextlib.suppress(BundleError):
            for model in usable.bundle.models():
                least[model.name] = min(model.top_k, least.get(model.name, model.top_k))
            models += (model for model in usable.bundle.models_of(problem) if "/" in model.name)
    if not models:
        return None
    model = min(models, key=lambda model: model.tp * model.ep)
    options = "".join(f" {key}={degree}" for key, degree in (("tp", model.tp), ("ep", model.ep)) if degree > 1)
    options += " shared=fuse" if model.top_k > least[model.name] else ""
    tokens = -(-bucket * model.ep // model.top_k)
    limit = "" if tokens <= _DEFAULT_TOKENS else f" tokens=1..{tokens}"
    return f"{model.name}{options}{_options(problem, named=True)}{limit}" if tokens <= _MOST_TOKENS else None


def nearest_shapes(problem: Problem, local: LocalGpu, view: View) -> list[str]:
    """Up to three similar problems that the bundles have, nearest first, as text with their rows."""
    shapes: dict[Problem, list[tuple[BundleFile, Problem]]] = {}
    for usable in view.usable:
        if usable.bundle.target.sm != local.sm:
            continue
        with contextlib.suppress(BundleError):  # a damaged record: the code that needs it reports it
            for stored in usable.bundle.problems():
                other = next(
                    (name for name in (stored, stored.transposed) if name and _kind(name) == _kind(problem)), None
                )
                if other is not None:
                    shapes.setdefault(other, []).append((usable.bundle, stored))
    near = sorted(shapes, key=lambda other: (_distance(problem, other), other.sort_key))
    with_rows = ((p, _rows_of(shapes[p])) for p in near)  # a generator: reads the choices of the nearest only
    some = itertools.islice(((p, rows) for p, rows in with_rows if rows), _NEAREST)
    return [f"E={p.E} N={p.N} K={p.K} (M near {', '.join(map(str, rows))})" for p, rows in some]


def _rows_of(names: Iterable[tuple[BundleFile, Problem]]) -> list[int]:
    """The buckets for which bundles have choices of a problem. ``names``: the problem as each bundle writes it."""
    rows: set[int] = set()
    for bundle, name in names:
        with contextlib.suppress(BundleError):
            rows.update(choice.bucket for choice in bundle.find(name))
    return sorted(rows)


def _kind(problem: Problem) -> tuple[object, ...]:
    return problem.op, problem.dtype, problem.layout, problem.fusion


def _distance(a: Problem, b: Problem) -> float:
    return math.fsum(abs(math.log2(p) - math.log2(q)) for p, q in ((a.E, b.E), (a.N, b.N), (a.K, b.K)))
