"""The routing weights of a layer: passes read them as they are, in float32 or in the layer's own dtype."""

from __future__ import annotations

import pytest
import torch

from pretuned.kernels import passes as words
from pretuned.runtime import activation, layer, passes, tokens


class Noted:
    """A pass that notes what it is launched with."""

    def __init__(self, revision: int) -> None:
        self.revision = revision
        self.numbers: tuple[int, ...] = ()
        self.pointers: tuple[int, ...] = ()

    def __call__(self, rows: int, columns: int, pointers: tuple[int, ...], numbers: tuple[int, ...]) -> None:
        self.pointers, self.numbers = pointers, numbers


@pytest.mark.parametrize("revision", [words.NARROW_REVISION - 1, words.NARROW_REVISION])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("kind", [torch.bfloat16, torch.float32])
def test_routing_weights_are_read_as_they_are_where_the_kernel_can(
    monkeypatch: pytest.MonkeyPatch, kind: torch.dtype, biased: bool, revision: int
) -> None:
    h, da, weights = torch.randn(4, 6).bfloat16(), torch.randn(4, 3).bfloat16(), torch.rand(4).to(kind)
    noted = Noted(revision)
    monkeypatch.setattr(passes, "for_rows", lambda *_, **__: noted)
    act, needs = activation.Activation("silu", True, False), activation.Needs(True, True, True)
    index = torch.arange(4)
    _, _, dweights = activation.gradient(h, da, act, needs, weights=weights, index=index, narrow=not biased)
    narrow = kind is torch.bfloat16 and revision == words.NARROW_REVISION
    assert dweights is not None
    assert dweights.dtype is (torch.bfloat16 if narrow and not biased else torch.float32)
    assert bool(noted.numbers[-1] & words.NARROW) == narrow
    assert bool(noted.numbers[-1] & words.NARROW_DWEIGHTS) == (narrow and not biased)
    assert noted.numbers[-1] & words.WEIGHTED
    assert (noted.pointers[2] == weights.data_ptr()) == (narrow or kind is torch.float32)
    y, one = torch.randn(4, 3).bfloat16(), torch.zeros(4, dtype=torch.int32)
    tokens.combine(y, one, 2, weights, one, torch.randn(1, 3).bfloat16() if biased else None)
    narrow = kind is torch.bfloat16
    assert noted.numbers[-1] == words.WEIGHTED | words.NARROW * narrow | words.BIASED * biased


def test_routing_weights_of_another_kind_are_widened() -> None:
    x, weights = torch.zeros(1, dtype=torch.bfloat16), torch.rand(3, 2)
    for kind, read in [(torch.bfloat16,) * 2, (torch.float32,) * 2, (torch.float16, torch.float32)]:
        assert layer.slot_weights(weights.to(kind), x).dtype is read
    assert layer.slot_weights(weights.T, x).tolist() == weights.T.flatten().tolist()
    assert layer.slot_weights(weights.half(), x.double()).dtype is torch.float64
