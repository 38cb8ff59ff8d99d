"""Plans of layers and products in fp8: calls that come again have the long way's bits, whatever was written before."""

from __future__ import annotations

import contextlib
import functools
import gc
import itertools
import threading
import weakref
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import emulated_kernels
import pytest
import torch
from coded_machine import TOP_K, E, H, I, Machine, routed
from emulated_driver import Launch, emulated
from host_gpu import ALL, PASSES, PERSISTENT, bundle_bytes

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, Op, RowOp
from pretuned.kernels import search
from pretuned.runtime import Lora, grouped_gemm, moe_mlp, reload, reuse_fp8_weights, sort_routing
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.launch import program
from pretuned.runtime.ops import fp8_products

FP8: Any = {"precision": "fp8"}
T, FOUR = 24, ("hidden", "gate_up_weight", "down_weight", "topk_weights")
BIASES = ("gate_up_bias", "down_bias")
SUBSETS = [some for count in range(1, 5) for some in itertools.combinations(FOUR, count)]
Inputs = dict[str, torch.Tensor]


class Emulated(Machine):
    """An H200 that reads the weights of a product from their memory."""

    def multiply(self, launch: Launch) -> None:
        at = launch.addresses()
        self.dense[at["w"]] = self.values_of(at, E, launch.words["N"], launch.words["K"])
        super().multiply(launch)
        del self.dense[at["w"]]

    def cuLaunchKernelEx(self, *arguments: Any) -> int:
        with torch.autocast("cpu", enabled=False):  # kernels know of no autocast
            return super().cuLaunchKernelEx(*arguments)


@pytest.fixture(autouse=True)
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    """A GPU whose bundles have all kernels of fp8 training; dW of these small matrices is of codes."""
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    monkeypatch.setattr(fp8_products, "LEAST", 0)
    with emulated(Emulated(clean_places)) as gpu:
        published(clean_places)
        yield gpu  # type: ignore[misc]


@functools.cache
def of_training(without: Op | RowOp | None) -> bytes:
    """A bundle of the kernels of fp8 training, but for one."""
    gemms, rows = search.of_training(90)
    there = [emulated_kernels.variant_and_code(spec) for spec in (*gemms, *rows) if spec.op is not without]
    return encode(emulated_kernels.bundle_of(there))


def published(folder: Path, without: Op | RowOp | None = None) -> None:
    """Publish the kernels of fp8 training, but for one."""
    publish(folder / "training.msgpack", of_training(without))
    kinds = frozenset({*ALL, *PASSES}) - {without}
    publish(folder / "bf16.msgpack", bundle_bytes(frozenset(kinds), DType.BF16, PERSISTENT))
    reload()


class Replayed:
    """The programs that ran since ``counts`` was asked: (forwards, gradients)."""

    def __init__(self) -> None:
        self.rows: list[int] = []
        self.forwards = self.gradients = 0

    def note(self, ran: program.Program, M: int) -> None:
        plans = snapshot.snapshot().plans.values()
        forward = any(each is ran for plan in plans for each in plan.programs.values())
        self.forwards, self.gradients = self.forwards + forward, self.gradients + (not forward)
        self.rows.append(M)

    def counts(self) -> tuple[int, int]:
        counts = self.forwards, self.gradients
        self.forwards = self.gradients = 0
        return counts


@pytest.fixture
def replayed(monkeypatch: pytest.MonkeyPatch) -> Replayed:
    """Notes each program that runs."""
    replayed = Replayed()

    class Noted(program.Program):
        def __init__(self, *recorded: Any) -> None:
            super().__init__(*recorded)
            run = self.run

            def noted(M: int, stream: int, inputs: Any) -> Any:
                replayed.note(self, M)
                return run(M, stream, inputs)

            self.run = noted

    monkeypatch.setattr(program, "Program", Noted)
    return replayed


