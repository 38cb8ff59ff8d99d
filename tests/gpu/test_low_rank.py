"""Layers and products with LoRA adapters on a real GPU, beside float32: by code that adds a low-rank part, as it ships.

python -m pytest -q tests/gpu/test_low_rank.py
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from pretuned.runtime import ExpertWeights, Lora, grouped_gemm, moe_mlp, reload, sort_routing
from pretuned.runtime.dispatch import snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E, H, I, TOP_K = 6, 264, 200, 2  # noqa: E741  (rows of 16 bytes, and no whole tile)


def tensor(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (spread * torch.randn(shape, device="cuda")).to(torch.bfloat16).requires_grad_()


def dense(
    hidden: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
    ids: torch.Tensor,
    weights: torch.Tensor,
    lora: tuple[Lora, Lora],
    bias: torch.Tensor | None,
) -> torch.Tensor:
    """The layer in torch, of w [E, N, K], in the dtype of its tensors."""
    (A1, B1, s1), (A2, B2, s2) = ((A, B, s) for A, B, s, *_ in lora)
    out, width = torch.zeros_like(hidden), down.shape[2]
    for e in range(E):
        token, slot = (ids == e).nonzero(as_tuple=True)
        x = hidden[token]
        h = x @ up[e].T + s1 * (x @ A1[e % len(A1)].T) @ B1[e % len(B1)].T
        h = h if bias is None else h + bias[e]
        a = silu(h[:, :width]) * h[:, width:]
        y = a @ down[e].T + s2 * (a @ A2[e % len(A2)].T) @ B2[e % len(B2)].T
        out = out.index_add(0, token, y * weights[token, slot, None])
    return out


@pytest.mark.parametrize("T", [3, 700])
@pytest.mark.parametrize("r", [8, 16, 72, 256])
@pytest.mark.parametrize(
    ("layout", "biased", "shared"), [("nk", False, False), ("kn", True, False), ("nk", True, True)]
)
def test_a_layer_and_its_gradients(T: int, r: int, layout: str, biased: bool, shared: bool) -> None:
    torch.manual_seed(r + T)
    many = 1 if shared else E
    hidden, up, down = tensor(T, H), tensor(E, 2 * I, H, spread=H**-0.5), tensor(E, H, I, spread=I**-0.5)
    weights, ids = torch.rand(T, E, device="cuda").softmax(-1).topk(TOP_K, -1)
    bias = tensor(E, 2 * I).detach() if biased else None
    low = [
        tensor(many, r, H, spread=H**-0.5),
        tensor(many, 2 * I, r, spread=r**-0.5),
        tensor(many, r, I, spread=I**-0.5),
        tensor(many, H, r, spread=r**-0.5),
    ]
    leaves = [hidden, *low]
    lora = Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 2.0)
    matrices = [
        matrix.detach() if layout == "nk" else matrix.detach().transpose(1, 2).contiguous() for matrix in (up, down)
    ]
    dout = torch.randn(T, H, device="cuda").to(torch.bfloat16)
    reload()
    for _ in range(2):  # the second by its plan
        out = moe_mlp(hidden, *matrices, ids, weights, gate_up_bias=bias, w_layout=layout, lora=lora)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        ran = [ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank"]
        assert ran, "no code that adds a low-rank part was asked for"
        assert all(ran)
        wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
        pair = Lora(wide[1], wide[2], 0.5), Lora(wide[3], wide[4], 2.0)
        want = dense(
            wide[0],
            up.detach().float(),
            down.detach().float(),
            ids,
            weights,
            pair,
            None if bias is None else bias.float(),
        )
        wanted = [want.detach(), *torch.autograd.grad(want, wide, dout.float())]
        for got, expected in zip(results, wanted, strict=True):
            assert float((got.float() - expected).norm() / expected.norm()) < 1.5e-2


@pytest.mark.parametrize("T", [3, 700])
@pytest.mark.parametrize("r", [8, 64, 136])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g64", "int4_g128", "fp8_block_a16"])
def test_a_layer_of_codes_and_its_gradients(format: str, biased: bool, r: int, T: int) -> None:
    torch.manual_seed(r + T)
    H, I = 640, 384  # noqa: E741  (blocks of 128: a tile of 256 is not whole)
    hidden, weights = tensor(T, H), torch.rand(T, E, device="cuda")
    weights, ids = weights.softmax(-1).topk(TOP_K, -1)
    matrices = [
        ExpertWeights.quantize(
            torch.randn(shape, device="cuda") * shape[2] ** -0.5, format.removesuffix("_a16")
        ).prepare()
        for shape in ((E, 2 * I, H), (E, H, I))
    ]
    bias = tensor(E, 2 * I).detach() if biased else None
    low = [
        tensor(E, r, H, spread=H**-0.5),
        tensor(E, 2 * I, r, spread=r**-0.5),
        tensor(E, r, I, spread=I**-0.5),
        tensor(E, H, r, spread=r**-0.5),
    ]
    leaves, lora = [hidden, *low], (Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 2.0))
    up, down = (matrix.dequantize(torch.float32) for matrix in matrices)
    dout = torch.randn(T, H, device="cuda").to(torch.bfloat16)
    reload()
    for _ in range(2):  # the second by its plan
        out = moe_mlp(hidden, *matrices, ids, weights, gate_up_bias=bias, lora=lora)
        results = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        ran = {key[1]: ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank of codes"}
        assert set(ran) == ({"dX"} if format.startswith("fp8") else {"forward", "dX"})
        assert all(ran.values())
        wide = [leaf.detach().float().requires_grad_() for leaf in leaves]
        pair = Lora(wide[1], wide[2], 0.5), Lora(wide[3], wide[4], 2.0)
        want = dense(wide[0], up, down, ids, weights, pair, None if bias is None else bias.float())
        wanted = [want.detach(), *torch.autograd.grad(want, wide, dout.float())]
        most = 6e-2 if format.startswith("fp8") else 1.5e-2  # of x in fp8, too, what quantising it loses
        for got, expected in zip(results, wanted, strict=True):
            assert float((got.float() - expected).norm() / expected.norm()) < most


def product(
    x: torch.Tensor, w: torch.Tensor, lora: Lora, expert: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """The product of sorted rows in torch, of w [E, N, K]; rows of no expert (E) are zero."""
    A, B, scale = lora[:3]
    y = torch.zeros(x.shape[0], w.shape[1], device=x.device, dtype=x.dtype)
    for e in range(len(w)):
        rows = (expert == e).nonzero()[:, 0]
        taken = x[rows]
        part = taken @ w[e].T + scale * (taken @ A[e % len(A)].T) @ B[e % len(B)].T
        y = y.index_add(0, rows, part if bias is None else part + bias[e])
    return y


def low_rank_ran(kind: str) -> dict[str, object]:
    """Return the decisions for products with a low-rank part, by op."""
    return {key[1]: ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == kind}


def near(tensors: list[torch.Tensor], wanted: list[torch.Tensor], most: float = 1.5e-2) -> None:
    for got, want in zip(tensors, wanted, strict=True):
        assert float((got.float() - want).norm() / want.norm()) < most


@pytest.mark.parametrize("T", [5, 700])
@pytest.mark.parametrize("r", [4, 16, 72])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("form", ["plain", "gathered", "gathered, biased", "scattered", "weighed"])
def test_a_product_and_its_gradients(form: str, layout: str, r: int, T: int) -> None:
    """If rows stay in their places, the low-rank part is in the product's kernel, and in dX's in every form."""
    torch.manual_seed(r + T)
    N, K, kn, M = 2 * I, H, layout == "kn", T * TOP_K
    ids = torch.stack([torch.randperm(E + 1, device="cuda")[:TOP_K] for _ in range(T)])  # E: on another rank
    routing = sort_routing(ids, E)
    gathered = form != "plain"
    x, w, dy = tensor(T if gathered else M, K), tensor(E, N, K, spread=K**-0.5).detach(), tensor(M, N).detach()
    low = [tensor(E, r, K, spread=K**-0.5), tensor(E, N, r, spread=r**-0.5)]
    bias = tensor(E, N).detach() if "biased" in form else None
    weights = torch.rand(T, TOP_K, device="cuda") if form == "weighed" else None
    how = {"topk": TOP_K, "gather_indices": routing.gather_indices, "permute_x": True} if gathered else {}
    how |= {"permute_y": True} if form == "scattered" else {}
    how |= {"topk_weights": weights, "fuse_mul_post": True} if weights is not None else {}
    matrix, used = w.transpose(1, 2).contiguous() if kn else w, int(routing.m_sizes.sum())
    expert = torch.cat([ids.flatten().clamp(max=E)[routing.gather_indices]])
    reload()
    for _ in range(2):
        y = grouped_gemm(x, matrix, routing.m_sizes, w_layout=layout, bias=bias, lora=Lora(*low, 0.5), **how)
        results = [y.detach(), *torch.autograd.grad(y, [x, *low], dy)]
    wide = [tensor.detach().float().requires_grad_() for tensor in (x, *low)]
    index = routing.gather_indices
    rows = wide[0][index // TOP_K] if gathered else wide[0]
    want = product(rows, w.float(), Lora(*wide[1:], 0.5), expert, None if bias is None else bias.float())
    want = want if weights is None else want * weights.flatten()[index][:, None]
    want = torch.zeros_like(want).index_copy(0, index, want) if form == "scattered" else want
    if form != "scattered":  # rows of no expert hold anything
        results[0], upstream, want_y = results[0][:used], dy[:used].float(), want[:used]
    else:
        upstream, want_y = dy.float(), want
    near(results, [want_y.detach(), *torch.autograd.grad(want_y, wide, upstream)])
    ran = low_rank_ran("low rank")
    assert all(ran.values())
    stays = form in ("plain", "gathered", "gathered, biased")
    assert set(ran) == ({"forward"} if stays else set()) | (set() if form == "weighed" else {"dX"})


@pytest.mark.parametrize("T", [5, 700])
@pytest.mark.parametrize("gathered", [False, True])
@pytest.mark.parametrize("format", ["mxfp4", "mxfp8", "int4_g64", "fp8_block"])
def test_a_product_of_codes_and_its_gradients(format: str, gathered: bool, T: int) -> None:
    torch.manual_seed(T)
    N, K, M, r = 384, 640, T * TOP_K, 16
    ids = torch.randint(0, E, (T, TOP_K), device="cuda")
    routing = sort_routing(ids, E)
    w = ExpertWeights.quantize(torch.randn(E, N, K, device="cuda") * K**-0.5, format).prepare()
    plain = w.dequantize(torch.float32)
    x, bias, dy = tensor(T if gathered else M, K), tensor(E, N).detach(), tensor(M, N).detach()
    low = [tensor(E, r, K, spread=K**-0.5), tensor(E, N, r, spread=r**-0.5)]
    how = {"topk": TOP_K, "gather_indices": routing.gather_indices, "permute_x": True} if gathered else {}
    expert = ids.flatten()[routing.gather_indices]
    reload()
    for _ in range(2):
        y = grouped_gemm(x, w, routing.m_sizes, bias=bias, lora=Lora(*low, 0.5), **how)
        results = [y.detach(), *torch.autograd.grad(y, [x, *low], dy)]
    wide = [tensor.detach().float().requires_grad_() for tensor in (x, *low)]
    rows = wide[0][routing.gather_indices // TOP_K] if gathered else wide[0]
    want = product(rows, plain, Lora(*wide[1:], 0.5), expert, bias.float())
    near(
        results,
        [want.detach(), *torch.autograd.grad(want, wide, dy.float())],
        6e-2 if format == "fp8_block" else 1.5e-2,
    )
    ran = low_rank_ran("low rank of codes")
    assert set(ran) == ({"dX"} if format == "fp8_block" else {"forward", "dX"})
    assert all(ran.values())


@pytest.mark.parametrize("quantised", [False, True])
def test_rows_past_the_last_expert_s(quantised: bool) -> None:
    """Zero with zero_tail, by the kernel itself; left as they are in ``out``; dx of them is zero."""
    torch.manual_seed(0)
    N, K, M = 384, 640, 900
    m_sizes = torch.tensor([300, 0, 7, 129, 64, 1], dtype=torch.int32, device="cuda")
    used, dense = int(m_sizes.sum()), torch.randn(E, N, K, device="cuda") * K**-0.5
    w = ExpertWeights.quantize(dense, "mxfp4").prepare() if quantised else dense.to(torch.bfloat16)
    x, lora = tensor(M, K), Lora(tensor(E, 16, K, spread=K**-0.5), tensor(E, N, 16, spread=0.25), 0.5)
    reload()
    with torch.no_grad():
        out = torch.full((M, N), 7.0, device="cuda", dtype=torch.bfloat16)
        assert grouped_gemm(x, w, m_sizes, lora=lora, out=out) is out
    assert (out[used:] == 7).all()
    for _ in range(3):  # in memory that held something
        torch.full((M, K), float("nan"), device="cuda", dtype=torch.bfloat16)
        torch.full((M, N), float("nan"), device="cuda", dtype=torch.bfloat16)
        y = grouped_gemm(x, w, m_sizes, lora=lora, zero_tail=True)
        (dx,) = torch.autograd.grad(y, x, torch.ones_like(y))
        assert (y[used:] == 0).all()
        assert (dx[used:] == 0).all()
    assert torch.equal(y[:used], out[:used])
    ran = low_rank_ran("low rank of codes" if quantised else "low rank")
    assert set(ran) == {"forward", "dX"}
    assert all(ran.values())


@pytest.mark.parametrize("compiled", [False, True])
def test_a_product_in_a_graph_and_compiled(compiled: bool) -> None:
    """A step of forward and backward, captured after a warm-up and replayed on other numbers."""
    torch.manual_seed(0)
    N, K, T = 384, 640, 256
    ids = torch.randint(0, E, (T, TOP_K), device="cuda")
    routing, w = sort_routing(ids, E), tensor(E, N, K, spread=K**-0.5).detach()
    x, low = tensor(T, K), [tensor(E, 16, K, spread=K**-0.5), tensor(E, N, 16, spread=0.25)]

    def call(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, w, routing.m_sizes, TOP_K, routing.gather_indices, permute_x=True, lora=Lora(A, B, 0.5))

    run = torch.compile(call, fullgraph=True, backend="aot_eager") if compiled else call

    def step() -> list[torch.Tensor]:
        y = run(x, *low)
        return [y.detach(), *torch.autograd.grad(y, [x, *low], torch.ones_like(y))]

    reload()
    for _ in range(3):
        step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        results = step()
    with torch.no_grad():
        x.copy_(torch.randn_like(x))
    graph.replay()
    for got, want in zip(results, step(), strict=True):
        assert torch.equal(got, want)
    assert set(low_rank_ran("low rank")) == {"forward", "dX"}
