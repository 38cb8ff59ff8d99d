"""The records of bundles: dtypes and formats, problems, GPUs, variants (compiled kernels) and choices among them.

A lookup goes problem -> choices, one for each bucket of M and GPU -> variant -> cubin. A problem is a grouped GEMM's
op, dtype, shape and fusion without its number of rows M; buckets are ranges of M. A problem has a ``DType``, one word
for all operands. ``PRECISIONS`` maps that word to the types of x, w and y, their bits and scales, and the arithmetic:
``DType.MXFP4.precision.w`` is e2m1 of 4 bits with an e8m0 scale for 32 elements.

Letters in all modules: E experts, M rows, N output columns, K reduction, T tokens, k = top_k.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence

from .tuples import NamedTuple


class DType(enum.Enum):
    """The dtype of a problem's operands: a name in ``PRECISIONS``.

    With the first four, x, w and y have one type; ``TF32`` is fp32 in memory, multiplied in tf32. With the others w is
    quantised, x and y are bf16, and ``FP8_BLOCK`` and ``FP8_CHANNEL`` quantise x before they multiply. Only formats
    with a kernel are members.
    """

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    TF32 = "tf32"
    MXFP4 = "mxfp4"
    MXFP8 = "mxfp8"
    NVFP4 = "nvfp4"
    INT4_G32 = "int4_g32"
    INT4_G64 = "int4_g64"
    INT4_G128 = "int4_g128"
    INT4_G32_ZP = "int4_g32_zp"
    INT4_G64_ZP = "int4_g64_zp"
    INT4_G128_ZP = "int4_g128_zp"
    FP8_BLOCK = "fp8_block"
    FP8_BLOCK_A16 = "fp8_block_a16"
    FP8_CHANNEL = "fp8_channel"
    FP8_CHANNEL_A16 = "fp8_channel_a16"

    __hash__ = object.__hash__  # see Op

    @property
    def itemsize(self) -> int:
        """Bytes of an element of a call's x, and of y."""
        return 4 if self in (DType.FP32, DType.TF32) else 2

    @property
    def precision(self) -> Precision:
        """The types of x, w and y."""
        return PRECISIONS[self.value]

    @property
    def quantised(self) -> bool:
        """True if w has scales."""
        return self not in PLAIN_DTYPES

    @property
    def quantises_x(self) -> bool:
        """True if products read x as quantised codes with scales."""
        return self.precision.x.scale is not None

    @property
    def with_x_quantised(self) -> DType | None:
        """The dtype with the same weights and quantised x, for a dtype that keeps x in bf16; None if there is none."""
        dtype = _DTYPES.get(self.value.removesuffix("_a16"))
        return dtype if dtype is not None and dtype is not self and dtype.quantises_x else None


PLAIN_DTYPES = frozenset((DType.BF16, DType.FP16, DType.FP32, DType.TF32))
_DTYPES = {dtype.value: dtype for dtype in DType}
_SCALE_BITS = {"fp32": 32, "bf16": 16, "e8m0": 8, "e4m3": 8}


