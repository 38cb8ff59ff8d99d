"""Values and gradients of every form on the host, against the equations written out row by row."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.checkpoint import checkpoint

from pretuned.runtime import grouped_gemm, grouped_gemm_dW, grouped_gemm_dX
from pretuned.runtime.ops import gradients

T, TOPK, E, N, K = 5, 2, 4, 6, 8
FORMS = [(x, y, w, b) for x in (0, 1) for y in (0, 1) for w in (0, 1) for b in (0, 1)]


def routing(seed: int = 0, T: int = T) -> tuple[torch.Tensor, torch.Tensor]:
    ids = torch.randint(0, E, (T * TOPK,), generator=torch.Generator().manual_seed(seed))
    return torch.sort(ids, stable=True)[1], torch.bincount(ids, minlength=E).int()


def tensors(
    form: tuple[int, ...], layout: str = "nk", dtype: torch.dtype = torch.float64, T: int = T
) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()

    permute_x, _, weights, bias = form
    inputs = {
        "x": random(T if permute_x else T * TOPK, K),
        "w": random(E, N, K) if layout == "nk" else random(E, K, N),
    }
    if weights:
        inputs["topk_weights"] = random(T, TOPK)
    if bias:
        inputs["bias"] = random(E, N)
    return inputs


def call(form: tuple[int, ...], layout: str, index: torch.Tensor, m_sizes: torch.Tensor, **kwargs: Any) -> torch.Tensor:
    return grouped_gemm(
        m_sizes=m_sizes,
        topk=TOPK,
        gather_indices=index,
        permute_x=bool(form[0]),
        permute_y=bool(form[1]),
        fuse_mul_post=bool(form[2]),
        w_layout=layout,
        **kwargs,
    )


def by_rows(
    form: tuple[int, ...], layout: str, index: torch.Tensor, m_sizes: torch.Tensor, **kwargs: Any
) -> torch.Tensor:
    """Return the product, a row at a time, differentiated by torch itself."""
    permute_x, permute_y = form[:2]
    rows: list[torch.Tensor] = [torch.zeros(N, dtype=kwargs["x"].dtype)] * len(index)
    owners = [g for g, count in enumerate(m_sizes.tolist()) for _ in range(count)]
    for i, g in enumerate(owners):
        at = int(index[i])
        matrix = kwargs["w"][g] if layout == "nk" else kwargs["w"][g].T
        row = matrix @ kwargs["x"][at // TOPK if permute_x else i]
        if "bias" in kwargs:
            row = row + kwargs["bias"][g]
        if "topk_weights" in kwargs:
            row = row * kwargs["topk_weights"].flatten()[at]
        rows[at if permute_y else i] = row
    return torch.stack(rows)


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_its_gradients(form: tuple[int, ...], layout: str) -> None:
    index, m_sizes = routing()
    operands = tensors(form, layout)
    y, wanted = call(form, layout, index, m_sizes, **operands), by_rows(form, layout, index, m_sizes, **operands)
    torch.testing.assert_close(y, wanted)
    dy = torch.randn_like(y)
    inputs = list(operands.values())
    for got, want in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
        torch.testing.assert_close(got, want)


@pytest.mark.parametrize("form", FORMS)
def test_gradcheck(form: tuple[int, ...]) -> None:
    index, m_sizes = routing(1)
    inputs = tensors(form)
    names = list(inputs)

    def function(*values: torch.Tensor) -> torch.Tensor:
        return call(form, "nk", index, m_sizes, **dict(zip(names, values, strict=True)))

    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)


@settings(max_examples=40, deadline=None)
@given(
    tokens=st.integers(0, 6),
    seed=st.integers(0, 99),
    form=st.sampled_from(FORMS),
    cut=st.integers(0, 4),
    wide=st.booleans(),
)
def test_rows_past_the_sum_have_no_part(tokens: int, seed: int, form: tuple[int, ...], cut: int, wide: bool) -> None:
    index, m_sizes = routing(seed, tokens)
    operands = tensors(form, T=tokens)
    kept = m_sizes.clone()
    kept[-1] = max(0, int(kept[-1]) - cut)
    rows = int(kept.sum())
    kind = torch.int64 if wide else torch.int32
    y = call(form, "nk", index.to(kind), kept.to(kind), zero_tail=True, **operands)
    wanted = by_rows(form, "nk", index, kept, **operands) if tokens else y
    torch.testing.assert_close(y, wanted)
    if not tokens:
        dx, dw, *_ = torch.autograd.grad(y.sum(), list(operands.values()))
        assert dx.shape == operands["x"].shape
        assert not dw.any()
        return
    inputs = list(operands.values())
    got = torch.autograd.grad(y.square().sum(), inputs)
    want = (
        torch.autograd.grad(wanted.square().sum(), inputs) if rows else [torch.zeros_like(tensor) for tensor in inputs]
    )
    for tensor, other in zip(got, want, strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("permute_x", [False, True])
@pytest.mark.parametrize("permute_y", [False, True])
def test_indices_outside_take_no_part(permute_x: bool, permute_y: bool) -> None:
    form = (int(permute_x), int(permute_y), 1, 1)
    index, m_sizes = routing()
    operands = tensors(form)
    bad = index.clone()
    bad[[1, 4, 7]] = torch.tensor([-1, T * TOPK, 10**9])
    y = call(form, "nk", bad, m_sizes, zero_tail=True, **operands)
    part = (bad >= 0) & (bad < T * TOPK)
    whole = by_rows(form, "nk", index, m_sizes, **operands)
    mask = torch.zeros(T * TOPK, 1, dtype=torch.bool)
    mask[index if permute_y else torch.arange(T * TOPK), 0] = part
    inputs = list(operands.values())
    # Rows that take no part in the sorted order are not written; what they hold has no gradient.
    torch.testing.assert_close(torch.where(mask, y, 0), torch.where(mask, whole, 0))
    dy = torch.where(mask, torch.randn_like(y), 0)
    got = torch.autograd.grad(y, inputs, dy)
    for tensor, other in zip(got, torch.autograd.grad(whole, inputs, dy), strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("permute_y", [False, True])
def test_what_takes_no_part_may_hold_nan(permute_y: bool) -> None:
    form = (1, int(permute_y), 1, 0)
    index, m_sizes = routing()
    part = index < (T - 1) * TOPK  # the last token, its weights and its slots take none
    bad = torch.where(part, index, -1)
    inputs = tensors(form)
    clean = call(form, "nk", bad, m_sizes, zero_tail=True, **inputs)
    dy = torch.zeros_like(clean)
    dy[index[part] if permute_y else part] = 1.0
    want = torch.autograd.grad(clean, list(inputs.values()), dy)
    with torch.no_grad():
        inputs["x"][-1] = inputs["topk_weights"][-1] = float("nan")
    y = call(form, "nk", bad, m_sizes, zero_tail=True, **inputs)
    for got, wanted in zip(torch.autograd.grad(y, list(inputs.values()), dy), want, strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("form", [form for form in FORMS if form[0] or form[2]])
def test_rows_that_pad_experts_may_make_m_more_than_there_are_slots(form: tuple[int, ...]) -> None:
    """T is told by x or topk_weights: every expert has three rows of no slot, and the rest of the call is the same."""
    inputs, (index, m_sizes) = tensors(form), routing()
    parts = torch.split(torch.arange(T * TOPK), m_sizes.tolist())
    none = torch.full((3,), -1)
    where = torch.cat([torch.cat([part, none]) for part in parts])  # of the unpadded row, -1 for one that pads
    real = where >= 0
    outside = torch.tensor([-1, T * TOPK, 99]).repeat(E + T)[: len(where)]
    more = torch.where(real, index[where.clamp(min=0)], outside)
    padded = dict(inputs) if form[0] else inputs | {"x": inputs["x"].detach()[where.clamp(min=0)].requires_grad_()}
    y = call(form, "nk", more, m_sizes + 3, **padded)
    wanted = call(form, "nk", index, m_sizes, **inputs)
    assert len(more) > T * TOPK
    taken = slice(None) if form[1] else real
    torch.testing.assert_close(y[taken], wanted)
    dy = torch.randn(wanted.shape, dtype=wanted.dtype, generator=torch.Generator().manual_seed(7))
    wide = torch.zeros_like(y)
    wide[taken] = dy
    got = dict(zip(padded, torch.autograd.grad(y, list(padded.values()), wide), strict=True))
    want = dict(zip(inputs, torch.autograd.grad(wanted, list(inputs.values()), dy), strict=True))
    if not form[0]:
        assert not got["x"][~real].any()
        got["x"] = got["x"][real]
    for name, tensor in want.items():
        torch.testing.assert_close(got[name], tensor)


@pytest.mark.parametrize("topk", [1, TOPK])
@pytest.mark.parametrize("form", [form for form in FORMS if form[0] or form[2]])
def test_without_tokens_rows_may_pad_experts(form: tuple[int, ...], topk: int) -> None:
    """A rank without tokens in this step, where each expert has room for as many rows as ever."""
    inputs, m_sizes = tensors(form, T=0), torch.tensor([2, 0, 1, 1])
    M = 5
    if form[2]:
        inputs["topk_weights"] = torch.zeros(0, topk, dtype=torch.float64, requires_grad=True)
    if not form[0]:
        inputs["x"] = torch.randn(M, K, dtype=torch.float64, requires_grad=True)
    how: dict[str, Any] = {
        "m_sizes": m_sizes,
        "topk": topk,
        "gather_indices": torch.tensor([-1, 0, 7, -1, 0]),
        "permute_x": bool(form[0]),
        "permute_y": bool(form[1]),
        "fuse_mul_post": bool(form[2]),
    }
    y = grouped_gemm(**inputs, **how, zero_tail=True)
    assert y.shape == (0 if form[1] else M, N)
    assert not y.any()
    for tensor, got in zip(inputs.values(), torch.autograd.grad(y.sum(), list(inputs.values())), strict=True):
        assert got.shape == tensor.shape
        assert not got.any()
    del how["m_sizes"], inputs["w"]
    inputs = {name: tensor for name, tensor in inputs.items() if name != "bias"}
    assert not grouped_gemm_dW(torch.ones_like(y), m_sizes=m_sizes, **inputs, **how).any()
    del inputs["x"]
    w = torch.randn(E, N, K, dtype=torch.float64)
    dx = grouped_gemm_dX(torch.ones_like(y), w, m_sizes=m_sizes, **inputs, **how) if form[2] else torch.zeros(0)
    assert not dx.any()


@pytest.mark.parametrize(("index", "counts"), [([1, 2, 3, 4, 0, 5], [2, 2]), ([1, 2, 99, 4, 3], [3, 2])])
def test_dx_of_rows_that_take_no_part_is_zero_whatever_their_weights(index: list[int], counts: list[int]) -> None:
    weights = torch.rand(3, TOPK, dtype=torch.float64)
    weights[0, 0] = weights[2, 1] = float("nan")
    weights.requires_grad_()
    x = torch.randn(len(index), K, dtype=torch.float64, requires_grad=True)
    y = grouped_gemm(
        x,
        torch.randn(len(counts), N, K, dtype=torch.float64),
        torch.tensor(counts, dtype=torch.int32),
        TOPK,
        torch.tensor(index),
        permute_y=True,
        topk_weights=weights,
        fuse_mul_post=True,
    )
    dx, _ = torch.autograd.grad(y.sum(), [x, weights])
    taking = [i < sum(counts) and slot < 3 * TOPK for i, slot in enumerate(index)]
    assert dx.isfinite().all()
    assert dx.any(1).tolist() == taking


@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_a_sum_over_nothing_has_its_bias_and_weights(layout: str) -> None:
    index, m_sizes = routing()
    for form in FORMS:
        inputs = tensors(form, layout)
        inputs["x"] = inputs["x"].detach()[:, :0].requires_grad_()
        inputs["w"] = inputs["w"].detach()[:, :, :0] if layout == "nk" else inputs["w"].detach()[:, :0]
        y = call(form, layout, index, m_sizes, **inputs)
        torch.testing.assert_close(y, by_rows(form, layout, index, m_sizes, **inputs))
        assert all(not gradient.any() for gradient in torch.autograd.grad(y.sum(), [inputs["x"]]))


@pytest.mark.parametrize("zero_tail", [False, True])
@pytest.mark.parametrize("form", FORMS)
def test_a_sum_over_nothing_is_one_over_zeros(form: tuple[int, ...], zero_tail: bool) -> None:
    """Rows that take no part, and rows past the last expert's, are as they are with any other reduction."""
    index, m_sizes = routing()
    index[[1, 4]] = torch.tensor([-1, T * TOPK])
    m_sizes[-1] -= 1
    inputs = {name: tensor.detach() for name, tensor in tensors(form).items()}
    results = []
    for columns in (0, 8):
        nothing = {"x": torch.zeros(len(inputs["x"]), columns), "w": torch.zeros(E, N, columns)}
        out = torch.full((T * TOPK, N), 9.0, dtype=torch.float64)
        nothing = {name: tensor.double() for name, tensor in nothing.items()}
        results.append(call(form, "nk", index, m_sizes, **inputs | nothing, zero_tail=zero_tail, out=out))
    if form[3] or zero_tail:
        torch.testing.assert_close(*results)
    else:  # without a bias all of it is zero, whatever was there
        assert not results[0].any()


