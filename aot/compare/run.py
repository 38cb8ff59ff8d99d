"""Compare the cells of some models: check each library against fp32, then time all in turns (aot/measure/clock.py).

A library's metadata on the rows of the experts is made beforehand and not timed.

A cell is one grouped product in bf16, rows sorted by expert: forward y[g] = x[g] @ w[g].T, dX dx[g] = dy[g] @ w[g],
dW dw[g] = dy[g].T @ x[g].
"""

from __future__ import annotations

import importlib
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from typing import Any, TypeAlias

import torch

from ...artifacts.errors import HostError
from ...artifacts.records import DType, Op, Problem
from ...runtime import explain, grouped_gemm, grouped_gemm_dW, grouped_gemm_dX
from ..measure.clock import Clock, HostClock, Replayed
from ..measure.inputs import MAX_ERROR, activations, routed_rows, weights
from ..models.layer import LayerGemm, LayerShard
from .result import OURS, ComparedCell, Comparison

Call: TypeAlias = Callable[[], torch.Tensor]


@dataclass(frozen=True)
class Inputs:
    """One problem's tensors on one device: x [M, K], w [E, N, K], m_sizes [E], and for a gradient dy [M, N]."""

    x: torch.Tensor
    w: torch.Tensor
    m_sizes: torch.Tensor
    dy: torch.Tensor | None = None

    @property
    def grad(self) -> torch.Tensor:
        """``dy`` of a gradient; AssertionError for a forward."""
        if self.dy is None:
            raise AssertionError("a gradient's inputs have a dy")
        return self.dy


def relative_error(result: torch.Tensor, inputs: Inputs, op: str = "forward") -> float:
    """||result - ref|| / ||ref||, ref in fp32, expert by expert. NaN if anything is not finite.

    forward: y[g] = x[g] @ w[g].T; dX: dx[g] = dy[g] @ w[g]; dW: dw[g] = dy[g].T @ x[g];
    silu: silu(gate) * up of the forward's left and right half of columns.
    """
    wrong = total = torch.zeros((), dtype=torch.float64, device=result.device)  # on the GPU, to be read once
    start = 0
    torch.backends.cuda.matmul.allow_tf32 = False  # the reference is fp32, whatever the call under test may use
    for expert, rows in enumerate(inputs.m_sizes.tolist()):
        here = slice(start, start + rows)
        start += rows
        if not rows and op != "dW":
            continue
        if op in ("forward", "silu"):
            want = inputs.x[here].float() @ inputs.w[expert].float().T
            if op == "silu":
                gate, up = want.chunk(2, 1)
                want = torch.nn.functional.silu(gate) * up
        else:
            dy = inputs.grad[here].float()
            want = dy @ inputs.w[expert].float() if op == "dX" else dy.T @ inputs.x[here].float()
        got = result[expert if op == "dW" else here].float()
        wrong = wrong + (got - want).square().sum(dtype=torch.float64)
        total = total + want.square().sum(dtype=torch.float64)
    return float((wrong / total).sqrt()) if total else 0.0


def ours(op: str, inputs: Inputs, w_layout: str = "nk") -> Call:
    """pretuned's public call. With ``kn`` inputs.w is a view of [E, K, N], and dW gives dw as [E, K, N]."""
    w_arg = inputs.w if w_layout == "nk" else inputs.w.transpose(1, 2)
    if op == "forward":
        return partial(grouped_gemm, inputs.x, w_arg, inputs.m_sizes, w_layout=w_layout)
    if op == "dX":
        return partial(grouped_gemm_dX, inputs.grad, w_arg, inputs.m_sizes, w_layout=w_layout)
    return partial(grouped_gemm_dW, inputs.grad, inputs.x, inputs.m_sizes, w_layout=w_layout)


def grouped_mm(op: str, inputs: Inputs) -> Call:
    """A call of torch's grouped_mm."""
    ends = inputs.m_sizes.cumsum(0).to(torch.int32)
    if op == "forward":
        return partial(torch._grouped_mm, inputs.x, inputs.w.transpose(1, 2), offs=ends)
    if op == "dX":
        return partial(torch._grouped_mm, inputs.grad, inputs.w, offs=ends)
    return partial(torch._grouped_mm, inputs.grad.t(), inputs.x, offs=ends)


