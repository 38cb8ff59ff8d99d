"""Run SGLang's layers without its extension sgl_kernel, if that is built for another torch than the installed one.

Each function of it that these layers call is replaced by SGLang's own kernel of the same meaning, out of its sources
(``IN_ITS_PLACE``): nothing of pretuned's or another library's is in SGLang's time. SGLang compiles such kernels by nvcc
when one is first called, one after another. Here those of a layer are compiled at the beginning and at the same time,
and of Marlin's 182 kernels those of the layer's weights, 10 or 12: nvcc takes many minutes for all.

    python benchmarks/run.py layers_in_sglang --sglang sglang --packages packages --build built    # needs no GPU

compiles them beforehand, for 9.0; ``--built built`` takes them, and compiles what it can't load of them.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import re
import shutil
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

IN_ITS_PLACE = {
    "moe_align_block_size": "SGLang's JIT kernel of that name (kernels/jit/csrc/moe/moe_align_kernel.cu)",
    "moe_sum_reduce": "SGLang's JIT kernel moe_topk_sum, which it prefers for mxfp4; its Triton one where that can't",
}
OPS = "sglang.kernels.ops."
MARLIN = Path("gemm") / "marlin_moe" / "moe_wna16_marlin.cuh"
# The Marlin kernels that stay: of int4 in groups of 32 (2 x 16), or of mxfp4.
_KEPT = {"int4": ("COMMON", "kU4B8"), "mxfp4": ("MXFP4", "kFE2M1f")}
_KINDS = re.compile(r"(\w+)_GET_IF\(host::(\w+)\)")
_GROUPS = re.compile(r"_GET_IF\(W_TYPE, \d, N_BLOCKS, K_BLOCKS, (true|false), (-1|4|8), NUM_THREADS, false\)\s*\\?")


def moe_align_block_size(*args: Any) -> None:
    """Sort rows by expert into padded blocks, into the buffers passed; takes the extension's arguments.

    Expert ids are counted from -1, so ``num_experts`` is one higher. The extension's optional ninth argument, which
    leaves out invalid experts, is not supported.
    """
    importlib.import_module(OPS + "moe.moe_align").moe_align_block_size(*args)


def moe_sum_reduce(x: torch.Tensor, out: torch.Tensor, factor: float) -> None:
    """out [T, H] = factor * sum of x [T, top_k, H] over a token's experts, in fp32."""
    if factor == 1.0 and x.dtype is torch.bfloat16 and x.shape[-1] % 8 == 0:
        importlib.import_module(OPS + "moe.moe_topk_sum").moe_topk_sum(x, out)
    else:
        importlib.import_module(OPS + "moe.fused_moe_triton_kernels").moe_sum_reduce_triton(x, out, factor)


def stand_in() -> dict[str, str]:
    """Replace functions of sgl_kernel unless it can be loaded; return the replacements by name.

    Other functions of sgl_kernel raise NotImplementedError.
    """
    try:
        importlib.import_module("sgl_kernel")
    except (ImportError, OSError):
        for name in [module for module in sys.modules if module.partition(".")[0] == "sgl_kernel"]:
            del sys.modules[name]
    else:
        return {}

    def absent(name: str) -> Callable[..., Any]:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> Any:
            raise NotImplementedError(f"sgl_kernel.{name}: no sgl_kernel is built for torch {torch.__version__}")

        return missing

    scalars = next((Path(path) / "sgl_kernel" for path in sys.path if (Path(path) / "sgl_kernel").is_dir()), None)
    module = types.ModuleType("sgl_kernel")
    module.__path__ = []
    module.moe_align_block_size = moe_align_block_size  # type: ignore[attr-defined]
    module.moe_sum_reduce = moe_sum_reduce  # type: ignore[attr-defined]
    module.__getattr__ = absent  # type: ignore[method-assign]
    sys.modules["sgl_kernel"] = module
    for name in ("elementwise", "gemm", "quantization", "allreduce", "moe", "scalar_type"):
        part = types.ModuleType(f"sgl_kernel.{name}")
        part.__getattr__ = absent  # type: ignore[method-assign]
        sys.modules[part.__name__] = part
        setattr(module, name, part)
        if name == "scalar_type" and scalars is not None:  # Python alone
            exec((scalars / "scalar_type.py").read_text(), part.__dict__)
    return dict(IN_ITS_PLACE)


def older_triton() -> list[str]:
    """Add the attributes that triton_kernels needs from a Triton newer than 3.6; return their names.

    With them Triton 3.6 compiles its mxfp4 products for sm_90.
    """
    info = importlib.import_module("triton.language.target_info")
    kernel = importlib.import_module("triton.runtime.jit").JITFunction
    asked = [
        (info, "is_hip_gfx1250", info.is_hip),  # another vendor's GPU: no
        (kernel, "def_file_line_number", 1),  # for tracebacks
        (kernel, "def_file_col_number", 0),
    ]
    put = [(owner, name, value) for owner, name, value in asked if not hasattr(owner, name)]
    for owner, name, value in put:
        setattr(owner, name, value)
    return [name for _, name, _ in put]


def fewer(source: str, kind: str) -> tuple[str, int]:
    """Marlin's list of kernels without those that a layer of this kind never runs, and the number of lines removed."""
    lines = source.splitlines(keepends=True)
    stay = [line for line in lines if not _goes(line.strip(), kind)]
    return "".join(stay), len(lines) - len(stay)


def _goes(line: str, kind: str) -> bool:
    weights = _KINDS.fullmatch(line)
    return _GROUPS.fullmatch(line) is not None or (weights is not None and weights.groups() != _KEPT[kind])


