"""Convert each record of ``artifacts.records`` to plain values for msgpack and back, all fields checked."""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from typing import Any, TypeAlias

from .. import limits as lim
from ..names import is_label, is_text
from ..records.bundle import Choice, Kernel, PlanRow, Producer, Source, TensorMap, Variant, Way
from ..records.precision import DType
from ..records.problem import Fusion, Layout, Op, Problem, RowOp
from ..records.target import Gpu, Target
from .wire import Malformed, begins_with, digest, fields, integer, items, name, pack, parse, pick, shown, unpack

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

_TARGET = ("sm", "arch_specific")
_PRODUCER = ("pretuned", "triton", "ptxas", "options")
_KERNEL = ("name", "revision", "source_sha256")
_GPU = ("name", "sm_count", "memory_mib", "driver")
_TENSOR_MAP = ("argument", "element", "box", "swizzle")
_VARIANT = (
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
_KIND = _VARIANT[: _VARIANT.index("max_experts") + 1]


def target_value(target: Target) -> object:
    return {"sm": target.sm, "arch_specific": target.arch_specific}


def read_target(value: object) -> Target:
    sm, arch_specific = fields(value, "target", _TARGET)
    if type(arch_specific) is not bool:
        raise Malformed(f"target.arch_specific is {shown(arch_specific)}, wanted true or false")
    return Target(integer(sm, "target.sm", 10, 9999), arch_specific)


def producer_value(producer: Producer) -> object:
    return dict(
        zip(_PRODUCER, (producer.pretuned, producer.triton, producer.ptxas, list(producer.options)), strict=True)
    )


def read_producer(value: object) -> Producer:
    pretuned, triton, ptxas, options = fields(value, "producer", _PRODUCER)
    return Producer(
        name(pretuned, "producer.pretuned", is_text),
        name(triton, "producer.triton", is_text),
        name(ptxas, "producer.ptxas", is_text),
        tuple(name(o, "producer.options", is_text) for o in items(options, "producer.options", 0, lim.MAX_OPTIONS)),
    )


def kernel_value(kernel: Kernel) -> object:
    return dict(zip(_KERNEL, (kernel.name, kernel.revision, kernel.source_sha256), strict=True))


def read_kernel(value: object) -> Kernel:
    kernel, revision, source = fields(value, "kernel", _KERNEL)
    return Kernel(
        name(kernel, "kernel.name"),
        integer(revision, "kernel.revision", 0, lim.MAX_DIM),
        digest(source, "kernel.source_sha256"),
    )


def gpu_value(gpu: Gpu) -> object:
    return dict(zip(_GPU, (gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver), strict=True))


def read_gpu(value: object) -> Gpu:
    gpu, sm_count, memory_mib, driver = fields(value, "gpu", _GPU)
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


def pack_choices(choices: tuple[Choice, ...]) -> bytes:
    """Encode a problem's choices, each as [log2 bucket, variant, source, time_ns, runner_up, runner_up_ns, gpu].

    ``torch_ns`` and the plan are items eight and nine; they are left out at the end if they are empty.
    """
    return pack(
        [
            [
                c.bucket.bit_length() - 1,
                c.variant,
                SOURCES.index(c.source),
                c.time_ns,
                c.runner_up,
                c.runner_up_ns,
                c.gpu,
            ]
            + ([] if c.torch_ns is None and not c.plan else [c.torch_ns])
            + ([[[int(row.way), int(row.checks), row.top_k, row.variant] for row in c.plan]] if c.plan else [])
            for c in choices
        ]
    )


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


def pack_variant(variant: Variant) -> bytes:
    """Encode a variant's record: all fields but ``cubin_bytes``, which is in the index itself."""
    maps = [
        dict(zip(_TENSOR_MAP, (item.argument, item.element, list(item.box), item.swizzle), strict=True))
        for item in variant.tensor_maps
    ]
    values = (
        variant.kernel,
        variant.revision,
        variant.abi,
        variant.op.value,
        variant.dtype.value,
        variant.layout.value,
        variant.fusion.value,
        variant.alignment,
        variant.max_experts,
        [list(pair) for pair in variant.config],
        variant.entry,
        [list(pair) for pair in variant.arguments],
        maps,
        variant.threads,
        variant.shared_bytes,
        variant.registers,
        variant.spill_bytes,
        variant.scratch_bytes,
        variant.cubin_sha256,
    )
    return pack(dict(zip(_VARIANT, values, strict=True)))


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
    ) = fields(unpack(record, max_items=lim.MAX_ARGUMENTS), "variant", _VARIANT)
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
        argument, element, box, swizzle = fields(item, "tensor_map", _TENSOR_MAP)
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
