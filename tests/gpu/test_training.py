"""Training on a real GPU. PRETUNED_BUNDLES names a bundle of bf16, fp16 and fp32, all ops, for E=8 H=768 I=512."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from selected import failed
from torch.utils.checkpoint import checkpoint

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import DType, Fusion, Op, Problem
from pretuned.kernels import reference
from pretuned.kernels.spec import Config
from pretuned.runtime import (
    explain,
    grouped_gemm,
    grouped_gemm_dW,
    grouped_gemm_dX,
    moe_mlp,
    preload,
    reload,
    sort_routing,
)
from pretuned.runtime.check.tensors import DTYPES
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch.loader import loaded_count

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

E, H, I, TOPK = 8, 768, 512, 2  # noqa: E741
N, K = 2 * I, H
MOST = {torch.bfloat16: 1e-2, torch.float16: 2e-3, torch.float32: 2e-5}
FORMS = [(x, y, w, b) for x in (0, 1) for y in (0, 1) for w in (0, 1) for b in (0, 1)]


def routed(T: int, kind: str = "random", seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    if kind == "one":
        return torch.full((T, TOPK), 3, device="cuda")
    if kind == "skewed":
        return torch.rand(T, TOPK, device="cuda", generator=generator).pow(4).mul(E - 1).long()
    if kind == "elsewhere":  # half of the experts on another rank
        return torch.randint(-E // 2, E, (T, TOPK), device="cuda", generator=generator)
    return torch.randint(0, E, (T, TOPK), device="cuda", generator=generator)


def tensors(form: tuple[int, ...], T: int, dtype: torch.dtype, layout: str = "nk") -> dict[str, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)

    def random(*shape: int, scale: float = 1.0, kind: torch.dtype = dtype) -> torch.Tensor:
        tensor = torch.randn(*shape, device="cuda", generator=generator) * scale
        return tensor.to(kind).requires_grad_()

    inputs = {
        "x": random(T if form[0] else T * TOPK, K),
        "w": random(*((E, N, K) if layout == "nk" else (E, K, N)), scale=K**-0.5),
    }
    if form[2]:
        inputs["topk_weights"] = random(T, TOPK, kind=torch.float32)
    if form[3]:
        inputs["bias"] = random(E, N)
    return inputs


def call(form: tuple[int, ...], ids: torch.Tensor, inputs: dict[str, torch.Tensor], **how: Any) -> torch.Tensor:
    routing = sort_routing(ids, E)
    return grouped_gemm(
        **inputs,
        m_sizes=routing.m_sizes,
        topk=TOPK,
        gather_indices=routing.gather_indices,
        permute_x=bool(form[0]),
        permute_y=bool(form[1]),
        fuse_mul_post=bool(form[2]),
        zero_tail=True,
        **how,
    )


def exact(form: tuple[int, ...], ids: torch.Tensor, inputs: dict[str, torch.Tensor], layout: str) -> torch.Tensor:
    """Return the exact result in float64, a whole expert at a time, differentiated by torch."""
    routing = sort_routing(ids, E)
    index, parts = routing.gather_indices, []
    x = inputs["x"][index // TOPK] if form[0] else inputs["x"]
    for g, (start, end) in enumerate(reference.expert_bounds(routing.m_sizes, len(index))):
        part = x[start:end] @ (inputs["w"][g].T if layout == "nk" else inputs["w"][g])
        parts.append(part + inputs["bias"][g] if form[3] else part)
    y = torch.cat(parts)
    if form[2]:
        y = y * inputs["topk_weights"].flatten()[index[: len(y)]][:, None]
    y = torch.cat([y, y.new_zeros(len(index) - len(y), N)])
    return torch.zeros_like(y).index_copy(0, index, y) if form[1] else y


def assert_near(got: torch.Tensor, want: torch.Tensor, most: float) -> None:
    assert got.isfinite().all()
    error = (got.double() - want).norm() / want.norm().clamp(min=1e-30)
    assert error < most, float(error)


def check(form: tuple[int, ...], ids: torch.Tensor, dtype: torch.dtype, layout: str) -> None:
    inputs = tensors(form, ids.shape[0], dtype, layout)
    wide = {name: tensor.detach().double().requires_grad_() for name, tensor in inputs.items()}
    y, want = call(form, ids, inputs, w_layout=layout), exact(form, ids, wide, layout)
    dy = torch.randn(y.shape, device="cuda", generator=torch.Generator("cuda").manual_seed(2)).to(dtype)
    assert_near(y, want, MOST[dtype])
    got = torch.autograd.grad(y, list(inputs.values()), dy)
    for tensor, other in zip(got, torch.autograd.grad(want, list(wide.values()), dy.double()), strict=True):
        assert_near(tensor, other, MOST[dtype])


@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("form", FORMS)
def test_every_form_and_gradient(form: tuple[int, ...], layout: str) -> None:
    check(form, routed(300), torch.bfloat16, layout)


@pytest.mark.parametrize("dtype", list(MOST))
@pytest.mark.parametrize("form", [(0, 0, 0, 0), (1, 0, 0, 1), (0, 1, 1, 0), (1, 1, 1, 1)])
def test_every_dtype(form: tuple[int, ...], dtype: torch.dtype) -> None:
    check(form, routed(200), dtype, "nk")


@pytest.mark.parametrize("kind", ["random", "skewed", "one", "elsewhere"])
@pytest.mark.parametrize("T", [1, 17, 128, 1000, 1024, 8192])
def test_every_load(T: int, kind: str) -> None:
    for form in ((0, 0, 0, 0), (1, 0, 0, 0), (0, 1, 1, 0)):
        check(form, routed(T, kind), torch.bfloat16, "nk")


def test_the_kernels_are_a_bundles_and_not_torchs() -> None:
    reload()
    for form in FORMS:
        inputs = tensors(form, 100, torch.bfloat16)
        call(form, routed(100), inputs).sum().backward()
    launchers = dispatch_snapshot.snapshot().launchers
    assert launchers
    assert all(launch is not None for launch in launchers.values())


@pytest.mark.parametrize("lacking", [1, 2, 3])
def test_what_a_bundle_lacks_torch_does(lacking: int) -> None:
    fusions = (Fusion.GATHER, Fusion.SCATTER, Fusion.NONE)
    with failed(lambda variant: isinstance(variant.op, Op) and variant.fusion in fusions[:lacking]):
        for form in FORMS:
            for layout in ("nk", "kn"):
                check(form, routed(100, "elsewhere"), torch.bfloat16, layout)
        check((1, 1, 1, 1), routed(100), torch.float32, "nk")
        for i, fusion in enumerate(fusions):
            chosen = explain(Problem(Op.FORWARD, DType.BF16, E, N, K, fusion=fusion), M=200).chosen
            assert (chosen is None) is (i < lacking)


def test_unaligned_sizes() -> None:
    x = torch.randn(70, 77, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(E, 45, 77, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    m_sizes = torch.tensor([10, 0, 3, 30, 0, 7, 20, 0], device="cuda")
    y = grouped_gemm(x, w, m_sizes)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [x, w], dy)
    assert_near(dx, reference.grad_input(dy.double(), w.detach().double(), m_sizes), 1e-2)
    assert_near(dw, reference.grad_weight(dy.double(), x.detach().double(), m_sizes), 1e-2)


def test_the_gradients_as_calls() -> None:
    ids = routed(333)
    routing = sort_routing(ids, E)
    form = (1, 1, 1, 0)
    inputs = tensors(form, 333, torch.bfloat16)
    inputs["topk_weights"].requires_grad_(False)
    y = call(form, ids, inputs)
    dy = torch.randn_like(y)
    dx, dw = torch.autograd.grad(y, [inputs["x"], inputs["w"]], dy)
    how: dict[str, Any] = {
        "m_sizes": routing.m_sizes,
        "topk": TOPK,
        "gather_indices": routing.gather_indices,
        "permute_x": True,
        "permute_y": True,
        "topk_weights": inputs["topk_weights"],
        "fuse_mul_post": True,
    }
    assert_near(grouped_gemm_dX(dy, inputs["w"], **how), dx.double(), 1e-2)
    assert torch.equal(grouped_gemm_dW(dy, inputs["x"], **how), dw)


def test_nothing_of_the_next_expert_enters_dw_and_tails_are_zero() -> None:
    x = torch.randn(200, K, device="cuda", dtype=torch.bfloat16)
    dy = torch.randn(200, N, device="cuda", dtype=torch.bfloat16)
    m_sizes = torch.tensor([50, 0, 37, 13, 0, 0, 60, 0], device="cuda", dtype=torch.int32)
    clean = grouped_gemm_dW(dy, x, m_sizes)
    x[50:87], dy[87:100], x[160:] = float("nan"), float("inf"), float("nan")
    dirty = grouped_gemm_dW(dy, x, m_sizes)
    for g in (0, 1, 4, 5, 6, 7):
        assert torch.equal(dirty[g], clean[g])
    assert not clean[[1, 4, 5, 7]].any()
    assert not grouped_gemm_dX(dy, torch.ones(E, N, K, device="cuda", dtype=dy.dtype), m_sizes)[160:].any()


def layer(dtype: torch.dtype = torch.bfloat16) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(7)

    def random(*shape: int) -> torch.Tensor:
        return (torch.randn(*shape, device="cuda", generator=generator) * shape[-1] ** -0.5).to(dtype).requires_grad_()

    return [random(E, 2 * I, H), random(E, H, I)]


def gradients(up: torch.Tensor, down: torch.Tensor, T: int = 500) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(8)
    hidden = torch.randn(T, H, device="cuda", generator=generator).to(up.dtype).requires_grad_()
    weights = torch.rand(T, TOPK, device="cuda", generator=generator).requires_grad_()
    y = moe_mlp(hidden, up, down, routed(T, "skewed"), weights)
    return [y, *torch.autograd.grad(y.float().square().sum(), [hidden, weights, up, down])]


def test_the_same_bits_every_time() -> None:
    up, down = layer()
    first = gradients(up, down)
    for _ in range(5):
        for got, want in zip(gradients(up, down), first, strict=True):
            assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream")  # torch's advice: w was made on another stream
def test_threads_and_streams() -> None:
    up, down = layer()
    wanted = gradients(up, down)
    torch.cuda.synchronize()
    failures: list[object] = []

    def work() -> None:
        try:
            with torch.cuda.stream(torch.cuda.Stream()):
                for _ in range(10):
                    got = gradients(up, down)
                torch.cuda.current_stream().synchronize()
                failures.extend(
                    (number, (a.float() - b.float()).abs().max().item())
                    for number, (a, b) in enumerate(zip(got, wanted, strict=True))
                    if not torch.equal(a, b)
                )
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []


@pytest.mark.parametrize("needs", ["x", "w"])
def test_the_first_that_autograds_thread_does_is_a_backward(needs: str) -> None:
    """In a process of its own: a fresh thread has no CUDA context until something asks for one."""
    program = f"""