def test_a_bias_has_no_gradient_of_rows_that_take_no_part() -> None:
    index, m_sizes = routing()
    bad = index.clone()
    bad[[1, 4, 7]] = torch.tensor([-1, T * TOPK, 10**9])
    inputs = tensors((1, 0, 0, 1))
    y = call((1, 0, 0, 1), "nk", bad, m_sizes, zero_tail=True, **inputs)
    dy = torch.randn_like(y)
    owners = torch.repeat_interleave(torch.arange(E), m_sizes.long())
    part = torch.where(((bad >= 0) & (bad < T * TOPK))[:, None], dy, 0)
    got = torch.autograd.grad(y, [inputs["bias"], inputs["w"]], dy, retain_graph=True)
    torch.testing.assert_close(got[0], torch.zeros(E, N, dtype=dy.dtype).index_add(0, owners, part))
    for tensor, other in zip(got, torch.autograd.grad(y, [inputs["bias"], inputs["w"]], part), strict=True):
        torch.testing.assert_close(tensor, other)


@pytest.mark.parametrize("form", FORMS)
def test_without_experts_the_gradients_are_zero(form: tuple[int, ...]) -> None:
    inputs = tensors(form)
    inputs["w"] = torch.zeros(0, N, K, dtype=torch.float64, requires_grad=True)
    if form[3]:
        inputs["bias"] = torch.zeros(0, N, dtype=torch.float64, requires_grad=True)
    index, _ = routing()
    y = call(form, "nk", index, torch.zeros(0, dtype=torch.int32), zero_tail=True, **inputs)
    assert not y.any()
    for name, got in zip(inputs, torch.autograd.grad(y.sum(), list(inputs.values())), strict=True):
        assert got.shape == inputs[name].shape
        assert not got.any()


