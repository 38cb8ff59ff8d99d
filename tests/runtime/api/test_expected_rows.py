"""``expected_rows`` chooses the kernels of a call, and of its gradients, and nothing else."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from emulated_driver import H200
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import ALL, PASSES, PERSISTENT, Device, Replay, replays, specs, warnings

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Choice, DType, Fusion, Op, Problem, RowOp, Source
from pretuned.kernels import rowops as contract
from pretuned.kernels.spec import Config, Schedule, Spec
from pretuned.runtime import Lora, explain, grouped_gemm, hooks, moe_mlp, reload, sort_routing
from pretuned.runtime.dispatch import decide
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch import program

E, H, I, K = 4, 12, 8, 2  # noqa: E741  (I: the expert's width)
MANY, LARGE_FROM = 1024, 128  # rows
LARGE = Config(64, 64, 64, 4, 2)
SIZES = ((2 * I, H), (H, I), (I, H), (4, H), (2 * I, 4), (4, I), (H, 4))  # N, K; those of a rank of 4, too


def publish(device: Device, small: Config = PERSISTENT, gather_ns: int = 1000) -> None:
    """A bundle that has measured ``small`` for fewer than LARGE_FROM rows, and LARGE for more.

    ``gather_ns``: the time of the products that gather rows; that of the others is 1000.
    """
    device.publish(_bundle(small, gather_ns))


@functools.cache
def _bundle(small: Config, gather_ns: int) -> bytes:
    listed = [spec for config in (small, LARGE) for spec in specs({*ALL, *PASSES}, DType.FP32, config)]
    listed = list(dict.fromkeys(listed))
    choices: dict[Problem, list[Choice]] = {}
    for at, (spec, _) in enumerate(listed):
        if not isinstance(spec, Spec) or spec.alignment != 16:
            continue
        for N, reduction in SIZES:
            problem = Problem(spec.op, DType.FP32, E, N, reduction, spec.layout, spec.fusion)
            buckets = [1 << power for power in range(14)]
            some = [each for each in buckets if (each >= LARGE_FROM) == (spec.config == LARGE)]
            time = gather_ns if Fusion.GATHER in spec.fusion else 1000
            choices.setdefault(problem, []).extend(Choice(each, at, Source.MEASURED, time, gpu=0) for each in some)
    return encode(bundle_of([variant_and_code(spec, block=block) for spec, block in listed], choices, gpus=[H200]))


@pytest.fixture(autouse=True)
def published(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated GPU has the bundle, and computes in float32."""
    monkeypatch.setattr(program, "KINDS", (torch.float32,))
    publish(device)


@pytest.fixture
def replayed(published: None) -> Iterator[list[Replay]]:
    """The programs of plans that ran."""
    taken: list[Replay] = []
    with replays(taken.append):
        yield taken


def blocks(device: Device) -> list[int]:
    """block_m of the products that were launched since this was last asked."""
    heights = [dict(launch.code.config)["block_m"] for launch in device.products]
    device.launches.clear()
    return heights


def product(rows: int, *, gathers: bool = False, low: bool = False) -> Callable[..., list[torch.Tensor]]:
    """A call of ``grouped_gemm`` on so many rows, as a function of its hint: y and the gradients."""
    generator = torch.Generator().manual_seed(rows)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_()

    tokens = rows // K
    routing = sort_routing(torch.randint(0, E, (tokens, K), generator=generator), E)
    x, w, adapter = random(tokens if gathers else rows, H), random(E, I, H), None
    if low:
        adapter = Lora(random(E, 4, H), random(E, I, 4), 0.5)

    def call(**how: Any) -> list[torch.Tensor]:
        index = routing.gather_indices if gathers else None
        y = grouped_gemm(x, w, routing.m_sizes, K, index, permute_x=gathers, lora=adapter, **how)
        asked = [x, w, *(adapter[:2] if adapter else ())]
        return [y, *torch.autograd.grad(y, asked, torch.linspace(-1, 1, y.numel()).view_as(y))]

    return call


