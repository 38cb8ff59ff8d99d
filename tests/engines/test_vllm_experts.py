"""The plug-in's parts with vLLM's own classes: what is registered, which layers are taken, which ids take part."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from small_bundles import ON_H200
from vllm_engine import config, lines

pytestmark = pytest.mark.filterwarnings("default")


@pytest.fixture(autouse=True)
def registry(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, Any]]:
    """vLLM's registry for classes of others, empty, and its settings."""
    from vllm.config import VllmConfig, set_current_vllm_config
    from vllm.model_executor import custom_op
    from vllm.model_executor.layers.fused_moe import unquantized_fused_moe_method  # noqa: F401 - what is registered for

    empty: dict[str, Any] = {}
    monkeypatch.setattr(custom_op, "op_registry_oot", empty)
    monkeypatch.delenv("PRETUNED_VLLM", raising=False)
    monkeypatch.delenv("VLLM_PLUGINS", raising=False)
    with set_current_vllm_config(VllmConfig()):
        yield empty


def load_plugins(monkeypatch: pytest.MonkeyPatch, **environ: str) -> None:
    from vllm import plugins

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    plugins.load_general_plugins()


def test_vllm_finds_the_plug_in_and_loads_it_twice(monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]) -> None:
    load_plugins(monkeypatch)
    (method,) = registry.values()
    load_plugins(monkeypatch)
    assert registry == {"UnquantizedFusedMoEMethod": method}


@pytest.mark.parametrize("environ", [{"PRETUNED_VLLM": "0"}, {"PRETUNED_VLLM": "False"}, {"VLLM_PLUGINS": "another"}])
def test_switches(environ: dict[str, str], monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any]) -> None:
    load_plugins(monkeypatch, **environ)
    assert not registry


def test_another_plug_in_keeps_its_place(
    monkeypatch: pytest.MonkeyPatch, registry: dict[str, Any], caplog: pytest.LogCaptureFixture
) -> None:
    import logging

    registry["UnquantizedFusedMoEMethod"] = dict
    logging.getLogger("vllm").addHandler(caplog.handler)
    load_plugins(monkeypatch)
    logging.getLogger("vllm").removeHandler(caplog.handler)
    assert registry == {"UnquantizedFusedMoEMethod": dict}
    assert "builtins.dict runs the MoE layers already" in caplog.text


