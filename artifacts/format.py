"""The index of a bundle: its records read from msgpack, all fields checked. ``codec.py`` writes them.

The top level is parsed at once, a variant's or problem's record when it is needed.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from . import limits as lim
from .errors import BundleCorrupt
from .limits import is_label, is_text
from .records import (
    Choice,
    DType,
    Fusion,
    Gpu,
    Kernel,
    Layout,
    Model,
    Op,
    PlanRow,
    Problem,
    Producer,
    RowOp,
    Source,
    Target,
    TensorMap,
    Variant,
    Way,
)
from .wire import (
    Malformed,
    Preamble,
    begins_with,
    corrupt,
    digest,
    fields,
    integer,
    items,
    name,
    pack,
    parse,
    pick,
    shown,
    unpack,
)

VariantKind: TypeAlias = tuple[list[object], int]  # [op, dtype, layout, fusion] as packed; max_experts

OPS = {op.value: op for op in Op}
VARIANT_OPS: dict[str, Op | RowOp] = {**OPS, **{op.value: op for op in RowOp}}
DTYPES = {dtype.value: dtype for dtype in DType}
LAYOUTS = {layout.value: layout for layout in Layout}
MAX_FUSION = 2 * max(flag.value for flag in Fusion) - 1  # all flags
KINDS = {kind: kind for kind in ("ptr", "i32", "i64", "desc2", "desc3", "desc4", "desc5")}
SOURCES = (Source.MODELLED, Source.MEASURED)  # 0 and 1 on the wire
WAYS = tuple(Way)
INDEXED = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT  # the fusions that may need top_k

TARGET = ("sm", "arch_specific")
PRODUCER = ("pretuned", "triton", "ptxas", "options")
KERNEL = ("name", "revision", "source_sha256")
GPU = ("name", "sm_count", "memory_mib", "driver")
TENSOR_MAP = ("argument", "element", "box", "swizzle")
VARIANT = (
    "kernel",
    "revision",
    "abi",
    "op",
    "dtype",
    "layout",
    "fusion",
    "alignment",
    "max_experts",
    "config",
    "entry",
    "arguments",
    "tensor_maps",
    "threads",
    "shared_bytes",
    "registers",
    "spill_bytes",
    "scratch_bytes",
    "cubin_sha256",
)
_WIDTHS = (7, 9)  # the smallest and largest length of a packed choice
_KIND = VARIANT[: VARIANT.index("max_experts") + 1]


def read_target(value: object) -> Target:
    sm, arch_specific = fields(value, "target", TARGET)
    if type(arch_specific) is not bool:
        raise Malformed(f"target.arch_specific is {shown(arch_specific)}, wanted true or false")
    return Target(integer(sm, "target.sm", 10, 9999), arch_specific)


def read_producer(value: object) -> Producer:
    pretuned, triton, ptxas, options = fields(value, "producer", PRODUCER)
    return Producer(
        name(pretuned, "producer.pretuned", is_text),
        name(triton, "producer.triton", is_text),
        name(ptxas, "producer.ptxas", is_text),
        tuple(name(o, "producer.options", is_text) for o in items(options, "producer.options", 0, lim.MAX_OPTIONS)),
    )


def read_kernel(value: object) -> Kernel:
    kernel, revision, source = fields(value, "kernel", KERNEL)
    return Kernel(
        name(kernel, "kernel.name"),
        integer(revision, "kernel.revision", 0, lim.MAX_DIM),
        digest(source, "kernel.source_sha256"),
    )


def read_gpu(value: object) -> Gpu:
    gpu, sm_count, memory_mib, driver = fields(value, "gpu", GPU)
    return Gpu(
        name(gpu, "gpu.name", is_label),
        integer(sm_count, "gpu.sm_count", 1, lim.MAX_DIM),
        integer(memory_mib, "gpu.memory_mib", 1, lim.MAX_DIM),
        integer(driver, "gpu.driver", 0, lim.MAX_DIM),
    )


def pack_problem(problem: Problem) -> bytes:
    """Return the canonical key of a problem. A bundle's problems are sorted and looked up by these bytes."""
    return pack(list(problem.sort_key))


def read_problem(record: bytes) -> Problem:
    """Decode the bytes of ``pack_problem``."""
    return problem_of(unpack(record, max_items=8))