def layer(tokens: int, *, there: int = E, grad: bool = True, low: bool = False) -> Callable[..., list[torch.Tensor]]:
    """A call of ``moe_mlp`` as a function of its hint: out and the gradients. Ids from ``there`` on are -1."""
    generator = torch.Generator().manual_seed(tokens)

    def random(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator).requires_grad_(grad)

    hidden, up, down, weights = random(tokens, H), random(E, 2 * I, H), random(E, H, I), random(tokens, K)
    ids = torch.randint(0, E, (tokens, K), generator=generator)
    ids = torch.where(ids < there, ids, -1)
    lora = None
    if low:
        lora = Lora(random(E, 4, H), random(E, 2 * I, 4), 0.5), Lora(random(E, 4, I), random(E, H, 4), 0.5)

    def call(**how: Any) -> list[torch.Tensor]:
        out = moe_mlp(hidden, up, down, ids, weights, lora=lora, **how)
        if not grad:
            return [out]
        asked = [hidden, up, down, weights, *(each for pair in lora or () for each in pair[:2])]
        return [out, *torch.autograd.grad(out, asked, torch.linspace(-1, 1, out.numel()).view_as(out))]

    return call


CALLS = {
    "product": lambda: product(256),
    "gathered": lambda: product(256, gathers=True),
    "adapted": lambda: product(256, low=True),
    "layer": lambda: layer(128),
    "adapted layer": lambda: layer(128, low=True),
}


@pytest.mark.parametrize("name", CALLS)
def test_the_forward_and_all_gradients_run_the_kernels_of_the_hint(device: Device, name: str) -> None:
    call = CALLS[name]()
    results = [call(**how) for how in ({}, {"expected_rows": 16}, {"expected_rows": 256})]
    device.launches.clear()
    for how, block_m in (
        ({}, 64),
        ({"expected_rows": 16}, 16),
        ({"expected_rows": 256}, 64),
        ({"expected_rows": 0}, 16),
    ):
        reload()
        for _ in range(3):  # the long way, and as a plan
            for got, want in zip(call(**how), results[0], strict=True):
                torch.testing.assert_close(got, want)
            launched = blocks(device)
            assert launched
            assert set(launched) == {block_m}


@pytest.mark.skipif(program._TensorGuards is None, reason="this torch has no guards")
@pytest.mark.parametrize("name", CALLS)
def test_a_plan_of_another_hint_is_not_used(device: Device, replayed: list[Replay], name: str) -> None:
    call = CALLS[name]()
    order = [None, 16, 256, 17, None, 15, 200, 16]  # 15 to 17 are one bucket, 200 and 256 another
    for hint in order:
        call(expected_rows=hint)
        assert set(blocks(device)) == {16 if hint in (15, 16, 17) else 64}
    assert replayed
    keys = [key for key in dispatch_snapshot.snapshot().plans if key[0] != "lora"]
    assert len(keys) == 3


