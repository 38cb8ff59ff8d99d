"""Turns a call, in numbers or in tensors, into the problem that ``explain`` looks up."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from ...artifacts.errors import BundleError, InputError
from ...artifacts.limits import MAX_DIM
from ...artifacts.records import PRECISIONS, DType, Fusion, Layout, Op, Problem, dtypes_of
from ...kernels.entry import ALIGNMENT_BYTES, has_aligned_rows
from ...kernels.hopper_w4a16 import can_be_prepared
from ...kernels.hopper_w8a8_block import GROUP
from ...kernels.spec import code_of

if TYPE_CHECKING:
    import torch

    from ...artifacts.records import LocalGpu
    from ..dispatch.snapshot import Snapshot
    from ..weights.expert_weights import ExpertWeights

_NUMBERS = {"M": "the number of rows", "top_k": "the number of experts of a token"}


def check_numbers(**sizes: int | None) -> None:
    """Raise InputError for a number that can't be a size of a call."""
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= MAX_DIM:
            what = _NUMBERS.get(name, "a size of w (or tensors: x, w, m_sizes)")
            raise InputError(f"explain: {name} is {value!r}, wanted {what}, an int of at least 1 and at most {MAX_DIM}")


def dtype_of_weights(asked: object, who: str) -> DType:
    """The dtype of products of w in the format ``asked``, with x that is not quantised.

    Raises InputError, whose text begins with ``who``, for an unknown format.
    """
    if not isinstance(asked, str) or asked not in PRECISIONS:
        raise InputError(f"{who}: weights is {asked!r}, wanted one of {', '.join(PRECISIONS)}")
    return dtypes_of(asked)[-1]


def suits(problem: Problem) -> bool:
    """True if all rows are multiples of 16 bytes, also rows of codes, so that aligned kernels can run the problem."""
    whole = not problem.dtype.quantised or problem.K * problem.dtype.precision.w.bits % (8 * ALIGNMENT_BYTES) == 0
    return whole and has_aligned_rows(problem)


def as_read(snapshot: Snapshot, problem: Problem, local: LocalGpu) -> Problem:
    """The problem with the layout of codes that kernels read: the checkpoint's, if no kernel reads prepared codes.

    dX reads codes in the layout that the forward reads.
    """
    if not problem.dtype.quantised or problem.layout is not Layout.NK:
        return problem
    plain, stored = problem._replace(op=Op.FORWARD, fusion=Fusion.NONE), problem._replace(layout=Layout.STORED)
    if not can_be_prepared(problem.dtype, problem.N, problem.K):
        return stored
    return stored if not snapshot.serves(plain, local) and snapshot.serves(stored, local) else problem


def of_numbers(
    E: int | None, N: int | None, K: int | None, dtype: str | torch.dtype, weights: str | None, w_layout: str
) -> Problem:
    """Return the forward's problem; InputError for invalid sizes."""
    from ..check.tensors import DTYPES

    torchs: Mapping[Any, DType] = DTYPES
    check_numbers(E=E, N=N, K=K)
    if weights is not None:
        dtype_of_weights(weights, "explain")
        dtype = dtypes_of(weights)[0].value  # the checkpoint's dtype: x may be quantised, too
    try:
        return Problem(Op.FORWARD, torchs.get(dtype) or DType(dtype), E or 0, N or 0, K or 0, Layout(w_layout))
    except (TypeError, ValueError) as error:  # TypeError: an unhashable value
        dtypes, layouts = (", ".join(member.value for member in kind) for kind in (DType, Layout))
        raise InputError(
            f"explain: {error}, wanted a dtype of {dtypes} (or torch's of the first three) and a w_layout of {layouts}"
        ) from None


def in_fp8(problem: Problem, precision: object) -> Problem:
    """The forward's problem of a call with ``precision="fp8"``; InputError for another precision, or quantised w."""
    if precision != "fp8":
        raise InputError(f"explain: precision is {precision!r}, wanted 'fp8', or None for the precision of x and w")
    if problem.dtype.quantised:
        raise InputError("explain: precision='fp8' with quantised weights. Leave one of them out")
    whole = {"N": problem.N, "K": problem.K}
    for name, size in whole.items():
        if size % GROUP:
            raise InputError(f"explain: {name}={size} with precision='fp8', wanted a multiple of {GROUP}")
    return problem._replace(dtype=DType.FP8_BLOCK, layout=Layout.NK)


