"""Rows gathered beforehand, against the code that gathers on load, on a real GPU.

PRETUNED_BUNDLES is as for test_training.py.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from selected import BUCKETS, Cell, Line, decided, publish_choices

from pretuned.artifacts.records import (
    PLAIN_LAYOUTS,
    DType,
    Fusion,
    Layout,
    Op,
    Problem,
    RowOp,
    Variant,
    Way,
    bucket_of,
)
from pretuned.runtime import grouped_gemm, moe_mlp, reload, sort_routing
from pretuned.runtime.check.call import Rows
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import why_not
from pretuned.runtime.dispatch.plans import Planned
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import product_kernels, rowops
from pretuned.runtime.ops import products
from pretuned.runtime.ops.routing import Routing

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

TOPK = 2
SHAPES = [(8, 768, 1024), (5, 136, 400), (64, 72, 1024), (3, 1000, 2048)]  # E, reduction, columns
FORMS = [(s, w, b) for s in (0, 1) for w in (0, 1) for b in (0, 1)]  # scatter, weights, bias
NAN = float("nan")


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(torch.bfloat16)


def variants(kind: Problem, like: Variant) -> list[Planned]:
    """The aligned variants of this code that can stand in a plan beside another, those in its config first."""
    bundles, local = dispatch_snapshot.snapshot(), local_gpu(0)
    able = [
        (variant.config != like.config, Planned(usable, i))
        for usable in bundles.view(local, installed=True).usable
        for i, variant in bundles.variants(usable.bundle, kind)
        if why_not(variant, kind, local, aligned=True) is None and variant.alignment == 16 and variant.op is like.op
    ]
    return [planned for _, planned in sorted(able, key=lambda pair: pair[0])]


class Switch:
    """Has every gather of a problem be done beforehand, or none, in one config, so that sums have one order.

    It is by a bundle whose measured choices say so: of each bucket the kernel that runs it, with a plan or without.
    """

    def __init__(self, patch: pytest.MonkeyPatch, folder: Path) -> None:
        self.patch, self.folder, self.before = patch, folder, os.environ["PRETUNED_BUNDLES"]

    def __call__(self, first: bool, problem: Problem) -> None:
        name = "-".join(map(str, (problem.op.value, *problem[2:5], problem.layout.value)))
        if not (self.folder / name).exists():
            self.publish(self.folder / name, problem)
        self.use(self.folder / name / ("first" if first else "on-load"))

    def use(self, *folders: Path) -> None:
        """Have the process read its bundles anew, these folders' before the others."""
        self.patch.setenv("PRETUNED_BUNDLES", ":".join([*map(str, folders), self.before]))
        reload()

    def publish(self, folder: Path, problem: Problem) -> None:
        self.use()
        cells = []
        for bucket in BUCKETS:
            own = decided(problem, bucket, local_gpu(0))
            assert own is not None
            like = own.usable.bundle.variant(own.variant)
            plan = []
            for way in (Way.ROWS_FIRST, Way.ROWS_FIRST_BY_INDEX):
                (kind,) = way.problems(problem)
                there = variants(kind, like)
                if not there:
                    pytest.skip(f"the bundles have no {kind} for this GPU")
                plan.append(Line(way, 1, there[0]))
            cells.append(Cell(problem, bucket, own, plan))
        publish_choices(folder / "first" / "choices.msgpack", cells, local_gpu(0))
        publish_choices(
            folder / "on-load" / "choices.msgpack", [cell._replace(plan=()) for cell in cells], local_gpu(0)
        )


@pytest.fixture
def switch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Switch]:
    if rowops.launcher(RowOp.GATHER, DType.BF16, 0, aligned=True) is None:
        pytest.skip("the bundles have no pass that gathers")
    yield Switch(monkeypatch, tmp_path)
    monkeypatch.undo()
    reload()


def problem_of(call: Rows) -> Problem:
    return Problem(call.op, DType.BF16, *call.sizes, call.layout, Fusion.GATHER)