class Scale(NamedTuple):
    """A scale of type ``name`` for each block of ``rows`` x ``columns`` elements; 0 means all rows or columns.

    ``name`` is ``fp32``, ``bf16``, ``e8m0`` (2**(code - 127), 255 is NaN) or ``e4m3``. ``zero_bits`` are the bits of
    the zero point of each block, 0 without zero points. ``outer`` is a scale of the scales.
    """

    name: str
    rows: int
    columns: int
    zero_bits: int = 0
    outer: Scale | None = None

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of all scales and zero points of a matrix of ``rows`` x ``columns`` elements."""
        blocks = -(-rows // (self.rows or rows or 1)) * -(-columns // (self.columns or columns or 1))
        own = blocks * (_SCALE_BITS[self.name] + self.zero_bits) // 8
        return own + (0 if self.outer is None else self.outer.nbytes(rows, columns))


class Elements(NamedTuple):
    """An operand's element type ``name``, bits of an element, and scale if it is quantised.

    ``name`` is ``bf16``, ``fp16``, ``fp32``, ``e4m3`` (float8_e4m3fn), ``e2m1`` (0, 0.5, 1, 1.5, 2, 3, 4, 6 and a sign)
    or ``int4`` (0 to 15, minus the zero point; 8 if the format has no zero points).
    """

    name: str
    bits: int
    scale: Scale | None = None

    def nbytes(self, rows: int, columns: int) -> int:
        """Bytes of a matrix of ``rows`` x ``columns`` elements and its scales; a row begins at a byte."""
        scales = 0 if self.scale is None else self.scale.nbytes(rows, columns)
        return rows * -(-columns * self.bits // 8) + scales


class Precision(NamedTuple):
    """Types of the operands of y = x @ w.T. ``math`` names the arithmetic whose peak rate limits the product."""

    name: str
    x: Elements
    w: Elements
    y: Elements
    math: str

    @property
    def quantised(self) -> bool:
        """True if w has scales."""
        return self.w.scale is not None

    def w_bytes(self, N: int, K: int) -> int:
        """Bytes of one expert's matrix of w, [N, K], with its scales."""
        return self.w.nbytes(N, K)


_BF16, _FP16, _FP32 = Elements("bf16", 16), Elements("fp16", 16), Elements("fp32", 32)
_E4M3, _E2M1, _INT4 = Elements("e4m3", 8), Elements("e2m1", 4), Elements("int4", 4)


def dtypes_of(format: str) -> tuple[DType, ...]:
    """Return the dtypes of problems with weights of a format, () if no kernel supports it.

    fp8_block gives FP8_BLOCK, which quantises x like its checkpoints ask, and FP8_BLOCK_A16, which keeps x in bf16:
    that is more exact, and faster for few rows.
    """
    return tuple(_DTYPES[name] for name in (format, f"{format}_a16") if name in _DTYPES)


def _scaled(elements: Elements, name: str, rows: int, columns: int, **more: int | Scale) -> Elements:
    return elements._replace(scale=Scale(name, rows, columns, **more))  # type: ignore[arg-type]


_BLOCK, _CHANNEL = _scaled(_E4M3, "fp32", 128, 128), _scaled(_E4M3, "fp32", 1, 0)
_NVFP4 = _scaled(_E2M1, "e4m3", 1, 16, outer=Scale("fp32", 0, 0))

# "_a16" keeps x in bf16 for formats whose checkpoints ask to quantise it.
PRECISIONS: dict[str, Precision] = {
    precision.name: precision
    for precision in (
        Precision("bf16", _BF16, _BF16, _BF16, "bf16"),
        Precision("fp16", _FP16, _FP16, _FP16, "fp16"),
        Precision("fp32", _FP32, _FP32, _FP32, "fp32"),
        Precision("tf32", _FP32, _FP32, _FP32, "tf32"),
        Precision("fp8_block", _scaled(_E4M3, "fp32", 1, 128), _BLOCK, _BF16, "fp8"),  # DeepSeek-V3, Qwen3-FP8
        Precision("fp8_block_a16", _BF16, _BLOCK, _BF16, "bf16"),
        Precision("fp8_channel", _scaled(_E4M3, "fp32", 1, 0), _CHANNEL, _BF16, "fp8"),  # compressed-tensors' dynamic
        Precision("fp8_channel_a16", _BF16, _CHANNEL, _BF16, "bf16"),
        Precision("mxfp4", _BF16, _scaled(_E2M1, "e8m0", 1, 32), _BF16, "bf16"),  # gpt-oss
        Precision("mxfp8", _BF16, _scaled(_E4M3, "e8m0", 1, 32), _BF16, "bf16"),  # MiniMax-M3-MXFP8
        Precision("nvfp4", _BF16, _NVFP4, _BF16, "bf16"),
        *(
            Precision(f"int4_g{g}{zero}", _BF16, _scaled(_INT4, "bf16", 1, g, zero_bits=bits), _BF16, "bf16")
            for g in (32, 64, 128)
            for zero, bits in (("", 0), ("_zp", 8))  # "_zp": each group has a zero point of its own (AWQ)
        ),
    )
}


