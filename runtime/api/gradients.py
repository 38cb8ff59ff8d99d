"""The two gradients as calls of their own: dX and dW of a grouped GEMM, with the forward's parameters."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch

from ...artifacts.errors import InputError
from ...artifacts.records import Layout
from ..check import tensors
from ..check.call import Call, fit, form_of
from ..driver.device import without_autocast
from ..ops import gradients
from ..ops.gradients import GradY
from ..weights.expert_weights import ExpertWeights


def grouped_gemm_dX(
    dy: torch.Tensor,
    w: torch.Tensor | ExpertWeights,
    m_sizes: torch.Tensor,
    topk: int = 1,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_bwd_dX: object = None,
    *,
    w_layout: str = "nk",
) -> torch.Tensor:
    """dx[r] = sum of t[g[i]] * (dy[to(i)] @ w[e]) over the sorted rows i with from(i) = r; e is i's expert.

    Parameters
    ----------
    dy
        [M, N], or [T*topk, N] in token order with ``permute_y``: the gradient of y.
    w, m_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post, w_layout
        The forward's, see ``grouped_gemm``. dy is never quantised.
    kernel_config_bwd_dX
        A kernel to run, as ``grouped_gemm`` takes it; None runs the best.

    Returns
    -------
    torch.Tensor
        dx [M, K], or [T, K] with ``permute_x`` (the sum over a token's slots, in a fixed order), in dy's dtype.
        Rows that took no part are zero. T is ``topk_weights.shape[0]``, or len(gather_indices) / topk.

    Raises
    ------
    InputError
        for a tensor that can't be used, or parameters that make no sense together.
    ProblemNotInBundle, TargetMismatch, DriverTooOld, BundleError, CudaError
        for the reasons of ``grouped_gemm``.
    """
    form = form_of(
        w_layout=w_layout,
        topk=topk,
        permute_x=permute_x,
        permute_y=permute_y,
        kernel_config_bwd_dX=kernel_config_bwd_dX,
    )
    _check_mode("grouped_gemm_dX", dy, w, topk_weights)
    tensors.tensors(dy=dy)
    plain = tensors.outline(w, dy, w_layout)
    tensors.tensors(w=plain, m_sizes=m_sizes)
    tensors.tensors_or_none(gather_indices=gather_indices, topk_weights=topk_weights)
    dy, plain, m_sizes, gather_indices, topk_weights = _in_memory(
        dy=dy, w=plain, m_sizes=m_sizes, gather_indices=gather_indices, topk_weights=topk_weights
    )
    tensors.check_sizes(m_sizes)
    w3 = tensors.three_dimensional(plain, m_sizes.shape[0], form.layout)
    N, K = (w3.shape[1], w3.shape[2]) if form.layout is Layout.NK else (w3.shape[2], w3.shape[1])
    _check_dy(dy, N, plain.dtype, "w")
    sorted_rows = dy.shape[0] if gather_indices is None else gather_indices.numel()
    if permute_y:
        tokens = dy.shape[0] // topk
    else:
        tokens = topk_weights.shape[0] if topk_weights is not None else -(-sorted_rows // topk)
    empty = tensors.check(dy.new_empty((0, K)), plain, m_sizes, w_layout)
    x_rows = tokens if permute_x else sorted_rows
    call = fit(
        empty,
        x_rows,
        form,
        gather_indices,
        topk_weights,
        fuse_mul_post,
        known_y_rows=dy.shape[0] if permute_y else None,
    )
    _check_rows(dy, call)
    if isinstance(w, ExpertWeights):
        call = call._replace(w=w)
    with torch.no_grad(), without_autocast(dy.device.type):
        return gradients.grad_x(call, GradY.of(call, dy, gathers=False))


def grouped_gemm_dW(
    dy: torch.Tensor,
    x: torch.Tensor,
    m_sizes: torch.Tensor,
    topk: int = 1,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_bwd_dW: object = None,
    *,
    w_layout: str = "nk",
) -> torch.Tensor:
    """dw[e] = sum of t[g[i]] * outer(dy[to(i)], x[from(i)]) over the sorted rows i of expert e.

    Parameters
    ----------
    dy
        [M, N], or [T*topk, N] in token order with ``permute_y``: the gradient of y.
    x, m_sizes, topk, gather_indices, permute_x, permute_y, topk_weights, fuse_mul_post, w_layout
        The forward's, see ``grouped_gemm``.
    kernel_config_bwd_dW
        A kernel to run, as ``grouped_gemm`` takes it; None runs the best.

    Returns
    -------
    torch.Tensor
        dw [E, N, K] (or [E, K, N] with ``w_layout="kn"``) in x's dtype, summed in fp32; zeros for an expert
        without rows.

    Raises
    ------
    InputError
        for a tensor that can't be used, or parameters that make no sense together.
    ProblemNotInBundle, TargetMismatch, DriverTooOld, BundleError, CudaError
        for the reasons of ``grouped_gemm``.
    """
    form = form_of(
        w_layout=w_layout,
        topk=topk,
        permute_x=permute_x,
        permute_y=permute_y,
        kernel_config_bwd_dW=kernel_config_bwd_dW,
    )
    _check_mode("grouped_gemm_dW", dy, x, topk_weights)
    tensors.tensors(dy=dy, x=x, m_sizes=m_sizes)
    tensors.tensors_or_none(gather_indices=gather_indices, topk_weights=topk_weights)
    dy, x, m_sizes, gather_indices, topk_weights = _in_memory(
        dy=dy, x=x, m_sizes=m_sizes, gather_indices=gather_indices, topk_weights=topk_weights
    )
    if x.dim() != 2:
        tensors.bad("x", f"of shape {list(x.shape)}", "[M, K]: flatten the leading dimensions with x.reshape(-1, K)")
    _check_dy(dy, None, x.dtype, "x")
    tensors.check_sizes(m_sizes)
    E, N, K = m_sizes.numel(), dy.shape[1], x.shape[1]
    shape = (E, N, K) if form.layout is Layout.NK else (E, K, N)
    shape_only = x.new_empty((1, 1, shape[2])).expand(shape)
    rows = tensors.check(x, shape_only, m_sizes, w_layout)
    call = fit(
        rows, rows.M, form, gather_indices, topk_weights, fuse_mul_post, known_y_rows=dy.shape[0] if permute_y else None
    )
    _check_rows(dy, call)
    with torch.no_grad(), without_autocast(dy.device.type):
        dw, _ = gradients.grad_w_and_bias(
            call, GradY.of(call, dy, gathers=True), gradients.sorted_x(call, rows.x), bias=False
        )
    return dw if dw is not None else rows.x.new_zeros(shape)


def _check_mode(call: str, *arguments: object) -> None:
    if tensors.duals._current_level >= 0:
        tensors.no_tangents(call, *arguments)
    if tensors.jit_state() is not None:
        raise InputError(
            f"{call}: torch.jit.trace would keep these counts for good; of pretuned it can trace grouped_gemm"
        )


def _in_memory(**arguments: torch.Tensor | None) -> Iterator[Any]:
    return (None if tensor is None else tensors.in_memory(name, tensor) for name, tensor in arguments.items())


def _check_dy(dy: torch.Tensor, N: int | None, dtype: torch.dtype, owner: str) -> None:
    if dy.dim() != 2 or N not in (None, dy.shape[1]):
        tensors.bad("dy", f"of shape {list(dy.shape)}", "[rows of y, N]" if N is None else f"[rows of y, N={N}]")
    if dy.dtype is not dtype:
        tensors.bad("dy", f"{dy.dtype}", f"{owner}'s dtype, {dtype}")


def _check_rows(dy: torch.Tensor, call: Call) -> None:
    if dy.shape[0] != call.y_rows:
        tensors.bad("dy", f"of {dy.shape[0]} rows", f"y's {call.y_rows}")
    if dy.device != call.m_sizes.device:
        tensors.bad("dy", f"on {dy.device}", f"m_sizes' device, {call.m_sizes.device}")
