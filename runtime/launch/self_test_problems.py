"""Small problems that test a kernel on a GPU: its results are compared with torch's on the host.

Each problem shows what a kernel of its kind can get wrong. It has experts with several tiles of rows, with one row and
with none, a row of NaN, no whole tile, rows of no expert, and memory around the result that has to stay as it is.
"""

from __future__ import annotations

import contextlib
import itertools
import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeAlias

import torch

from ...artifacts.records import PRECISIONS, DType, Fusion, Layout, Op, RowOp, Scale, Variant, dtypes_of
from ...artifacts.tuples import NamedTuple
from ...kernels import reference, rowops
from ...kernels.activations import KINDS, Activation
from ...kernels.hopper_w8a8_block import ADDS, FP32, places_for, scale_columns
from ...kernels.spec import takes_codes_of_x
from ..driver import cuda
from ..driver.cuda import Unfinished
from ..driver.rowops import RowOpLauncher
from ..weights import fp8_codes
from ..weights.expert_weights import ExpertWeights
from ..weights.prepared_layout import K_ORDER, ORDERS
from ..weights.row_codes import codes_of_rows, values_of_rows, values_on_load
from ..weights.writing import empty
from . import gemm

UNTOUCHED = 96.0  # fills results beforehand: exact in every dtype, and never a problem's result
_ANY = -96.0  # expected value of elements that may hold anything
_LONGEST_S = 30.0  # limit of a test's time: other processes may be using the GPU
_LONGEST_SLEEP_S = 0.5  # a wait's own time: a longer gap means that the process was stopped
_QUANTISED = 0.13  # neighbouring codes differ by an eighth
_ROUNDING = {DType.FP16: 2e-3, DType.FP32: 1e-4, DType.TF32: 4e-3}
_TORCH = dict.fromkeys(DType, torch.bfloat16) | {  # the dtype of x and y
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
}

_Check: TypeAlias = "tuple[str, torch.Tensor, torch.Tensor, float]"  # (name, got, wanted, largest allowed difference)
_Checks: TypeAlias = "Iterator[_Check]"  # each is compared before the next launch


class TrialPlace(NamedTuple):
    """Where a test runs: a GPU's memory and a stream of its own; ``wait`` waits for all that was launched."""

    device: torch.device
    stream: int
    wait: Callable[[], None]

    def put(self, host: torch.Tensor, *, aligned: bool = True) -> torch.Tensor:
        """Return a dense copy on the device; unaligned it begins an element later than it would."""
        flat = torch.empty(host.numel() + 1, dtype=host.dtype, device=self.device)
        placed = flat[not aligned :][: host.numel()].view(host.shape)
        placed.copy_(host)
        return placed


@contextlib.contextmanager
def trial_place(device: int) -> Iterator[TrialPlace]:
    """A GPU's memory and a stream of its own, also while another stream is captured."""
    with cuda.relaxed(device), torch.cuda.device(device), torch.no_grad():
        stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]

        def wait() -> None:
            done = torch.cuda.Event()  # type: ignore[no-untyped-call]
            done.record(stream)
            waited, last = 0.0, time.monotonic()
            while not done.query():  # type: ignore[no-untyped-call]
                if waited > _LONGEST_S:
                    raise Unfinished(f"what was launched did not end within {_LONGEST_S:.0f} s")
                time.sleep(50e-6)
                now = time.monotonic()
                waited, last = waited + min(now - last, _LONGEST_SLEEP_S), now

        with torch.cuda.stream(stream):
            yield TrialPlace(torch.device("cuda", device), stream.cuda_stream, wait)


def trial(kernel: gemm.LoadedKernel, here: TrialPlace) -> str | None:
    """Run a kernel on its small problems; return its fault in words, None if it is right.

    Raises
    ------
    CudaError
        where the driver refuses a launch, or what was launched does not end.
    """
    variant = kernel.variant
    if isinstance(variant.op, RowOp):
        checks, above = _ROW_KERNELS[variant.op](_RowKernel(variant, kernel.function, variant.op, here)), 0
    else:
        run = _weight if variant.op is Op.DW else _in_place if variant.fusion is Fusion.STARTS else _rows
        checks, above = run(kernel, here), 1
    for what, got, want, most in checks:
        here.wait()
        wrong = _off(got.cpu().float(), want.float(), most, above)
        if wrong:
            return f"{what}{wrong}"
    return None


def _off(got: torch.Tensor, want: torch.Tensor, most: float, above: int) -> str | None:
    """The first element of ``got`` that is not what is wanted, in words; None if all are.

    ``above`` of the rows come before the result's first. An element may be off by ``most`` times (its size + the root
    mean square of its row). Where ``want`` is NaN, NaN is wanted; where it is untouched, nothing may have been stored.
    """
    free = want == _ANY
    untouched = want == UNTOUCHED
    counts = ~untouched & ~free & ~want.isnan()
    squares = torch.where(counts, want, 0.0).square().sum(-1, keepdim=True)
    scale = (squares / counts.sum(-1, keepdim=True).clamp(min=1)).sqrt() + want.abs()
    near = (got - want).abs() <= most * scale
    right = torch.where(untouched, got == want, near | (got.isnan() & want.isnan())) | free
    if bool(right.all()):
        return None
    wrong = (~right).nonzero()
    at = tuple(wrong[0].tolist())
    place = ", ".join(map(str, (at[0] - above, *at[1:])))
    stored = "left as it was" if bool(untouched[at]) else f"{float(want[at]):.4g}"
    return f"[{place}] is {float(got[at]):.4g}, wanted {stored} ({len(wrong)} of {want.numel()} elements are wrong)"