@pytest.mark.parametrize("config", [PERSISTENT, Config(16, 64, 64, 4, 2, schedule=Schedule.TILE)])
@pytest.mark.parametrize("call", [lambda: product(MANY), lambda: layer(MANY // K)], ids=["product", "layer"])
def test_more_rows_than_expected_are_all_computed(
    device: Device, call: Callable[[], Callable[..., list[torch.Tensor]]], config: Config
) -> None:
    """Buffers, grids and counts are of all rows."""
    publish(device, config)
    ran = call()
    want = ran()
    grids: list[list[tuple[int, int]]] = []
    for hint in (16, 16, 0):
        device.launches.clear()
        for got, expected in zip(ran(expected_rows=hint), want, strict=True):
            torch.testing.assert_close(got, expected)
        rows = [product for product in device.products if product.code.op is not Op.DW]
        assert {product.words["M"] for product in device.products} == {MANY}
        grids.append([(row.words["N"], row.grid) for row in rows])
        if config.schedule is Schedule.TILE:
            assert all(grid >= MANY // 16 for _, grid in grids[-1])
    assert grids[0] == grids[1] == grids[2]


def test_fewer_rows_than_expected_are_right(device: Device) -> None:
    call = layer(128, there=1)
    want = call()
    for hint in (256, 256, 16, 16):
        for got, expected in zip(call(expected_rows=hint), want, strict=True):
            torch.testing.assert_close(got, expected)


def test_a_plan_is_not_of_another_number_of_tokens_with_the_same_hint(device: Device, replayed: list[Replay]) -> None:
    """All rows of a single token are its own: its program gathers none."""
    publish(device, gather_ns=1_000_000)
    weights = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    for _ in range(2):
        for tokens in (1, 2, 3, 64):
            hidden, share = torch.randn(tokens, H), torch.rand(tokens, K)
            ids = torch.stack([torch.arange(tokens) % E, (torch.arange(tokens) + 1) % E], 1)
            got = moe_mlp(hidden, *weights, ids, share, expected_rows=2)
            torch.testing.assert_close(got, moe_mlp(hidden, *weights, ids, share))
    assert replayed


def test_rows_of_few_slots_are_gathered_one_by_one(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """To read each row of x once takes a launch more, and pays where most slots of a token are there."""
    publish(device, gather_ns=1_000_000)
    monkeypatch.setattr(contract, "BY_TOKEN_LEAST_BYTES", 1)
    call = layer(128, there=1, grad=False)
    want = call()
    for hint, launches in ((None, 2), (64, 1), (64, 1), (128, 2), (256, 2)):
        device.launches.clear()
        assert torch.equal(call(expected_rows=hint)[0], want[0])
        assert device.passed.count(RowOp.GATHER) == launches


@pytest.mark.parametrize("hint", [-1, 257, True, 1.0, "16", torch.tensor(16)])
def test_a_hint_that_is_none_is_refused(hint: Any) -> None:
    for call, what in ((product(256), "grouped_gemm: .*M=256"), (layer(128), "moe_mlp: .*T\\*k=256")):
        call(expected_rows=16)
        for _ in range(2):
            with pytest.raises(InputError, match=what) as error:
                call(expected_rows=hint)
            assert "expected_rows is" in str(error.value)


def test_rows_of_no_expert_are_zeroed_for_a_gradient_alone(device: Device) -> None:
    """In a layer that is made of calls: with most experts on other ranks, zeroing them takes as long as the rest."""
    hidden, up, down = torch.randn(64, H), torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    ids, weights, results = torch.randint(-6 * E, E, (64, K)), torch.rand(64, K), []
    zeroed: list[int] = []
    moe_mlp(hidden, up, down, ids, weights, weights_on="input")
    for grad in (False, True):
        with torch.set_grad_enabled(grad), torch.autograd.profiler.profile() as ran:
            results.append(moe_mlp(hidden, up, down, ids, weights, weights_on="input"))
        zeroed.append(sum(event.name == "aten::zero_" for event in ran.function_events))
    assert zeroed[1] == zeroed[0] + 1
    assert torch.equal(*results)


def test_an_adapter_with_dropout_is_of_its_kernels_too(device: Device) -> None:
    low = Lora(torch.randn(E, 4, H), torch.randn(E, I, 4), 0.5, dropout=0.5)
    routing = sort_routing(torch.randint(0, E, (128, K)), E)
    for gathers in (False, True):
        x, index = torch.randn(128 if gathers else 256, H), routing.gather_indices if gathers else None
        for hint, block_m in ((None, 64), (16, 16)):
            grouped_gemm(
                x, torch.randn(E, I, H), routing.m_sizes, K, index, permute_x=gathers, lora=low, expected_rows=hint
            )
            launched = blocks(device)
            assert len(launched) == 3
            assert set(launched) == {block_m}


def test_a_tuner_is_asked_for_the_hints_bucket(device: Device) -> None:
    asked: list[int] = []
    hooks.register_tuner(lambda problems, M, at: asked.append(M))
    try:
        x, w, m_sizes = torch.randn(256, H), torch.randn(E, I, H), torch.full((E,), 64, dtype=torch.int32)
        for hint in (None, 17):
            grouped_gemm(x, w, m_sizes, autotune=True, expected_rows=hint)
        assert asked == [256, 16]
        assert blocks(device) == [64, 16]
    finally:
        hooks.register_tuner(None)


def test_the_operators_carry_it(device: Device) -> None:
    """A compiled graph calls the operators: forward and gradient choose by the hint."""
    from pretuned.runtime.api import torch_library

    assert torch_library.traced is not None
    routing = sort_routing(torch.randint(0, E, (128, K)), E)
    x, w = torch.randn(256, H, requires_grad=True), torch.randn(E, I, H, requires_grad=True)
    rest = routing.m_sizes, None, None, None, 1, False, False, False, "nk", True
    parts = None, "", None, None, None, None, None
    low = torch.randn(E, 4, H, requires_grad=True), torch.randn(E, I, 4, requires_grad=True), 0.5
    for hint, block_m in ((None, 64), (16, 16), (256, 64)):
        more = () if hint is None else (hint,)
        y = torch.ops.pretuned.grouped_gemm(x, w, *rest, False, False, *more)
        torch.autograd.grad(y, (x, w), torch.ones_like(y))
        assert set(blocks(device)) == {block_m}
        y, _ = torch.ops.pretuned.grouped_gemm_lora(x, *low, w, *parts[1:], *rest, *more)
        torch.autograd.grad(y, (x, w, *low[:2]), torch.ones_like(y))
        assert set(blocks(device)) == {block_m}
    with pytest.raises(InputError, match="M=256"):
        torch.ops.pretuned.grouped_gemm(x, w, *rest, False, False, 257)


def test_explain_shows_that_the_hint_changed_the_choice(device: Device) -> None:
    x, w, m_sizes = torch.randn(256, H), torch.randn(E, I, H), torch.full((E,), 64, dtype=torch.int32)
    explanation = explain(x, w, m_sizes, expected_rows=16)
    assert explanation.M == 256
    assert explanation.expected_rows == 16
    assert explanation.chosen is not None
    assert explanation.chosen.config == PERSISTENT
    assert explanation.without_hint is not None
    assert str(LARGE) in explanation.without_hint
    assert "hint: expected_rows=16: chosen for bucket 16; for M=256 it is " in str(explanation)
    assert explanation.to_dict()["bucket"] == 16
    assert explanation.to_dict()["expected_rows"] == 16
    same = explain(x, w, m_sizes, expected_rows=200)
    assert same.chosen is not None
    assert same.chosen.config == LARGE
    assert "expected_rows=200: chosen for bucket 256; for M=256 it is the same" in str(same)
    assert "expected_rows" not in str(explain(x, w, m_sizes))
    for wrong in (-1, 257, True, 2.5):
        with pytest.raises(InputError, match=r"explain: expected_rows is .*M=256"):
            explain(x, w, m_sizes, expected_rows=wrong)
    with pytest.raises(InputError, match=r"explain: expected_rows is 9, .*M=8"):
        explain(E=E, N=I, K=H, M=8, sm=90, expected_rows=9)


def test_the_hint_is_held_against_the_rows_of_the_index(device: Device) -> None:
    """An index may be shorter than x's slots, or longer; a plan of the same bucket is there already."""
    x, w = torch.randn(4, H), torch.randn(E, I, H)
    sizes = torch.zeros(E, dtype=torch.int32)
    sizes[0] = 6
    short, long = torch.arange(6, dtype=torch.int32), torch.arange(10, dtype=torch.int32).clamp(max=7)

    def call(index: torch.Tensor, rows: int) -> torch.Tensor:
        return grouped_gemm(x, w, sizes, 2, index, permute_x=True, expected_rows=rows)

    call(short, 6)
    with pytest.raises(InputError, match="expected_rows is 7, wanted"):
        call(short, 7)
    want = call(long, 10)[:6]  # the others are no expert's
    torch.testing.assert_close(call(long, 10)[:6], want)
    with pytest.raises(InputError, match="expected_rows is 11, wanted"):
        call(long, 11)


def test_few_rows_of_many_have_no_program_for_each_tile(device: Device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch would have a program for each tile of rows that may be there."""
    monkeypatch.setattr(decide, "MOST_IDLE", 16)
    publish(device, small=Config(16, 64, 64, 4, 2, schedule=Schedule.TILE))

    def schedules(call: Callable[..., list[torch.Tensor]], **how: Any) -> Config:
        device.launches.clear()
        got = call(**how)
        want = call(expected_rows=None)
        for tensor, other in zip(got, want, strict=True):
            torch.testing.assert_close(tensor, other)
        return Config.from_pairs(device.products[0].code.config)

    assert schedules(product(64), expected_rows=16) == Config(16, 64, 64, 4, 2, schedule=Schedule.TILE)
    assert schedules(product(1024), expected_rows=16) == LARGE
    problem = Problem(Op.FORWARD, DType.FP32, E, I, H)
    few, many = (explain(problem, M=M, expected_rows=16).chosen for M in (64, 1024))
    assert few is not None
    assert few.config.schedule is Schedule.TILE
    assert many is not None
    assert many.config == LARGE


def test_without_other_code_a_program_for_each_tile_runs(device: Device, caplog: pytest.LogCaptureFixture) -> None:
    device.has(Config(16, 64, 64, 4, 2, schedule=Schedule.TILE))
    call = product(MANY)
    for tensor, other in zip(call(expected_rows=16), call(), strict=True):
        torch.testing.assert_close(tensor, other)
    assert not warnings(caplog)
