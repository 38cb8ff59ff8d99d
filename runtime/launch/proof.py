"""Self-test of kernels that were never run on a GPU's capability: a small GEMM, compared with torch.

A bundle says where a variant was measured, and so tested (``BundleFile.judged_on``). On any other capability, and
for code that was never measured, ``loader.may_run`` runs a self-test before the first use on a machine: some
milliseconds on that GPU (``trials.py`` for row kernels, this file for GEMMs). ``runtime/verdicts.py`` keeps the result.
A wrong variant is not used from then on: dispatch selects another, or torch. In a graph capture no test can run, so
untested code is not used.

Only a wrong result, a fault of the GPU or a hang makes code wrong. A test that fails otherwise says nothing about the
code: this process leaves it out, and the next process tests it again.
"""

from __future__ import annotations

import contextlib
import logging
import threading
import time
from collections.abc import Iterator

import torch

from ...artifacts.bundle_file import BundleFile
from ...artifacts.errors import CudaError
from ...artifacts.limits import printable
from ...artifacts.records import PRECISIONS, Fusion, Layout, LocalGpu, Op, RowOp, Variant, cuda_version, dtypes_of
from ...artifacts.tuples import NamedTuple
from ...kernels import reference
from ...kernels.spec import takes_codes_of_x
from .. import verdicts
from ..driver import cuda
from ..driver.cuda import Unfinished
from ..driver.device import device as device_of
from ..weights.expert_weights import ExpertWeights
from ..weights.row_codes import codes_of_rows, values_of_rows, values_on_load
from . import gemm
from .trials import TORCH, UNTOUCHED, Draw, TrialPlace, full, off, rounding, trial_of_pass

_LONGEST_S = 30.0  # longest test: other processes may use the GPU
_LONGEST_SLEEP_S = 0.5  # most time counted between two checks: more passes only while the process is stopped
_COUNTS = (37, 0, 300, 1, 2, 24)  # rows of each expert
_NAN_ROW = 338  # first row of the fifth expert
_NAN_TOKEN = 100
_M, _TOP_K = 370, 2  # rows, the last 6 of no expert; slots of each row of x, if gathered

_log = logging.getLogger(__name__)


def proven(bundle: BundleFile, kernel: gemm.LoadedKernel, local: LocalGpu) -> verdicts.Verdict | None:
    """Test a kernel, keep the result, log a wrong one; None where it could not be tested, which is logged, too."""
    began = time.perf_counter()
    broken = None
    try:
        wrong = tried(kernel)
    except Unfinished as error:
        wrong, broken = str(error), error
    except (torch.cuda.OutOfMemoryError, cuda.OutOfMemory, cuda.Unusable):
        raise
    except Exception as error:
        verdicts.leave_out(kernel.variant, local)
        _log.warning(
            "pretuned: could not test %s of %s on %s: %s. This process runs another kernel, or torch, instead; "
            "the next process tests it again",
            _named(kernel.variant),
            printable(bundle.path),
            local.gpu.name,
            first_line(error),
        )
        return None
    result = verdicts.verdict(wrong is None, wrong or "")
    verdicts.note(kernel.variant, local, result)
    if wrong is None:
        _log.info(
            "pretuned: %s passed its self-test on %s, in %.1f ms",
            _named(kernel.variant),
            local.gpu.name,
            (time.perf_counter() - began) * 1e3,
        )
        return result
    _log.error("%s", complaint(bundle.path, kernel.variant, local, wrong))
    if broken is not None:
        raise CudaError(f"{broken}. It is left out from now on: start this process anew") from broken
    return result


def complaint(path: str, variant: Variant, local: LocalGpu, why: str) -> str:
    """The one line about code that is wrong: all that a maintainer needs."""
    name = path.rpartition("/")[2]
    return printable(
        f"pretuned: wrong on this GPU and left out from now on (another kernel, or torch, runs instead): "
        f"{_named(variant)}, revision {variant.revision}, of {name}, cubin sha256 {variant.cubin_sha256.hex()}, "
        f"on {local}, driver for CUDA {cuda_version(local.gpu.driver)}: {why}. "
        "Please file this line as an issue of pretuned"
    )


