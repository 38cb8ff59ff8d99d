"""Compile one variant to one cubin, with Triton and without a GPU. ``compile_variant`` runs in a worker process."""

from __future__ import annotations

import errno
import hashlib
import importlib.metadata
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

from ...artifacts.errors import CompileError
from ...artifacts.records import DType, Kernel, Producer, TensorMap, Variant
from ...kernels import registry, rowops
from ...kernels.arch import arch_of
from ...kernels.entry import LAUNCH_ABI
from ...kernels.registry import ENTRIES, entry_of, gemm_entry, refusal
from ...kernels.rowops import RowOpSpec
from ...kernels.spec import Spec
from .ptx import rewrites, rewriting, source_of_rewrites_sha256
from .revisions import source_sha256
from .toolchain import toolchain, unable

# Same code for everyone: no line info (it embeds paths and triples the size), fused multiply-add stated
# because its default changes between Triton versions.
OPTIONS = ("enable_fp_fusion=True", "line_info=off")
_ELEMENT = {DType.BF16: "bf16", DType.FP16: "fp16", DType.FP32: "fp32", DType.TF32: "fp32"}  # x's and y's; else bf16
# CUtensorMapDataType (cuda.h), else bf16; 11 rounds fp32 to tf32 on load, where the tensor core would cut it off.
_MAP_ELEMENT = {DType.BF16: 9, DType.FP16: 6, DType.FP32: 7, DType.TF32: 11}
# Environment variables that change Triton's code and are in no job's key: removed before a compilation.
_CHANGE_CODE = (
    "TRITON_INTERPRET",
    "DISABLE_LLVM_OPT",
    "DISABLE_PTXAS_OPT",
    "PTXAS_OPTIONS",
    "TRITON_OVERRIDE_ARCH",
    "TRITON_KERNEL_OVERRIDE",
    "TRITON_MOCK_PTX_VERSION",
    "TRITON_LIBDEVICE_PATH",
    "TRITON_F32_DEFAULT",
    "TRITON_DEFAULT_FP_FUSION",
    "TRITON_DEBUG",
    "TRITON_ENABLE_ASAN",
    "TRITON_ENABLE_EXPERIMENTAL_CONSAN",
    "TRITON_INSTRUMENTATION_MODE",
    "TRITON_PLUGIN_PATHS",
    "ALLOW_LHS_TMEM_LAYOUT_CONVERSION",
    "LLVM_EXTRACT_DI_LOCAL_VARIABLES",
    "LLVM_PASS_PLUGIN_PATH",
    "USE_IR_LOC",
    "DISABLE_MMA_V3",
    "DISABLE_MMA_V5",
    "TRITON_PREFER_TMEM_16x256_LAYOUT",
    "TRITON_SWAP_MIR",
)
# The shared-memory layout in the type of a Gluon kernel's descriptor.
_SHARED = (
    "NVMMASharedLayout(swizzle_byte_width={swizzle}, element_bitwidth={bits}, rank={rank}, transposed=False, "
    "fp4_padded=False, cga_layout=[])"
)


# Errors of the machine: the variant would compile on another day.
_MACHINE = (
    errno.EACCES,
    errno.EPERM,
    errno.EIO,
    errno.ENOSPC,
    errno.EDQUOT,
    errno.EROFS,
    errno.EMFILE,
    errno.ENFILE,
    errno.ENOMEM,
    errno.ESTALE,
)
OUTPUT_LIMIT_CHARS = 2000


@dataclass(frozen=True, slots=True)
class Maker:
    """The tools that compiled a variant elsewhere, and the least driver that loads the result."""

    min_driver: int
    producer: Producer


@dataclass(frozen=True, slots=True)
class Compiled:
    """A variant and its cubin. ``maker`` is None if this machine's tools compiled it."""

    variant: Variant
    cubin: bytes
    maker: Maker | None = field(default=None, compare=False)

    def relabelled(self, spec: Spec | RowOpSpec) -> Compiled:
        """This code as another spec of its group (``plan.families.by_code``)."""
        return replace(self, variant=self.variant._replace(op=spec.op, layout=spec.layout, fusion=spec.fusion))


