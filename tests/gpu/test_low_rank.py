"""Layers with LoRA adapters on a real GPU, beside float32: by the code that adds a low-rank part, from what ships.

python -m pytest -q tests/gpu/test_low_rank.py
"""

from __future__ import annotations

import pytest
import torch
from torch.nn.functional import silu

from pretuned.runtime import ExpertWeights, Lora, moe_mlp, reload
from pretuned.runtime.dispatch import snapshot

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
E, H, I, TOP_K = 6, 264, 200, 2  # noqa: E741  (rows of 16 bytes, and no whole tile)


def tensor(*shape: int, spread: float = 1.0) -> torch.Tensor:
    return (spread * torch.randn(shape, device="cuda")).to(torch.bfloat16).requires_grad_()


def dense(
    hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor,
    lora: tuple[Lora, Lora], bias: torch.Tensor | None,
) -> torch.Tensor:  # fmt: skip
    """The layer in torch, of w [E, N, K], in the dtype of its tensors."""
    (A1, B1, s1), (A2, B2, s2) = lora
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
    low = [tensor(many, r, H, spread=H**-0.5), tensor(many, 2 * I, r, spread=r**-0.5),
           tensor(many, r, I, spread=I**-0.5), tensor(many, H, r, spread=r**-0.5)]  # fmt: skip
    leaves = [hidden, *low]
    lora = Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 2.0)
    matrices = [one.detach() if layout == "nk" else one.detach().transpose(1, 2).contiguous() for one in (up, down)]
    dout = torch.randn(T, H, device="cuda").to(torch.bfloat16)
    reload()
    for _ in range(2):  # the second by its plan
        out = moe_mlp(hidden, *matrices, ids, weights, gate_up_bias=bias, w_layout=layout, lora=lora)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        ran = [ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank"]
        assert ran, "no code that adds a low-rank part was asked for"
        assert all(ran)
        wide = [one.detach().float().requires_grad_() for one in leaves]
        pair = Lora(wide[1], wide[2], 0.5), Lora(wide[3], wide[4], 2.0)
        want = dense(wide[0], up.detach().float(), down.detach().float(), ids, weights, pair,
                     None if bias is None else bias.float())  # fmt: skip
        wanted = [want.detach(), *torch.autograd.grad(want, wide, dout.float())]
        for got, one in zip(found, wanted, strict=True):
            assert float((got.float() - one).norm() / one.norm()) < 1.5e-2


@pytest.mark.parametrize("T", [3, 700])
@pytest.mark.parametrize("r", [8, 64, 136])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("format", ["mxfp4", "nvfp4", "int4_g32", "int4_g64", "int4_g128", "fp8_block_a16"])
def test_a_layer_of_codes_and_its_gradients(format: str, biased: bool, r: int, T: int) -> None:
    torch.manual_seed(r + T)
    H, I = 640, 384  # noqa: E741  (blocks of 128: a tile of 256 is not whole)
    hidden, weights = tensor(T, H), torch.rand(T, E, device="cuda")
    weights, ids = weights.softmax(-1).topk(TOP_K, -1)
    matrices = [
        ExpertWeights.quantize(torch.randn(shape, device="cuda") * shape[2] ** -0.5, format.removesuffix("_a16"))
        for shape in ((E, 2 * I, H), (E, H, I))
    ]
    bias = tensor(E, 2 * I).detach() if biased else None
    low = [tensor(E, r, H, spread=H**-0.5), tensor(E, 2 * I, r, spread=r**-0.5),
           tensor(E, r, I, spread=I**-0.5), tensor(E, H, r, spread=r**-0.5)]  # fmt: skip
    leaves, lora = [hidden, *low], (Lora(low[0], low[1], 0.5), Lora(low[2], low[3], 2.0))
    up, down = (one.dequantize(torch.float32) for one in matrices)
    dout = torch.randn(T, H, device="cuda").to(torch.bfloat16)
    reload()
    for _ in range(2):  # the second by its plan
        out = moe_mlp(hidden, *matrices, ids, weights, gate_up_bias=bias, lora=lora)
        found = [out.detach(), *torch.autograd.grad(out, leaves, dout)]
        ran = {key[1]: ready for key, ready in snapshot.snapshot().launchers.items() if key[0] == "low rank of codes"}
        assert set(ran) == ({"dX"} if format.startswith("fp8") else {"forward", "dX"})
        assert all(ran.values())
        wide = [one.detach().float().requires_grad_() for one in leaves]
        pair = Lora(wide[1], wide[2], 0.5), Lora(wide[3], wide[4], 2.0)
        want = dense(wide[0], up, down, ids, weights, pair, None if bias is None else bias.float())
        wanted = [want.detach(), *torch.autograd.grad(want, wide, dout.float())]
        most = 6e-2 if format.startswith("fp8") else 1.5e-2  # of x in fp8, too, what quantising it loses
        for got, one in zip(found, wanted, strict=True):
            assert float((got.float() - one).norm() / one.norm()) < most