def of_tensors(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights | None,
    m_sizes: torch.Tensor | None,
    w_layout: str,
    device: int | None,
) -> tuple[Problem, int, bool, int | None]:
    """Return (problem, rows, whether all is aligned, torch's GPU index); InputError for unusable tensors."""
    from ..check import tensors
    from ..check.call import Rows
    from ..launch import product_kernels
    from ..weights.expert_weights import ExpertWeights

    if w is None or m_sizes is None:
        raise InputError("explain: wanted x, w and m_sizes, got x alone (or a Problem and M)")
    fusion = Fusion.NONE
    if x.dim() == 3:  # padded rows are gathered and scattered
        x, fusion = x.reshape(-1, x.shape[-1]), Fusion.GATHER | Fusion.SCATTER
    if isinstance(w, ExpertWeights):
        return _of_quantised(x, w, m_sizes, w_layout, device, fusion)
    call = tensors.check(x, w, m_sizes, w_layout)
    rows = Rows(Op.FORWARD, call.x, call.w, m_sizes, call.layout, call.M)
    aligned = product_kernels.rows_aligned(rows, call.x.new_empty((0, call.N)))
    if call.x.is_cuda:
        device = call.x.get_device()
        problem = product_kernels.problem_of(Op.FORWARD, call.x, call.E, call.N, call.K, call.layout, fusion)
        return problem, call.M, aligned, device
    dtype = tensors.check_cuda_dtype(call.x)
    problem = Problem(Op.FORWARD, dtype, call.E, call.N, call.K, call.layout, code_of(Op.FORWARD, fusion))
    return problem, call.M, aligned, device


def but_for_y(x: object, w: object, m_sizes: object, w_layout: str) -> bool:
    """True if x and w are aligned, so that only y's rows may not be multiples of 16 bytes."""
    from ..check import tensors
    from ..check.call import Rows
    from ..launch import product_kernels
    from ..weights.expert_weights import ExpertWeights

    if isinstance(w, ExpertWeights) or x.dim() == 3:  # type: ignore[attr-defined]
        return False
    call = tensors.check(x, w, m_sizes, w_layout)  # type: ignore[arg-type]
    rows = Rows(Op.FORWARD, call.x, call.w, call.m_sizes, call.layout, call.M)
    return product_kernels.rows_aligned(rows, call.x.new_empty((0, -(-call.N // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)))


def _of_quantised(
    x: torch.Tensor,
    w: ExpertWeights,
    m_sizes: torch.Tensor,
    w_layout: str,
    device: int | None,
    fusion: Fusion,
) -> tuple[Problem, int, bool, int | None]:
    import torch

    from ..check import tensors

    call = tensors.check(x, w, m_sizes, w_layout)
    E, N, K = w.shape
    fusion = code_of(Op.FORWARD, fusion & ~Fusion.GATHER if w.is_prepared else fusion)  # x is gathered first
    problem = Problem(Op.FORWARD, w.kernel_dtypes[0], E, N, K, Layout.NK if w.is_prepared else Layout.STORED, fusion)
    aligned = suits(problem) and tensors.rows_usable(call.x) and x.dtype is torch.bfloat16
    return problem, call.M, aligned, call.x.get_device() if call.x.is_cuda else device


def assumed_top_k(snapshot: Snapshot, problem: Problem, local: LocalGpu) -> tuple[int, str | None]:
    """(the top_k to assume for a problem, a text on its source); the text is None if the problem gathers no rows."""
    if Fusion.GATHER not in problem.fusion or problem.op is Op.DX:
        return 1, None
    if problem.top_k:
        return problem.top_k, None
    product = problem._replace(fusion=Fusion.NONE, top_k=0)
    names: dict[int, str] = {}
    for usable in snapshot.view(local, installed=True).usable:
        with contextlib.suppress(BundleError):  # the damaged bundle's choices may still run
            for model in usable.bundle.models():
                plain = (
                    candidate._replace(layout=problem.layout, fusion=Fusion.NONE, top_k=0)
                    for candidate in model.problems
                )
                if product in plain:
                    names.setdefault(model.top_k, model.name)
    if not names:
        return 1, "top_k=1, as no bundle has a model with this product"
    least, *more = sorted(names)
    others = "".join(f"; {names[count]} has {count}" for count in more)
    return least, f"top_k={least}, as {names[least]} has{others}"


def twins_in_fp16(problems: Iterable[Problem]) -> set[Problem]:
    """Return the fp16 problems that ``problems`` also has in bf16: no process runs a model in both."""
    there = set(problems)
    return {problem._replace(dtype=DType.FP16) for problem in there if problem.dtype is DType.BF16} & there