def problem_of(value: object) -> Problem:
    """Decode the plain values of ``Problem.sort_key``."""
    op, dtype, E, N, K, layout, fusion, top_k = items(value, "problem", 8, 8)
    problem = Problem(
        pick(op, "problem.op", OPS),
        pick(dtype, "problem.dtype", DTYPES),
        integer(E, "problem.E", 1, lim.MAX_EXPERTS),
        integer(N, "problem.N", 1, lim.MAX_DIM),
        integer(K, "problem.K", 1, lim.MAX_DIM),
        pick(layout, "problem.layout", LAYOUTS),
        Fusion(integer(fusion, "problem.fusion", 0, MAX_FUSION)),
        integer(top_k, "problem.top_k", 0, lim.MAX_EXPERTS),
    )
    if problem.top_k and not problem.fusion & INDEXED:
        raise Malformed(f"problem.top_k is {problem.top_k}, wanted 0: no fusion here needs it")
    return problem


def read_choices(record: bytes, variants: int, gpus: int) -> tuple[Choice, ...]:
    """Decode the bytes of ``pack_choices``, for a bundle with ``variants`` variants and ``gpus`` GPUs."""
    rows = items(unpack(record, max_items=lim.MAX_CHOICES), "choices", 1, lim.MAX_CHOICES)
    choices = tuple(_choice(row, variants, gpus) for row in rows)
    for before, after in itertools.pairwise(choices):
        if before.sort_key >= after.sort_key:
            raise Malformed(
                f"{_bucket_and_gpu(after)} comes after {_bucket_and_gpu(before)}, wanted them ascending, each once"
            )
    return choices


def read_measured(record: bytes, gpus: int) -> list[tuple[int, int]]:
    """Return (variant, GPU) of a record's measured choices and of their runners-up. Other fields are not checked."""
    measured: list[tuple[int, int]] = []
    for row in items(parse(record, max_items=lim.MAX_CHOICES), "choices", 1, lim.MAX_CHOICES):
        _, variant, _, _, runner_up, _, gpu, *_ = items(row, "choice", *_WIDTHS)
        if type(gpu) is int and 0 <= gpu < gpus:
            measured += [(index, gpu) for index in (variant, runner_up) if type(index) is int]
    return measured


def read_timed(record: bytes, variants: int, gpus: int) -> list[list[Any]]:
    """Return a record's measured choices, each with the fields of ``Timed``. All but their order is checked.

    Checks whole columns, because choosing a variant for a new problem reads hundreds of records.
    """
    rows = items(parse(record, max_items=lim.MAX_CHOICES), "choices", 1, lim.MAX_CHOICES)
    if set(map(type, rows)) != {list} or set(map(len, rows)) != {_WIDTHS[0]}:  # type: ignore[arg-type]
        rows = [items(row, "choice", *_WIDTHS)[: _WIDTHS[0]] for row in rows]
    measured = [row for row in rows if row[6] is not None]  # type: ignore[index]
    with_runner_up = [row for row in measured if row[4] is not None]  # type: ignore[index]
    log2, variant, _, time_ns, _, _, gpu = zip(*measured, strict=True) if measured else [()] * 7
    _, _, _, _, runner_up, runner_up_ns, _ = zip(*with_runner_up, strict=True) if with_runner_up else [()] * 7
    for column, field, low, high in (
        (log2, "log2 of choice.bucket", 0, lim.MAX_BUCKET_LOG2),
        (variant, "choice.variant", 0, variants - 1),
        (time_ns, "choice.time_ns", 1, lim.MAX_TIME_NS),
        (gpu, "choice.gpu", 0, gpus - 1),
        (runner_up, "choice.runner_up", 0, variants - 1),
        (runner_up_ns, "choice.runner_up_ns", 1, lim.MAX_TIME_NS),
    ):
        if column and (set(map(type, column)) != {int} or min(column) < low or max(column) > high):
            for value in column:
                integer(value, field, low, high)
    return measured  # type: ignore[return-value]


def _bucket_and_gpu(choice: Choice) -> str:
    return f"bucket {choice.bucket} of " + ("the cost model" if choice.gpu is None else f"GPU {choice.gpu}")


