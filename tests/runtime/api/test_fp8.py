"""``precision="fp8"``: products of quantised operands, gradients of both, and weights that are never stale.

The equations are written out here once more, by torch: a scale for each 128 of the reduction of x and dy, and for each
128 x 128 of w.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import emulated_kernels
import pytest
import torch
from coded_machine import E as MACHINE_E
from coded_machine import Machine, routed
from emulated_driver import Launch, emulated

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Op, Problem, RowOp
from pretuned.kernels import search
from pretuned.kernels.rowops import RowOpSpec
from pretuned.runtime import (
    ExpertWeights,
    Lora,
    QuantizedRows,
    grouped_gemm,
    moe_mlp,
    preload,
    reload,
    reuse_fp8_weights,
    sort_routing,
)
from pretuned.runtime.check import tensors
from pretuned.runtime.driver.device import current_stream
from pretuned.runtime.ops import fp8_products, fp8_training, fp8_weights
from pretuned.runtime.ops.fp8_codes import quantise_weights

E, N, K, H, I, TOP_K, T = 5, 256, 384, 256, 128, 2, 150  # noqa: E741
COUNTS = [129, 0, 1, 40, 128]
M = sum(COUNTS)
FP8: Any = {"precision": "fp8"}


def q_rows(t: torch.Tensor) -> torch.Tensor:
    """t [M, C] quantised in groups of 128 of a row, float32."""
    groups = t.detach().float().view(len(t), -1, 128)
    scale = groups.abs().amax(-1, keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1)
    return ((groups / scale).to(torch.float8_e4m3fn).float() * scale).view(t.shape)


def q_blocks(w: torch.Tensor) -> torch.Tensor:
    """w [E, N, K] quantised in blocks of 128 x 128, float32."""
    blocks = w.detach().float().view(w.shape[0], w.shape[1] // 128, 128, w.shape[2] // 128, 128)
    scale = blocks.abs().amax((2, 4), keepdim=True) / 448
    scale = torch.where(scale > 0, scale, 1)
    return ((blocks * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale).view(w.shape)


def q_columns(t: torch.Tensor, columns: int) -> torch.Tensor:
    """The rows t [M, C] of one expert quantised in groups of 128 rows and so many columns, float32."""
    M, C = t.shape
    padded = torch.nn.functional.pad(t.detach().float(), (0, 0, 0, -M % 128))
    groups = padded.view(-1, 128, C // columns, columns)
    scale = groups.abs().amax((1, 3), keepdim=True) * torch.tensor(1 / 448)
    scale = torch.where(scale > 0, scale, 1)
    return ((groups * scale.reciprocal()).to(torch.float8_e4m3fn).float() * scale).view(padded.shape)[:M]


def apart(got: torch.Tensor, want: torch.Tensor) -> float:
    """The relative distance of two tensors."""
    got, want = got.detach().float(), want.detach().float()
    return float((got - want).norm() / want.norm())


def by_expert(product: Callable[[int, slice], torch.Tensor], counts: list[int]) -> list[torch.Tensor]:
    first, parts = 0, []
    for e, count in enumerate(counts):
        parts.append(product(e, slice(first, first + count)))
        first += count
    return parts


def operands(dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(1)
    x = torch.randn(M, K, generator=g).bfloat16().requires_grad_()
    w = (torch.randn(E, N, K, generator=g) / K**0.5).to(dtype).requires_grad_()
    return x, w, torch.randn(M, N, generator=g).bfloat16(), torch.tensor(COUNTS, dtype=torch.int32)


@pytest.fixture(autouse=True)
def of_codes(monkeypatch: pytest.MonkeyPatch) -> None:
    """dW of these small matrices is of codes."""
    monkeypatch.setattr(fp8_products, "LEAST", 0)


def test_small_matrices_have_a_dw_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    assert fp8_products.multiplies_codes(4096, 7168)
    assert fp8_products.multiplies_codes(4096, 14336)
    assert not fp8_products.multiplies_codes(768, 1024)
    x, w, dy, m_sizes = operands()
    grouped_gemm(x, w, m_sizes, **FP8).backward(dy)
    plain = w.detach().requires_grad_()
    grouped_gemm(x, plain, m_sizes).backward(dy)
    assert torch.equal(w.grad, plain.grad)  # type: ignore[arg-type]
    inputs = layer(torch.float32)
    bf16 = inputs | {name: inputs[name].detach().bfloat16().requires_grad_() for name in inputs if "_weight" in name}
    got, want = step(inputs, **FP8), step(bf16 | {"topk_weights": inputs["topk_weights"]}, **FP8)
    assert apart(got[3], want[3]) < LOSS
    assert got[3].dtype is torch.float32


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_each_product_is_that_of_quantised_operands(layout: str, dtype: torch.dtype) -> None:
    x, w, dy, m_sizes = operands(dtype)
    as_given = w.detach().transpose(1, 2).contiguous() if layout == "kn" else w.detach().clone()
    as_given.requires_grad_()
    y = grouped_gemm(x, as_given, m_sizes, w_layout=layout, **FP8)
    y.backward(dy)
    qx, qw, qdy = q_rows(x), q_blocks(w), q_rows(dy)
    assert y.dtype is torch.bfloat16
    assert apart(y, torch.cat(by_expert(lambda e, rows: qx[rows] @ qw[e].T, COUNTS))) < 2e-3
    assert x.grad is not None
    assert apart(x.grad, torch.cat(by_expert(lambda e, rows: qdy[rows] @ qw[e], COUNTS))) < 2e-3
    dw = as_given.grad
    assert dw is not None
    assert dw.dtype is dtype
    dw = dw.transpose(1, 2) if layout == "kn" else dw
    of_dy, of_x = (1, 128) if layout == "nk" else (128, 1)
    want = by_expert(lambda e, rows: q_columns(dy[rows], of_dy).T @ q_columns(x[rows], of_x), COUNTS)
    assert apart(dw, torch.stack(want)) < 2e-3
    plain = by_expert(lambda e, rows: dy[rows].float().T @ x[rows].float(), COUNTS)
    assert apart(dw, torch.stack(plain)) < LOSS
    assert not dw[1].any()  # an expert without rows


def layer(dtype: torch.dtype = torch.bfloat16, seed: int = 2) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    scores, ids = torch.rand(T, E, generator=g).topk(TOP_K)
    return {
        "hidden": torch.randn(T, H, generator=g).bfloat16().requires_grad_(),
        "gate_up_weight": (torch.randn(E, 2 * I, H, generator=g) / H**0.5).to(dtype).requires_grad_(),
        "down_weight": (torch.randn(E, H, I, generator=g) / I**0.5).to(dtype).requires_grad_(),
        "topk_ids": ids,
        "topk_weights": scores.clone().requires_grad_(),
    }


def step(inputs: dict[str, torch.Tensor], **more: Any) -> list[torch.Tensor]:
    """The result and all gradients."""
    leaves = [t for t in (*inputs.values(), *more.values()) if isinstance(t, torch.Tensor) and t.requires_grad]
    for leaf in leaves:
        leaf.grad = None
    y = moe_mlp(**inputs, **more)
    target = torch.sin(torch.arange(y.numel())).view(y.shape)
    (y.float() - target).square().mean().backward()
    return [y.detach(), *(leaf.grad for leaf in leaves if leaf.grad is not None)]


LOSS = 0.08  # of a layer's result and gradients, relative: three roundings to e4m3, each 0.026


@pytest.mark.parametrize("biased", [False, True])
def test_gradients_are_bf16s_within_what_quantising_loses(biased: bool) -> None:
    inputs, more = layer(), dict[str, Any]()
    if biased:
        more = {"gate_up_bias": torch.randn(E, 2 * I).bfloat16().requires_grad_()}
        more |= {"down_bias": torch.randn(E, H).bfloat16().requires_grad_()}
    plain, fp8 = step(inputs, **more), step(inputs, **more, **FP8)
    assert len(plain) == len(fp8) == 5 + 2 * biased
    for got, want in zip(fp8, plain, strict=True):
        assert got.dtype is want.dtype
        assert 0 < apart(got, want) < LOSS
    again = step(inputs, **more, **FP8)
    assert all(map(torch.equal, again, fp8))  # the same bits


def test_masters_in_fp32_have_gradients_in_fp32() -> None:
    inputs = layer(torch.float32)
    _, _, dup, ddown, _ = step(inputs, **FP8)
    assert dup.dtype is ddown.dtype is torch.float32
    rounded = inputs | {name: inputs[name].detach().bfloat16().requires_grad_() for name in inputs if "_weight" in name}
    rounded["topk_weights"] = inputs["topk_weights"]
    assert apart(dup, step(rounded, **FP8)[2]) < LOSS
    with torch.autocast("cpu", torch.bfloat16):
        wide = inputs | {"hidden": inputs["hidden"].detach().float().requires_grad_()}
        y, dx, *rest = step(wide, **FP8)
    assert y.dtype is dx.dtype is torch.float32
    assert torch.equal(rest[0], dup)


def test_evaluation_runs_the_same_forward() -> None:
    inputs = layer()
    want = step(inputs, **FP8)[0]
    out = torch.empty_like(inputs["hidden"])
    with torch.no_grad():
        assert torch.equal(moe_mlp(**inputs, **FP8), want)
        assert moe_mlp(**inputs, out=out, **FP8) is out
    assert torch.equal(out, want)
    with torch.inference_mode():
        assert torch.equal(moe_mlp(**inputs, **FP8), want)


@pytest.mark.parametrize("weighted", [False, True])
def test_rows_that_move_give_what_sorted_rows_give(weighted: bool) -> None:
    """Gather, scatter and routing weights: products of the same quantised rows."""
    g = torch.Generator().manual_seed(4)
    tokens = torch.randn(T, K, generator=g).bfloat16().requires_grad_()
    w = (torch.randn(E, N, K, generator=g) / K**0.5).bfloat16().requires_grad_()
    routing = sort_routing(torch.rand(T, E, generator=g).topk(TOP_K).indices, E)
    index, m_sizes = routing.gather_indices, routing.m_sizes
    weights = torch.rand(T, TOP_K, generator=g).requires_grad_()
    moved: dict[str, Any] = {"topk": TOP_K, "gather_indices": index, "permute_x": True, "permute_y": True}
    if weighted:
        moved |= {"topk_weights": weights, "fuse_mul_post": True}
    y = grouped_gemm(tokens, w, m_sizes, **moved, **FP8)
    dy = torch.randn(y.shape, generator=g).bfloat16()
    y.backward(dy)
    rows = tokens.detach()[index // TOP_K].requires_grad_()
    dense = w.detach().clone().requires_grad_()
    sorted_y = grouped_gemm(rows, dense, m_sizes, **FP8)
    scale = weights.detach().flatten()[index][:, None] if weighted else torch.ones(1)
    want = torch.empty_like(y).index_copy_(0, index.long(), (sorted_y.float() * scale).bfloat16())
    assert apart(y, want) < 4e-3  # the one is rounded twice
    sorted_y.backward(dy[index.long()])
    assert rows.grad is not None
    assert tokens.grad is not None
    slots = torch.zeros(T * TOP_K, K).index_copy_(0, index.long(), rows.grad.float() * scale)
    assert apart(tokens.grad, slots.view(T, TOP_K, K).sum(1)) < 6e-3
    if weighted:
        assert weights.grad is not None
        dots = (dy.view(T, TOP_K, N).float() * (want.float() / weights.detach().view(-1, 1)).view(T, TOP_K, N)).sum(-1)
        assert apart(weights.grad, dots) < LOSS  # dx of quantised dy, where dots read y
    else:
        assert torch.equal(w.grad, dense.grad)  # type: ignore[arg-type]


def test_only_needed_gradients() -> None:
    x, w, dy, m_sizes = operands()
    grouped_gemm(x, w.detach(), m_sizes, **FP8).backward(dy)
    assert x.grad is not None
    dx, x.grad = x.grad, None
    grouped_gemm(x, w, m_sizes, dX_only=True, **FP8).backward(dy)
    assert w.grad is None
    assert torch.equal(x.grad, dx)  # type: ignore[arg-type]
    x.grad = None
    grouped_gemm(x, w, m_sizes, dW_only=True, **FP8).backward(dy)
    assert x.grad is None
    assert w.grad is not None


def test_gradients_accumulate() -> None:
    x, w, dy, m_sizes = operands()
    grouped_gemm(x, w, m_sizes, **FP8).backward(dy)
    assert w.grad is not None
    once = w.grad.clone()
    grouped_gemm(x, w, m_sizes, **FP8).backward(dy)
    assert torch.equal(w.grad, once + once)


def test_nothing_of_nothing() -> None:
    """No rows at all, no rows of an expert, a single row."""
    x, w, _, _ = operands()
    for counts in ([0] * E, [0, 1, 0, 0, 0]):
        rows = x.detach()[: sum(counts)].requires_grad_()
        y = grouped_gemm(rows, w, torch.tensor(counts), **FP8)
        y.float().sum().backward()
        assert y.shape == (sum(counts), N)
        assert rows.grad is not None
        assert rows.grad.shape == rows.shape
    assert apart(y, q_rows(rows) @ q_blocks(w)[1].T) < 2e-3
    nobody = layer() | {"topk_ids": torch.full((T, TOP_K), -1)}
    y, dx, dup, *_ = step(nobody, **FP8)
    assert not y.any()
    assert not dx.any()
    assert not dup.any()


@pytest.mark.parametrize("where", ["x", "w", "dy"])
def test_nan_stays_in_its_expert(where: str) -> None:
    x, w, dy, m_sizes = operands()
    with torch.no_grad():
        {"x": x, "dy": dy}.get(where, w[3]).view(-1)[
            (sum(COUNTS[:3]) + 2) * (N if where == "dy" else K) + 5 if where != "w" else 7
        ] = float("nan")
    y = grouped_gemm(x, w, m_sizes, **FP8)
    y.backward(dy)
    first, last = sum(COUNTS[:3]), sum(COUNTS[:4])
    assert x.grad is not None
    assert w.grad is not None
    for rows in (y, x.grad):
        assert torch.cat([rows[:first], rows[last:]]).isfinite().all()
    assert w.grad[[0, 1, 2, 4]].isfinite().all()
    inside = {
        "x": (y[first:last], w.grad[3]),
        "w": (y[first:last], x.grad[first:last]),
        "dy": (x.grad[first:last], w.grad[3]),
    }
    assert all(tensor.isnan().any() for tensor in inside[where])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers_give_no_numbers(number: float) -> None:
    """Not 480, as which kernels for prepared weights read NaN."""
    x, w, _, m_sizes = operands()
    with torch.no_grad():
        w[4, 5, 6] = number
    y = grouped_gemm(x, w, m_sizes, **FP8)
    assert not y[-COUNTS[4] :, 5].isfinite().any()


Write = Callable[[torch.Tensor], None]


def _optimizer(**more: Any) -> Write:
    def write(w: torch.Tensor) -> None:
        w.grad = torch.ones_like(w)
        torch.optim.SGD([w], lr=0.5, **more).step()

    return write


def _fused(w: torch.Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.AdamW([w], lr=0.5, fused=True).step()


def _swapped(w: torch.Tensor) -> None:
    w.data = w.data + 1


def _through_data(w: torch.Tensor) -> None:
    w.data.copy_(w.data + 1)


def _uncounted(w: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):  # as FSDP's all-gather
        w.add_(1)


def _set(w: torch.Tensor) -> None:
    with torch.no_grad():
        w.set_(w.detach() + 1)


def _by_numpy(w: torch.Tensor) -> None:
    w.detach().view(torch.int16).numpy()[:] ^= 0x40


WRITES = {
    "in place": lambda w: w.detach().add_(1),
    "sgd": _optimizer(),
    "sgd foreach": _optimizer(foreach=True),
    "adamw fused": _fused,
    "a new storage": _swapped,
    "through data": _through_data,
    "not counted": _uncounted,
    "set_": _set,
    "numpy": _by_numpy,
}


@pytest.mark.parametrize("write", list(WRITES))
def test_no_write_leaves_weights_stale(write: str) -> None:
    """The next forward and its backward read the new numbers, if torch counts a write and if it does not."""
    x, w, dy, m_sizes = operands()
    before = grouped_gemm(x, w, m_sizes, **FP8)
    before.backward(dy)
    WRITES[write](w)
    x.grad = w.grad = None
    y = grouped_gemm(x, w, m_sizes, **FP8)
    y.backward(dy)
    other, fresh = x.detach().clone().requires_grad_(), w.detach().clone().requires_grad_()
    want = grouped_gemm(other, fresh, m_sizes, **FP8)
    want.backward(dy)
    assert torch.equal(y, want)
    assert not torch.equal(y, before)
    assert torch.equal(x.grad, other.grad)  # type: ignore[arg-type]


def test_a_write_between_forward_and_backward_fails_as_in_bf16() -> None:
    x, w, dy, m_sizes = operands()
    y = grouped_gemm(x, w, m_sizes, **FP8)
    with torch.no_grad():
        w.add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.backward(dy)


@pytest.fixture
def counted(monkeypatch: pytest.MonkeyPatch) -> list[tuple[bool, bool]]:
    """The directions of each quantising of weights."""
    asked: list[tuple[bool, bool]] = []

    def count(w: torch.Tensor, *, rows: bool = True, columns: bool = True, **how: Any) -> Any:
        asked.append((rows, columns))
        return quantise_weights(w, rows=rows, columns=columns, **how)

    monkeypatch.setattr(fp8_weights, "quantise_weights", count)
    return asked


def test_micro_batches_of_a_block_share_quantised_weights(counted: list[tuple[bool, bool]]) -> None:
    inputs = layer()
    want = step(inputs, **FP8)
    assert counted == [(True, False), (True, False), (False, True), (False, True)]
    counted.clear()
    with reuse_fp8_weights():
        for _ in range(3):
            assert all(map(torch.equal, step(inputs, **FP8), want))
        with reuse_fp8_weights():
            step(inputs, **FP8)
        step(inputs, **FP8)
        assert counted == [(True, True)] * 2
        with torch.no_grad():
            moe_mlp(**inputs, **FP8)
        assert len(counted) == 2
        with torch.no_grad():
            inputs["down_weight"].add_(1)  # against the rule, but counted
        step(inputs, **FP8)
        assert len(counted) == 3
    assert not len(fp8_weights._kept)
    step(inputs, **FP8)
    assert len(counted) == 7


def test_a_block_frees_what_is_gone() -> None:
    with reuse_fp8_weights():
        inputs = layer()
        step(inputs, **FP8)
        assert len(fp8_weights._kept) == 2
        del inputs
        gc.collect()
        assert not len(fp8_weights._kept)
    with pytest.raises(ValueError, match="a fault"), reuse_fp8_weights():
        raise ValueError("a fault")
    assert not fp8_weights._blocks


def test_checkpointing_recomputes_the_same_forward() -> None:
    inputs = layer()
    want = step(inputs, **FP8)

    def again(*tensors: torch.Tensor) -> torch.Tensor:
        return moe_mlp(*tensors, **FP8)

    for leaf in inputs.values():
        leaf.grad = None
    y = torch.utils.checkpoint.checkpoint(again, *inputs.values(), use_reentrant=False)
    target = torch.sin(torch.arange(y.numel())).view(y.shape)
    (y.float() - target).square().mean().backward()
    results = [y.detach(), *(t.grad for t in inputs.values() if t.grad is not None)]
    assert all(map(torch.equal, results, want))


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "precision": ({"precision": "fp4"}, "wanted 'fp8'"),
    "w": ({"w": ExpertWeights.quantize(torch.ones(E, N, K), "fp8_block")}, "quantised already: leave precision out"),
    "x": ({"x": QuantizedRows(torch.zeros(M, K).to(torch.float8_e4m3fn), torch.ones(M, K // 128))}, "x is a Quant"),
    "x.dtype": ({"x": torch.zeros(M, K)}, r"x is torch.float32.*autocast"),
    "w.dtype": ({"w": torch.zeros(E, N, K).half()}, "w is torch.float16"),
    "N": ({"w": torch.zeros(E, 200, K).bfloat16()}, "N=200.*multiple of 128"),
    "K": ({"w": torch.zeros(E, N, 200).bfloat16(), "x": torch.zeros(M, 200).bfloat16()}, "K=200"),
    "lora": ({"lora": Lora(torch.zeros(E, 8, K), torch.zeros(E, N, 8))}, "lora. Leave one of them out"),
    "autotune": ({"autotune": True}, "autotune"),
    "padded": ({"x": torch.zeros(E, 8, K).bfloat16()}, "padded rows"),
    "m_starts": ({"m_starts": torch.zeros(E, dtype=torch.int32)}, "padded rows"),
    "out": ({"out": torch.zeros(M, N).bfloat16()}, "no gradient"),
    "shape": ({"w": torch.zeros(E, N, 2 * K).bfloat16()}, r"K=384"),
}


@pytest.mark.parametrize("what", list(REFUSED))
def test_refused_with_what_to_do(what: str) -> None:
    x, w, _, m_sizes = operands()
    changed, says = REFUSED[what]
    with pytest.raises(InputError, match=says):
        grouped_gemm(**({"x": x, "w": w, "m_sizes": m_sizes} | FP8 | changed))


@pytest.mark.parametrize(
    ("changed", "says"),
    [
        ({"precision": "mxfp8"}, "wanted 'fp8'"),
        ({"weights_on": "input"}, "weights_on='input'"),
        ({"lora": (None, None)}, "lora"),
        (
            {"down_weight": torch.zeros(E, H, 96).bfloat16(), "gate_up_weight": torch.zeros(E, 192, H).bfloat16()},
            "I=96",
        ),
        ({"down_weight": ExpertWeights.quantize(torch.ones(E, H, I), "fp8_block")}, "leave precision out"),
        ({"hidden": torch.zeros(T, H)}, "hidden is torch.float32"),
        ({"down_weight": torch.zeros(E, H, 2 * I).bfloat16()}, "down_weight"),
    ],
)
def test_layers_refused_with_what_to_do(changed: dict[str, Any], says: str) -> None:
    with pytest.raises(InputError, match=says):
        moe_mlp(**(layer() | FP8 | changed))


def test_tracing_is_refused() -> None:
    x, w, _, m_sizes = operands()
    with pytest.raises(InputError, match=r"compiler\.disable"):
        grouped_gemm(x.to("meta"), w.to("meta"), m_sizes, **FP8)


def test_preload_loads_dw_of_codes(machine: Machine, clean_places: Path) -> None:
    gemms, rows = search.of_training(90)
    emulated_kernels.write(
        clean_places / "training.msgpack", [emulated_kernels.variant_and_code(spec) for spec in (*gemms, *rows)]
    )
    reload()
    loaded = preload(problems=[Problem(Op.FORWARD, DType.FP8_BLOCK, 4, 256, 128)]).count
    both = [Problem(op, DType.FP8_BLOCK, 4, 256, 128) for op in (Op.FORWARD, Op.DW)]
    assert preload(problems=both).count == loaded + 1


class Emulated(Machine):
    """An H200 that reads the weights of a product from their memory."""

    def multiply(self, launch: Launch) -> None:
        at = launch.addresses()
        self.dense[at["w"]] = self.values_of(at, MACHINE_E, launch.words["N"], launch.words["K"])
        super().multiply(launch)
        del self.dense[at["w"]]


@pytest.fixture
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Emulated(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]


@pytest.mark.parametrize("kn", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_a_backward_without_dh_has_the_same_bits(
    machine: Machine, clean_places: Path, kn: bool, kind: torch.dtype
) -> None:
    """dh and act(h) as codes of one kernel, or rounded to bfloat16 and then quantised."""
    machine.publish(quantises=True)
    gemms, rows = search.of_training(90)
    built = [
        emulated_kernels.variant_and_code(spec)
        for spec in (*gemms, *rows, RowOpSpec(RowOp.ACTIVATION_GRAD, DType.BF16))
    ]
    emulated_kernels.write(clean_places / "training.msgpack", built)
    reload()
    hidden, ids, scores = routed(24)
    g = torch.Generator().manual_seed(5)
    up, down = (
        (torch.randn(MACHINE_E, *shape, generator=g) / shape[1] ** 0.5).bfloat16() for shape in ((256, 256), (256, 128))
    )
    if kn:
        up, down = up.mT.contiguous(), down.mT.contiguous()
    dy, results = torch.randn(24, 256, generator=g).bfloat16(), []
    for by_codes in (True, False):
        leaves = [t.detach().clone().requires_grad_() for t in (hidden, up, down, scores.to(kind))]
        with pytest.MonkeyPatch.context() as patch:
            if not by_codes:
                patch.setattr(fp8_training, "takes_gradients", lambda *of: False)
            machine.launches.clear()
            more = {"w_layout": "kn"} if kn else {}
            moe_mlp(*leaves[:3], ids, leaves[3], **FP8, **more).backward(dy)
        ops = [launch.code.op for launch in machine.launches]
        assert (RowOp.ACTIVATION_GRAD_CODES in ops) is by_codes
        quantised = [i for i, op in enumerate(ops) if op is RowOp.QUANTIZE_BLOCKS]
        assert len(quantised) == 4
        assert quantised[2] < ops.index(Op.DW) < quantised[3]  # gate_up's codes take no memory until dx needs them
        results.append([leaf.grad for leaf in leaves])
    for quick, slow in zip(*results[:2], strict=True):
        assert quick is not None
        assert torch.equal(quick, slow)


@pytest.mark.parametrize("quantises", [False, True])
def test_on_a_gpu_rows_are_quantised_whatever_a_plan_says(
    machine: Machine, clean_places: Path, quantises: bool
) -> None:
    """The bits of a layer do not depend on whether bf16 x would be faster; they are near those without a GPU."""
    machine.publish(quantises=quantises)
    gemms, rows = search.of_training(90)
    emulated_kernels.write(
        clean_places / "training.msgpack", [emulated_kernels.variant_and_code(spec) for spec in (*gemms, *rows)]
    )
    reload()
    hidden, ids, scores = routed(24)
    g = torch.Generator().manual_seed(3)
    up, down = (
        (torch.randn(MACHINE_E, *shape, generator=g) / shape[1] ** 0.5).bfloat16().requires_grad_()
        for shape in ((256, 256), (256, 128))
    )
    hidden.requires_grad_()
    y = moe_mlp(hidden, up, down, ids, scores, **FP8)
    own = current_stream(0)

    def ran(op: Op | RowOp) -> int:
        return sum(launch.code.op is op and launch.stream == own for launch in machine.launches)

    assert (ran(RowOp.QUANTIZE_BLOCKS), ran(RowOp.QUANTIZE), ran(RowOp.ACTIVATION_CODES)) == (2, 1, 1)
    assert all(launch.code.dtype.value != "fp8_block_a16" for launch in machine.launches)
    machine.launches.clear()
    dy = torch.randn(y.shape, generator=g).bfloat16()
    y.backward(dy)
    assert (ran(RowOp.QUANTIZE_BLOCKS), ran(RowOp.QUANTIZE), ran(RowOp.ACTIVATION_GRAD)) == (2, 0, 0)
    assert (ran(RowOp.QUANTIZE_BOTH), ran(RowOp.ACTIVATION_GRAD_CODES), ran(RowOp.QUANTIZE_COLUMNS)) == (1, 1, 1)
    assert ran(Op.DW) == 2
    with torch.no_grad():
        assert torch.equal(moe_mlp(hidden, up, down, ids, scores, **FP8), y)
    fewer = moe_mlp(hidden[:4], up, down, ids[:4], scores[:4], **FP8)  # where bf16 x is faster in either case
    assert torch.equal(fewer, y[:4])
    results = [y.detach(), *(leaf.grad for leaf in (hidden, up, down))]
    with pytest.MonkeyPatch.context() as host:
        host.setattr(tensors, "on_gpu", lambda tensor: False)
        leaves = [leaf.detach().requires_grad_() for leaf in (hidden, up, down)]
        want = moe_mlp(*leaves, ids, scores, **FP8)
        want.backward(dy)
    for mine, other in zip(results, [want.detach(), *(leaf.grad for leaf in leaves)], strict=True):
        assert mine is not None
        assert other is not None
        assert apart(mine, other) < 0.02
