"""One checked call of ``grouped_gemm``: its tensors in the shapes and dtypes that the products want."""

from __future__ import annotations

from typing import NamedTuple, TypeVar

import torch

from ...artifacts.records.problem import Layout
from ..weights.expert_weights import ExpertWeights
from . import tensors
from .form import Form, Fusions, check_fusions, token_rows

_W = TypeVar("_W", torch.Tensor, ExpertWeights, "torch.Tensor | ExpertWeights")


class Call(NamedTuple):
    """A checked call: ``M`` sorted rows, and the rows of x and y; w is 3-D."""

    form: Form
    w: torch.Tensor | ExpertWeights
    m_sizes: torch.Tensor
    fusions: Fusions
    M: int
    x_rows: int
    y_rows: int

    @property
    def x_divisor(self) -> int:
        """What gathers x: ``Rows.gather_divisor``."""
        return self.form.topk if self.form.permute_x else 0

    @property
    def dense(self) -> torch.Tensor:
        """w of a call whose w is a tensor."""
        if not isinstance(self.w, torch.Tensor):
            raise AssertionError(f"{self.w} is no tensor")
        return self.w

    @property
    def N(self) -> int:
        """Columns of y."""
        return self.w.shape[1 if self.form.layout is Layout.NK else 2]

    @property
    def K(self) -> int:
        """Columns of x."""
        return self.w.shape[2 if self.form.layout is Layout.NK else 1]

    def flat_weights(self, like: torch.Tensor) -> torch.Tensor | None:
        """The routing weights as ``flat`` has them, where there are any."""
        return None if self.fusions.weights is None else flat(self.fusions.weights, wide_of(like))


def wide_of(like: torch.Tensor) -> torch.dtype:
    """What routing weights are multiplied in: float32, or float64 beside a float64 tensor."""
    return torch.float64 if like.dtype is torch.float64 else torch.float32


def flat(weights: torch.Tensor, wide: torch.dtype) -> torch.Tensor:
    """The routing weights by flat index, in this dtype."""
    return weights.detach().to(wide).reshape(-1).contiguous()


def check(
    x: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    form: Form,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None = None,
    out: torch.Tensor | None = None,
) -> tuple[Call, torch.Tensor]:
    """The call, and x with usable rows; InputError for what can't be."""
    rows = tensors.check(x, tensors.outline(w, x, form.layout.value), m_sizes, form.layout.value)
    call = fit(
        rows,
        rows.M,
        form,
        gather_indices,
        topk_weights,
        fuse_mul_post,
        bias,
        known_y_rows=None if out is None or not form.permute_y else out.shape[0],
    )
    if out is not None:
        tensors.check_out(
            out,
            rows._replace(M=call.y_rows),
            gather_indices=gather_indices,
            topk_weights=topk_weights,
            bias=bias,
            **(w.tensors() if isinstance(w, ExpertWeights) else {}),
        )
    return call._replace(w=w) if isinstance(w, ExpertWeights) else call, rows.x


def fit(
    rows: tensors.RowGemm,
    x_rows: int,
    form: Form,
    gather_indices: torch.Tensor | None,
    topk_weights: torch.Tensor | None,
    fuse_mul_post: bool,
    bias: torch.Tensor | None = None,
    *,
    known_y_rows: int | None = None,
) -> Call:
    """The call of a checked GEMM whose x has ``x_rows`` rows; InputError where the fused tensors don't fit."""
    fusions = check_fusions(
        form,
        rows.m_sizes,
        rows.x.dtype,
        rows.N,
        gather_indices=gather_indices,
        topk_weights=topk_weights,
        fuse_mul_post=fuse_mul_post,
        bias=bias,
    )
    M, y_rows = token_rows(form, x_rows, fusions, known_y_rows)
    if rows.x.is_cuda:
        tensors.check_cuda_dtype(rows.x)
    return Call(form, rows.w, rows.m_sizes, fusions, M, x_rows, y_rows)


def autocast(x: torch.Tensor, w: _W, bias: torch.Tensor | None) -> tuple[torch.Tensor, _W, torch.Tensor | None]:
    """In a torch.autocast region, x, w and bias in its dtype if any of them is float32; quantised weights stay."""
    kind = x.device.type
    if not casts(kind):
        return x, w, bias
    if all(one.dtype is not torch.float32 for one in (x, w, bias) if isinstance(one, torch.Tensor)):
        return x, w, bias
    dtype = torch.get_autocast_dtype(kind)
    return x.to(dtype), w.to(dtype) if isinstance(w, torch.Tensor) else w, None if bias is None else bias.to(dtype)


def casts(kind: str) -> bool:
    """Whether this is a torch.autocast region of a kind of device."""
    return kind != "meta" and torch.is_autocast_enabled(kind)
