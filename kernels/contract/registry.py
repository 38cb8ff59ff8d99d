"""What each kernel is compiled for: its arguments, descriptors, constants, limits, and what it has no code for."""

from __future__ import annotations

from ...artifacts.records.precision import DType
from ...artifacts.records.problem import Fusion, Op, Problem
from ..hardware.arch import Feature, arch_of
from .config import PINGPONG_COLUMNS, Config, across, fitted, of_weight
from .spec import MAX_EXPERTS, Spec, gemm_of, w_kn

SPECIALIZED_SHARED_BYTES = 227 * 1024  # of sm_90
SPECIALIZED_ROWS = 128  # of a tile, 64 for each warpgroup; where it is fitted to its rows, its columns
MOST_STEPS = (1 << 20) - 1  # of a specialised kernel's reduction


def no_code(op: Op, dtype: DType, fusion: Fusion, config: Config) -> str | None:
    """Why no kernel of this op, dtype and form can have the config, or None."""
    odd = [name for one, name in ((Fusion.GATHER, "gather"), (Fusion.SILU, "silu")) if one in fusion]
    if Fusion.SILU in fusion and not config.specialized:
        return (
            f"{config} is no config of {dtype.value} {op.value} silu: specialized code alone has silu in its epilogue"
        )
    if config.pingpong and (odd or dtype.itemsize != 2 or of_weight(config) != (op is Op.DW)):
        form = " ".join((dtype.value, op.value, *odd))
        return (
            f"{config} is no config of {form}: pingpong has 16-bit types, no gather or silu, and tiles of its own in dW"
        )
    if fitted(config) and (op is Op.DW or odd or config.narrow):
        form = " ".join((op.value, *odd, *(["narrow"] if config.narrow else [])))
        return f"{config} is no config of {form}: tiles fitted to their rows are of products of rows that none gathers"
    tf32 = dtype is DType.TF32 and op is Op.DW and config.block_k == 256 and not config.narrow
    if config.specialized and dtype.itemsize != 2 and not tf32:
        return (
            f"{config} is no config of {dtype.value} {op.value}: specialized has 16-bit types, and tf32 of dW in whole "
            "tiles of 128 x 256"
        )
    if config.streamed and (op is Op.DW) != config.specialized:
        return f"{config} is no config of {op.value}: streamed is specialized in dW, and not in products of rows"
    rows = config.block_n if op is Op.DW else config.block_m
    if config.specialized and not config.pingpong and rows != SPECIALIZED_ROWS and not fitted(config):
        return f"{config} is no config of {op.value}: a specialized tile has {SPECIALIZED_ROWS} rows"
    return None


def too_large(op: Op, columns: int, reduction: int, config: Config) -> str | None:
    """Why a specialised kernel's warpgroups can't be told of tiles of such a product, or None.

    The loading warp passes on a tile's steps in 20 bits, and, where warpgroups take turns, its column in 20 bits too
    (kernels/gemm/hopper/consumer.py, kernels/gemm/hopper/pingpong.py). How many steps dW has its rows say, which only
    the call knows.
    """
    most = MOST_STEPS * config.block_k
    if config.specialized and op is not Op.DW and reduction > most:
        return f"the longest reduction of {config} is {most}, this is {reduction}"
    most = (1 << 20) * (PINGPONG_COLUMNS if op is Op.DW else config.block_n)
    if config.pingpong and columns > most:
        return f"the most columns of {config} are {most}, these are {columns}"
    return None


def beyond(problem: Problem, config: Config) -> str | None:
    """Why a problem is too large for a kernel of this config, or None: see ``too_large``."""
    if not config.specialized or max(problem.N, problem.K) <= 16 * MOST_STEPS:  # no step is shorter
        return None
    if problem.op is Op.DW:
        return too_large(Op.DW, problem.N if across(config) else problem.K, 0, config)
    gemm = gemm_of(problem)
    return too_large(problem.op, gemm.columns, gemm.reduction, config)


def counts(config: Config, max_experts: int) -> bool:
    """Whether a kernel of this config can count the rows of so many experts.

    A specialised one keeps a table, and a program that has one tile asks for it once (kernels/gemm/portable/lookup.py).
    """
    return (config.persistent and not config.specialized) or max_experts <= MAX_EXPERTS