def _named(variant: Variant) -> str:
    config = " ".join(f"{name}={value}" for name, value in variant.config)
    what = f"{variant.entry} {variant.op.value} {variant.dtype.value} w={variant.layout.value}"
    fused = f" {variant.fusion}" if variant.fusion else ""
    return f"{what}{fused} {config}" + (" unaligned" if variant.alignment == 1 else "")


def tried(kernel: gemm.LoadedKernel) -> str | None:
    """Test the variant on its GPU; return its fault in words, None if it is right.

    It runs in a thread of its own, which has none of the caller's modes: autocast, gradients, a trace, another stream.

    Raises
    ------
    Unfinished
        where it faults, or does not end.
    Unusable
        where the GPU could not be used before the trial began.
    Exception
        any other: the trial could not be made, and says nothing about the code.
    """
    outcome: list[str | BaseException | None] = []

    def work() -> None:
        try:
            with trial_place(kernel.function.device) as here:
                try:
                    here.wait()
                except Exception as error:  # an earlier launch's error, not the tested kernel's
                    raise cuda.Unusable(f"the GPU can't be used: {first_line(error)}") from error
                outcome.append(_tried(kernel, here))
        except BaseException as error:
            outcome.append(error)

    thread = threading.Thread(target=work, name="pretuned-proof", daemon=True)
    thread.start()
    thread.join()
    if isinstance(outcome[0], BaseException):
        raise outcome[0]
    return outcome[0]


def _tried(kernel: gemm.LoadedKernel, here: TrialPlace) -> str | None:
    try:
        return trial(kernel, here)
    except Unfinished:
        raise
    except Exception as error:
        try:
            here.wait()
        except Exception as after:
            if isinstance(after, Unfinished) or cuda.is_fault(after):
                raise Unfinished(f"{_named(kernel.variant)}: {first_line(after)}") from error
        raise
    finally:
        device_of(kernel.function.device).counters.forget(here.stream)  # wrong code may have left anything there


def first_line(error: BaseException) -> str:
    """The first line of an error's text (torch adds advice in further lines), or its type where it has none."""
    return next(iter(str(error).splitlines()), "") or type(error).__name__


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
    """A small run of a variant, in each form of call that runs it: what it gets wrong, in words, or None.

    Raises
    ------
    CudaError
        where the driver refuses a launch, or what was launched does not end.
    """
    variant = kernel.variant
    if isinstance(variant.op, RowOp):
        return trial_of_pass(variant, kernel.function, variant.op, here)
    if variant.op is Op.DW:
        return _weight(kernel, here)
    on = _operands(variant, here)
    biased = Fusion.BIAS if variant.dtype.quantised and variant.fusion is Fusion.LOW_RANK else Fusion.NONE
    for form, zero_tail in ((fusion | biased, zeroes) for fusion, zeroes in _FORMS[variant.fusion]):
        wrong = _rows(kernel, here, on, form, zero_tail)
        if wrong:
            return f"{f'{form.name} ' if form else ''}y{' with zero_tail' if zero_tail else ''}{wrong}"
    return None


_RANK = 72  # of a low-rank part: more than a step of a reduction, and no whole one
_MOVED = Fusion.WEIGHT | Fusion.BIAS
_FORMS = {
    Fusion.NONE: ((Fusion.NONE, False), (Fusion.NONE, True)),
    Fusion.SCATTER: ((Fusion.BIAS, True), (Fusion.SCATTER, True), (Fusion.SCATTER | _MOVED, False)),
    Fusion.GATHER: ((Fusion.GATHER, False), (Fusion.GATHER | Fusion.SCATTER | _MOVED, True)),
    Fusion.SILU: ((Fusion.SILU, False),),
    Fusion.SILU | Fusion.GATHER: ((Fusion.SILU | Fusion.GATHER, False),),
    Fusion.LOW_RANK: ((Fusion.LOW_RANK, False), (Fusion.LOW_RANK, True)),
    Fusion.LOW_RANK | Fusion.GATHER: ((Fusion.LOW_RANK | Fusion.GATHER | Fusion.BIAS, False),),
}  # fusion of the kernel -> (fusion of a call, its zero_tail) to test


