"""What a bundle is made of: the nouns that every layer shares.

Letters, everywhere: E experts, M rows, N output columns, K reduction, T tokens, k = top_k.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, replace


class Op(enum.Enum):
    """One of the three grouped GEMMs of an MoE layer.

    - ``FORWARD``: y[g] = x[g] @ w[g].T
    - ``DX``: dx[g] = dy[g] @ w[g]
    - ``DW``: dw[g] = dy[g].T @ x[g]
    """

    FORWARD = "forward"
    DX = "dX"
    DW = "dW"


class Pass(enum.Enum):
    """One of the passes over rows around the grouped GEMMs: no product, any number of rows and columns.

    - ``GATHER``: out[i] = x[token of row i]
    - ``ACTIVATION``: a[i] = act(h[i])
    - ``ACTIVATION_GRAD``: dh of a's gradient, and what the routing weights take part in
    - ``COMBINE``: out[t] = sum over the slots s of token t of y[t, s]
    - ``CLEAR``: y[r] = 0 for the rows r that no index names; of no dtype, its record says fp32
    - ``SORT_SLOTS``: the slots of all tokens in the order of their experts; of no dtype, its record says fp32
    """

    GATHER = "gather"
    ACTIVATION = "activation"
    ACTIVATION_GRAD = "activation_grad"
    COMBINE = "combine"
    CLEAR = "clear"
    SORT_SLOTS = "sort_slots"


class DType(enum.Enum):
    """Element type of the operands and the result; ``TF32`` is fp32 in memory, multiplied in tf32."""

    BF16 = "bf16"
    FP16 = "fp16"
    FP32 = "fp32"
    TF32 = "tf32"

    @property
    def itemsize(self) -> int:
        """Bytes of one element in memory."""
        return 2 if self in (DType.BF16, DType.FP16) else 4


class Layout(enum.Enum):
    """How w lies in memory: ``NK`` is [E, N, K] with K contiguous, ``KN`` is [E, K, N] with N contiguous."""

    NK = "nk"
    KN = "kn"


class Fusion(enum.Flag):
    """What a kernel does beside the product; the value is what a bundle stores."""

    NONE = 0
    GATHER = 1  # x is [T, K]; a row index picks each row on load
    SCATTER = 2  # y's rows are stored at a row index
    WEIGHT = 4  # each row of y is multiplied by its routing weight
    BIAS = 8  # bias[g] of [E, N] is added to each row
    SILU = 16  # y is [M, N/2]: silu(gate) * up, the product's left and right half of columns


class Source(enum.Enum):
    """Where a choice comes from. A modelled choice is never called tuned."""

    MEASURED = "measured"
    MODELLED = "modelled"


@dataclass(frozen=True, slots=True)
class Problem:
    """What is computed, but for M: the key of a bundle's choices.

    N and K are those of the weight, whatever the op: w is E matrices of N x K (``Layout.NK``).
    ``top_k`` is 0 unless a fusion needs it.
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
    def twin(self) -> Problem | None:
        """The same product by its other name, which the same code computes; None where there is none.

        A forward of w [E, K, N] and dX of a w [E, N, K] multiply by the same memory, N of the one being K of the other;
        so do a forward of [E, N, K] and dX of [E, K, N]. dW has no other name, nor has what is of the forward alone
        (``Fusion.SILU``).
        """
        if self.op is Op.DW or Fusion.SILU in self.fusion:
            return None
        op = Op.DX if self.op is Op.FORWARD else Op.FORWARD
        layout = Layout.KN if self.layout is Layout.NK else Layout.NK
        return replace(self, op=op, N=self.K, K=self.N, layout=layout)

    @property
    def with_w_nk(self) -> Problem:
        """The name that has w as [E, N, K], of the two where there are two."""
        return (self.twin or self) if self.layout is Layout.KN else self

    @property
    def sort_key(self) -> tuple[str, str, int, int, int, str, int, int]:
        """The one order of problems: in a bundle, a plan, a table."""
        return (self.op.value, self.dtype.value, self.E, self.N, self.K,
                self.layout.value, self.fusion.value, self.top_k)  # fmt: skip

    def __str__(self) -> str:
        text = f"{self.op.value} {self.dtype.value} E={self.E} N={self.N} K={self.K}"
        if self.layout is not Layout.NK:
            text += f" w={self.layout.value}"
        if self.fusion:
            text += f" fused={'+'.join(str(f.name).lower() for f in Fusion if f and f in self.fusion)}"
        return text + (f" k={self.top_k}" if self.top_k else "")