class _Draw:
    """Random operands, equal in every process, on the host. torch's global generator is not used."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(11)

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, N(0, 1)."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, *shape: int) -> torch.Tensor:
        """Return int32 numbers from low to high - 1."""
        return torch.randint(low, high, shape, generator=self._generator, dtype=torch.int32, device="cpu")

    def order(self, count: int) -> torch.Tensor:
        """int32 [count]: a permutation."""
        return torch.randperm(count, generator=self._generator, dtype=torch.int64, device="cpu").to(torch.int32)


def _full(*shape: int, dtype: torch.dtype = torch.float32, value: float = UNTOUCHED) -> torch.Tensor:
    return torch.full(shape, value, dtype=dtype, device="cpu")


def _most(dtype: DType) -> float:
    """The largest error that a result of this dtype may have."""
    return 3e-2 if dtype.quantised else _ROUNDING.get(dtype, 1.6e-2)


# The GEMMs

_COUNTS = torch.tensor((37, 0, 300, 1, 2, 24), dtype=torch.int32, device="cpu")  # rows of each expert
_E, _USED = 6, 364
_M, _TOP_K = 370, 2  # M: the last 6 rows belong to no expert; sorted rows for each row of a gathered x
_NAN_ROW, _NAN_TOKEN = 338, 100  # NaN: the first row of the fifth expert; a row of a gathered x
_ROOM = 304  # rows from an expert's first row to the next expert's, in problems with gaps
_RANK = 72  # rank of a low-rank part: more than a step of a reduction, but no whole number of steps
_MOVED = Fusion.WEIGHT | Fusion.BIAS
_CALLS = {
    Fusion.NONE: ((Fusion.NONE, False), (Fusion.NONE, True)),
    Fusion.SCATTER: ((Fusion.BIAS, True), (Fusion.SCATTER, True), (Fusion.SCATTER | _MOVED, False)),
    Fusion.GATHER: ((Fusion.GATHER, False), (Fusion.GATHER | Fusion.SCATTER | _MOVED, True)),
    Fusion.SILU: ((Fusion.SILU, False),),
    Fusion.SILU | Fusion.GATHER: ((Fusion.SILU | Fusion.GATHER, False),),
    Fusion.LOW_RANK: ((Fusion.LOW_RANK, False), (Fusion.LOW_RANK, True)),
    Fusion.LOW_RANK | Fusion.GATHER: ((Fusion.LOW_RANK | Fusion.GATHER | Fusion.BIAS, False),),
}  # by a kernel's fusion: the (fusions, zero_tail) of calls that use the kernel


class _Operands(NamedTuple):
    """x [M, reduction] and w on the GPU, and their values in float32 on the host; w's are [E, columns, reduction]."""

    x: torch.Tensor
    w: torch.Tensor | ExpertWeights
    x_values: torch.Tensor
    w_values: torch.Tensor
    w_kn: bool
    scale: torch.Tensor | None = None  # x's scales, if x is quantised


def _x(draw: _Draw, reduction: int) -> torch.Tensor:
    """x [M, reduction], N(0, 1). Rows of no expert, and one row of an expert, are NaN."""
    x = draw.normal(_M, reduction)
    x[_NAN_ROW] = x[_USED:] = float("nan")
    return x


def _operands(variant: Variant, here: TrialPlace) -> _Operands:
    draw = _Draw()
    aligned, dtype = variant.alignment > 1, _TORCH[variant.dtype]
    if variant.dtype.quantised:
        return _quantised_operands(variant, draw, here)
    columns, reduction = (272, 200) if aligned else (134, 67)
    kn = (variant.layout is Layout.KN) == (variant.op is Op.FORWARD)
    x = _x(draw, reduction)
    x[_NAN_TOKEN] = float("nan")
    w = (draw.normal(_E, columns, reduction) * reduction**-0.5).to(dtype)
    placed = here.put(w.transpose(1, 2).contiguous() if kn else w, aligned=aligned)
    return _Operands(here.put(x.to(dtype), aligned=aligned), placed, x.to(dtype).float(), w.float(), kn)


def _quantised_operands(variant: Variant, draw: _Draw, here: TrialPlace) -> _Operands:
    dtype, ordered = variant.dtype, variant.layout is not Layout.STORED
    N, K = (256, 256) if ordered else (272, 224) if variant.alignment > 1 else (150, 74)
    format = next(name for name in PRECISIONS if dtype in dtypes_of(name))
    w = ExpertWeights.quantize(draw.normal(_E, N, K) * K**-0.5, format)
    w_values = w.dequantize(torch.float32)
    w_values = w_values.transpose(1, 2) if variant.op is Op.DX else w_values
    placed = (w.prepare() if ordered else w).to(here.device)
    x = _x(draw, w_values.shape[2])
    x[_NAN_TOKEN] = float("nan")
    x = x.bfloat16()
    if not takes_codes_of_x(dtype, variant.layout):
        # Each number is moved towards its code: either code would be right for a number half way between two.
        x = x.float().lerp(values_on_load(x, dtype), 0.5).bfloat16()
        there = here.put(x, aligned=variant.alignment > 1)
        return _Operands(there, placed, values_on_load(x, dtype), w_values, variant.op is Op.DX)
    if dtype.precision.x.scale is None:
        raise AssertionError(f"{dtype.value} does not quantise x")
    codes, scale = codes_of_rows(x, dtype.precision.x.scale)
    x_values, there = values_of_rows(codes, scale, slice(0, _M)), here.put(codes.view(torch.uint8))
    return _Operands(there, placed, x_values, w_values, False, here.put(scale))


def _launched(
    variant: Variant, here: TrialPlace, launch: Any, rows: int, columns: int, **words: torch.Tensor | int
) -> torch.Tensor:
    """The result of a launch, with a row of memory before it and a row after it."""
    placed = here.put(_full(rows + 2, columns, dtype=_TORCH[variant.dtype]), aligned=variant.alignment > 1)
    m_sizes, addresses = here.put(_COUNTS), _addresses({"M": _M} | words)
    for _ in range(2):  # twice, as the counter must be zero again
        launch(placed[1:].data_ptr(), m_sizes.data_ptr(), here.stream, **addresses)
    return placed


def _addresses(words: dict[str, Any]) -> dict[str, int]:
    return {name: word if isinstance(word, int) else word.data_ptr() for name, word in words.items()}


def _rows(kernel: gemm.LoadedKernel, here: TrialPlace) -> _Checks:
    """y, and the memory around it."""
    variant, on = kernel.variant, _operands(kernel.variant, here)
    biased = Fusion.BIAS if variant.dtype.quantised and variant.fusion is Fusion.LOW_RANK else Fusion.NONE
    for fusion, zero_tail in _CALLS[variant.fusion]:
        yield _call(kernel, here, on, fusion | biased, zero_tail)


