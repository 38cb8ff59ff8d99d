"""Silu in the first product's epilogue on a real GPU. PRETUNED_BUNDLES is as for test_training.py."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from calls import calls_of
from selected import BUCKETS, Cell, Line, decided, publish_choices
from torch.nn import functional

from pretuned.artifacts.records import Choice, DType, Fusion, Layout, Op, Problem, Variant, Way
from pretuned.kernels import reference
from pretuned.kernels.registry import entry_of
from pretuned.kernels.spec import Config, Spec
from pretuned.runtime import explain, moe_mlp, reload, sort_routing
from pretuned.runtime.check.call import Rows
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.dispatch.decide import why_not
from pretuned.runtime.dispatch.plans import Planned
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.inspect.explain import fused_silu
from pretuned.runtime.launch import product_kernels
from pretuned.runtime.ops import activation

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

BOTH = Fusion.SILU | Fusion.GATHER
MOST = 6e-3  # one rounding of the result to bf16, and fp32 sums in another order
SHAPES = [(8, 768, 512), (8, 64, 8), (5, 200, 136), (64, 512, 72), (3, 1024, 1000)]  # E, H, I


def random(*shape: int, scale: float = 1.0, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed + sum(shape))
    return (scale * torch.randn(*shape, device="cuda", generator=generator)).to(torch.bfloat16)


def error(got: torch.Tensor, want: torch.Tensor) -> float:
    return float((got.double() - want.double()).norm() / want.double().norm().clamp(min=1e-30))


def kernels() -> list[Planned]:
    """Every bf16 variant that gathers and has silu in its epilogue, of all bundles for this GPU."""
    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(0)
    kind = Problem(Op.FORWARD, DType.BF16, 1, 16, 8, Layout.NK, BOTH)
    return [
        Planned(usable, i)
        for usable in snapshot.view(local, installed=True).usable
        for i, variant in snapshot.variants(usable.bundle, kind)
        if why_not(variant, kind, local, aligned=True) is None
    ]


@pytest.fixture(params=range(4))
def kernel(request: pytest.FixtureRequest) -> Planned:
    """Each of them; any runs any shape."""
    listed = kernels()
    if request.param >= len(listed):
        pytest.skip(f"the bundles have {len(listed)} variants with silu in their epilogue for this GPU")
    return listed[request.param]


Use = Callable[[Planned | None, int, int, int], None]


@pytest.fixture
def use(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Use]:
    """Has layers of these E, H and I run this variant, or the plain product and the activation.

    It is by a bundle whose measured choices say so: of each bucket the kernel that runs the plain product, with a plan
    or without.
    """
    before = os.environ["PRETUNED_BUNDLES"]

    def only(planned: Planned | None, E: int, H: int, I: int) -> None:  # noqa: E741
        monkeypatch.setenv("PRETUNED_BUNDLES", before)
        reload()
        problem = Problem(Op.FORWARD, DType.BF16, E, 2 * I, H, Layout.NK, Fusion.GATHER)
        cells = []
        for bucket in BUCKETS:
            own = decided(problem, bucket, local_gpu(0))
            assert own is not None
            cells.append(Cell(problem, bucket, own, [] if planned is None else [Line(Way.FUSED_SILU, 0, planned)]))
        folder = tmp_path / str(len(list(tmp_path.iterdir())))
        publish_choices(folder / "choices.msgpack", cells, local_gpu(0))
        monkeypatch.setenv("PRETUNED_BUNDLES", f"{folder}:{before}")
        reload()
        for M in (1, 1000):
            chosen = explain(problem._replace(fusion=BOTH), M=M, top_k=1).chosen
            if planned is None:
                assert chosen is None or chosen.variant.fusion is not BOTH
            else:
                assert chosen is not None
                assert chosen.variant == variant_of(planned)

    yield only
    monkeypatch.undo()
    reload()


def variant_of(planned: Planned) -> Variant:
    return planned.usable.bundle.variant(planned.variant)


def test_there_is_one_where_a_choice_says_so() -> None:
    """A bundle with choices for the form has its code; without any the tests here are skipped."""
    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(0)
    for usable in snapshot.view(local, installed=True).usable:
        wanted = [problem for problem in usable.bundle.problems() if problem.fusion is BOTH]
        assert not wanted or kernels()


@pytest.mark.parametrize(("E", "H", "I"), SHAPES)
@pytest.mark.parametrize("M", [1, 64, 129, 1000, 4096])
def test_the_product_is_near_the_reference_and_stays_in_its_rows(
    kernel: Planned,
    use: Use,
    M: int,
    E: int,
    H: int,
    I: int,  # noqa: E741
) -> None:
    use(kernel, E, H, I)
    torch.manual_seed(M)
    k = 2 if M % 2 == 0 else 1
    x, w = random(M // k, H), random(E, 2 * I, H, scale=H**-0.5)
    ids = torch.randint(-1, E, (M // k, k), device="cuda")  # some on other ranks
    if E > 3:
        ids[ids == 2] = 3  # an expert without rows
    routing = sort_routing(ids, E)
    used = int(routing.bounds[-1])
    nan = float("nan")
    for index in (routing.gather_indices, routing.gather_indices.int()):
        room = torch.full((M + 3, I + 64), nan, device="cuda", dtype=torch.bfloat16)
        a = room[1 : M + 1, :I]
        call = Rows(Op.FORWARD, x, w, routing.m_sizes, Layout.NK, M, index, k)
        launch = product_kernels.kernel_for_gated(call)
        assert launch is not None
        stream = torch.cuda.current_stream().cuda_stream
        launch.launcher(
            a.data_ptr(),
            routing.m_sizes.data_ptr(),
            stream,
            x=x.data_ptr(),
            w=w.data_ptr(),
            stride_x_m=H,
            stride_y_m=a.stride(0),
            M=M,
            index=index.data_ptr(),
            index_end=M,
        )
        want = torch.empty(M, I, device="cuda", dtype=torch.float64)
        reference.rows(
            x.double(),
            w.double(),
            routing.m_sizes,
            want,
            M=M,
            layout=Layout.NK,
            index=index,
            index_end=M,
            gather_divisor=k,
            silu=True,
        )
        if used:
            assert torch.isfinite(a[:used]).all()
            assert error(a[:used], want[:used]) < MOST
        assert room[0].isnan().all()
        assert room[used + 1 :].isnan().all()
        assert room[:, I:].isnan().all()


@pytest.mark.parametrize("T", [1, 37, 700, 3000])
@pytest.mark.parametrize(("E", "H", "I"), SHAPES[:3])
def test_the_layer_is_as_near_float64_as_without_it(
    kernel: Planned,
    use: Use,
    T: int,
    E: int,
    H: int,
    I: int,  # noqa: E741
) -> None:
    torch.manual_seed(T)
    up, down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    hidden, weights = random(T, H), torch.rand(T, 2, device="cuda")
    ids = torch.randint(-2, E, (T, 2), device="cuda")
    results: dict[str, list[torch.Tensor]] = {}
    for name, used in (("plain", None), ("fused", kernel)):
        use(used, E, H, I)
        results[name] = [moe_mlp(hidden, up, down, ids, weights) for _ in range(3)]  # the later ones by a plan
        assert all(torch.equal(results[name][0], other) for other in results[name][1:])
    want = torch.zeros(T, H, device="cuda", dtype=torch.float64)
    for expert in range(E):
        token, slot = (ids == expert).nonzero(as_tuple=True)
        gate, up_ = (hidden[token].double() @ up[expert].double().T).chunk(2, 1)
        y = (functional.silu(gate) * up_) @ down[expert].double().T
        want.index_add_(0, token, weights[token, slot, None].double() * y)
    if not want.any():
        assert not results["fused"][0].any()
        return
    errors = {name: error(results[0], want) for name, results in results.items()}
    assert errors["fused"] < 1e-2
    assert errors["fused"] < 1.5 * errors["plain"] + 1e-3  # h is not rounded: it is no worse


def test_nan_in_the_rows_of_others_does_not_spread(kernel: Planned, use: Use) -> None:
    E, H, I, T = 8, 768, 520, 900  # noqa: E741
    use(kernel, E, H, I)
    up, down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    hidden, weights = random(T, H), torch.rand(T, 1, device="cuda")
    ids = torch.arange(T, device="cuda")[:, None] * E // T  # ragged ends within tiles
    clean = moe_mlp(hidden, up, down, ids, weights)
    for bad in range(E):
        spoilt = hidden.clone()
        spoilt[ids[:, 0] == bad] = float("nan")
        got = moe_mlp(spoilt, up, down, ids, weights)
        others = ids[:, 0] != bad
        assert torch.equal(got[others], clean[others])
        assert got[~others].isnan().all()
        absent = torch.where(ids == bad, E, ids)  # on another rank
        got = moe_mlp(spoilt, up, down, absent, weights)
        assert torch.equal(got[others], clean[others])
        assert not got[~others].any()


def test_a_gradient_is_that_of_the_plain_product(kernel: Planned, use: Use) -> None:
    E, H, I, T = 8, 768, 512, 300  # noqa: E741
    up, down = random(E, 2 * I, H, scale=H**-0.5).requires_grad_(), random(E, H, I, scale=I**-0.5).requires_grad_()
    hidden, weights = random(T, H), torch.rand(T, 2, device="cuda")
    ids = torch.randint(0, E, (T, 2), device="cuda")
    results = []
    for used in (kernel, None):
        use(used, E, H, I)
        for _ in range(2):
            with torch.no_grad():
                moe_mlp(hidden, up, down, ids, weights)
            out = moe_mlp(hidden, up, down, ids, weights)
            results.append([out.detach(), *torch.autograd.grad(out.float().sum(), [up, down])])
    for other in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(results[0], other, strict=True))


def test_it_is_captured_and_replayed_with_other_routing(kernel: Planned, use: Use) -> None:
    E, H, I, T = 8, 768, 512, 700  # noqa: E741
    use(kernel, E, H, I)
    up, down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
    hidden, weights = random(T, H), torch.rand(T, 2, device="cuda")
    ids = torch.randint(0, E, (T, 2), device="cuda")
    torch.cuda.synchronize()
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        for _ in range(2):
            moe_mlp(hidden, up, down, ids, weights)
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = moe_mlp(hidden, up, down, ids, weights)
    for seed in range(3):
        torch.manual_seed(seed)
        ids.copy_(torch.randint(-2, E, (T, 2), device="cuda"))
        if seed == 2:
            ids.fill_(5)  # one expert has all rows
        graph.replay()
        assert torch.equal(captured, moe_mlp(hidden, up, down, ids, weights))


def chosen_problems() -> Iterator[tuple[Problem, Choice]]:
    """The smallest problems of the bundles with a choice for the form, one bucket of each."""
    snapshot, local = dispatch_snapshot.snapshot(), local_gpu(0)
    choices: dict[Problem, Choice] = {}
    for usable in snapshot.view(local, installed=True).usable:
        for problem in usable.bundle.problems():
            if problem.fusion is BOTH and problem.dtype is DType.BF16:
                choices.setdefault(problem, usable.bundle.find(problem)[-1])
    small = sorted(choices, key=lambda problem: (problem.E * problem.N * problem.K, problem.sort_key))[:3]
    yield from ((problem, choices[problem]) for problem in small)


def test_a_layer_runs_it_exactly_where_the_rule_says_so() -> None:
    if not kernels():
        pytest.skip("the bundles have no code with silu in its epilogue for this GPU")
    tried = list(chosen_problems())
    assert tried
    for problem, choice in tried:
        dispatch_snapshot.snapshot().plans.clear()
        E, I, H = problem.E, problem.N // 2, problem.K  # noqa: E741
        T = min(choice.bucket, 16384)
        up, down = random(E, 2 * I, H, scale=H**-0.5), random(E, H, I, scale=I**-0.5)
        ids = torch.randint(0, E, (T, 1), device="cuda")
        decision = fused_silu(dispatch_snapshot.snapshot(), problem, T, local_gpu(0), top_k=1, aligned=True)
        hidden, weights = random(T, H), torch.rand(T, 1, device="cuda")
        with calls_of(activation.forward) as ran:
            moe_mlp(hidden, up, down, ids, weights)
        assert bool(ran) is (decision.chosen is None), decision.reason
        (plan,) = dispatch_snapshot.snapshot().plans.values()
        names = [step.name for program in plan.programs.values() for step in program.steps]
        assert any("silu: " in name for name in names) is (decision.chosen is not None)
        explanation = explain(problem, M=T, top_k=1)
        assert (explanation.chosen is not None and explanation.chosen.variant.fusion is BOTH) is (
            decision.chosen is not None
        )
        print(f"{problem} M={T}: {decision.reason}")


def test_the_specs_name_says_what_it_is() -> None:
    for variant in map(variant_of, kernels()):
        spec = Spec(Op.FORWARD, DType.BF16, Config.from_pairs(variant.config), fusion=variant.fusion)
        assert (entry_of(spec).name, variant.kernel) == ("rows_specialized",) * 2
        assert dict(variant.arguments)["y_map"] == "desc4"