def _choice(row: object, variants: int, gpus: int) -> Choice:
    values = items(row, "choice", *_WIDTHS)
    log2, variant, source, time_ns, runner_up, runner_up_ns, gpu, *more = values
    torch_ns = more[0] if more else None
    kind = SOURCES[integer(source, "choice.source", 0, 1)]
    if (runner_up is None) != (runner_up_ns is None):
        raise Malformed("choice.runner_up and its time must both be there, or neither")
    if (gpu is None) != (kind is Source.MODELLED):
        raise Malformed(f"choice.gpu is {shown(gpu)}: a measured choice names its GPU, a modelled one has none")
    if len(more) == 1 and torch_ns is None:
        raise Malformed("choice.torch_ns is null at the end of a choice, wanted it left out")
    if torch_ns is not None and gpu is None:
        raise Malformed("choice.torch_ns is there in a modelled choice, wanted it in a measured one alone")
    if variant == runner_up:
        raise Malformed(f"choice.runner_up is {runner_up}, the chosen variant itself")
    return Choice(
        1 << integer(log2, "log2 of choice.bucket", 0, lim.MAX_BUCKET_LOG2),
        integer(variant, "choice.variant", 0, variants - 1),
        kind,
        integer(time_ns, "choice.time_ns", 1, lim.MAX_TIME_NS),
        None if runner_up is None else integer(runner_up, "choice.runner_up", 0, variants - 1),
        None if runner_up_ns is None else integer(runner_up_ns, "choice.runner_up_ns", 1, lim.MAX_TIME_NS),
        None if gpu is None else integer(gpu, "choice.gpu", 0, gpus - 1),
        None if torch_ns is None else integer(torch_ns, "choice.torch_ns", 1, lim.MAX_TIME_NS),
        _plan(more[1], variants) if len(more) > 1 else (),
    )


def _plan(value: object, variants: int) -> tuple[PlanRow, ...]:
    plan = []
    for row in items(value, "choice.plan", 1, lim.MAX_PLAN_ROWS):
        way, checks, top_k, variant = items(row, "a row of choice.plan", 4, 4)
        plan.append(
            PlanRow(
                WAYS[integer(way, "way of choice.plan", 0, len(WAYS) - 1)],
                bool(integer(checks, "checks of choice.plan", 0, 1)),
                integer(top_k, "top_k of choice.plan", 0, lim.MAX_EXPERTS),
                None if variant is None else integer(variant, "variant of choice.plan", 0, variants - 1),
            )
        )
    for before, after in itertools.pairwise(plan):
        if before[:3] >= after[:3]:
            raise Malformed("the rows of choice.plan are not ascending by way, checks and top_k, each once")
    return tuple(plan)


def read_variant(record: bytes, cubin_bytes: int) -> Variant:
    """Decode the bytes of ``pack_variant``."""
    (
        kernel,
        revision,
        abi,
        op,
        dtype,
        layout,
        fusion,
        alignment,
        max_experts,
        config,
        entry,
        arguments,
        tensor_maps,
        threads,
        shared_bytes,
        registers,
        spill_bytes,
        scratch_bytes,
        sha256,
    ) = fields(unpack(record, max_items=lim.MAX_ARGUMENTS), "variant", VARIANT)
    if type(alignment) is not int or alignment not in (1, 16):
        raise Malformed(f"variant.alignment is {shown(alignment)}, wanted 1 or 16")
    read_arguments = _arguments(arguments)
    return Variant(
        name(kernel, "variant.kernel"),
        integer(revision, "variant.revision", 0, lim.MAX_DIM),
        integer(abi, "variant.abi", 1, lim.MAX_DIM),
        pick(op, "variant.op", VARIANT_OPS),
        pick(dtype, "variant.dtype", DTYPES),
        pick(layout, "variant.layout", LAYOUTS),
        Fusion(integer(fusion, "variant.fusion", 0, MAX_FUSION)),
        alignment,
        integer(max_experts, "variant.max_experts", 1, lim.MAX_EXPERTS),
        _config(config),
        name(entry, "variant.entry"),
        read_arguments,
        _tensor_maps(tensor_maps, read_arguments),
        integer(threads, "variant.threads", 1, lim.MAX_THREADS),
        integer(shared_bytes, "variant.shared_bytes", 0, lim.MAX_SHARED_BYTES),
        integer(registers, "variant.registers", 0, lim.MAX_REGISTERS),
        integer(spill_bytes, "variant.spill_bytes", 0, lim.MAX_DIM),
        integer(scratch_bytes, "variant.scratch_bytes", 0, lim.MAX_DIM),
        cubin_bytes,
        digest(sha256, "variant.cubin_sha256"),
    )


def pack_kind(op: Op | RowOp, dtype: DType, layout: Layout, fusion: Fusion) -> bytes:
    """Return the bytes that the records of all variants of a kind contain."""
    values = op.value, dtype.value, layout.value, fusion.value
    return pack(dict(zip(_KIND[3:7], values, strict=True)))[1:]


