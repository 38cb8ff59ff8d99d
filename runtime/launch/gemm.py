"""Make a launcher of a loaded GEMM variant, with the arguments that all its launches share and its grid.

``driver/launcher.py`` makes the launcher from the kernel's entry (kernels/entry.py).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from ...artifacts.errors import BundleCorrupt, InputError
from ...artifacts.records import Fusion, Op, RowOp, Variant
from ...artifacts.tuples import NamedTuple
from ...kernels.entry import CLEARER_ROWS, FLAGS, RAGGED_SIZES, ZERO_TAIL
from ...kernels.registry import clears, gemm_entry, limits_of, too_large, transposed, unlaunchable, weight_tiles
from ...kernels.spec import Config, Schedule, Spec, w_kn
from ..check.tensors import address_of
from ..driver import cuda
from ..driver.launcher import Grid, ProductLauncher

if TYPE_CHECKING:
    from ..weights.expert_weights import ExpertWeights

_MOST_TILES = 2**31 - 1
_MOST_ROWS = RAGGED_SIZES[2]  # row numbers past a tile's end, and of no expert, must fit int32, too
_MOST_PROGRAMS = 2**26
_INDEXED = Fusion.GATHER | Fusion.SCATTER | Fusion.WEIGHT  # fusions that read the index


class LoadedKernel(NamedTuple):
    """A variant on a device: its code is loaded and its persistent grid is known."""

    variant: Variant
    function: cuda.Function
    sm_count: int

    @property
    def config(self) -> Config:
        """The config of a GEMM's variant."""
        return Config.from_pairs(self.variant.config)


def load_kernel(variant: Variant, cubin: bytes, device: int, sm_count: int, where: str | None = None) -> LoadedKernel:
    """Load a variant's verified cubin on a device. ``where`` begins an error, else the kernel's name does.

    Raises
    ------
    CudaError
        where the driver refuses the code.
    BundleCorrupt
        where the variant's record is not one that this launcher knows.
    """
    wrong = unlaunchable(variant)
    if not wrong and variant.scratch_bytes:
        wrong = f"it wants {variant.scratch_bytes} bytes of scratch: ABI 1 has none"
    if wrong:
        raise BundleCorrupt(
            f"{where or f'variant {variant.entry}'}: {wrong}. Copy the bundle again, or rebuild it with `aot build`."
        )
    function = cuda.load(
        cubin, variant.entry, threads=variant.threads, shared_bytes=variant.shared_bytes, device=device
    )
    return LoadedKernel(variant, function, sm_count)


class Fused(NamedTuple):
    """The fusions of a call; kernel flags hold the parts of ``fusion`` that are not compiled into the kernel.

    ``index_step`` is 2 for an int64 index; x's row of an index is ``index // x_divisor``. ``zero_tail`` sets
    the rows of y that belong to no expert to zero. In a scattered y [index_end, N] these are the rows that no index
    names, and only some kernels zero them (``registry.clears``): kernels with one tile a program if ``few``,
    warp-specialised kernels if ``beside`` (the product hides the time).
    """

    fusion: Fusion = Fusion.NONE
    index_step: int = 1
    x_divisor: int = 1
    zero_tail: bool = False
    few: bool = True
    beside: bool = True


PLAIN = Fused()


def without_clearing(fused: Fused, variant: Variant, config: Config) -> Fused:
    """A call's fusions, without ``zero_tail`` if the kernel stores rows by an index and can't clear others."""
    asked = fused.beside if config.schedule.warp_specialized else fused.few
    can = asked and clears(variant.fusion, config)
    return fused._replace(zero_tail=False) if fused.fusion & _INDEXED and not can else fused


