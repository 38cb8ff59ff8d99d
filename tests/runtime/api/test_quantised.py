"""Calls with ``ExpertWeights`` against float32 products of the dequantised operands, written out row by row."""

from __future__ import annotations

import copy
import functools
import itertools
import logging
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated

from pretuned.artifacts.errors import InputError, ProblemNotInBundle
from pretuned.artifacts.records import PRECISIONS, Gpu
from pretuned.kernels.spec import Config
from pretuned.runtime import (
    ExpertWeights,
    activate,
    explain,
    grouped_gemm,
    grouped_gemm_dX,
    moe_mlp,
    reload,
    sort_routing,
)
from pretuned.runtime.ops import quantised

FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]
# Of the norm of y: bf16 results, and w rounded to bf16 once where x is not quantised, too.
MOST = {name: 2e-3 if precision.math == "fp8" else 3e-3 for name, precision in PRECISIONS.items()}
E, T, TOPK = 5, 23, 3


@functools.cache
def packed_weights(format: str, N: int, K: int, seed: int = 0) -> ExpertWeights:
    generator = torch.Generator().manual_seed(seed)
    return ExpertWeights.quantize(torch.randn(E, N, K, generator=generator) / K**0.5, format)


def read(x: torch.Tensor, format: str) -> torch.Tensor:
    """x as the product reads it, written out from what fp8's formats say."""
    x = x.float()
    if PRECISIONS[format].x.name != "e4m3":
        return x
    width = 128 if format == "fp8_block" else x.shape[1]
    parts = []
    for part in x.split(width, 1):
        scale = part.abs().amax(1, keepdim=True) / 448
        scale[scale == 0] = 1
        parts.append((part / scale).to(torch.float8_e4m3fn).float() * scale)
    return torch.cat(parts, 1)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.float() - want.float()).norm() / want.float().norm())


def index_of(M: int) -> torch.Tensor:
    torch.manual_seed(5)
    index = torch.randperm(T * TOPK)[:M]
    index[3] = -1  # an expert on another rank
    return index


FORMS = [
    dict(zip(("gather", "scatter", "weigh", "bias"), on, strict=True))
    for on in itertools.product((False, True), repeat=4)
]


MOVED = {"gather": True, "scatter": True, "weigh": True, "bias": True}
CASES = [
    (format, form)
    for format in FORMATS
    for form in FORMS
    if form in (FORMS[0], MOVED) or format in ("fp8_block", "mxfp4", "mxfp8", "int4_g64_zp")
]


def label(value: object) -> str | None:
    if isinstance(value, dict):
        return "+".join(name for name, on in value.items() if on) or "plain"
    return None