@pytest.mark.parametrize("form", FORMS)
def test_dX_and_dW_as_calls_are_the_gradients(form: tuple[int, ...]) -> None:
    index, m_sizes = routing()
    for layout in ("nk", "kn"):
        inputs = tensors((*form[:3], 0), layout)
        y = call((*form[:3], 0), layout, index, m_sizes, **inputs)
        dy = torch.randn_like(y)
        dx, dw = torch.autograd.grad(y, [inputs["x"], inputs["w"]], dy)
        how: dict[str, Any] = {
            "topk": TOPK,
            "gather_indices": index,
            "permute_x": bool(form[0]),
            "permute_y": bool(form[1]),
            "topk_weights": inputs.get("topk_weights"),
            "fuse_mul_post": bool(form[2]),
            "w_layout": layout,
        }
        torch.testing.assert_close(grouped_gemm_dX(dy, inputs["w"], m_sizes, **how), dx)
        torch.testing.assert_close(grouped_gemm_dW(dy, inputs["x"], m_sizes, **how), dw)


def test_only_what_needs_a_gradient_gets_one() -> None:
    index, m_sizes = routing()
    form = (1, 0, 1, 1)
    for needed in ("x", "w", "topk_weights", "bias"):
        inputs = {name: tensor.detach() for name, tensor in tensors(form).items()}
        inputs[needed].requires_grad_()
        call(form, "nk", index, m_sizes, **inputs).sum().backward()
        assert [name for name, parameter in inputs.items() if parameter.grad is not None] == [needed]
    for option, name in (("dX_only", "x"), ("dW_only", "w")):
        inputs = tensors(form)
        call(form, "nk", index, m_sizes, **inputs, **{option: True}).sum().backward()
        assert [key for key, parameter in inputs.items() if parameter.grad is not None] == [name]


