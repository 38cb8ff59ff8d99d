"""The guard of a repeated call: what it lets through, and every difference that it must not."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from processes import copy_of

from pretuned.runtime.launch import program

X = torch.zeros(16, 64, dtype=torch.bfloat16)
W = torch.zeros(4, 32, 64, dtype=torch.bfloat16)
SIZES = torch.zeros(4, dtype=torch.int32)

pytestmark = pytest.mark.skipif(program._TensorGuards is None, reason="this torch has no guards")


def guard(x: torch.Tensor = X, w: torch.Tensor = W, m_sizes: torch.Tensor = SIZES) -> program.Guard:
    guard = program.guard(x, w, m_sizes)
    assert guard is not None
    return guard


def test_it_lets_the_same_kind_through() -> None:
    same = guard()
    assert same(X, W, SIZES)
    assert same(X.clone(), W.clone(), SIZES.clone())
    with torch.no_grad():
        assert same(X, W, SIZES)


@pytest.mark.parametrize(
    ("x", "w", "m_sizes"),
    [
        (X[:15], W, SIZES),
        (X[:, :63], W, SIZES),
        (torch.zeros(16, 72, dtype=X.dtype)[:, :64], W, SIZES),
        (X.half(), W, SIZES),
        (X.t().contiguous().t(), W, SIZES),
        (X[None], W, SIZES),
        (X[0], W, SIZES),
        (X.to("meta"), W, SIZES),
        (X.clone().requires_grad_(), W, SIZES),
        (X, W.clone().requires_grad_(), SIZES),
        (X, torch.nn.Parameter(W, requires_grad=False), SIZES),
        (X, W[:3], SIZES),
        (X, W[:, :31], SIZES),
        (X, W.view(-1, 64), SIZES),
        (X, W.view(4, 64, 32), SIZES),
        (X, torch.zeros(4, 40, 64, dtype=W.dtype)[:, :32], SIZES),
        (X, W[:1].expand(4, 32, 64), SIZES),
        (X, W.half(), SIZES),
        (X, W.to("meta"), SIZES),
        (X, W.to_sparse(), SIZES),
        (X, W, SIZES.long()),
        (X, W, SIZES[:3]),
        (X, W, torch.zeros(8, dtype=torch.int32)[::2]),
        (X, W, SIZES.to("meta")),
        (X, W, None),
        (X, W, 3),
    ],
)
def test_any_difference_is_seen(x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor) -> None:
    assert guard()(X, W, SIZES)
    assert not guard()(x, w, m_sizes)


def test_inference_mode_is_another_kind() -> None:
    with torch.inference_mode():
        inside = guard()
        assert inside(X, W, SIZES)
        assert not guard()(torch.zeros_like(X), W, SIZES)
    assert not inside(X, W, SIZES)


def test_a_guard_of_four() -> None:
    out = torch.zeros(16, 32, dtype=X.dtype)
    same = program.guard(X, W, SIZES, out)
    assert same is not None
    assert same(X, W, SIZES, out.clone())
    for other in (out[:15], out.half(), out.t().contiguous().t(), out.clone().requires_grad_(), None, 3):
        assert not same(X, W, SIZES, other)


def test_a_torch_without_guards_goes_without(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object, **__: object) -> Callable[..., bool]:
        raise TypeError

    for entry in (None, refuses):
        monkeypatch.setattr(torch._C._dynamo.guards, "TensorGuards", entry)
        assert copy_of(program).guard(X, W, SIZES) is None
