"""The operators: what torch's own checks say, and torch.compile over tokens that change."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.runtime import Activation, activate, grouped_gemm, grouped_gemm_dX, moe_mlp, sort_routing
from pretuned.runtime.api import torch_library

T, TOPK, E, H, I = 6, 2, 4, 8, 4  # noqa: E741

pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning")  # torch's own


def tensors(T: int = T) -> dict[str, Any]:
    routing = sort_routing(torch.randint(0, E, (T, TOPK)), E)
    return {
        "x": torch.randn(T, H, requires_grad=True),
        "w": torch.randn(E, I, H, requires_grad=True),
        "m_sizes": routing.m_sizes,
        "gather_indices": routing.gather_indices,
        "topk_weights": torch.rand(T, TOPK, requires_grad=True),
        "bias": torch.randn(E, I, requires_grad=True),
    }


@pytest.mark.parametrize("permute_y", [False, True])
@pytest.mark.parametrize("flat", [False, True])
def test_opcheck_of_the_fused_form(permute_y: bool, flat: bool) -> None:
    inputs = tensors()
    if flat:
        inputs["w"] = inputs["w"].detach().view(E * I, H).requires_grad_()
    arguments = (*inputs.values(), TOPK, True, permute_y, True, "nk", False, False, False)
    torch.library.opcheck(torch.ops.pretuned.grouped_gemm, arguments)


@pytest.mark.parametrize("w_layout", ["nk", "kn"])
def test_opcheck_of_the_plain_form(w_layout: str) -> None:
    assert torch_library.traced is not None  # the operators are there once the module is
    w = torch.randn(E, I, H, requires_grad=True)
    w = w if w_layout == "nk" else w.detach().transpose(1, 2).contiguous().requires_grad_()
    x = torch.randn(12, H, requires_grad=True)
    arguments = (
        x,
        w,
        torch.tensor([3, 0, 9, 0]),
        None,
        None,
        None,
        1,
        False,
        False,
        False,
        w_layout,
        True,
        False,
        False,
    )
    torch.library.opcheck(torch.ops.pretuned.grouped_gemm, arguments)


def test_opcheck_with_a_hint_of_the_rows() -> None:
    inputs = tensors()
    arguments = (*inputs.values(), TOPK, True, False, True, "nk", False, False, False, 5)
    torch.library.opcheck(torch.ops.pretuned.grouped_gemm, arguments)
    rest = {name: tensor.detach() for name, tensor in inputs.items()}
    dy = torch.randn(T * TOPK, I)
    torch.library.opcheck(
        torch.ops.pretuned.grouped_gemm_backward, (dy, *rest.values(), TOPK, True, False, True, "nk", [True] * 4, 5)
    )


@pytest.mark.parametrize("needs", [[True] * 4, [True, False, False, True], [False, True, True, False]])
def test_opcheck_of_the_gradient(needs: list[bool]) -> None:
    inputs = {name: tensor.detach() for name, tensor in tensors().items()}
    dy = torch.randn(T * TOPK, I)
    torch.library.opcheck(
        torch.ops.pretuned.grouped_gemm_backward, (dy, *inputs.values(), TOPK, True, False, True, "nk", needs)
    )


@pytest.mark.slow
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_compile_with_changing_tokens_compiles_once(backend: str) -> None:
    torch.manual_seed(0)
    up, down = torch.randn(E, 2 * I, H, requires_grad=True), torch.randn(E, H, I, requires_grad=True)
    bias = torch.randn(E, 2 * I, requires_grad=True)
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend(backend)

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_mlp(hidden, up, down, ids, weights, gate_up_bias=bias)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for tokens in (5, 6, 17, 64, 9):
        hidden = torch.randn(tokens, H, requires_grad=True)
        ids, weights = torch.randint(0, E, (tokens, TOPK)), torch.rand(tokens, TOPK, requires_grad=True)
        for tensor in (hidden, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        y, wanted = compiled(hidden, ids, weights), layer(hidden, ids, weights)
        torch.testing.assert_close(y, wanted)
        inputs = [hidden, weights, up, down, bias]
        dy = torch.randn_like(y)
        for got, want in zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(wanted, inputs, dy), strict=True):
            torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)  # sums in another order
    assert graphs.frame_count == 1


@pytest.mark.parametrize("wide", [False, True])
def test_compile_with_a_hint_of_the_rows_that_changes_with_the_tokens(wide: bool) -> None:
    """A rank with an eighth of the experts: one graph, whose operators get the hint of each call."""
    from torch._dynamo.testing import CompileCounterWithBackend

    up, down, graphs = torch.randn(E, 2 * I, H), torch.randn(E, H, I), CompileCounterWithBackend("aot_eager")

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        many = ids.shape[0] * TOPK * (16 if wide else 1) // 8
        return moe_mlp(hidden, up, down, ids, weights, expected_rows=many)

    torch._dynamo.reset()
    compiled = torch.compile(layer, fullgraph=True, backend=graphs)
    for tokens in (5, 16, 9):
        hidden, ids, weights = torch.randn(tokens, H), torch.randint(0, E, (tokens, TOPK)), torch.rand(tokens, TOPK)
        for tensor in (hidden, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        if wide:
            with pytest.raises(
                InputError, match=f"expected_rows is {tokens * 4}, wanted an int of 0 to M={tokens * 2}"
            ):
                compiled(hidden, ids, weights)
        else:
            torch.testing.assert_close(compiled(hidden, ids, weights), layer(hidden, ids, weights))
    assert graphs.frame_count == 1


@pytest.mark.slow
@pytest.mark.parametrize("source", ["before", "in the call"])
def test_compile_with_an_activation_that_has_numbers(source: str) -> None:
    up, down, act = torch.randn(E, 2 * I, H), torch.randn(E, H, I), Activation("swiglu", limit=0.5)

    def layer(hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        how = act if source == "before" else Activation("swiglu", limit=0.5)
        return moe_mlp(hidden, up, down, ids, weights, how)

    inputs = torch.randn(5, H), torch.randint(0, E, (5, TOPK)), torch.rand(5, TOPK)
    got = torch.compile(layer, fullgraph=True, backend="aot_eager")(*inputs)
    torch.testing.assert_close(got, layer(*inputs))
    assert not torch.allclose(got, moe_mlp(inputs[0], up, down, *inputs[1:]))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["swiglu", "situ", "swiglustep"])
def test_layers_whose_limits_differ_compile_whole(name: str) -> None:
    """From the second value on torch.compile has a float for all of them, which it does not know."""

    class Gate(torch.nn.Module):
        def __init__(self, limit: float) -> None:
            super().__init__()
            self.limit = limit

        def forward(self, h: torch.Tensor) -> torch.Tensor:
            numbers = {"beta": self.limit, "linear_beta": 2 * self.limit} if name == "situ" else {"limit": self.limit}
            return activate(h, Activation(name, **numbers))

    h, gate = torch.randn(5, 8), Gate(1.0)
    compiled = torch.compile(gate, backend="eager", fullgraph=True)
    try:
        for limit in (1.0, 0.5, 0.25, 0.125):
            gate.limit = limit
            torch.testing.assert_close(compiled(h), gate(h))
    finally:
        torch._dynamo.reset()


@pytest.mark.slow
@pytest.mark.parametrize("form", ["plain", "wide", "gathered", "layer"])
def test_compile_with_as_many_rows_as_the_data_say(form: str) -> None:
    """Ranks that exchange tokens have the number of rows in a tensor: no size is known when the graph is traced."""
    up, down = torch.randn(E, 2 * I, H, requires_grad=True), torch.randn(E, H, I, requires_grad=True)

    def step(x: torch.Tensor, mask: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
        rows = mask.nonzero()[:, 0]
        if form == "plain":
            return grouped_gemm(x[rows], up, m_sizes)
        if form == "wide":
            return grouped_gemm(torch.cat([x, x], 1)[rows][:, :H], up, m_sizes)
        if form == "gathered":
            return grouped_gemm(x, up, m_sizes, 1, rows, permute_x=True)
        hidden = x[rows]
        ids = torch.arange(hidden.shape[0] * TOPK).view(-1, TOPK) % E
        return moe_mlp(hidden, up, down, ids, hidden[:, :TOPK].sigmoid())

    torch._dynamo.reset()
    inputs = torch.randn(T, H, requires_grad=True), *((up, down) if form == "layer" else (up,))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        compiled = torch.compile(step, fullgraph=True, backend="aot_eager")
        for many in (T, 2, 1, 0):
            mask, m_sizes = torch.arange(T) < many, torch.tensor([many // 2, 0, many - many // 2, 0])
            got, want = compiled(inputs[0], mask, m_sizes), step(inputs[0], mask, m_sizes)
            torch.testing.assert_close(got, want)
            dy = torch.ones_like(want)
            both = torch.autograd.grad(got, inputs, dy), torch.autograd.grad(want, inputs, dy)
            for tensor, other in zip(*both, strict=True):
                torch.testing.assert_close(tensor, other)


def test_compile_under_autocast_and_without_a_gradient() -> None:
    inputs = {name: tensor.detach() for name, tensor in tensors().items()}

    def layer(**tensors: torch.Tensor) -> torch.Tensor:
        with torch.autocast("cpu", torch.bfloat16):
            return grouped_gemm(**tensors, topk=TOPK, permute_x=True, fuse_mul_post=True)

    torch._dynamo.reset()
    y = torch.compile(layer, fullgraph=True, backend="aot_eager")(**inputs)
    assert y.dtype is torch.bfloat16
    torch.testing.assert_close(y, layer(**inputs))


@pytest.mark.parametrize("gathers", [False, True])
def test_export_of_any_rows_takes_each_number_of_them(gathers: bool) -> None:
    """Nothing of a call's sizes is looked at: no number of rows, or of padded ones, is fixed."""
    w = torch.randn(E, I, H)

    class Product(torch.nn.Module):
        def forward(self, x: torch.Tensor, m_sizes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
            if not gathers:
                return grouped_gemm(x, w, m_sizes)
            return grouped_gemm(x, w, m_sizes, TOPK, index, permute_x=True, zero_tail=True)

    def inputs(tokens: int, padding: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        routing = sort_routing(torch.randint(0, E, (tokens, TOPK)), E)
        index = torch.cat([routing.gather_indices, routing.gather_indices.new_full((padding,), -1)])
        return torch.randn(tokens if gathers else tokens * TOPK, H), routing.m_sizes, index

    dynamic = ({0: torch.export.Dim("T")}, None, {0: torch.export.Dim("M")})
    exported = torch.export.export(Product(), inputs(5, 0), dynamic_shapes=dynamic, strict=False).module()
    for sizes in ((5, 0), (7, 0), (7, 4)):
        arguments = inputs(*sizes)
        torch.testing.assert_close(exported(*arguments), Product()(*arguments), equal_nan=True)


@pytest.mark.slow
@pytest.mark.parametrize("bounds", [{"min": 2, "max": 4096}, {}])
def test_export(bounds: dict[str, int]) -> None:
    tokens = torch.export.Dim("T", **bounds)

    class Layer(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up = torch.nn.Parameter(torch.randn(E, 2 * I, H))
            self.down = torch.nn.Parameter(torch.randn(E, H, I))

        def forward(self, hidden: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            return moe_mlp(hidden, self.up, self.down, ids, weights)

    module = Layer()
    example = torch.randn(T, H), torch.randint(0, E, (T, TOPK)), torch.rand(T, TOPK)
    dynamic = [{0: tokens}] * 3
    for strict in (False, True):
        exported = torch.export.export(module, example, dynamic_shapes=dynamic, strict=strict)
        assert "pretuned.grouped_gemm" in str(exported.graph)
        other = torch.randn(11, H), torch.randint(0, E, (11, TOPK)), torch.rand(11, TOPK)
        torch.testing.assert_close(exported.module()(*other), module(*other))


def test_what_cannot_be_traced_is_named() -> None:
    x, w, m_sizes = torch.randn(4, H), torch.randn(E, I, H), torch.tensor([4, 0, 0, 0])

    def layer() -> torch.Tensor:
        return grouped_gemm(x, w, m_sizes, out=torch.empty(4, I))

    torch._dynamo.reset()
    with pytest.raises(Exception, match="out=, autotune=True and kernel_config"):
        torch.compile(layer, fullgraph=True, backend="eager")()
    with pytest.raises(Exception, match="wanted x's dtype"):
        torch.compile(lambda: grouped_gemm(x, w.double(), m_sizes), fullgraph=True, backend="eager")()


def test_a_scripted_trace_keeps_the_call() -> None:
    """torch.jit.trace: other counts and numbers of rows than those it was traced with."""
    w, x = torch.randn(3, 6, 8), torch.randn(10, 8)

    def product(x: torch.Tensor, m_sizes: torch.Tensor) -> torch.Tensor:
        return x[:, :6] + grouped_gemm(x, w, m_sizes)

    traced = torch.jit.trace(product, (x, torch.tensor([3, 4, 3])))
    assert "pretuned::grouped_gemm" in str(traced.graph)
    for rows, counts in ((10, [1, 0, 9]), (4, [0, 3, 1])):
        inputs = torch.randn(rows, 8), torch.tensor(counts)
        torch.testing.assert_close(traced(*inputs), product(*inputs))
    with pytest.raises(InputError, match=r"grouped_gemm_dX: torch.jit.trace would keep these counts"):
        torch.jit.trace(
            lambda dy, m_sizes: grouped_gemm_dX(dy, w, m_sizes), (torch.randn(10, 6), torch.tensor([3, 4, 3]))
        )


@pytest.mark.filterwarnings("ignore:.torch.jit:DeprecationWarning")
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_a_scripted_trace_takes_topk_from_a_shape() -> None:
    """Which is a tensor then, in ``moe_mlp`` as well."""
    up, down, x = torch.randn(4, 12, 8), torch.randn(4, 8, 6), torch.randn(7, 8)
    ids, others, weights = torch.randint(0, 4, (7, 2)), torch.randint(0, 4, (7, 2)), torch.rand(7, 2)

    def product(x: torch.Tensor, ids: torch.Tensor, m_sizes: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
        return grouped_gemm(x, up, m_sizes, ids.shape[1], index, permute_x=True)

    routing, other = sort_routing(ids, 4), sort_routing(others, 4)
    traced = torch.jit.trace(product, (x, ids, routing.m_sizes, routing.gather_indices), check_trace=False)
    inputs = (x, others, other.m_sizes, other.gather_indices)
    torch.testing.assert_close(traced(*inputs), product(*inputs))

    def layer(x: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        return moe_mlp(x, up, down, ids, weights)

    traced = torch.jit.trace(layer, (x, ids, weights), check_trace=False)
    torch.testing.assert_close(traced(x, others, weights), layer(x, others, weights))