class _Operands(NamedTuple):
    """x [M, reduction] and w as they are on the GPU, and their values in float32 on the host.

    w's are [E, columns, reduction]. ``scale`` are x's scales, where it is of codes.
    """

    columns: int
    reduction: int
    w_kn: bool
    x: torch.Tensor
    w: torch.Tensor | ExpertWeights
    x_values: torch.Tensor
    w_values: torch.Tensor
    scale: torch.Tensor | None = None


def _operands(variant: Variant, here: TrialPlace) -> _Operands:
    draw, E = Draw(), len(_COUNTS)
    if variant.dtype.quantised:
        return _of_codes(variant, draw, here)
    aligned, dtype = variant.alignment > 1, TORCH[variant.dtype]
    columns, reduction = (272, 200) if aligned else (134, 67)
    kn = (variant.layout is Layout.KN) == (variant.op is Op.FORWARD)
    x = _some_nan(_rows_of_x(draw, reduction)).to(dtype)
    w = (draw.normal(E, columns, reduction) * reduction**-0.5).to(dtype)
    placed = here.put(w.transpose(1, 2).contiguous() if kn else w, aligned=aligned)
    return _Operands(columns, reduction, kn, here.put(x, aligned=aligned), placed, x.float(), w.float())


def _rows_of_x(draw: Draw, reduction: int) -> torch.Tensor:
    """One row of NaN, and those that belong to no expert."""
    x = draw.normal(_M, reduction)
    x[_NAN_ROW] = x[sum(_COUNTS) :] = float("nan")
    return x


def _some_nan(x: torch.Tensor) -> torch.Tensor:
    """x with NaN in row ``_NAN_TOKEN``, among the rows that a gather reads."""
    x[_NAN_TOKEN] = float("nan")
    return x


def _of_codes(variant: Variant, draw: Draw, here: TrialPlace) -> _Operands:
    dtype, ordered = variant.dtype, variant.layout is not Layout.STORED
    N, K = (256, 256) if ordered else (272, 224) if variant.alignment > 1 else (150, 74)
    format = next(name for name in PRECISIONS if dtype in dtypes_of(name))
    w = ExpertWeights.quantize(draw.normal(len(_COUNTS), N, K) * K**-0.5, format)
    values = w.dequantize(torch.float32)
    values = values.transpose(1, 2) if variant.op is Op.DX else values
    columns, reduction = values.shape[1:]
    placed = (w.prepare() if ordered else w).to(here.device)
    x = _some_nan(_rows_of_x(draw, reduction)).bfloat16()
    if not takes_codes_of_x(dtype, variant.layout):
        # What it quantises lies half way to a code: between two either one would be right.
        x = x.float().lerp(values_on_load(x, dtype), 0.5).bfloat16()
        there, read = here.put(x, aligned=variant.alignment > 1), values_on_load(x, dtype)
        return _Operands(columns, reduction, variant.op is Op.DX, there, placed, read, values)
    of_x = dtype.precision.x.scale
    if of_x is None:
        raise AssertionError(f"{dtype.value} does not quantise x")
    codes, scale = codes_of_rows(x, of_x)
    x_values, there = values_of_rows(codes, scale, slice(0, _M)), here.put(codes.view(torch.uint8))
    return _Operands(columns, reduction, False, there, placed, x_values, values, here.put(scale))


