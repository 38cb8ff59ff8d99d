"""The arguments that the operators of ``torch_library.py`` and ``lora_library.py`` share, and the call of these."""

from __future__ import annotations

from typing import Any

import torch

from ..check.call import Call, check, form_of
from ..weights.expert_weights import ExpertWeights

_REST = 9  # arguments of REST
CALL = 1 + _REST  # w, and these
PARTS = 6  # of quantised weights: ``ExpertWeights``' fields
TENSORS = "Tensor codes, Tensor scale, Tensor? zero, Tensor? global_scale, Tensor? derived"
REST = (
    "Tensor m_sizes, Tensor? gather_indices, Tensor? topk_weights, Tensor? bias, int topk, "
    "bool permute_x, bool permute_y, bool fuse_mul_post, str w_layout"
)
EXPECTED = "SymInt? expected_rows=None"  # last, so that programs exported before there was one still run


def call_of(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    index: torch.Tensor | None,
    weights: torch.Tensor | None,
    bias: torch.Tensor | None,
    topk: int,
    permute_x: bool,
    permute_y: bool,
    fuse: bool,
    w_layout: str,
    zero_tail: bool = False,
    expected_rows: int | None = None,
) -> tuple[Call, torch.Tensor]:
    """The checked call of an operator's arguments, and x with usable rows."""
    form = form_of(w_layout=w_layout, topk=topk, permute_x=permute_x, permute_y=permute_y, zero_tail=zero_tail)
    return check(x, w, m_sizes, form, index, weights, fuse, bias, expected_rows=expected_rows)


def with_expected(arguments: tuple[Any, ...], many: int) -> tuple[tuple[Any, ...], int | None]:
    """The first ``many`` arguments of an operator, and ``expected_rows``, which torch leaves out if it is None."""
    return arguments[:many], arguments[many] if len(arguments) > many else None


def weights_of(*parts: Any) -> ExpertWeights:
    """Quantised weights of ``parts_of``."""
    return ExpertWeights(*parts)


def parts_of(w: ExpertWeights) -> tuple[Any, ...]:
    """An operator's arguments of quantised weights. The derived scales are a part of the graph: made of the scales."""
    return w.format, w.codes, w.scale, w.zero, w.global_scale, w.derived_now()


def no_second(_ctx: Any, *_: Any) -> None:
    """The gradient of an operator that is a gradient: there is none."""
    raise RuntimeError("pretuned: a gradient of grouped_gemm has no gradient itself: it can't be differentiated again")
