"""``preload``: load every cubin that a deployment can need, before the first request."""

from __future__ import annotations

import contextlib
import difflib
import functools
import gc
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeAlias, TypeVar

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import BundleError, HostError, InputError, ProblemNotInBundle
from ...artifacts.limits import PART
from ...artifacts.records import DType, Fusion, Layout, LocalGpu, Model, Op, Problem, RowOp, buckets_between, dtypes_of
from ...kernels.entry import has_aligned_rows
from ...kernels.rowops import WEIGHT_OPS, dtype_of
from ...kernels.spec import reads_in_place
from ..dispatch import snapshot as dispatch_snapshot
from ..dispatch.decide import by_tile, dW_of_codes, forms_of, in_place, why_not
from ..dispatch.rowops import ranked
from ..dispatch.snapshot import Rejected, Snapshot, View
from ..driver.device import current_device, local_gpu
from ..launch.loader import load_decided, loaded, may_run
from ..launch.product_kernels import is_by_torch
from ..ops import layer  # noqa: F401 - most of what a first call imports: it is to be there, too
from ..settings import at_fork, lock, settings
from .query import dtype_of_weights, twins_in_fp16

_ROWS = 1 << 20  # the most rows by default: more rows use the last bucket's decisions
_MOST_ROWS = (1 << 31) - 1

_Cell: TypeAlias = tuple[Problem, int]

_T = TypeVar("_T")

_log = logging.getLogger(__name__)
_waited_for, _collected = 0, False  # preloads under way that paused the collector; whether it was on before


@dataclass(frozen=True, slots=True)
class Preloaded:
    """The result of ``preload``: ``count`` variants are loaded for ``problems`` problems, after ``seconds``.

    ``cells`` is the number of decided (problem, bucket) pairs. torch's grouped_mm runs ``by_torch`` of these, because
    it was measured faster.
    """

    count: int
    problems: int
    cells: int
    seconds: float
    by_torch: int = 0


@contextlib.contextmanager
def _collector_waits() -> Iterator[None]:
    """Pause Python's garbage collector: one collection over all of torch's objects takes longer than the loading."""
    global _waited_for, _collected
    _collect_in_children()
    with lock("collector"):
        if not _waited_for:
            _collected = gc.isenabled()
            gc.disable()
        _waited_for += 1
    try:
        yield
    finally:
        with lock("collector"):
            _waited_for = max(_waited_for - 1, 0)
            if not _waited_for and _collected:
                gc.enable()


@functools.cache
def _collect_in_children() -> None:
    at_fork(_nobody_waits)


def _nobody_waits() -> None:
    """Run in a child of ``fork``: the thread that paused the collector does not exist there."""
    global _waited_for
    if _waited_for and _collected:
        gc.enable()
    _waited_for = 0