def test_flattened_and_strided_weights_and_any_dy() -> None:
    index, m_sizes = routing()
    inputs = tensors((1, 0, 0, 0))
    flat = inputs["w"].detach().reshape(E * N, K).requires_grad_()
    y = call((1, 0, 0, 0), "nk", index, m_sizes, x=inputs["x"], w=flat)
    y.sum().backward()  # its dy is expanded, with strides of zero
    call((1, 0, 0, 0), "nk", index, m_sizes, **inputs).backward(torch.ones(N, T * TOPK, dtype=torch.float64).T)
    assert flat.grad is not None
    assert inputs["w"].grad is not None
    torch.testing.assert_close(flat.grad.view(E, N, K), inputs["w"].grad)
    held = torch.zeros(E, N + 1, K + 2, dtype=torch.float64).requires_grad_()
    call((1, 0, 0, 0), "nk", index, m_sizes, x=inputs["x"], w=held[:, :N, :K]).sum().backward()
    assert held.grad is not None
    torch.testing.assert_close(held.grad[:, :N, :K], inputs["w"].grad)


def test_nan_stays_with_its_expert_and_its_token() -> None:
    index, m_sizes = routing(2)
    form = (0, 0, 1, 0)
    inputs = tensors(form)
    clean = torch.autograd.grad(call(form, "nk", index, m_sizes, **inputs).sum(), list(inputs.values()))
    start, count = int(m_sizes[:2].sum()), int(m_sizes[2])
    assert count
    with torch.no_grad():
        inputs["x"][start : start + count] = float("nan")
    dx, dw, dweights = torch.autograd.grad(call(form, "nk", index, m_sizes, **inputs).sum(), list(inputs.values()))
    assert torch.equal(dx, clean[0])
    assert torch.equal(dw[[0, 1, 3]], clean[1][[0, 1, 3]])
    assert dw[2].isnan().all()
    hit = torch.zeros(T * TOPK, dtype=torch.bool)
    hit[index[start : start + count]] = True
    assert torch.equal(dweights.flatten()[~hit], clean[2].flatten()[~hit])
    assert dweights.flatten()[hit].isnan().all()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_sixteen_bits_stay_near_float64(dtype: torch.dtype) -> None:
    index, m_sizes = routing()
    form = (1, 1, 1, 1)
    exact = tensors(form)
    inputs = {
        name: tensor.detach().to(torch.float32 if name == "topk_weights" else dtype).requires_grad_()
        for name, tensor in exact.items()
    }
    y, wanted = call(form, "nk", index, m_sizes, **inputs), call(form, "nk", index, m_sizes, **exact)
    assert y.dtype is dtype
    dy = torch.randn_like(wanted)
    got = torch.autograd.grad(y, list(inputs.values()), dy.to(dtype))
    for tensor, other in zip((y, *got), (wanted, *torch.autograd.grad(wanted, list(exact.values()), dy)), strict=True):
        error = (tensor.double() - other).norm() / other.norm()
        assert error < 1e-2
    assert [tensor.dtype for tensor in got] == [dtype, dtype, torch.float32, dtype]