@pytest.mark.parametrize(("format", "form"), CASES, ids=label)
def test_every_form_of_every_format(format: str, form: dict[str, bool]) -> None:
    N, K = 129, 320  # blocks and groups cut off, N odd
    w, M = packed_weights(format, N, K), T * TOPK
    m_sizes = torch.tensor([7, 0, 1, 30, 0])  # empty experts, one row, and two rows of none
    indexed = form["gather"] or form["scatter"] or form["weigh"]
    index = index_of(M) if indexed else None
    x = torch.randn(T if form["gather"] else M, K).to(torch.bfloat16)
    weights = torch.rand(T, TOPK) if form["weigh"] else None
    bias = torch.randn(E, N).to(torch.bfloat16) if form["bias"] else None
    y = grouped_gemm(
        x,
        w,
        m_sizes,
        TOPK,
        index,
        permute_x=form["gather"],
        permute_y=form["scatter"],
        topk_weights=weights,
        fuse_mul_post=form["weigh"],
        bias=bias,
        zero_tail=True,
    )
    want, rows = torch.zeros(y.shape), read(x, format)
    experts = [e for e, many in enumerate(m_sizes.tolist()) for _ in range(many)]
    for i, e in enumerate(experts):
        at = i if index is None else int(index[i])
        if at < 0:
            continue
        product = rows[at // TOPK if form["gather"] else i] @ w.dequantize(torch.float32, e).T
        product = product + bias[e].float() if bias is not None else product
        want[at if form["scatter"] else i] = product * weights.view(-1)[at] if weights is not None else product
    assert y.dtype is torch.bfloat16
    skipped = 3 if index is not None and not form["scatter"] else None  # of an index out of range: may hold anything
    if skipped is not None:
        y[skipped] = want[skipped]
    assert off(y, want) < MOST[format]
    assert torch.equal(y == 0, want == 0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("format", ["fp8_block", "fp8_block_a16", "mxfp4"])
def test_x_of_other_dtypes(format: str, dtype: torch.dtype) -> None:
    w, x, m_sizes = packed_weights(format, 32, 128), torch.randn(6, 128).to(dtype), torch.tensor([2, 1, 0, 3, 0])
    y = grouped_gemm(x, w, m_sizes)
    rows = zip(read(x, format), (0, 0, 1, 3, 3, 3), strict=True)
    want = torch.stack([row @ w.dequantize(torch.float32, e).T for row, e in rows])
    assert y.dtype is dtype
    assert off(y, want) < (1e-3 if dtype is torch.float16 else 1e-6)


LAYERS: list[dict[str, Any]] = [
    {},
    {"activation": "swiglu_oai", "interleaved": True, "bias": True},
    {"activation": "relu2", "gated": False},
    {"activation": "gelu_tanh", "weights_on": "input", "bias": True},
]


@pytest.mark.parametrize("layer", LAYERS, ids=lambda layer: layer.get("activation", "silu"))
@pytest.mark.parametrize("format", FORMATS)
def test_a_whole_layer(format: str, layer: dict[str, Any]) -> None:
    torch.manual_seed(1)
    H, I, how = 160, 96, dict(layer)  # noqa: E741
    wide = I if not how.get("gated", True) else 2 * I
    up, down = packed_weights(format, wide, H, 1), packed_weights(format, H, I, 2)
    biases = {}
    if how.pop("bias", False):
        biases = {"gate_up_bias": torch.randn(E, wide).bfloat16() / 2, "down_bias": torch.randn(E, H).bfloat16() / 2}
    hidden, ids, weights = torch.randn(T, H).bfloat16(), torch.randint(-1, E - 1, (T, TOPK)), torch.rand(T, TOPK)
    out = moe_mlp(hidden, up, down, ids, weights, **how, **biases)

    act = {name: how[name] for name in ("activation", "gated", "interleaved") if name in how}

    def row(x: torch.Tensor, weight: torch.Tensor, e: int) -> torch.Tensor:
        x = (x.float() * weight).bfloat16() if how.get("weights_on") == "input" else x
        h = read(x[None], format) @ up.dequantize(torch.float32, e).T
        h = (h + biases["gate_up_bias"][e].float() if biases else h).bfloat16()
        a = activate(h, **act)
        y = (read(a, format) @ down.dequantize(torch.float32, e).T)[0]
        y = y + biases["down_bias"][e].float() if biases else y
        return y if how.get("weights_on") == "input" else y * weight

    want = torch.zeros(T, H)
    for t, s in itertools.product(range(T), range(TOPK)):
        if ids[t, s] >= 0:
            want[t] += row(hidden[t], weights[t, s], int(ids[t, s]))
    assert off(out, want) < (4e-3 if PRECISIONS[format].math == "fp8" else 8e-3)  # relu2 doubles an error


def test_one_of_the_two_weights_may_be_a_tensor() -> None:
    torch.manual_seed(2)
    up, down = packed_weights("mxfp4", 64, 96), torch.randn(E, 96, 32).bfloat16()
    hidden, ids, weights = torch.randn(T, 96).bfloat16(), torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK)
    assert torch.equal(moe_mlp(hidden, up, down, ids, weights), moe_mlp(hidden, up.dequantize(), down, ids, weights))


@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int4_g32_zp", "fp8_channel_a16", "nvfp4"])
def test_with_x_in_16_bits_it_is_the_call_with_dequantised_weights(format: str) -> None:
    torch.manual_seed(3)
    w, x, m_sizes = packed_weights(format, 48, 96), torch.randn(30, 96).bfloat16(), torch.tensor([9, 0, 12, 8, 1])
    assert torch.equal(grouped_gemm(x, w, m_sizes), grouped_gemm(x, w.dequantize(), m_sizes))


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_gradients_go_through_frozen_weights(format: str) -> None:
    torch.manual_seed(4)
    w, (index, m_sizes, *_) = packed_weights(format, 48, 128), sort_routing(torch.randint(-1, E, (T, TOPK)), E)
    x, weights = torch.randn(T, 128).bfloat16().requires_grad_(), torch.rand(T, TOPK).requires_grad_()
    bias, how = torch.randn(E, 48).bfloat16().requires_grad_(), {"permute_x": True, "permute_y": True}
    dy = torch.randn(T * TOPK, 48).bfloat16()

    def call(w: Any, x: torch.Tensor) -> list[torch.Tensor]:
        y = grouped_gemm(x, w, m_sizes, TOPK, index, topk_weights=weights, fuse_mul_post=True, bias=bias, **how)
        return list(torch.autograd.grad(y, (x, weights, bias), dy))

    for got, want in zip(call(w, x), call(w.dequantize(), x), strict=True):
        torch.testing.assert_close(got, want, rtol=0, atol=0)
    dx = grouped_gemm_dX(dy, w, m_sizes, TOPK, index, topk_weights=weights, fuse_mul_post=True, **how)
    assert torch.equal(
        dx, grouped_gemm_dX(dy, w.dequantize(), m_sizes, TOPK, index, topk_weights=weights, fuse_mul_post=True, **how)
    )


def test_a_layer_has_the_gradients_of_what_is_not_frozen() -> None:
    torch.manual_seed(5)
    up, down = packed_weights("mxfp4", 64, 96), packed_weights("mxfp4", 96, 32)
    hidden, weights = torch.randn(T, 96).bfloat16().requires_grad_(), torch.rand(T, TOPK).requires_grad_()
    bias, ids = torch.randn(E, 96).bfloat16().requires_grad_(), torch.randint(-1, E, (T, TOPK))
    wanted = hidden, weights, bias

    def call(up: Any, down: Any) -> tuple[torch.Tensor, ...]:
        out = moe_mlp(hidden, up, down, ids, weights, down_bias=bias)
        return out, *torch.autograd.grad(out.float().square().sum(), wanted)

    for got, want in zip(call(up, down), call(up.dequantize(), down.dequantize()), strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "mxfp8", "int4_g32_zp", "nvfp4"])