def matmul_loop(op: str, inputs: Inputs) -> Call:
    """A call of one torch.matmul for each expert with rows, whose numbers are known on the host, into one result."""
    E, N, K = inputs.w.shape
    shape = {"forward": (len(inputs.x), N), "dX": (len(inputs.x), K), "dW": (E, N, K)}[op]
    out = torch.zeros(shape, dtype=inputs.x.dtype, device=inputs.x.device)
    ends = inputs.m_sizes.cumsum(0).tolist()
    spans = [
        (e, slice(end - n, end)) for e, (end, n) in enumerate(zip(ends, inputs.m_sizes.tolist(), strict=True)) if n
    ]

    without = [e for e, n in enumerate(inputs.m_sizes.tolist()) if not n] if op == "dW" else []

    def call() -> torch.Tensor:
        for e in without:
            out[e].zero_()
        for e, rows in spans:
            if op == "forward":
                torch.mm(inputs.x[rows], inputs.w[e].T, out=out[rows])
            elif op == "dX":
                torch.mm(inputs.grad[rows], inputs.w[e], out=out[rows])
            else:
                torch.mm(inputs.grad[rows].T, inputs.x[rows], out=out[e])
        return out

    return call


TORCH, LOOP = "torch grouped_mm", "torch matmul loop"
VLLM, TRITON_KERNELS, DEEPGEMM, HUMMING = "vLLM", "triton_kernels", "DeepGEMM", "Humming"
_ROWS_A_BLOCK = 128  # in DeepGEMM's contiguous call
_FEW_ROWS = 4  # rows x this <= experts: vLLM gives each row a block of its own
ROWS_A_STEP = 64  # triton_kernels' dW sums this many rows at a time


class NoCall(Exception):
    """The library has no call for this product; the text says why."""


@dataclass(frozen=True, slots=True)
class PeerProduct:
    """One cell, with all that libraries choose a kernel by: ``width`` is the layer's I, ``top_k`` experts a token."""

    op: str
    inputs: Inputs
    width: int
    top_k: int
    tokens: int


@dataclass(frozen=True, slots=True)
class PreparedCall:
    """A call; for a padded result, ``at`` is the places of the sorted rows in it."""

    call: Call
    at: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class Library:
    """An installed library. ``make`` returns its call, or raises if it has none."""

    name: str
    version: str
    make: Callable[[PeerProduct], PreparedCall]


@dataclass(frozen=True, slots=True)
class Libraries:
    """The libraries that can be timed here, and why the others can't."""

    here: tuple[Library, ...]
    absent: dict[str, str]


def find_libraries(device: torch.device) -> Libraries:
    """Look for all libraries. A library that is not installed is not imported."""
    here = [
        Library(TORCH, torch.__version__, lambda product: PreparedCall(grouped_mm(product.op, product.inputs))),
        Library(LOOP, torch.__version__, lambda product: PreparedCall(matmul_loop(product.op, product.inputs))),
    ]
    absent: dict[str, str] = {}
    for name, look in ((VLLM, _vllm), (TRITON_KERNELS, _triton_kernels), (DEEPGEMM, _deepgemm), (HUMMING, _humming)):
        try:
            here.append(look(device))
        except NoCall as why:
            absent[name] = str(why)
        except Exception as error:  # another version, or a failing import
            absent[name] = reason(error)
    return Libraries(tuple(here), absent)


