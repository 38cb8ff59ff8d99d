"""Senseless calls are refused, and the message says which and why."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Fusion, Op, Problem
from pretuned.kernels.spec import Config
from pretuned.runtime import grouped_gemm, grouped_gemm_dW, grouped_gemm_dX, register_tuner, reload
from pretuned.runtime.api import grouped_gemm as api
from pretuned.runtime.check import call as check_call
from pretuned.runtime.check.call import Form, form_of

T, TOPK, E, N, K = 4, 2, 3, 6, 8
M = T * TOPK
CONFIG = Config(64, 64, 64, 4, 3)


def arguments() -> dict[str, Any]:
    return {
        "x": torch.ones(T, K),
        "w": torch.ones(E, N, K),
        "m_sizes": torch.tensor([3, 0, 5]),
        "topk": TOPK,
        "gather_indices": torch.arange(M),
        "permute_x": True,
    }


REFUSED: list[tuple[dict[str, Any], str]] = [
    ({"gather_indices": None}, "permute_x without gather_indices"),
    ({"gather_indices": None, "permute_x": False, "permute_y": True}, "permute_y without gather_indices"),
    ({"topk_weights": torch.ones(T, TOPK)}, "topk_weights without fuse_mul_post"),
    ({"fuse_mul_post": True}, "fuse_mul_post=True without topk_weights"),
    ({"gather_indices": None, "permute_x": False, "fuse_mul_post": True}, "fuse_mul_post without gather_indices"),
    ({"is_first_gemm": False}, "permute_x with is_first_gemm=False"),
    ({"dX_only": True, "dW_only": True}, "exclude each other"),
    ({"autotune": True, "kernel_config_fwd": CONFIG}, "autotune with a kernel_config"),
    (
        {"kernel_config_fwd": {"BLOCK_M": 64}},
        "kernel_config_fwd is a dict, wanted a pretuned.kernels.spec.Config",
    ),
    ({"kernel_config_bwd_dW": 3}, "kernel_config_bwd_dW is a int"),
    ({"topk": 0}, "topk is 0"),
    ({"topk": True}, "topk is True"),
    ({"w_layout": "mk"}, "w_layout is 'mk'"),
    ({"m_sizes": torch.ones(E, 2, dtype=torch.int32)}, r"m_sizes is of shape \[3, 2\], wanted \[E\]"),
    ({"m_sizes": torch.ones(E)}, r"m_sizes is torch.float32"),
    ({"gather_indices": torch.ones(M)}, "gather_indices is torch.float32"),
    ({"gather_indices": torch.zeros(T, TOPK, dtype=torch.int64)}, r"of shape \[4, 2\], wanted int32 or int64 \[M\]"),
    ({"permute_x": False, "permute_y": True}, "x is of 4 rows"),
    ({"topk_weights": torch.ones(M), "fuse_mul_post": True}, r"topk_weights is of shape \[8\]"),
    ({"topk_weights": torch.ones(T, 3), "fuse_mul_post": True}, "pass topk=3"),
    ({"topk_weights": torch.ones(T + 1, TOPK), "fuse_mul_post": True}, "with T=4, x's rows"),
    ({"topk_weights": torch.ones(T, TOPK).int(), "fuse_mul_post": True}, "topk_weights is torch.int32"),
    ({"topk_weights": torch.ones(T, TOPK, device="meta"), "fuse_mul_post": True}, "topk_weights is on meta"),
    ({"bias": torch.ones(E, K)}, r"bias is of shape \[3, 8\], wanted \[E, N\] = \[3, 6\]"),
    ({"bias": torch.ones(E, N).double()}, "bias is torch.float64, wanted x's dtype"),
    ({"x": torch.ones(3, K), "gather_indices": torch.arange(3), "permute_x": False, "permute_y": True}, "that tell T"),
    ({"x": torch.ones(T, K, requires_grad=True), "out": torch.ones(M, N)}, "out with an input that requires grad"),
    ({"out": torch.ones(T, N)}, r"out is of shape \[4, 6\], wanted \[M, N\] = \[8, 6\]"),
    ({"w": "w"}, "w is a str"),
]


@pytest.mark.parametrize(("how", "says"), REFUSED, ids=[says for _, says in REFUSED])
def test_refusals(how: dict[str, Any], says: str) -> None:
    grouped_gemm(**arguments())
    with pytest.raises(InputError, match=says):
        grouped_gemm(**{**arguments(), **how})


@pytest.mark.parametrize(
    ("how", "says"),
    [
        ({"dy": torch.ones(M + 1, N)}, "dy is of 9 rows, wanted y's 8"),
        ({"dy": torch.ones(M, N).double()}, "dy is torch.float64"),
        ({"dy": torch.ones(M)}, "dy is of shape"),
        ({"dy": None}, "dy is a NoneType"),
        ({"dy": torch.tensor(1.0)}, r"dy is of shape \[\]"),
        ({"m_sizes": torch.tensor(3)}, r"m_sizes is of shape \[\], wanted \[E\]"),
        ({"gather_indices": [0, 1]}, "gather_indices is a list, wanted a torch.Tensor"),
    ],
)
def test_refusals_of_the_gradients(how: dict[str, Any], says: str) -> None:
    inputs = {**arguments(), "dy": torch.ones(M, N), **how}
    x, w = inputs.pop("x"), inputs.pop("w")
    with pytest.raises(InputError, match=says):
        grouped_gemm_dX(w=w, **inputs)
    with pytest.raises(InputError, match=says):
        grouped_gemm_dW(x=x, **inputs)


def test_out_tells_how_many_tokens_there_are() -> None:
    inputs = {**arguments(), "x": torch.ones(3, K), "permute_x": False, "permute_y": True}
    inputs |= {"gather_indices": torch.tensor([7, 0, 2]), "m_sizes": torch.tensor([1, 1, 1])}
    out = torch.full((M, N), 5.0)
    assert grouped_gemm(**inputs, out=out) is out
    assert out.sum(1).nonzero().flatten().tolist() == [0, 2, 7]
    assert (out[[0, 2, 7]] == K).all()


def test_out_keeps_its_tail_unless_told() -> None:
    x, w, out = torch.ones(5, K), torch.ones(E, N, K), torch.full((5, N), 3.0)
    grouped_gemm(x, w, torch.tensor([1, 0, 2]), bias=torch.ones(E, N), out=out)
    assert out[:, 0].tolist() == [9, 9, 9, 3, 3]
    grouped_gemm(x, w, torch.tensor([1, 0, 2]), bias=torch.ones(E, N), out=out, zero_tail=True)
    assert out[:, 0].tolist() == [9, 9, 9, 0, 0]


@pytest.fixture
def no_tuner(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.delenv("PRETUNED_DISABLE_AUTOTUNE", raising=False)
    reload()
    yield
    register_tuner(None)
    monkeypatch.undo()
    reload()


@pytest.mark.usefixtures("no_tuner")
def test_autotune_needs_a_tuner(monkeypatch: pytest.MonkeyPatch) -> None:
    register_tuner(None)
    with pytest.raises(InputError, match=r"import pretuned\.aot"):
        grouped_gemm(**arguments(), autotune=True)
    asked: list[object] = []
    register_tuner(lambda *args: asked.append(args))
    y = grouped_gemm(**arguments(), autotune=True)
    assert torch.equal(y, grouped_gemm(**arguments()))
    assert not asked  # there is nothing to tune where there is no GPU
    register_tuner(None)
    monkeypatch.setenv("PRETUNED_DISABLE_AUTOTUNE", "1")
    reload()
    assert torch.equal(grouped_gemm(**arguments(), autotune=True), y)


def test_the_problems_of_a_call() -> None:
    inputs = arguments()
    x, w, m_sizes, index = inputs["x"].bfloat16(), inputs["w"].bfloat16(), inputs["m_sizes"], inputs["gather_indices"]
    weights = torch.ones(T, TOPK)

    def problems(x: torch.Tensor, w: torch.Tensor, form: Form, **more: Any) -> list[tuple[Op, int, int, Fusion]]:
        call, _ = check_call.check(x, w, m_sizes, form, index, more.get("weights"), "weights" in more)
        problems: tuple[Problem, ...] = api.problems(call, x)
        return [(problem.op, problem.N, problem.K, problem.fusion) for problem in problems]

    first = form_of(w_layout="nk", topk=TOPK, permute_x=True, permute_y=False)
    assert problems(x, w, first) == [
        (Op.FORWARD, N, K, Fusion.GATHER),
        (Op.DX, N, K, Fusion.SCATTER),
        (Op.DW, N, K, Fusion.NONE),
    ]
    second = form_of(w_layout="kn", topk=TOPK, permute_x=False, permute_y=True)
    assert problems(torch.ones(M, K).bfloat16(), w.mT.contiguous(), second, weights=weights) == [
        (Op.FORWARD, N, K, Fusion.SCATTER),
        (Op.DX, N, K, Fusion.SCATTER),
        (Op.DW, K, N, Fusion.NONE),
    ]
