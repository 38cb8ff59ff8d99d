"""Training in fp8 on a GPU: row kernels' bits, dW's sums and a layer's gradients, against torch's of the same codes."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable

import pytest
import torch

from pretuned.runtime import grouped_gemm, moe_mlp, reuse_fp8_weights
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import fp8_codes as kernels
from pretuned.runtime.launch import program
from pretuned.runtime.ops import fp8_products, fp8_training
from pretuned.runtime.weights import fp8_codes as by_torch

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or local_gpu(0).sm != 90, reason="needs a GPU of capability 9.0"
)
COUNTS = ([3, 0, 700, 1, 0, 127, 128, 129], [0] * 8, [1] + [0] * 7)
DTYPES = (torch.bfloat16, torch.float32)


def off(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def drawn(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).bfloat16().cuda()


@pytest.mark.parametrize(("counts", "blocks"), list(itertools.product(COUNTS, (False, True))))
def test_columns_have_torchs_bits(counts: list[int], blocks: bool) -> None:
    M, C = sum(counts) + 5, 384
    t, m_sizes = drawn(M, C), torch.tensor(counts, dtype=torch.int32, device="cuda")
    t[:, 7] *= 3e4
    for index in (None, torch.randperm(M, device="cuda", dtype=torch.int32)):
        got = kernels.column_codes(t, m_sizes, index, 1, blocks=blocks)
        want = by_torch.column_codes(t, m_sizes, index, 1, blocks=blocks)
        assert got is not None
        used = sum(-(-count // 128) for count in counts)
        assert torch.equal(got.codes.view(torch.uint8)[:, : 128 * used], want.codes.view(torch.uint8)[:, : 128 * used])
        assert torch.equal(got.scale[:used], want.scale[:used])


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("activation", ["silu", "gelu"])
def test_a_backward_without_dh_has_the_same_bits(
    monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype, activation: str
) -> None:
    """dh and act(h) as codes of one kernel, or rounded to bfloat16 and then quantised; sums of dweights differ."""
    E, H, width, T, k = 8, 1024, 1024, 700, 2
    up, down = drawn(E, 2 * width, H, seed=1) / H**0.5, drawn(E, H, width, seed=2) / width**0.5
    if layout == "kn":
        up, down = up.mT.contiguous(), down.mT.contiguous()
    weights, ids = drawn(T, E, seed=3).float().softmax(-1).topk(k, -1)
    results = []
    for by_codes in (True, False):
        if not by_codes:
            monkeypatch.setattr(fp8_training, "takes_gradients", lambda *of: False)
            snapshot().plans.clear()
        leaves = [t.detach().clone().requires_grad_() for t in (drawn(T, H), up, down, weights.to(dtype))]
        hidden, *both, slots = leaves
        y = moe_mlp(hidden, *both, ids, slots, activation, precision="fp8", w_layout=layout)
        y.backward(drawn(T, H, seed=4))
        results.append([leaf.grad for leaf in leaves])
    snapshot().plans.clear()
    for quick, slow in zip(results[0][:3], results[1][:3], strict=True):
        assert torch.equal(quick, slow)
    assert off(results[0][3], results[1][3]) < (1e-2 if dtype is torch.bfloat16 else 1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
def test_weights_both_ways_have_torchs_bits(dtype: torch.dtype) -> None:
    w = drawn(5, 384, 640).to(dtype)
    w[1, 130, 7], w[2, 0, 600] = float("nan"), float("inf")
    both = kernels.blocks(w, along_k=True, along_n=True)
    assert both is not None
    for weights, matrix in zip(both, (w, w.transpose(1, 2)), strict=True):
        codes, scale = by_torch.blocks(matrix)
        assert weights is not None
        assert torch.equal(weights.scale.isnan(), scale.isnan())
        assert int(scale.isnan().sum()) == 2
        assert torch.equal(weights.scale.nan_to_num(), scale.nan_to_num())
        blocks = scale.isnan()[:, :, None, :, None].expand(-1, -1, 2, -1, 2).flatten(3, 4).flatten(1, 2)
        whole = ~blocks.view(*weights.codes.shape[:3], *[1] * (weights.codes.dim() - 3)).expand_as(weights.codes)
        assert torch.equal(weights.codes[whole], codes.view(weights.codes.dtype)[whole])


@pytest.mark.parametrize(("counts", "dtype"), list(itertools.product(COUNTS, DTYPES)))
def test_dw_of_codes(counts: list[int], dtype: torch.dtype) -> None:
    N, K, M = 384, 640, sum(counts)
    m_sizes = torch.tensor(counts, dtype=torch.int64, device="cuda")
    dy = by_torch.column_codes(drawn(max(M, 1), N), m_sizes)
    x = by_torch.column_codes(drawn(max(M, 1), K, seed=1), m_sizes, blocks=True)
    want = torch.zeros(len(counts), N, K, device="cuda")
    by_torch.grad_weight(dy, x, m_sizes, want)
    results = []
    for _ in range(2):
        dw = torch.full(want.shape, float("nan"), device="cuda", dtype=dtype)
        assert kernels.grad_weight(dy, x, m_sizes, dw, accumulate=False)
        results.append(dw)
    assert torch.equal(*results)
    assert off(results[0], want) < 2e-3
    assert not results[0][m_sizes == 0].any()
    assert kernels.grad_weight(dy, x, m_sizes, dw, accumulate=True)
    assert off(dw, 2 * want) < 3e-3


def test_nan_stays_in_its_expert() -> None:
    counts, N, K = [200, 0, 70, 130], 256, 384
    x, w = drawn(400, K).requires_grad_(), drawn(4, N, K, seed=1).requires_grad_()
    m_sizes = torch.tensor(counts, dtype=torch.int32, device="cuda")
    with torch.no_grad():
        x[210] = float("nan")
    y = grouped_gemm(x, w, m_sizes, precision="fp8")
    dx, dw = torch.autograd.grad(y, (x, w), torch.ones_like(y))
    rows = y.isnan().any(1)
    assert rows.nonzero().tolist() == [[210]]
    assert not dx.isnan().any()
    assert dw.flatten(1).isnan().any(1).tolist() == [False, False, True, False]


def test_a_layers_gradients_follow_bf16s_and_repeat() -> None:
    E, H, I, T, k = 8, 512, 256, 1024, 2  # noqa: E741
    hidden, up, down = drawn(T, H), drawn(E, 2 * I, H, seed=1) / 16, drawn(E, H, I, seed=2) / 16
    ids = torch.stack([torch.randperm(E)[:k] for _ in range(T)]).cuda()
    scores = torch.rand(T, k, device="cuda").requires_grad_()
    inputs = [t.requires_grad_() for t in (hidden, up, down)] + [scores]

    def step(**how: str) -> list[torch.Tensor]:
        out = moe_mlp(hidden, up, down, ids, scores, **how)
        return [out.detach(), *torch.autograd.grad(out, inputs, drawn(T, H, seed=3))]

    plain, first, again = step(), step(precision="fp8"), step(precision="fp8")
    with reuse_fp8_weights():
        kept = [step(precision="fp8") for _ in range(2)]
    for i, (a, b) in enumerate(zip(plain, first, strict=True)):
        assert off(b, a) < 0.09, i
    for other in (again, *kept):
        assert all(torch.equal(a, b) for a, b in zip(first, other, strict=True))
    with torch.no_grad():  # weights written in place: nothing old is used
        up *= 2
    assert off(step(precision="fp8")[0], step()[0]) < 0.09


E, H, I, TOP_K = 8, 512, 256, 2  # noqa: E741
Step = Callable[[], list[torch.Tensor]]


def layer_step(tokens: int, dtype: torch.dtype = torch.bfloat16, layout: str = "nk") -> tuple[Step, list[torch.Tensor]]:
    """A step of a layer, and its weights."""
    experts = [drawn(E, 2 * I, H, seed=1) / 16, drawn(E, H, I, seed=2) / 16]
    if layout == "kn":
        experts = [w.mT.contiguous() for w in experts]
    experts = [w.to(dtype).requires_grad_() for w in experts]
    return step_of(tokens, experts, layout), experts


def step_of(tokens: int, experts: list[torch.Tensor], layout: str = "nk") -> Step:
    hidden = drawn(tokens, H, seed=tokens).requires_grad_()
    g = torch.Generator().manual_seed(tokens)
    ids = torch.rand(tokens, E, generator=g).topk(TOP_K).indices.cuda()
    scores = torch.rand(tokens, TOP_K, generator=g).cuda().requires_grad_()
    dout, leaves = drawn(tokens, H, seed=3), [hidden, *experts, scores]

    def step() -> list[torch.Tensor]:
        out = moe_mlp(hidden, *experts, ids, scores, w_layout=layout, precision="fp8")
        return [out.detach(), *torch.autograd.grad(out, leaves, dout)]

    return step


def long_way(step: Step, monkeypatch: pytest.MonkeyPatch) -> list[torch.Tensor]:
    """The step without plans."""
    with monkeypatch.context() as patch:
        patch.setattr(program, "KINDS", ())
        snapshot().plans.clear()
        results = step()
        assert not snapshot().plans
    return results


def same(got: list[torch.Tensor], want: list[torch.Tensor]) -> bool:
    return all(map(torch.equal, got, want))


@pytest.mark.parametrize(("of_codes", "dtype", "layout"), list(itertools.product((True, False), DTYPES, ("nk", "kn"))))
def test_a_step_that_comes_again_has_the_same_bits(
    of_codes: bool, dtype: torch.dtype, layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if of_codes:
        monkeypatch.setattr(fp8_products, "LEAST", 0)
    step, experts = layer_step(1024, dtype, layout)
    want = long_way(step, monkeypatch)
    for _ in range(3):
        assert same(step(), want)
    (plan,) = snapshot().plans.values()
    assert plan.programs
    assert all(plan._gradients.values())
    with reuse_fp8_weights():
        for _ in range(3):
            assert same(step(), want)
    with torch.no_grad():
        experts[0].data.mul_(2)  # a write that torch does not count
    after = step()
    assert not torch.equal(after[0], want[0])
    assert same(after, long_way(step, monkeypatch))


def test_a_graph_of_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights are quantised in the graph: a replay reads those that are there by then."""
    monkeypatch.setattr(fp8_products, "LEAST", 0)
    step, experts = layer_step(512)
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        results = step()
    for _ in range(2):
        graph.replay()
        torch.cuda.synchronize()
        assert same(results, step())
        with torch.no_grad():
            for w in experts:
                w.mul_(1.5)