def routed(E: int, T: int, kind: str) -> Routing:
    generator = torch.Generator("cuda").manual_seed(T)
    ids = torch.randint(0, E, (T, TOPK), device="cuda", generator=generator)
    if kind == "elsewhere":  # some of them on other ranks
        ids = torch.randint(-E, E, (T, TOPK), device="cuda", generator=generator)
    if kind == "one":
        ids = torch.full_like(ids, E // 2)
    return sort_routing(torch.where(ids == 1, 2, ids), E)  # an expert without rows


def near(got: torch.Tensor, want: torch.Tensor) -> None:
    """Equal where nothing was written (NaN in both); else but for the order of fp32 sums, rounded to bf16."""
    assert torch.equal(got.isnan(), want.isnan())
    got, want = got.double().nan_to_num(), want.double().nan_to_num()
    assert float((got - want).norm()) <= 4e-3 * float(want.norm().clamp(min=1e-30))


def run(call: Rows, rows: int, switch: Switch, **changes: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """y by the code that gathers, and of rows gathered beforehand; NaN where nothing was stored."""
    results = []
    for first in (False, True):
        switch(first, problem_of(call))
        y = torch.full(
            (rows, call.sizes[1] if call.op is Op.FORWARD else call.sizes[2]), NAN, device="cuda", dtype=torch.bfloat16
        )
        changed = call._replace(**changes)
        kernel = product_kernels.product_kernel(changed, y)
        assert kernel is not None
        assert (kernel.gather is not None) is first
        results.append(products.rows(changed, y))
    return results[0], results[1]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("kind", ["ragged", "one", "elsewhere"])
@pytest.mark.parametrize(("E", "K", "N"), SHAPES)
def test_it_is_the_code_that_gathers(switch: Switch, E: int, K: int, N: int, kind: str, form: tuple[int, ...]) -> None:
    scatter, weighted, biased = form
    for T in (1, 37, 700):
        routing = routed(E, T, kind)
        M = T * TOPK
        x, w = random(T, K), random(E, N, K, scale=K**-0.5)
        weights = torch.rand(M, device="cuda") if weighted else None
        bias = random(E, N) if biased else None
        for index in (routing.gather_indices, routing.gather_indices.int()):
            for bounds in (routing.bounds, None):
                call = Rows(
                    Op.FORWARD,
                    x,
                    w,
                    routing.m_sizes,
                    Layout.NK,
                    M,
                    index,
                    TOPK,
                    bool(scatter),
                    weights,
                    bias,
                    bounds=bounds,
                    loose=True,
                )
                near(*run(call, M, switch)[::-1])


@pytest.mark.parametrize("layout", PLAIN_LAYOUTS)
def test_dx_of_dy_in_token_order(switch: Switch, layout: Layout) -> None:
    E, N, K, T = 8, 512, 768, 500
    code = Problem(Op.DX, DType.BF16, E, N, K, layout, Fusion.GATHER)
    if decided(code, 1000, local_gpu(0)) is None:  # such as those of the catalogue, all of w [E, N, K]
        pytest.skip(f"the bundles have no {code} for this GPU")
    routing, M = routed(E, T, "elsewhere"), T * TOPK
    w = random(E, N, K, scale=N**-0.5)
    if layout is Layout.KN:
        w = w.transpose(1, 2).contiguous()
    dy = random(M, N)
    for index in (routing.gather_indices, routing.gather_indices.int()):
        call = Rows(Op.DX, dy, w, routing.m_sizes, layout, M, index, 1, bounds=routing.bounds)
        near(*run(call, M, switch)[::-1])


@pytest.mark.parametrize("step", [torch.int64, torch.int32])
def test_an_index_out_of_range_reads_and_stores_nothing(switch: Switch, step: torch.dtype) -> None:
    E, N, K, T = 8, 1024, 768, 400
    routing, M = routed(E, T, "ragged"), T * TOPK
    index = routing.gather_indices.clone()
    wrong = torch.randperm(M, device="cuda")[: M // 5]
    index[wrong] = torch.tensor([-1, -(2**31), M, 2**31 - 1], device="cuda").repeat(M)[: len(wrong)]
    x, w, weights = random(T, K), random(E, N, K, scale=K**-0.5), torch.rand(M, device="cuda")
    for scatter, row_weights in ((True, None), (False, weights), (True, weights), (False, None)):
        call = Rows(
            Op.FORWARD, x, w, routing.m_sizes, Layout.NK, M, index.to(step), TOPK, scatter, row_weights, loose=True
        )
        on_load, first = run(call, M, switch)
        if not scatter and row_weights is None:  # these rows may hold anything
            on_load[wrong] = first[wrong] = 0
        near(first, on_load)
    assert not call.may_gather_first(aligned=False)
    assert not call._replace(loose=False).may_gather_first(aligned=True)


def test_an_index_into_no_rows_at_all() -> None:
    E, N, K, M = 8, 1024, 768, 2048
    w, m_sizes = random(E, N, K), torch.full((E,), M // E, device="cuda", dtype=torch.int32)
    y = grouped_gemm(random(0, K), w, m_sizes, TOPK, torch.arange(M, device="cuda"), permute_x=True)
    torch.cuda.synchronize()  # nothing was read where there is nothing
    assert y.shape == (M, N)


def test_nan_in_rows_of_others_does_not_spread(switch: Switch) -> None:
    E, N, K, T = 8, 1024, 776, 900
    ids = (torch.arange(T, device="cuda")[:, None] * E // T).expand(T, TOPK).contiguous()  # ragged ends within tiles
    w = random(E, N, K, scale=K**-0.5)
    for bad in range(E):
        routing = sort_routing(ids, E)
        x = random(T, K)
        x[ids[:, 0] == bad] = NAN
        call = Rows(
            Op.FORWARD, x, w, routing.m_sizes, Layout.NK, T * TOPK, routing.gather_indices, TOPK, bounds=routing.bounds
        )
        on_load, first = run(call, T * TOPK, switch)
        near(first, on_load)
        assert int(first.isnan().any(1).sum()) == int((ids == bad).sum())


def test_a_captured_layer_is_replayed_with_other_routing(switch: Switch) -> None:
    E, H, I, T = 8, 768, 512, 600  # noqa: E741
    up, down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    hidden, weights = random(T, H), torch.rand(T, TOPK, device="cuda")
    routings = [torch.randint(low, E, (T, TOPK), device="cuda") for low in (0, -3, 4)]
    routings.append(torch.full((T, TOPK), -1, device="cuda"))
    outcomes: list[list[torch.Tensor]] = []
    for first in (False, True):
        switch(first, Problem(Op.FORWARD, DType.BF16, E, 2 * I, H, Layout.NK, Fusion.GATHER))
        ids = routings[0].clone()
        with torch.no_grad():
            for _ in range(3):
                moe_mlp(hidden, up, down, ids, weights, "gelu")
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                out = moe_mlp(hidden, up, down, ids, weights, "gelu")
            results = []
            for other in routings:
                ids.copy_(other)
                graph.replay()
                results.append(out.clone())
                assert torch.equal(results[-1], moe_mlp(hidden, up, down, ids, weights, "gelu"))
        outcomes.append(results)
    for on_load, beforehand in zip(*outcomes, strict=True):
        near(beforehand, on_load)


def test_a_first_call_in_a_capture_and_a_side_stream(switch: Switch) -> None:
    E, N, K, T = 8, 1024, 768, 300
    routing = routed(E, T, "ragged")
    x, w = random(T, K), random(E, N, K, scale=K**-0.5)
    call = Rows(
        Op.FORWARD, x, w, routing.m_sizes, Layout.NK, T * TOPK, routing.gather_indices, TOPK, bounds=routing.bounds
    )
    wanted, _ = run(call, T * TOPK, switch)
    switch(True, problem_of(call))
    y = torch.full_like(wanted, NAN)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        products.rows(call, y)
    graph.replay()
    near(y, wanted)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        results = [products.rows(call, torch.full_like(wanted, NAN)) for _ in range(4)]  # the scratch comes again
    torch.cuda.current_stream().wait_stream(side)
    for result in results:
        near(result, wanted)


@pytest.mark.parametrize("kind", ["ragged", "elsewhere"])
def test_silu_in_the_epilogue_of_rows_gathered_beforehand(switch: Switch, tmp_path: Path, kind: str) -> None:
    E, H, I, T = 8, 768, 512, 700  # noqa: E741
    problem = Problem(Op.FORWARD, DType.BF16, E, 2 * I, H, Layout.NK, Fusion.GATHER)
    own = decided(problem, bucket_of(T * TOPK), local_gpu(0))
    assert own is not None
    folders = []
    for fusion, top_k in ((Fusion.SILU | Fusion.GATHER, 0), (Fusion.SILU, 1)):
        there = variants(problem._replace(fusion=fusion), own.usable.bundle.variant(own.variant))
        if not there:
            pytest.skip("the bundles lack silu in the epilogue in one of its forms")
        cells = [Cell(problem, bucket, own, [Line(Way.FUSED_SILU, top_k, there[0])]) for bucket in BUCKETS]
        folders.append(tmp_path / f"from-top-{top_k}")
        publish_choices(folders[-1] / "choices.msgpack", cells, local_gpu(0))
    routing = routed(E, T, kind)
    used = int(routing.bounds[-1])
    x, w = random(T, H), random(E, 2 * I, H, scale=H**-0.5)
    for index in (routing.gather_indices, routing.gather_indices.int()):
        for bounds in (routing.bounds, None):
            call = Rows(Op.FORWARD, x, w, routing.m_sizes, Layout.NK, T * TOPK, index, TOPK, bounds=bounds)
            results = []
            for first, folder in enumerate(folders):
                switch.use(folder)
                kernel = product_kernels.kernel_for_gated(call)
                assert kernel is not None
                assert (kernel.gather is not None) is bool(first)
                a = products.gated_rows(call)
                assert a is not None
                results.append(a[:used])
            near(results[1], results[0])
