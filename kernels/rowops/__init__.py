"""The row kernels: their entries, arguments, flags, configs and grids, in plain Python.

A row kernel computes a ``RowOp``: it gathers, quantises, activates, combines or clears rows, or sorts slots. Its
arguments by launch ABI 1, in addition to those in kernels/entry.py:

=========================  ===================================================================
``h a da dh x y out``      device pointers to dense rows in the variant's dtype
``codes scale``            device pointers to e4m3 [M, columns] and fp32 [columns / 128, M] in rows of whole 16 bytes,
                           or fp32 [M] for a scale a row
``x_codes x_scale``        device pointers to e4m3 [rows of x, columns] and fp32 [rows of x, groups]
``row_weights dweights``   device pointers to float32 by index, or with NARROW to the variant's dtype
``index experts used``     device pointers to 32-bit words: for each row, for each slot, a single word
``places``                 device pointer to int32: each slot's row in the sorted order, -1 if it has no expert
``bias``                   device pointer to dense [E, columns] in the variant's dtype
``named``                  device pointer to a byte for each row of y, zero at first
``ids order``              device pointers, by slot: to 32-bit words, to int64 (for SORT_SLOTS ``experts`` has room
                           for whole chunks, aligned to 16 bytes)
``bounds m_sizes counts``  device pointers to int32: [E + 1], [E], [chunks, E + 1], for PLACE_ROWS [E]
``starts``                 device pointer to 32-bit words: one for each expert
``groups stride_scale_m``  int32: scales of a row of x, and how many elements are from row to row, and from one
``stride_scale_k``         to the next, and from the first row of an expert to that of the next one
``stride_scale_e``
``M columns top_k E``      int32; ``M`` counts rows, for SORT_SLOTS slots, for CLEAR entries of the index; CLEAR's
                           ``columns`` are 32-bit words of a row of any dtype; E is at most the record's max_experts
``rows index_end``         int32: rows of y; the first index that names no row
``room``                   int32: the most rows of an expert, and those from one to the next without ``starts``; for
                           ORDER_CODES ANY_ROWS if their scales have one stride
``starts_step``            int32: 0 without ``starts``, else like ``m_sizes_step``
``index_step ids_step``    int32, like ``m_sizes_step``: 1 for int32, 2 for int64
``flags``                  int32: the activation (activations.KINDS) and the flags below
``limit alpha beta``       int32: the bits of the activation's float32 numbers (``Activation.words``)
``linear_beta``
``w``                      device pointer to w [E, M, columns], rows dense, of bf16 or as the flags say
``words stored``           device pointers to codes in either layout, and in the checkpoint's alone
``scales zeros outer``     device pointers to what is beside codes, in the layout of these
``column_codes a_codes``   device pointers to e4m3 [columns of dh or x, places] and [columns, places], with the scales
``column_scale a_scale``   fp32 [places / 128, columns or columns / 128]; ``places`` is ``places_for`` of M and E
``dots``                   device pointer to fp32 [columns / 128, M]
``most``                   device pointer to int32: for each program the bits of a float32, of MOVE_CODES 1 for NaN
``step_expert step_row``   int32: from an expert of w, and from a row, to the next, in numbers
=========================  ===================================================================

The kernels of weights (``WEIGHT_OPS``) count the rows of an expert with ``M``.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping

from ...artifacts.records import DType, Fusion, Layout, Op, RowOp
from ...artifacts.tuples import NamedTuple
from ..arch import Feature, arch_of
from ..entry import Entry

# ``flags``: the activation in the lowest bits, then options. kernels/rowops/activation.py has the same values.
KIND = 7
GATED = 8
INTERLEAVED = 16
USED = 32  # ``used`` is the number of rows that belong to an expert
WEIGHTED = 64
WRITES_DH = 128
WRITES_A = 256
WRITES_DWEIGHTS = 512
# The two launches of GATHER that read each row of x once; kernels/rowops/gather_combine.py has the same values.
# NOTES is also the second launch of ACTIVATION_GRAD_CODES.
NOTES = 1024
BY_TOKEN = 2048
# Routing weights (NARROW) or their gradients have the variant's dtype; COMBINE adds a bias (BIASED).
NARROW = 4096
NARROW_DWEIGHTS = 8192
BIASED = 16384
PICKED = 32768  # an index picks QUANTIZE's rows of x; kernels/rowops/quantize.py has the same value
BLOCKS = 65536  # 128 columns share a scale of QUANTIZE_COLUMNS
# QUANTIZE_BLOCKS writes codes of w, and of w transposed; kernels/rowops/quantize_blocks.py has the same values
ALONG_K = 131072
ALONG_N = 262144
NOTED_ROWS = 256  # rows of a program in the NOTES launch
# The three launches of SORT_SLOTS; kernels/rowops/sort.py has the same values.
COUNTS = 1
ADDS = 2  # a program for SORTED_EXPERTS
PLACES = 4
# The first launch of CLEAR, and the rows of a program of the second; kernels/rowops/zero_rows.py has the same values.
NAMES = 1
CLEARED_ROWS = 64

# Flags of the weight kernels; kernels/rowops/weights.py has equal values.
FP16_WEIGHTS = 1
FP32_WEIGHTS = 2
PREPARED = 4
BACK = 8  # MOVE_CODES from the prepared layout
LOOKS = 16  # MOVE_CODES to it: for NaN among e4m3 codes

# Kernels that write codes along M, of 128 rows and 128 columns at a time; their sources are in Gluon.
ALONG_M = RowOp.QUANTIZE_COLUMNS, RowOp.QUANTIZE_BOTH, RowOp.ACTIVATION_GRAD_CODES
WEIGHT_OPS = (RowOp.QUANTIZE_WEIGHTS, RowOp.DEQUANTIZE_WEIGHTS, RowOp.MOVE_CODES, RowOp.LARGEST_WEIGHT)

_NUMBERS = ("limit", "alpha", "beta", "linear_beta")
_ARGUMENTS: dict[RowOp, tuple[tuple[str, ...], tuple[str, ...]]] = {
    RowOp.GATHER: (("x", "index", "used", "out"), ("M", "columns", "top_k", "index_step", "flags")),
    RowOp.QUANTIZE: (("x", "index", "used", "codes", "scale"), ("M", "columns", "top_k", "index_step", "flags")),
    RowOp.QUANTIZE_ROWS: (("x", "index", "used", "codes", "scale"), ("M", "columns", "top_k", "index_step", "flags")),
    RowOp.QUANTIZE_COLUMNS: (
        ("x", "index", "m_sizes", "column_codes", "column_scale"),
        ("M", "columns", "places", "E", "top_k", "index_step", "m_sizes_step", "flags"),
    ),
    RowOp.QUANTIZE_BOTH: (
        ("x", "index", "m_sizes", "column_codes", "column_scale", "codes", "scale"),
        ("M", "columns", "places", "E", "top_k", "index_step", "m_sizes_step", "flags"),
    ),
    RowOp.ORDER_CODES: (
        ("x_codes", "x_scale", "index", "used", "codes", "scale"),
        (
            "M",
            "columns",
            "groups",
            "stride_scale_m",
            "stride_scale_k",
            "stride_scale_e",
            "room",
            "top_k",
            "index_step",
            "flags",
        ),
    ),
    RowOp.ACTIVATION: (("h", "a", "used"), ("M", "columns", "flags", *_NUMBERS)),
    RowOp.ACTIVATION_CODES: (("h", "used", "codes", "scale"), ("M", "columns", "flags", *_NUMBERS)),
    RowOp.ACTIVATION_ROW_CODES: (("h", "used", "codes", "scale"), ("M", "columns", "flags", *_NUMBERS)),
    RowOp.ACTIVATION_GRAD: (
        ("h", "da", "row_weights", "index", "used", "dh", "a", "dweights"),
        ("M", "columns", "index_step", "flags", *_NUMBERS),
    ),
    RowOp.ACTIVATION_GRAD_CODES: (
        (
            *("h", "da", "row_weights", "index", "m_sizes", "column_codes", "column_scale", "codes", "scale"),
            *("a_codes", "a_scale", "dots", "dweights"),
        ),
        ("M", "columns", "places", "E", "index_step", "m_sizes_step", "flags", *_NUMBERS),
    ),
    RowOp.COMBINE: (("y", "places", "row_weights", "experts", "bias", "out"), ("M", "columns", "top_k", "flags")),
    RowOp.CLEAR: (
        ("y", "index", "m_sizes", "named"),
        ("M", "rows", "columns", "E", "index_end", "m_sizes_step", "index_step", "flags"),
    ),
    RowOp.PLACE_ROWS: (
        ("m_sizes", "starts", "index", "counts", "bounds"),
        ("M", "E", "room", "m_sizes_step", "starts_step"),
    ),
    RowOp.SORT_SLOTS: (
        ("ids", "experts", "order", "places", "bounds", "m_sizes", "counts"),
        ("M", "E", "ids_step", "flags"),
    ),
    RowOp.QUANTIZE_WEIGHTS: (
        ("w", "words", "scales", "zeros", "outer"),
        ("M", "columns", "step_expert", "step_row", "flags"),
    ),
    RowOp.QUANTIZE_BLOCKS: (
        ("w", "words", "scales", "across_words", "across_scales"),
        ("M", "columns", "step_expert", "step_row", "flags"),
    ),
    RowOp.DEQUANTIZE_WEIGHTS: (("w", "words", "scales", "zeros", "outer"), ("M", "columns", "flags")),
    RowOp.MOVE_CODES: (("stored", "words", "most"), ("M", "columns", "flags")),
    RowOp.LARGEST_WEIGHT: (("w", "most"), ("M", "columns", "step_expert", "step_row", "flags")),
}
# Element types of pointers by Triton's names, "" for the dtype.
POINTEES = dict.fromkeys(
    ("m_sizes", "starts", "index", "experts", "places", "used", "ids", "bounds", "counts"), "*i32"
) | {
    "row_weights": "*fp32",
    "scale": "*fp32",
    "x_scale": "*fp32",
    "x_codes": "*u8",
    "codes": "*u8",
    "column_codes": "*u8",
    "column_scale": "*fp32",
    "a_codes": "*u8",
    "a_scale": "*fp32",
    "dots": "*fp32",
    "across_words": "*i32",
    "across_scales": "*fp32",
    "dweights": "*fp32",
    "order": "*i64",
    "named": "*i8",
    "w": "*i16",
    "words": "*i32",
    "stored": "*u8",
    "scales": "*u8",
    "zeros": "*i8",
    "outer": "*fp32",
    "most": "*i32",
    **dict.fromkeys(("h", "a", "da", "dh", "x", "y", "out", "bias"), ""),
}
_ROW_POINTERS = ("h", "a", "da", "dh", "x", "x_codes", "y", "out", "bias", "codes", "column_codes", "a_codes")
# Bytes of a row that a thread loads at once (of h: of its gate; of combine: of each of 8 rows), and warps of a program.
_THREADS = {
    RowOp.GATHER: (32, 4),
    RowOp.ACTIVATION: (16, 4),
    RowOp.ACTIVATION_GRAD: (8, 2),
    RowOp.COMBINE: (16, 2),
    RowOp.CLEAR: (32, 4),
    RowOp.QUANTIZE: (32, 2),
    RowOp.ACTIVATION_CODES: (32, 4),
    RowOp.QUANTIZE_ROWS: (32, 4),
    RowOp.ORDER_CODES: (32, 4),
    RowOp.ACTIVATION_ROW_CODES: (16, 8),
}
# Without a limit ptxas takes 80 for bf16, and fewer programs fit an SM: 1.09 x as long on an H100 from 8,192 rows on.
# The other limits are what ptxas takes without the loop over rows; what it hoists out of the loop takes up to 96.
_MAX_REGISTERS = {
    RowOp.ACTIVATION_GRAD: 56,
    RowOp.ACTIVATION: 40,
    RowOp.ACTIVATION_CODES: 56,
    RowOp.ACTIVATION_ROW_CODES: 40,
    RowOp.QUANTIZE: 48,
    RowOp.QUANTIZE_ROWS: 40,
    RowOp.QUANTIZE_BLOCKS: 80,
    RowOp.QUANTIZE_COLUMNS: 128,
    RowOp.QUANTIZE_BOTH: 128,
    RowOp.ACTIVATION_GRAD_CODES: 128,
}
# Kernels whose programs loop until there are no more rows, so that any number of programs is right.
_LOOPS = frozenset(RowOp) - {RowOp.SORT_SLOTS, RowOp.CLEAR, RowOp.PLACE_ROWS, RowOp.QUANTIZE_BLOCKS, *WEIGHT_OPS}
# A looping kernel's programs, for each program that the GPU holds at once. A program for rows that no expert has
# costs 1 ns or more (an H200, expert_parallel); in one wave alone all would wait for the slowest SM.
WAVES = 2
# Rows that a program computes side by side; 1 for other kernels.
_ROWS = {RowOp.ACTIVATION: 4, RowOp.ACTIVATION_CODES: 8, RowOp.ACTIVATION_ROW_CODES: 2}
# Bytes of GATHER's result from which it reads each row of x once, in two launches. On an H200 two launches take as long
# as one with 117 MB, less with 134 MB, longer with 42 MB (docs/inside/trials.md, gather-by-token).
BY_TOKEN_LEAST_BYTES = 128 << 20
_BY_ROW = (
    RowOp.ACTIVATION_GRAD,
    RowOp.GATHER,
    RowOp.QUANTIZE,
    RowOp.QUANTIZE_ROWS,
    RowOp.QUANTIZE_COLUMNS,
    RowOp.QUANTIZE_BOTH,
    RowOp.ACTIVATION_GRAD_CODES,
    RowOp.QUANTIZE_BLOCKS,
    RowOp.ORDER_CODES,
    RowOp.ACTIVATION_ROW_CODES,
    RowOp.PLACE_ROWS,
    RowOp.SORT_SLOTS,
    RowOp.CLEAR,
    *WEIGHT_OPS,
)  # a program computes all columns of a row
MOST_EXPERTS = 65536  # in the records of kernels that run for any E
ANY_ROWS = (1 << 31) - 1  # the argument ``room`` of ORDER_CODES if all scales have one stride
MOST_SORTED_EXPERTS = 512  # limit of SORT_SLOTS and PLACE_ROWS
WITHOUT_DTYPE = RowOp.PLACE_ROWS, RowOp.SORT_SLOTS, RowOp.CLEAR
SORTED_EXPERTS = 32  # experts whose counts one program of SORT_SLOTS adds up

_ACTIVATION = "rowops.activation", "e47cc4745912c735d3517247e0cbf84c6073a64c8aee409275f5d547df0ffc0f"
_ACTIVATION_CODES = "rowops.activation_codes", "5ac733332768d721e718e539ec1fe1307fc97f075029d330016b48bb49731e7a"
_GATHER_COMBINE = "rowops.gather_combine", "ba7a4ed12e62976522838629b75eb79df8d6d36979dd5e50708af6e45e4e7715"
_ACTIVATION_ROW_CODES = (
    "rowops.activation_row_codes",
    "ca2831ce70cf94bbde5a7bd06351d9ad3f37586dcd3df5bf8c1a37b651c80b9c",
)
_QUANTIZE_ROWS = "rowops.quantize_rows", "bdaf8002423103005fba68d10dba3b58d06ea3fc4c353f76d24fced36356c601"
_QUANTIZE = "rowops.quantize", "feb4c75c38f4f2618066dc92d0f1b5a15e4818e5f20ba7d2d527fb901cabdd73"
_QUANTIZE_COLUMNS = "rowops.quantize_columns", "d14c5e0b5ff85ce25a10f737998fe1be97e0a3f1615ebad739a6a7708e7c2788"
_QUANTIZE_BLOCKS = "rowops.quantize_blocks", "5d74f1f8a203c4f889aa7adf9004e43644b4d0f560228704ddfd53eb7c6ed04e"
_ACTIVATION_GRAD_CODES = (
    "rowops.activation_grad_codes",
    "1a815c23b90421228bd84b87b4a438126ab66374161f586c3f1986f9568244f6",
)
_ORDER_CODES = "rowops.order_codes", "e03e0583778b02ad515b1d8e2531ca8ff03616024a68c28d9c5bbdb38cd6a098"
_SORT = "rowops.sort", "ca5611a804955fcba89a115e4794d135c438bc3d390d173e2f538cf02eae150d"
_PLACE = "rowops.place", "6585ec0db1ffbdfce77812de8531eea7866d992fe5451b55ccc95e1b487b7acf"
_WEIGHTS = "rowops.weights", "0e9cf6ae5bd5e824b3b9c855c845017c24c115d1cb642304e68771bd3f461d80"
_CLEAR = "rowops.zero_rows", "0c41f4e3da77f98aeca427848589875a5354ec9ecfbc0e1b87a858b34421826a"
ROW_OPS = (
    Entry("activation", 4, *_ACTIVATION, launched_since=4),
    Entry("activation_codes", 3, *_ACTIVATION_CODES, launched_since=3),
    Entry("activation_row_codes", 2, *_ACTIVATION_ROW_CODES, launched_since=2),
    Entry("activation_grad", 5, *_ACTIVATION, launched_since=5),
    Entry("activation_grad_codes", 1, *_ACTIVATION_GRAD_CODES, launched_since=1),
    Entry("clear", 1, *_CLEAR, launched_since=1),
    Entry("combine", 3, *_GATHER_COMBINE, launched_since=3),
    Entry("gather", 3, *_GATHER_COMBINE, launched_since=3),
    Entry("order_codes", 2, *_ORDER_CODES, launched_since=2),
    Entry("place_rows", 1, *_PLACE, launched_since=1),
    Entry("quantize", 2, *_QUANTIZE, launched_since=2),
    Entry("quantize_blocks", 1, *_QUANTIZE_BLOCKS, launched_since=1),
    Entry("quantize_both", 1, *_QUANTIZE_COLUMNS, launched_since=1),
    Entry("quantize_columns", 2, *_QUANTIZE_COLUMNS, launched_since=1),
    Entry("quantize_rows", 2, *_QUANTIZE_ROWS, launched_since=2),
    Entry("sort_slots", 2, *_SORT, launched_since=2),
    *(Entry(op.value, 3, *_WEIGHTS, launched_since=3) for op in WEIGHT_OPS),
)


class CodeOps(NamedTuple):
    """The row kernels that quantise x and activations for a dtype; K must be a multiple of ``columns``."""

    quantize: RowOp
    activation: RowOp
    columns: int


CODE_OPS: Mapping[DType, CodeOps] = {
    DType.FP8_BLOCK: CodeOps(RowOp.QUANTIZE, RowOp.ACTIVATION_CODES, 128),
    DType.FP8_CHANNEL: CodeOps(RowOp.QUANTIZE_ROWS, RowOp.ACTIVATION_ROW_CODES, 64),
}
_COLUMNS = {op: ops.columns for ops in CODE_OPS.values() for op in ops[:2]}
_COLUMNS |= {RowOp.ORDER_CODES: 64, RowOp.QUANTIZE_COLUMNS: 128, RowOp.QUANTIZE_BOTH: 128}
_COLUMNS |= {RowOp.ACTIVATION_GRAD_CODES: 128}
MAKES_CODES = (*_COLUMNS, RowOp.QUANTIZE_BLOCKS)


class Block(NamedTuple):
    """The config of a row kernel: a program computes ``block`` columns (slots, entries) at a time."""

    block: int
    num_warps: int

    def __str__(self) -> str:
        return f"block {self.block} w{self.num_warps}"

    def pairs(self) -> tuple[tuple[str, int], ...]:
        """Return the config in a bundle's form."""
        return (("block", self.block), ("num_warps", self.num_warps))

    @classmethod
    def from_pairs(cls, pairs: tuple[tuple[str, int], ...]) -> Block:
        """Decode ``pairs``.

        Raises
        ------
        ValueError
            if they are not a block's.
        """
        values = dict(pairs)
        if sorted(values) != ["block", "num_warps"]:
            raise ValueError(f"config has the fields {sorted(values)}, wanted ['block', 'num_warps']")
        if not 1 <= values["block"] <= 65536:
            raise ValueError(f"block is {values['block']}, wanted 1 to 65536")
        return cls(**values)