@pytest.mark.parametrize("form", [{}, {"topk": 1, "permute_x": True}, {"topk": 2, "permute_y": True}], ids=str)
def test_a_product_that_comes_again_has_the_same_bits(
    form: dict[str, bool | int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fp8_products, "LEAST", 0)
    M, w = 1024, (drawn(E, I, H, seed=1) / 16).requires_grad_()
    x, dy, m_sizes = (
        drawn(M, H).requires_grad_(),
        drawn(M, I, seed=2),
        torch.full((E,), M // E, dtype=torch.int32).cuda(),
    )
    index = torch.randperm(M, generator=torch.Generator().manual_seed(0)).cuda() if form else None

    def step() -> list[torch.Tensor]:
        y = grouped_gemm(x, w, m_sizes, gather_indices=index, precision="fp8", **form)  # type: ignore[arg-type]
        return [y.detach(), *torch.autograd.grad(y, (x, w), dy)]

    want = long_way(step, monkeypatch)
    for _ in range(3):
        assert same(step(), want)
    (plan,) = snapshot().plans.values()
    assert plan.programs
    assert any(plan._gradients.values()) is ("permute_y" not in form)
    w.data.mul_(2)
    assert same(step(), long_way(step, monkeypatch))


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")
def test_threads_share_a_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each has leaves of its own, of the same weights' memory."""
    monkeypatch.setattr(fp8_products, "LEAST", 0)
    _, experts = layer_step(512)
    many = (500, 512, 530)
    want, wrong = {tokens: step_of(tokens, experts)() for tokens in many}, list[int]()
    torch.cuda.synchronize()

    def work(tokens: int) -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            step = step_of(tokens, [w.detach().requires_grad_() for w in experts])
            for _ in range(20):
                if not same(step(), want[tokens]):
                    wrong.append(tokens)

    threads = [threading.Thread(target=work, args=(tokens,)) for tokens in many]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
