"""Checks of the tensors that are passed as codes and scales, with errors that say what is wrong."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from ...artifacts.errors import InputError

_E8M0_NAN, _E4M3_NAN = 255, 0x7F  # of either sign


def fit(name: str, tensor: torch.Tensor, shape: tuple[int, ...], codes: torch.Tensor) -> None:
    """Raise InputError for a tensor whose shape or device does not fit the codes."""
    if tuple(tensor.shape) != shape:
        raise bad(name, f"of shape {list(tensor.shape)}", f"{list(shape)} for codes of {list(codes.shape)}")
    if tensor.device != codes.device:
        raise bad(name, f"on {tensor.device}", f"the device of codes, {codes.device}")


def check_finite(name: str, scale: torch.Tensor) -> None:
    """Raise InputError for a scale that is NaN or infinite: checked once, here, and not in each call."""
    if scale.dtype is torch.uint8:
        wrong = scale == _E8M0_NAN
    elif scale.dtype is torch.float8_e4m3fn:
        wrong = scale.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN
    else:
        wrong = ~torch.isfinite(scale)
    if bool(wrong.any()):
        at = wrong.nonzero()[0].tolist()
        what = "255, which is NaN," if scale.dtype is torch.uint8 else str(scale[tuple(at)].float().item())
        raise bad(name, f"{what} at {at}, one of {int(wrong.sum())}", "numbers: is the checkpoint damaged?")


def nan_among(codes: torch.Tensor) -> torch.Tensor:
    """True, on their device, if e4m3 codes [E, ...], in any layout, have a NaN: 0x7F or 0xFF. Copies no codes."""
    return (codes.view(torch.int8).amax() == _E4M3_NAN) | (codes.view(torch.uint8).amax() == 0xFF)


def place_of_nan(codes: Iterable[torch.Tensor]) -> str:
    """Describe the first NaN in e4m3 codes, given as [N, K] for each expert, and count the others."""
    first: list[int] = []
    many = 0
    for expert, of_expert in enumerate(codes):
        wrong = of_expert.view(torch.uint8) & _E4M3_NAN == _E4M3_NAN
        many += int(wrong.sum())
        if many and not first:
            first = [expert, *wrong.nonzero()[0].tolist()]
    expert, row, column = first
    others = f" and {many - 1} other place{'s' if many > 2 else ''}" if many > 1 else ""
    return f"NaN at expert {expert}, row {row}, column {column}{others}"


def check_flag(name: str, value: object, more: str = "") -> None:
    """Raise InputError for a value that is neither True nor False, like the word "no"."""
    if not isinstance(value, bool):
        raise bad(name, repr(value), f"True or False{more}")


def repeated(tensor: torch.Tensor) -> bool:
    """True if the tensor has more elements than its storage (``expand``): a copy could need far more memory."""
    return tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes()


def overlap(first: torch.Tensor, other: torch.Tensor) -> bool:
    """True if two tensors' memory, from the first element to the last, has bytes in common."""
    if first.device != other.device or first.is_meta or not first.numel() or not other.numel():
        return False
    begins = first.data_ptr(), other.data_ptr()
    ends = [
        begin
        + (1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True)))
        * tensor.element_size()
        for begin, tensor in zip(begins, (first, other), strict=True)
    ]
    return begins[0] < ends[1] and begins[1] < ends[0]


def flat(codes: torch.Tensor) -> torch.Tensor:
    """Return codes [E, N, K/32, 16] as [E, N, K/2]."""
    if isinstance(codes, torch.Tensor) and codes.dim() == 4:
        if codes.shape[3] != 16 or not codes.is_contiguous():
            raise bad(
                "codes",
                f"of shape {list(codes.shape)} and strides {list(codes.stride())}",
                "[E, N, K/32, 16] or [E, N, K/2], contiguous",
            )
        return codes.flatten(2)
    return codes


def as_bytes(scale: torch.Tensor) -> torch.Tensor:
    """e8m0 scales as bytes, also from torch's e8m0 dtype."""
    from .codes import E8M0

    if isinstance(scale, torch.Tensor) and scale.dtype is E8M0:
        return scale.view(torch.uint8)
    return scale


def of_dtype(name: str, tensor: object, dtypes: tuple[torch.dtype, ...]) -> torch.Tensor:
    """The tensor; InputError if it has none of these dtypes."""
    if not isinstance(tensor, torch.Tensor) or tensor.dtype not in dtypes:
        raise bad(name, described(tensor), " or ".join(map(str, dtypes)))
    return tensor


def described(value: object) -> str:
    """A value's dtype and shape, or its type, for a message."""
    return f"{value.dtype} of shape {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value).__name__


def bad(name: str, got: str, wanted: str) -> InputError:
    """The error for a tensor, or a name, that is not accepted."""
    return InputError(f"ExpertWeights: {name} is {got}, wanted {wanted}")