class Op(enum.Enum):
    """One of the three grouped GEMMs of an MoE layer.

    - ``FORWARD``: y[g] = x[g] @ w[g].T
    - ``DX``: dx[g] = dy[g] @ w[g]
    - ``DW``: dw[g] = dy[g].T @ x[g]
    """

    FORWARD = "forward"
    DX = "dX"
    DW = "dW"

    __hash__ = object.__hash__  # members are singletons; enum's own hash is slow, and problems are keys everywhere


class RowOp(enum.Enum):
    """A row kernel of an MoE layer: it works on any number of rows and columns around the grouped GEMMs.

    - ``GATHER``: out[i] = x[token of row i]
    - ``QUANTIZE``: all or gathered rows of x as e4m3 codes, with a scale for each 128 columns
    - ``QUANTIZE_ROWS``: all or gathered rows of x as e4m3 codes, with a scale for each row
    - ``QUANTIZE_COLUMNS``: sorted rows of x as e4m3 codes, transposed, with a scale for each 128 rows of an expert and
      column
    - ``QUANTIZE_BOTH``: QUANTIZE_COLUMNS and QUANTIZE, of one read of x
    - ``ORDER_CODES``: all or gathered rows of codes and scales, as QUANTIZE and QUANTIZE_ROWS write them
    - ``ACTIVATION``: a[i] = act(h[i])
    - ``ACTIVATION_CODES``: ACTIVATION, then QUANTIZE
    - ``ACTIVATION_ROW_CODES``: ACTIVATION, then QUANTIZE_ROWS
    - ``ACTIVATION_GRAD``: dh from the gradient of a, and the routing weights' gradient
    - ``COMBINE``: out[t] = sum over the slots s of token t of y[t, s]
    - ``CLEAR``: y[r] = 0 for the rows r that no index names; for any dtype, its record says fp32
    - ``PLACE_ROWS``: list rows that have gaps between experts, expert by expert; it has no dtype, its record says fp32
    - ``SORT_SLOTS``: sort the slots of all tokens by expert; it has no dtype, its record says fp32
    - ``QUANTIZE_WEIGHTS``: codes and scales of w; the record's dtype is the format, without ``_a16``
    - ``QUANTIZE_BLOCKS``: prepared codes and scales of w and of w transposed, of one read; fp8 128x128 block
    - ``DEQUANTIZE_WEIGHTS``: w of these
    - ``MOVE_CODES``: codes from the checkpoint's layout to the prepared one, or back; its record says the format of
      these elements that comes first
    - ``LARGEST_WEIGHT``: the largest |w| of each 8 rows; its record says fp32
    """

    GATHER = "gather"
    QUANTIZE = "quantize"
    QUANTIZE_ROWS = "quantize_rows"
    QUANTIZE_COLUMNS = "quantize_columns"
    QUANTIZE_BOTH = "quantize_both"
    ORDER_CODES = "order_codes"
    ACTIVATION = "activation"
    ACTIVATION_CODES = "activation_codes"
    ACTIVATION_ROW_CODES = "activation_row_codes"
    ACTIVATION_GRAD = "activation_grad"
    ACTIVATION_GRAD_CODES = "activation_grad_codes"
    COMBINE = "combine"
    CLEAR = "clear"
    PLACE_ROWS = "place_rows"
    SORT_SLOTS = "sort_slots"
    QUANTIZE_WEIGHTS = "quantize_weights"
    QUANTIZE_BLOCKS = "quantize_blocks"
    DEQUANTIZE_WEIGHTS = "dequantize_weights"
    MOVE_CODES = "move_codes"
    LARGEST_WEIGHT = "largest_weight"


