"""LoRA adapters of experts: a product with the low-rank part y += scale * (x @ A[e].T) @ B[e].T beside it.

w is read as it is, never copied; A and B are small. ``adapted.py`` has what is done with them.
"""

from __future__ import annotations

import torch

from ...artifacts.tuples import NamedTuple
from ..check import tensors


class Lora(NamedTuple):
    """The adapter of one product: y[i] += scale * (x[i] @ A[e].T) @ B[e].T for every row i of expert e.

    ``A`` is [E, r, K] and ``B`` [E, N, r], r from 1 to 256, in x's dtype or another floating-point one, to which they
    are cast; [1, r, K] and [1, N, r] are one adapter for all experts. ``scale`` is a number (PEFT's lora_alpha / r).
    Both are differentiable. With ``dropout`` p, A reads dropout(x, p), drawn anew in each call (0 in evaluation).
    """

    A: torch.Tensor
    B: torch.Tensor
    scale: float = 1.0
    dropout: float = 0.0


def adapters_given(lora: object) -> tuple[Lora | None, Lora | None]:
    if lora is None:
        return None, None
    pair = isinstance(lora, (tuple, list)) and len(lora) == 2 and not isinstance(lora, Lora)
    if not pair or not all(adapter is None or isinstance(adapter, Lora) for adapter in lora):  # type: ignore[attr-defined]
        got = f"({', '.join(type(adapter).__name__ for adapter in lora)})" if pair else f"a {type(lora).__name__}"  # type: ignore[attr-defined]
        tensors.bad("lora", got, "(of the first product, of the second), each a Lora or None", "moe_mlp")
    return lora[0], lora[1]  # type: ignore[index]


def scales_of(lora: tuple[Lora | None, Lora | None]) -> tuple[object, ...]:
    """The parts of a plan's key that come from these adapters, beside their tensors.

    Raises
    ------
    TypeError
        if they are no adapters; the checks later name the fault.
    """
    if (
        type(lora) is not tuple
        or len(lora) != 2
        or any(adapter is not None and type(adapter) is not Lora for adapter in lora)
    ):
        raise TypeError("no adapters")
    if any(adapter is not None and (type(adapter.dropout) not in (float, int) or adapter.dropout) for adapter in lora):
        raise TypeError("no plan draws numbers")
    for matrix in (each for adapter in lora if adapter is not None for each in adapter[:2]):
        if matrix.dim() != 3 or not matrix.dtype.is_floating_point:
            raise TypeError("no matrices")
    return tuple(None if adapter is None else (type(adapter.scale), adapter.scale) for adapter in lora)