def reason(error: Exception) -> str:
    """The first line of an error's text, or its type if it has none."""
    lines = [line.strip() for line in str(error).strip().splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__


def _needs_gpu(package: str, device: torch.device) -> None:
    if find_spec(package) is None:
        raise NoCall("not installed")
    if device.type != "cuda":
        raise NoCall("runs on a GPU alone")


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "unknown"


def _vllm(device: torch.device) -> Library:
    _needs_gpu("vllm", device)
    package = "vllm.model_executor.layers.fused_moe"
    moe: Any = importlib.import_module(f"{package}.fused_moe")
    align: Any = importlib.import_module(f"{package}.moe_align_block_size").moe_align_block_size
    bf16: Any = importlib.import_module("triton.language").bfloat16
    return Library(VLLM, _version("vllm"), partial(_vllm_call, moe, align, bf16))


def _vllm_call(moe: Any, align: Any, bf16: Any, product: PeerProduct) -> PreparedCall:
    """fused_moe_kernel with vLLM's config for the layer; its sorted row indices are made beforehand."""
    if product.op != "forward":
        raise NoCall("its kernel has no gradients")
    x, w, n = product.inputs.x, product.inputs.w, product.inputs.m_sizes
    M, (E, N, K) = len(x), w.shape
    H = N if product.width == K else K
    config = moe.try_get_optimal_moe_config(
        (E, 2 * product.width, H), (E, H, product.width), product.top_k, None, product.tokens
    )
    owner = torch.repeat_interleave(torch.arange(E, device=x.device), n.long()).int()
    if M * _FEW_ROWS <= E:
        rows = None, owner, torch.tensor([M * config["BLOCK_SIZE_M"]], dtype=torch.int32, device=x.device)
    else:
        rows = align(owner[:, None], config["BLOCK_SIZE_M"], E)
    formats = ("use_fp8_w8a8", "use_int8_w8a8", "use_int8_w8a16", "use_int4_w4a16", "per_channel_quant")
    plain = dict.fromkeys(formats, False)

    def call() -> torch.Tensor:
        y = x.new_empty(M, 1, N)
        moe.invoke_fused_moe_triton_kernel(
            x, w, y, None, None, None, *rows, False, 1, config, compute_type=bf16, **plain
        )
        return y.view(M, N)

    return PreparedCall(call)


def _triton_kernels(device: torch.device) -> Library:
    bundled = find_spec("triton_kernels") is None and find_spec("vllm") is not None
    _needs_gpu("vllm" if bundled else "triton_kernels", device)
    if bundled:
        importlib.import_module("vllm.utils.import_utils").import_triton_kernels()
    kernels = TritonKernels()
    label = f"of vLLM {_version('vllm')}" if bundled else _version("triton_kernels")
    return Library(TRITON_KERNELS, label, lambda cell: PreparedCall(kernels.triton_kernels(cell.op, cell.inputs)))


def _deepgemm(device: torch.device) -> Library:
    _needs_gpu("deep_gemm", device)
    deep_gemm: Any = importlib.import_module("deep_gemm")
    if not hasattr(deep_gemm, "m_grouped_bf16_gemm_nt_contiguous"):
        raise NoCall(f"its version {_version('deep_gemm')} has no grouped product of bf16")
    return Library(DEEPGEMM, _version("deep_gemm"), partial(_deepgemm_call, deep_gemm))


def _deepgemm_call(deep_gemm: Any, product: PeerProduct) -> PreparedCall:
    """DeepGEMM's contiguous call: an expert's rows are padded to whole blocks beforehand, and so is the result."""
    if product.op != "forward":
        raise NoCall("its gradients want other layouts")
    x, w, n = product.inputs.x, product.inputs.w, product.inputs.m_sizes.long()
    whole = (n + _ROWS_A_BLOCK - 1) // _ROWS_A_BLOCK * _ROWS_A_BLOCK
    experts = torch.repeat_interleave(torch.arange(len(w), device=x.device), whole).int()
    shift = (whole.cumsum(0) - whole) - (n.cumsum(0) - n)
    at = torch.arange(len(x), device=x.device) + torch.repeat_interleave(shift, n)
    rows = x.new_zeros(len(experts), x.shape[1])
    rows[at] = x
    y = x.new_empty(len(experts), w.shape[1])

    def call() -> torch.Tensor:
        deep_gemm.m_grouped_bf16_gemm_nt_contiguous(rows, w, y, experts)
        return y

    return PreparedCall(call, at)


def _humming(device: torch.device) -> Library:
    _needs_gpu("humming", device)
    raise NoCall("reads quantised weights alone; these are bf16")


class TritonKernels:
    """triton_kernels' matmul_ogs, from the package of that name on Python's path."""

    def __init__(self) -> None:
        self.ogs: Any = importlib.import_module("triton_kernels.matmul_ogs")
        self.metadata: Any = importlib.import_module("triton_kernels.tensor").make_ragged_tensor_metadata

    def triton_kernels(self, op: str, inputs: Inputs) -> Call:
        """A call of y[g] = x[g] @ w[g].T, dx[g] = dy[g] @ w[g] or dw[g] = dy[g].T @ x[g] by matmul_ogs."""
        if op == "dW":
            return self._weight(inputs, inputs.grad)
        rows, w = (inputs.x, inputs.w.transpose(1, 2)) if op == "forward" else (inputs.grad, inputs.w)
        routing = self.ogs.RoutingData(
            None, inputs.m_sizes, len(w), 1, expt_data=self.metadata(inputs.m_sizes, len(rows))
        )
        return lambda: self.ogs.matmul_ogs(rows, w, None, routing)

    def _weight(self, inputs: Inputs, dy: torch.Tensor) -> Call:
        """A call of dw, on rows of both operands that are padded beforehand."""
        m_sizes, left, right = inputs.m_sizes, padded(dy, inputs.m_sizes), padded(inputs.x, inputs.m_sizes)
        base = self.ogs.RoutingData(None, m_sizes, len(m_sizes), 1, expt_data=self.metadata(m_sizes, len(dy)))
        inner = self.ogs.InnerRoutingData(base, ROWS_A_STEP, x_is_padded=True, w_is_padded=True)
        return lambda: self.ogs.matmul_ogs(left.t(), right, None, inner_routing_data=inner)


def padded(rows: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
    """Each expert's rows, padded with zeros to whole steps."""
    whole = (m_sizes.long() + ROWS_A_STEP - 1) // ROWS_A_STEP * ROWS_A_STEP
    shift = (whole.cumsum(0) - whole) - (m_sizes.long().cumsum(0) - m_sizes)
    out = rows.new_zeros(int(whole.sum()), rows.shape[1])
    out[torch.arange(len(rows), device=rows.device) + torch.repeat_interleave(shift, m_sizes.long())] = rows
    return out


@dataclass
class CapturedCall:
    """A call in a graph; ``held`` is the tensor that a replay writes. Every replay reads the tensors of the call."""

    call: Call
    graph: Replayed
    held: list[torch.Tensor]

    @property
    def result(self) -> torch.Tensor:
        """The tensor that the last replay wrote."""
        return self.held[0]


def capture_call(clock: Clock | HostClock, call: Call) -> CapturedCall:
    """Run ``call`` once, then capture it."""
    held: list[torch.Tensor] = []

    def once() -> torch.Tensor:
        held[:] = [call()]
        return held[0]

    clock.flush.zero_()  # flush counters in L2 too
    return CapturedCall(call, clock.capture(once), held)


def replayed_error(
    clock: Clock | HostClock, captured: CapturedCall, inputs: Inputs, op: str, at: torch.Tensor | None = None
) -> float:
    """The error of a replay's result, written over NaN; ``at``: the places of sorted rows in a padded result."""
    captured.result.fill_(float("nan"))
    clock.flush.zero_()
    captured.graph.replay()
    return relative_error(captured.result if at is None else captured.result[at], inputs, op)


FIRST_OF_TRAINING = 1024  # tokens: smaller batches are not trained
_ROUNDS = (5, 50)


def cells_of(
    shards: Sequence[LayerShard], ops: Sequence[Op], tokens: Sequence[int]
) -> list[tuple[LayerShard, LayerGemm, Op, int]]:
    """The cells to time, few tokens first: arithmetic heats the chip, and its clock falls."""
    return [
        (shard, gemm, op, T)
        for many in (False, True)
        for shard in shards
        for gemm in shard.gemms()
        for op in ops
        for T in tokens
        if (T >= FIRST_OF_TRAINING) is many and (op is Op.FORWARD or many)
    ]


def compare(
    shards: Sequence[LayerShard],
    ops: Sequence[Op],
    tokens: Sequence[int],
    device: torch.device,
    budget_ms: float,
    on_cell: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison:
    """Time all cells in bf16, each library up to ``budget_ms`` a cell.

    Raises
    ------
    HostError
        if the largest weights do not fit the GPU.
    """
    begun = time.monotonic()
    wanted = cells_of(shards, ops, tokens)
    there = find_libraries(device)
    bench = _Compared(there, device, budget_ms, max(gemm.E * gemm.N * gemm.K for _, gemm, _, _ in wanted))
    cells = []
    for i, cell in enumerate(bench.all(wanted)):
        cells.append(cell)
        on_cell(i + 1, len(wanted))
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "CPU"
    versions = {library.name: library.version for library in there.here}
    return Comparison(name, versions, dict(there.absent), tuple(cells), time.monotonic() - begun)


class _Compared:
    """The comparison on one device. It keeps memory for the largest weights: freeing much slows later launches."""

    def __init__(self, there: Libraries, device: torch.device, budget_ms: float, most: int) -> None:
        self._there, self._device, self._budget_ms = there, device, budget_ms
        self._clock: Clock | HostClock = Clock(device) if device.type == "cuda" else HostClock()
        try:
            self._room = torch.empty(most, dtype=torch.bfloat16, device=device)
        except torch.cuda.OutOfMemoryError:
            raise HostError(
                f"no room on this GPU for weights of {2 * most / 2**30:.1f} GiB: name a shard of the model, e.g. tp=4"
            ) from None

    def all(self, wanted: Sequence[tuple[LayerShard, LayerGemm, Op, int]]) -> Iterator[ComparedCell]:
        """Yield the cells in order; weights are made when another product's cells begin."""
        last: LayerGemm | None = None
        for shard, gemm, op, T in wanted:
            if gemm != last:
                w = weights(gemm.E, gemm.N, gemm.K, torch.bfloat16, self._device, self._room)
                last = gemm
            try:
                with torch.no_grad():
                    cell = self._cell(shard, gemm, op, T, w)
            except torch.cuda.OutOfMemoryError as error:
                raise HostError(f"{gemm.role} {op.value} at {T} tokens: {reason(error)}. Name fewer --tokens") from None
            yield cell
            self._clock.release()

    def _cell(self, shard: LayerShard, gemm: LayerGemm, op: Op, T: int, w: torch.Tensor) -> ComparedCell:
        top_k = max(1, min(gemm.E, math.ceil(shard.experts_per_token / shard.ep)))
        M = T * top_k
        dy = None if op is Op.FORWARD else activations(M, gemm.N, w.dtype, self._device)
        m_sizes = routed_rows(gemm.E, top_k, T).to(self._device)
        inputs = Inputs(activations(M, gemm.K, w.dtype, self._device), w, m_sizes, dy)
        product = PeerProduct(op.value, inputs, shard.width, top_k, T)
        libraries = (Library(OURS, "", lambda cell: PreparedCall(ours(cell.op, cell.inputs))), *self._there.here)
        graphs, errors, left_out = [], {}, {}
        names = []
        for library in libraries:
            try:
                prepared = library.make(product)
                captured = capture_call(self._clock, prepared.call)
                error = replayed_error(self._clock, captured, inputs, op.value, prepared.at)
            except torch.cuda.OutOfMemoryError:
                left_out[library.name] = "no room on this GPU"
            except NoCall as why:
                left_out[library.name] = str(why)
            except Exception as failed:  # an error of one library: the others go on
                if library.name == OURS:
                    raise
                left_out[library.name] = reason(failed)
                if self._device.type == "cuda":
                    torch.cuda.synchronize(self._device)  # an illegal access ends the run here
            else:
                if error < MAX_ERROR:
                    names.append(library.name)
                    graphs.append(captured.graph)
                    errors[library.name] = float(f"{error:.3g}")
                else:
                    left_out[library.name] = f"wrong: relative error {error:.2g}, wanted below {MAX_ERROR}"
        times = self._times(graphs)
        return ComparedCell(
            str(shard.name),
            shard.tp,
            shard.ep,
            gemm.role,
            op.value,
            T,
            M,
            gemm.E,
            gemm.N,
            gemm.K,
            self._runs(Problem(op, DType.BF16, gemm.E, gemm.N, gemm.K), M),
            {name: round(us, 3) for name, us in zip(names, times, strict=True)},
            errors,
            left_out,
        )

    def _times(self, graphs: Sequence[Replayed]) -> list[float]:
        """The medians in microseconds, in turns; the first two rounds warm up and show how many fit the budget."""
        if not graphs:
            return []
        least, most = _ROUNDS
        once = sum(row[-1] for row in self._clock.rounds_us(graphs, 2))
        rounds = max(least, min(most, int(len(graphs) * self._budget_ms * 1000 / max(once, 1.0))))
        return [statistics.median(row) for row in self._clock.rounds_us(graphs, rounds)]

    def _runs(self, problem: Problem, M: int) -> str:
        """The kernel of pretuned's call: a config, ``torch`` if no bundle has a kernel, ``reference`` on the CPU."""
        if self._device.type != "cuda":
            return "reference"
        explanation = explain(problem, M=M)
        if explanation.torch_us is not None:
            return "torch, measured faster"
        return str(explanation.chosen.config) if explanation.chosen is not None else explanation.runs
