"""Unsupported differentiation is refused, and never silently wrong."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from host_gpu import TOPK, Device, E, K, N, T
from torch.autograd import forward_ad

from pretuned.artifacts.errors import InputError
from pretuned.runtime import Lora, activate, grouped_gemm, grouped_gemm_dW, grouped_gemm_dX, moe_mlp
from pretuned.runtime.check.tensors import in_memory
from pretuned.runtime.launch import program

pytestmark = [
    pytest.mark.filterwarnings("ignore:pretuned"),
    pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning"),  # torch.func.jvp's own
]
Call = Callable[..., torch.Tensor]
H, WIDTH = 12, 8


@pytest.fixture(params=["the reference", "a GPU"], autouse=True)
def where(request: pytest.FixtureRequest, device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    device.visible = request.param == "a GPU"
    device.available = False  # torch.compile imports code for CUDA graphs otherwise


def random(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape) + sum(shape)))


def product(x: torch.Tensor, w: torch.Tensor, topk_weights: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """Every tensor that has a gradient, in one call."""
    return grouped_gemm(
        x,
        w,
        torch.tensor([3, 4, 5, 2]),
        TOPK,
        torch.arange(T * TOPK).flip(0),
        permute_x=True,
        fuse_mul_post=True,
        topk_weights=topk_weights,
        bias=bias,
    )


def layer(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    topk_weights: torch.Tensor,
    gate_up_bias: torch.Tensor,
    down_bias: torch.Tensor,
) -> torch.Tensor:
    ids = torch.arange(T * TOPK).view(T, TOPK) % E
    return moe_mlp(hidden, gate_up, down, ids, topk_weights, gate_up_bias=gate_up_bias, down_bias=down_bias)


def adapted(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor, A: torch.Tensor, B: torch.Tensor) -> torch.Tensor:
    """A product with an adapter, which has a function of its own."""
    index = torch.arange(T * TOPK).flip(0)
    return grouped_gemm(x, w, torch.tensor([3, 4, 5, 2]), TOPK, index, permute_x=True, bias=bias, lora=Lora(A, B, 0.5))


ADAPTED = {"x": (T, K), "w": (E, N, K), "bias": (E, N), "A": (E, 4, K), "B": (E, N, 4)}
PRODUCT = {"x": (T, K), "w": (E, N, K), "topk_weights": (T, TOPK), "bias": (E, N)}
LAYER = {
    "hidden": (T, H),
    "gate_up": (E, 2 * WIDTH, H),
    "down": (E, H, WIDTH),
    "topk_weights": (T, TOPK),
    "gate_up_bias": (E, 2 * WIDTH),
    "down_bias": (E, H),
}
EACH = [
    (call, shapes, name) for call, shapes in ((product, PRODUCT), (adapted, ADAPTED), (layer, LAYER)) for name in shapes
]


@pytest.mark.parametrize(("call", "shapes", "name"), EACH, ids=[f"{call.__name__} {name}" for call, _, name in EACH])
def test_a_tangent_is_refused(call: Call, shapes: dict[str, tuple[int, ...]], name: str) -> None:
    """A kernel would lose it. The second time the call is one that is remembered."""
    inputs = {name: random(*shape) for name, shape in shapes.items()}
    call(**inputs)
    for _ in range(2):
        with forward_ad.dual_level(), pytest.raises(InputError, match="forward-mode"):
            call(**inputs | {name: forward_ad.make_dual(inputs[name], torch.ones_like(inputs[name]))})
        with pytest.raises(InputError, match="forward-mode"):
            torch.func.jvp(lambda tensor: call(**inputs | {name: tensor}), (inputs[name],), (inputs[name],))
        with forward_ad.dual_level():  # of others' tensors
            call(**inputs)


def test_a_plain_call_refuses_it_too() -> None:
    x, w, m_sizes = random(T, K), random(E, N, K), torch.tensor([3, 0, 4, 0])
    for _ in range(2):
        grouped_gemm(x, w, m_sizes)
        with forward_ad.dual_level(), pytest.raises(InputError, match=r"grouped_gemm: .*forward-mode"):
            grouped_gemm(forward_ad.make_dual(x, x), w, m_sizes)


def test_an_activation_has_it() -> None:
    h = random(T, 2 * WIDTH)
    want = torch.func.jvp(lambda tensor: torch.nn.functional.silu(tensor[:, :WIDTH]) * tensor[:, WIDTH:], (h,), (h,))
    torch.testing.assert_close(torch.func.jvp(activate, (h,), (h,)), want)
    with forward_ad.dual_level():
        got = forward_ad.unpack_dual(activate(forward_ad.make_dual(h, h)))
    torch.testing.assert_close((got.primal, got.tangent), want)


@pytest.mark.slow
def test_a_compiled_tangent_is_refused() -> None:
    """It was zero."""
    x, w, m_sizes = random(T, K), random(E, N, K), torch.tensor([3, 0, 4, 0])
    torch._dynamo.reset()
    compiled = torch.compile(
        lambda x: torch.func.jvp(lambda tensor: grouped_gemm(tensor, w, m_sizes), (x,), (x,))[1],
        backend="eager",
        fullgraph=True,
    )
    with pytest.raises((InputError, torch._dynamo.exc.TorchDynamoException), match="forward-mode level"):
        compiled(x)


def test_a_functional_gradient_of_a_product_beside_an_adapter_is_refused() -> None:
    inputs = {name: random(*shape) for name, shape in ADAPTED.items()}
    with pytest.raises(RuntimeError, match="setup_context"):
        torch.func.grad(lambda A: adapted(**inputs | {"A": A}).sum())(inputs["A"])


def test_compiled_code_may_be_mapped(device: Device) -> None:
    """torch's fallback calls the operator for each."""
    device.visible = False
    x, w, m_sizes = random(2, T, K), random(E, N, K), torch.tensor([3, 0, 4, 0])
    torch._dynamo.reset()
    compiled = torch.compile(
        torch.vmap(lambda tensor: grouped_gemm(tensor, w, m_sizes)), backend="eager", fullgraph=True
    )
    torch.testing.assert_close(compiled(x), torch.stack([grouped_gemm(tensor, w, m_sizes) for tensor in x]))


