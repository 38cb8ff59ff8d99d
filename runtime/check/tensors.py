"""Checks a call's tensors, and describes the call in plain numbers."""

from __future__ import annotations

from types import SimpleNamespace
from typing import TYPE_CHECKING, NoReturn

import torch
from torch.autograd import forward_ad

from ...artifacts.errors import InputError
from ...artifacts.records import DType, Layout
from ...artifacts.tuples import NamedTuple

if TYPE_CHECKING:
    from ..weights.expert_weights import ExpertWeights

DTYPES = {torch.bfloat16: DType.BF16, torch.float16: DType.FP16, torch.float32: DType.FP32}
_LAYOUTS = {"nk": Layout.NK, "kn": Layout.KN}
_MOST = 2**31 - 1
# The errors that unchecked code raises for an unusable tensor; the checks report it afterwards.
UNUSABLE = (AttributeError, TypeError, ValueError, IndexError, RuntimeError)
PLAIN = (torch.Tensor, torch.nn.Parameter)  # types that wrap no other tensor

_transformed = torch._C._are_functorch_transforms_active
jit_state = torch._C._get_tracing_state  # the state of torch.jit.trace, None outside it


class RowGemm(NamedTuple):
    """A checked call y[g] = x[g] @ w[g].T. ``w`` is a 3-D view of the caller's w."""

    x: torch.Tensor
    w: torch.Tensor
    m_sizes: torch.Tensor
    layout: Layout
    M: int
    N: int
    K: int
    E: int


def check(
    x: torch.Tensor, w: torch.Tensor | ExpertWeights, m_sizes: torch.Tensor, w_layout: str, *, copies: bool = True
) -> RowGemm:
    """Check the tensors and return the call in numbers. With ``copies``, an x with strided rows is copied; w never is.

    Quantised weights are checked, and returned, as their ``outline``.

    Raises
    ------
    InputError
        The message names the argument, its value, the allowed values and what to do.
    """
    w = outline(w, x, w_layout)
    tensors(x=x, w=w, m_sizes=m_sizes)
    if not isinstance(w_layout, str) or w_layout not in _LAYOUTS:
        bad("w_layout", repr(w_layout), "'nk' (w is [E, N, K]) or 'kn' (w is [E, K, N])")
    layout = _LAYOUTS[w_layout]
    if x.dim() != 2:
        bad("x", f"of shape {list(x.shape)}", "[M, K]: flatten the leading dimensions with x.reshape(-1, K)")
    check_sizes(m_sizes)
    M, K = x.shape
    E = m_sizes.shape[0]
    w = three_dimensional(w, E, layout)
    N = w.shape[1] if layout is Layout.NK else w.shape[2]
    _check_agreement(x, w, m_sizes, E, K, layout)
    for letter, value in (("M", M), ("N", N), ("K", K), ("E", E)):
        if isinstance(value, int) and value > _MOST:  # a symbolic size is checked when the traced call runs
            bad("x" if letter in "MK" else "w", f"{letter}={value}", f"at most {_MOST}: split the call")
    if E > 1 and m_sizes.stride(0) != 1:
        bad("m_sizes", f"of stride {m_sizes.stride(0)}", "contiguous: pass m_sizes.contiguous()")
    if w.shape[2] > 1 and w.stride(2) != 1:
        other = "kn" if layout is Layout.NK else "nk"
        hint = f"; w.transpose(1, 2) with w_layout={other!r} can be used as it is" if w.stride(1) == 1 else ""
        bad("w", f"with strides {list(w.stride())}", f"a last stride of 1 (w is never copied){hint}")
    if copies and not rows_usable(x):
        x = x.contiguous()
    return RowGemm(x, w, m_sizes, layout, M, N, K, E)


def is_quantised(w: object) -> bool:
    """Return whether ``w`` is ExpertWeights. Their module is imported only if ``w`` is no tensor."""
    if isinstance(w, torch.Tensor):
        return False
    from ..weights.expert_weights import ExpertWeights

    return isinstance(w, ExpertWeights)


def outline(w: torch.Tensor | ExpertWeights, x: torch.Tensor, w_layout: str) -> torch.Tensor:
    """Return a tensor for the checks: w, or for quantised weights one without values, of w's shape and x's dtype."""
    if isinstance(w, torch.Tensor) or not is_quantised(w):
        return w  # type: ignore[return-value]  # (what is neither is refused by the caller)
    tensors(x=x)
    if w_layout != "nk":
        bad("w_layout", repr(w_layout), "'nk', as ExpertWeights are E matrices [N, K]")
    return torch.empty((1, 1, w.shape[2]), dtype=x.dtype, device=w.device).expand(w.shape)


def tensors(call: str = "grouped_gemm", /, **arguments: object) -> None:
    """Raise InputError for an argument that is not a tensor."""
    for name, value in arguments.items():
        if not isinstance(value, torch.Tensor):
            bad(name, f"a {type(value).__name__}", "a torch.Tensor", call)