class Layout(enum.Enum):
    """The memory layout of w: ``NK`` is [E, N, K] with K contiguous, ``KN`` is [E, K, N] with N contiguous.

    Quantised weights are [E, N, K]. ``STORED`` is the checkpoint's order of codes; ``NK`` are prepared weights, in the
    order that the kernels for H100/H200 (sm_90) read (runtime/weights/prepared_layout.py). There is no ``KN``.
    """

    NK = "nk"
    KN = "kn"
    STORED = "stored"

    __hash__ = object.__hash__


PLAIN_LAYOUTS = (Layout.NK, Layout.KN)  # of w that is not quantised


class Fusion(enum.Flag):
    """Work that a kernel does in addition to the product. A bundle stores the flags' value."""

    NONE = 0
    GATHER = 1  # x is [T, K]; a row index picks each row on load
    SCATTER = 2  # y's rows are stored at a row index
    WEIGHT = 4  # each row of y is multiplied by its routing weight
    BIAS = 8  # bias[g] of [E, N] is added to each row
    SILU = 16  # y is [M, N/2]: silu(gate) * up of the product's left and right half of columns
    LOW_RANK = 32  # a LoRA adapter of rank r: u[m] @ b[g].T is added to each row, u [M, r] and b [E, N, r]
    STARTS = 64  # each expert's rows of x and y begin at a start of their own; x arrives as codes

    __hash__ = object.__hash__


class Problem(NamedTuple):
    """A grouped GEMM without its number of rows M: the key of a bundle's choices.

    N and K are the weight's for all ops: w is E matrices of N x K. ``top_k`` is 0 unless a fusion needs it.
    """

    op: Op
    dtype: DType
    E: int
    N: int
    K: int
    layout: Layout = Layout.NK
    fusion: Fusion = Fusion.NONE
    top_k: int = 0

    @property
    def transposed(self) -> Problem | None:
        """The equal problem of the other op and layout, which the same kernels compute; None if there is none.

        forward with w [E, N, K] equals dX with w [E, K, N], and forward with w [E, K, N] equals dX with w [E, N, K]:
        the memory is the same, N and K swap their names. dW, ``Fusion.SILU`` and quantised weights have no such pair.
        """
        if self.op is Op.DW or Fusion.SILU in self.fusion or self.dtype.quantised:
            return None
        op = Op.DX if self.op is Op.FORWARD else Op.FORWARD
        layout = Layout.KN if self.layout is Layout.NK else Layout.NK
        return self._replace(op=op, N=self.K, K=self.N, layout=layout)

    @property
    def canonical(self) -> Problem:
        """The problem, or its ``transposed`` if that is the one with w as [E, N, K]."""
        return (self.transposed or self) if self.layout is Layout.KN else self

    @property
    def sort_key(self) -> tuple[str, str, int, int, int, str, int, int]:
        """The order of problems in bundles and tables."""
        return (
            self.op.value,
            self.dtype.value,
            self.E,
            self.N,
            self.K,
            self.layout.value,
            self.fusion.value,
            self.top_k,
        )

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} E={self.E} N={self.N} K={self.K}"
        if self.layout is not Layout.NK:
            text += f" w={self.layout.value}"
        if self.fusion:
            text += f" fused={'+'.join(str(f.name).lower() for f in Fusion if f and f in self.fusion)}"
        return text + (f" k={self.top_k}" if self.top_k else "")


def bucket_of(M: int) -> int:
    """Return the bucket of M rows: the power of two with the ratio nearest to 1; 1 for M <= 1.

    The best kernel depends on M's logarithm. With the nearest power of two, M differs from its bucket by at most
    sqrt(2); with the next larger power it would differ by up to 2.
    """
    return 1 << (M * M).bit_length() // 2  # 2 log2 M, rounded down, and halved: runtime/api/grouped_gemm.py has it, too