@_collector_waits()
def preload(
    models: Sequence[str] | str | None = None,
    problems: Iterable[Problem] | None = None,
    tokens: range | None = None,
    device: int | None = None,
    w_layout: str | None = None,
    weights: str | None = None,
) -> Preloaded:
    """Load every variant that the calls of a deployment can need; afterwards such calls load and test no kernel.

    Includes every fusion of a product, kernels for tensors that are not aligned to 16 bytes, and row kernels.

    Parameters
    ----------
    models
        A name, or names, of models that the bundles were built for (``aot inspect`` lists them), in every sharding.
        With neither models nor problems: all problems of all usable bundles.
    problems
        Problems to load, in addition to the models'.
    tokens
        The tokens of one step, e.g. ``range(1, 8193)``; None means all buckets. A model's calls have tokens * top_k
        rows, and with expert parallelism any number up to that, as ``expected_rows`` may be low. ``problems`` have no
        top_k: they get up to tokens * E rows.
    device
        torch's index of the GPU; its current device if None.
    w_layout
        The layout of the models' weights, ``nk`` ([E, N, K]) or ``kn`` ([E, K, N]); None means the layouts that the
        bundles were built for. Does not apply to ``problems``.
    weights
        The format of the models' weights, as a spec of ``aot build`` names it (``mxfp4``, ``fp8_block``, ``bf16``,
        ...); None means all formats of the bundles, without fp16 where there is bf16. Does not apply to ``problems``.

    Returns
    -------
    Preloaded
        How many variants are loaded, for how many problems, and how long that took.

    Raises
    ------
    InputError
        for a model that no usable bundle has, or has in this format (the message names the nearest model, and the
        command that builds a bundle), for tokens that are not a range, and for an unknown w_layout or weights.
    HostError, CudaError
        if there is no such GPU as ``device``, or the driver refuses the code. If ``device`` is None and there is no
        GPU, nothing is loaded, and a warning says so.
    """
    began = time.perf_counter()
    if tokens is not None and not isinstance(tokens, range):
        raise InputError(f"preload: tokens is {tokens!r}, wanted a range, e.g. range(1, 8193)")
    if w_layout not in (None, "nk", "kn"):
        raise InputError(f"preload: w_layout is {w_layout!r}, wanted 'nk' (w is [E, N, K]), 'kn' ([E, K, N]) or None")
    if weights is not None:
        dtype_of_weights(weights, "preload")
    lying = None if w_layout is None else Layout(w_layout)
    models = [models] if isinstance(models, str) else models
    try:
        device = current_device() if device is None else device
    except HostError:
        _log.warning("pretuned: preload: no CUDA GPU here, nothing is loaded: CPU tensors run the torch reference")
        return Preloaded(0, 0, 0, time.perf_counter() - began)
    local, snapshot = local_gpu(device), dispatch_snapshot.snapshot()
    view = snapshot.view(local, installed=True)
    view.demand_named_files()
    wanted: dict[Problem, set[int]] = {}
    if models is not None:
        for model in records_of(models, view, weights):
            for problem in turned(model.problems, lying):
                wanted.setdefault(problem, set()).update(buckets(rows_of(model, tokens)))
    elif problems is None:
        for problem in (
            problem for row in problems_of(view) for problem in turned(row, lying) if _is_of(problem.dtype, weights)
        ):
            wanted.setdefault(problem, set()).update(buckets(_rows(problem, tokens)))
    for twin in twins_in_fp16(wanted) if weights is None else ():
        del wanted[twin]
    for problem in problems or ():
        wanted.setdefault(problem, set()).update(buckets(_rows(problem, tokens)))
    cells = cells_of(wanted, snapshot, local)
    kernels, by_torch = set(), 0
    strict = settings().strict
    for problem, bucket in cells:
        if Fusion.SILU in problem.fusion:  # ``planned_for`` loads such kernels; without one, the plain product runs
            continue
        aligned = has_aligned_rows(problem)
        try:
            kernel = load_decided(snapshot, problem, bucket, local, device, aligned=aligned, strict=strict)
        except ProblemNotInBundle:  # strict mode: the call itself will raise
            continue
        if kernel is not None:
            kernels.add(kernel.function.handle)
            if by_tile(kernel.variant):  # with a low ``expected_rows``, another variant runs
                other = load_decided(
                    snapshot, problem, bucket, local, device, aligned=aligned, strict=strict, persistent=True
                )
                kernels.update(() if other is None else (other.function.handle,))
            by_torch += aligned and not problem.fusion and is_by_torch(problem, bucket, device)
    met = dict.fromkeys(problem for problem, _ in cells)
    while True:  # select again if a variant is damaged or wrong: another variant then takes its place
        more = (
            *planned_for(cells, snapshot, local),
            *fallbacks_of(met, snapshot, local),
            *passes_of(met, snapshot, local),
            *in_place_for(cells, snapshot, local),
            *training_for(cells, snapshot, local),
        )
        handles = [_usable(bundle, index, device, snapshot, local) for bundle, index in more]
        if None not in handles:
            break
    kernels.update(handle for handle in handles if handle is not None)
    done = Preloaded(len(kernels), len(wanted), len(cells), time.perf_counter() - began, by_torch)
    _log.info(
        "pretuned: %d variants preloaded for %d problems in %.1f ms; torch's grouped_mm, measured faster, runs "
        "%d of %d cells",
        done.count,
        done.problems,
        done.seconds * 1e3,
        by_torch,
        done.cells,
    )
    return done


def _usable(bundle: BundleFile, index: int, device: int, snapshot: Snapshot, local: LocalGpu) -> int | None:
    """Load a variant and return its kernel's handle; None if it is damaged, or wrong on this GPU."""
    try:
        kernel = loaded(bundle, index, device, local.gpu.sm_count)
        if may_run(bundle, index, kernel, local) is not False:
            return kernel.function.handle
        snapshot.reconsider()
    except BundleError as error:
        snapshot.reject(bundle, error)
    return None