@pytest.mark.parametrize("doing", ["take", "keep"])
def test_a_layer_that_can_not_be_taken_is_vllm_s(doing: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from pretuned.integrations.vllm import PLUG_IN, experts

    def fails(*_: Any, **__: Any) -> None:
        raise RuntimeError(f"{doing} is made to fail")

    PLUG_IN._logged.clear()
    load_plugins(monkeypatch, PRETUNED_VLLM="1")
    monkeypatch.setattr(experts, {"take": "tell_taken", "keep": "keep"}[doing], fails)
    with lines() as logged:
        for _ in range(3):
            method, layer = UnquantizedFusedMoEMethod(config()), torch.nn.Module()
            method.create_weights(layer, 4, 32, 32, torch.bfloat16)
            assert method.unquantized_backend.name == "CPU"
    assert [line for line in logged if " runs the MoE layers of " not in line] == [
        f"pretuned: MoE layers stay with vLLM, as pretuned could not take a layer: RuntimeError: {doing} is made to "
        "fail. PRETUNED_VLLM=0 switches pretuned off"
    ]


def test_a_layer_is_taken_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    from pretuned.integrations.vllm.experts import PretunedExperts

    load_plugins(monkeypatch, PRETUNED_VLLM="1")
    kinds = []
    for dtype in (torch.bfloat16, torch.float32):
        method, layer = UnquantizedFusedMoEMethod(config()), torch.nn.Module()
        assert method.experts_cls is PretunedExperts
        method.create_weights(layer, 4, 32, 32, dtype)
        assert (layer.w13_weight.shape, layer.w13_weight.dtype) == ((4, 64, 32), dtype)
        kinds.append((method.experts_cls.__name__, method.unquantized_backend.name))
    assert kinds[0] == ("PretunedExperts", "TRITON")
    assert kinds[1][0].endswith("CPUUnquantizedExperts")
    assert kinds[1][1] == "CPU"


def test_without_a_switch_the_cpu_stays_with_vllm(monkeypatch: pytest.MonkeyPatch) -> None:
    from vllm.model_executor.layers.fused_moe.unquantized_fused_moe_method import UnquantizedFusedMoEMethod

    load_plugins(monkeypatch)
    with lines() as logged:
        methods = [UnquantizedFusedMoEMethod(config()) for _ in range(3)]
    assert {method.unquantized_backend.name for method in methods} == {"CPU"}
    assert logged == [
        "pretuned: leaves the MoE layers of E=4 H=32 I=32 to vLLM's CPU backend: pretuned has no kernels for the cpu "
        "(PRETUNED_VLLM=1 runs its reference there)"
    ]


def test_what_stays_with_vllm_and_why() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation

    from pretuned.integrations.vllm.experts import ActivationNumbers, activation_of, refusal

    def why(backend: str = "CPU", everywhere: bool = True, **changes: Any) -> str | None:
        moe = config(**changes)
        return refusal(moe, activation_of(moe, ActivationNumbers.of(moe)), backend, everywhere=everywhere)

    assert why() is None
    assert why(in_dtype=torch.float16) is None
    assert why(activation=MoEActivation.SWIGLUOAI, swiglu_limit=7.0) is None
    assert (
        why(activation=MoEActivation.SWIGLUOAI_UNINTERLEAVE, swiglu_limit=7.0, swiglu_alpha=1.702, swiglu_beta=1.0)
        is None
    )
    for backend in ("deepep_low_latency", "nixl_ep"):
        assert why("BATCHED_TRITON", parallel={"dp_size": 2, "use_ep": True, "all2all_backend": backend}) is None
    assert why(everywhere=False) == "pretuned has no kernels for the cpu (PRETUNED_VLLM=1 runs its reference there)"
    for why_not, changes in {
        "--moe-backend triton asks for it": {"moe_backend": "triton"},
        "its weights lie in an order of its own": {"backend": "MOONEP"},
        "the dtype torch.float64 is none": {"in_dtype": torch.float64},
        "the activation silu has a swiglu_alpha of 1.5": {"swiglu_alpha": 1.5},
        "(EPLB)": {"parallel": {"enable_eplb": True}},
        "LoRA": {"is_lora_enabled": True},
    }.items():
        reason = why(**changes)
        assert reason is not None
        assert why_not in reason


def test_on_a_gpu_the_bundles_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """(What follows, loading and launching, is tested on a GPU.)"""
    from pretuned.integrations.vllm import experts

    monkeypatch.setattr(experts, "current_platform", SimpleNamespace(is_cuda=lambda: True, device_name="cuda"))
    monkeypatch.setattr(experts, "current_device", lambda: 0)
    monkeypatch.setattr(experts, "local_gpu", lambda device: ON_H200)
    qwen3 = {
        "num_experts": 128,
        "num_local_experts": 128,
        "num_logical_experts": 128,
        "experts_per_token": 8,
        "hidden_dim": 2048,
        "intermediate_size": 768,
    }

    def why(everywhere: bool, **changes: Any) -> str | None:
        moe = config(**(qwen3 | changes))
        act = experts.activation_of(moe, experts.ActivationNumbers.of(moe))
        return experts.refusal(moe, act, "TRITON", everywhere=everywhere)

    assert why(False) is None
    reason = why(False, intermediate_size=400)
    assert reason is not None
    assert reason.startswith(
        "no bundle was measured for forward bf16 E=128 N=800 K=2048 at about 8 rows on NVIDIA H200"
    )
    assert reason.endswith('aot build --models "shape:E=128,H=2048,I=400,k=8 ops=forward"')
    assert why(True, intermediate_size=400) is None


def test_vllm_s_batch_invariance_is_pretuned_s(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU, whose kernels have the mode; the reference on the CPU leaves the layer."""
    from vllm import envs

    from pretuned.integrations.vllm import experts
    from pretuned.runtime import reload
    from pretuned.runtime.dispatch.snapshot import snapshot

    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "")  # so that the test's end takes it out
    monkeypatch.delenv("PRETUNED_BATCH_INVARIANT")
    monkeypatch.setattr(envs, "VLLM_BATCH_INVARIANT", True, raising=False)
    moe = config()
    act = experts.activation_of(moe, experts.ActivationNumbers.of(moe))
    try:
        assert "batch invariance" in str(experts.refusal(moe, act, "CPU", everywhere=True))
        monkeypatch.setattr(experts, "current_platform", SimpleNamespace(is_cuda=lambda: True, device_name="cuda"))
        monkeypatch.setattr(experts, "current_device", lambda: 0)
        monkeypatch.setattr(experts, "local_gpu", lambda device: ON_H200)
        big = {"num_experts": 128, "num_local_experts": 128, "num_logical_experts": 128, "experts_per_token": 8}
        moe = config(**big, hidden_dim=2048, intermediate_size=768)
        monkeypatch.setattr(experts.PretunedExperts, "_supports_current_device", staticmethod(lambda: True))
        assert experts.refusal(moe, act, "TRITON", everywhere=False) is None
        assert snapshot().invariance is not None
        with lines() as logged:
            experts.tell_taken(experts.layer_of(moe, act))
        assert logged[0].endswith("; batch-invariant, fp8's x is never quantised")
        monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "0")
        reload()
        assert "batch invariance" in str(experts.refusal(moe, act, "TRITON", everywhere=False))
    finally:
        monkeypatch.undo()
        reload()


def test_experts_of_other_ranks_and_ids_that_stand_for_none() -> None:
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from pretuned.integrations.vllm.experts import PretunedExperts

    torch.manual_seed(0)
    E, T, H, I = 3, 5, 32, 16  # noqa: E741
    here = torch.tensor([-1, 1, -1, 0, 2, -1], dtype=torch.int32)  # experts 3, 1, 4 of six
    w13, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    x, weights = torch.randn(T, H), torch.rand(T, 2)
    ids = torch.tensor([[3, 0], [-1, 1], [5, 2], [4, 3], [1, -1]], dtype=torch.int32)
    experts = PretunedExperts(
        config(num_experts=6, num_local_experts=E, in_dtype=torch.float32), FusedMoEQuantConfig.make()
    )
    wanted, unweighted = torch.zeros(T, H), torch.zeros(T, H)
    for t in range(T):
        for s in range(2):
            e = -1 if ids[t, s] < 0 else int(here[ids[t, s]])
            if e >= 0:
                gate, up = (w13[e] @ x[t]).chunk(2)
                y = w2[e] @ (torch.nn.functional.silu(gate) * up)
                wanted[t] += weights[t, s] * y
                unweighted[t] += y
    for dtype in (torch.int32, torch.int64):
        for is_weighted in (False, True):  # the tokens, before they come here
            out = torch.full((T, H), torch.nan)
            experts.apply(
                output=out,
                hidden_states=x,
                w1=w13,
                w2=w2,
                topk_weights=weights,
                topk_ids=ids.to(dtype),
                activation=MoEActivation.SILU,
                global_num_experts=6,
                expert_map=here,
                a1q_scale=None,
                a2_scale=None,
                workspace13=None,
                workspace2=None,
                expert_tokens_meta=None,
                apply_router_weight_on_input=is_weighted,
            )
            torch.testing.assert_close(out, unweighted if is_weighted else wanted, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("mode", ["decode", "prefill"])
def test_layouts_of_deepep_v2(mode: str) -> None:
    """The layouts that DeepEP documents: a buffer for the worst case, or rows by expert with their counts.

    DeepEP is not installed here: the tensors are made by hand, with NaN where it leaves memory as it was.
    """
    from vllm.model_executor.layers.fused_moe import modular_kernel as mk
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from pretuned.integrations.vllm.experts import PretunedExperts

    torch.manual_seed(0)
    E, T, room, H, I = 3, 5, 12, 32, 16  # noqa: E741
    w13, w2 = torch.randn(E, 2 * I, H), torch.randn(E, H, I)
    x, weights = torch.randn(T, H), torch.rand(T, 2)
    ids = torch.tensor([[0, 4], [2, 1], [1, 5], [0, 2], [3, 1]])  # experts 0, 1, 2 of six are this rank's
    slots = sorted((int(ids[t, s]), t, s) for t in range(T) for s in range(2) if ids[t, s] < E)
    if mode == "decode":
        rows, factors = torch.full((room, H), torch.nan), torch.full((room, 2), torch.nan)
        routed = torch.full((room, 2), -1)
        rows[:T], factors[:T], routed[:T] = x, weights, torch.where(ids < E, ids, -1)
        counts = mk.ExpertTokensMetadata(None, None)
        counts.psum_recv_per_rank = torch.tensor([2, T], dtype=torch.int32)
    else:
        rows = torch.stack([x[t] for _, t, _ in slots])
        factors = torch.stack([weights[t, s : s + 1] for _, t, s in slots])
        routed = torch.tensor([[e] for e, _, _ in slots])
        counts = mk.ExpertTokensMetadata.make_from_list(routed.flatten().bincount(minlength=E).tolist(), device="cpu")
    experts = PretunedExperts(
        config(num_experts=6, num_local_experts=E, in_dtype=torch.float32), FusedMoEQuantConfig.make()
    )
    out = torch.full_like(rows, torch.nan)
    experts.apply(
        output=out,
        hidden_states=rows,
        w1=w13,
        w2=w2,
        topk_weights=factors,
        topk_ids=routed,
        activation=MoEActivation.SILU,
        global_num_experts=6,
        expert_map=torch.tensor([0, 1, 2, -1, -1, -1], dtype=torch.int32),
        a1q_scale=None,
        a2_scale=None,
        workspace13=None,
        workspace2=None,
        expert_tokens_meta=counts,
        apply_router_weight_on_input=False,
    )
    want = torch.zeros(T if mode == "decode" else len(slots), H)
    for i, (e, t, s) in enumerate(slots):
        gate, up = (w13[e] @ x[t]).chunk(2)
        y = weights[t, s] * (w2[e] @ (torch.nn.functional.silu(gate) * up))
        want[t if mode == "decode" else i] += y
    torch.testing.assert_close(out[: len(want)], want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("experts_of_all", [6, 3])
@pytest.mark.parametrize("counts", [None, [2, 0, 5], [9, 9, 9]])
def test_the_rows_of_this_rank_choose_its_kernels(
    experts_of_all: int, counts: list[int] | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that the all-to-all counted on the host, else as many as with experts that are chosen alike."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.modular_kernel import ExpertTokensMetadata

    from pretuned.integrations.vllm import experts as plug_in

    E, T, H, I = 3, 5, 32, 16  # noqa: E741
    experts = plug_in.PretunedExperts(
        config(num_experts=experts_of_all, num_local_experts=E, in_dtype=torch.float32), FusedMoEQuantConfig.make()
    )
    hints: list[int | None] = []

    def spied(*args: Any, expected_rows: int | None, **how: Any) -> torch.Tensor:
        hints.append(expected_rows)
        return moe_mlp(*args, expected_rows=expected_rows, **how)

    moe_mlp = plug_in.moe_mlp
    monkeypatch.setattr(plug_in, "moe_mlp", spied)
    metadata = None if counts is None else ExpertTokensMetadata.make_from_list(counts, device="cpu")
    experts.apply(
        output=torch.empty(T, H),
        hidden_states=torch.randn(T, H),
        w1=torch.randn(E, 2 * I, H),
        w2=torch.randn(E, H, I),
        topk_weights=torch.rand(T, 2),
        topk_ids=torch.randint(0, experts_of_all, (T, 2)),
        activation=MoEActivation.SILU,
        global_num_experts=experts_of_all,
        expert_map=torch.tensor([0, 1, 2] + [-1] * (experts_of_all - E)),
        expert_tokens_meta=metadata,
        apply_router_weight_on_input=False,
    )
    alike = 5 if experts_of_all == 6 else None
    assert hints == [alike if counts is None else min(sum(counts), 2 * T)]


def batched(E: int, all_experts: int, backend: str = "deepep_low_latency", **changes: Any) -> Any:
    parallel = {"dp_size": 2, "ep_size": all_experts // E, "use_ep": True, "all2all_backend": backend}
    return config(num_experts=all_experts, num_local_experts=E, in_dtype=torch.float32, parallel=parallel, **changes)


@pytest.mark.parametrize("backend", ["deepep_low_latency", "nixl_ep"])
@pytest.mark.parametrize("is_weighted", [False, True])
def test_padded_tokens_by_expert(backend: str, is_weighted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two ranks, whose all-to-all is vLLM's own for one process: it lays tokens out as deepep_low_latency does."""
    from vllm.model_executor.layers.fused_moe.activation import MoEActivation
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig
    from vllm.model_executor.layers.fused_moe.prepare_finalize.batched import BatchedPrepareAndFinalize

    from pretuned.integrations.vllm import experts as plug_in

    torch.manual_seed(0)
    E, ranks, T, H, I, k, most = 3, 2, 5, 32, 16, 1 + (not is_weighted), 8  # noqa: E741
    w13, w2 = torch.randn(ranks * E, 2 * I, H), torch.randn(ranks * E, H, I)
    x, weights = torch.randn(T, H), torch.rand(T, k)
    ids = torch.stack([torch.randperm(ranks * E)[:k] for _ in range(T)])
    want = torch.zeros(T, H)
    for t in range(T):
        for s in range(k):
            row, weight = (x[t] * weights[t, s], 1.0) if is_weighted else (x[t], float(weights[t, s]))
            gate, up = (w13[ids[t, s]] @ row).chunk(2)
            want[t] += weight * (w2[ids[t, s]] @ (torch.nn.functional.silu(gate) * up))
    hints: list[int] = []

    def spied(*args: Any, expected_rows: int, **how: Any) -> torch.Tensor:
        hints.append(expected_rows)
        return experts_mlp(*args, expected_rows=expected_rows, **how)

    experts_mlp = plug_in.experts_mlp
    monkeypatch.setattr(plug_in, "experts_mlp", spied)
    quant, got = FusedMoEQuantConfig.make(), torch.zeros(T, H)
    for rank in range(ranks):
        experts = plug_in.PretunedBatchedExperts(
            batched(E, ranks * E, backend), quant, max_num_tokens=most // 2, num_dispatchers=2
        )
        dispatch = BatchedPrepareAndFinalize(most, E, 2, rank)
        rows, _, counts, _, _ = dispatch.prepare(x.clone(), weights, ids, ranks * E, None, is_weighted, quant)
        for e in range(E):
            rows[e, int(counts.expert_num_tokens[e]) :] = float("nan")  # what an all-to-all leaves there
        shapes = experts.workspace_shapes(T, 2 * I, H, k, ranks * E, E, counts, MoEActivation.SILU)
        assert shapes == ((0,), (0,), rows.shape)
        out = torch.full(shapes[2], 7.25)
        experts.apply(
            output=out,
            hidden_states=rows,
            w1=w13[rank * E : (rank + 1) * E],
            w2=w2[rank * E : (rank + 1) * E],
            topk_weights=weights,
            topk_ids=ids,
            activation=MoEActivation.SILU,
            global_num_experts=ranks * E,
            expert_map=None,
            a1q_scale=None,
            a2_scale=None,
            workspace13=None,
            workspace2=None,
            expert_tokens_meta=counts,
            apply_router_weight_on_input=is_weighted,
        )
        for e in range(E):
            assert (out[e, int(counts.expert_num_tokens[e]) :] == 7.25).all()
        part = torch.zeros(T, H)
        how = experts.finalize_weight_and_reduce_impl()
        dispatch.finalize(part, out, weights, ids, is_weighted, how)
        got += part
    torch.testing.assert_close(got, want, rtol=1e-4, atol=1e-4)
    assert hints == [T * k] * ranks


def test_padded_tokens_of_fp8_blocks_are_left_to_deepgemm() -> None:
    from pretuned.integrations.vllm.quantised import refusal

    moe = batched(4, 8, hidden_dim=256, intermediate_size=256)
    own, blocks = SimpleNamespace(moe=moe), SimpleNamespace(rows=(128, 128), dtype=None)
    for backend, everywhere, is_left in (
        ("BATCHED_DEEPGEMM", False, True),
        ("BATCHED_DEEPGEMM", True, False),
        ("BATCHED_TRITON", False, False),
    ):
        own.fp8_backend = SimpleNamespace(value=backend)
        assert ("DeepGEMM" in str(refusal(own, "as before", blocks, everywhere=everywhere))) is is_left


def test_a_layer_of_padded_tokens_is_taken() -> None:
    from vllm.model_executor.layers.fused_moe.config import FusedMoEQuantConfig

    from pretuned.integrations.vllm import experts as plug_in

    method = SimpleNamespace(
        moe=batched(4, 8), unquantized_backend=SimpleNamespace(name="BATCHED_TRITON", value=""), experts_cls=None
    )
    plug_in.take(method, everywhere=True)
    assert method.experts_cls is plug_in.PretunedBatchedExperts
    experts = method.experts_cls(method.moe, FusedMoEQuantConfig.make(), max_num_tokens=4, num_dispatchers=2)
    w13, layer = torch.randn(4, 64, 32), SimpleNamespace(w2_weight=torch.randn(4, 32, 32))
    plug_in.try_once(experts, layer, w13)