def buckets_between(least: int, most: int) -> tuple[int, ...]:
    """Return all buckets from that of ``least`` rows to that of ``most`` rows, ascending."""
    first, last = bucket_of(least), bucket_of(most)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))


_TEGRA = 87


class Target(NamedTuple):
    """The capability that a cubin was compiled for. ``sm`` is 10 * major + minor.

    From sm_90 on Triton compiles ``arch_specific`` code, e.g. for ``sm_90a``, which runs on exactly that capability.
    Other code also runs on later minor revisions of its major revision. Tegra (Orin, sm_87) is the exception: its
    code and that of other GPUs are not compatible (CUDA C++ Programming Guide, Binary Compatibility).
    """

    sm: int
    arch_specific: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}{'a' if self.arch_specific else ''}"

    def runs_on(self, sm: int) -> bool:
        """Return whether a GPU of capability ``sm`` can load this code."""
        if self.arch_specific or _TEGRA in (sm, self.sm):
            return sm == self.sm
        return sm // 10 == self.sm // 10 and sm >= self.sm


class Gpu(NamedTuple):
    """A GPU that times were measured on. The driver is recorded but not compared by ``is_like``."""

    name: str
    sm_count: int
    memory_mib: int
    driver: int

    def is_like(self, other: Gpu) -> bool:
        """Return whether times on one GPU hold for the other: equal name and SM count, memory within 2 %.

        Drivers reserve different amounts of memory.
        """
        near = abs(self.memory_mib - other.memory_mib) * 50 <= max(self.memory_mib, other.memory_mib)
        return (self.name, self.sm_count) == (other.name, other.sm_count) and near


def same_gpu(a: Gpu | None, b: Gpu | None) -> bool:
    """Return whether two times can be compared: measured on like GPUs, or both modelled (None)."""
    return a is b if a is None or b is None else a.is_like(b)


def gpus_apart(a: Gpu, b: Gpu) -> float:
    """Return the distance of two GPUs of one capability, in doublings of SMs plus doublings of memory."""
    return abs(math.log2(a.sm_count / b.sm_count)) + abs(math.log2(a.memory_mib / b.memory_mib))


class LocalGpu(NamedTuple):
    """A GPU that calls run on. ``sm`` is 10 * major + minor.

    Without a GPU (``explain(..., sm=90)``) the name is empty, so that no time counts as measured on it, and the driver
    is 0, which means unknown.
    """

    sm: int
    gpu: Gpu

    def __str__(self) -> str:
        if not self.gpu.name:
            return f"any GPU of capability {self.sm // 10}.{self.sm % 10}"
        return f"{self.gpu.name} ({self.sm // 10}.{self.sm % 10}, {self.gpu.sm_count} SMs, {self.gpu.memory_mib} MiB)"


def cuda_version(number: int) -> str:
    """Return "12.8" for 12080, a version in cuDriverGetVersion's numbers."""
    return f"{number // 1000}.{number % 1000 // 10}"


_HELD_AGAINST = "held_against="  # a compile option: digests of the bundles that a build was compared with
_HELD_DIGITS = 16
_MOST_HELD = 10  # digests in that option, as an option has at most 200 characters


class Source(enum.Enum):
    """The source of a choice: measured on a GPU, or computed by the cost model, which is never called tuned."""

    MEASURED = "measured"
    MODELLED = "modelled"


class TensorMap(NamedTuple):
    """A TMA descriptor argument's encoding by the host (CUDA driver API, cuTensorMapEncodeTiled).

    ``box`` is in elements, outermost dimension first, like in the kernel's source. ``element`` and ``swizzle`` are
    values of CUtensorMapDataType and CUtensorMapSwizzle.
    """

    argument: str
    element: int
    box: tuple[int, ...]
    swizzle: int


