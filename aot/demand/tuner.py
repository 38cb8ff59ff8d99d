"""Tuning on demand: what is cached, when cells count as measured, and the lock of the process that measures.

aot/demand/api.py has the public calls.

The user's overlay has the results, in one bundle for each kind of GPU. Readers need no lock. Writers take turns under
the directory's lock, and replace the file by rename. A file stays small: entries of earlier kernel revisions are
dropped, then the oldest ones. Its name holds the format and the launch ABI, so versions of pretuned that read both
share it, and others leave it alone.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import re
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Protocol

import msgpack

from ...artifacts import codec
from ...artifacts.bundle_file import open_bundle, open_bytes
from ...artifacts.errors import (
    BundleError,
    BundleUnreadable,
    BundleUntrusted,
    HostError,
    InputError,
    LockBusy,
    PretunedError,
)
from ...artifacts.format import MAX_FUSION
from ...artifacts.limits import FORMAT, MAX_INDEX_BYTES, MAX_NAME_CHARS, OLDEST_FORMAT, printable
from ...artifacts.locking import check_cache, lock
from ...artifacts.publishing import publish
from ...artifacts.records import (
    PLAIN_DTYPES,
    Bundle,
    Choice,
    DType,
    Fusion,
    Gpu,
    LocalGpu,
    Model,
    Op,
    Problem,
    Variant,
    bucket_of,
    dtypes_of,
)
from ...kernels.entry import LAUNCH_ABI, READS_ABI
from ...kernels.registry import ENTRIES
from ...kernels.spec import Config
from ...runtime.config_cache import ConfigCache
from ...runtime.dispatch import snapshot as dispatch_snapshot
from ...runtime.dispatch.decide import Decision, Miss, decide, settle
from ...runtime.dispatch.pin import KernelPair, Preference
from ...runtime.dispatch.places import Kind
from ...runtime.dispatch.plans import quantised_x
from ...runtime.dispatch.snapshot import Rejected, Usable
from ...runtime.driver.device import capturing, local_gpu
from ...runtime.hooks import reload
from ...runtime.inspect.query import suits
from ...runtime.settings import lock as process_lock
from ...runtime.settings import settings
from ..bundle.assemble import BundleChoice, Provenance, VariantTable, assemble, is_fallback
from ..bundle.merge import merge
from ..models.layer import LayerShard
from ..plan.families import optional
from ..plan.plan import BuildPlan, plan, planned_on
from ..process import child
from . import worker

_MAX_ITEMS = 64  # in an array of a file: far more than the fields of a config

Configs = tuple[KernelPair, KernelPair, KernelPair]  # forward, dX, dW


@dataclass(frozen=True, slots=True)
class CacheKey:
    """Everything that the configs of a layer depend on: GPU, kernels and their revisions, shape, rows.

    ``bucket`` is the bucket of seq_len * top_k rows; ``dtype`` is x and w's dtype, or the format of quantised weights.
    """

    gpu: str
    sm: int
    sm_count: int
    memory_gib: int
    kernels: tuple[tuple[str, int], ...]
    ops: tuple[str, ...]
    E: int
    H: int
    I: int  # noqa: E741, the field's letter
    top_k: int
    dtype: str
    bucket: int

    @property
    def file_name(self) -> str:
        """The name of the key's file."""
        return hashlib.sha256(repr(self).encode()).hexdigest() + ".config"


def encode(key: CacheKey, configs: Configs) -> bytes:
    """The content of a key's file."""
    data: bytes = msgpack.packb((repr(key), *(_value(pair) for pair in configs)))
    return data