def test_torch_compile_sees_one_operator(format: str) -> None:
    torch.manual_seed(6)
    w, m_sizes = packed_weights(format, 48, 128), torch.tensor([3, 0, 2, 4, 1])
    x = torch.randn(10, 128).bfloat16().requires_grad_()
    compiled = torch.compile(lambda x: grouped_gemm(x, w, m_sizes) * 2, fullgraph=True, backend="aot_eager")
    got, want = compiled(x), grouped_gemm(x, w, m_sizes) * 2
    assert torch.equal(got, want)
    assert torch.equal(*(torch.autograd.grad(y.float().sum(), x)[0] for y in (got, want)))
    parts = w.format, w.codes, w.scale, w.zero, w.global_scale, w.derived
    rest = m_sizes, None, None, None, 1, False, False, False, "nk", False, False, False
    if all(tensor.dtype is not torch.float8_e4m3fn for tensor in w.tensors().values()):  # which opcheck can't multiply
        torch.library.opcheck(torch.ops.pretuned.grouped_gemm_quantised, (x, *parts, *rest))


def test_nan_stays_in_its_expert_and_in_its_row() -> None:
    w = copy.deepcopy(packed_weights("fp8_block_a16", 32, 128))
    w.codes[1, 0, 0] = float("nan")
    x = torch.randn(5, 128).bfloat16()
    x[4, 0] = float("inf")
    y = grouped_gemm(x, w, torch.tensor([1, 1, 1, 1, 1]))
    assert y.isfinite().all(1).tolist() == [True, False, True, True, False]
    assert y[1, 1:].isfinite().all()
    quantises = grouped_gemm(x, packed_weights("fp8_block", 32, 128), torch.tensor([1, 1, 1, 1, 1]))
    assert quantises.isfinite().all(1).tolist() == [True, True, True, True, False]


def test_autocast_casts_x_and_leaves_the_weights() -> None:
    w, x, m_sizes = packed_weights("mxfp4", 32, 64), torch.randn(5, 64), torch.tensor([1, 1, 1, 1, 1])
    with torch.autocast("cpu", torch.bfloat16):
        y = grouped_gemm(x, w, m_sizes)
        layer = moe_mlp(
            x, packed_weights("mxfp4", 64, 64), packed_weights("mxfp4", 64, 32), m_sizes[:, None] * 0, torch.ones(5, 1)
        )
    assert y.dtype is torch.bfloat16
    assert layer.dtype is torch.float32
    assert torch.equal(y, grouped_gemm(x.bfloat16(), w, m_sizes))