class Variant(NamedTuple):
    """A compiled kernel's record: all facts needed to choose, load and launch its cubin.

    A cubin serves all shapes: E, M, N, K and the strides are arguments. ``alignment``, 16 or 1 byte, is assumed of all
    pointers, row strides and row lengths. ``max_experts`` is the largest E. ``arguments`` are (name, kind) in the
    kernel's order, a kind being ``ptr i32 i64 desc2 desc3 desc4 desc5``; ``abi``, the launch ABI number, defines the
    names' meanings. No choice names a variant of a ``RowOp``: it runs all calls that fit its dtype and alignment.
    """

    kernel: str
    revision: int
    abi: int
    op: Op | RowOp
    dtype: DType
    layout: Layout
    fusion: Fusion
    alignment: int
    max_experts: int
    config: tuple[tuple[str, int], ...]
    entry: str
    arguments: tuple[tuple[str, str], ...]
    tensor_maps: tuple[TensorMap, ...]
    threads: int
    shared_bytes: int
    registers: int
    spill_bytes: int
    scratch_bytes: int
    cubin_bytes: int
    cubin_sha256: bytes


class Way(enum.IntEnum):
    """A way to run a call other than by the choice's own variant. A bundle stores the member's value."""

    ROWS_FIRST = 0  # a row kernel gathers the rows of x, then a variant without a gather multiplies them
    ROWS_FIRST_BY_INDEX = 1  # ROWS_FIRST for calls that also scatter, weigh or add a bias: the variant stores by index
    FUSED_SILU = 2  # a variant with silu in its epilogue runs the product and the activation
    QUANTISED_X = 3  # x is quantised, and a variant multiplies codes by codes

    def problems(self, problem: Problem) -> tuple[Problem, ...]:
        """The problems whose variants run ``problem`` this way; () if none can."""
        bare = problem._replace(fusion=problem.fusion & ~Fusion.GATHER, top_k=0)
        if self is Way.QUANTISED_X:
            dtype = problem.dtype.with_x_quantised
            return () if dtype is None else (problem._replace(dtype=dtype),)
        if self is Way.FUSED_SILU:
            names = [name for name in (problem, problem.transposed) if name is not None and name.op is Op.FORWARD]
            kept = {Fusion.NONE: (Fusion.NONE,), Fusion.GATHER: (Fusion.GATHER, Fusion.NONE)}.get(problem.fusion, ())
            return tuple(name._replace(fusion=fusion | Fusion.SILU, top_k=0) for name in names for fusion in kept)
        if problem.fusion != Fusion.GATHER:
            return ()
        return (bare,) if self is Way.ROWS_FIRST else (bare._replace(fusion=Fusion.SCATTER),)


class PlanRow(NamedTuple):
    """A line of a choice's plan: calls of ``way`` with this ``top_k`` or more run ``variant``; None: the choice's own.

    ``top_k`` is the number of sorted rows that read each row of x, 0 if no row kernel can gather them. ``checks``: the
    line is for calls whose index must be brought into range first. If a way has no such line, its other lines are for
    these calls, too.
    """

    way: Way
    checks: bool
    top_k: int
    variant: int | None

    def __str__(self) -> str:
        runs = "the choice's own" if self.variant is None else self.variant
        return f"{self.way.name.lower()} from top_k {self.top_k}{' with a check' * self.checks}: variant {runs}"


class Choice(NamedTuple):
    """The variant chosen for a problem, a bucket of M and a GPU.

    - ``bucket``: a power of two; the choice is for the M that are nearest to it.
    - ``time_ns``: median time on the GPU, or the cost model's estimate if ``source`` is modelled. Some fusions' times
      are scaled to be comparable with the plain product's.
    - ``gpu``: index into the bundle's GPUs, None if modelled. Each GPU may have its own choice for a bucket.
    - ``torch_ns``: time of torch's grouped_mm, if it is faster by more than noise: torch then runs this cell.
    - ``plan``: the variants that run certain calls instead of ``variant``, ascending.
    """

    bucket: int
    variant: int
    source: Source
    time_ns: int
    runner_up: int | None = None
    runner_up_ns: int | None = None
    gpu: int | None = None
    torch_ns: int | None = None
    plan: tuple[PlanRow, ...] = ()

    @property
    def sort_key(self) -> tuple[int, int]:
        """The order of a problem's choices: by bucket, then the modelled choice, then GPUs. No two are equal."""
        return (self.bucket, -1 if self.gpu is None else self.gpu)

    def measured_on(self, gpus: Sequence[Gpu]) -> Gpu | None:
        """The GPU of ``gpus`` that the choice was measured on, None if it is modelled."""
        return None if self.gpu is None else gpus[self.gpu]

    def variants(self) -> list[int]:
        """The indices of all variants that the choice names: its own, its runner-up's, those in its plan."""
        named = (self.variant, self.runner_up, *(row.variant for row in self.plan))
        return [index for index in named if index is not None]