def read_kind(record: bytes) -> VariantKind:
    """Decode only the kind of problem that a record's variant computes."""
    values = begins_with(record, _KIND, max_items=lim.MAX_ARGUMENTS)
    if values is None:
        raise Malformed(f"variant does not begin with the keys {', '.join(_KIND)}")
    _, _, _, op, dtype, layout, fusion, _, experts = values
    return [op, dtype, layout, fusion], integer(experts, "variant.max_experts", 1, lim.MAX_EXPERTS)


def check_fits(kinds: Mapping[int, VariantKind], *problems: Problem) -> None:
    """Raise Malformed unless each variant (index -> kind) computes one of the problems, or its transposed form."""
    names = [name for problem in problems for name in (problem, problem.transposed) if name is not None]
    wanted = [[name.op.value, name.dtype.value, name.layout.value, name.fusion.value] for name in names]
    for i, (have, experts) in kinds.items():
        if have not in wanted:
            raise Malformed(f"variant {i} is for {shown(have)}")
        if experts < names[0].E:
            raise Malformed(f"variant {i} is for at most {experts} experts")


def _config(value: object) -> tuple[tuple[str, int], ...]:
    pairs = []
    for pair in items(value, "variant.config", 0, lim.MAX_KNOBS):
        knob, setting = items(pair, "variant.config", 2, 2)
        pairs.append((name(knob, "variant.config"), integer(setting, "variant.config", 0, lim.MAX_DIM)))
    for before, after in itertools.pairwise(pairs):
        if before[0] >= after[0]:
            raise Malformed(f"variant.config has {after[0]} after {before[0]}, wanted them sorted and each once")
    return tuple(pairs)


def _arguments(value: object) -> tuple[tuple[str, str], ...]:
    pairs = []
    for pair in items(value, "variant.arguments", 0, lim.MAX_ARGUMENTS):
        argument, kind = items(pair, "variant.arguments", 2, 2)
        pairs.append((name(argument, "variant.arguments"), pick(kind, "an argument's kind", KINDS)))
    if len({argument for argument, _ in pairs}) != len(pairs):
        raise Malformed("variant.arguments has one name twice")
    return tuple(pairs)


def _tensor_maps(value: object, arguments: tuple[tuple[str, str], ...]) -> tuple[TensorMap, ...]:
    ranks = {argument: int(kind[4:]) for argument, kind in arguments if kind.startswith("desc")}
    maps = []
    for item in items(value, "variant.tensor_maps", 0, lim.MAX_ARGUMENTS):
        argument, element, box, swizzle = fields(item, "tensor_map", TENSOR_MAP)
        rank = ranks.pop(argument, None) if type(argument) is str else None
        if type(argument) is not str or rank is None:
            raise Malformed(f"tensor_map.argument is {shown(argument)}, wanted a desc argument, each once")
        sizes = tuple(integer(n, "tensor_map.box", 1, lim.MAX_BOX) for n in items(box, "tensor_map.box", rank, rank))
        maps.append(
            TensorMap(
                argument,
                integer(element, "tensor_map.element", 0, 255),
                sizes,
                integer(swizzle, "tensor_map.swizzle", 0, 255),
            )
        )
    if ranks:
        raise Malformed(f"variant.tensor_maps has none for {', '.join(ranks)}")
    return tuple(maps)


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

_GOLDEN = 0.618  # steps of this part of a circle spread evenly over it, for any number of steps
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
        "_keys",
        "_kinds",
        "_models",
        "_models_of",
        "_models_read",
        "_offsets",
        "_tested",
        "_tested_rows",
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
        self._tested: dict[int, int] = {}
        self._tested_rows = 0
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
                self._tested.setdefault(choice.variant, choice.gpu)
                if choice.runner_up is not None:
                    self._tested.setdefault(choice.runner_up, choice.gpu)
        return choices

    def tested_on(self, i: int) -> Gpu | None:
        """Return a GPU that variant ``i`` was measured on, None if there is none. Measuring includes a test of results.

        Choices that were read before are searched first. Then records are read until one names the variant, each once,
        in an order that soon meets all kinds of problems.
        """
        step = _apart(len(self._keys))
        while self.gpus and i not in self._tested and self._tested_rows < len(self._keys):
            done = self._tested_rows
            row = done * step % len(self._keys)
            try:
                measured = read_measured(self._choices[self._keys[row]], len(self.gpus))
            except Malformed as error:
                raise self._corrupt(f"choices {row}", error) from None
            for variant, gpu in measured:
                self._tested.setdefault(variant, gpu)
            self._tested_rows = done + 1  # last: another thread may read the same row, with the same result
        gpu_index = self._tested.get(i)
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
    """Return a step: rows 0, step, 2 step, ... modulo ``count`` visit each row once, the first few far apart."""
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