def arguments(spec: Spec) -> tuple[tuple[str, str], ...]:
    """(name, kind) of every argument in the kernel's order; kinds: ptr, i32, i64, desc2, desc3, desc4."""
    ranks = {"w": 3, "x": 4 if spec.op is Op.DW else 2, "dy": 4, "dw": 3, "y_map": 4}
    if spec.op is Op.DW:
        pointers: tuple[str, ...] = ("dy", "x", "dw", "m_sizes")
        strides = ("stride_dy_m", "stride_x_m", "stride_dw_e", "stride_dw_row")
    else:
        pointers = ("x", "w", "y", "m_sizes", "index", "row_weights", "bias")
        strides = ("stride_x_m", "stride_w_e", "stride_w_row", "stride_y_m")
    if spec.config.specialized:
        pointers += ("counter",)
    if _asks(spec):
        pointers += ("dy_at", "x_at")
    if "y_map" in spec.tma:
        pointers = (*pointers[:3], "y_map", *pointers[3:])
    return (
        *((name, f"desc{ranks[name]}" if name in spec.tma else "ptr") for name in pointers),
        *((name, "i32") for name in ("M", "N", "K", "E")),
        *((name, "i64") for name in strides),
        ("m_sizes_step", "i32"),
        *((name, "i32") for name in ("index_step", "index_end", "x_divisor", "flags") if spec.op is not Op.DW),
    )


def _asks(spec: Spec) -> bool:
    """Whether the code asks L2 for rows by their addresses."""
    return spec.op is Op.DW and spec.config.specialized and spec.config.streamed


