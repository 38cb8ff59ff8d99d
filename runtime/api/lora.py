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
    if not pair or not all(one is None or isinstance(one, Lora) for one in lora):  # type: ignore[attr-defined]
        got = f"({', '.join(type(one).__name__ for one in lora)})" if pair else f"a {type(lora).__name__}"  # type: ignore[attr-defined]
        tensors.bad("lora", got, "(of the first product, of the second), each a Lora or None", "moe_mlp")
    return lora[0], lora[1]  # type: ignore[index]


def scales_of(lora: tuple[Lora | None, Lora | None]) -> tuple[object, ...]:
    """What a plan of a call with these adapters hangs on, beside their tensors.

    Raises
    ------
    TypeError
        where they are no adapters: the checks say how.
    """
    if type(lora) is not tuple or len(lora) != 2 or any(one is not None and type(one) is not Lora for one in lora):
        raise TypeError("no adapters")
    if any(one is not None and (type(one.dropout) not in (float, int) or one.dropout) for one in lora):
        raise TypeError("no plan draws numbers")
    for matrix in (each for one in lora if one is not None for each in one[:2]):
        if matrix.dim() != 3 or not matrix.dtype.is_floating_point:
            raise TypeError("no matrices")
    return tuple(None if one is None else (type(one.scale), one.scale) for one in lora)