@pytest.mark.parametrize("beside", [False, True], ids=["alone", "beside an adapter"])
def test_a_gradient_has_no_gradient_in_compiled_code(beside: bool) -> None:
    """It was left out of the sum: a penalty on a gradient did nothing."""
    x, w, m_sizes = random(T, K).requires_grad_(), random(E, N, K), torch.tensor([3, 0, 4, 0])
    torch._dynamo.reset()
    lora = Lora(random(E, 4, K), random(E, N, 4)) if beside else None
    plain = partial(grouped_gemm, w=w, m_sizes=m_sizes, lora=lora)
    compiled = torch.compile(plain, backend="eager", fullgraph=True)
    for call in (compiled, plain):
        (dx,) = torch.autograd.grad(call(x).square().sum(), x, create_graph=True)
        with pytest.raises(RuntimeError, match=r"differentiated (again|twice)|once_differentiable"):
            (call(x).sum() + dx.square().sum()).backward()


def test_who_saved_out_is_reported_that_it_changed() -> None:
    x, w, m_sizes, index = random(8, K), random(E, N, K), torch.tensor([3, 0, 4, 1]), torch.arange(8)
    for form in ({"permute_x": True, "gather_indices": index}, {}):
        out, factor = torch.empty(8, N), torch.ones(8, N, requires_grad=True)
        grouped_gemm(x, w, m_sizes, out=out, **form)
        loss = (factor * out).sum()
        grouped_gemm(2 * x, w, m_sizes, out=out, **form)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("calls", [1, 2, 3], ids=["the first", "known", "the same operands"])
def test_so_is_who_saved_that_of_a_plain_call(calls: int) -> None:
    """On a GPU it goes past all that the others do, and a kernel writes unseen."""
    x, w, m_sizes, out = random(8, K), random(E, N, K), torch.tensor([3, 0, 4, 1]), torch.empty(8, N)
    for _ in range(calls):
        before = out._version
        assert grouped_gemm(x, w, m_sizes, out=out) is out
        assert out._version > before