@contextlib.contextmanager
def long_way() -> Iterator[None]:
    """Neither makes nor runs plans."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(program, "KINDS", ())
        snapshot.snapshot().plans.clear()
        yield
        assert not snapshot.snapshot().plans


def layer(
    needs: Sequence[str] = FOUR, *, biased: bool = False, layout: str = "nk", dtype: torch.dtype = torch.bfloat16
) -> Inputs:
    g = torch.Generator().manual_seed(3)
    hidden, ids, scores = routed(T)
    shapes = {"gate_up_weight": (2 * I, H), "down_weight": (H, I)}
    inputs = {"hidden": hidden, "topk_ids": ids, "topk_weights": scores}
    for name, shape in shapes.items():
        w = (torch.randn(E, *shape, generator=g) / shape[1] ** 0.5).to(dtype)
        inputs[name] = w.mT.contiguous() if layout == "kn" else w
    if biased:
        inputs |= {name: torch.randn(E, n, generator=g).bfloat16() for name, n in zip(BIASES, (2 * I, H), strict=True)}
    for name in needs:
        inputs[name].requires_grad_()
    return inputs


def step(inputs: Inputs, **how: Any) -> list[torch.Tensor]:
    """The result and all gradients."""
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    y = moe_mlp(**inputs, **FP8, **how)  # type: ignore[arg-type]
    if not y.requires_grad:
        return [y]
    dout = torch.sin(torch.arange(y.numel())).view(y.shape).to(y.dtype)
    return [y.detach(), *torch.autograd.grad(y, leaves, dout)]


def same(got: Sequence[torch.Tensor], want: Sequence[torch.Tensor]) -> bool:
    return len(got) == len(want) and all(map(torch.equal, got, want))


def again(inputs: Inputs, replayed: Replayed, **how: Any) -> None:
    """Three steps of the same tensors have the long way's bits, and two are by plans."""
    with long_way():
        want = step(inputs, **how)
    assert replayed.counts() == (0, 0)
    for _ in range(3):
        assert same(step(inputs, **how), want)
    assert replayed.counts() == ((2, 2) if len(want) > 1 else (2, 0))


@pytest.mark.parametrize("needs", [(), *SUBSETS], ids=lambda some: "+".join(some) or "nothing")
def test_a_step_that_comes_again_is_planned(replayed: Replayed, needs: tuple[str, ...]) -> None:
    again(layer(needs), replayed)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("layout", ["nk", "kn"])
@pytest.mark.parametrize("of_codes", [True, False])
def test_every_kind_of_weights(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch, layout: str, dtype: torch.dtype, of_codes: bool
) -> None:
    if not of_codes:
        monkeypatch.setattr(fp8_products, "LEAST", 2000)  # dW of small matrices is in bf16
    again(layer(layout=layout, dtype=dtype), replayed, w_layout=layout)


@pytest.mark.parametrize(
    "needs", [(), BIASES, (*FOUR, *BIASES), ("hidden",), ("down_bias", "topk_weights")], ids="+".join
)
def test_biases(replayed: Replayed, needs: tuple[str, ...]) -> None:
    again(layer(needs, biased=True), replayed)


@pytest.mark.parametrize("how", [{"activation": "gelu"}, {"interleaved": True}, {"expected_rows": 3}], ids=str)
def test_other_layers_of_the_same_tensors_have_other_plans(replayed: Replayed, how: dict[str, Any]) -> None:
    inputs = layer()
    with long_way():
        plain, other = step(inputs), step(inputs, **how)
    for _ in range(3):
        assert same(step(inputs), plain)
        assert same(step(inputs, **how), other)
    assert replayed.counts() == (4, 4)
    bf16 = moe_mlp(**inputs)  # type: ignore[arg-type]
    assert not torch.equal(bf16, plain[0])
    assert torch.equal(moe_mlp(**inputs), bf16)  # type: ignore[arg-type]
    assert same(step(inputs), plain)