def planned_for(cells: Iterable[_Cell], snapshot: Snapshot, local: LocalGpu) -> list[tuple[BundleFile, int]]:
    """Every variant that the bundles' plans name for special calls of these cells, in place of the cells' choices."""
    all_cells = list(cells)
    while True:  # select again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            return list(
                dict.fromkeys(
                    (usable.bundle, index)
                    for problem, bucket in all_cells
                    for usable in snapshot.view(local, installed=True).usable
                    for index in _planned(snapshot, usable.bundle, problem, bucket, local)
                )
            )


def _planned(snapshot: Snapshot, bundle: BundleFile, problem: Problem, bucket: int, local: LocalGpu) -> Iterator[int]:
    for choice in snapshot.find(bundle, problem):
        if choice.bucket != bucket:
            continue
        for index in {row.variant: None for row in choice.plan if row.variant is not None}:
            variant = snapshot.variant(bundle, index)
            asked = problem._replace(dtype=variant.dtype, fusion=variant.fusion, top_k=0)
            if why_not(variant, asked, local, aligned=True) is None:
                yield index


def cells_of(wanted: Mapping[Problem, Iterable[int]], snapshot: Snapshot, local: LocalGpu) -> list[_Cell]:
    """Every (problem, bucket) that calls of these products can have, with whatever fusions."""
    cells: dict[_Cell, None] = {}
    for problem, rows in wanted.items():
        for form in forms_of(problem):
            if form is problem or snapshot.serves(form, local):
                cells.update(dict.fromkeys((form, bucket) for bucket in sorted(rows)))
    return list(cells)


def fallbacks_of(problems: Iterable[Problem], snapshot: Snapshot, local: LocalGpu) -> list[tuple[BundleFile, int]]:
    """Every variant that a call on unaligned tensors could run: a few for each kind of problem."""
    while True:  # again if ``Rejected`` has dropped a bundle
        with contextlib.suppress(Rejected):
            return list(
                dict.fromkeys(
                    (usable.bundle, index)
                    for problem in problems
                    for usable in snapshot.having(problem, local)
                    for index, variant in snapshot.variants(usable.bundle, problem)
                    if variant.alignment == 1 and why_not(variant, problem, local, aligned=False) is None
                )
            )


def passes_of(problems: Iterable[Problem], snapshot: Snapshot, local: LocalGpu) -> list[tuple[BundleFile, int]]:
    """The row kernels that calls and layers of these problems can run, on aligned and unaligned tensors."""
    kinds = dict.fromkeys(
        (op, dtype_of(problem.dtype, op)) for op in RowOp if op not in WEIGHT_OPS for problem in problems
    )
    kernels = [ranked(snapshot, *kind, local, aligned=aligned)[:1] for kind in kinds for aligned in (True, False)]
    return list(dict.fromkeys((usable.bundle, index) for row in kernels for usable, index in row))


def in_place_for(cells: Iterable[_Cell], snapshot: Snapshot, local: LocalGpu) -> list[tuple[BundleFile, int]]:
    """The variants for the cells' products that read codes of padded rows where they arrive."""
    asked = (
        in_place(snapshot, problem._replace(fusion=Fusion.STARTS), bucket, local, strict=settings().strict)
        for problem, bucket in cells
        if reads_in_place(problem) and not problem.fusion
    )
    return list(dict.fromkeys((candidate.usable.bundle, candidate.index) for candidate in asked if candidate))


def training_for(cells: Iterable[_Cell], snapshot: Snapshot, local: LocalGpu) -> list[tuple[BundleFile, int]]:
    """The variants for dW of codes, which fp8 training runs."""
    asked = [cell for cell in cells if cell[0].op is Op.DW and cell[0].dtype.quantised]
    decisions = [dW_of_codes(snapshot, problem, bucket, local) for problem, bucket in asked]
    return list(dict.fromkeys((candidate.usable.bundle, candidate.index) for candidate in decisions if candidate))


def problems_of(view: View) -> list[tuple[Problem, ...]]:
    """The problems of each usable bundle. For a bundle with a damaged list of problems, log that and return none.

    The bundle is not dropped: its choices may be undamaged, and ranks that preload nothing would still run them.
    """
    return [_whole(usable.bundle.problems, []) for usable in view.usable]