def in_memory(name: str, tensor: torch.Tensor, call: str = "grouped_gemm") -> torch.Tensor:
    """Return the tensor, or a copy if it wraps another tensor, like the result of a collective that is under way.

    A wrapper's own address is 0, where no kernel can read. InputError if the copy has no memory either.
    """
    if type(tensor) in PLAIN or tensor.data_ptr():
        return tensor
    copy: torch.Tensor = tensor.clone()
    if copy.numel() and not copy.data_ptr():
        bad(name, f"a {type(tensor).__name__}, which has no memory of its own", "a torch.Tensor that has", call)
    return copy


# If this torch has no such attribute, take the level as 0: then each call inspects its tensors for tangents.
duals = forward_ad if hasattr(forward_ad, "_current_level") else SimpleNamespace(_current_level=0)


def no_tangents(call: str, *arguments: object) -> None:
    """Raise InputError for a tensor with a tangent of forward-mode differentiation: a kernel would lose it."""
    for argument in arguments:
        if isinstance(argument, torch.Tensor) and forward_ad.unpack_dual(argument).tangent is not None:  # type: ignore[no-untyped-call]
            raise InputError(
                f"{call}: a tensor has a forward-mode tangent (torch.func.jvp, jacfwd, forward_ad), and "
                "there is no forward-mode derivative here: use a backward"
            )


def is_traced(x: torch.Tensor, *others: torch.Tensor | ExpertWeights | None) -> bool:
    """True if a tensor is traced (fake, meta, symbolic) or wraps others: only a torch operator can take it."""
    if torch.compiler.is_compiling() or jit_state() is not None:
        return True
    if (
        not others[1:] and type(x) is torch.Tensor and type(others[0]) in PLAIN
    ):  # fast path of a plain call, which takes half the time
        return x.is_meta
    return any(
        isinstance(tensor, torch.Tensor) and (type(tensor) not in PLAIN or tensor.is_meta) for tensor in (x, *others)
    )


def tensors_or_none(call: str = "grouped_gemm", /, **arguments: object) -> None:
    """Raise InputError for an argument that is neither a tensor nor None."""
    tensors(call, **{name: value for name, value in arguments.items() if value is not None})


def check_sizes(m_sizes: torch.Tensor) -> None:
    """Raise InputError unless ``m_sizes`` is int32 or int64 [E]."""
    if m_sizes.dim() != 1:
        bad("m_sizes", f"of shape {list(m_sizes.shape)}", "[E], one count of rows for each expert")
    if m_sizes.dtype not in (torch.int32, torch.int64):
        bad("m_sizes", f"{m_sizes.dtype}", "torch.int32 or torch.int64")


def check_out(out: torch.Tensor, call: RowGemm, **read: torch.Tensor | None) -> None:
    """Raise InputError unless ``out`` can take the call's result; ``read`` is what the call reads beside x and w."""
    if not isinstance(out, torch.Tensor):
        bad("out", f"a {type(out).__name__}", "a torch.Tensor or None")
    if tuple(out.shape) != (call.M, call.N):
        bad("out", f"of shape {list(out.shape)}", f"[M, N] = [{call.M}, {call.N}]")
    if out.dtype is not call.x.dtype or out.device != call.x.device:
        bad("out", f"{out.dtype} on {out.device}", f"x's {call.x.dtype} on {call.x.device}")
    if out.requires_grad and torch.is_grad_enabled():
        bad("out", "a tensor that requires grad", "one that does not: out.detach(), or torch.no_grad()")
    if not rows_usable(out):
        bad("out", f"with strides {list(out.stride())}", "rows that are contiguous and don't overlap")
    check_apart(out, x=call.x, w=call.w, m_sizes=call.m_sizes, **read)


def check_apart(out: torch.Tensor, call: str = "grouped_gemm", /, **read: torch.Tensor | None) -> None:
    """Raise InputError if ``out`` overlaps a tensor that the call reads. It takes 1 to 2 us."""
    if _transformed() or not out.data_ptr():  # a tensor's stand-in has no address
        return
    begin = out.data_ptr()
    end = begin + out.untyped_storage().nbytes()
    for name, tensor in read.items():
        if tensor is None or tensor.data_ptr() >= end:
            continue
        if begin < tensor.data_ptr() + tensor.untyped_storage().nbytes() and _share(out, tensor):
            bad(
                "out",
                f"in the memory of {name}",
                f"memory of its own, as {name} is read while out is written: pass another out, or a clone of {name}",
                call,
            )


def extent(tensor: torch.Tensor) -> int:
    """The size in bytes of the memory from a tensor's first element to the end of its last."""
    if not tensor.numel():
        return 0
    last = sum((many - 1) * stride for many, stride in zip(tensor.shape, tensor.stride(), strict=True))
    return (last + 1) * tensor.element_size()


