"""Small trials of code on a GPU, held against torch on the host: where they run, how they are judged, those of passes.

Each is made so that what code of its kind can get wrong shows: experts with several tiles of rows, with one row and
with none, a row of NaN, no whole tile, rows that belong to no expert, and memory around the result that has to stay as
it is.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch

from ...artifacts.records import DType, RowOp, Scale, Variant
from ...artifacts.tuples import NamedTuple
from ...kernels import reference, rowops
from ...kernels.activations import KINDS, Activation
from ...kernels.hopper_w8a8_block import scale_columns
from ..driver import cuda
from ..driver.rowops import RowOpLauncher
from ..weights.codes import Quantised, cat, quantise, values
from ..weights.order import K_ORDER, ORDERS
from ..weights.row_codes import codes_of_rows, values_of_rows
from ..weights.writing import empty, quantise_into

UNTOUCHED = 96.0  # fills results before a launch: exact in every dtype, and no test's result
_T, _TOP_K, _USED = 24, 2, 41  # tokens, slots of each, and how many of the slots belong to an expert
_NAN_TOKEN = 3
_QUANTISED = 0.13  # two codes that lie side by side differ by an eighth
_BLOCKS, _ROWS = Scale("fp32", 1, 128), Scale("fp32", 1, 0)  # of x's codes
_STEP = 1e-6
_ROUNDING = {DType.FP16: 2e-3, DType.FP32: 1e-4, DType.TF32: 4e-3}

_Run: TypeAlias = "Callable[..., None]"  # (rows, M=, ...): a launch of arguments by name, tensors or numbers


class TrialPlace(NamedTuple):
    """The device and stream of a self-test. ``wait`` waits for all its launches."""

    device: torch.device
    stream: int
    wait: Callable[[], None]

    def put(self, host: torch.Tensor, *, aligned: bool = True) -> torch.Tensor:
        """A copy there, dense; unaligned it begins an element later than it would."""
        flat = torch.empty(host.numel() + 1, dtype=host.dtype, device=self.device)
        placed = flat[not aligned :][: host.numel()].view(host.shape)
        placed.copy_(host)
        return placed


class Draw:
    """Random operands, the same in every process, on the host. torch's own generator is left alone."""

    def __init__(self) -> None:
        self._generator = torch.Generator("cpu").manual_seed(11)

    def normal(self, *shape: int) -> torch.Tensor:
        """float32, N(0, 1)."""
        return torch.randn(shape, generator=self._generator, dtype=torch.float32, device="cpu")

    def integers(self, low: int, high: int, count: int) -> torch.Tensor:
        """int32 [count], low to high - 1."""
        return torch.randint(low, high, (count,), generator=self._generator, dtype=torch.int32, device="cpu")

    def order(self, count: int) -> torch.Tensor:
        """int32 [count]: a permutation."""
        return torch.randperm(count, generator=self._generator, dtype=torch.int64, device="cpu").to(torch.int32)


def rounding(dtype: DType) -> float:
    """The tolerance of ``off`` for a result of this dtype."""
    return 3e-2 if dtype.quantised else _ROUNDING.get(dtype, 1.6e-2)