def product_launcher(
    kernel: LoadedKernel,
    *,
    N: int,
    K: int,
    E: int,
    m_sizes_step: int,
    strides: tuple[int, ...] | None = None,
    fused: Fused = PLAIN,
    R: int = 0,
    w_rows: int | None = None,
) -> ProductLauncher:
    """A launcher of y[g] = x[g] @ w[g].T, or of dw[g] = dy[g].T @ x[g], with the kernel's N and K (``spec.gemm_of``).

    ``N`` are the columns of the product and ``K`` its reduction, or dw is [E, N, K]; with SILU y has half as many
    columns. ``strides`` are w's or dw's elements from expert to expert and from row to row; without them it is dense.

    A call takes x, w, stride_x_m, stride_y_m and M, of dW dy, x, stride_dy_m, stride_x_m and M, and what else the
    kernel's entry declares: the index, row_weights, bias and index_end of a fused call, what belongs to codes, low_x
    and low_w of a low-rank part of ``R`` columns. Where the code can't do ``fused.zero_tail`` it is left to the caller:
    ``zeroes`` of the launcher says so. ``w_rows`` are fewer than ``N`` where y's rows are filled up to whole 16 bytes,
    of code that reads w [E, N, K] through a descriptor: those columns are zeros.

    Raises
    ------
    InputError
        where the product has more columns, a longer reduction or more tiles than the kernel can do.
    """
    config, variant = kernel.config, kernel.variant
    if isinstance(variant.op, RowOp):
        raise AssertionError(f"{variant.entry} is no product")
    spec = Spec(
        variant.op, variant.dtype, config, variant.layout, variant.fusion, variant.alignment, variant.max_experts
    )
    backward, kn = spec.op is Op.DW, w_kn(spec)
    columns = N if not backward or transposed(Op.DW, config) else K
    if wrong := too_large(spec.op, columns, K, config):
        raise InputError(f"{variant.entry}: {wrong}")
    if w_rows is not None and (kn or all(tensor_map.argument != "w" for tensor_map in variant.tensor_maps)):
        raise AssertionError("fewer rows of w by code that would read past them")
    fused = without_clearing(fused, variant, config)
    apart, row = strides or (N * K, N if kn and not backward else K)
    w = "dw" if backward else "w"
    sizes = {
        "N": N,
        "K": K,
        "E": E,
        "R": R,
        "w_rows": w_rows or N,
        f"stride_{w}_e": apart,
        f"stride_{w}_row": row,
        "m_sizes_step": m_sizes_step,
        "index_step": fused.index_step,
        "x_divisor": fused.x_divisor,
        "flags": (fused.fusion & FLAGS).value | (ZERO_TAIL if fused.zero_tail else 0),
    }
    entry = gemm_entry(spec)
    grid = _grid_of_weight(kernel, config, N, K, E) if backward else _grid_of_rows(kernel, config, N, E, fused)
    return ProductLauncher(
        variant,
        kernel.function,
        f"{variant.entry}, {config}",
        grid=grid,
        fixed={**sizes, **entry.numbers(spec, sizes)},
        shapes=entry.shapes(spec, sizes),
        result="dw" if backward else "y",
        required=entry.required(spec),
        zeroes=fused.zero_tail,
        plain_scales=entry.plain_scales,
    )


def words_of(w: ExpertWeights, launcher: ProductLauncher) -> dict[str, int]:
    """The arguments of quantised weights, for a kernel that reads them."""
    scale = w.plain_scale if launcher.plain_scales else w.kernel_scale
    return {
        "w": address_of(w.codes),
        "w_scale": address_of(scale),
        "w_zero": address_of(w.zero),
        "w_outer": address_of(w.outer_scale),
    }


def _grid_of_rows(kernel: LoadedKernel, config: Config, columns: int, E: int, fused: Fused) -> Grid:
    tiles_n, block_m, one_tile = -(-columns // config.block_n), config.block_m, config.schedule is Schedule.TILE
    clearers = fused.zero_tail and Fusion.SCATTER in fused.fusion and not config.schedule.warp_specialized
    most_tiles = _MOST_PROGRAMS if one_tile else _MOST_TILES
    most = _MOST_PROGRAMS if one_tile else kernel.sm_count * kernel.function.per_sm

    def grid(M: int, index_end: int) -> int:
        active = E if E < M else M
        tiles = ((M - active) // block_m + active) * tiles_n  # registry.most_tiles, inlined
        if clearers:
            tiles += -(-index_end // CLEARER_ROWS)
        if tiles > most_tiles:
            work = f"M={M} rows and {columns} columns make {tiles} tiles"
            raise InputError(f"{work} of {config}, the most is {most_tiles}: split the batch")
        if M > _MOST_ROWS:
            raise InputError(f"M={M}, the most rows of {config} is 2^30: split the batch")
        return tiles if tiles < most else most

    return grid


def _grid_of_weight(kernel: LoadedKernel, config: Config, N: int, K: int, E: int) -> Grid:
    tiles = weight_tiles(N, K, E, config)
    if tiles > _MOST_TILES:
        raise InputError(f"E={E}, N={N}, K={K} make {tiles} tiles of {config}, the most is 2^31 - 1")
    programs = tiles if config.schedule is Schedule.TILE else min(tiles, kernel.sm_count * kernel.function.per_sm)
    most_steps, described = limits_of(Op.DW, config).steps, bool(kernel.variant.tensor_maps)
    most_rows = _MOST_ROWS if most_steps is None else min(_MOST_ROWS, config.block_m * most_steps)

    def grid(M: int, _index_end: int) -> int:
        if described and most_rows < M:
            raise InputError(f"M={M}, the most rows of dW by {config} is {most_rows}: split the batch")
        return programs

    return grid