def boxes(spec: Spec) -> dict[str, tuple[int, ...]]:
    """The block of each descriptor argument, outermost dimension first."""
    c = spec.config
    half = 64 if c.specialized else 0  # rows of the product, one box for each warpgroup
    if spec.op is Op.DW:
        dy = (1, 1, c.block_m, half or c.block_n)
        x = (1, 1, c.block_m, 64 if c.pingpong else c.block_k // 2 if c.narrow else c.block_k)
        blocks: dict[str, tuple[int, ...]] = {"dy": dy, "x": x, "dw": (1, 64, 64)}
    else:
        columns = 64 if c.pingpong else c.block_n // 2 if c.specialized else c.block_n  # a tile may be half as wide
        if fitted(c):  # all columns of a tile at once, or where they are contiguous as many as a line has
            columns = 64 if w_kn(spec) else c.block_n
        w = (1, c.block_k, columns) if w_kn(spec) else (1, columns, c.block_k)
        blocks = {"x": (half or c.block_m, c.block_k), "w": w, "y_map": (1, 1, 64, 64)}
    return {name: blocks[name] for name in spec.tma}


def constants(spec: Spec, sm: int) -> dict[str, int | str | bool | None]:
    """The kernel's compile-time arguments for a capability."""
    c = spec.config
    if c.specialized:
        return _specialized(spec)
    loads = {"TMA": bool(spec.tma)} if spec.op is Op.DW else {
        "X_TMA": "x" in spec.tma, "W_TMA": "w" in spec.tma, "W_KN": w_kn(spec),
        "INDEXED": bool(spec.fusion), "TURNED": _turned(spec, sm), "CLEARS": clears(spec.fusion, c),
    }  # fmt: skip
    return loads | {
        "BLOCK_M": c.block_m,
        "BLOCK_N": c.block_n,
        "BLOCK_K": c.block_k,
        "GROUP_M": c.group_m,
        "EXPERTS": min(spec.max_experts, MAX_EXPERTS),
        "SCAN": spec.max_experts > MAX_EXPERTS,
        "PERSISTENT": c.persistent,
        "PRECISION": "ieee" if spec.dtype is DType.FP32 else "tf32",
    }


def clears(fusion: Fusion, config: Config) -> bool:
    """Whether code of rows can set the rows of y to zero that an index sends no row to.

    Of one tile a program by more programs (``portable.rows``), specialised by a warp in each (``unnamed.py``).
    """
    return fusion == Fusion.SCATTER and (config.specialized or not config.persistent)


def _turned(spec: Spec, sm: int) -> bool:
    """Whether code of rows on wgmma takes w from registers, turned round on the way: see ``portable.rows``."""
    wgmma = arch_of(sm).has(Feature.WGMMA) and spec.config.block_m >= 64 and spec.config.num_warps >= 4
    return wgmma and spec.dtype is DType.TF32 and w_kn(spec) and "w" in spec.tma


def _specialized(spec: Spec) -> dict[str, int | str | bool | None]:
    c = spec.config
    if spec.op is Op.DW:
        depth, columns = c.block_m, max(c.block_n, c.block_k) if c.pingpong else c.block_k
        sizes: dict[str, int | str | bool | None] = {
            "BLOCK_M": depth, "BLOCK_K": columns, "NARROW": c.narrow, "ACROSS": across(c), "STREAMED": c.streamed,
        }  # fmt: skip
        sizes |= {} if _asks(spec) else {"dy_at": None, "x_at": None}
    elif fitted(c):
        depth, columns = c.block_k, c.block_m
        sizes = {"BLOCK_M": c.block_m, "BLOCK_K": depth, "W_KN": w_kn(spec), "INDEXED": bool(spec.fusion)}
        sizes |= {} if "y_map" in spec.tma else {"y_map": None}
    else:
        gated = Fusion.SILU in spec.fusion
        sizes = {"BLOCK_N": c.block_n, "BLOCK_K": c.block_k, "W_KN": w_kn(spec),
                 "INDEXED": bool(spec.fusion) and not gated, "GATHER": Fusion.GATHER in spec.fusion,
                 "GATED": gated}  # fmt: skip
        sizes |= {} if "y_map" in spec.tma else {"y_map": None}
        depth, columns = c.block_k, c.block_n
    # Results pass through shared memory, 64 x 64 of each warpgroup at a time, where there is room in turns.
    operands = c.num_stages * (SPECIALIZED_ROWS + columns) * depth
    operands += 64 * depth if columns == PINGPONG_COLUMNS and not (fitted(c) and spec.fusion) else 0  # see turns.py
    room = SPECIALIZED_SHARED_BYTES - 512 - operands * spec.dtype.itemsize - _noted_bytes(spec)
    return sizes | {
        "STAGES": c.num_stages,
        "SLOTS": 2 if 4 * 64 * 64 * spec.dtype.itemsize <= room and _even_parts(spec) else 1,
        "GROUP_M": c.group_m,
        "EXPERTS": MAX_EXPERTS,
        "PINGPONG": c.pingpong,
        "REGISTERS": _registers(spec),
    }


def _noted_bytes(spec: Spec) -> int:
    """Of what both warpgroups have looked up of their rows: kernels/gemm/hopper/consumer.py, ``tables``."""
    rows = 256 if fitted(spec.config) else 128 if spec.config.pingpong else 64
    return 2 * rows * 8 if spec.fusion and Fusion.SILU not in spec.fusion else 0


def _registers(spec: Spec) -> int:
    """Of a multiplying thread; the loading warps have what is left of 168 for each of 12 warps."""
    if spec.config.pingpong:
        return 224  # 192 of them hold sums
    return 208 if Fusion.GATHER in spec.fusion else 216  # a loading thread has the addresses of its rows


def _even_parts(spec: Spec) -> bool:
    """Whether every tile leaves in an even number of 64 columns: two buffers in turns need it, the first comes first.

    TMA reads a buffer while the next tile is on its way. Half a tile of 128 columns, as an edge or as silu of both
    halves, is one part, so the next tile's first would meet it in the same buffer.
    """
    if fitted(spec.config):
        return True  # any number: its kernel keeps track of the buffers
    if PINGPONG_COLUMNS in (spec.config.block_n, spec.config.block_k):
        return False  # three parts
    if spec.op is Op.DW:
        return not spec.config.narrow or spec.config.block_k >= 256
    return "y_map" not in spec.tma or spec.config.block_n >= 256


def divisibility(spec: Spec) -> dict[str, int]:
    """What the compiler may assume: the argument is a multiple of this (bytes for pointers, elements else)."""
    if spec.alignment == 1:
        return {}
    elements = spec.alignment // spec.dtype.itemsize
    given = {}
    for name, kind in arguments(spec):
        if name in ("x", "w", "y", "dy", "dw") and kind == "ptr":
            given[name] = spec.alignment
        elif name in ("N", "K") or kind == "i64":
            given[name] = elements
    return given


def weight_tiles(N: int, K: int, E: int, config: Config) -> int:
    """The tiles of dw [E, N, K]: the same for any rows."""
    return E * -(-N // config.block_n) * -(-K // config.block_k)


def most_tiles(rows: int, E: int, columns: int, config: Config) -> int:
    """The most tiles that ``rows`` rows can make, however they fall on E experts."""
    if rows <= 0 or columns <= 0:
        return 0
    active = min(E, rows)
    return ((rows - active) // config.block_m + active) * -(-columns // config.block_n)
