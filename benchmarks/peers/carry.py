"""Packs an engine for a machine without network: the parts of its wheels that a benchmark needs, for one capability.

    python benchmarks/run.py carry pack --wheels vllm-0.20.2-*.whl --packages site --out vllm.tar.xz
    python benchmarks/run.py carry unpack vllm.tar.xz --to /tmp/vllm                     # there

``pack`` takes a wheel's files but those that ``RULES`` leaves out by name, and of extension modules the CUDA code of
``--sm`` alone (``fatbin.py``), less the kernels that ``RULES`` leaves out: of vLLM 0.20.2's 244 MB it makes some 20.
``--packages`` is a folder of what the engine imports and that machine lacks, made by ``pip install --no-deps --target``
(see README.md in this folder). Unpacked, they are in ``packages``, next to the engine's own folders. ``unpack``
needs nothing but Python and this repository; the archive contains the libzstd that compressed it.
"""

from __future__ import annotations

import argparse
import fnmatch
import io
import re
import tarfile
import time
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

from .fatbin import Zstd, cut, section, whole


class Rule(NamedTuple):
    """A wheel's exclusions: patterns of files, and a pattern of kernel names; code with such a name is left out."""

    files: tuple[str, ...]
    kernels: bytes


_ALL = (
    "*.pyc",
    "*.pyi",
    "*.a",
    "*.rs",
    "*.md",
    "*.html",
    "*.js",
    "*/RECORD",
    "*/licenses/*",
    "*/__pycache__/*",
    "*/tests/*",
    "bin/*",
)
# vLLM's type numbers, which are in the names of Marlin's kernels from 0.26 on: types of tokens, then of weights.
_FP16, _INT8, _BF16, _U8B128 = (
    b"Ll%dE" % number for number in (1125899906910725, 1125899906909952, 1125899906909960, 1125899923621888)
)
_MARLIN = b"6MarlinI(?:" + b"|".join((_FP16, _INT8, _BF16 + _U8B128)) + b")"
RULES = {
    "vllm": Rule(  # attention runs in Triton; Marlin runs only MoE layers of bf16 tokens
        (
            "vllm/vllm_flash_attn/*",
            "vllm/_flashmla*",
            "vllm/third_party/flashmla/*",
            "vllm/benchmarks/*",
            "vllm/vllm-rs",
            "vllm/_rust_*",
            "vllm/_qutlass_C*",
            "vllm/third_party/fmha_sm100/*",
            "vllm/third_party/tml_fa4/*",
            "*.cpython-31[0134]-*",
        ),
        rb"sm80_kernel_(float16|s8)_|sm80_kernel_bfloat16_u8b128_|paged_attention_v[12]|gguf_k|selective_scan_fwd"
        rb"|6marlin6Marlin|scaled_mm_c2x|7machete|8hadacore|fp32_router_gemm_kernel|" + _MARLIN,
    ),
    "sglang": Rule(("sglang/multimodal_gen/*", "sglang/srt/rust_extensions/*", "sglang/test/*"), rb"(?!)"),
    "sglang_kernel": Rule(
        (
            "sgl_kernel/flash_ops*",
            "sgl_kernel/infllm_ops*",
            "sgl_kernel/flashmla_ops*",
            "sgl_kernel/sm100/*",
            "sgl_kernel/spatial_ops*",
        ),
        rb"(?!)",
    ),
}
OTHERS = Rule((), rb"(?!)")
CUT, CODE, ZSTD = ".cut", ".code", "libzstd.so.1"


def files_of(wheel: Path, rule: Rule) -> Iterator[tuple[str, bytes]]:
    """Yield (name, content) of the files of a wheel that are packed."""
    with zipfile.ZipFile(wheel) as archive:
        for name in sorted(archive.namelist()):
            if not name.endswith("/") and not any(fnmatch.fnmatch(name, left) for left in (*_ALL, *rule.files)):
                yield name, archive.read(name)


def in_parts(name: str, data: bytes, sm: int, rule: Rule, zstd: Zstd) -> Iterator[tuple[str, bytes]]:
    """Yield a file's (name, content); an extension module with CUDA code as two files, which ``whole`` joins again."""
    if ".so" not in name or not data.startswith(b"\x7fELF") or not section(data):
        yield name, data
        return
    rest, code = cut(data, sm, zstd, re.compile(rule.kernels))
    yield name + CUT, rest
    yield name + CODE, code


def system_zstd() -> Path:
    """The path of this machine's libzstd."""
    Zstd()  # loads it
    mapped = Path("/proc/self/maps").read_text().splitlines()
    return Path(next(line.split()[-1] for line in mapped if "libzstd" in line))


def pack(wheels: list[Path], packages: Path | None, sm: int, out: Path) -> None:
    """Write the archive."""
    zstd = Zstd()
    contents = {ZSTD: system_zstd().read_bytes()}
    for wheel in wheels:
        rule = RULES.get(wheel.name.partition("-")[0], OTHERS)
        for name, data in files_of(wheel, rule):
            contents |= dict(in_parts(name, data, sm, rule, zstd))
    for path in sorted(packages.rglob("*")) if packages is not None else ():
        name = str(Path("packages") / path.relative_to(packages or path))
        if path.is_file() and not any(fnmatch.fnmatch(name, left) for left in _ALL):
            contents[name] = path.read_bytes()
    with tarfile.open(out, "w:xz", preset=9) as archive:
        for name in sorted(contents, key=lambda name: (Path(name).suffix, name)):  # alike beside alike
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(contents[name]), 0o644
            archive.addfile(entry, io.BytesIO(contents[name]))


def unpack(archive: Path, to: Path) -> int:
    """Unpack an archive, and join its extension modules again; return the number of these modules."""
    to.mkdir(parents=True, exist_ok=True)
    with tarfile.open(archive) as tar:
        tar.extractall(to, filter="data")
    zstd, done = Zstd(to / ZSTD), 0
    for rest in sorted(to.rglob(f"*{CUT}")):
        module = rest.with_name(rest.name.removesuffix(CUT))
        code = module.with_name(module.name + CODE)
        module.write_bytes(whole(rest.read_bytes(), code.read_bytes(), zstd))
        rest.unlink()
        code.unlink()
        done += 1
    return done


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n", 1)[0])
    verbs = parser.add_subparsers(dest="verb", required=True)
    packing = verbs.add_parser("pack", help="make an archive")
    packing.add_argument("--wheels", type=Path, nargs="+", required=True)
    packing.add_argument("--packages", type=Path, help="a folder of what the engine imports beside")
    packing.add_argument("--sm", type=int, default=90, help="the capability whose code is taken along")
    packing.add_argument("--out", type=Path, required=True)
    laying = verbs.add_parser("unpack", help="lay out an archive's files")
    laying.add_argument("archive", type=Path)
    laying.add_argument("--to", type=Path, required=True)
    args = parser.parse_args(argv)
    begun = time.perf_counter()
    for path in (*args.wheels, args.packages) if args.verb == "pack" else (args.archive,):
        if path is not None and not path.exists():
            parser.error(f"{path} is not there")
    if args.verb == "pack":
        pack(args.wheels, args.packages, args.sm, args.out)
        print(f"{args.out}: {args.out.stat().st_size / 1e6:.1f} MB in {time.perf_counter() - begun:.0f} s")
    else:
        modules = unpack(args.archive, args.to)
        print(f"{args.to}: {modules} extension modules whole again, in {time.perf_counter() - begun:.0f} s")
    return 0