def producer_of(sm: int) -> Producer:
    """The tools and options that compile for a capability here."""
    tools = toolchain()
    return Producer(importlib.metadata.version("pretuned"), tools.triton, tools.ptxas_for(sm), OPTIONS)


def driver_for(sm: int, producer: Producer) -> int:
    """The least driver version that loads cubins of ``producer`` for a capability."""
    return min_driver(sm, producer.ptxas)


def kernels_of(compiled: Iterable[Compiled]) -> tuple[Kernel, ...]:
    """The kernels of some variants, as they are in this version."""
    names = sorted({code.variant.kernel for code in compiled})
    return tuple(Kernel(name, ENTRIES[name].revision, bytes.fromhex(source_sha256(name))) for name in names)


def _map_element(name: str, spec: Spec | RowOpSpec) -> int:
    """The element type of a TMA tensor map; a tf32 dW's result is stored as plain fp32."""
    if isinstance(spec, Spec) and (held := gemm_entry(spec).held.get(name)) is not None:
        return held.code
    return _MAP_ELEMENT.get(DType.FP32 if spec.dtype is DType.TF32 and name == "dw" else spec.dtype, 9)


def arguments_of(spec: Spec | RowOpSpec) -> tuple[tuple[str, str], ...]:
    """(name, kind) of every argument in the kernel's order."""
    return rowops.arguments(spec.op) if isinstance(spec, RowOpSpec) else registry.arguments(spec)


class CompilerInputs(NamedTuple):
    """The inputs of a compilation besides the source: each argument's type, sizes of descriptors, constants.

    ``rewrites`` is the digest of the code that rewrites the PTX; empty if none does.
    """

    types: dict[str, str]
    boxes: dict[str, tuple[int, ...]]
    constants: dict[str, int | str | bool | None]
    divisible: dict[str, int]
    rewrites: str


def inputs_of(spec: Spec | RowOpSpec, sm: int) -> CompilerInputs:
    """The inputs with which ``compile_variant`` compiles a variant."""
    boxes, changes = {}, ""
    constants: dict[str, int | str | bool | None]
    if isinstance(spec, RowOpSpec):
        constants, divisible = {**rowops.constants(spec, sm)}, rowops.divisibility(spec)
    else:
        boxes, constants, divisible = registry.boxes(spec), registry.constants(spec, sm), registry.divisibility(spec)
        changes = source_of_rewrites_sha256() if rewrites(spec.config) else ""
    types = {name: _triton_type(name, kind, spec, boxes) for name, kind in arguments_of(spec)}
    return CompilerInputs(types, boxes, constants, divisible, changes)


def job_key(spec: Spec | RowOpSpec, sm: int, inputs: CompilerInputs | None = None) -> str:
    """The digest of everything that decides a cubin's bytes: the name of a compile-cache entry."""
    tools, entry, inputs = toolchain(), entry_of(spec), inputs or inputs_of(spec, sm)
    parts = [
        repr(spec),
        str(sm),
        tools.triton,
        tools.ptxas_for(sm),
        source_sha256(entry.name),
        str(entry.revision),
        str(LAUNCH_ABI),
        *OPTIONS,
    ]
    if isinstance(spec, Spec):
        parts += [repr(inputs.constants), repr(inputs.boxes), repr(inputs.divisible)]
        parts += [inputs.rewrites] if inputs.rewrites else []
    else:
        parts += [
            str(spec.config),
            repr(inputs.constants),
            repr(inputs.divisible),
            repr(list(inputs.types.values())),
            repr(spec.max_registers),
        ]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()


