"""The batch-invariant mode of calls: by the environment, by a block, of gradients, beside plans of the free choice."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable

import pytest
import torch
from host_gpu import PERSISTENT, Device, E, K, N

import pretuned
from pretuned.artifacts.errors import InputError, ProblemNotInBundle
from pretuned.artifacts.records import DType, Fusion, Op, RowOp
from pretuned.runtime import batch_invariant, explain, fingerprint, grouped_gemm, hooks, moe_mlp, preload, reload
from pretuned.runtime.dispatch.snapshot import snapshot
from pretuned.runtime.launch import program
from pretuned.runtime.settings import Invariance

T, TOPK, H, I = 9, 2, 16, 8  # noqa: E741
SILU = (Op.FORWARD, Fusion.SILU | Fusion.GATHER)
PLAIN = [(Op.FORWARD, Fusion.GATHER), (Op.FORWARD, Fusion.NONE)]


@pytest.fixture
def fused(device: Device, monkeypatch: pytest.MonkeyPatch) -> Device:
    """A GPU where silu in the epilogue is faster, which does not round h."""
    device.has(PERSISTENT, DType.BF16)
    device.there |= {SILU}
    device.measures({SILU: 1.0, PLAIN[0]: 1000.0, PLAIN[1]: 1000.0}, (2 * I, H))
    return device


def layer(**more: bool) -> Callable[[], torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    hidden, up, down = (
        (torch.randn(*shape, generator=generator) / 4).bfloat16() for shape in ((T, H), (E, 2 * I, H), (E, H, I))
    )
    hidden.requires_grad_(more.get("learns", False))
    ids = torch.randint(-1, E, (T, TOPK), generator=generator)
    weights = torch.rand(T, TOPK, generator=generator)
    return lambda: moe_mlp(hidden, up, down, ids, weights)


def ran(device: Device, call: Callable[[], torch.Tensor]) -> list[tuple[Op, Fusion]]:
    before = len(device.launched)
    call()
    return device.launched[before:]


def test_a_block_chooses_anew(fused: Device) -> None:
    """Whatever was written down of calls like it outside; and nothing of the block is used after it."""
    call = layer()
    for _ in range(3):
        assert ran(fused, call) == [SILU, PLAIN[1]]
        with batch_invariant():
            assert ran(fused, call) == PLAIN
            with pretuned.batch_invariant(False):
                assert ran(fused, call) == [SILU, PLAIN[1]]
            assert ran(fused, call) == PLAIN
    assert snapshot().plans
    assert hooks.in_blocks[Invariance()].plans.keys() == snapshot().plans.keys()


def test_the_environment_is_for_all_threads(fused: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "1")
    reload()
    assert snapshot().invariance == Invariance()
    results: list[object] = [ran(fused, layer())]
    thread = threading.Thread(target=lambda: results.append(ran(fused, layer())))
    thread.start()
    thread.join()
    assert results == [PLAIN, PLAIN]
    with batch_invariant():  # as it is
        assert snapshot() is hooks.snapshot
    with batch_invariant(False):
        assert ran(fused, layer()) == [SILU, PLAIN[1]]


def test_a_gradient_is_computed_as_its_forward_was(device: Device) -> None:
    """In another thread, where no block is, as autograd's is on CUDA; and in a block of another mode."""
    seen: list[Invariance | None] = []

    def backward(y: torch.Tensor) -> None:
        thread = threading.Thread(target=lambda: y.sum().backward())
        thread.start()
        thread.join()

    def unpacked(tensor: torch.Tensor) -> torch.Tensor:
        """Return a saved tensor as the backward unpacks it: within the mode in which it chooses kernels."""
        seen.append(snapshot().invariance)
        return tensor

    x = torch.randn(6, K, requires_grad=True)
    w, counts = torch.randn(E, N, K, requires_grad=True), torch.tensor([1, 0, 3, 2])
    with torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, unpacked):
        for _ in range(2):  # the second by a plan
            with batch_invariant():
                y = grouped_gemm(x, w, counts)
            backward(y)
            assert set(seen) == {Invariance()}
            seen.clear()
        y = grouped_gemm(x, w, counts)
        with batch_invariant():
            backward(y)
        assert set(seen) == {None}