class Wrapped(torch.Tensor):
    """A tensor without memory of its own, like a DTensor."""

    inner: torch.Tensor

    @staticmethod
    def __new__(cls, inner: torch.Tensor) -> Wrapped:
        wrapper: Wrapped = torch.Tensor._make_wrapper_subclass(
            cls, inner.shape, dtype=inner.dtype, device=inner.device, strides=inner.stride()
        )
        wrapper.inner = inner
        return wrapper

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        def bare(value: Any) -> Any:
            return value.inner if isinstance(value, Wrapped) else value

        return func(*torch.utils._pytree.tree_map(bare, args), **torch.utils._pytree.tree_map(bare, kwargs or {}))


@pytest.mark.parametrize("which", ["m_sizes", "gather_indices", "topk_weights", "bias"])
def test_a_wrapped_tensor_reaches_no_kernel_as_a_null_pointer(which: str, device: Device) -> None:
    inputs: dict[str, Any] = {
        "x": random(T, K),
        "w": random(E, N, K),
        "m_sizes": torch.tensor([3, 4, 5, 2]),
        "bias": random(E, N),
        "gather_indices": torch.arange(T * TOPK),
        "topk_weights": random(T, TOPK),
    }
    form: dict[str, Any] = {"topk": TOPK, "permute_x": True, "fuse_mul_post": True}
    want = grouped_gemm(**inputs, **form)
    count = len(device.products)
    y = grouped_gemm(**inputs | {which: Wrapped(inputs[which])}, **form)
    torch.testing.assert_close(y, want)
    read = [[launch.words[name] for name in ("m_sizes", "index", "row_weights", "bias")] for launch in device.products]
    assert all(map(all, read))
    assert len(read) == 2 * count


class Waiting(Wrapped):
    """A tensor whose views wait, like an AsyncCollectiveTensor."""

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = super().__torch_dispatch__(func, types, args, kwargs)
        return cls(out) if func is torch.ops.aten.view.default else out


def backward(call: Call, shapes: dict[str, tuple[int, ...]], wraps: bool) -> tuple[torch.Tensor, ...]:
    inputs = [random(*shape).requires_grad_() for shape in shapes.values()]
    y = call(*inputs)
    dy = random(*y.shape)
    return torch.autograd.grad(y, inputs, Waiting(dy) if wraps else dy)


GATHERED: dict[str, Any] = {"topk": TOPK, "gather_indices": torch.arange(T * TOPK).flip(0), "permute_x": True}


@pytest.mark.parametrize(
    ("call", "shapes"),
    [
        (product, PRODUCT),
        (lambda x, w: grouped_gemm(x, w, torch.tensor([3, 4, 5, 2])), {"x": (T * TOPK, K), "w": (E, N, K)}),
        (layer, LAYER),
        (activate, {"h": (T, 2 * WIDTH)}),
    ],
    ids=["product", "plain", "layer", "activation"],
)
def test_neither_does_a_wrapped_gradient(call: Call, shapes: dict[str, tuple[int, ...]]) -> None:
    """A collective of the layer behind may still be under way."""
    for _ in range(2):  # the second time by a plan
        for got, want in zip(backward(call, shapes, True), backward(call, shapes, False), strict=True):
            torch.testing.assert_close(got, want)


def test_nor_do_wrapped_counts_of_a_plain_call() -> None:
    """Counts that ranks exchange may still be under way."""
    x, w = random(T, K), random(E, N, K)
    m_sizes = torch.tensor([3, 0, 4, 0])
    wanted = grouped_gemm(x, w, m_sizes)
    for counts in (Waiting(m_sizes), m_sizes, Waiting(m_sizes), m_sizes, Waiting(m_sizes)):
        assert torch.equal(grouped_gemm(x, w, counts), wanted)


