"""Rewrite PTX between Triton and the assembler, for instructions that Triton can't express.

``streamed``: weights that are read once. Their TMA loads are marked so that L2 gives their lines up first:
``cp.async.bulk.tensor`` with ``.L2::cache_hint`` and a policy (PTX ISA, "cp.async.bulk.tensor"). The policy is the
64-bit word that ``createpolicy.fractional.L2::evict_first`` yields for all lines (CUTLASS has it in
``cute/arch/copy_sm90_desc.hpp``, ``TMA::CacheHintSm90::EVICT_FIRST``).

``written``: dw that nothing reads soon. TMA's stores get the hint ("cp.async.bulk.tensor", ``.global.shared::cta``).

``cut``: products of 192 columns (kernels/gluon/pingpong.py), which are written as 256. An instruction's operands
are in shared memory by rows, or by blocks of 64 columns, so the first 192 columns are where they were, and the sums of
8 columns are four registers in a row (PTX ISA, "wgmma.mma_async", register fragments and matrix layouts).

From Triton 3.8 on, a view of 256 columns may not begin anywhere (``tile_of``, kernels/gluon/pipeline.py). The source
then reads the first 256 columns of a ring, and a comment names the register that holds the offset of the right columns.
The offset is added to the matrix descriptors, whose low bits are an address in units of 16 bytes.

``fit``: transposed tiles that are fitted to their rows (kernels/hopper_plain/fitted.py). The loop of a tile is copied
for each number of rows, with products of as many columns; a comment in the loop names the register of that number.
"""

from __future__ import annotations

import functools
import hashlib
import re
from collections.abc import Callable, Iterator, MutableMapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from ...kernels.spec import PINGPONG_COLUMNS, Cache, Config, TileRows

Rewrite = Callable[[str], str]

EVICT_FIRST = 0x12F0000000000000
# w's descriptor is the only one of three dimensions that is loaded through: x has two, and y_map is stored through.
_LOAD = re.compile(r"(cp\.async\.bulk\.tensor\.3d\.shared::\w+\.global[\w.:]*)( \[[^;]*\]);")
_STORE = re.compile(r"(cp\.async\.bulk\.tensor\.3d\.global\.shared::\w+[\w.:]*)( \[[^;]*\]);")
_WRITTEN_COLUMNS = 256
# A loop without branches inside, which has the comment that kernels/hopper_plain/fitted.py writes.
_SAID = r"// products of (?P<register>%\w+) times (?P<grain>\d+) rows, (?P<most>\d+) times at most"
_INSIDE = r"(?:(?!\$L\w+:).*\n)*?"
_LOOP = re.compile(
    rf"^(?P<name>\$L\w+):.*\n(?P<body>{_INSIDE}.*{_SAID}\n{_INSIDE}\s*@!?%\w+ bra(?:\.uni)?\s+(?P=name);\n)",
    re.MULTILINE,
)
# The comment of kernels/gluon/pipeline.py on the products in the same block of code, and their right operand.
_FURTHER = re.compile(r"// products of what is so much further: (?P<register>%\w+)\n(?P<block>(?:(?!\$L\w+:).*\n)*)")
_RIGHT = re.compile(r"(wgmma\.mma_async[^{};]*\{[^{}]*\}, %\w+, )(%\w+)([^;]*;)")
_PRODUCT = re.compile(r"(wgmma\.mma_async\.[\w.]*?m64)n(\d+)(k\d+[\w.]*\s*)\{([^{}]*)\}")


def streamed(ptx: str) -> str:
    """The PTX with a hint on each load of w.

    Raises
    ------
    ValueError
        if it has no such load, or a hint already.
    """
    return _hinted(ptx, _LOAD, "loads of w")


def written(ptx: str) -> str:
    """The PTX with a hint on each store of dw; ValueError as for ``streamed``."""
    return _hinted(ptx, _STORE, "stores of dw")


def _hinted(ptx: str, which: re.Pattern[str], what: str) -> str:
    text, count = which.subn(lambda access: f"{access[1]}.L2::cache_hint{access[2]}, {EVICT_FIRST:#x};", ptx)
    if not count or text.count(".L2::cache_hint") != count:
        raise ValueError(f"{count} TMA {what} in the PTX, {ptx.count('.L2::cache_hint')} have a hint already")
    return text


def cut(ptx: str) -> str:
    """The PTX with products of 192 columns instead of 256; the sums of the other columns are never set.

    Raises
    ------
    ValueError
        if it has no product of 256 columns, or a product of another size.
    """
    return _shorter(_moved(ptx), PINGPONG_COLUMNS)