def decode(key: CacheKey, payload: bytes) -> Configs | None:
    """The configs in a file; None if its key differs, or a version with other configs wrote it."""
    try:
        named, *pairs = msgpack.unpackb(payload, use_list=False, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
        configs = tuple(_pair(value) for value in pairs)
    except (ValueError, TypeError, KeyError, OverflowError, RecursionError, msgpack.UnpackException):
        return None
    if named != repr(key) or tuple(pair.op for pair in configs) != tuple(Op):
        return None
    return configs[0], configs[1], configs[2]


def _value(pair: KernelPair) -> object:
    gemms = [[(fusion.value, config.pairs()) for fusion, config in gemm.configs] for gemm in (pair.first, pair.second)]
    return (pair.op.value, *gemms)


def _pair(value: tuple[str, object, object]) -> KernelPair:
    op, first, second = value
    return KernelPair(Op(op), _preferred(first), _preferred(second))


# Fusion(2**63) is an error in some versions of Python, and Fusion.NONE in others.
_FUSIONS = {bits: Fusion(bits) for bits in range(MAX_FUSION + 1)}


def _preferred(value: object) -> Preference:
    if not isinstance(value, tuple):
        raise TypeError(f"{value!r} is no list of configs")
    return Preference(tuple((_FUSIONS[fusion], Config.from_pairs(pairs)) for fusion, pairs in value))


def dtype_of(dtype: object) -> DType:
    """Parse ``torch.bfloat16``, ``bf16`` or ``DType.BF16``; ValueError if kernels have no x of that type."""
    text = dtype.value if isinstance(dtype, DType) else str(dtype).removeprefix("torch.")
    by_name = {
        "bfloat16": DType.BF16,
        "float16": DType.FP16,
        "half": DType.FP16,
        "float32": DType.FP32,
        "float": DType.FP32,
    }
    result = by_name[text] if text in by_name else DType(text)
    if result not in PLAIN_DTYPES:
        raise ValueError(f"{result.value} is a format of weights")
    return result


MAX_BYTES = 32 << 20  # of one file: a few hundred shapes
MAX_ENTRIES = 512  # tuned shapes; their choices stay far below an index's limit
LOCK_TIMEOUT_S = 10.0

_ENTRY = "on-demand"
_LAST_NUMBER = 10**8 - 1
_NUMBER = re.compile(rf"{_ENTRY}/(\d{{8}}) ")
_FILE = re.compile(r"tuned-f(\d+)-a(\d+)-.*\.msgpack")


def path_of(directory: Path, sm: int, gpu: Gpu) -> Path:
    """The overlay's file for one kind of GPU."""
    name = re.sub(r"[^a-z0-9]+", "-", gpu.name.lower()).strip("-")[:80]
    return directory / f"tuned-f{FORMAT}-a{LAUNCH_ABI}-sm{sm}-{name}-{gpu.sm_count}.msgpack"


def add(
    directory: Path,
    gpu: Gpu,
    tuned: Bundle,
    *,
    timeout_s: float = LOCK_TIMEOUT_S,
    note: Callable[[str], None] = lambda text: None,
) -> Path:
    """Add a tuned bundle to the overlay of ``gpu`` and return its file; ``note`` is called for lost entries.

    Raises
    ------
    HostError
        if the directory can't be made, locked within ``timeout_s``, or written, or its file can't be read or trusted;
        the file is then unchanged.
    """
    path = path_of(directory, tuned.target.sm, gpu)
    check_cache(directory)
    with lock(directory, timeout_s, required=True):
        old = _read(path, note)
        publish(path, codec.encode(joined(tuned, old, note)))
        _remove_outdated(directory)
    return path


def clear(directory: Path) -> None:
    """Remove everything that this version tuned.

    Raises
    ------
    HostError
        if the directory can't be locked or written.
    """
    if not directory.is_dir():
        return
    check_cache(directory)
    with lock(directory, LOCK_TIMEOUT_S, required=True):
        for path in directory.glob(f"tuned-f{FORMAT}-a{LAUNCH_ABI}-*.msgpack"):
            try:
                path.unlink(missing_ok=True)
            except OSError as error:
                raise HostError(f"can't remove '{path}': {error.strerror}") from error


def joined(
    tuned: Bundle,
    old: Bundle | None,
    note: Callable[[str], None] = lambda text: None,
    *,
    max_bytes: int = MAX_BYTES,
    max_entries: int = MAX_ENTRIES,
) -> Bundle:
    """Merge ``tuned``, as the newest entry, with the entries of ``old`` that fit."""
    entries = [] if old is None else _entries(old)
    last = max((_number(entry) for entry in entries), default=0)
    if last >= _LAST_NUMBER:  # no machine tunes that often: the file is damaged, or made by hand
        note(f"what was tuned before can't be kept: its last entry has the number {last}")
        entries, last = [], 0
    tuned = tuned._replace(models=_numbered(tuned, last + 1))
    if old is None or not entries:
        return tuned
    anew = {(problem, choice.bucket) for problem, row in tuned.choices.items() for choice in row}
    entries = entries[-(max_entries - 1) :] if max_entries > 1 else []
    while entries:
        earlier = _part(old, entries, anew)
        if earlier is None:
            return tuned
        try:
            bundle = merge({"what was tuned": tuned, "the overlay": earlier}).bundle
        except PretunedError as error:  # other sources, or another ABI under this name
            note(f"what was tuned before can't be kept: {error}")
            return tuned
        data = codec.encode(bundle)
        if len(data) <= max_bytes and len(data) - sum(map(len, bundle.cubins)) <= MAX_INDEX_BYTES // 2:
            return bundle
        entries = entries[max(1, len(entries) // 8) :]
    return tuned


def _numbered(tuned: Bundle, number: int) -> tuple[Model, ...]:
    """The models of a new entry, named so that they sort by age."""
    return tuple(
        model._replace(name=f"{_ENTRY}/{number:08d} {model.name.replace('/', ' ')}"[:MAX_NAME_CHARS])
        for model in tuned.models
    )


def _entries(bundle: Bundle) -> list[Model]:
    """The models of an overlay, oldest first."""
    return sorted((model for model in bundle.models if _NUMBER.match(model.name)), key=_number)


def _number(model: Model) -> int:
    match = _NUMBER.match(model.name)
    return int(match[1]) if match else 0


def _part(old: Bundle, entries: list[Model], anew: set[tuple[Problem, int]]) -> Bundle | None:
    """The part of an overlay that these entries need, less cells in ``anew`` and earlier kernel revisions."""
    codes = VariantTable([old])
    claims: dict[Problem, list[BundleChoice]] = {}
    for problem in {problem for entry in entries for problem in entry.problems}:
        row = [
            _current(claim, codes)
            for claim in (codes.claim(old, choice) for choice in old.choices[problem])
            if (problem, claim.bucket) not in anew and is_current(codes[claim.variant])
        ]
        if row:
            claims[problem] = row
    if not claims:
        return None
    models = [
        entry._replace(problems=tuple(problem for problem in entry.problems if problem in claims)) for entry in entries
    ]
    fallbacks = [
        place for place, code in enumerate(codes.codes) if is_fallback(code.variant) and is_current(code.variant)
    ]
    making = Provenance(
        old.target, old.min_driver, old.producer, old.kernels, tuple(model for model in models if model.problems)
    )
    return assemble(making, codes, claims, fallbacks)


def _current(claim: BundleChoice, codes: VariantTable) -> BundleChoice:
    """The claim, without a runner-up of an earlier revision."""
    if claim.runner_up is None or is_current(codes[claim.runner_up]):
        return claim
    return replace(claim, runner_up=None, runner_up_ns=None)


def is_current(variant: Variant) -> bool:
    """True if a variant is of this version's kernel revision or a later one."""
    entry = ENTRIES.get(variant.kernel)
    return entry is None or variant.revision >= entry.revision


def _read(path: Path, note: Callable[[str], None]) -> Bundle | None:
    """Read the overlay's file; None if it is missing or damaged, and is then begun anew."""
    if not path.exists():
        return None
    try:
        with open_bundle(path) as file:
            return file.load()
    except (BundleUntrusted, BundleUnreadable) as error:  # the file may be intact
        raise HostError(f"nothing can be added to '{path}': {error}") from error
    except BundleError as error:
        note(f"what was tuned before can't be kept: {error}")
        return None


def _remove_outdated(directory: Path) -> None:
    """Remove files of formats and launch ABIs that this version no longer reads."""
    for path in directory.glob("tuned-f*.msgpack"):
        match = _FILE.fullmatch(path.name)
        if match and (int(match[1]) < OLDEST_FORMAT or int(match[2]) < READS_ABI[0]):
            with contextlib.suppress(OSError):  # the next writer tries again
                path.unlink()


WAIT_S = 1800.0  # for another tuning process
BUDGET_S = 120.0  # of measuring; compiling comes on top
_CHILD_TIMEOUT_S = 900.0
_TUNING = "tuning"  # directory of the lock that a tuning process holds

_log = logging.getLogger(__name__)


class Measurer(Protocol):
    """A function that measures cells on one GPU."""

    def __call__(self, planned: BuildPlan, sm: int, device: int) -> Bundle:
        """The bundle of the measured cells. Raises PretunedError if it can't be done."""


class OnDemand:
    """Tuning on demand with one way to measure. Safe to use from several threads and processes."""

    def __init__(self, measure: Measurer, gpu_of: Callable[[int], LocalGpu] = local_gpu) -> None:
        self._measure = measure
        self._gpu_of = gpu_of
        self._kept = ConfigCache[CacheKey, Configs]("configs", lambda key: key.file_name, encode, decode)
        self.load = self._kept.load
        self._tried: set[CacheKey] = set()  # not tuned again in this process
        self._settled: set[object] = set()  # calls that ``tune_call`` has finished
        self._settled_in: object = None  # the snapshot of ``_settled``

    def configs(self, key: CacheKey, device: int, *, force: bool) -> Configs:
        """The configs of a layer; see ``get_or_autotune_moe_kernels``."""
        with process_lock("tuning on demand"):
            cached = None if force else self.load(key)
            if cached is not None:
                return cached
            shape, local = shape_of(key), self._gpu_of(device)
            planned = planned_for(key, shape)
            if key in self._tried and not force:
                tuned = measured_here(planned.buckets, local)
            else:
                tuned = self._ensure(planned, local, device, force=force)
                if settings().on_demand and not capturing():
                    self._tried.add(key)
            configs = _configs(planned, shape, key.bucket, local)
            if tuned:
                self.save(key, *configs)
            return configs

    def save(self, key: CacheKey, config_fwd: KernelPair, config_bwd_dX: KernelPair, config_bwd_dW: KernelPair) -> None:
        """Cache configs under ``key``: ``get_or_autotune_moe_kernels`` then returns them, in later processes too.

        If the file can't be written, they are cached in memory only.

        Raises
        ------
        InputError
            for pairs that are not of the forward, dX and dW, in this order.
        """
        configs = (config_fwd, config_bwd_dX, config_bwd_dW)
        for pair, op in zip(configs, Op, strict=True):
            if not isinstance(pair, KernelPair) or pair.op is not op:
                raise InputError(f"save_cached_config: got {pair!r} for {op.value}, wanted a KernelPair of {op.value}")
        self._kept.save(key, configs)

    def clear(self) -> None:
        """Forget everything tuned on demand, in memory and (unless PRETUNED_DISABLE_AUTOTUNE=1) in the overlay."""
        with process_lock("tuning on demand"):
            self._kept.clear(files=True)
            self._tried.clear()
            self._settled.clear()
            dispatch_snapshot.forget_made()
            place = settings().overlay
            if place is not None and not settings().disable_autotune:
                try:
                    clear(place)
                except HostError as error:
                    _log.warning("pretuned: what was tuned stays in the overlay: %s", error)
            reload()

    def tune_call(self, problems: tuple[Problem, ...], M: int, device: int) -> None:
        """Make sure that a call's problems are measured at M rows; does nothing in a graph capture."""
        key, snapshot = (problems, bucket_of(M), device), dispatch_snapshot.snapshot()
        if self._settled_in is snapshot and key in self._settled:
            return
        if capturing():
            return
        with process_lock("tuning on demand"):
            first = problems[0]
            model = Model(f"E{first.E}-N{first.N}-K{first.K}", 1, 1, 1, first.dtype, problems)
            planned = BuildPlan(dict.fromkeys(problems, (bucket_of(M),)), (model,))
            self._ensure(planned, self._gpu_of(device), device)
            if self._settled_in is not dispatch_snapshot.snapshot():
                self._settled, self._settled_in = set(), dispatch_snapshot.snapshot()
            self._settled.add(key)

    def _ensure(self, planned: BuildPlan, local: LocalGpu, device: int, *, force: bool = False) -> bool:
        """Tune unless every cell of the plan was measured or tried; True if all have choices measured on this GPU."""
        if not force and _attempted(planned.buckets, local):
            return measured_here(planned.buckets, local)
        if not settings().on_demand or capturing():
            return False
        before = _overlay_file(local)
        try:
            with _turn() as mine:
                if mine is None:
                    _log.warning("pretuned: another process has been tuning for %g s: going on without", WAIT_S)
                    return False
                reload()
                fresh = not force or _overlay_file(local) not in (None, before)
                if not (fresh and _attempted(planned.buckets, local)):  # else another process has tuned them
                    self._tune(planned, local, device)
        except PretunedError as error:
            _log.warning("pretuned: tuning on demand failed, %s: %s", _instead(planned.buckets, local), error)
            return False
        return measured_here(planned.buckets, local)

    def _tune(self, planned: BuildPlan, local: LocalGpu, device: int) -> None:
        cells = sum(map(len, planned.buckets.values()))
        _log.warning(
            "pretuned: measuring %d cells of %s on %s now, for at most %g s and the compiling; it is kept for later "
            "processes. PRETUNED_DISABLE_AUTOTUNE=1 leaves it out",
            cells,
            planned.models[0].name if planned.models else "a call",
            local.gpu.name,
            BUDGET_S,
        )
        begun = time.monotonic()
        tuned = self._measure(planned, local.sm, device)
        place = settings().overlay
        try:
            if place is None:
                raise HostError("neither XDG_CACHE_HOME nor HOME names a place for it")
            path = add(place, local.gpu, tuned, note=_note)
            _log.info("pretuned: measured in %.1f s, kept in %s", time.monotonic() - begun, path)
        except (HostError, BundleError) as error:
            _log.warning("pretuned: what was measured is kept by this process alone: %s", error)
            dispatch_snapshot.keep(open_bytes(codec.encode(tuned), "tuned now"))
        reload()
        if not _attempted(planned.buckets, local):  # the overlay is not trusted, or can't be read
            dispatch_snapshot.keep(open_bytes(codec.encode(tuned), "tuned now"))
            reload()


def measure_in_child(planned: BuildPlan, sm: int, device: int) -> Bundle:
    """Compile candidates and measure them together with the baseline, in a child process."""
    from ..compile.cache import default_dir

    cache = default_dir()
    files = _made_here(sm)
    arguments = {
        "cells": [(worker.plain(problem), list(buckets)) for problem, buckets in planned.buckets.items()],
        "models": [
            (model.name, model.top_k, model.dtype.value, [worker.plain(problem) for problem in model.problems])
            for model in planned.models
        ],
        "sm": sm,
        "device": device,
        "budget_s": BUDGET_S,
        "cache": None if cache is None else str(cache),
        "bundles": list(files),
    }
    data = child.call(worker.measure_cells, arguments, timeout_s=_CHILD_TIMEOUT_S, who="tuning", files=files)
    return codec.decode(data, "tuned now")


def _made_here(sm: int) -> dict[str, bytes]:
    """Bundles that this process tuned and could not write to the overlay, as files for the child."""
    usables = dispatch_snapshot.snapshot().files(installed=False)
    bundles = [usable.bundle for usable in usables if usable.place.kind is Kind.PROCESS and usable.bundle is not None]
    return {
        f"made-{number}.msgpack": codec.encode(bundle.load())
        for number, bundle in enumerate(bundles)
        if bundle.target.sm == sm
    }


def measured_here(cells: Mapping[Problem, Sequence[int]], local: LocalGpu) -> bool:
    """True if each cell has its own choice measured on this very GPU, with today's kernels or later ones."""
    return _every_cell(cells, local, _is_hit)


def _attempted(cells: Mapping[Problem, Sequence[int]], local: LocalGpu) -> bool:
    """True if each cell was measured here or tried: cells that the tuner can't measure stay modelled."""
    place = settings().overlay
    own = None if place is None else path_of(place, local.sm, local.gpu)

    def tried(usable: Usable, choice: Choice, local: LocalGpu) -> bool:
        current = is_current(usable.bundle.variant(choice.variant))
        mine = usable.path == own or (usable.place.kind is Kind.PROCESS and bool(usable.bundle.gpus))
        return _is_hit(usable, choice, local) or (mine and current)

    return _every_cell(cells, local, tried)


def _every_cell(
    cells: Mapping[Problem, Sequence[int]], local: LocalGpu, fine: Callable[[Usable, Choice, LocalGpu], bool]
) -> bool:
    snapshot = dispatch_snapshot.snapshot()
    while True:  # a rejected bundle is dropped, then all others are tried again
        with contextlib.suppress(Rejected):
            usable = snapshot.view(local, installed=True).usable
            return all(
                any(
                    choice.bucket == bucket and fine(candidate, choice, local)
                    for candidate in usable
                    for choice in snapshot.find(candidate.bundle, problem)
                )
                for problem, buckets in cells.items()
                for bucket in buckets
            )


def _is_hit(usable: Usable, choice: Choice, local: LocalGpu) -> bool:
    if choice.gpu is None or not usable.bundle.gpus[choice.gpu].is_like(local.gpu):
        return False
    return is_current(usable.bundle.variant(choice.variant))


def _configs(planned: BuildPlan, shape: LayerShard, bucket: int, local: LocalGpu) -> Configs:
    """The configs that the runtime would run, by op, GEMM and fusion."""
    snapshot, strict = dispatch_snapshot.snapshot(), settings().strict
    chosen: dict[tuple[Op, bool], list[tuple[Fusion, Config]]] = {}
    first = shape.gemms()[0]
    for problem in planned.problems:
        ran = decide(snapshot, problem, bucket, local, aligned=suits(problem), strict=strict)
        if isinstance(ran, Decision) and not _quantises_elsewhere(problem, planned, bucket, local):
            which = (problem.op, (problem.N, problem.K) == (first.N, first.K))
            chosen.setdefault(which, []).append((problem.fusion, ran.chosen.config))
    fwd, dx, dw = (
        KernelPair(op, *(Preference(tuple(chosen.get((op, which), ()))) for which in (True, False))) for op in Op
    )
    return fwd, dx, dw


def _quantises_elsewhere(problem: Problem, planned: BuildPlan, bucket: int, local: LocalGpu) -> bool:
    """True if a product with x quantised the other way runs instead of this one, with the same weights."""
    forward = [member for member in planned.problems if member._replace(dtype=problem.dtype) == problem]
    codes = next((product for product in forward if product.dtype.quantises_x), None)
    others = [product for product in forward if product is not codes]
    if codes is None or not others:
        return False
    chosen = quantised_x(dispatch_snapshot.snapshot(), codes, others[0].dtype, bucket, local, top_k=0)
    return problem.dtype.quantises_x == (chosen is None)


def shape_of(key: CacheKey) -> LayerShard:
    """The layer of a key, at the bucket's rows."""
    tokens = max(1, key.bucket // key.top_k)
    return LayerShard(
        f"E{key.E}-H{key.H}-I{key.I}-k{key.top_k}",
        key.E,
        key.top_k,
        key.H,
        key.I,
        shared_experts=0,
        gated=True,
        dtypes=dtypes_of(key.dtype),
        tp=1,
        ep=1,
        tokens=(tokens, tokens),
        ops=tuple(Op),
        weights=(key.dtype,),
        pads=False,
    )


def planned_for(key: CacheKey, shape: LayerShard) -> BuildPlan:
    """The problems that ``grouped_gemm`` runs for the shape, at the key's bucket only."""
    whole = plan([shape])
    whole = whole.without(set(filter(optional, whole.problems)))  # calls can't name optional problems' configs
    if any(dtype.quantised for dtype in shape.dtypes):
        whole = planned_on(whole, (key.sm,))  # the capability decides: prepared weights or checkpoint layout
    return BuildPlan(dict.fromkeys(whole.problems, (key.bucket,)), whole.models)


def _instead(cells: Mapping[Problem, Sequence[int]], local: LocalGpu) -> str:
    """Describe what runs these cells if they can't be tuned."""
    snapshot, ran = dispatch_snapshot.snapshot(), list[Decision | Miss]()
    for problem, buckets in cells.items():
        aligned = suits(problem)
        with contextlib.suppress(PretunedError):  # a file in PRETUNED_BUNDLES: the call itself reports it
            ran += [settle(snapshot, problem, bucket, local, aligned, False) for bucket in buckets]
    chosen = [decision.chosen for decision in ran if isinstance(decision, Decision)]
    names = dict.fromkeys(printable(choice.usable.path.name) for choice in chosen)
    torchs = len(ran) - len(chosen)
    said = [f"what runs instead is the ordinary choice, of {', '.join(names)}"] if names else []
    said += [f"torch's grouped GEMM runs {torchs} of {len(ran)} cells"] if torchs else []
    return "; ".join(said) or "the ordinary choice runs"


def _overlay_file(local: LocalGpu) -> tuple[int, ...] | None:
    """The identity of this GPU's overlay file, to tell whether another process has written it meanwhile."""
    place = settings().overlay
    if place is None:
        return None
    try:
        status = path_of(place, local.sm, local.gpu).stat()
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns, status.st_size


@contextlib.contextmanager
def _turn() -> Iterator[bool | None]:
    """Wait for this process's turn to tune: True with the lock, False if locks don't work, None if it never came."""
    records = settings().records
    place = None if records is None else records / _TUNING
    got: bool | None = False
    with contextlib.ExitStack() as stack:
        try:
            if place is not None:
                check_cache(place)
                try:
                    got = stack.enter_context(lock(place, 0.0, required=True))
                except LockBusy:
                    _log.warning("pretuned: another process is tuning: waiting for it, at most %g s", WAIT_S)
                    got = stack.enter_context(lock(place, WAIT_S, required=True))
        except LockBusy:
            got = None
        except OSError:  # a read-only file system, one without locks
            got = False
        yield got


def _note(text: str) -> None:
    _log.warning("pretuned: %s", text)