@dataclass(frozen=True, slots=True)
class Target:
    """The capability a cubin was compiled for.

    ``sm`` is 10 * major + minor. From 9.0 up Triton compiles for ``sm_90a`` and the like:
    ``arch_specific`` code, which runs on exactly that capability. Other code also runs on
    later minor revisions of the same major one.
    """

    sm: int
    arch_specific: bool

    def __str__(self) -> str:
        return f"sm_{self.sm}{'a' if self.arch_specific else ''}"

    def runs_on(self, sm: int) -> bool:
        """Whether a GPU of capability ``sm`` can load this code."""
        if self.arch_specific:
            return sm == self.sm
        return sm // 10 == self.sm // 10 and sm >= self.sm


@dataclass(frozen=True, slots=True)
class Gpu:
    """The GPU a time was measured on. The driver is recorded, and is no part of the identity."""

    name: str
    sm_count: int
    memory_mib: int
    driver: int

    def is_like(self, other: Gpu) -> bool:
        """Whether times of one hold for the other: name, SM count, memory (to 2 %: drivers reserve differently)."""
        near = abs(self.memory_mib - other.memory_mib) * 50 <= max(self.memory_mib, other.memory_mib)
        return (self.name, self.sm_count) == (other.name, other.sm_count) and near


@dataclass(frozen=True, slots=True)
class TensorMap:
    """How the host encodes one TMA descriptor argument (CUDA driver API, cuTensorMapEncodeTiled).

    ``box`` is in elements, outermost dimension first, as in the kernel's source;
    ``element`` and ``swizzle`` are values of CUtensorMapDataType and CUtensorMapSwizzle.
    """

    argument: str
    element: int
    box: tuple[int, ...]
    swizzle: int


@dataclass(frozen=True, slots=True)
class Variant:
    """One cubin, and all that is needed to choose, load and launch it.

    It is agnostic of shape: N, K, E, M and the strides are arguments. ``alignment`` is what the
    kernel assumes, in bytes, of every pointer, row stride and row length (16, or 1 for nothing);
    ``max_experts`` is the largest E. ``arguments`` are (name, kind) in the kernel's order, kind one
    of ``ptr i32 i64 desc2 desc3 desc4 desc5``; the launch ABI number ``abi`` fixes what the names mean.
    That of a ``Pass`` is named by no choice: it runs whatever its dtype and alignment fit.
    """

    kernel: str
    revision: int
    abi: int
    op: Op | Pass
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


@dataclass(frozen=True, slots=True)
class Choice:
    """(problem, bucket) -> variant. ``bucket`` is a power of two, for the M that are nearest to it.

    ``time_ns`` is the median measured on ``gpu`` (an index into the bundle's GPUs), of some forms brought to the plain
    product's clock, or the cost model's estimate where ``source`` is modelled (``gpu`` is then None).
    """

    bucket: int
    variant: int
    source: Source
    time_ns: int
    runner_up: int | None = None
    runner_up_ns: int | None = None
    gpu: int | None = None


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel whose variants a bundle holds: its revision and the sha256 of its source text."""

    name: str
    revision: int
    source_sha256: bytes


@dataclass(frozen=True, slots=True)
class Producer:
    """What made a bundle: versions, and the compile options that every variant shares."""

    pretuned: str
    triton: str
    ptxas: str
    options: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Model:
    """A model (one sharding of it) that a bundle was built for, and its problems.

    ``top_k`` experts see each token, shared ones that are fused included: T tokens make at most T * top_k rows.
    """

    name: str
    tp: int
    ep: int
    top_k: int
    dtype: DType
    problems: tuple[Problem, ...]


@dataclass(frozen=True, slots=True)
class Bundle:
    """A whole bundle in memory: what the builder writes and ``verify`` reads.

    ``cubins[i]`` are the bytes of ``variants[i]``. ``min_driver`` is the least CUDA driver
    version, as cuDriverGetVersion counts (12080 is 12.8).
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


def bucket_of(M: int) -> int:
    """The bucket that M rows fall in: the power of two that M is nearest to, by their ratio (1 for M <= 1).

    What is best changes with M's logarithm: of the next larger one's choice the half would be made for twice as many
    rows, of the nearest one's none for more than sqrt 2 times.
    """
    return 1 << (M * M).bit_length() // 2  # 2 log2 M, rounded down, and halved: runtime/ops.py has it, too


def buckets_between(least: int, most: int) -> tuple[int, ...]:
    """Every bucket from that of ``least`` rows to that of ``most``, ascending."""
    first, last = bucket_of(least), bucket_of(most)
    return tuple(1 << power for power in range(first.bit_length() - 1, last.bit_length()))