import torch
from pretuned.runtime import grouped_gemm
x, w = torch.randn(64, {K}, device="cuda").bfloat16(), torch.randn({E}, {N}, {K}, device="cuda").bfloat16()
m_sizes = torch.full(({E},), 8, device="cuda", dtype=torch.int32)
dy = torch.ones(64, {N}, device="cuda", dtype=torch.bfloat16)
spare = torch.empty({E}, {N}, {K}, device="cuda", dtype=torch.bfloat16)
del spare  # memory that is to be had without the driver
{needs}.requires_grad_()
for _ in range(2):
    grouped_gemm(x, w, m_sizes)  # a plan
for _ in range(2):
    grouped_gemm(x, w, m_sizes).backward(dy)
torch.cuda.synchronize()
print(float({needs}.grad.float().norm()))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) > 0


# torch's thread may still hold the warm-up's graph, of another stream, when the capture begins.
@pytest.mark.filterwarnings("ignore:The AccumulateGrad node's stream does not match:UserWarning")
@pytest.mark.parametrize("streams", [1, 2])
def test_capture_of_a_training_step_and_replay_with_other_routing(streams: int) -> None:
    up, down = layer()
    T = 256
    steps: list[tuple[torch.cuda.CUDAGraph, torch.Tensor, Callable[[], list[torch.Tensor]], list[torch.Tensor]]] = []
    for seed in range(streams):
        generator = torch.Generator("cuda").manual_seed(seed)
        hidden = torch.randn(T, H, device="cuda", generator=generator).bfloat16().requires_grad_()
        weights = torch.rand(T, TOPK, device="cuda", generator=generator).requires_grad_()
        ids = routed(T, seed=seed)

        def step(
            hidden: torch.Tensor = hidden, weights: torch.Tensor = weights, ids: torch.Tensor = ids
        ) -> list[torch.Tensor]:
            y = moe_mlp(hidden, up, down, ids, weights)
            return [y, *torch.autograd.grad(y.float().square().sum(), [hidden, weights, up, down])]

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        side.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            results = step()
        steps.append((graph, ids, step, results))
    for seed in (11, 12, 13):
        for at, (_, ids, _, _) in enumerate(steps):
            ids.copy_(routed(T, "skewed" if seed == 12 else "elsewhere", seed + at))
        torch.cuda.synchronize()
        for graph, *_ in steps:
            with torch.cuda.stream(torch.cuda.Stream()):
                graph.replay()
        torch.cuda.synchronize()
        for _, _, step, results in steps:
            for got, want in zip(results, step(), strict=True):
                assert torch.equal(got, want)


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # torch's own, in what torch.compile imports
def test_compile_with_changing_tokens() -> None:
    up, down = layer()
    from torch._dynamo.testing import CompileCounterWithBackend

    graphs = CompileCounterWithBackend("aot_eager")
    torch._dynamo.reset()
    compiled = torch.compile(moe_mlp, fullgraph=True, backend=graphs)
    for T in (5, 64, 300):
        hidden = torch.randn(T, H, device="cuda", dtype=torch.bfloat16, requires_grad=True)
        ids, weights = routed(T), torch.rand(T, TOPK, device="cuda", requires_grad=True)
        for tensor in (hidden, ids, weights):
            torch._dynamo.mark_dynamic(tensor, 0)
        y, want = compiled(hidden, up, down, ids, weights), moe_mlp(hidden, up, down, ids, weights)
        both = [(y, want)]
        dy = torch.randn_like(y)
        inputs = [hidden, weights, up, down]
        both += zip(torch.autograd.grad(y, inputs, dy), torch.autograd.grad(want, inputs, dy), strict=True)
        # (Traced, the layer is made of library calls, and its activation rounds each step to bf16.)
        for value, other in both:
            assert (value.float() - other.float()).norm() < 2e-2 * other.float().norm()
    assert graphs.frame_count == 1


