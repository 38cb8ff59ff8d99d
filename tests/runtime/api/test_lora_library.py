"""A product with an adapter where torch traces it: one operator, and one for its gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretuned.runtime import ExpertWeights, Lora, grouped_gemm, sort_routing
from pretuned.runtime.api import torch_library

E, T, TOPK, N, K, R = 4, 11, 2, 12, 10, 4
SCALE = 0.75

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own


@pytest.mark.slow
@pytest.mark.parametrize("format", [None, "mxfp4"])
@pytest.mark.parametrize("shared", [False, True])
def test_it_is_traced_as_one_operator(format: str | None, shared: bool) -> None:
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    torch.manual_seed(0)
    N, K = (128, 64) if format else (12, 10)
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    frozen = ExpertWeights.quantize(w, format) if format else w
    many = 1 if shared else E
    low = torch.randn(many, R, K).requires_grad_(), torch.randn(many, N, R).requires_grad_()
    x = x.bfloat16() if format else x
    graphs: list[str] = []

    def step(x: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, frozen, m_sizes, lora=Lora(A, B, SCALE)).float().square().sum()

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.extend(str(node.target) for node in graph.graph.nodes if "pretuned" in str(node.target))
        return make_boxed_func(graph)

    leaves = (x.requires_grad_(), *low)
    wanted = torch.autograd.grad(step(*leaves), leaves)
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend=aot_autograd(fw_compiler=backend, bw_compiler=backend))
    torch.testing.assert_close(torch.autograd.grad(compiled(*leaves), leaves), wanted)
    assert graphs == ["pretuned.grouped_gemm_lora.default", "pretuned.grouped_gemm_lora_backward.default"]


@pytest.mark.slow
def test_a_compiled_call_says_what_does_not_fit() -> None:
    x, w, m_sizes = torch.randn(9, K), torch.randn(E, N, K), torch.tensor([2, 3, 0, 4])
    torch._dynamo.reset()
    compiled = torch.compile(grouped_gemm, fullgraph=True, backend="eager")
    with pytest.raises(Exception, match=r"lora.B is of shape \[4, 5, 4\], wanted \[E or 1, N=12, r=4\]"):
        compiled(x, w, m_sizes, lora=Lora(torch.randn(E, R, K), torch.randn(E, 5, R)))


@pytest.mark.slow
@pytest.mark.parametrize("form", [{}, {"permute_x": True}, {"permute_x": True, "permute_y": True}])
def test_opcheck(form: dict[str, bool]) -> None:
    assert torch_library.traced is not None  # the operators are there once the module is
    moves = bool(form)
    x = torch.randn(T if moves else 8, K, requires_grad=True)
    routing = sort_routing(torch.randint(0, E, (T, TOPK)), E)
    m_sizes, index = (routing.m_sizes, routing.gather_indices) if moves else (torch.tensor([2, 3, 0, 3]), None)
    low = torch.randn(E, R, K, requires_grad=True), torch.randn(E, N, R, requires_grad=True), SCALE
    rest = m_sizes, index, None, None, TOPK if moves else 1, moves, form.get("permute_y", False), False, "nk", True
    parts = torch.randn(E, N, K, requires_grad=True), "", None, None, None, None, None
    torch.library.opcheck(torch.ops.pretuned.grouped_gemm_lora, (x, *low, *parts, *rest))