def compile_variant(spec: Spec | RowOpSpec, sm: int) -> Compiled:
    """Compile one variant for one capability.

    Raises
    ------
    CompileError
        with the compiler's reason, or if the kernel has no such variant. A few configs make LLVM abort the process:
        run this in a worker.
    """
    try:
        refused = isinstance(spec, Spec) and refusal(spec, sm)
    except LookupError as error:
        refused = str(error)
    refused = refused or unable(spec)
    if refused:
        raise CompileError(f"{spec} for sm_{sm}: {refused}")
    entry = entry_of(spec)
    with tempfile.TemporaryDirectory(prefix="pretuned-") as scratch:
        with _captured(Path(scratch) / "output") as output:
            try:
                kernel = _triton_compile(spec, sm, scratch)
            except (OSError, MemoryError):
                raise  # the machine's fault, not the variant's
            except Exception as error:  # whatever Triton, MLIR or ptxas raises is the reason
                reason = _reason(error, output)
                if machine := _of_the_machine(error, reason):
                    raise OSError(machine) from error
                raise CompileError(f"{spec} for sm_{sm}: {reason}") from None
        cubin = bytes(kernel.asm["cubin"])
        try:
            registers, stack_bytes, local_bytes = resources(Path(scratch), cubin, entry.name)
        except CompileError as error:
            if machine := _of_the_machine(error, ""):
                raise OSError(machine) from error
            raise
    threads = re.search(r"^\.reqntid (\d+)", kernel.asm["ptx"], re.MULTILINE)
    maps = kernel.metadata.tensordesc_meta or ()
    names = [name for name, kind in arguments_of(spec) if kind.startswith("desc")]
    variant = Variant(
        kernel=entry.name,
        revision=entry.revision,
        abi=LAUNCH_ABI,
        op=spec.op,
        dtype=spec.dtype,
        layout=spec.layout,
        fusion=spec.fusion,
        alignment=spec.alignment,
        max_experts=spec.max_experts,
        config=spec.config.pairs(),
        entry=kernel.metadata.name,
        arguments=arguments_of(spec),
        tensor_maps=tuple(
            TensorMap(name, _map_element(name, spec), tuple(meta["block_size"]), meta["swizzle"])
            for name, meta in zip(names, maps, strict=True)
        ),
        threads=int(threads[1]) if threads else 32 * kernel.metadata.num_warps,
        shared_bytes=kernel.metadata.shared,
        registers=registers,
        spill_bytes=max(stack_bytes, local_bytes),
        scratch_bytes=kernel.metadata.global_scratch_size,
        cubin_bytes=len(cubin),
        cubin_sha256=hashlib.sha256(cubin).digest(),
    )
    return Compiled(variant, cubin)


def _triton_compile(spec: Spec | RowOpSpec, sm: int, scratch: str) -> Any:
    os.environ.update(TRITON_DISABLE_LINE_INFO="1", TRITON_ALWAYS_COMPILE="1", TRITON_CACHE_DIR=scratch)
    for name in _CHANGE_CODE:
        os.environ.pop(name, None)
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource
    from triton.experimental.gluon._runtime import GluonASTSource

    entry = entry_of(spec)
    function = getattr(import_module(f"...kernels.{entry.home}", __package__), entry.name)
    names, inputs = list(function.arg_names), inputs_of(spec, sm)
    if isinstance(spec, RowOpSpec):
        warps, stages = spec.config.num_warps, 1
    else:
        # A specialised kernel's options are of one warpgroup, and its stages are its own.
        config = spec.config
        warps, stages = (4, 1) if config.schedule.warp_specialized else (config.num_warps, config.num_stages)
    source = (GluonASTSource if function.is_gluon() else ASTSource)(
        function,
        {name: inputs.types.get(name, "constexpr") for name in names},
        inputs.constants,
        {(names.index(name),): [["tt.divisibility", by]] for name, by in inputs.divisible.items()},
    )
    options: dict[str, Any] = {"num_warps": warps, "num_stages": stages, "enable_fp_fusion": True}
    if isinstance(spec, RowOpSpec) and spec.max_registers:
        options["maxnreg"] = spec.max_registers
    with _no_key_of_triton(), rewriting(rewrites(spec.config) if isinstance(spec, Spec) else ()):
        return triton.compile(source, target=GPUTarget("cuda", sm, 32), options=options)