def test_opcheck() -> None:
    from pretuned.runtime.api import torch_library

    assert torch_library.traced is not None
    inputs = tensors((1, 1, 1, 1), 40, torch.bfloat16)
    routing = sort_routing(routed(40), E)
    arguments = (
        inputs["x"],
        inputs["w"],
        routing.m_sizes,
        routing.gather_indices,
        inputs["topk_weights"],
        inputs["bias"],
    )
    torch.library.opcheck(
        torch.ops.pretuned.grouped_gemm, (*arguments, TOPK, True, True, True, "nk", False, False, False)
    )


def test_autocast_and_checkpointing() -> None:
    up, down = layer(torch.float32)
    low = [tensor.detach().bfloat16().requires_grad_() for tensor in (up, down)]
    hidden, weights, ids = torch.randn(200, H, device="cuda"), torch.rand(200, TOPK, device="cuda"), routed(200)
    with torch.autocast("cuda", torch.bfloat16):
        y = moe_mlp(hidden, up, down, ids, weights)
        again = checkpoint(moe_mlp, hidden, up, down, ids, weights, use_reentrant=False)
    want = moe_mlp(hidden.bfloat16(), *low, ids, weights)
    assert torch.equal(y, again)
    assert torch.equal(y.bfloat16(), want)  # autocast leaves the last sum in float32
    got = torch.autograd.grad(y.float().sum(), [up, down])
    for tensor, other, wide in zip(
        got,
        torch.autograd.grad(again.float().sum(), [up, down]),
        torch.autograd.grad(want.float().sum(), low),
        strict=True,
    ):
        assert tensor.dtype is torch.float32
        assert torch.equal(tensor, other)
        assert torch.equal(tensor, wide.float())


