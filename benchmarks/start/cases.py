"""Calls with all fusions on a model's shapes, and their expected results and gradients: torch's products in fp32."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch

from pretuned.runtime import grouped_gemm, sort_routing

BF16 = torch.bfloat16


@dataclass(frozen=True)
class Form:
    """The fusions of a call."""

    permute_x: bool = False
    permute_y: bool = False
    weights: bool = False
    bias: bool = False

    def __str__(self) -> str:
        parts = {"gather": self.permute_x, "scatter": self.permute_y, "weight": self.weights, "bias": self.bias}
        return "+".join(name for name, on in parts.items() if on) or "plain"


PLAIN = Form()
FUSED = (
    Form(permute_x=True),
    Form(permute_y=True, weights=True),
    Form(permute_x=True, bias=True),
    Form(permute_y=True, weights=True, bias=True),
    Form(permute_x=True, weights=True),
    Form(permute_y=True),
    Form(permute_x=True, permute_y=True, weights=True, bias=True),
)


@dataclass(frozen=True)
class Shape:
    """One GEMM of a model's layer: w [E, N, K], top_k experts a token."""

    model: str
    E: int
    N: int
    K: int
    top_k: int


def catalogue_shapes() -> list[Shape]:
    """Both GEMMs of every catalogue model, without repeated shapes."""
    from pretuned.aot.models.catalogue import catalogue

    shapes: dict[tuple[int, ...], Shape] = {}
    for entry in catalogue().values():
        layer = entry.layer
        for N, K in (((2 if layer.gated else 1) * layer.I, layer.H), (layer.H, layer.I)):
            shapes.setdefault((layer.E, N, K, layer.k), Shape(entry.id, layer.E, N, K, layer.k))
    return list(shapes.values())


def routed(shape: Shape, T: int, device: str) -> torch.Tensor:
    """topk_ids [T, k], skewed by expert (exponent 0.3), some experts empty; T = 1000: one expert has every row."""
    E, k = shape.E, shape.top_k
    if T == 1000:
        return torch.full((T, k), E // 2, device=device)
    g = torch.Generator().manual_seed(T * 31 + E)
    rank = torch.randperm(E, generator=g) + 1
    logits = torch.randn(T, E, generator=g) - 0.3 * torch.log(rank.float())
    empty = E // 32 if E >= 32 else int(E >= 16)
    if empty:
        logits[:, rank > E - empty] = -50.0
    return logits.topk(k, -1).indices.to(device)


class Case:
    """One shape at one T: the tensors that its forms share, and the expected results in fp32.

    Every form reads the same sorted rows of x and of dy, so x @ w.T and dy @ w are computed once.
    """

    def __init__(self, shape: Shape, w: torch.Tensor, T: int, device: str) -> None:
        g = torch.Generator(device).manual_seed(T)

        def random(*sizes: int) -> torch.Tensor:
            return torch.randn(*sizes, generator=g, device=device)

        self.shape, self.T, self.w, k = shape, T, w, shape.top_k
        routing = sort_routing(routed(shape, T, device), shape.E)
        self.index, self.m_sizes = routing.gather_indices, routing.m_sizes
        self.tokens = random(T, shape.K).to(BF16)
        self.weights = torch.rand(T, k, generator=g, device=device) + 0.5
        self.bias = random(shape.E, shape.N).to(BF16)
        self.x = self.tokens[self.index // k]
        self.dy = random(T * k, shape.N).to(BF16)
        ends = self.m_sizes.cumsum(0).tolist()
        self.bounds = [(a, b) for a, b in zip([0, *ends], ends, strict=False)]
        self.y = torch.empty(T * k, shape.N, device=device)
        self.dx = torch.empty(T * k, shape.K, device=device)
        for w_e, (a, b) in zip(w, self.bounds, strict=True):
            if b > a:
                wide = w_e.float()
                torch.mm(self.x[a:b].float(), wide.T, out=self.y[a:b])
                torch.mm(self.dy[a:b].float(), wide, out=self.dx[a:b])
        self.expert = torch.repeat_interleave(torch.arange(shape.E, device=device), self.m_sizes.long())

    def inputs(self, form: Form) -> dict[str, torch.Tensor]:
        """New leaves that require grad: x, w and the fusions' tensors."""
        inputs = {"x": self.tokens if form.permute_x else self.x, "w": self.w}
        if form.weights:
            inputs["topk_weights"] = self.weights
        if form.bias:
            inputs["bias"] = self.bias
        return {name: tensor.detach().requires_grad_() for name, tensor in inputs.items()}

    def call(self, form: Form, inputs: dict[str, torch.Tensor]) -> torch.Tensor:
        index = self.index if form != PLAIN and form != Form(bias=True) else None
        return grouped_gemm(
            **inputs,
            m_sizes=self.m_sizes,
            topk=self.shape.top_k,
            gather_indices=index,
            permute_x=form.permute_x,
            permute_y=form.permute_y,
            fuse_mul_post=form.weights,
        )

    def run(self, form: Form) -> dict[str, torch.Tensor]:
        """y in the sorted order, and the gradient of every input."""
        inputs = self.inputs(form)
        y = self.call(form, inputs)
        dy = torch.empty_like(self.dy).index_copy_(0, self.index, self.dy) if form.permute_y else self.dy
        grads = dict(zip(inputs, torch.autograd.grad(y, list(inputs.values()), dy), strict=True))
        y = y.detach()
        return {"y": y[self.index] if form.permute_y else y} | {f"d{name}": grad for name, grad in grads.items()}

    def errors(self, form: Form, got: dict[str, torch.Tensor]) -> Iterator[tuple[str, float]]:
        """The relative error of each result."""
        k, flat = self.shape.top_k, self.weights.flatten()[self.index]
        t = flat[:, None] if form.weights else 1.0
        bias = self.bias.float()[self.expert] if form.bias else 0.0
        yield "y", difference(got["y"], (self.y + bias) * t)
        dx = self.dx * t
        if form.permute_x:
            dx = torch.empty_like(dx).index_copy_(0, self.index, dx).view(self.T, k, -1).sum(1)
        yield "dx", difference(got["dx"], dx)
        del dx
        weighted = self.dy.float() * t
        wrong = total = 0.0
        dbias = torch.zeros(self.shape.E, self.shape.N, device=weighted.device)
        for e, (a, b) in enumerate(self.bounds):
            if a == b:  # also if both are 0
                wrong += float(got["dw"][e].float().square().sum())
                continue
            want = weighted[a:b].T @ self.x[a:b].float()
            wrong += float((got["dw"][e].float() - want).square().sum(dtype=torch.float64))
            total += float(want.square().sum(dtype=torch.float64))
            dbias[e] = weighted[a:b].sum(0)
        yield "dw", math.sqrt(wrong / total)
        if form.weights:
            dots = (self.dy.float() * (self.y + bias)).sum(-1)
            want = torch.empty_like(dots).index_copy_(0, self.index, dots).view(self.T, k)
            yield "dtopk_weights", difference(got["dtopk_weights"], want)
        if form.bias:
            yield "dbias", difference(got["dbias"], dbias)


def difference(got: torch.Tensor, want: torch.Tensor) -> float:
    """||got - want|| / ||want||; NaN if any element is not finite."""
    if got.shape != want.shape:
        return math.nan
    wrong = (got.float() - want).square().sum(dtype=torch.float64)
    return float((wrong / want.square().sum(dtype=torch.float64)).sqrt())