def fit(ptx: str) -> str:
    """The PTX with a copy of each loop of products for every number of rows, and a branch to the right copy.

    Raises
    ------
    ValueError
        as ``cut``, for products outside such loops, and if the loop uses the register that the comment names.
    """
    ptx = _moved(ptx)
    text, count = _LOOP.subn(_fitted, ptx)
    if not count or "wgmma.mma_async" in _LOOP.sub("", ptx):
        raise ValueError("not all products are in a loop of one block that says of how many rows they are")
    return text


def _fitted(loop: re.Match[str]) -> str:
    name, body, register, grain = loop["name"], loop["body"], loop["register"], int(loop["grain"])
    if len(re.findall(rf"{re.escape(register)}\b", body)) != 2:  # the line of the comment names the register twice
        raise ValueError(f"{register}, of how many rows the products are, is used in their loop, so may be set there")
    to: list[str] = []
    copies: list[str] = []
    for times in range(int(loop["most"]), 0, -1):
        if copies:
            to.append(f"\tsetp.eq.s32 fits, {register}, {times};\n\t@fits bra {name}_{times};\n")
        mine = _shorter(body, grain * times).replace(f"{name};", f"{name}_{times};")
        copies.append(f"{name}_{times}:\n{mine}\tbra.uni {name}_end;\n")
    return f"{name}:\n\t{{\n\t.reg .pred fits;\n{''.join(to)}\t}}\n{''.join(copies)}{name}_end:\n"


def _moved(ptx: str) -> str:
    """The PTX with each product's right operand moved as the comments say; unchanged if there are no comments.

    Raises
    ------
    ValueError
        if a product has no such comment.
    """
    if not _FURTHER.search(ptx):
        return ptx

    def moved(said: re.Match[str]) -> str:
        to = rf"{{\n\t.reg .b64 right;\n\tcvt.u64.u32 right, {said['register']};\n\tadd.s64 right, right, \2;\n\t"
        return said[0].replace(said["block"], _RIGHT.sub(rf"{to}\1right\3\n\t}}", said["block"]))

    if "wgmma.mma_async" in _FURTHER.sub("", ptx):
        raise ValueError("it is not said of all products how much further their right operands are")
    return _FURTHER.sub(moved, ptx)


def _shorter(ptx: str, columns: int) -> str:
    """The PTX with ``columns`` columns in each product."""
    if columns not in range(8, _WRITTEN_COLUMNS + 1, 8):
        raise ValueError(f"wgmma has no product of {columns} columns")

    def shorter(product: re.Match[str]) -> str:
        written, sums = int(product[2]), product[4].split(",")
        if written < columns or len(sums) * 2 != written:
            raise ValueError(f"a product of {written} columns, {columns} wanted, has {len(sums)} registers of sums")
        return f"{product[1]}n{columns}{product[3]}{{{','.join(sums[: columns // 2])}}}"

    text, count = _PRODUCT.subn(shorter, ptx)
    if not count or ptx.count("wgmma.mma_async") != count:
        raise ValueError(f"{count} products of {ptx.count('wgmma.mma_async')} in the PTX are of columns of sums")
    return text


def rewrites(config: Config) -> tuple[Rewrite, ...]:
    """The rewrites that the code of a config needs."""
    if config.rows is TileRows.FITTED:
        return (fit,)
    hints = (written if config.schedule.warp_specialized else streamed,) * (config.cache is Cache.EVICT_FIRST)
    return hints + (cut,) * (PINGPONG_COLUMNS in (config.block_n, config.block_k))


@functools.cache
def source_of_rewrites_sha256() -> str:
    """The digest, in hex, of this file: code rewritten by another version is another cubin."""
    return hashlib.sha256(Path(__file__).read_bytes()).hexdigest()


@contextmanager
def rewriting(how: tuple[Rewrite, ...]) -> Iterator[None]:
    """Pass the PTX of everything that Triton compiles in this context and process through the functions in ``how``."""
    if not how:
        yield
        return
    from triton import knobs

    def hook(
        _backend: Any = None, stages: MutableMapping[str, Callable[..., Any]] | None = None, *_: Any
    ) -> tuple[str, str] | None:
        if stages is None:  # Triton asks what to add to the key of its cache
            names = "+".join(rewrite.__name__ for rewrite in how)
            return names, names
        make = stages["ptx"]

        def rewritten(source: Any, metadata: Any) -> str:
            ptx: str = make(source, metadata)
            for rewrite in how:
                ptx = rewrite(ptx)
            return ptx

        stages["ptx"] = rewritten
        return None

    with knobs.runtime.scope():
        knobs.runtime.add_stages_inspection_hook = hook
        yield