def test_another_thread_and_a_task(clean_places: object) -> None:
    modes: list[Invariance | None] = []

    async def within(mode: bool) -> None:
        with batch_invariant(mode, quantize_x=mode):
            await asyncio.sleep(0)
            modes.append(snapshot().invariance)
            await asyncio.sleep(0)

    async def both() -> None:
        await asyncio.gather(within(True), within(False))

    with batch_invariant():
        thread = threading.Thread(target=lambda: modes.append(snapshot().invariance))
        thread.start()
        thread.join()
        asyncio.run(both())
        modes.append(snapshot().invariance)
    assert modes[:1] + modes[3:] == [None, Invariance()]
    assert sorted(map(str, modes[1:3])) == ["None", str(Invariance(quantize_x=True))]
    assert snapshot().invariance is None


def test_torch_multiplies_nothing(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its sums may depend on the batch: better an error. dW is of the whole batch anyway."""
    x, w = torch.randn(6, K, requires_grad=True), torch.randn(E, N, K, requires_grad=True)
    counts = torch.tensor([1, 0, 3, 2])
    device.there -= {(Op.DX, Fusion.NONE), (Op.DW, Fusion.NONE)}
    with batch_invariant():
        y = grouped_gemm(x, w, counts)
        with pytest.raises(ProblemNotInBundle, match=r"no kernel in a bundle runs dX of float32 weights \[4, 8, 12\]"):
            y.sum().backward()
        (dw,) = torch.autograd.grad(grouped_gemm(x.detach(), w, counts), w, torch.ones(6, N))
        assert dw.shape == w.shape
    y = grouped_gemm(x, w, counts)
    y.sum().backward()
    assert x.grad is not None
    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "1")
    device.there = {RowOp.COMBINE}
    with pytest.raises(ProblemNotInBundle, match=r"PRETUNED_BATCH_INVARIANT=0"):
        grouped_gemm(x, w, counts)


def test_rows_that_torch_gathers_are_multiplied_by_a_kernel(device: Device) -> None:
    """Copies are exact; a bias that torch adds is added to rounded numbers."""
    x, w, counts = torch.randn(3, K).T.contiguous().T, torch.randn(E, N, K), torch.tensor([1, 0, 3, 2])
    index = torch.tensor([3, 0, 5, 1, 4, 2])
    device.there -= {(op, fusion) for op in (Op.FORWARD, Op.DX) for fusion in (Fusion.GATHER, Fusion.SCATTER)}
    how = {"topk": 2, "gather_indices": index, "permute_x": True}
    wanted = grouped_gemm(x, w, counts, **how)  # type: ignore[arg-type]
    with batch_invariant():
        assert torch.equal(grouped_gemm(x, w, counts, **how), wanted)  # type: ignore[arg-type]
        with pytest.raises(ProblemNotInBundle, match="batch-invariant mode"):
            grouped_gemm(x, w, counts, bias=torch.randn(E, N), **how)  # type: ignore[arg-type]


def test_what_is_reported_it(device: Device) -> None:
    free = fingerprint(), str(explain(E=E, N=N, K=K, M=6, dtype="fp32"))
    with batch_invariant():
        explanation = explain(E=E, N=N, K=K, M=6, dtype="fp32")
        assert fingerprint() != free[0]
        assert preload(problems=[explanation.problem], tokens=range(1, 9)).count
        assert "mode: batch-invariant, fp8's x is never quantised" in str(explanation)
        assert "sums: fp32 by fma, 1 of K at a time" in str(explanation)
        assert explanation.to_dict()["order"] == explanation.order
        none = explain(E=E, N=N, K=K, M=6, dtype="fp16", sm=80)
        assert none.invariance
    with batch_invariant(quantize_x=True):
        assert explain(E=E, N=N, K=K, M=6, dtype="fp32").invariance == "batch-invariant, fp8's x is always quantised"
    assert (fingerprint(), str(explain(E=E, N=N, K=K, M=6, dtype="fp32"))) == free
    assert "mode: " not in free[1]
    assert "sums: " not in free[1]


@pytest.mark.parametrize("wrong", [{"enabled": 1}, {"quantize_x": None}])
def test_what_is_no_bool_is_refused(wrong: dict[str, object]) -> None:
    with pytest.raises(InputError, match=r"batch_invariant: \w+ is .*, wanted True or False"), batch_invariant(**wrong):  # type: ignore[arg-type]
        pass


def test_plans_of_the_free_choice_are_none_of_the_mode_s(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    x, w, counts = torch.randn(6, K), torch.randn(E, N, K), torch.tensor([1, 0, 3, 2])
    for _ in range(2):
        grouped_gemm(x, w, counts)
    (free,) = snapshot().plans.values()
    with batch_invariant():
        for _ in range(2):
            grouped_gemm(x, w, counts)
        (own,) = snapshot().plans.values()
    assert own is not free
    reload()
    assert not hooks.in_blocks