def _rows(kernel: gemm.LoadedKernel, here: TrialPlace, on: _Operands, form: Fusion, zero_tail: bool) -> str | None:
    """y of one form of call, and the memory around it."""
    variant, draw, E = kernel.variant, Draw(), len(_COUNTS)
    gathers, scatters, silu = (fusion in form for fusion in (Fusion.GATHER, Fusion.SCATTER, Fusion.SILU))
    aligned, dtype = variant.alignment > 1, TORCH[variant.dtype]
    used, wide = sum(_COUNTS), on.columns // 2 if silu else on.columns
    index, weights, bias = draw.order(_M), draw.normal(_M), draw.normal(E, on.columns).to(dtype)
    if scatters:
        index[5], index[40] = -1, _M  # rows that go nowhere
    x_rows = slice(0, _M // _TOP_K) if gathers else slice(0, _M)
    memory = full(_M + 2, wide + 8, dtype=dtype)
    placed = here.put(memory, aligned=aligned)
    indexed = gathers or scatters or Fusion.WEIGHT in form
    fused = gemm.Fused(form, 1, _TOP_K if gathers else 1, zero_tail)
    R = _RANK if Fusion.LOW_RANK in form else 0
    launch = gemm.product_launcher(kernel, N=on.columns, K=on.reduction, E=E, m_sizes_step=1, fused=fused, R=R)
    words = {"x": on.x.data_ptr(), "stride_y_m": wide + 8, "M": _M}
    keep = [here.put(index), here.put(weights), here.put(bias, aligned=aligned)]
    at = [tensor.data_ptr() for tensor in keep]
    words |= {"index": at[0], "index_end": _M} if indexed else {"index": 0, "index_end": 0}
    words |= {"row_weights": at[1] if Fusion.WEIGHT in form else 0, "bias": at[2] if Fusion.BIAS in form else 0}
    words |= gemm.words_of(on.w, launch) if isinstance(on.w, ExpertWeights) else {"w": on.w.data_ptr()}
    words |= {"stride_x_m": on.reduction} if on.scale is None else {"x_scale": on.scale.data_ptr()}
    if Fusion.LOW_RANK in form:
        u, second = draw.normal(_M, _RANK).to(dtype), draw.normal(E, on.columns, _RANK).to(dtype)
        keep += [here.put(u), here.put(second.transpose(1, 2).contiguous() if on.w_kn else second)]
        words |= {"low_x": keep[-2].data_ptr(), "low_w": keep[-1].data_ptr()}
    counts = torch.tensor(_COUNTS, dtype=torch.int32, device="cpu")
    m_sizes = here.put(counts)
    for _ in range(2):  # what it counts with is as it was
        launch(placed[1:-1].data_ptr(), m_sizes.data_ptr(), here.stream, **words)
    want = memory.float()
    result = want[1:-1, :wide]
    reference.rows(
        on.x_values[x_rows],
        on.w_values,
        counts,
        result,
        M=_M,
        layout=Layout.NK,
        index=index if indexed else None,
        index_end=_M,
        gather_divisor=_TOP_K if gathers else 0,
        scatter=scatters,
        row_weights=weights if Fusion.WEIGHT in form else None,
        bias=bias.float() if Fusion.BIAS in form else None,
        silu=silu,
    )
    if Fusion.LOW_RANK in form:
        reference.rows(u.float(), second.float(), counts, added := full(_M, wide), M=_M, layout=Layout.NK)
        result[:used] += added[:used]
    if launch.zeroes:
        rest = (result == UNTOUCHED).all(1) if scatters else torch.arange(_M, device="cpu") >= used
        result[rest] = 0
    here.wait()
    return off(placed, want, rounding(variant.dtype), above=1)


def _weight(kernel: gemm.LoadedKernel, here: TrialPlace) -> str | None:
    """dw, and the memory around it."""
    variant, draw, E = kernel.variant, Draw(), len(_COUNTS)
    aligned, dtype = variant.alignment > 1, TORCH[variant.dtype]
    N, K = (264, 200) if aligned else (131, 67)
    dy, x = (_rows_of_x(draw, columns).to(dtype) for columns in (N, K))
    memory = full(E * N + 2, K, dtype=dtype)
    placed, dy_there, x_there = (here.put(tensor, aligned=aligned) for tensor in (memory, dy, x))
    counts = torch.tensor(_COUNTS, dtype=torch.int32, device="cpu")
    m_sizes = here.put(counts)
    launch = gemm.product_launcher(kernel, N=N, K=K, E=E, m_sizes_step=1)
    for _ in range(2):
        launch(
            placed[1:].data_ptr(),
            m_sizes.data_ptr(),
            here.stream,
            dy=dy_there.data_ptr(),
            x=x_there.data_ptr(),
            stride_dy_m=N,
            stride_x_m=K,
            M=_M,
        )
    want = memory.float()
    want[1:-1] = reference.grad_weight(dy.float(), x.float(), counts).view(E * N, K)
    here.wait()
    wrong = off(placed, want, rounding(variant.dtype), above=1)
    return None if wrong is None else f"dw, its rows one after another, {wrong}"
