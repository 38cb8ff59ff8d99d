"""The index of a bundle. Its top level is parsed at once, a variant's or problem's record when it is needed."""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator
from typing import Any

from .. import limits as lim
from ..errors import BundleCorrupt
from ..names import is_label
from ..records.bundle import Choice, Model, Variant
from ..records.precision import DType
from ..records.problem import Fusion, Layout, Op, Problem, RowOp
from ..records.target import Gpu, Target
from .schema import (
    DTYPES,
    VariantKind,
    check_fits,
    pack_kind,
    pack_problem,
    read_choices,
    read_gpu,
    read_kernel,
    read_kind,
    read_measured,
    read_problem,
    read_producer,
    read_target,
    read_timed,
    read_variant,
)
from .wire import Malformed, Preamble, begins_with, corrupt, fields, integer, items, name, pack, parse, pick, unpack

FIELDS = (
    "target",
    "min_driver",
    "producer",
    "kernels",
    "gpus",
    "variants",
    "cubin_bytes",
    "problems",
    "models",
)
MODEL = ("name", "tp", "ep", "top_k", "dtype", "problems")

_GOLDEN = 0.618  # steps of this part of a circle spread evenly over it, however many there are
GLANCED_BYTES = 4096  # hold what an index begins with: the target, and mostly the GPUs, too
_BEGIN = re.compile(
    rb"\x89\xa6target\x82\xa2sm(?:([\x00-\x7f])|\xcc(.)|\xcd(..))\xadarch_specific([\xc2\xc3])", re.DOTALL
)


def glance(begin: bytes) -> Target | None:
    """Match the target in the first bytes of an index; None if they don't begin with a target.

    The digest is not checked yet, so the bytes are compared with a pattern, not parsed.
    """
    match = _BEGIN.match(begin)
    return match and Target(int.from_bytes(match[1] or match[2] or match[3], "big"), match[4] == b"\xc3")


def glance_at_gpus(begin: bytes) -> tuple[Gpu, ...] | None:
    """Read the GPUs in the first bytes of an index, digest unchecked; None if these bytes don't hold all of them."""
    values = begins_with(begin, FIELDS[: FIELDS.index("gpus") + 1], max_items=lim.MAX_GPUS)
    if values is None:
        return None
    try:
        return tuple(read_gpu(gpu) for gpu in items(values[-1], "gpus", 0, lim.MAX_GPUS))
    except Malformed:
        return None


def glance_at_kernels(begin: bytes) -> frozenset[str] | None:
    """Read the kernels' names in the first bytes of an index, digest unchecked; None if these don't hold all."""
    values = begins_with(begin, FIELDS[: FIELDS.index("kernels") + 1], max_items=lim.MAX_KERNELS)
    if values is None:
        return None
    try:
        return frozenset(read_kernel(kernel).name for kernel in items(values[-1], "kernels", 0, lim.MAX_KERNELS))
    except Malformed:
        return None


ProductKey = tuple[Op, Fusion, int, int, int]  # a problem without its dtype, layout and top_k


def _product(problem: Problem) -> ProductKey:
    return problem.op, problem.fusion, problem.E, problem.N, problem.K