@pytest.mark.parametrize("which", ["dy", "w", "x", "topk_weights"])
def test_a_gradient_that_is_called_alone_refuses_a_tangent(which: str) -> None:
    weighted = {"topk_weights": random(T, TOPK), "fuse_mul_post": True} if which == "topk_weights" else {}
    inputs: dict[str, Any] = GATHERED | weighted | {"dy": random(T * TOPK, N), "m_sizes": torch.tensor([3, 4, 5, 2])}
    for call, other in ((grouped_gemm_dX, {"w": random(E, N, K)}), (grouped_gemm_dW, {"x": random(T, K)})):
        if which in inputs | other:
            with forward_ad.dual_level():
                primal = (inputs | other)[which]
                dual = forward_ad.make_dual(primal, torch.ones_like(primal))
                with pytest.raises(InputError, match=f"{call.__name__}: a tensor has a forward-mode tangent"):
                    call(**inputs | other | {which: dual})


@pytest.mark.parametrize("which", ["dy", "w", "x", "m_sizes", "gather_indices", "topk_weights"])
def test_nor_does_a_wrapped_tensor_of_a_gradient_that_is_called_alone(which: str) -> None:
    inputs: dict[str, Any] = GATHERED | {
        "dy": random(T * TOPK, N),
        "m_sizes": torch.tensor([3, 4, 5, 2]),
        "topk_weights": random(T, TOPK),
        "fuse_mul_post": True,
    }
    for call, other in ((grouped_gemm_dX, {"w": random(E, N, K)}), (grouped_gemm_dW, {"x": random(T, K)})):
        if which in inputs | other:
            wrapped = inputs | other | {which: Waiting((inputs | other)[which])}
            torch.testing.assert_close(call(**wrapped), call(**inputs, **other))


def test_a_tensor_without_memory_is_refused() -> None:
    class Empty(Wrapped):
        @classmethod
        def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            return cls(super().__torch_dispatch__(func, types, args, kwargs))

    x, w = random(T * TOPK, K).requires_grad_(), random(E, N, K)
    y = grouped_gemm(x, w, torch.tensor([3, 4, 5, 2]))
    with pytest.raises(InputError, match="dy is a Empty, which has no memory of its own"):
        torch.autograd.grad(y, x, Empty(torch.ones_like(y)))


def test_a_tensor_of_another_class_is_not_copied() -> None:
    class Named(torch.Tensor):
        pass

    dy = random(3, K).as_subclass(Named)
    assert in_memory("dy", dy) is dy


@pytest.mark.parametrize("which", ["x", "w", "bias"])
def test_autocast_casts_any_of_them(which: str, device: Device) -> None:
    device.visible = False  # the made-up GPU has float32 alone
    inputs = {"x": random(8, K), "w": random(E, N, K), "bias": random(E, N)}
    inputs = {name: tensor if name == which else tensor.bfloat16() for name, tensor in inputs.items()}
    m_sizes = torch.tensor([3, 0, 4, 1])
    with torch.autocast("cpu", torch.bfloat16):
        bias = inputs.pop("bias").requires_grad_()
        y = grouped_gemm(**inputs, m_sizes=m_sizes, bias=bias)
    assert y.dtype is torch.bfloat16
    (dbias,) = torch.autograd.grad(y.sum(), bias)
    assert dbias.dtype is bias.dtype


@pytest.mark.parametrize("autocast", [False, True])
def test_meta_tensors_have_a_shape(autocast: bool) -> None:
    x, w, m_sizes = (tensor.to("meta") for tensor in (random(8, K), random(E, N, K), torch.tensor([3, 0, 4, 1])))
    with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
        y = grouped_gemm(x, w, m_sizes)
    assert (y.shape, y.dtype, y.device.type) == ((8, N), torch.float32, "meta")
    ids, weights = torch.empty(8, TOPK, dtype=torch.int64, device="meta"), torch.empty(8, TOPK, device="meta")
    gate_up, down = torch.empty(E, 2 * WIDTH, K, device="meta"), torch.empty(E, K, WIDTH, device="meta")
    assert moe_mlp(x, gate_up, down, ids, weights).shape == (8, K)
