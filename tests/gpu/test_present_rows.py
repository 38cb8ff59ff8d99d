"""Row kernels whose programs loop over the rows that are there. PRETUNED_BUNDLES is as for test_training.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator

import pytest
import torch

from pretuned.kernels import rowops as contract
from pretuned.kernels.activations import Activation
from pretuned.runtime import ExpertWeights, moe_mlp
from pretuned.runtime.dispatch import snapshot
from pretuned.runtime.ops import activation, gather_combine
from pretuned.runtime.ops.activation import Needs, RowActivation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

M, COLUMNS, TOPK = 60_000, 1536, 8  # more rows than programs that a GPU holds at once
SILU = RowActivation(Activation("silu"), True, False)
ANY_NUMBER = 1 << 20  # waves: a program for each tile, as without a loop


@pytest.fixture(autouse=True)
def kept_as_they_were() -> Iterator[None]:
    yield
    snapshot.snapshot().passes.clear()
    snapshot.snapshot().plans.clear()
    snapshot.snapshot().launchers.clear()


def with_waves(
    waves: int, monkeypatch: pytest.MonkeyPatch, call: Callable[[], list[torch.Tensor]]
) -> list[torch.Tensor]:
    """Return the result of a call whose launches have at most so many waves of programs."""
    monkeypatch.setattr(contract, "WAVES", waves)
    for table in (snapshot.snapshot().passes, snapshot.snapshot().plans, snapshot.snapshot().launchers):
        table.clear()
    return call()


@pytest.mark.parametrize("used", [0, 1, 7777, M])
def test_bits_do_not_depend_on_how_many_programs_there_are(used: int, monkeypatch: pytest.MonkeyPatch) -> None:
    generator = torch.Generator("cuda").manual_seed(used)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, device="cuda", generator=generator).bfloat16()

    h, da, x = random(M, 2 * COLUMNS), random(M, COLUMNS), random(M // TOPK, COLUMNS)
    h[used:], da[used:] = float("nan"), float("nan")
    weights, index = torch.rand(M, device="cuda"), torch.randperm(M, device="cuda")
    places = torch.full_like(index, -1).index_copy_(0, index[:used], torch.arange(used, device="cuda")).int()
    bounds = torch.tensor([0, used], device="cuda", dtype=torch.int32)

    def call() -> list[torch.Tensor]:
        a = activation.forward(h, SILU, bounds)
        needs = Needs(True, True, True)
        dh, b, dweights = activation.gradient(h, da, SILU, needs, weights=weights, index=index, bounds=bounds)
        rows, out = gather_combine.gather(x, index, TOPK, bounds), gather_combine.combine(da, places, TOPK, weights)
        assert dh is not None
        assert b is not None
        assert dweights is not None
        assert not dweights[index[used:]].any()
        return [a[:used], dh[:used], b[:used], rows[:used], dweights, out]

    few, many = (with_waves(waves, monkeypatch, call) for waves in (1, ANY_NUMBER))
    assert all(torch.equal(tensor, other) for tensor, other in zip(few, many, strict=True))
    assert all(tensor.isfinite().all() for tensor in few)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel", "mxfp4"])
@pytest.mark.parametrize("present", [0.0, 0.125, 1.0])
def test_a_quantised_layer_has_the_same_bits(format: str, present: float, monkeypatch: pytest.MonkeyPatch) -> None:
    T, E, H, I = 6000, 16, 1024, 512  # noqa: E741
    generator = torch.Generator("cuda").manual_seed(3)
    up, down = (
        torch.randn(E, *shape, device="cuda", generator=generator).bfloat16() * shape[1] ** -0.5
        for shape in ((2 * I, H), (H, I))
    )
    packed = [ExpertWeights.quantize(matrix, format).prepare() for matrix in (up, down)]
    hidden = torch.randn(T, H, device="cuda", generator=generator).bfloat16()
    ids = torch.rand(T, E, device="cuda", generator=generator).topk(TOPK).indices.int()
    ids[torch.rand(T, TOPK, device="cuda", generator=generator) >= present] = -1
    weights = torch.rand(T, TOPK, device="cuda", generator=generator)

    def call() -> list[torch.Tensor]:
        with torch.no_grad():
            return [moe_mlp(hidden, *packed, ids, weights, expected_rows=int(T * TOPK * present))]

    few, many = (with_waves(waves, monkeypatch, call)[0] for waves in (1, ANY_NUMBER))
    assert torch.equal(few, many)
    assert few.isfinite().all()
    assert not few[(ids < 0).all(1)].any()