def test_out_is_written_by_a_plan(replayed: Replayed) -> None:
    inputs = layer(())
    with long_way():
        want = step(inputs)[0]
    for shape in ((T, H), (2, T // 2, H)):
        moved = inputs | {"hidden": inputs["hidden"].view(shape)}
        for _ in range(3):
            out = torch.empty(shape, dtype=torch.bfloat16)
            version = out._version
            assert step(moved, out=out)[0] is out
            assert out._version > version
            assert torch.equal(out.view(T, H), want)
        assert replayed.counts() == (2, 0)
    learning = inputs | {"hidden": inputs["hidden"].clone().requires_grad_()}
    with pytest.raises(InputError, match="a call that needs a gradient"):
        step(learning, out=torch.empty(T, H, dtype=torch.bfloat16))


def test_a_plan_is_of_a_bucket_whatever_the_number_of_tokens(replayed: Replayed) -> None:
    inputs = layer()
    tokens = {}
    for count in (24, 23, 30, 17, 45, 24, 12):
        hidden, ids, scores = routed(count)
        tokens[count] = inputs | {
            "hidden": hidden.requires_grad_(),
            "topk_ids": ids,
            "topk_weights": scores.requires_grad_(),
        }
    with long_way():
        want = {count: step(each) for count, each in tokens.items()}
    for count in (24, 23, 30, 17, 45, 24, 12):
        assert same(step(tokens[count]), want[count])
    assert replayed.rows == [rows for rows in (46, 60, 90, 48, 24) for _ in range(2)]  # 48 and 34 are buckets' first


def _through_data(w: torch.Tensor) -> None:
    w.data.copy_(w.data + 1)


def _uncounted(w: torch.Tensor) -> None:
    with torch.no_grad(), torch.autograd._unsafe_preserve_version_counter(w):  # as FSDP's all-gather
        w.add_(1)


def _swapped(w: torch.Tensor) -> None:
    w.data = w.data + 1


def _optimizer(w: torch.Tensor) -> None:
    w.grad = torch.ones_like(w)
    torch.optim.SGD([w], lr=0.5).step()
    w.grad = None


@pytest.mark.parametrize("write", [_through_data, _uncounted, _swapped, _optimizer])
def test_no_write_leaves_a_plan_with_old_weights(replayed: Replayed, write: Any) -> None:
    inputs = layer()
    before = step(inputs)
    step(inputs)
    for name in ("gate_up_weight", "down_weight"):
        write(inputs[name])
        fresh = inputs | {name: inputs[name].detach().clone().requires_grad_()}
        got = step(inputs)
        with long_way():
            want = step(fresh)
        assert same(got, want)
        assert not torch.equal(got[0], before[0])
        step(inputs)


def test_a_write_between_forward_and_backward_fails(replayed: Replayed) -> None:
    inputs = layer()
    step(inputs)
    y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
    assert replayed.counts() == (1, 0)
    with torch.no_grad():
        inputs["down_weight"].add_(1)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        y.sum().backward()


def test_weights_that_a_block_keeps_have_plans_too(replayed: Replayed, machine: Machine) -> None:
    inputs = layer()
    with long_way():
        want = step(inputs)
    for _ in range(2):  # the second block has codes of its own
        with reuse_fp8_weights():
            for _ in range(3):
                assert same(step(inputs), want)
            with torch.no_grad():
                assert torch.equal(moe_mlp(**inputs, **FP8), want[0])  # type: ignore[arg-type]
    assert replayed.counts() == (6, 5)
    machine.launches.clear()
    assert same(step(inputs), want)  # outside: weights are quantised again, both ways
    assert sum(launch.code.op is RowOp.QUANTIZE_BLOCKS for launch in machine.passes) == 4
    with reuse_fp8_weights():
        step(inputs)
        with torch.no_grad():
            inputs["down_weight"].add_(1)  # against the rule, but counted
        got, got_again = step(inputs), step(inputs)
        with torch.no_grad():
            inputs["gate_up_weight"].add_(1)
            y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
        last = step(inputs)
    with long_way():
        after = step(inputs)
    assert same(last, after)
    assert torch.equal(y, after[0])
    assert same(got, got_again)
    assert not torch.equal(got[0], want[0])
    with torch.no_grad():
        inputs["gate_up_weight"].sub_(1)
    with long_way():
        assert not torch.equal(step(inputs)[0], after[0])


def test_a_backward_after_the_block_reads_what_the_block_kept(replayed: Replayed, machine: Machine) -> None:
    inputs = layer()
    with long_way():
        want = step(inputs)
    with reuse_fp8_weights():
        step(inputs)
        y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
    machine.launches.clear()
    dout = torch.sin(torch.arange(y.numel())).view(y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, [tensor for tensor in inputs.values() if tensor.requires_grad], dout)
    assert same([y.detach(), *grads], want)
    assert all(launch.code.op is not RowOp.QUANTIZE_BLOCKS for launch in machine.passes)
    assert replayed.counts() == (1, 1)


def test_a_call_that_is_another_one_goes_the_long_way(replayed: Replayed) -> None:
    inputs = layer(("gate_up_weight",))
    with long_way():
        want = step(inputs)
    step(inputs)
    hidden, ids, weights = (inputs[name] for name in ("hidden", "topk_ids", "topk_weights"))
    shifted = torch.empty(T * H + 1, dtype=torch.bfloat16)[1:].view(T, H).copy_(hidden)  # not as well aligned
    for changed in (
        {"hidden": shifted},
        {"hidden": torch.cat([hidden, hidden], 1)[:, :H]},
        {"topk_ids": ids.int()},
        {"topk_weights": weights.double()},
        {"topk_weights": weights.t().contiguous().t()},
    ):
        assert same(step(inputs | changed), want)
    assert replayed.counts() == (0, 0)
    with torch.autocast("cpu", torch.bfloat16):
        assert same(step(inputs | {"hidden": hidden.float()}), [want[0].float(), want[1]])
        assert replayed.counts() == (0, 0)
        for _ in range(2):  # the first has a plan of the region's
            assert same(step(inputs), want)
        assert replayed.counts() == (1, 1)
    with torch.no_grad():
        assert torch.equal(step(inputs)[0], want[0])
    for less in ({"hidden": hidden[:-1]}, {"topk_ids": ids[:-1]}, {"topk_weights": weights[:-1]}):
        with pytest.raises(InputError, match="the tokens of hidden"):
            step(inputs | less)


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated:DeprecationWarning")  # torch's own
def test_what_fp8_refuses_is_refused_after_a_plan(replayed: Replayed) -> None:
    inputs = layer()
    step(inputs)
    low = Lora(torch.zeros(E, 8, H).bfloat16(), torch.zeros(E, 2 * I, 8).bfloat16())
    for how, says in (({"lora": (low, None)}, "lora"), ({"weights_on": "input"}, "weights_on")):
        with pytest.raises(InputError, match=f"precision='fp8' with {says}"):
            step(inputs, **how)  # type: ignore[arg-type]
    with pytest.raises(InputError, match="wanted 'fp8'"):
        moe_mlp(**inputs, precision="fp4")  # type: ignore[arg-type]
    with torch.autograd.forward_ad.dual_level():
        dual = torch.autograd.forward_ad.make_dual(inputs["hidden"].detach(), torch.ones(T, H).bfloat16())
        with pytest.raises(InputError, match="forward-mode tangent"):
            moe_mlp(**inputs | {"hidden": dual}, **FP8)  # type: ignore[arg-type]
    y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
    (dx,) = torch.autograd.grad(y.float().square().sum(), inputs["hidden"], create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        dx.sum().backward()


CHANGES: dict[str, Any] = {
    "wider": torch.Tensor.double,
    "narrower": torch.Tensor.half,
    "transposed": lambda t: t.mT.contiguous().mT,
    "shorter": lambda t: t[:-1],
}


@pytest.mark.parametrize("change", list(CHANGES))
@pytest.mark.parametrize("shape", [(T, H), (E, 2 * I, H), (E, H, I), (T, TOP_K), (T * TOP_K, 2 * I)])
def test_a_program_does_not_take_what_hooks_made_of_a_tensor(
    replayed: Replayed, machine: Machine, shape: tuple[int, ...], change: str
) -> None:
    """A kernel would read past its end, or take its bytes for other numbers."""
    inputs = layer()
    want = step(inputs)
    assert same(step(inputs), want)
    replayed.counts()
    changed: list[torch.Tensor] = []

    def unpack(t: torch.Tensor) -> torch.Tensor:
        if tuple(t.shape) != shape or not t.is_floating_point():
            return t
        changed.append(t)
        return CHANGES[change](t)  # type: ignore[no-any-return]

    hooked = torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack)
    if change == "transposed":
        with hooked:
            assert same(step(inputs), want)
    else:
        with pytest.raises((InputError, RuntimeError)), hooked:
            step(inputs)
    assert changed
    assert replayed.counts() == (1, 0)


def test_a_gradient_of_another_layout_or_snapshot_goes_the_long_way(replayed: Replayed) -> None:
    inputs = layer()
    want, leaves = step(inputs), [tensor for tensor in inputs.values() if tensor.requires_grad]
    dout = torch.sin(torch.arange(T * H)).view(T, H).bfloat16()
    odd = torch.cat([torch.zeros(1).bfloat16(), dout.flatten()])[1:].view(T, H)  # begins elsewhere
    for other in (odd, dout.T.contiguous().T):
        y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
        assert same(torch.autograd.grad(y, leaves, other), want[1:])
    assert replayed.counts() == (2, 0)
    y = moe_mlp(**inputs, **FP8)  # type: ignore[arg-type]
    reload()  # the bundles may be others
    assert same(torch.autograd.grad(y, leaves, dout), want[1:])
    assert replayed.counts()[1] == 0
    step(inputs)
    assert replayed.counts() == (0, 0)


@pytest.mark.parametrize(
    "without",
    [RowOp.QUANTIZE_BLOCKS, RowOp.QUANTIZE_COLUMNS, Op.DW],
)
def test_without_a_kernel_there_is_no_plan(
    replayed: Replayed, clean_places: Path, without: Op | RowOp, machine: Machine
) -> None:
    inputs = layer()
    want = step(inputs)
    published(clean_places, without)
    forwards = 0 if without is RowOp.QUANTIZE_BLOCKS else 2
    for _ in range(3):
        got = step(inputs)
        assert torch.equal(got[0], want[0])
        assert all(float((a - b).norm() / b.norm()) < 5e-2 for a, b in zip(got, want, strict=True))
    assert replayed.counts() == (forwards, 0)


@pytest.mark.parametrize("without", [RowOp.QUANTIZE_BOTH, RowOp.ACTIVATION_GRAD_CODES])
def test_without_a_kernel_of_both_codes_a_plan_has_others(
    replayed: Replayed, clean_places: Path, machine: Machine, without: RowOp
) -> None:
    published(clean_places, without)
    again(layer(), replayed)
    assert RowOp.ACTIVATION_GRAD in [launch.code.op for launch in machine.launches]


def test_a_plan_keeps_no_tensor(replayed: Replayed) -> None:
    inputs = layer()
    with reuse_fp8_weights():
        step(inputs)
        step(inputs)
    step(inputs)
    step(inputs)
    assert replayed.counts() == (2, 2)
    held = [weakref.ref(tensor) for tensor in inputs.values()]
    del inputs
    gc.collect()
    assert [ref() for ref in held] == [None] * len(held)


def test_threads_share_a_plan(replayed: Replayed) -> None:
    """Each has its own tokens, of one bucket."""
    inputs, wrong = layer(), list[object]()
    experts = {name: inputs[name] for name in ("gate_up_weight", "down_weight")}
    tokens = [dict(zip(("hidden", "topk_ids", "topk_weights"), routed(count), strict=True)) for count in (24, 26, 28)]
    with long_way():
        want = [step(of | experts) for of in tokens]
    step(tokens[0] | experts)

    def work(of: Inputs, wanted: list[torch.Tensor]) -> None:
        for _ in range(5):
            got = step(of | experts)
            if not same(got, wanted):
                wrong.append(got)

    threads = [threading.Thread(target=work, args=both) for both in zip(tokens, want, strict=True)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong


N, K = 256, 384
SIZES = [40, 0, 1, 7]  # rows of each expert
FORMS: dict[str, dict[str, Any]] = {
    "plain": {},
    "gathered": {"topk": TOP_K, "permute_x": True},
    "a slot each": {"topk": 1, "permute_x": True},
    "scattered": {"topk": TOP_K, "permute_y": True},
    "weighted": {"topk": TOP_K, "permute_x": True, "permute_y": True, "fuse_mul_post": True},
    "dX": {"dX_only": True},
    "dW": {"dW_only": True},
    "zero tail": {"zero_tail": True},
}
GRADIENT_PLANNED = {"plain", "a slot each", "dX", "dW", "zero tail"}


def product(form: dict[str, Any], needs: Sequence[str] = ("x", "w"), tokens: int = T, **how: Any) -> Inputs:
    """A product's tensors, by the names of ``grouped_gemm``."""
    g = torch.Generator().manual_seed(tokens)
    layout, dtype = how.get("layout", "nk"), how.get("dtype", torch.bfloat16)
    k = form.get("topk", 1)
    moves = "topk" in form
    M = tokens * k if moves else sum(SIZES) + 5
    w = (torch.randn(E, *((N, K) if layout == "nk" else (K, N)), generator=g) / K**0.5).to(dtype)
    inputs = {"x": torch.randn(tokens if form.get("permute_x") else M, K, generator=g).bfloat16(), "w": w}
    inputs["m_sizes"] = torch.tensor(SIZES, dtype=torch.int32)
    if moves:
        routing = sort_routing(torch.rand(tokens, E, generator=g).topk(k).indices, E)
        inputs |= {"gather_indices": routing.gather_indices, "m_sizes": routing.m_sizes}
    if form.get("fuse_mul_post"):
        inputs["topk_weights"] = torch.rand(tokens, k, generator=g)
    if how.get("biased"):
        inputs["bias"] = torch.randn(E, N, generator=g).bfloat16()
    for name in needs:
        inputs[name].requires_grad_()
    return inputs


def multiply(inputs: Inputs, form: dict[str, Any], **how: Any) -> list[torch.Tensor]:
    """y of the rows of experts, and all gradients."""
    leaves = [tensor for tensor in inputs.values() if tensor.requires_grad]
    y = grouped_gemm(**inputs, **form, **FP8, **how)  # type: ignore[arg-type]
    used = len(y) if "gather_indices" in inputs else sum(SIZES)
    if not y.requires_grad:
        return [y[:used]]
    dy = torch.sin(torch.arange(y.numel())).view(y.shape).to(y.dtype)
    grads = torch.autograd.grad(y, leaves, dy, allow_unused=True)
    pairs = [(leaf, grad) for leaf, grad in zip(leaves, grads, strict=True) if grad is not None]
    return [y.detach()[:used], *(grad[:used] if leaf is inputs["x"] else grad for leaf, grad in pairs)]


NEEDS = ((), ("x",), ("w",), ("x", "w"))


@pytest.mark.parametrize(
    ("name", "needs", "layout", "biased"),
    [
        *itertools.product(FORMS, NEEDS, ["nk"], [False]),
        *itertools.product(("plain", "weighted"), NEEDS[::3], ["nk", "kn"], [True]),
    ],
)
def test_a_product_that_comes_again_is_planned(
    replayed: Replayed, name: str, needs: tuple[str, ...], layout: str, biased: bool
) -> None:
    form = FORMS[name]
    inputs, how = product(form, needs, layout=layout, biased=biased), {"w_layout": layout}
    with long_way():
        want = multiply(inputs, form, **how)
    for _ in range(3):
        assert same(multiply(inputs, form, **how), want)
    wanted = set(needs) - ({"w"} if name == "dX" else {"x"} if name == "dW" else set())
    planned = bool(wanted) and (name in GRADIENT_PLANNED or (needs == ("w",) and name == "gathered"))
    assert replayed.counts() == (2, 2 * planned)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("of_codes", [True, False])
def test_a_product_of_every_kind_of_weights(
    replayed: Replayed, monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, of_codes: bool
) -> None:
    if not of_codes:
        monkeypatch.setattr(fp8_products, "LEAST", 2000)
    inputs = product({}, dtype=dtype)
    with long_way():
        want = multiply(inputs, {})
    for _ in range(2):
        assert same(multiply(inputs, {}), want)
    with reuse_fp8_weights():
        for _ in range(2):
            assert same(multiply(inputs, {}), want)
        with torch.no_grad():
            assert torch.equal(multiply(inputs, {})[0], want[0])
    assert replayed.counts() == (3, 2)
    _through_data(inputs["w"])
    got = multiply(inputs, {})
    with long_way():
        assert same(got, multiply(inputs, {}))
    assert not torch.equal(got[0], want[0])


def test_products_of_other_rows_and_sizes(replayed: Replayed) -> None:
    form = FORMS["a slot each"]
    calls = {count: product(form, tokens=count) for count in (24, 23, 30, 45)}
    w = calls[24]["w"]
    with long_way():
        want = {count: multiply(inputs | {"w": w}, form) for count, inputs in calls.items()}
    for count, inputs in calls.items():
        assert same(multiply(inputs | {"w": w}, form), want[count])
    assert replayed.counts() == (3, 3)  # they are of one bucket
    inputs = calls[24] | {"w": w}
    part = inputs | {"gather_indices": inputs["gather_indices"][:20]}  # not all slots: a plan of these sizes
    with long_way():
        want_part = grouped_gemm(**part, **form, **FP8).detach()  # type: ignore[arg-type]
    for _ in range(2):
        assert torch.equal(grouped_gemm(**part, **form, **FP8)[:20], want_part[:20])  # type: ignore[arg-type]
    assert replayed.counts() == (1, 0)
    wide = inputs | {"x": torch.cat([inputs["x"].detach()] * 2, 1)[:, :K]}
    assert torch.equal(multiply(wide, form)[0], want[24][0])
    assert replayed.counts() == (0, 0)


def test_a_products_out_is_written_by_a_plan(replayed: Replayed) -> None:
    inputs = product({}, ())
    with long_way():
        want = multiply(inputs, {})[0]
    for _ in range(3):
        out = torch.zeros(len(inputs["x"]), N, dtype=torch.bfloat16)
        version = out._version
        assert torch.equal(multiply(inputs, {}, out=out)[0], want)
        assert torch.equal(out[: sum(SIZES)], want)
        assert out._version > version
    assert replayed.counts() == (2, 0)
    square = inputs | {"w": torch.zeros(E, K, K).bfloat16()}
    multiply(square, {}, out=torch.zeros_like(inputs["x"]))
    with pytest.raises(InputError, match="out is in the memory of x"):
        multiply(square, {}, out=inputs["x"])


def test_a_product_that_is_another_one_goes_the_long_way(replayed: Replayed) -> None:
    inputs = product({})
    with long_way():
        want = multiply(inputs, {})
    multiply(inputs, {})
    odd = torch.cat([torch.zeros(1).bfloat16(), inputs["x"].detach().flatten()])[1:].view(-1, K).requires_grad_()
    for changed in (
        {"x": odd},
        {"w": inputs["w"].detach().view(-1, K).requires_grad_()},
    ):
        got = multiply(inputs | changed, {})
        for t, w in zip(got, want, strict=True):  # torch takes an x that is not aligned
            torch.testing.assert_close(t.view(w.shape), w, rtol=0.02, atol=0.02)
    assert replayed.counts() == (0, 0)
    multiply(inputs, {})
    replayed.counts()

    def unpack(t: torch.Tensor) -> torch.Tensor:
        return t[:-1] if t.dim() == 3 else t

    with torch.autograd.graph.saved_tensors_hooks(lambda t: t, unpack), pytest.raises(InputError, match="a hook"):
        multiply(inputs, {})
    assert replayed.counts() == (1, 0)
    y = grouped_gemm(**inputs, **FP8)  # type: ignore[arg-type]
    reload()  # the bundles may be others
    dy = torch.sin(torch.arange(y.numel())).view(y.shape).to(y.dtype)
    dx, dw = torch.autograd.grad(y, (inputs["x"], inputs["w"]), dy)
    assert same([dx[: sum(SIZES)], dw], want[1:])
    assert replayed.counts()[1] == 0
    with pytest.raises(InputError, match="wanted 'fp8'"):
        grouped_gemm(**inputs, precision="fp4")  # type: ignore[arg-type]