def planned(plan: Sequence[PlanRow], way: Way, top_k: int, *, checks: bool) -> int | None:
    """Return the variant that a plan names for a call of a way; None if the choice's own variant runs the call."""
    rows = [row for row in plan if row.way is way]
    if checks and any(row.checks for row in rows):
        rows = [row for row in rows if row.checks]
    else:
        rows = [row for row in rows if not row.checks]
    return next((row.variant for row in reversed(rows) if row.top_k <= top_k), None)


class Timed(NamedTuple):
    """A measured choice with the plain values of its record: variants and the GPU are indices, ``source`` is 1."""

    log2_bucket: int
    variant: int
    source: int
    time_ns: int
    runner_up: int | None
    runner_up_ns: int | None
    gpu: int


class Kernel(NamedTuple):
    """A kernel whose variants a bundle holds: its revision and the digest of its source."""

    name: str
    revision: int
    source_sha256: bytes


class Producer(NamedTuple):
    """The versions that built a bundle, and the compile options that all its variants share.

    The option ``held_against=`` is not the compiler's. It has the first digits of baseline bundles' digests: of bundles
    in use on the GPU when this bundle was measured, or whose measured choices it took over. A bundle with baselines is
    used only for the cells that it measured.
    """

    pretuned: str
    triton: str
    ptxas: str
    options: tuple[str, ...]

    @property
    def compile_options(self) -> tuple[str, ...]:
        """Return the compiler's options for a record."""
        return tuple(option for option in self.options if not option.startswith(_HELD_AGAINST))

    @property
    def held_against(self) -> tuple[str, ...]:
        """The first digits of the baseline bundles' digests, ascending."""
        lists = (option.removeprefix(_HELD_AGAINST) for option in self.options if option.startswith(_HELD_AGAINST))
        return tuple(sorted(digits for text in lists for digits in text.split(",")))

    def with_held_against(self, digests: Iterable[str]) -> Producer:
        """Return a copy with these baseline bundles; at most ten are recorded."""
        recorded = sorted({digest[:_HELD_DIGITS] for digest in digests})[:_MOST_HELD]
        option = (f"{_HELD_AGAINST}{','.join(recorded)}",) if recorded else ()
        return self._replace(options=(*self.compile_options, *option))


class Model(NamedTuple):
    """A model in one sharding that a bundle was built for, and its problems.

    ``top_k`` is the number of experts of a token, fused shared experts included: T tokens give at most T * top_k rows.
    """

    name: str
    tp: int
    ep: int
    top_k: int
    dtype: DType
    problems: tuple[Problem, ...]


class Bundle(NamedTuple):
    """A whole bundle in memory. The builder writes it, ``aot verify`` reads it.

    ``cubins[i]`` are the bytes of ``variants[i]``. ``min_driver`` is the least CUDA driver version, in
    cuDriverGetVersion's numbers: 12080 is 12.8.
    """

    target: Target
    min_driver: int
    producer: Producer
    kernels: tuple[Kernel, ...]
    gpus: tuple[Gpu, ...]
    variants: tuple[Variant, ...]
    cubins: tuple[bytes, ...]
    choices: Mapping[Problem, tuple[Choice, ...]]
    models: tuple[Model, ...]