class Index:
    """The parsed top level of an index; its records are parsed on demand. Reads no file.

    All methods raise BundleCorrupt for a record that breaks the format.
    """

    __slots__ = (
        "_choices",
        "_judged",
        "_judged_rows",
        "_keys",
        "_kinds",
        "_models",
        "_models_of",
        "_models_read",
        "_offsets",
        "_variant_records",
        "_variants",
        "cubin_bytes",
        "gpus",
        "kernels",
        "min_driver",
        "producer",
        "target",
        "where",
    )

    def __init__(self, data: bytes, preamble: Preamble, where: str) -> None:
        self.where = where
        try:
            self._read(data, preamble)
        except Malformed as error:
            raise self._corrupt("index", error) from None

    def _read(self, data: bytes, preamble: Preamble) -> None:
        top = parse(data, max_items=lim.MAX_VARIANTS, max_pairs=lim.MAX_PROBLEMS, max_bin_bytes=lim.MAX_MODELS_BYTES)
        target, min_driver, producer, kernels, gpus, variants, sizes, problems, models = fields(top, "index", FIELDS)
        self.target = read_target(target)
        self.min_driver = integer(min_driver, "min_driver", 0, lim.MAX_DIM)
        self.producer = read_producer(producer)
        self.kernels = tuple(read_kernel(kernel) for kernel in items(kernels, "kernels", 0, lim.MAX_KERNELS))
        if len({(k.name, k.revision) for k in self.kernels}) != len(self.kernels):
            raise Malformed("kernels has one name and revision twice")
        self.gpus = tuple(read_gpu(gpu) for gpu in items(gpus, "gpus", 0, lim.MAX_GPUS))
        if len(set(self.gpus)) != len(self.gpus):
            raise Malformed("gpus has one GPU twice")
        self._variant_records, variants_bytes = _records(items(variants, "variants", 0, lim.MAX_VARIANTS), "variants")
        count = len(self._variant_records)
        self._variants: list[Variant | None] = [None] * count
        self._kinds: dict[int, VariantKind] = {}
        self.cubin_bytes = tuple(
            integer(size, "cubin_bytes", 1, lim.MAX_CUBIN_BYTES) for size in items(sizes, "cubin_bytes", count, count)
        )
        self._offsets = tuple(itertools.accumulate(self.cubin_bytes, initial=preamble.cubins_at))
        if self._offsets[-1] != preamble.file_bytes:
            raise Malformed(f"the cubins end at byte {self._offsets[-1]}, the file at {preamble.file_bytes}")
        if type(problems) is not dict:
            raise Malformed("problems is no map")
        self._keys, keys_bytes = _records(list(problems), "problems")
        _, choices_bytes = _records(list(problems.values()), "choices")
        self._choices: dict[bytes, bytes] = problems
        if sorted(self._keys) != self._keys:
            raise Malformed("problems are not sorted by their bytes, each once")
        if type(models) is not bytes:
            raise Malformed("models is no bin")
        self._models = models
        self._models_read: tuple[Model, ...] | None = None
        self._models_of: dict[ProductKey, list[Model]] = {}
        self._judged: dict[int, int] = {}
        self._judged_rows = 0
        # Canonical is the shortest msgpack of these values, so comparing lengths is enough: packing all of it again
        # would take longer than the rest of opening.
        empty: tuple[object, ...] = ([], sizes, {}, b"")
        least = len(pack(dict(zip(FIELDS, (target, min_driver, producer, kernels, gpus, *empty), strict=True))))
        least += _count_bytes(len(self._variant_records)) + variants_bytes
        least += _count_bytes(len(self._keys)) + keys_bytes + choices_bytes
        least += _bin_bytes(len(models)) - _bin_bytes(0)
        if least != len(data):
            raise Malformed(f"not canonical msgpack: {len(data)} bytes, wanted {least}")

    @property
    def variant_count(self) -> int:
        """The number of variants, which is that of cubins."""
        return len(self._variant_records)

    def place(self, i: int) -> tuple[int, int]:
        """Offset in the file and length of cubin ``i``, in bytes."""
        return self._offsets[i], self.cubin_bytes[i]

    def variant(self, i: int) -> Variant:
        """Variant ``i``."""
        if not 0 <= i < len(self._variants):
            raise IndexError(f"bundle {self.where!r} has {len(self._variants)} variants, none of index {i}")
        variant = self._variants[i]
        if variant is None:
            try:
                variant = read_variant(self._variant_records[i], self.cubin_bytes[i])
                if not any(k.name == variant.kernel and k.revision == variant.revision for k in self.kernels):
                    raise Malformed(f"kernel {variant.kernel} of revision {variant.revision} is not in kernels")
            except Malformed as error:
                raise self._corrupt(f"variant {i}", error) from None
            self._variants[i] = variant
        return variant

    def of_kind(self, op: Op | RowOp, dtype: DType, layout: Layout, fusion: Fusion) -> tuple[tuple[int, Variant], ...]:
        """Return (index, variant) of the variants of a kind. Other records are not parsed."""
        kind = pack_kind(op, dtype, layout, fusion)
        pairs = [(i, self.variant(i)) for i, record in enumerate(self._variant_records) if kind in record]
        wanted = op, dtype, layout, fusion
        return tuple([(i, v) for i, v in pairs if (v.op, v.dtype, v.layout, v.fusion) == wanted])

    def find(self, problem: Problem) -> tuple[Choice, ...]:
        """The choices for ``problem``, ascending by bucket and GPU; () if it is not in the bundle."""
        try:
            key = pack_problem(problem)
        except (ValueError, OverflowError):  # a number that msgpack can't hold is in no bundle
            return ()
        record = self._choices.get(key)
        return () if record is None else self._read_choices(record, problem)

    def timed(self, problem: Problem) -> list[list[Any]]:
        """The measured choices for ``problem``, each with the fields of ``Timed``."""
        record = self._choices.get(pack_problem(problem))
        try:
            return [] if record is None else read_timed(record, len(self._variants), len(self.gpus))
        except Malformed as error:
            raise self._corrupt(f"choices for {problem}", error) from None

    def problem(self, row: int) -> Problem:
        """Problem ``row``."""
        try:
            return read_problem(self._keys[row])
        except Malformed as error:
            raise self._corrupt(f"problem {row}", error) from None

    def problems(self) -> Iterator[Problem]:
        """All problems, in the bundle's order."""
        return map(self.problem, range(len(self._keys)))

    def _read_choices(self, record: bytes, problem: Problem) -> tuple[Choice, ...]:
        try:
            choices = read_choices(record, len(self._variants), len(self.gpus))
            used = {c.variant for c in choices}.union(c.runner_up for c in choices if c.runner_up is not None)
            check_fits({i: self._kind(i) for i in used}, problem)
            for way, i in {(row.way, row.variant) for c in choices for row in c.plan if row.variant is not None}:
                check_fits({i: self._kind(i)}, *way.problems(problem))
        except Malformed as error:
            raise self._corrupt(f"choices for {problem}", error) from None
        for choice in choices:
            if choice.gpu is not None:
                self._judged.setdefault(choice.variant, choice.gpu)
                if choice.runner_up is not None:
                    self._judged.setdefault(choice.runner_up, choice.gpu)
        return choices

    def judged_on(self, i: int) -> Gpu | None:
        """Return a GPU that variant ``i`` was measured on, None if there is none. Measuring includes a test of results.

        Choices that were read before are searched first. Then records are read until one names the variant, each once,
        in an order that soon meets all kinds of problems.
        """
        step = _apart(len(self._keys))
        while self.gpus and i not in self._judged and self._judged_rows < len(self._keys):
            done = self._judged_rows
            row = done * step % len(self._keys)
            try:
                measured = read_measured(self._choices[self._keys[row]], len(self.gpus))
            except Malformed as error:
                raise self._corrupt(f"choices {row}", error) from None
            for variant, gpu in measured:
                self._judged.setdefault(variant, gpu)
            self._judged_rows = done + 1  # last: another thread may read the same row, with the same result
        gpu_index = self._judged.get(i)
        return None if gpu_index is None else self.gpus[gpu_index]

    def _kind(self, i: int) -> VariantKind:
        kind = self._kinds.get(i)
        if kind is None:  # parse a record once, however many choices name it
            kind = self._kinds[i] = read_kind(self._variant_records[i])
        return kind

    def models(self) -> tuple[Model, ...]:
        """All models, read once: models with thousands of problems take a tenth of a second."""
        if self._models_read is None:
            try:
                self._models_read = self._read_models()
            except Malformed as error:
                raise self._corrupt("models", error) from None
        return self._models_read

    def models_of(self, problem: Problem) -> tuple[Model, ...]:
        """The models that have this product (op, fusion, E, N and K), in any dtype and layout."""
        if not self._models_of:
            by_product: dict[ProductKey, list[Model]] = {}
            for model in self.models():
                for product in dict.fromkeys(map(_product, model.problems)):
                    by_product.setdefault(product, []).append(model)
            self._models_of = by_product
        return tuple(self._models_of.get(_product(problem), ()))

    def _read_models(self) -> tuple[Model, ...]:
        problems: dict[int, Problem] = {}  # those read already, by row
        top = unpack(self._models, max_items=lim.MAX_MODELS)
        models, rows = [], 0
        for value in items(top, "models", 0, lim.MAX_MODELS):
            models.append(self._model(value, problems))
            rows += len(models[-1].problems)
            if rows > lim.MAX_MODEL_ROWS:
                raise Malformed(f"more than {lim.MAX_MODEL_ROWS} problems of models in all")
        return tuple(models)

    def _model(self, value: object, problems: dict[int, Problem]) -> Model:
        model, tp, ep, top_k, dtype, items_of_rows = fields(value, "model", MODEL)
        rows = [
            integer(item, "model.problems", 0, len(self._keys) - 1)
            for item in items(items_of_rows, "model.problems", 0, lim.MAX_MODEL_PROBLEMS)
        ]
        for row in rows:
            if row not in problems:
                problems[row] = self.problem(row)
        return Model(
            name(model, "model.name", is_label),
            integer(tp, "model.tp", 1, lim.MAX_DIM),
            integer(ep, "model.ep", 1, lim.MAX_DIM),
            integer(top_k, "model.top_k", 1, lim.MAX_EXPERTS),
            pick(dtype, "model.dtype", DTYPES),
            tuple(problems[row] for row in rows),
        )

    def _corrupt(self, part: str, error: Malformed) -> BundleCorrupt:
        return corrupt(self.where, f"{part}: {error}")


def _apart(count: int) -> int:
    """Return a step through ``count`` rows that meets each row once and spreads any number of steps evenly."""
    return next(step for step in itertools.count(int(count * _GOLDEN)) if math.gcd(step, count) == 1)


def _records(records: list[object], what: str) -> tuple[list[bytes], int]:
    """Return the records, if all are bins, and their size as canonical msgpack: a bin8 or bin16 each."""
    if set(map(type, records)) - {bytes}:
        raise Malformed(f"{what} has an item that is no bin")
    sizes = list(map(len, records))  # type: ignore[arg-type]
    if max(sizes, default=0) > lim.MAX_RECORD_BYTES:
        raise Malformed(f"{what} has an item of {max(sizes)} bytes, the limit is {lim.MAX_RECORD_BYTES}")
    least = sum(sizes) + 2 * len(sizes) + len([size for size in sizes if size > 255])
    return records, least  # type: ignore[return-value]


def _count_bytes(count: int) -> int:
    """Return how many bytes the header of an array or map of ``count`` items has more than an empty one's."""
    return 0 if count < 16 else 2  # neither can have 65536


def _bin_bytes(size: int) -> int:
    return size + (2 if size < 256 else 3 if size < 65536 else 5)