def test_a_plain_float32_call_inside_and_outside_autocast() -> None:
    x, w = torch.randn(64, K, device="cuda"), torch.randn(E, N, K, device="cuda")
    m_sizes = torch.full((E,), 8, device="cuda", dtype=torch.int32)
    for _ in range(4):  # the short ways too
        assert grouped_gemm(x, w, m_sizes).dtype is torch.float32
    with torch.autocast("cuda", torch.bfloat16):
        assert grouped_gemm(x, w, m_sizes).dtype is torch.bfloat16
    assert grouped_gemm(x, w, m_sizes).dtype is torch.float32
    assert grouped_gemm(x, w, m_sizes, bias=torch.zeros(E, N, device="cuda")).dtype is torch.float32


def test_a_kernel_by_name() -> None:
    x = torch.randn(64, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    w = torch.randn(E, N, K, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    m_sizes = torch.full((E,), 8, device="cuda", dtype=torch.int32)
    wanted = grouped_gemm(x, w, m_sizes)
    dx, dw = torch.autograd.grad(wanted.float().sum(), [x, w])
    problems = [Problem(op, DTYPES[x.dtype], E, N, K) for op in Op]
    pins = [
        {candidate.config: candidate for candidate in explain(problem, M=64, aligned=True).candidates}
        for problem in problems
    ]  # a config of each op
    for forward in list(pins[0])[:3]:
        y = grouped_gemm(
            x,
            w,
            m_sizes,
            kernel_config_fwd=forward,
            kernel_config_bwd_dX=next(iter(pins[1])),
            kernel_config_bwd_dW=next(iter(pins[2])),
        )
        assert_near(y, wanted.double(), 1e-2)
        for tensor, other in zip(torch.autograd.grad(y.float().sum(), [x, w]), (dx, dw), strict=True):
            assert_near(tensor, other.double(), 1e-2)
    with pytest.raises(InputError, match="the nearest of"):
        grouped_gemm(x, w, m_sizes, kernel_config_fwd=Config(16, 16, 256, 16, 8))


def test_after_preload_a_training_step_loads_nothing() -> None:
    reload()
    preload()
    count = loaded_count()
    gradients(*layer(), T=700)
    gradients(*layer(), T=3)
    assert loaded_count() == count


def torch_layer(
    hidden: torch.Tensor, up: torch.Tensor, down: torch.Tensor, ids: torch.Tensor, weights: torch.Tensor
) -> torch.Tensor:
    out = torch.zeros_like(hidden, dtype=torch.float32)
    for e in range(up.shape[0]):
        token, slot = (ids == e).nonzero(as_tuple=True)
        gate, value = (hidden[token] @ up[e].T).chunk(2, -1)
        y = (torch.nn.functional.silu(gate.float()) * value.float()).to(hidden.dtype) @ down[e].T
        out = out.index_add(0, token, y.float() * weights[token, slot][:, None])
    return out.to(hidden.dtype)


def test_fifty_steps_of_training_follow_torch() -> None:
    """A router, eight experts, a fixed target: the losses of both stay together, and fall."""
    T, steps = 512, 50
    generator = torch.Generator("cuda").manual_seed(21)
    data = torch.randn(T, H, device="cuda", generator=generator)
    target = torch.randn(T, H, device="cuda", generator=generator).mul(0.5).sin()

    def train(experts: Callable[..., torch.Tensor]) -> list[float]:
        own = torch.Generator("cuda").manual_seed(22)
        shapes = ((E, H), (E, 2 * I, H), (E, H, I))
        router, up, down = (
            (torch.randn(*shape, device="cuda", generator=own) * shape[-1] ** -0.5).requires_grad_() for shape in shapes
        )
        optimizer = torch.optim.AdamW([router, up, down], lr=2e-3)
        losses = []
        for _ in range(steps):
            logits = data @ router.T
            chosen, ids = logits.topk(TOPK, dim=-1)
            y = experts(data.bfloat16(), up.bfloat16(), down.bfloat16(), ids, chosen.softmax(-1))
            loss = (y.float() - target).square().mean()
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
        return losses

    ours, theirs = train(moe_mlp), train(torch_layer)
    assert ours[-1] < 0.7 * ours[0]
    for tensor, other in zip(ours, theirs, strict=True):
        assert abs(tensor - other) < 2e-2 * other + 2e-3 * theirs[0]  # what bf16's rounding makes of it in 50 steps
