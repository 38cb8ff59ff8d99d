"""SGLang's layers between two all-to-alls, on the CPU: DeepEP in both modes, DeepEP v2, Mooncake and NIXL.

None of these libraries is installed here. ``Double`` stands in for SGLang's dispatcher, of one rank: it hands
over what SGLang's own dispatchers document, with NaN in rows that no token has, and combines as DeepEP does.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import sglang_layer
import torch
from sglang_layer import lines, load, wanted

pytestmark = pytest.mark.filterwarnings("default")
E, H, I, T, TOP_K, ROOM = 4, 256, 128, 9, 2, 12  # noqa: E741

registry, logged = sglang_layer.registry, sglang_layer.logged


class Double:
    """A dispatcher of one rank: ``mode`` is DeepEP's, ``fp8`` says that tokens are quantised on their way.

    Of DeepEP v2 the modes are "plain" (tokens once), "expanded" (rows by expert, each expert's from a multiple of 128)
    and "decode" (the same in a buffer that is longer).
    """

    def __init__(self, name: str, mode: str, *, fp8: bool) -> None:
        self.name, self.mode, self.fp8, self.seen = name, mode, fp8, list[Any]()

    def set_quant_config(self, config: dict[str, Any]) -> None:
        """Ask for tokens in bf16, like unquantised layers do."""

    def dispatch(self, hidden_states: torch.Tensor, topk_output: Any) -> Any:
        from sglang.srt.layers.moe import token_dispatcher

        weights, ids = topk_output.topk_weights, topk_output.topk_ids.long()
        x, scale = quantised(hidden_states) if self.fp8 else (hidden_states, None)
        if self.mode == "normal":
            counts = ids.flatten()[ids.flatten() >= 0].bincount(minlength=E)
            aligned = ((counts + 127) // 128 * 128).tolist()
            return token_dispatcher.DeepEPNormalDispatchOutput(x, scale, ids, weights, aligned)
        self._slots = [[(t, s) for t in range(len(ids)) for s in range(TOP_K) if ids[t, s] == e] for e in range(E)]
        if self.name == "deepep_v2":
            return self._second(x, scale, weights, ids)
        rows = torch.full((E, ROOM, H), float("nan")).to(x.dtype)
        scales = None if scale is None else torch.full((E, H // 128, ROOM), float("nan")).mT  # column-major
        for e, slots in enumerate(self._slots):
            for i, (t, _) in enumerate(slots):
                rows[e, i] = x[t]
                if scales is not None and scale is not None:
                    scales[e, i] = scale[t]
        counts = torch.tensor([len(slots) for slots in self._slots], dtype=torch.int32)
        kind = {"mooncake": token_dispatcher.MooncakeDispatchOutput, "nixl": token_dispatcher.NixlEPDispatchOutput}
        of = kind.get(self.name, token_dispatcher.DeepEPLLDispatchOutput)
        return of(rows, scales, ids, weights, counts, (len(ids) * TOP_K + E) // E)

    def _second(self, x: torch.Tensor, scale: torch.Tensor | None, weights: torch.Tensor, ids: torch.Tensor) -> Any:
        """DeepEP v2's: ends by expert, each from a multiple of 128 on."""
        from sglang.srt.layers.moe.token_dispatcher.deepep_v2 import DeepEPv2DispatchOutput

        ends, end = [], 0
        for slots in self._slots:
            ends.append(end := (end + 127) // 128 * 128 + len(slots))
        psum = torch.tensor(ends, dtype=torch.int32)
        if self.mode == "plain":
            if scale is not None:  # column-major, with rows rounded up to 4
                scale = torch.zeros(scale.shape[1], 12).T[: len(x)].copy_(scale)
            return DeepEPv2DispatchOutput(x, scale, ids, weights, psum)
        rows = (end + 127) // 128 * 128 + (256 if self.mode == "decode" else 0)
        there = torch.full((rows, H), float("nan")).to(x.dtype)
        scales = None if scale is None else torch.full((rows, H // 128), float("nan"))
        of_rows = torch.full((rows,), float("nan"))
        for (t, s), row in self._rows():
            there[row], of_rows[row] = x[t], weights[t, s]
            if scales is not None and scale is not None:
                scales[row] = scale[t]
        is_decode = self.mode == "decode"
        hints = (4, 128, rows) if is_decode else (0, 0, 0)
        return DeepEPv2DispatchOutput(there, scales, None, of_rows, psum, True, is_decode, *hints)

    def _rows(self) -> Any:
        """Each slot, and the row that is its in DeepEP v2's buffer."""
        start = 0
        for slots in self._slots:
            for i, slot in enumerate(slots):
                yield slot, start + i
            start = (start + len(slots) + 127) // 128 * 128

    def combine(self, combine_input: Any) -> torch.Tensor:
        self.seen.append(combine_input)
        if self.name == "deepep_v2":
            hidden_states, weights, routewise = combine_input
            assert routewise is None
            if self.mode == "plain":
                return hidden_states
            assert weights is None  # rows are weighted
            out = torch.zeros(T, H)
            for (t, _), row in self._rows():
                out[t] += hidden_states[row].float()
            return out.to(hidden_states.dtype)
        hidden_states, ids, weights = combine_input  # as SGLang's dispatchers unpack it
        if self.mode == "normal":
            return hidden_states
        out = torch.zeros(len(ids), H)
        for e, slots in enumerate(self._slots):
            for i, (t, s) in enumerate(slots):
                out[t] += weights[t, s] * hidden_states[e, i].float()
        return out.to(hidden_states.dtype)


def quantised(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes and scales of each 128 columns, as SGLang's dispatchers and DeepEP make them."""
    groups = x.float().view(len(x), -1, 128)
    scale = groups.abs().amax(-1).clamp(1e-4) / 448.0
    return (groups / scale[..., None]).view(x.shape).to(torch.float8_e4m3fn), scale


def layer(
    monkeypatch: pytest.MonkeyPatch, name: str, mode: str, fp8: bool, *, everywhere: str = "1", with_bias: bool = False
) -> tuple[Any, Double]:
    """SGLang's DeepEPMoE, made as its models make it on an H100 with DeepGEMM."""
    from sglang.srt.layers import deep_gemm_wrapper
    from sglang.srt.layers.moe import utils
    from sglang.srt.layers.moe.ep_moe.layer import DeepEPMoE
    from sglang.srt.layers.moe.fused_moe_triton import layer as module
    from sglang.srt.layers.quantization import unquant
    from sglang.srt.layers.quantization.fp8 import Fp8Config
    from sglang.srt.runtime_context import get_flags

    if not torch.distributed.is_initialized():
        sglang_layer.start()
    load(monkeypatch, PRETUNED_SGLANG=everywhere)
    double = Double(name, mode, fp8=fp8)
    monkeypatch.setattr(module, "create_moe_dispatcher", lambda *_, **__: double)
    monkeypatch.setattr(deep_gemm_wrapper, "ENABLE_JIT_DEEPGEMM", True)
    moe = get_flags().moe
    monkeypatch.setattr(moe, "a2a_backend", utils.MoeA2ABackend(name))
    if name == "deepep_v2":  # as SGLang settles "auto" with it
        monkeypatch.setattr(moe, "runner_backend", utils.MoeRunnerBackend.DEEP_GEMM)
    monkeypatch.setattr(moe, "deepep_mode", utils.DeepEPMode("auto" if name == "deepep_v2" else mode))
    init = unquant.UnquantizedFusedMoEMethod.__init__
    monkeypatch.setattr(unquant.UnquantizedFusedMoEMethod, "__init__", lambda self, *_: init(self, False, False, True))
    config = None
    if fp8:
        config = Fp8Config(is_checkpoint_fp8_serialized=True, activation_scheme="dynamic", weight_block_size=[128, 128])
    sizes = {"num_experts": E, "top_k": TOP_K, "hidden_size": H, "intermediate_size": I, "layer_id": 0}
    sizes |= {"with_bias": True} if with_bias else {}
    moe_layer = DeepEPMoE(
        **sizes, params_dtype=torch.bfloat16, quant_config=config, prefix="model.layers.0.mlp.experts"
    )
    if not fp8:
        moe_layer.quant_method._forward_method = moe_layer.quant_method.forward_cuda  # the CPU's passes runners by
    return moe_layer, double


def fill(moe: Any, fp8: bool) -> Any:
    """Weights, and those that a layer without an all-to-all multiplies with."""
    from pretuned.runtime import ExpertWeights

    torch.manual_seed(4)
    plain = SimpleNamespace()
    for name, shape in (("w13", (2 * I, H)), ("w2", (H, I))):
        w = torch.randn(E, *shape) * 0.1
        if fp8:
            codes = ExpertWeights.quantize(w, "fp8_block")
            getattr(moe, f"{name}_weight").data.copy_(codes.codes.view(torch.float8_e4m3fn))
            getattr(moe, f"{name}_weight_scale_inv").data.copy_(codes.scale)
            w = codes.dequantize(torch.float32)
        else:
            getattr(moe, f"{name}_weight").data.copy_(w)
            w = w.bfloat16().float()
        setattr(plain, f"{name}_weight", w)
    moe.quant_method.process_weights_after_loading(moe)
    return plain


def question() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(3)
    ids = torch.stack([torch.randperm(E)[:TOP_K] for _ in range(T)]).int()
    ids[2, 1] = ids[5] = -1  # of another rank
    return torch.randn(T, H).bfloat16(), torch.rand(T, TOP_K), ids


CASES = [
    ("deepep", "normal", False),
    ("deepep", "low_latency", False),
    ("deepep", "normal", True),
    ("deepep", "low_latency", True),
    ("mooncake", "low_latency", True),
    ("nixl", "low_latency", True),
    *(("deepep_v2", mode, fp8) for mode in ("plain", "expanded", "decode") for fp8 in (False, True)),
]


@pytest.mark.parametrize(("name", "mode", "fp8"), CASES)
def test_a_layer_between_two_all_to_alls(
    name: str, mode: str, fp8: bool, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    moe, double = layer(monkeypatch, name, mode, fp8)
    assert type(moe.quant_method.runner.runner_core).__name__ == "PretunedRunnerCore"
    (line,) = lines(logged)
    assert line.startswith(
        f"pretuned: runs the MoE layers of E=4 H=256 I=128 k=2 {'fp8_block' if fp8 else 'bf16'} silu"
    )
    plain, (x, weights, ids) = fill(moe, fp8), question()
    for _ in range(2):
        out = moe(x.clone(), StandardTopKOutput(weights, ids, torch.empty(0)))
        (combined,) = double.seen
        double.seen.clear()
        which = "v2" if name == "deepep_v2" else "Normal" if mode == "normal" else "LL"
        assert type(combined).__name__ == f"DeepEP{which}CombineInput"
        assert out.dtype is torch.bfloat16
        arrived = x.float()
        if fp8:
            codes, scale = quantised(x)
            arrived = codes.float() * scale.repeat_interleave(128, 1)
        want = wanted(plain, moe.moe_runner_config, arrived, weights, ids)
        assert (out.float() - want).norm() < (0.04 if fp8 else 0.01) * want.norm()


@pytest.mark.parametrize("fp8", [False, True])
def test_rows_of_deepep_v2_have_the_bits_of_rows_with_starts(fp8: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from pretuned.runtime import QuantizedRows, experts_mlp

    moe, double = layer(monkeypatch, "deepep_v2", "decode", fp8)
    fill(moe, fp8)
    x, weights, ids = question()
    moe(x.clone(), StandardTopKOutput(weights, ids, torch.empty(0)))
    (combined,) = double.seen
    sent = double.dispatch(x, StandardTopKOutput(weights, ids, torch.empty(0)))
    up, down = moe.pretuned_experts.weights if fp8 else (moe.w13_weight.detach(), moe.w2_weight.detach())
    rows = QuantizedRows(sent.hidden_states, sent.hidden_states_scale) if fp8 else sent.hidden_states
    ends = sent.psum_num_recv_tokens_per_expert
    starts = torch.cat([ends.new_zeros(1), (ends[:-1] + 127) // 128 * 128])
    want = experts_mlp(rows, up, down, ends - starts, m_starts=starts)
    for _, row in double._rows():
        assert torch.equal(combined.hidden_states[row], (want[row].float() * sent.topk_weights[row]).bfloat16())


@pytest.mark.parametrize(("name", "mode", "fp8"), [CASES[3], CASES[5]])
def test_a_layer_that_is_padded_has_the_bits_of_one_that_is_not(
    name: str, mode: str, fp8: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    from sglang.srt.layers.moe.topk import StandardTopKOutput

    from pretuned.runtime import QuantizedRows, experts_mlp

    moe, double = layer(monkeypatch, name, mode, fp8)
    fill(moe, fp8)
    x, weights, ids = question()
    moe(x.clone(), StandardTopKOutput(weights, ids, torch.empty(0)))
    (combined,) = double.seen
    up, down = moe.pretuned_experts.weights
    sent = double.dispatch(x, StandardTopKOutput(weights, ids, torch.empty(0)))
    want = experts_mlp(QuantizedRows(sent.hidden_states, sent.hidden_states_scale), up, down, sent.masked_m)
    for e, count in enumerate(sent.masked_m.tolist()):
        assert torch.equal(combined.hidden_states[e, :count], want[e, :count])


def left(monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture, *args: Any, **named: Any) -> str:
    moe, _ = layer(monkeypatch, *args, **named)
    assert moe.quant_method.runner.runner_backend.value == "deep_gemm"
    (line,) = lines(logged)
    return line


@pytest.mark.parametrize(("name", "mode"), [("deepep", "auto"), ("deepep_v2", "decode")])
def test_fp8_of_padded_tokens_is_left_to_deepgemm(
    name: str, mode: str, monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    line = left(monkeypatch, logged, name, mode, True, everywhere="")
    assert line.endswith("to SGLang's deep_gemm runner: DeepGEMM's masked kernel is faster on tokens padded by expert")


def test_what_an_all_to_all_does_not_hand_over(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    line = left(monkeypatch, logged, "mooncake", "low_latency", False)
    assert line.endswith(
        "the all-to-all of mooncake hands over tokens that torch.bfloat16 weights are not multiplied with"
    )


def test_biases_that_deepep_v2_has_no_place_for(
    monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture
) -> None:
    line = left(monkeypatch, logged, "deepep_v2", "expanded", False, with_bias=True)
    assert line.endswith("SGLang hands over no biases with the all-to-all of deepep_v2")


def test_overlap_with_sglang_s_own_gemm(monkeypatch: pytest.MonkeyPatch, logged: pytest.LogCaptureFixture) -> None:
    from sglang.srt.runtime_context import get_flags

    if not torch.distributed.is_initialized():
        sglang_layer.start()
    monkeypatch.setattr(get_flags().moe, "sbo_enabled", True)
    line = left(monkeypatch, logged, "deepep", "low_latency", True)
    assert "--enable-single-batch-overlap" in line


def test_how_many_slots_tokens_that_arrived_have_here() -> None:
    from pretuned.integrations.served_layer import received_rows

    generator = torch.Generator().manual_seed(2)
    for here, experts, top_k in ((32, 256, 8), (16, 128, 8), (4, 8, 2)):
        ids = torch.rand(20_000, experts, generator=generator).topk(top_k).indices
        slots = (ids < here).sum(1)
        there = int((slots > 0).sum())
        rows = received_rows(there, top_k, here, experts)
        assert rows is not None
        assert rows == pytest.approx(int(slots.sum()), rel=0.03)
    assert received_rows(100, 8, 64, 64) is None
    assert received_rows(0, 8, 8, 64) == 0