def _call(kernel: gemm.LoadedKernel, here: TrialPlace, on: _Operands, fusion: Fusion, zero_tail: bool) -> _Check:
    variant, draw, dtype = kernel.variant, _Draw(), _TORCH[kernel.variant.dtype]
    gathers, scatters, silu, low_rank, weighted, biased = (
        part in fusion
        for part in (Fusion.GATHER, Fusion.SCATTER, Fusion.SILU, Fusion.LOW_RANK, Fusion.WEIGHT, Fusion.BIAS)
    )
    columns, reduction = on.w_values.shape[1:]
    wide, top_k = columns // 2 if silu else columns, _TOP_K if gathers else 1
    index, weights, bias = draw.order(_M), draw.normal(_M), draw.normal(_E, columns).to(dtype)
    if scatters:
        index[5], index[40] = -1, _M  # rows that are stored nowhere
    indexed = gathers or scatters or weighted
    fused = gemm.Fused(fusion, 1, top_k, zero_tail)
    R = _RANK if low_rank else 0
    launch = gemm.product_launcher(kernel, N=columns, K=reduction, E=_E, m_sizes_step=1, fused=fused, R=R)
    words: dict[str, Any] = {"x": on.x, "index": 0, "index_end": 0, "row_weights": 0, "bias": 0}
    words |= gemm.words_of(on.w, launch) if isinstance(on.w, ExpertWeights) else {"w": on.w}
    words |= {"stride_x_m": reduction} if on.scale is None else {"x_scale": on.scale}
    words |= {"index": here.put(index), "index_end": _M} if indexed else {}
    words |= {"row_weights": here.put(weights)} if weighted else {}
    words |= {"bias": here.put(bias, aligned=variant.alignment > 1)} if biased else {}
    low_x, low_w = draw.normal(_M, R).to(dtype), draw.normal(_E, columns, R).to(dtype)
    if low_rank:
        words |= {"low_x": here.put(low_x), "low_w": here.put(low_w.mT.contiguous() if on.w_kn else low_w)}
    placed = _launched(variant, here, launch, _M, wide + 8, stride_y_m=wide + 8, **words)
    want = _full(_M + 2, wide + 8)
    result = want[1:-1, :wide]
    reference.rows(
        on.x_values[: _M // top_k],
        on.w_values,
        _COUNTS,
        result,
        M=_M,
        layout=Layout.NK,
        index=index if indexed else None,
        index_end=_M,
        gather_divisor=_TOP_K if gathers else 0,
        scatter=scatters,
        row_weights=weights if weighted else None,
        bias=bias.float() if biased else None,
        silu=silu,
    )
    if low_rank:
        reference.rows(low_x.float(), low_w.float(), _COUNTS, added := _full(_M, wide), M=_M, layout=Layout.NK)
        result[:_USED] += added[:_USED]
    if launch.zeroes:
        rest = (result == UNTOUCHED).all(1) if scatters else torch.arange(_M, device="cpu") >= _USED
        result[rest] = 0
    what = f"{f'{fusion.name} ' if fusion else ''}y{' with zero_tail' if zero_tail else ''}"
    return what, placed, want, _most(variant.dtype)


def _in_place(kernel: gemm.LoadedKernel, here: TrialPlace) -> _Checks:
    """y of codes with gaps between experts' rows that hold NaN: padded, at starts, and stored without padding."""
    variant, on, R = kernel.variant, _operands(kernel.variant, here), _E * _ROOM
    columns, K = on.w_values.shape[1:]
    of_x = variant.dtype.precision.x.scale
    if of_x is None or isinstance(on.w, torch.Tensor):
        raise AssertionError(f"{variant.dtype.value} does not quantise x and w")
    draw, product = _Draw(), _full(_USED, columns)
    codes, factor = draw.normal(_USED, K).to(torch.float8_e4m3fn), draw.normal(_USED, K // of_x.columns)
    x_values = codes.float() * factor.repeat_interleave(of_x.columns, 1)
    reference.rows(x_values, on.w_values, _COUNTS, product, M=_USED, layout=Layout.NK)
    launch = gemm.product_launcher(kernel, N=columns, K=K, E=_E, m_sizes_step=1, fused=gemm.Fused(Fusion.STARTS))
    apart, groups = torch.arange(_E, device="cpu") * _ROOM, K // of_x.columns
    behind, bounds = apart.flip(0) + 3, torch.cat([_COUNTS.new_zeros(1), _COUNTS.cumsum(0)]).int()
    padded = {"starts": 0, "starts_step": 0, "room": _ROOM, "packs": 0, "bounds": 0}
    padded |= _strides(groups, 1, _ROOM * groups)
    starts = padded | {"starts": here.put(behind), "starts_step": 2, "room": R} | _strides(1, R)
    packed = starts | {"packs": 1, "bounds": here.put(bounds)}
    for what, first, layout in (
        ("y of padded rows", apart, padded),
        ("y of rows at starts", behind, starts),
        ("y of rows at starts, without padding,", behind, packed),
    ):
        rows = torch.cat([first[e] + torch.arange(n, device="cpu") for e, n in enumerate(_COUNTS.tolist())])
        x, scale = (
            torch.full((R, K), 0x7F, dtype=torch.uint8, device="cpu"),
            _full(R, groups, value=float("nan")),
        )  # NaN in both
        x[rows], scale[rows] = codes.view(torch.uint8), factor
        words: dict[str, Any] = {"x": here.put(x), "x_scale": here.put(scale if layout is padded else scale.T)}
        words |= layout | gemm.words_of(on.w, launch)
        placed = _launched(variant, here, launch, R, columns + 8, M=R, stride_y_m=columns + 8, **words)
        want = _full(R + 2, columns + 8)
        want[1:-1, :columns][torch.arange(_USED, device="cpu") if layout is packed else rows] = product
        yield what, placed, want, _most(variant.dtype)


def _strides(by_row: int, by_group: int, by_expert: int = 0) -> dict[str, int]:
    """The numbers of a launch for the strides of x's scales."""
    return {"stride_scale_m": by_row, "stride_scale_k": by_group, "stride_scale_e": by_expert}


def _weight(kernel: gemm.LoadedKernel, here: TrialPlace) -> _Checks:
    """dw, and the memory around it."""
    variant, draw, dtype = kernel.variant, _Draw(), _TORCH[kernel.variant.dtype]
    if variant.dtype.quantised:
        yield from _weight_of_codes(kernel, here)
        return
    aligned = variant.alignment > 1
    N, K = (264, 200) if aligned else (131, 67)
    dy, x = (_x(draw, columns).to(dtype) for columns in (N, K))
    launch = gemm.product_launcher(kernel, N=N, K=K, E=_E, m_sizes_step=1)
    operands = {"dy": here.put(dy, aligned=aligned), "x": here.put(x, aligned=aligned)}
    placed = _launched(variant, here, launch, _E * N, K, stride_dy_m=N, stride_x_m=K, **operands)
    want = _full(_E * N + 2, K)
    want[1:-1] = reference.grad_weight(dy.float(), x.float(), _COUNTS).view(_E * N, K)
    yield "dw, its rows one after another, ", placed, want, _most(variant.dtype)


def _weight_of_codes(kernel: gemm.LoadedKernel, here: TrialPlace) -> _Checks:
    """dw of codes, written and added to old values, in both dtypes; NaN is in rows of no group."""
    draw, (N, K) = _Draw(), (256, 384)
    dy, x = (fp8_codes.column_codes(_x(draw, columns).bfloat16(), _COUNTS, blocks=columns == K) for columns in (N, K))
    exact = _full(_E, N, K)
    fp8_codes.grad_weight(dy, x, _COUNTS, exact)
    used = int((-(-_COUNTS // 128)).sum())
    placed: dict[str, torch.Tensor] = {}
    for name, codes in (("dy", dy), ("x", x)):
        codes.codes.view(torch.uint8)[:, 128 * used :] = 0x7F
        codes.scale[used:] = float("nan")
        placed |= {name: here.put(codes.codes.view(torch.uint8)), f"{name}_scale": here.put(codes.scale)}
    launch, m_sizes = gemm.product_launcher(kernel, N=N, K=K, E=_E, m_sizes_step=1), here.put(_COUNTS)
    for dtype, flag in ((torch.bfloat16, 0), (torch.float32, FP32)):
        for adds in (0, ADDS):
            dw, want = here.put(_full(_E * N + 2, K, dtype=dtype)), _full(_E * N + 2, K)
            for _ in range(2):
                words = _addresses({**placed, "dw_flags": flag | adds})
                launch(dw[1:].data_ptr(), m_sizes.data_ptr(), here.stream, M=_M, **words)
            want[1:-1] = (exact * 2 + UNTOUCHED if adds else exact).view(_E * N, K)
            yield f"dw in {dtype}{', added,' if adds else ''} ", dw, want, _most(kernel.variant.dtype)


# The row kernels

_T, _SLOTS, _HAVE = 24, 48, 41  # tokens, slots (_TOP_K of each), and how many of the sorted slots belong to an expert
_NAN = 3  # the token of NaN
_FEW, _FEW_TOKENS = _SLOTS // 3, _T // 3  # rows with a program of their own; these programs also do the other rows
_STEP = 1e-6
_LIMIT = 3.0
_BLOCKS, _BY_ROW = Scale("fp32", 1, 128), Scale("fp32", 1, 0)  # of x's codes
# Each activation once, with a gate or without, gate and up in halves or alternating.
_ACTS = (
    (Activation("silu"), True, False),
    (Activation("gelu"), True, True),
    (Activation("gelu_tanh"), False, False),
    (Activation("swiglu", limit=_LIMIT, alpha=1.5, beta=0.5), True, True),
    (Activation("relu2"), False, False),
    (Activation("situ", beta=2.0, linear_beta=3.0), True, False),
    (Activation("swiglustep", limit=_LIMIT), True, True),
)


class _RowKernel:
    """A row kernel on a GPU. ``run`` launches it with the arguments that all launches share, and with its own."""

    def __init__(self, variant: Variant, function: cuda.Function, op: RowOp, place: TrialPlace) -> None:
        self._launch, self._place, self._aligned = RowOpLauncher(variant, function, op), place, variant.alignment > 1
        self.wait, self.words = place.wait, place.put  # words of a fixed dtype are always aligned to themselves
        self.op, self.kind, self.block, self.draw = op, variant.dtype, self._launch.block, _Draw()
        self.columns = 264 if self._aligned else 131  # columns of a row, no whole number of blocks
        self.dtype, self.most = _TORCH[variant.dtype], _most(variant.dtype)
        self.order = _Draw().order(_SLOTS)
        self.tokens = self.order.long() // _TOP_K  # the row of x of each sorted slot
        used = self.words(torch.tensor([_HAVE], dtype=torch.int32, device="cpu"))
        self._shared: dict[str, Any] = dict.fromkeys(("index_step", "m_sizes_step", "ids_step"), 1)
        self._shared |= {"M": _SLOTS, "columns": self.columns, "top_k": _TOP_K}
        self._shared |= {"used": used, "index": self.words(self.order)}

    def run(self, rows: int, /, **words: torch.Tensor | int) -> None:
        self._launch(rows, self._place.stream, _addresses(self._shared | words))

    def rows(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU in the kernel's dtype, as badly aligned as the kernel allows."""
        return self._place.put(host.to(self.dtype), aligned=self._aligned)

    def results(self, columns: int) -> torch.Tensor:
        """Memory for a row of each slot, and a row after them."""
        return self.rows(_full(_SLOTS + 1, columns))


def _of_experts(rows: torch.Tensor) -> torch.Tensor:
    """``rows`` of slots with an expert; other slots may hold anything, and memory after them must stay as it is."""
    return torch.cat([rows[:_HAVE], _full(_SLOTS - _HAVE, rows.shape[1], value=_ANY), _full(1, rows.shape[1])])


def _gather(on: _RowKernel) -> _Checks:
    """out[i] = x[index[i] // top_k], in one launch and in the two that read each row of x once."""
    host = on.draw.normal(_T, on.columns)
    host[_NAN] = float("nan")
    x = on.rows(host)
    want = _of_experts(x.cpu().float()[on.tokens])
    on.run(_FEW, x=x, out=(out := on.results(on.columns)), flags=rowops.USED)
    yield "out", out, want, on.most
    looks, notes = -(-_SLOTS // rowops.NOTED_ROWS), on.words(torch.zeros(1 + _SLOTS, dtype=torch.int32, device="cpu"))
    on.run(looks, x=x, out=notes, top_k=_SLOTS, flags=rowops.USED | rowops.NOTES)
    noted = _full(1 + _SLOTS, value=_ANY)
    noted[0], noted[1 + on.order[:_HAVE].long()] = _HAVE, torch.arange(_HAVE, dtype=torch.float32, device="cpu")
    yield "where the rows go is noted wrongly: ", notes, noted, 0.0  # the next launch reads these notes
    on.run(_T + looks, x=x, used=notes, out=(out := on.results(on.columns)), flags=rowops.BY_TOKEN)
    yield "out", out, want, on.most


def _flags(act: Activation, gated: bool, interleaved: bool) -> int:
    turns = rowops.INTERLEAVED if interleaved else 0
    return KINDS.index(act.name) | (rowops.GATED if gated else 0) | turns | rowops.USED


def _act(h: torch.Tensor, act: Activation, gated: bool, interleaved: bool) -> torch.Tensor:
    return reference.activation(h, act, gated=gated, interleaved=interleaved)


def _activation(on: _RowKernel) -> _Checks:
    """a = act(gate) * up."""
    for act, gated, interleaved in _ACTS:
        h, a = on.rows(on.draw.normal(_SLOTS, on.columns * (1 + gated)) * 3), on.results(on.columns)
        on.run(_FEW, h=h, a=a, flags=_flags(act, gated, interleaved), **act.words)
        yield f"{act} a", a, _of_experts(_act(h.cpu().float(), act, gated, interleaved)), on.most


def _activation_grad(on: _RowKernel) -> _Checks:
    """dh = act'(h) * (t * da), a = t * act(h), dweights[index] = dot(da, act(h)), t = weights[index]."""
    I, scale, flat = on.columns, on.draw.normal(_SLOTS), on.order.long()  # noqa: E741
    more = rowops.WEIGHTED | rowops.WRITES_DH | rowops.WRITES_A | rowops.WRITES_DWEIGHTS
    for act, gated, interleaved in _ACTS:
        host = (on.draw.normal(_SLOTS, I * (1 + gated)) * 3).to(on.dtype)
        # Where the slope has a step, either side of it would be right.
        h = on.rows(torch.where((host.abs() - _LIMIT).abs() < 2 * _STEP, 1.0, host))
        da, dh, a = on.rows(on.draw.normal(_SLOTS, I)), on.results(I * (1 + gated)), on.results(I)
        results = {"dh": dh, "a": a, "dweights": on.words(_full(_SLOTS))}
        flags = _flags(act, gated, interleaved) | more
        on.run(_FEW, h=h, da=da, row_weights=on.words(scale), flags=flags, **results, **act.words)
        grad, t = da.cpu().float(), scale[flat][:, None]
        activated, slopes = _with_slopes(h.cpu().double(), grad * t, act, gated, interleaved)
        dots = torch.zeros(_SLOTS, dtype=torch.float32, device="cpu")
        dots[flat[:_HAVE]] = (activated * grad).sum(1)[:_HAVE]
        wanted = {"dh": _of_experts(slopes), "a": _of_experts(activated * t), "dweights": dots}
        for name, want in wanted.items():
            yield f"{act} {name}", results[name], want, on.most


def _with_slopes(h: torch.Tensor, da: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """act(h) and act'(h) * da in float32, computed in float64, with slopes as differences: a fork has no autograd."""
    _, gated, interleaved = how
    columns = torch.arange(h.shape[1], device="cpu")
    gates = columns % 2 == 0 if interleaved else columns < h.shape[1] // (1 + gated)
    dh = torch.zeros_like(h)
    for part in (gates, ~gates)[: 1 + gated]:
        step = part.double() * _STEP
        dh[:, part] = (_act(h + step, *how) - _act(h - step, *how)) / (2 * _STEP) * da
    return _act(h, *how).float(), dh.float()


def _combine(on: _RowKernel) -> _Checks:
    """out[t] = the sum of weight * (y[place] + bias[expert]) over t's slots that have a place."""
    C, E = on.columns, 5
    place = torch.where(on.order < _HAVE, on.order, -1)
    here, weights = place >= 0, on.draw.normal(_SLOTS)
    expert = torch.where(here, on.draw.integers(0, E, _SLOTS), E)
    y, bias, out = on.rows(on.draw.normal(_SLOTS, C)), on.rows(on.draw.normal(E, C)), on.rows(_full(_T + 1, C))
    words = {"places": on.words(place), "row_weights": on.words(weights), "experts": on.words(expert)}
    on.run(_FEW_TOKENS, y=y, bias=bias, out=out, M=_T, flags=rowops.WEIGHTED | rowops.BIASED, **words)
    rows, added = y.cpu().float()[place.clamp(min=0).long()], bias.cpu().float()[expert.clamp(max=E - 1).long()]
    by_slot = torch.where(here[:, None], (rows + added) * weights[:, None], 0.0)
    yield "out", out, torch.cat([by_slot.view(_T, _TOP_K, C).sum(1), _full(1, C)]), on.most


def _place_rows(on: _RowKernel) -> _Checks:
    """The rows of experts with gaps between them, at starts of their own and at steps of ``room``."""
    M, room, E = 3 * on.block + 7, on.block + 2, 4
    sizes = torch.tensor([room + 5, 0, 3, -1], dtype=torch.int64, device="cpu")
    own = torch.tensor([2 * on.block, 1, M - 2, 0], dtype=torch.int64, device="cpu")
    for first, steps in ((torch.arange(E, device="cpu") * room, False), (own, True)):
        most = M if steps else room
        counts = sizes.clamp(0, most).minimum((M - first).clamp(min=0))
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = [torch.arange(a, a + n, device="cpu") for a, n in zip(first.tolist(), counts.tolist(), strict=True)]
        wanted = {"index": torch.cat([*rows, counts.new_zeros(M - int(bounds[E]))]), "counts": counts, "bounds": bounds}
        results = {name: _numbers(on, len(want)) for name, want in wanted.items()}
        m_sizes, starts = on.words(sizes.to(torch.int32) if steps else sizes), on.words(first) if steps else 0
        layout = {"M": M, "E": E, "room": most, "m_sizes_step": 2 - steps, "starts_step": 2 * steps}
        on.run(E, m_sizes=m_sizes, starts=starts, **results, **layout)
        for name, want in wanted.items():
            yield f"{name}{' at starts of their own' if steps else ''}", results[name], want, 0.0


def _numbers(on: _RowKernel, count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    """Memory for integers."""
    return on.words(_full(count, dtype=dtype, value=77))


def _sort_slots(on: _RowKernel) -> _Checks:
    """Slots in the order of their experts: few slots, in one launch, and several chunks, in three launches."""
    E = 6
    for M in (min(100, on.block), 2 * on.block + 55):
        chunks, slots = -(-M // on.block), on.draw.integers(-1, E + 2, M)
        expert = torch.where((slots >= 0) & (slots < E), slots, E).long()
        order, sizes = expert.argsort(stable=True), expert.bincount(minlength=E + 1)[:E]
        place = torch.empty_like(order)
        place[order] = torch.arange(M, dtype=torch.int64, device="cpu")
        place = torch.where(place < sizes.sum(), place, -1)
        bounds = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
        wanted = {"order": order, "m_sizes": sizes, "bounds": bounds, "places": place, "experts": expert}
        results = {name: _numbers(on, len(want)) for name, want in wanted.items()}
        results |= {"order": _numbers(on, M, torch.int64), "experts": _numbers(on, chunks * on.block)}
        run = partial(on.run, ids=on.words(slots), M=M, E=E, **results)
        if chunks == 1:
            run(1, counts=0, flags=rowops.COUNTS | rowops.PLACES)
        else:
            counts = _numbers(on, chunks * (E + 1))
            run(chunks, counts=counts, flags=rowops.COUNTS)
            run(-(-(E + 1) // rowops.SORTED_EXPERTS), counts=counts, flags=rowops.ADDS)
            run(chunks, counts=counts, flags=rowops.PLACES)
        for name, want in wanted.items():
            yield f"of {M} slots {name}", results[name][: len(want)], want, 0.0


def _clear(on: _RowKernel) -> _Checks:
    """Rows of y that no index names become zero, the others stay."""
    C, M, rows, E = 264, 300, 200, 3
    counts = torch.tensor([200, 0, 60], dtype=torch.int32, device="cpu")
    names, host = on.draw.integers(-2, rows // 2, M), on.draw.normal(rows + 1, C)
    y, marks = on.words(host), on.words(torch.zeros(rows, dtype=torch.int8, device="cpu"))
    run = partial(on.run, y=y, index=on.words(names), m_sizes=on.words(counts), named=marks, index_end=rows)
    run(-(-M // on.block), M=M, rows=rows, columns=C, E=E, flags=rowops.NAMES)
    run(-(-rows // rowops.CLEARED_ROWS), M=M, rows=rows, columns=C, E=E, flags=0)
    named = names[: int(counts.sum())]
    stays = torch.zeros(rows + 1, dtype=torch.bool, device="cpu")
    stays[named[named >= 0].long()] = True
    stays[rows] = True
    yield "y", y, torch.where(stays[:, None], host, 0.0), 0.0


def _codes(on: _RowKernel, columns: int, scale: Scale, rows: int = _SLOTS) -> dict[str, torch.Tensor]:
    """Memory for codes of ``rows``, all of them 7 beforehand, and for their scales."""
    shape = (columns // scale.columns, scale_columns(rows)) if scale.columns else (rows,)
    return {
        "codes": on.words(_full(rows, columns, dtype=torch.uint8, value=7)),
        "scale": on.words(torch.zeros(*shape, dtype=torch.float32, device="cpu")),
    }


def _codes_are(on: _RowKernel, what: str, results: dict[str, torch.Tensor], rows: torch.Tensor, of_x: Scale) -> _Checks:
    """Check that results are codes and scales of ``rows``, and that memory after them is untouched."""
    on.wait()
    codes, scale, these, M = results["codes"].cpu(), results["scale"].cpu(), slice(0, len(rows)), len(rows)
    got = values_of_rows(codes[:M].view(torch.float8_e4m3fn), scale, these)
    yield f"{what}codes", got, values_of_rows(*codes_of_rows(rows, of_x), these), _QUANTISED
    yield f"{what}codes of rows of no expert: ", codes[M:], _full(len(codes) - M, codes.shape[1], value=7), 0.0
    yield f"{what}scales of rows of no expert: ", scale[..., M:], torch.zeros_like(scale[..., M:]), 0.0


def _quantize(on: _RowKernel, of_x: Scale) -> _Checks:
    """Codes and scales of rows that an index picks."""
    C = 256 if of_x.columns else 320
    x, results = on.rows(on.draw.normal(_T, C)), _codes(on, C, of_x)
    used = on.words(torch.tensor([_SLOTS], dtype=torch.int32, device="cpu"))
    on.run(_FEW, x=x, used=used, columns=C, flags=rowops.USED | rowops.PICKED, **results)
    yield from _codes_are(on, "", results, x.cpu()[on.tokens], of_x)


def _activation_codes(on: _RowKernel, of_x: Scale) -> _Checks:
    """Codes and scales of act(gate) * up."""
    I = 384 if of_x.columns else 448  # noqa: E741
    for act, gated, interleaved in _ACTS:
        h, results = on.rows(on.draw.normal(_SLOTS, I * (1 + gated)) * 3), _codes(on, I, of_x)
        on.run(_FEW, h=h, columns=I, flags=_flags(act, gated, interleaved), **results, **act.words)
        want = _act(h.cpu().float(), act, gated, interleaved).to(on.dtype)[:_HAVE]
        yield from _codes_are(on, f"{act} ", results, want, of_x)


def _order_codes(on: _RowKernel) -> _Checks:
    """Codes and scales that an index picks, as they arrive, byte for byte: scales by row, by column, and padded."""
    C, groups, picked, room = 320, 5, on.tokens[:_HAVE], _T // 4
    host, scales = on.draw.integers(0, 256, _T, C).to(torch.uint8), on.draw.normal(_T, groups)
    want, factors = _full(_SLOTS, C, dtype=torch.uint8, value=7), _full(groups, scale_columns(_SLOTS))
    want[:_HAVE] = (
        host[picked].view(_HAVE, -1, 64)[..., torch.tensor(K_ORDER, dtype=torch.int64, device="cpu")].view(_HAVE, C)
    )
    factors[:, :_HAVE] = scales[picked].T
    for x_scale, rows, strides in (
        (scales, rowops.ANY_ROWS, _strides(groups, 1)),
        (scales.T, rowops.ANY_ROWS, _strides(1, _T)),
        (scales.view(-1, room, groups).mT, room, _strides(1, room, room * groups)),
    ):
        codes, scale = on.words(_full(_SLOTS, C, dtype=torch.uint8, value=7)), on.words(_full(*factors.shape))
        words = {"x_codes": on.words(host), "x_scale": on.words(x_scale), "codes": codes, "scale": scale}
        numbers = {"columns": C, "groups": groups, "room": rows, "flags": rowops.USED | rowops.PICKED}
        on.run(_FEW, **words, **numbers, **strides)
        yield "codes", codes, want, 0.0
        yield "scales", scale, factors, 0.0


_GROUPED = torch.tensor((3, 0, 130, 128, 1), dtype=torch.int32, device="cpu")  # rows of each expert
_GROUPS, _GROUPED_ROWS = 5, 270  # groups of 128 rows of an expert; the last eight rows are of none


def _along_m(on: _RowKernel, columns: int, scales: int, name: str = "column_") -> dict[str, torch.Tensor]:
    """Memory for codes along M, all of them 7 beforehand, and for their scales."""
    P = places_for(_GROUPED_ROWS, len(_GROUPED))
    codes = on.words(_full(columns, P, dtype=torch.uint8, value=7))
    return {f"{name}codes": codes, f"{name}scale": on.words(_full(P // 128, scales))}


def _quantize_columns(on: _RowKernel) -> _Checks:
    """Codes along M of rows that an index picks, and their scales, bit for bit; memory after the last group stays."""
    C, M, have = 256, _GROUPED_ROWS, int(_GROUPED.sum())
    x, index = on.rows(on.draw.normal(M // 2, C)), on.draw.order(M)
    picked = x.cpu()[index.long() // 2][:have]
    for blocks, flag in ((False, 0), (True, rowops.BLOCKS)):
        want = fp8_codes.column_codes(x.cpu(), _GROUPED, index, 2, blocks=blocks)
        want.codes.view(torch.uint8)[:, 128 * _GROUPS :] = 7
        want.scale[_GROUPS:] = UNTOUCHED
        results = _along_m(on, C, want.scale.shape[1])
        words: dict[str, Any] = {"x": x, "index": on.words(index), "m_sizes": on.words(_GROUPED), **results}
        words |= {"top_k": 2, "M": M, "columns": C, "places": want.codes.shape[1], "E": len(_GROUPED)}
        rows = _codes(on, C, _BLOCKS, M) if on.op is RowOp.QUANTIZE_BOTH else {}
        on.run(_FEW, flags=flag | rowops.PICKED, **words, **rows)
        yield f"codes{' of blocks' * blocks}", results["column_codes"], want.codes.view(torch.uint8), 0.0
        yield f"scales{' of blocks' * blocks}", results["column_scale"], want.scale, 0.0
        if rows:
            yield from _codes_are(on, "row ", rows, picked, _BLOCKS)


def _activation_grad_codes(on: _RowKernel) -> _Checks:
    """dh and a of ``_activation_grad`` as codes along M, dh along K too."""
    I, M, have, E = 256, _GROUPED_ROWS, int(_GROUPED.sum()), len(_GROUPED)  # noqa: E741
    t, order = on.draw.normal(M), on.draw.order(M)
    flat, place = order.long(), fp8_codes.places(_GROUPED, M)[:have]
    for act, gated, interleaved in _ACTS:
        if not gated or interleaved:
            continue
        host = (on.draw.normal(M, 2 * I) * 3).to(on.dtype)
        h, da = on.rows(torch.where((host.abs() - _LIMIT).abs() < 2 * _STEP, 1.0, host)), on.rows(on.draw.normal(M, I))
        rows, of_dh, of_a = _codes(on, 2 * I, _BLOCKS, M), _along_m(on, 2 * I, 2 * I), _along_m(on, I, I // 128, "a_")
        words: dict[str, Any] = {"h": h, "da": da, "row_weights": on.words(t), "index": on.words(order)}
        words |= {"m_sizes": on.words(_GROUPED), "dots": on.words(_full(I // 128, M))}
        words |= {"dweights": (dweights := on.words(_full(M))), "M": M, "columns": I, "E": E, **act.words}
        flags = _flags(act, gated, interleaved) | rowops.WEIGHTED | rowops.WRITES_DWEIGHTS
        words |= {"places": of_dh["column_codes"].shape[1], **rows, **of_dh, **of_a}
        for adds in (0, rowops.NOTES):
            on.run(_FEW, flags=flags | adds, **words)
        grad, scale = da.cpu().float(), t[flat][:, None]
        activated, dh = _with_slopes(h.cpu().double(), grad * scale, act, gated, interleaved)
        for what, (codes, factor), want in (("dh", of_dh.values(), dh), ("a", of_a.values(), activated * scale)):
            of = fp8_codes.ColumnCodes(codes.cpu().view(torch.float8_e4m3fn), factor.cpu(), M)
            yield f"{act} {what} along M", fp8_codes.values(of)[:, place].T, want[:have], _QUANTISED
        yield from _codes_are(on, f"{act} dh along K: ", rows, dh[:have].to(on.dtype), _BLOCKS)
        dots = torch.zeros(M, dtype=torch.float32, device="cpu")
        dots[flat[:have]] = (activated * grad).sum(1)[:have]
        yield f"{act} dweights", dweights, dots, on.most


# The row kernels of weights: results must equal torch's bit for bit.

_W = E, N, K = 2, 128, 192  # whole blocks of 64, no whole tile
_AFTER = _full(64, dtype=torch.uint8, value=0x5A)  # the bytes after a result
_FLOATS = {torch.bfloat16: 0, torch.float16: rowops.FP16_WEIGHTS, torch.float32: rowops.FP32_WEIGHTS}
_LAYOUTS = {"": 0, "prepared ": rowops.PREPARED}


def _w(dtype: torch.dtype, columns: int = K) -> torch.Tensor:
    """w [E, N, columns] on the host: small numbers, and half of an expert numbers that are between two codes."""
    draw = _Draw()
    w = draw.normal(E, N, columns) * 0.05
    w[0, : N // 2] = draw.integers(-96, 97, N // 2, columns) / 16
    w[1, :, :64] = 0
    return w.to(dtype)


def _quantised(on: _RowKernel) -> Iterator[tuple[str, int, torch.Tensor, ExpertWeights]]:
    """Each layout of codes, in words and as flags, with w of each dtype, and with what torch quantises it to."""
    scale = on.kind.precision.w.scale
    whole = scale is not None and scale.columns == 2 * 64  # as prepared weights have them
    for (dtype, flag), (layout, prepared) in itertools.product(_FLOATS.items(), _LAYOUTS.items()):
        w = _w(dtype, 2 * K if prepared and whole else K)
        weights = ExpertWeights.quantize(w, on.kind.value)
        yield f"{layout}{{}} of {dtype}", flag | prepared, w, weights.prepare() if prepared else weights


def _run(on: _RowKernel, w: torch.Tensor, flags: int, /, **words: torch.Tensor | int) -> None:
    numbers = {"columns": w.shape[2], "step_expert": w.stride(0), "step_row": w.stride(1)}
    on.run(rowops.tiles(rowops.RowOpSpec(on.op, on.kind), *w.shape), M=N, flags=flags, **numbers, **words)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """A tensor's bytes."""
    return tensor.reshape(-1).view(torch.uint8)


def _room(on: _RowKernel, like: torch.Tensor) -> torch.Tensor:
    """Memory for a result, and bytes after it."""
    return on.words(torch.cat([torch.full_like(_raw(like), 0x5A), _AFTER]))


def _bits(what: str, got: torch.Tensor, want: torch.Tensor) -> _Check:
    return f"{what}: byte ", got, torch.cat([_raw(want), _AFTER]), 0.0


def _tensors(weights: ExpertWeights) -> dict[str, torch.Tensor]:
    """The tensors that weights have, by the kernels' names."""
    names = {"codes": "words", "scale": "scales", "zero": "zeros", "global_scale": "outer"}
    return {names[name]: tensor for name, tensor in weights.tensors().items()}


def _quantize_weights(on: _RowKernel) -> _Checks:
    """Codes and scales of w in both layouts, of each dtype; nvfp4's outer scales are an operand."""
    for what, flags, w, weights in _quantised(on):
        wanted = _tensors(weights)
        words: dict[str, Any] = {"zeros": 0, "outer": 0, "w": on.words(w)}
        words |= {name: on.words(want) if name == "outer" else _room(on, want) for name, want in wanted.items()}
        _run(on, w, flags, **words)
        for name in filter("outer".__ne__, wanted):
            yield _bits(what.format(name), words[name], wanted[name])


def _quantize_blocks(on: _RowKernel) -> _Checks:
    """Prepared codes and scales of w and of w transposed; of a block with NaN the scale is NaN."""
    E, N, K = 2, 128, 256
    for dtype, flag in ((torch.bfloat16, 0), (torch.float32, rowops.FP32_WEIGHTS)):
        w = on.draw.normal(E, N, K).to(dtype)
        w[1, 5, 7] = float("nan")
        ways = fp8_codes.blocks(w), fp8_codes.blocks(w.transpose(1, 2))
        names = ("words", "scales"), ("across_words", "across_scales")
        into: dict[str, Any] = {}
        for pair, (codes, scale) in zip(names, ways, strict=True):
            into |= {pair[0]: _room(on, codes), pair[1]: _room(on, scale)}
        numbers = {"M": N, "columns": K, "step_expert": N * K, "step_row": K}
        flags = flag | rowops.ALONG_K | rowops.ALONG_N
        on.run(E * (N // 128) * (K // 128), w=on.words(w), flags=flags, **into, **numbers)
        for pair, (codes, scale) in zip(names, ways, strict=True):
            yield _bits(f"{pair[0]} of {dtype}", into[pair[0]], codes)
            factors = into[pair[1]].view(-1)[: 4 * scale.numel()].view(torch.float32)
            yield f"{pair[1]} of {dtype}", factors, scale.view(-1), 0.0


def _dequantize_weights(on: _RowKernel) -> _Checks:
    """w of codes and scales in both layouts, in each dtype."""
    for what, flags, w, weights in _quantised(on):
        words: dict[str, Any] = {"zeros": 0, "outer": 0, "w": (result := _room(on, w))}
        words |= {name: on.words(_raw(tensor)) for name, tensor in _tensors(weights).items()}
        _run(on, w, flags, **words)
        yield _bits(what.format("codes' w"), result, weights.dequantize(w.dtype))


def _move_codes(on: _RowKernel) -> _Checks:
    """Codes moved from the checkpoint layout to the prepared one and back, and a flag for each tile with NaN."""
    stored = empty(on.kind.value, *_W, torch.device("cpu")).codes
    _raw(stored).copy_(on.draw.integers(0, 256, _raw(stored).numel()))
    _raw(stored[1:]).bitwise_and_(0xBF)
    words = torch.stack([ORDERS[on.kind.value].prepared(codes) for codes in stored])
    tiles = rowops.tiles(rowops.RowOpSpec(on.op, on.kind), *_W)
    nan = (torch.arange(tiles, device="cpu") < tiles // E).int()
    looks = rowops.LOOKS if stored.dtype is torch.float8_e4m3fn else 0
    for name, want, source, flags in (("words", words, stored, looks), ("stored", stored, words, rowops.BACK)):
        other = "stored" if name == "words" else "words"
        result, most = _room(on, want), _room(on, nan)
        on.run(tiles, M=N, columns=K, flags=flags, **{name: result, other: on.words(_raw(source)), "most": most})
        yield _bits(name, result, want)
        if flags == rowops.LOOKS:
            yield _bits("tiles with NaN", most, nan)


def _largest_weight(on: _RowKernel) -> _Checks:
    """The bits of the largest number of some rows; NaN is larger than all."""
    rows = rowops.tile_of(on.op, on.kind).rows
    for dtype, flag in _FLOATS.items():
        w = _w(dtype)
        w[1, 77, 5], w[1, 9, K - 1] = float("-inf"), float("nan")
        want = (w.float().view(torch.int32) & 0x7FFFFFFF).view(E * N // rows, -1).amax(1).clamp_(max=0x7F800001)
        _run(on, w, flag, w=on.words(w), most=(most := _room(on, want)))
        yield _bits(f"most of {dtype}", most, want)


_ROW_KERNELS: dict[RowOp, Callable[[_RowKernel], _Checks]] = {
    RowOp.GATHER: _gather,
    RowOp.ACTIVATION: _activation,
    RowOp.ACTIVATION_GRAD: _activation_grad,
    RowOp.ACTIVATION_GRAD_CODES: _activation_grad_codes,
    RowOp.COMBINE: _combine,
    RowOp.PLACE_ROWS: _place_rows,
    RowOp.SORT_SLOTS: _sort_slots,
    RowOp.CLEAR: _clear,
    RowOp.QUANTIZE: partial(_quantize, of_x=_BLOCKS),
    RowOp.ACTIVATION_CODES: partial(_activation_codes, of_x=_BLOCKS),
    RowOp.QUANTIZE_ROWS: partial(_quantize, of_x=_BY_ROW),
    **dict.fromkeys((RowOp.QUANTIZE_COLUMNS, RowOp.QUANTIZE_BOTH), _quantize_columns),
    RowOp.ORDER_CODES: _order_codes,
    RowOp.ACTIVATION_ROW_CODES: partial(_activation_codes, of_x=_BY_ROW),
    RowOp.QUANTIZE_WEIGHTS: _quantize_weights,
    RowOp.QUANTIZE_BLOCKS: _quantize_blocks,
    RowOp.DEQUANTIZE_WEIGHTS: _dequantize_weights,
    RowOp.MOVE_CODES: _move_codes,
    RowOp.LARGEST_WEIGHT: _largest_weight,
}