def full(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Host memory filled with UNTOUCHED."""
    return torch.full(shape, UNTOUCHED, dtype=dtype, device="cpu")


def off(got: torch.Tensor, want: torch.Tensor, most: float, above: int = 0) -> str | None:
    """Describe the first wrong element of ``got``; None if all are right.

    |got - want| may be ``most`` * (|want| + the root mean square of want's row). If want is NaN or UNTOUCHED, got must
    be the same. ``above``: number of rows before the first, for the message.
    """
    numbers = got.cpu().float()
    untouched = want == UNTOUCHED
    counts = ~untouched & ~want.isnan()
    squares = torch.where(counts, want, 0.0).square().sum(-1, keepdim=True)
    scale = (squares / counts.sum(-1, keepdim=True).clamp(min=1)).sqrt() + want.abs()
    near = (numbers - want).abs() <= most * scale
    right = torch.where(untouched, numbers == want, near | (numbers.isnan() & want.isnan()))
    if bool(right.all()):
        return None
    wrong = (~right).nonzero()
    at = tuple(wrong[0].tolist())
    place = ", ".join(map(str, (at[0] - above, *at[1:])))
    stored = "left as it was" if bool(untouched[at]) else f"{float(want[at]):.4g}"
    return f"[{place}] is {float(numbers[at]):.4g}, wanted {stored} ({len(wrong)} of {want.numel()} elements are wrong)"


def trial_of_pass(variant: Variant, function: cuda.Function, op: RowOp, place: TrialPlace) -> str | None:
    """Test a row kernel; return its fault in words, None if it is right.

    Raises
    ------
    CudaError
        where the driver refuses the launch.
    """
    launch = RowOpLauncher(variant, function, op)

    def run(rows: int, /, **words: torch.Tensor | int) -> None:
        addresses = {name: value if isinstance(value, int) else value.data_ptr() for name, value in words.items()}
        launch(rows, place.stream, addresses)

    on = _On(run, place, variant, launch.block)
    return _TRIALS[op](on)


class _On(NamedTuple):
    """A row kernel under test, and where it runs."""

    run: _Run
    place: TrialPlace
    variant: Variant
    block: int

    @property
    def columns(self) -> int:
        """The columns of a row: not a multiple of a program's block."""
        return 264 if self.variant.alignment > 1 else 131

    @property
    def dtype(self) -> torch.dtype:
        return TORCH[self.variant.dtype]

    def put(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU, as badly aligned as the code allows."""
        return self.place.put(host, aligned=self.variant.alignment > 1)

    def words(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU of int32 and float32 words, which are always aligned to themselves."""
        return self.place.put(host)

    def used(self, count: int = _USED) -> torch.Tensor:
        """The number of rows that belong to an expert, int32 [1] on the GPU."""
        return self.words(torch.tensor([count], dtype=torch.int32, device="cpu"))

    def rows(self, host: torch.Tensor) -> torch.Tensor:
        """A copy on the GPU in the kernel's dtype."""
        return self.put(host.to(self.dtype))

    def judged(self, got: torch.Tensor, want: torch.Tensor, what: str, most: float | None = None) -> str | None:
        self.place.wait()
        wrong = off(got, want, rounding(self.variant.dtype) if most is None else most)
        return None if wrong is None else f"{what}{wrong}"


TORCH = dict.fromkeys(DType, torch.bfloat16) | {
    DType.FP16: torch.float16,
    DType.FP32: torch.float32,
    DType.TF32: torch.float32,
}  # torch's dtype of x and y


def _few(rows: int) -> int:
    """A number of programs below ``rows``: each must loop over several rows."""
    return rows // 3


def _gather(on: _On) -> str | None:
    """out[i] = x[index[i] // top_k], in one launch and in the two that read each row of x once."""
    draw, C, M = Draw(), on.columns, _T * _TOP_K
    host = draw.normal(_T, C)
    host[_NAN_TOKEN] = float("nan")
    x, order, used = on.rows(host), draw.order(M), on.used()
    index = on.words(order)
    want = x.cpu().float()[order.long() // _TOP_K]

    def out_of(used: torch.Tensor, programs: int, flags: int) -> str | None:
        out = on.rows(full(M + 1, C))
        on.run(programs, x=x, index=index, used=used, out=out, M=M, columns=C, top_k=_TOP_K, index_step=1, flags=flags)
        return on.judged(out[:_USED], want[:_USED], "out") or on.judged(out[M:], full(1, C), "past out")

    wrong = out_of(used, _few(M), rowops.USED)
    if wrong:
        return wrong
    looks, noted = -(-M // rowops.NOTED_ROWS), on.words(torch.zeros(1 + M, dtype=torch.int32, device="cpu"))
    flags = rowops.USED | rowops.NOTES
    on.run(looks, x=x, index=index, used=used, out=noted, M=M, columns=C, top_k=M, index_step=1, flags=flags)
    on.place.wait()
    notes = noted.cpu()
    there = notes[1 + order[:_USED].long()] == torch.arange(_USED, dtype=torch.int32, device="cpu")
    if int(notes[0]) != _USED or not bool(there.all()):  # the next launch would store by them
        return "where the rows go is noted wrongly"
    return out_of(noted, _T + looks, rowops.BY_TOKEN)


# Each activation once, with a gate or without, gate and up in halves or alternating.
_ACTS = (
    (Activation("silu"), True, False),
    (Activation("gelu"), True, True),
    (Activation("gelu_tanh"), False, False),
    (Activation("swiglu", limit=3.0, alpha=1.5, beta=0.5), True, True),
    (Activation("relu2"), False, False),
    (Activation("situ", beta=2.0, linear_beta=3.0), True, False),
    (Activation("swiglustep", limit=3.0), True, True),
)
_LIMIT = 3.0  # the limit of the activations above


def _flags(act: Activation, gated: bool, interleaved: bool) -> int:
    turns = rowops.INTERLEAVED if interleaved else 0
    return KINDS.index(act.name) | (rowops.GATED if gated else 0) | turns | rowops.USED


def _activation(on: _On) -> str | None:
    """a = act(gate) * up."""
    draw, I, M = Draw(), on.columns, _T * _TOP_K  # noqa: E741
    used = on.used()
    for act, gated, interleaved in _ACTS:
        h, a = on.rows(draw.normal(M, I * (1 + gated)) * 3), on.rows(full(M + 1, I))
        on.run(_few(M), h=h, a=a, used=used, M=M, columns=I, flags=_flags(act, gated, interleaved), **act.words)
        want = _act(h.cpu().float(), act, gated, interleaved)
        wrong = on.judged(a[:_USED], want[:_USED], f"{act} a") or on.judged(a[M:], full(1, I), "past a")
        if wrong:
            return wrong
    return None


def _activation_grad(on: _On) -> str | None:
    """dh = act'(h) * (t * da), a = t * act(h), dweights[index] = dot(da, act(h)), t = weights[index]."""
    draw, I, M = Draw(), on.columns, _T * _TOP_K  # noqa: E741
    used = on.used()
    order, scale = draw.order(M), draw.normal(M)
    index, weights, flat = on.words(order), on.words(scale), order.long()
    more = rowops.WEIGHTED | rowops.WRITES_DH | rowops.WRITES_A | rowops.WRITES_DWEIGHTS
    for act, gated, interleaved in _ACTS:
        host = (draw.normal(M, I * (1 + gated)) * 3).to(on.dtype)
        h = on.rows(
            torch.where((host.abs() - _LIMIT).abs() < 2 * _STEP, 1.0, host)
        )  # no h at the limit, where the slope jumps
        da = on.rows(draw.normal(M, I))
        dh, a = on.rows(full(M + 1, I * (1 + gated))), on.rows(full(M + 1, I))
        dweights = on.words(full(M))
        flags = _flags(act, gated, interleaved) | more
        on.run(
            _few(M),
            h=h,
            da=da,
            row_weights=weights,
            index=index,
            used=used,
            dh=dh,
            a=a,
            dweights=dweights,
            M=M,
            columns=I,
            index_step=1,
            flags=flags,
            **act.words,
        )
        grad, t = da.cpu().float(), scale[flat][:, None]
        activated, want = _with_slopes(h.cpu().double(), grad * t, act, gated, interleaved)
        dots = torch.zeros(M, dtype=torch.float32, device="cpu")
        dots[flat[:_USED]] = (activated * grad).sum(1)[:_USED]
        wrong = (
            on.judged(dh[:_USED], want[:_USED], f"{act} dh")
            or on.judged(a[:_USED], (activated * t)[:_USED], f"{act} a")
            or on.judged(dweights, dots, f"{act} dweights")
            or on.judged(dh[M:], full(1, dh.shape[1]), "past dh")
        )
        if wrong:
            return wrong
    return None


def _act(h: torch.Tensor, act: Activation, gated: bool, interleaved: bool) -> torch.Tensor:
    return reference.activation(h, act, gated=gated, interleaved=interleaved)


def _with_slopes(h: torch.Tensor, da: torch.Tensor, *how: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """act(h) and act'(h) * da in float32, of float64. The slopes are differences: a child of fork has no autograd."""
    _, gated, interleaved = how
    columns = torch.arange(h.shape[1], device="cpu")
    gates = columns % 2 == 0 if interleaved else columns < h.shape[1] // (1 + gated)
    dh = torch.zeros_like(h)
    for part in (gates, ~gates)[: 1 + gated]:
        step = part.double() * _STEP
        dh[:, part] = (_act(h + step, *how) - _act(h - step, *how)) / (2 * _STEP) * da
    return _act(h, *how).float(), dh.float()


def _combine(on: _On) -> str | None:
    """out[t] = the sum over t's slots of weight * (y[place] + bias[expert]), of those that have a place."""
    draw, C, M, E = Draw(), on.columns, _T * _TOP_K, 5
    order, scale, expert = draw.order(M), draw.normal(M), draw.integers(0, E, M)
    place = torch.where(order < _USED, order, -1)
    here = place >= 0
    expert = torch.where(here, expert, E)
    y, bias, out = on.rows(draw.normal(M, C)), on.rows(draw.normal(E, C)), on.rows(full(_T + 1, C))
    places, weights, experts = on.words(place), on.words(scale), on.words(expert)
    on.run(
        _few(_T),
        y=y,
        places=places,
        row_weights=weights,
        experts=experts,
        bias=bias,
        out=out,
        M=_T,
        columns=C,
        top_k=_TOP_K,
        flags=rowops.WEIGHTED | rowops.BIASED,
    )
    rows, added = y.cpu().float()[place.clamp(min=0).long()], bias.cpu().float()[expert.clamp(max=E - 1).long()]
    by_slot = torch.where(here[:, None], (rows + added) * scale[:, None], 0.0)
    want = by_slot.view(_T, _TOP_K, C).sum(1)
    return on.judged(out[:_T], want, "out") or on.judged(out[_T:], full(1, C), "past out")


def _place_rows(on: _On) -> str | None:
    """The rows of experts that lie apart, at starts of their own and at steps of ``room``."""
    M, room, E = 3 * on.block + 7, on.block + 2, 4
    sizes = torch.tensor([room + 5, 0, 3, -1], dtype=torch.int64, device="cpu")
    own = torch.tensor([2 * on.block, 1, M - 2, 0], dtype=torch.int64, device="cpu")
    for starts in (None, own):
        first = torch.arange(E, device="cpu") * room if starts is None else starts
        most = room if starts is None else M
        counts = sizes.clamp(0, most).minimum((M - first).clamp(min=0))
        bounds = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        rows = [torch.arange(a, a + n, device="cpu") for a, n in zip(first.tolist(), counts.tolist(), strict=True)]
        index = torch.cat([*rows, counts.new_zeros(M - int(bounds[E]))])
        results = [on.words(torch.full((n,), 77, dtype=torch.int32, device="cpu")) for n in (M, E, E + 1)]
        m_sizes = on.words(sizes if starts is None else sizes.to(torch.int32))
        on.run(
            E,
            m_sizes=m_sizes,
            starts=0 if starts is None else on.words(starts),
            index=results[0],
            counts=results[1],
            bounds=results[2],
            M=M,
            E=E,
            room=most,
            m_sizes_step=2 if starts is None else 1,
            starts_step=0 if starts is None else 2,
        )
        on.place.wait()
        pairs = zip(("index", "counts", "bounds"), results, (index, counts, bounds), strict=True)
        wrong = [name for name, got, want in pairs if not torch.equal(got.cpu().long(), want)]
        if wrong:
            return f"{', '.join(wrong)} are wrong" + (" at starts of their own" if starts is not None else "")
    return None


def _sort_slots(on: _On) -> str | None:
    """Slots in the order of their experts: of few, in one launch, and of several chunks, in three."""
    for M in (min(100, on.block), 2 * on.block + 55):
        wrong = _sorted(on, M, E=6)
        if wrong:
            return f"of {M} slots {wrong}"
    return None


def _sorted(on: _On, M: int, E: int) -> str | None:
    chunks, slots = -(-M // on.block), Draw().integers(-1, E + 2, M)

    def words(count: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return on.words(torch.full((count,), 77, dtype=dtype, device="cpu"))

    expert = torch.where((slots >= 0) & (slots < E), slots, E).long()
    order, sizes = expert.argsort(stable=True), expert.bincount(minlength=E + 1)[:E]
    place = torch.empty_like(order)
    place[order] = torch.arange(M, dtype=torch.int64, device="cpu")
    place = torch.where(place < sizes.sum(), place, -1)
    ends = torch.cat([sizes.new_zeros(1), sizes.cumsum(0)])
    ids, experts, places, bounds, m_sizes = on.words(slots), words(chunks * on.block), words(M), words(E + 1), words(E)
    stored = words(M, torch.int64)
    words_of: dict[str, Any] = {
        "ids": ids,
        "experts": experts,
        "order": stored,
        "places": places,
        "bounds": bounds,
        "m_sizes": m_sizes,
        "M": M,
        "E": E,
        "ids_step": 1,
    }
    if chunks == 1:
        on.run(1, **words_of, counts=0, flags=rowops.COUNTS | rowops.PLACES)
    else:
        words_of["counts"] = words(chunks * (E + 1))
        on.run(chunks, **words_of, flags=rowops.COUNTS)
        on.run(-(-(E + 1) // rowops.SORTED_EXPERTS), **words_of, flags=rowops.ADDS)
        on.run(chunks, **words_of, flags=rowops.PLACES)
    on.place.wait()
    pairs = (
        ("order", stored, order),
        ("m_sizes", m_sizes, sizes),
        ("bounds", bounds, ends),
        ("places", places, place),
        ("experts", experts[:M], expert),
    )
    wrong = [name for name, got, want in pairs if not torch.equal(got.cpu().long(), want)]
    return f"{', '.join(wrong)} are wrong" if wrong else None


def _clear(on: _On) -> str | None:
    """Rows of y that no index names become zero, the others stay."""
    draw, C, M, rows, E = Draw(), 264, 300, 200, 3
    counts = torch.tensor([200, 0, 60], dtype=torch.int32, device="cpu")
    named_rows, host = draw.integers(-2, rows // 2, M), draw.normal(rows + 1, C)
    y, index, m_sizes = on.words(host), on.words(named_rows), on.words(counts)
    named = on.words(torch.zeros(rows, dtype=torch.int8, device="cpu"))
    words_of: dict[str, Any] = {
        "y": y,
        "index": index,
        "m_sizes": m_sizes,
        "named": named,
        "M": M,
        "rows": rows,
        "columns": C,
        "E": E,
        "index_end": rows,
        "m_sizes_step": 1,
        "index_step": 1,
    }
    on.run(-(-M // on.block), **words_of, flags=rowops.NAMES)
    on.run(-(-rows // rowops.CLEARED_ROWS), **words_of, flags=0)
    used = named_rows[: int(counts.sum())]
    stays = torch.zeros(rows + 1, dtype=torch.bool, device="cpu")
    stays[used[used >= 0].long()] = True
    stays[rows] = True
    return on.judged(y, torch.where(stays[:, None], host, 0.0), "y", 0.0)


def _scales(on: _On, M: int, columns: int, scale: Scale) -> torch.Tensor:
    """Memory for the scales of codes of M rows."""
    shape = (columns // scale.columns, scale_columns(M)) if scale.columns else (M,)
    return on.words(torch.zeros(*shape, dtype=torch.float32, device="cpu"))


def _quantize(on: _On, of_x: Scale) -> str | None:
    """Codes and scales of rows that an index picks."""
    draw, C, M = Draw(), 256 if of_x.columns else 320, _T * _TOP_K
    x, order, used = on.rows(draw.normal(_T, C)), draw.order(M), on.used(M)
    codes = on.words(torch.zeros(M, C, dtype=torch.uint8, device="cpu"))
    scale = _scales(on, M, C, of_x)
    flags = rowops.USED | rowops.PICKED
    index = on.words(order)
    on.run(
        _few(M),
        x=x,
        index=index,
        used=used,
        codes=codes,
        scale=scale,
        M=M,
        columns=C,
        top_k=_TOP_K,
        index_step=1,
        flags=flags,
    )
    on.place.wait()
    picked, all_rows = x.cpu()[order.long() // _TOP_K], slice(0, M)
    got = values_of_rows(codes.cpu().view(torch.float8_e4m3fn), scale.cpu(), all_rows)
    return on.judged(got, values_of_rows(*codes_of_rows(picked, of_x), all_rows), "codes", _QUANTISED)


def _order_codes(on: _On) -> str | None:
    """Codes and scales that an index picks, as they arrive, byte for byte."""
    draw, C, M, groups = Draw(), 320, _T * _TOP_K, 5
    host, order, used = draw.integers(0, 256, _T * C).to(torch.uint8).view(_T, C), draw.order(M), on.used()
    x, index, scales = on.words(host), on.words(order), draw.normal(_T, groups)
    picked = order[:_USED].long() // _TOP_K
    any_rows = rowops.ANY_ROWS
    want = host[picked].view(_USED, -1, 64)[..., torch.tensor(K_ORDER, device="cpu")].view(_USED, C)
    for room, strides in (
        (any_rows, (0, groups, 1)),
        (any_rows, (0, 1, _T)),
        (_T // 4, (_T // 4 * groups, 1, _T // 4)),
    ):
        apart, by_row, by_group = strides
        rows = torch.arange(_T, device="cpu")[:, None]
        at = rows // room * apart + rows % room * by_row + torch.arange(groups, device="cpu") * by_group
        placed = on.words(torch.empty_like(scales).view(-1).scatter_(0, at.view(-1), scales.view(-1)))
        codes = on.words(torch.full((M, C), 7, dtype=torch.uint8, device="cpu"))
        scale = on.words(full(groups, scale_columns(M)))
        on.run(
            _few(M),
            x_codes=x,
            x_scale=placed,
            index=index,
            used=used,
            codes=codes,
            scale=scale,
            M=M,
            columns=C,
            groups=groups,
            stride_scale_m=by_row,
            stride_scale_k=by_group,
            stride_scale_e=apart,
            room=room,
            top_k=_TOP_K,
            index_step=1,
            flags=rowops.USED | rowops.PICKED,
        )
        on.place.wait()
        stored, factors = codes.cpu(), scale.cpu()
        if not torch.equal(stored[:_USED], want) or bool((stored[_USED:] != 7).any()):
            return "codes are wrong"
        if not torch.equal(factors[:, :_USED].T, scales[picked]) or bool((factors[:, _USED:] != UNTOUCHED).any()):
            return "scales are wrong"
    return None


def _activation_codes(on: _On, of_x: Scale) -> str | None:
    """Codes and scales of act(gate) * up."""
    draw, I, M = Draw(), 384 if of_x.columns else 448, _T * _TOP_K  # noqa: E741
    used = on.used()
    untouched = torch.full((1, I), 7, dtype=torch.uint8, device="cpu")
    for act, gated, interleaved in _ACTS:
        h = on.rows(draw.normal(M, I * (1 + gated)) * 3)
        codes = on.words(untouched.expand(M, I))
        scale = _scales(on, M, I, of_x)
        flags = _flags(act, gated, interleaved)
        on.run(_few(M), h=h, used=used, codes=codes, scale=scale, M=M, columns=I, flags=flags, **act.words)
        want = _act(h.cpu().float(), act, gated, interleaved).to(on.dtype)[:_USED]
        on.place.wait()
        stored, factors, used_rows = codes.cpu(), scale.cpu(), slice(0, _USED)
        got = values_of_rows(stored[:_USED].view(torch.float8_e4m3fn), factors, used_rows)
        wrong = on.judged(got, values_of_rows(*codes_of_rows(want, of_x), used_rows), f"{act} codes", _QUANTISED)
        if wrong:
            return wrong
        if not torch.equal(stored[_USED:], untouched.expand(M - _USED, I)) or bool(factors[..., _USED:].any()):
            return f"{act}: rows of no expert were stored"
    return None


_WEIGHTS = 2, 128, 192  # E, N and K: of blocks of 64, and of no whole tile


def _weights(on: _On, dtype: torch.dtype) -> torch.Tensor:
    """w [E, N, K] on the host: small numbers, and half of an expert numbers that are between two codes."""
    E, N, K = _WEIGHTS
    draw = Draw()
    w = draw.normal(E, N, K) * 0.05
    w[0, : N // 2] = draw.integers(-96, 97, N // 2 * K).view(N // 2, K) / 16
    w[1, :, :64] = 0
    return w.to(dtype)


def _tensors(on: _On, w: torch.Tensor, *, prepared: bool) -> Quantised:
    """w in the variant's format, on the host, as torch quantises it."""
    format = on.variant.dtype.value
    tensors = empty(format, *_WEIGHTS, w.device)
    if prepared:
        each = [[*quantise(format, of_expert)] for of_expert in w]
        order = ORDERS[format]
        moves = order.prepared, order.prepared_scale, order.prepared_zero, None
        parts = [
            [part if part is None or move is None else move(part) for part, move in zip(row, moves, strict=True)]
            for row in each
        ]
        stacked = [None if column[0] is None else _stack(column) for column in zip(*parts, strict=True)]
        return Quantised(*stacked)  # type: ignore[arg-type]
    quantise_into(format, tensors, w, prepared=False, by_torch=True)
    return tensors


def _stack(column: Sequence[torch.Tensor | None]) -> torch.Tensor:
    parts = [part for part in column if part is not None]
    return cat([part[None] for part in parts], 0)


def _raw(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor's bytes, uint8."""
    return tensor.reshape(-1).view(torch.uint8)


def _weight_flags(dtype: torch.dtype, *, prepared: bool) -> int:
    kind = {torch.float16: rowops.FP16_WEIGHTS, torch.float32: rowops.FP32_WEIGHTS}.get(dtype, 0)
    return kind | (rowops.PREPARED if prepared else 0)


def _same(on: _On, got: torch.Tensor, want: torch.Tensor, what: str) -> str | None:
    """None if ``got`` begins with the bytes that are wanted, and ends with bytes that nothing was stored to."""
    on.place.wait()
    stored, bits = got.cpu(), _raw(want)
    wrong = int((stored[: len(bits)] != bits).sum())
    if wrong:
        return f"{what}: {wrong} of {len(bits)} bytes are wrong"
    return None if bool((stored[len(bits) :] == _AFTER).all()) else f"past {what} something is stored"


_AFTER = 0x5A  # of 64 bytes behind a result


def _room(on: _On, like: torch.Tensor) -> torch.Tensor:
    return on.words(torch.full((_raw(like).numel() + 64,), _AFTER, dtype=torch.uint8, device="cpu"))


def _beside(on: _On, of: Quantised, *, results: bool) -> dict[str, torch.Tensor | int]:
    """The tensors of weights on the GPU by the kernels' names, or room for them; nvfp4's outer scales are given."""
    names = ("words", "scales", "zeros")
    tensors: dict[str, torch.Tensor | int] = {"zeros": 0, "outer": 0}
    for name, tensor in zip(names, of, strict=False):
        if tensor is not None:
            tensors[name] = _room(on, tensor) if results else on.words(_raw(tensor))
    if of.global_scale is not None:
        tensors["outer"] = on.words(of.global_scale)
    return tensors


def _quantize_weights(on: _On) -> str | None:
    """Codes and scales of w in both layouts, of each dtype: torch's bits."""
    E, N, K = _WEIGHTS
    programs = rowops.tiles(rowops.RowOpSpec(RowOp.QUANTIZE_WEIGHTS, on.variant.dtype), E, N, K)
    for dtype, prepared in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
        w = _weights(on, dtype)
        want = _tensors(on, w, prepared=prepared)
        into = _beside(on, want, results=True)
        numbers = {"M": N, "columns": K, "step_expert": N * K, "step_row": K}
        on.run(programs, w=on.words(w), flags=_weight_flags(dtype, prepared=prepared), **into, **numbers)
        for name, tensor in zip(("words", "scales", "zeros"), want, strict=False):
            got = into[name]
            if tensor is not None and isinstance(got, torch.Tensor):
                wrong = _same(on, got, tensor, f"{name}{' prepared' if prepared else ''} of {dtype}")
                if wrong:
                    return wrong
    return None


def _dequantize_weights(on: _On) -> str | None:
    """w of codes and scales in both layouts, in each dtype: torch's bits."""
    E, N, K = _WEIGHTS
    programs = rowops.tiles(rowops.RowOpSpec(RowOp.DEQUANTIZE_WEIGHTS, on.variant.dtype), E, N, K)
    plain = _tensors(on, _weights(on, torch.float32), prepared=False)
    for dtype, prepared in itertools.product((torch.bfloat16, torch.float16, torch.float32), (False, True)):
        tensors = _beside(on, _tensors(on, _weights(on, torch.float32), prepared=prepared), results=False)
        want = torch.stack([values(on.variant.dtype.value, _of(plain, e)) for e in range(E)]).to(dtype)
        w = _room(on, want)
        on.run(programs, w=w, M=N, columns=K, flags=_weight_flags(dtype, prepared=prepared), **tensors)
        wrong = _same(on, w, want, f"w in {dtype}{' of prepared codes' if prepared else ''}")
        if wrong:
            return wrong
    return None


def _of(weights: Quantised, expert: int) -> Quantised:
    return Quantised(*(None if tensor is None else tensor[expert] for tensor in weights))  # type: ignore[arg-type]


def _move_codes(on: _On) -> str | None:
    """Bytes in the one layout and in the other, there and back."""
    E, N, K = _WEIGHTS
    format = on.variant.dtype.value
    stored = empty(format, E, N, K, torch.device("cpu")).codes
    _raw(stored).copy_(Draw().integers(0, 256, _raw(stored).numel()))
    words = torch.stack([ORDERS[format].prepared(codes) for codes in stored])
    programs = rowops.tiles(rowops.RowOpSpec(RowOp.MOVE_CODES, on.variant.dtype), E, N, K)
    for source, want, flags in ((stored, words, 0), (words, stored, rowops.BACK)):
        here, there = on.words(_raw(source)), _room(on, want)
        names = {"stored": there, "words": here} if flags else {"stored": here, "words": there}
        on.run(programs, M=N, columns=K, flags=flags, **names)
        wrong = _same(on, there, want, "stored" if flags else "words")
        if wrong:
            return wrong
    return None


def _largest_weight(on: _On) -> str | None:
    """The bits of the largest number of some rows; NaN is larger than all."""
    E, N, K = _WEIGHTS
    spec = rowops.RowOpSpec(RowOp.LARGEST_WEIGHT, on.variant.dtype)
    programs, rows = rowops.tiles(spec, E, N, K), rowops.tile_of(spec.op, spec.dtype).rows
    for dtype in (torch.bfloat16, torch.float16, torch.float32):
        w = _weights(on, dtype)
        w[1, 77, 5], w[1, 9, K - 1] = float("-inf"), float("nan")
        want = (w.float().view(torch.int32) & 0x7FFFFFFF).view(E * N // rows, -1).amax(1).clamp_(max=0x7F800001)
        most = _room(on, want)
        numbers = {"M": N, "columns": K, "step_expert": N * K, "step_row": K}
        on.run(programs, w=on.words(w), most=most, flags=_weight_flags(dtype, prepared=False), **numbers)
        wrong = _same(on, most, want, f"most of {dtype}")
        if wrong:
            return wrong
    return None


_TRIALS: dict[RowOp, Callable[[_On], str | None]] = {
    RowOp.GATHER: _gather,
    RowOp.ACTIVATION: _activation,
    RowOp.ACTIVATION_GRAD: _activation_grad,
    RowOp.COMBINE: _combine,
    RowOp.PLACE_ROWS: _place_rows,
    RowOp.SORT_SLOTS: _sort_slots,
    RowOp.CLEAR: _clear,
    RowOp.QUANTIZE: partial(_quantize, of_x=_BLOCKS),
    RowOp.ACTIVATION_CODES: partial(_activation_codes, of_x=_BLOCKS),
    RowOp.QUANTIZE_ROWS: partial(_quantize, of_x=_ROWS),
    RowOp.ORDER_CODES: _order_codes,
    RowOp.ACTIVATION_ROW_CODES: partial(_activation_codes, of_x=_ROWS),
    RowOp.QUANTIZE_WEIGHTS: _quantize_weights,
    RowOp.DEQUANTIZE_WEIGHTS: _dequantize_weights,
    RowOp.MOVE_CODES: _move_codes,
    RowOp.LARGEST_WEIGHT: _largest_weight,
}