def _share(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors may have a byte in common; disjoint columns of one matrix have none."""
    ahead = other.data_ptr() - tensor.data_ptr()
    if ahead >= extent(tensor) or -ahead >= extent(other):
        return False
    (row, steps), (other_row, other_steps) = _rows_of(tensor), _rows_of(other)
    step = min(steps + other_steps, default=0)
    if not step or any(more % step for more in steps + other_steps):
        return True
    return ahead % step < row or ahead % step + other_row > step


def _rows_of(tensor: torch.Tensor) -> tuple[int, list[int]]:
    """(bytes of a row, strides in bytes of the other dimensions)."""
    size = tensor.element_size()
    *outer, (length, unit) = zip(tensor.shape, tensor.stride(), strict=True)
    return ((length - 1) * unit + 1) * size, [stride * size for many, stride in outer if many > 1]


def check_cuda_dtype(x: torch.Tensor, name: str = "x", call: str = "grouped_gemm") -> DType:
    """The element type of a CUDA call; InputError for one that no kernel computes."""
    if x.dtype not in DTYPES:
        bad(name, f"{x.dtype}", "torch.bfloat16, torch.float16 or torch.float32 on CUDA", call)
    return DTYPES[x.dtype]


def three_dimensional(w: torch.Tensor, E: int, layout: Layout) -> torch.Tensor:
    """Return w as E matrices, a view; InputError if that is impossible."""
    shape = "[E, N, K]" if layout is Layout.NK else "[E, K, N]"
    flat = "[E*N, K]" if layout is Layout.NK else "[E*K, N]"
    if w.dim() == 3:
        return w
    if w.dim() != 2:
        bad("w", f"of shape {list(w.shape)}", f"{shape}, or flattened {flat}")
    if E == 0 or w.shape[0] % E:
        bad("w", f"of shape {list(w.shape)}", f"{flat}: its rows must divide by the {E} experts of m_sizes")
    rows = w.shape[0] // E
    return w.view(E, rows, w.shape[1])


def _check_agreement(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, E: int, K: int, layout: Layout) -> None:
    shape = "[E, N, K]" if layout is Layout.NK else "[E, K, N]"
    reduction = w.shape[2] if layout is Layout.NK else w.shape[1]
    if w.shape[0] != E:
        bad("w", f"of shape {list(w.shape)}", f"{shape} with E={E}, the length of m_sizes")
    if reduction != K:
        other = w.shape[1] if layout is Layout.NK else w.shape[2]
        hint = f" (is it w_layout={'kn' if layout is Layout.NK else 'nk'!r}?)" if other == K else ""
        bad("w", f"of shape {list(w.shape)}", f"{shape} with K={K}, x's last dimension{hint}")
    if w.dtype is not x.dtype:
        bad("w", f"{w.dtype}", f"x's dtype, {x.dtype}")
    check_dtype("x", x, "grouped_gemm")
    for name, tensor in (("w", w), ("m_sizes", m_sizes)):
        if tensor.device != x.device:
            bad(name, f"on {tensor.device}", f"x's device, {x.device}")


def check_dtype(name: str, tensor: torch.Tensor, call: str) -> None:
    """Raise InputError for a dtype that no product supports; float64 is supported on the CPU only."""
    if tensor.dtype not in DTYPES and tensor.dtype is not torch.float64:
        bad(
            name,
            f"{tensor.dtype}",
            "torch.bfloat16, torch.float16 or torch.float32 (the CPU: torch.float64, too)",
            call,
        )


def rows_usable(tensor: torch.Tensor) -> bool:
    """True if rows are contiguous and don't overlap; the stride of a dimension of size 1 does not count."""
    rows, length = tensor.shape
    # Compare the number of rows last: it may be unknown in a traced tensor.
    return (length <= 1 or tensor.stride(1) == 1) and (tensor.stride(0) >= length or rows <= 1)


def row_stride(tensor: torch.Tensor, length: int) -> int:
    """The stride between rows, in elements; for a single row, its length."""
    stride = tensor.stride(0)
    return stride if stride == length or tensor.shape[0] > 1 else length


def on_gpu(tensor: torch.Tensor) -> bool:
    """True if kernels can run on this tensor. (Tests replace this, to run kernels on host memory.)"""
    return tensor.is_cuda


def address_of(tensor: torch.Tensor | None) -> int:
    """The tensor's address; 0 for None."""
    return 0 if tensor is None else tensor.data_ptr()


def bad(name: str, got: str, wanted: str, call: str = "grouped_gemm") -> NoReturn:
    """Raise InputError for the argument ``name`` of ``call``."""
    raise InputError(f"{call}: {name} is {got}, wanted {wanted}")
