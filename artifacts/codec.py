"""Encode a bundle to its bytes and decode it, with all checks. FORMAT.md describes the format."""

from __future__ import annotations

from .format import FIELDS, GPU, KERNEL, MODEL, PRODUCER, SOURCES, TENSOR_MAP, VARIANT, Index, pack_problem
from .records import Bundle, Choice, Gpu, Kernel, Producer, Target, Variant
from .wire import (
    BLOB_HEADER_BYTES,
    PREAMBLE_BYTES,
    blob_header,
    check_cubin,
    check_index,
    corrupt,
    pack,
    pack_preamble,
    read_preamble,
)


def encode(bundle: Bundle, where: str = "<new>") -> bytes:
    """Return the bytes of ``bundle``. Equal bundles have equal bytes.

    Raises
    ------
    BundleCorrupt
        if ``bundle`` is not valid; the message names the part.
    """
    try:
        data = _encode(bundle)
    except (ValueError, TypeError, OverflowError, KeyError) as error:
        raise corrupt(where, f"the bundle to be written can't be: {type(error).__name__}: {error}") from error
    if decode(data, where) != bundle:
        raise corrupt(where, "the bundle to be written can't be: a field has a value that the format rounds")
    return data


def decode(data: bytes, where: str) -> Bundle:
    """Return the bundle in ``data``, all parts and digests checked: ``encode(decode(x)) == x``.

    Raises
    ------
    BundleCorrupt, BundleTooNew, BundleTooOld
        ``where`` names the file in the message.
    """
    preamble = read_preamble(data[:PREAMBLE_BYTES], len(data), where)
    index_end = PREAMBLE_BYTES + preamble.index_bytes
    index_data = data[PREAMBLE_BYTES:index_end]
    check_index(data[:PREAMBLE_BYTES], preamble, index_data, where)
    index = Index(index_data, preamble, where)
    if data[index_end : preamble.cubins_at] != blob_header(len(data) - preamble.cubins_at):
        raise corrupt(where, f"the cubins' header at byte {index_end} is not that of {len(data)} bytes in all")
    variants = tuple(index.variant(i) for i in range(index.variant_count))
    cubins = []
    for i, variant in enumerate(variants):
        offset, size = index.place(i)
        cubins.append(check_cubin(data[offset : offset + size], i, variant.cubin_sha256, where))
    bundle = Bundle(
        index.target,
        index.min_driver,
        index.producer,
        index.kernels,
        index.gpus,
        variants,
        tuple(cubins),
        {problem: index.find(problem) for problem in index.problems()},
        index.models(),
    )
    if _encode(bundle) != data:
        raise corrupt(where, "the bytes are not in canonical form")
    return bundle


def _encode(bundle: Bundle) -> bytes:
    if len(bundle.variants) != len(bundle.cubins):
        raise ValueError(f"{len(bundle.variants)} variants and {len(bundle.cubins)} cubins")
    for i, (variant, cubin) in enumerate(zip(bundle.variants, bundle.cubins, strict=True)):
        if variant.cubin_bytes != len(cubin):
            raise ValueError(f"cubin {i} is {len(cubin)} bytes, its variant says {variant.cubin_bytes}")
    keyed = sorted((pack_problem(problem), problem) for problem in bundle.choices)
    rows = {problem: row for row, (_, problem) in enumerate(keyed)}
    models = [
        dict(zip(MODEL, (m.name, m.tp, m.ep, m.top_k, m.dtype.value, [rows[p] for p in m.problems]), strict=True))
        for m in bundle.models
    ]
    values = (
        target_value(bundle.target),
        bundle.min_driver,
        producer_value(bundle.producer),
        [kernel_value(kernel) for kernel in bundle.kernels],
        [gpu_value(gpu) for gpu in bundle.gpus],
        [pack_variant(variant) for variant in bundle.variants],
        [len(cubin) for cubin in bundle.cubins],
        {key: pack_choices(bundle.choices[problem]) for key, problem in keyed},
        pack(models),
    )
    index = pack(dict(zip(FIELDS, values, strict=True)))
    cubins_bytes = sum(map(len, bundle.cubins))
    file_bytes = PREAMBLE_BYTES + len(index) + BLOB_HEADER_BYTES + cubins_bytes
    return b"".join((pack_preamble(file_bytes, index), index, blob_header(cubins_bytes), *bundle.cubins))


def target_value(target: Target) -> object:
    return {"sm": target.sm, "arch_specific": target.arch_specific}


def producer_value(producer: Producer) -> object:
    return dict(
        zip(PRODUCER, (producer.pretuned, producer.triton, producer.ptxas, list(producer.options)), strict=True)
    )


def kernel_value(kernel: Kernel) -> object:
    return dict(zip(KERNEL, (kernel.name, kernel.revision, kernel.source_sha256), strict=True))


def gpu_value(gpu: Gpu) -> object:
    return dict(zip(GPU, (gpu.name, gpu.sm_count, gpu.memory_mib, gpu.driver), strict=True))


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


def pack_variant(variant: Variant) -> bytes:
    """Encode a variant's record: all fields but ``cubin_bytes``, which is in the index itself."""
    maps = [
        dict(zip(TENSOR_MAP, (item.argument, item.element, list(item.box), item.swizzle), strict=True))
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
    return pack(dict(zip(VARIANT, values, strict=True)))