@contextmanager
def _no_key_of_triton() -> Iterator[None]:
    """Replace Triton's cache key by a constant: it hashes half a gigabyte of Triton in every worker.

    The cache is not used, and ``job_key`` has Triton's version. ``triton_key`` is private: a Triton without it works
    too.
    """
    from triton.runtime import cache

    saved = getattr(cache, "triton_key", None)
    cache.triton_key = lambda: ""
    try:
        yield
    finally:
        cache.triton_key = saved


def _triton_type(name: str, kind: str, spec: Spec | RowOpSpec, boxes: dict[str, tuple[int, ...]]) -> str:
    element = _ELEMENT.get(spec.dtype, "bf16")
    if kind == "ptr":
        others = rowops.POINTEES if isinstance(spec, RowOpSpec) else registry.pointees(spec)
        return others[name] or f"*{element}"
    if kind.startswith("desc") and isinstance(spec, Spec):
        box, bits, swizzle = boxes[name], 8 * spec.dtype.itemsize, 128
        if (held := gemm_entry(spec).held.get(name)) is not None:
            element, _, bits, swizzle = held
        shared = _SHARED.format(rank=len(box), bits=bits, swizzle=swizzle)
        layout = f",{shared}" if spec.config.schedule.warp_specialized else ""
        return f"tensordesc<{element}[{','.join(map(str, box))}]{layout}>"
    return kind


@contextmanager
def _captured(path: Path) -> Iterator[Path]:
    """Send file descriptors 1 and 2 to a file: ptxas and MLIR print whole modules there."""
    sys.stdout.flush()
    sys.stderr.flush()
    saved = os.dup(1), os.dup(2)
    with path.open("wb") as sink:
        os.dup2(sink.fileno(), 1)
        os.dup2(sink.fileno(), 2)
    try:
        yield path
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        for number, copy in enumerate(saved, start=1):
            os.dup2(copy, number)
            os.close(copy)


def _of_the_machine(error: BaseException, reason: str) -> str:
    """The machine's error, if it and not the variant is why there is no code; else an empty text.

    Triton and ptxas may wrap it, or only print it. The variant is not dropped then: the build stops, and is run again.
    """
    text = f"{error} {reason}"
    for number in _MACHINE:
        if os.strerror(number) in text:
            return text.strip()
    cause = error.__cause__ or error.__context__
    if cause is None:
        return ""
    if isinstance(cause, MemoryError) or (isinstance(cause, OSError) and cause.errno in _MACHINE):
        return f"{reason}: {cause}"
    return _of_the_machine(cause, "")


def _reason(error: Exception, output: Path) -> str:
    """The first line of the error, or the compiler's ``error:`` lines, which say more."""
    lines = output.read_text(errors="replace").splitlines()
    errors = [line.strip() for line in lines if "error:" in line or "fatal" in line.lower()]
    text = "; ".join(dict.fromkeys(errors[:3])) or str(error).strip() or type(error).__name__
    return " ".join(text.split())[:OUTPUT_LIMIT_CHARS]


def min_driver(sm: int, ptxas: str) -> int:
    """The least CUDA driver version that loads a cubin, in the form of cuDriverGetVersion.

    Within a major version any driver loads the code (CUDA compatibility guide, minor version compatibility), except for
    capabilities that the driver must know by name.
    """
    major, minor = (int(part) for part in ptxas.split(".")[:2])
    return major * 1000 + (minor * 10 if arch_of(sm).named_to_driver and major == 12 else 0)


def resources(scratch: Path, cubin: bytes, entry: str) -> tuple[int, int, int]:
    """Read registers a thread, stack bytes and local bytes of a cubin with cuobjdump."""
    import triton

    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    path = scratch / "variant.cubin"
    path.write_bytes(cubin)
    dump = subprocess.run([tool, "--dump-resource-usage", path], capture_output=True, text=True, check=False)
    usage = re.search(rf"Function {re.escape(entry)}:\s*REG:(\d+) STACK:(\d+) SHARED:\d+ LOCAL:(\d+)", dump.stdout)
    if not usage:
        raise CompileError(f"cuobjdump says nothing of {entry}: {dump.stdout}{dump.stderr}"[:OUTPUT_LIMIT_CHARS])
    return int(usage[1]), int(usage[2]), int(usage[3])