def test_out_takes_the_result() -> None:
    w, x, m_sizes = packed_weights("mxfp4", 32, 64), torch.randn(5, 64).bfloat16(), torch.tensor([1, 1, 1, 1, 1])
    out = torch.empty(5, 32, dtype=torch.bfloat16)
    assert grouped_gemm(x, w, m_sizes, out=out) is out
    assert torch.equal(out, grouped_gemm(x, w, m_sizes))
    inside = w.codes.view(-1)[: 5 * 32 * 2].view(torch.bfloat16).view(5, 32)
    with pytest.raises(InputError, match="out is in the memory of codes"):
        grouped_gemm(x, w, m_sizes, out=inside)


def test_scales_at_both_ends() -> None:
    torch.manual_seed(8)
    codes = torch.randint(0, 256, (2, 3, 32), dtype=torch.uint8)
    scale = torch.tensor([[[0, 1], [120, 130], [2, 0]], [[251, 250], [127, 251], [249, 248]]], dtype=torch.uint8)
    w, x = ExpertWeights.mxfp4(codes, scale), torch.randn(4, 64).bfloat16()
    x = torch.cat([x[:2] * 2.0**100, x[2:] * 2.0**-20])  # so that y is in float32's range
    y = grouped_gemm(x, w, torch.tensor([2, 2]))
    factor = torch.ldexp(torch.ones(2, 3, 2, dtype=torch.float64), scale.int() - 127).repeat_interleave(32, 2)
    table = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], dtype=torch.float64)
    exact = table[torch.stack((codes & 15, codes >> 4), -1).flatten(2).int()] * factor
    want = torch.stack([x[m].double() @ exact[m // 2].T for m in range(4)])
    assert ((y.double() - want) / want).abs().max() < 2e-2  # each element for itself: they are of many sizes
    least = ExpertWeights.nvfp4(
        torch.full((1, 2, 8), 0x11, dtype=torch.uint8),
        torch.full((1, 2, 1), 2.0**-9).to(torch.float8_e4m3fn),
        torch.tensor([2.0**-30]),
    )
    assert grouped_gemm(torch.ones(1, 16), least, torch.tensor([1])).tolist() == [[16 * 2.0**-40] * 2]


def test_prepared_weights_give_the_same() -> None:
    w, x, m_sizes = packed_weights("mxfp4", 32, 64), torch.randn(5, 64).bfloat16(), torch.tensor([1, 1, 1, 1, 1])
    y = grouped_gemm(x, w, m_sizes)
    assert torch.equal(grouped_gemm(x, w.prepare(), m_sizes), y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, w, m: grouped_gemm(x[:, :32], w, m), r"w is of shape \[5, 32, 64\], wanted \[E, N, K\] with K=32"),
        (lambda x, w, m: grouped_gemm(x, w, m[:3]), r"w is of shape \[5, 32, 64\], wanted \[E, N, K\] with E=3"),
        (lambda x, w, m: grouped_gemm(x, w, m, w_layout="kn"), "w_layout is 'kn', wanted 'nk', as ExpertWeights"),
        (lambda x, w, m: grouped_gemm(x, w.to("meta"), m), "w is on meta, wanted x's device, cpu"),
        (lambda x, w, m: grouped_gemm(x.int(), w, m), "x is torch.int32"),
        (
            lambda x, w, m: grouped_gemm(x, w, m, kernel_config_fwd=Config(16, 64, 128, 4, 4)),
            "a kernel_config_.* with ExpertWeights is a Config or a Choice.*; autotune=True measures their kernels",
        ),
        (lambda x, w, m: grouped_gemm(x, w.codes, m), "w is torch.uint8|w is of shape"),
        (
            lambda x, w, m: moe_mlp(x, w, w, m[:, None], torch.ones(5, 1)),
            "with down_weight as w .* with K=16",
        ),
        (lambda x, w, m: moe_mlp(x, w, w.to("meta"), m[:, None], torch.ones(5, 1)), "down_weight is on meta"),
        (lambda x, w, m: moe_mlp(w, w, w, m[:, None], torch.ones(5, 1)), "hidden is a ExpertWeights"),
        (lambda x, w, m: grouped_gemm_dX(x, w, m), r"dy is of shape \[5, 64\], wanted \[rows of y, N=32\]"),
        (lambda x, w, m: explain(x[:, :32], w, m, sm=90), "with K=32, x's last dimension"),
    ],
)
def test_what_does_not_fit_is_reported(call: Any, message: str) -> None:
    with pytest.raises(InputError, match=message):
        call(torch.randn(5, 64).bfloat16(), packed_weights("mxfp4", 32, 64), torch.tensor([1, 1, 1, 1, 1]))


@pytest.fixture
def gpu(clean_places: object, monkeypatch: pytest.MonkeyPatch) -> Iterator[EmulatedGpu]:
    """A GPU that no bundle is for, and that needs no driver of ours: torch's for ROCm."""
    monkeypatch.setattr(torch.version, "hip", "6.4")
    quantised._tell.cache_clear()
    with emulated(EmulatedGpu(Gpu("AMD MI300X", 304, 192 << 10, 0), 94)) as gpu:
        yield gpu
    quantised._tell.cache_clear()


@pytest.mark.parametrize("form", FORMS, ids=label)
@pytest.mark.parametrize("format", ["fp8_block", "mxfp4"])
def test_on_a_gpu_torch_does_it_and_says_so_once(
    gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture, format: str, form: dict[str, bool]
) -> None:
    w, m_sizes, M = packed_weights(format, 32, 128), torch.tensor([7, 0, 1, 30, 0]), T * TOPK
    indexed = form["gather"] or form["scatter"] or form["weigh"]
    x = torch.randn(T if form["gather"] else M, 128).bfloat16()
    how = {
        "topk": TOPK,
        "gather_indices": index_of(M) if indexed else None,
        "permute_x": form["gather"],
        "permute_y": form["scatter"],
        "topk_weights": torch.rand(T, TOPK) if form["weigh"] else None,
        "fuse_mul_post": form["weigh"],
        "bias": torch.randn(E, 32).bfloat16() if form["bias"] else None,
        "zero_tail": True,
    }
    results = [grouped_gemm(x, w, m_sizes, **how) for _ in range(2)]
    dx = grouped_gemm(leaf := x.clone().requires_grad_(), w, m_sizes, **how).float().sum().backward() or leaf.grad
    gpu.visible = False
    want = grouped_gemm(x, w, m_sizes, **how)
    grouped_gemm(leaf := x.clone().requires_grad_(), w, m_sizes, **how).float().sum().backward()
    skipped = 3 if indexed and not form["scatter"] else slice(0, 0)
    for tensor in (*results, want):
        tensor[skipped] = 0
    assert torch.equal(*results)
    assert off(results[0], want) < 5e-3
    assert off(dx, leaf.grad) < 5e-3
    warnings = [record.getMessage() for record in caplog.records if record.levelno == logging.WARNING]
    (warned,) = [
        warning for warning in warnings if not warning.startswith("pretuned: bundles run on linux")
    ]  # said once a process
    assert warned.startswith(f"pretuned: no bundle has a kernel for {format} weights: torch dequantises them")


def test_a_layer_on_a_gpu(gpu: EmulatedGpu) -> None:
    torch.manual_seed(7)
    up, down, act = packed_weights("mxfp4", 64, 96, 1), packed_weights("mxfp4", 96, 32, 2), ("swiglu_oai",)
    hidden, weights = torch.randn(T, 96).bfloat16().requires_grad_(), torch.rand(T, TOPK)
    ids, how = torch.randint(-1, E, (T, TOPK)), {"interleaved": True, "gate_up_bias": torch.randn(E, 64).bfloat16()}
    got = moe_mlp(hidden, up, down, ids, weights, *act, **how)
    (dx,) = torch.autograd.grad(got.float().sum(), hidden)
    gpu.visible = False
    want = moe_mlp(hidden, up, down, ids, weights, *act, **how)
    (want_dx,) = torch.autograd.grad(want.float().sum(), hidden)
    assert off(got.detach(), want.detach()) < 8e-3  # (torch's product is rounded before the bias is added)
    assert off(dx, want_dx) < 8e-3


def test_strict_refuses_and_a_capture_can_not_be_done(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    w, x, m_sizes = packed_weights("mxfp4", 32, 64), torch.randn(5, 64).bfloat16(), torch.tensor([1, 1, 1, 1, 1])
    gpu.capturing = True
    with pytest.raises(ProblemNotInBundle, match=r"a kernel for mxfp4 weights, .* which a CUDA graph capture forbids"):
        grouped_gemm(x, w, m_sizes)
    monkeypatch.setenv("PRETUNED_STRICT", "1")
    reload()
    with pytest.raises(ProblemNotInBundle, match="PRETUNED_STRICT: no bundle has a kernel for mxfp4 weights"):
        grouped_gemm(x, w, m_sizes)