def fewer_marlins(sources: Path, folder: Path, kind: str) -> Path:
    """Copy SGLang's Marlin sources into ``folder`` with only a kind's kernels; return the file that lists them.

    Each remaining kernel is unchanged.
    """
    for name in ("marlin", "marlin_moe"):
        shutil.copytree(sources / "gemm" / name, folder / "gemm" / name, dirs_exist_ok=True)
    file = folder / MARLIN
    text, gone = fewer(file.read_text(), kind)
    if not gone:
        raise ValueError(
            f"{sources / MARLIN} has no list of kernels as SGLang 0.5.23's: wanted lines such as "
            "COMMON_GET_IF(host::kU4)"
        )
    file.write_text(text)
    return file


def _from(file: Path) -> None:
    """Make SGLang compile Marlin from these sources."""
    marlin = importlib.import_module(OPS + "moe.moe_wna16_marlin")
    load = importlib.import_module("sglang.kernels.jit.utils").load_jit
    marlin.load_jit = lambda *args, **options: load(*args, **(options | {"cuda_files": [str(file)]}))


def builders(kind: str) -> list[Callable[[], Any]]:
    """Return functions that compile, or find compiled, the kernels that SGLang compiles for a layer when it runs.

    A name that this SGLang lacks is left out; its kernel is compiled when it is called.
    """
    bf16, int32 = torch.bfloat16, torch.int32
    align, align_counted = (("moe.moe_align", "_jit_moe_align_module", args) for args in ((int32,), (int32, True)))
    act, total = (
        ("activation.activation", "activation_module", (bf16,)),
        ("moe.moe_topk_sum", "_jit_topk_sum_module", ()),
    )
    single = ("moe.moe_align_single_token", "_jit_align_single_token_module", (True,))
    repack = ("quantization.gptq_marlin_repack", "_jit_gptq_marlin_repack_module", ())
    router = ("moe.moe_topk_softmax", "_jit_moe_topk_softmax_module", (bf16,))
    by_kind: dict[str, list[tuple[str, str, tuple[Any, ...]]]] = {
        "bf16": [act, total, align],
        "fp8": [act, total, align],
        "mxfp4": [align_counted, single, repack, total, router],
        "int4": [align_counted, single, repack, total, act],
    }
    return [*marlins(kind), *_files(by_kind[kind])]


def marlins(kind: str) -> list[Callable[[], Any]]:
    """Return functions that compile Marlin for a kind's two products."""
    has_bias = kind == "mxfp4"
    wanted: list[tuple[str, str, tuple[Any, ...]]] = [
        ("moe.moe_wna16_marlin", "_jit_moe_wna16_marlin_module", (torch.bfloat16, False, has_bias, True, is_down, True))
        for is_down in (False, True)
    ]
    return _files(wanted) if kind in _KEPT else []


def _files(wanted: list[tuple[str, str, tuple[Any, ...]]]) -> list[Callable[[], Any]]:
    compilers: list[Callable[[], Any]] = []
    for module, name, args in wanted:
        with contextlib.suppress(ImportError, AttributeError):
            compilers.append(functools.partial(getattr(importlib.import_module(OPS + module), name), *args))
    return compilers


def compile_all(kind: str, folder: Path, built: Path | None = None) -> None:
    """Compile a layer's kernels in parallel, with ``folder`` for sources; modules in ``built`` are loaded instead."""
    compiling = importlib.import_module("sglang.kernels.jit.utils.compile")
    importlib.import_module("sglang.kernels.jit.utils.arch").get_jit_cuda_arch()  # queries the GPU in this thread
    if built is not None:
        take(built)
    if kind in _KEPT:
        _from(fewer_marlins(compiling.KERNEL_PATH / "csrc", folder, kind))
    compiling.parallel_compile(builders(kind))


def take(built: Path) -> None:
    """Make SGLang load the modules in ``built``, by their names, before its own.

    A module that does not load is deleted and compiled again.
    """
    loader = importlib.import_module("sglang.kernels.jit.utils.compile.loader")
    find = loader._find_prebuilt

    def find_prebuilt(*, spec: Any, scope: Path) -> Path | None:
        there = built / spec.module_name / f"{spec.module_name}.so"
        return there if there.is_file() else find(spec=spec, scope=scope)

    loader._find_prebuilt = find_prebuilt


def build(built: Path, folder: Path) -> list[str]:
    """Compile all kinds' kernels for sm_90 into ``built``, with ``folder`` for sources; return the modules' names.

    Modules that are there already stay. No GPU is needed.
    """
    compiling = importlib.import_module("sglang.kernels.jit.utils.compile")
    loader = importlib.import_module("sglang.kernels.jit.utils.compile.loader")
    arch = importlib.import_module("sglang.kernels.jit.utils.arch")
    # SGLang's values on a machine with an NVIDIA GPU.
    importlib.import_module(OPS + "activation.activation").get_activation_cuda_cflags = lambda: ["--use_fast_math"]
    names: list[str] = []

    def keep(library: Path) -> None:
        there = built / library.stem / library.name
        there.parent.mkdir(parents=True, exist_ok=True)
        if there != library:
            shutil.copy(library, there)
        names.append(library.stem)

    loader._load = keep  # there may be no GPU to load it for
    take(built)
    with arch.override_jit_cuda_arch(9, 0):
        for kind in ("bf16", "fp8", "mxfp4", "int4"):
            if kind in _KEPT:
                _from(fewer_marlins(compiling.KERNEL_PATH / "csrc", folder / kind, kind))
            for compiler in builders(kind):
                compiler()
    return names