def test_autocast_casts_float32_and_gives_float32_gradients() -> None:
    index, m_sizes = routing()
    form = (1, 0, 0, 1)
    inputs = tensors(form, dtype=torch.float32)
    low = {name: tensor.detach().bfloat16() for name, tensor in inputs.items()}
    wanted = call(form, "nk", index, m_sizes, **low)
    with torch.autocast("cpu", torch.bfloat16):
        y = call(form, "nk", index, m_sizes, **inputs)
        assert torch.equal(y, wanted)
        gradients = torch.autograd.grad(y.float().square().sum(), list(inputs.values()))
        assert torch.equal(call(form, "nk", index, m_sizes, **low), wanted)
    assert {gradient.dtype for gradient in gradients} == {torch.float32}
    outside = {name: tensor.detach().requires_grad_() for name, tensor in low.items()}
    again = torch.autograd.grad(
        call(form, "nk", index, m_sizes, **outside).float().square().sum(), list(outside.values())
    )
    for gradient, other in zip(gradients, again, strict=True):
        assert torch.equal(gradient, other.float())


@pytest.mark.parametrize("form", FORMS)
def test_a_backward_within_autocast_is_the_same(form: tuple[int, ...]) -> None:
    index, m_sizes = routing()
    inputs = tensors(form, dtype=torch.float32)
    y = call(form, "nk", index, m_sizes, **inputs)
    dy = torch.randn(y.shape, generator=torch.Generator().manual_seed(7))
    want = torch.autograd.grad(y, list(inputs.values()), dy, retain_graph=True)
    with torch.autocast("cpu", torch.bfloat16):
        got = torch.autograd.grad(y, list(inputs.values()), dy)
    for tensor, other in zip(got, want, strict=True):
        assert torch.equal(tensor, other)