def _whole(read: Callable[[], tuple[_T, ...]], errors: list[BundleError]) -> tuple[_T, ...]:
    """The records that ``read`` returns; none if they are damaged: the error is then logged and added to ``errors``."""
    try:
        return read()
    except BundleError as error:
        _log.warning("pretuned: preload: %s", error)
        errors.append(error)
        return ()


def _is_of(dtype: DType, weights: str | None) -> bool:
    return weights is None or dtype in dtypes_of(weights)


def records_of(names: Sequence[str], view: View, weights: str | None = None) -> list[Model]:
    """The models of these names, with all their kinds of experts, in every sharding and dtype that the bundles have.

    ``weights``: only the dtypes of this weight format.

    Raises
    ------
    InputError
        if no bundle has a model of one of the names, or has it in that format.
    BundleCorrupt
        if no bundle has a model of one of the names, and a bundle's list of models is damaged.
    """
    errors: list[BundleError] = []
    records = [model for usable in view.usable for model in _whole(usable.bundle.models, errors)]
    known_names = sorted({model.name for model in records})
    for name in names:
        if name not in known_names:
            if errors:  # the model may be in a damaged bundle
                raise errors[0]
            near = difflib.get_close_matches(name, known_names, 3, 0.4)
            hint = f"; did you mean {', '.join(near)}?" if near else ""
            raise InputError(
                f"preload: no usable bundle was built for model {name!r} ({len(known_names)} models are known){hint}. "
                f"Build it with: aot build --models {name}"
            )
    matching = [model for model in records if model.name in names or model.name.partition(PART)[0] in names]
    kept = [model for model in matching if _is_of(model.dtype, weights)]
    for name in names:
        if not any(name in (model.name, model.name.partition(PART)[0]) for model in kept):
            has = ", ".join(dict.fromkeys(model.dtype.value for model in matching if model.name == name))
            raise InputError(
                f"preload: no usable bundle has {name} in {weights} (there is {has}). Build it with: "
                f'aot build --models "{name} weights={weights}"'
            )
    return kept


def turned(problems: Sequence[Problem], layout: Layout | None) -> Iterator[Problem]:
    """Yield the problems with w in ``layout``; if that is None, yield them unchanged.

    dW with w in the other layout has N and K exchanged. Which dW belong to ``layout`` follows from the sizes of the
    forwards and dX; without any of these, dW is yielded in both orders.
    """
    if layout is None:
        yield from problems
        return
    rows = [problem for problem in problems if problem.op is not Op.DW]
    lie = {problem.layout for problem in rows}
    kept = [problem for problem in rows if problem.layout is layout] if layout in lie else rows
    sizes = {
        (problem.E, problem.K, problem.N) if layout is Layout.KN else (problem.E, problem.N, problem.K)
        for problem in kept
    }
    for problem in problems:
        if problem.op is Op.DW:
            both = (problem, problem._replace(N=problem.K, K=problem.N))
            yield from (each for each in both if not sizes or (each.E, each.N, each.K) in sizes)
        elif problem in kept:
            yield problem._replace(layout=layout)


def rows_of(model: Model, tokens: range | None) -> tuple[int, int]:
    """The fewest and the most rows for which a step of a model chooses kernels; (0, 0) for no tokens."""
    if tokens is None:
        return 1, _ROWS
    least, most = _ends(tokens)
    if model.ep == 1:
        return least * model.top_k, most * model.top_k
    return min(1, most), most * model.top_k


def buckets(rows: tuple[int, int]) -> list[int]:
    """Return every bucket from the bucket of the fewest rows to the bucket of the most; [] for no rows."""
    least, most = (min(count, _MOST_ROWS) for count in rows)
    if not most:
        return []
    return list(buckets_between(least, most))


def _rows(problem: Problem, tokens: range | None) -> tuple[int, int]:
    """The fewest and the most rows of a problem's calls, if its top_k is unknown."""
    if tokens is None:
        return 1, _ROWS
    most = _ends(tokens)[1]
    return min(1, most), most * (problem.top_k or problem.E)


def _ends(tokens: range) -> tuple[int, int]:
    """(least, most) token counts above zero in the range; (0, 0) if there are none."""
    some = [count for count in (*tokens[:1], *tokens[-1:]) if count > 0]
    if len(some) == 1 and len(tokens) > 1:  # the range begins, or ends, at or below zero
        some.append(1)
    return (min(some), max(some)) if some else (0, 0)