class RowOpSpec(NamedTuple):
    """A variant of a row kernel before it is compiled. ``spec.Spec`` is a GEMM's."""

    op: RowOp
    dtype: DType
    alignment: int = 16

    @property
    def config(self) -> Block:
        """The config of the kernel's program; for SORT_SLOTS a slot for each thread."""
        if self.op is RowOp.SORT_SLOTS:
            return Block(256, 8)
        if self.op is RowOp.PLACE_ROWS:
            return Block(512, 4)
        if self.op in (*ALONG_M, RowOp.QUANTIZE_BLOCKS):
            return Block(128, 8)
        if self.op in WEIGHT_OPS:
            tile = tile_of(self.op, self.dtype)
            return Block(tile.columns, tile.num_warps)
        thread_bytes, warps = _THREADS[self.op]
        rows = rows_at_once(self.op)
        return Block(32 * warps * thread_bytes // self.dtype.itemsize // rows, warps)

    @property
    def max_registers(self) -> int | None:
        """The most registers of a thread that the compiler may use; None for any number."""
        if self.op is RowOp.ACTIVATION_GRAD and self.alignment == 1:
            return None  # it would spill
        return _MAX_REGISTERS.get(self.op)

    @property
    def layout(self) -> Layout:
        """The layout in its record, which says nothing: row kernels exist for no layout."""
        return Layout.NK

    @property
    def fusion(self) -> Fusion:
        """The fusion in its record, which says nothing: row kernels multiply no matrices."""
        return Fusion.NONE

    @property
    def max_experts(self) -> int:
        """The most experts; any number for kernels that don't count them."""
        return MOST_SORTED_EXPERTS if self.op in (RowOp.PLACE_ROWS, RowOp.SORT_SLOTS) else MOST_EXPERTS

    def __str__(self) -> str:
        return f"{self.op.value} {self.dtype.value} {self.config}" + (" unaligned" if self.alignment == 1 else "")


def specs(
    dtypes: tuple[DType, ...], ops: frozenset[Op], *, of_codes: Collection[DType] | None = None
) -> tuple[RowOpSpec, ...]:
    """Return the row kernels that a layer with these GEMMs needs, aligned and unaligned.

    Kernels that quantise x are for the dtypes ``of_codes``, or for all quantised ``dtypes`` if it is None. Kernels
    without a dtype are listed once: PLACE_ROWS and SORT_SLOTS unaligned, CLEAR aligned.
    """
    row_ops = [RowOp.COMBINE] if ops else []
    row_ops += [RowOp.ACTIVATION] if Op.FORWARD in ops else []
    row_ops += [RowOp.ACTIVATION_GRAD] if ops & {Op.DX, Op.DW} else []
    row_ops += [RowOp.GATHER] if ops else []
    kinds = dict.fromkeys(dtype_of(dtype) for dtype in dtypes)
    code_ops = [pair for dtype, pair in CODE_OPS.items() if dtype in (dtypes if of_codes is None else of_codes)]
    variants = [RowOpSpec(op, dtype, alignment) for op in row_ops for dtype in kinds for alignment in (16, 1)]
    variants += [RowOpSpec(pair.quantize, DType.BF16) for pair in code_ops]
    variants += [RowOpSpec(RowOp.ORDER_CODES, DType.BF16)] if code_ops and Op.FORWARD in ops else []
    variants += [RowOpSpec(pair.activation, DType.BF16) for pair in code_ops] if Op.FORWARD in ops else []
    variants += [RowOpSpec(op, DType.FP32, 1) for op in (RowOp.PLACE_ROWS, RowOp.SORT_SLOTS)] if ops else []
    return (*variants, *([RowOpSpec(RowOp.CLEAR, DType.FP32)] if ops & {Op.FORWARD, Op.DX} else []))


class WeightTile(NamedTuple):
    """The tile that a program of a kernel of weights does, with ``num_warps`` warps."""

    rows: int
    columns: int
    num_warps: int


def tile_of(op: RowOp, dtype: DType) -> WeightTile:
    """Return the tile of a weight kernel. With a scale a row, and for LARGEST_WEIGHT, a program reads whole rows."""
    # Best of 4 to 8 tiles each (an H200, both weights of a Qwen3-30B layer).
    if op is RowOp.LARGEST_WEIGHT:
        return WeightTile(8, 256, 4)
    elements = dtype.precision.w
    scale = elements.scale
    if scale is None:
        raise AssertionError(f"{dtype.value} has no scale")
    if op is RowOp.MOVE_CODES:
        return WeightTile(32, 128, 4) if elements.bits == 8 else WeightTile(64, 256, 4)
    if op is RowOp.QUANTIZE_WEIGHTS and scale.name == "fp32":
        return WeightTile(scale.rows, scale.columns, 8) if scale.columns else WeightTile(4, 512, 4)
    return WeightTile(64 if op is RowOp.QUANTIZE_WEIGHTS and elements.bits == 4 else 32, 128, 4)


def tiles(spec: RowOpSpec, E: int, N: int, K: int) -> int:
    """The programs of a kernel of weights for w [E, N, K]: what its launch says as rows."""
    tile = tile_of(spec.op, spec.dtype)
    whole = spec.op is RowOp.LARGEST_WEIGHT or (
        spec.op is RowOp.QUANTIZE_WEIGHTS and _scale_of(spec.dtype) == _SCALES.index("row")
    )
    return E * -(-N // tile.rows) * (1 if whole else -(-K // tile.columns))


_ELEMENTS = ("e4m3", "e2m1", "int4")  # names of the values of ELEMENTS and SCALE in kernels/rowops/weights.py
_SCALES = ("block", "row", "e8m0", "e4m3", "bf16", "zero")
# (codes, scales) that these kernels quantise: those of ``quantise`` in runtime/weights/codes.py.
_RULES = {("e4m3", "fp32"), ("e4m3", "e8m0"), ("e2m1", "e8m0"), ("e2m1", "e4m3"), ("int4", "bf16")}


def _scale_of(dtype: DType) -> int:
    scale = dtype.precision.w.scale
    if scale is None:
        raise AssertionError(f"{dtype.value} has no scale")
    if scale.name == "fp32":
        return _SCALES.index("block" if scale.columns else "row")
    return _SCALES.index("zero" if scale.zero_bits else scale.name)


def _format_constants(spec: RowOpSpec, sm: int) -> dict[str, int]:
    """The constants that a kernel of weights is compiled for."""
    tile = tile_of(spec.op, spec.dtype)
    of_tile = {"ROWS": tile.rows, "BLOCK": tile.columns}
    if spec.op is RowOp.LARGEST_WEIGHT:
        return of_tile
    elements = spec.dtype.precision.w
    of_tile = {"ELEMENTS": _ELEMENTS.index(elements.name), **of_tile}
    if spec.op is RowOp.MOVE_CODES or elements.scale is None:
        return of_tile
    group = 0 if elements.scale.name == "fp32" else elements.scale.columns
    first = {"ELEMENTS": of_tile.pop("ELEMENTS"), "SCALE": _scale_of(spec.dtype), "GROUP": group}
    if spec.op is RowOp.QUANTIZE_WEIGHTS:
        # These GPUs convert float32 to e4m3 in one instruction.
        first["CONVERTS"] = int(bool(sm) and arch_of(sm).has(Feature.FP8))
    return first | of_tile


def weight_specs(dtypes: Collection[DType]) -> tuple[RowOpSpec, ...]:
    """Return the specs of the weight kernels for these quantised dtypes."""
    weights = [RowOpSpec(op, dtype_of(dtype, op)) for op in WEIGHT_OPS for dtype in dtypes if has_weight_kernels(dtype)]
    return tuple(dict.fromkeys(weights))


def training_specs() -> tuple[RowOpSpec, ...]:
    """The row kernels of fp8 training, which convert to e4m3 in hardware: sm_89 and later."""
    return tuple(RowOpSpec(op, DType.BF16) for op in (*ALONG_M, RowOp.QUANTIZE_BLOCKS))


def has_weight_kernels(dtype: DType) -> bool:
    """Return whether kernels/rowops/weights.py has a rule for a dtype's codes with its scales; else torch writes w."""
    elements = dtype.precision.w
    return elements.scale is not None and (elements.name, elements.scale.name) in _RULES


_FIRST_OF = {"e4m3": DType.FP8_BLOCK, "e2m1": DType.MXFP4, "int4": DType.INT4_G32}


def dtype_of(dtype: DType, op: RowOp | None = None) -> DType:
    """Return the dtype of the row kernels for GEMMs of ``dtype``: fp32 for tf32, bf16 for quantised weights.

    Row kernels without a dtype are recorded as fp32. Kernels of weights have the format, MOVE_CODES the first of its
    elements.
    """
    if op in WEIGHT_OPS and dtype.quantised and op is not RowOp.LARGEST_WEIGHT:
        return _FIRST_OF[dtype.precision.w.name] if op is RowOp.MOVE_CODES else DType(dtype.value.removesuffix("_a16"))
    if dtype is DType.TF32 or op in WITHOUT_DTYPE or op is RowOp.LARGEST_WEIGHT:
        return DType.FP32
    return DType.BF16 if dtype.quantised else dtype


# The dtypes that a record of a kernel of weights can have.
WEIGHT_DTYPES: Mapping[RowOp, frozenset[DType]] = {
    op: frozenset(dtype_of(dtype, op) for dtype in DType if has_weight_kernels(dtype)) for op in WEIGHT_OPS
}


def arguments(op: RowOp) -> tuple[tuple[str, str], ...]:
    """Return (name, kind) of all arguments in the kernel's order."""
    pointers, numbers = _ARGUMENTS[op]
    return (*((name, "ptr") for name in pointers), *((name, "i32") for name in numbers))


def divisibility(spec: RowOpSpec) -> dict[str, int]:
    """Return what the compiler may assume, like ``registry.divisibility``. SORT_SLOTS' ``experts`` is new memory."""
    if spec.op is RowOp.SORT_SLOTS:
        return {"experts": 16}
    if spec.alignment == 1 or spec.op is RowOp.PLACE_ROWS:  # (which has no columns)
        return {}
    if spec.op in WEIGHT_OPS:
        whole = {"w": 16, "words": 16, "stored": 16, "scales": 16, "columns": 16, "step_expert": 16, "step_row": 16}
        return {name: whole[name] for name, _ in arguments(spec.op) if name in whole}
    if spec.op is RowOp.QUANTIZE_BLOCKS:
        whole = {"w": 16, "words": 16, "across_words": 16, "columns": 128, "M": 128, "step_row": 16, "step_expert": 16}
        return whole
    pointers, _ = _ARGUMENTS[spec.op]
    rows = dict.fromkeys((name for name in pointers if name in _ROW_POINTERS), spec.alignment)
    elements = _COLUMNS.get(spec.op, spec.alignment // spec.dtype.itemsize)
    if spec.op in ALONG_M:
        rows |= {"places": 128}
    return rows | {"columns": elements}


def constants(spec: RowOpSpec, sm: int = 0) -> dict[str, int]:
    """Return the kernel's compile-time arguments for a capability; for 0 the arguments that any GPU can run."""
    if spec.op in WEIGHT_OPS:
        return _format_constants(spec, sm)
    rows = {"ROWS": _ROWS[spec.op]} if spec.op in _ROWS else {}
    return {"BLOCK": spec.config.block} | rows


def rows_at_once(op: RowOp) -> int:
    """Return the rows that a program computes side by side."""
    return _ROWS.get(op, 1)


def by_token(M: int, row_bytes: int, slots: int, top_k: int) -> bool:
    """Return whether GATHER reads each row of x only once, which takes a second launch.

    It does not if most of the ``slots``, ``top_k`` for each row of x, are missing in the index of M rows.
    """
    return top_k > 1 and M * row_bytes >= BY_TOKEN_LEAST_BYTES and 0 < slots <= 2 * M


def programs(op: RowOp, M: int, columns: int, block: int, rows: int = 1) -> int:
    """Return the programs that do a launch's work at once: one for ``rows`` rows, or for each block of their columns.

    ACTIVATION_ROW_CODES has a program for each row if rows are wider than a block. For PLACE_ROWS, SORT_SLOTS, CLEAR,
    kernels of weights, and GATHER in two launches, the caller passes the number of programs as M.
    """
    if op is RowOp.ACTIVATION_ROW_CODES and columns > block:
        rows = 1
    return -(-M // rows) * (1 if op in _BY_ROW else -(-columns // block))


def most_programs(op: RowOp, held: int) -> int | None:
    """The most programs of a launch on a GPU that holds ``held`` of them at once; None for any number.

    Programs of kernels that loop take further rows, if there are any.
    """
    return WAVES * held if op in _LOOPS else None