def test_checkpointing_changes_nothing() -> None:
    index, m_sizes = routing()
    form = (1, 0, 1, 0)
    operands = tensors(form)
    inputs = list(operands.values())

    def layer(x: torch.Tensor, w: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return call(form, "nk", index, m_sizes, x=x, w=w, topk_weights=weights).relu()

    plain = torch.autograd.grad(layer(*inputs).sum(), inputs)
    for reentrant in (False, True):
        y: torch.Tensor = checkpoint(layer, *inputs, use_reentrant=reentrant)
        for tensor in inputs:
            tensor.grad = None
        y.sum().backward()
        for tensor, want in zip(inputs, plain, strict=True):
            assert tensor.grad is not None
            assert torch.equal(tensor.grad, want)


def test_a_gradient_has_no_gradient() -> None:
    x, w = torch.randn(3, K, requires_grad=True), torch.randn(E, N, K)
    (dx,) = torch.autograd.grad(grouped_gemm(x, w, torch.tensor([3, 0, 0, 0])).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


@pytest.mark.parametrize("form", [(1, 0, 1, 1), (0, 1, 1, 1)])
def test_the_gradient_of_the_weights_in_pieces(form: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    index, m_sizes = routing()
    operands = tensors(form)
    inputs = list(operands.values())
    whole = torch.autograd.grad(call(form, "nk", index, m_sizes, **operands).square().sum(), inputs)
    monkeypatch.setattr(gradients, "_CHUNK_ELEMENTS", 3 * K)  # a row or three at a time
    pieces = torch.autograd.grad(call(form, "nk", index, m_sizes, **operands).square().sum(), inputs)
    for piece, other in zip(pieces, whole, strict=True):
        torch.testing.assert_close(piece, other)
