"""A token's bits are the same in every batch, on a real GPU: each format and form, in the batch-invariant mode.

python -m pytest -q tests/gpu/test_batch_invariant.py    # 40 s on an H100
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from pretuned.runtime import (
    ExpertWeights,
    batch_invariant,
    experts_mlp,
    grouped_gemm,
    grouped_gemm_dX,
    hooks,
    moe_mlp,
    reload,
)
from pretuned.runtime.api.batch_invariance import FORMATS, Experts, check, compared, forms
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.settings import Invariance

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
TOKENS = 8192
SIZES = tuple(sorted({1, 3, 17, 100, 1000, 3000, *(1 << power for power in range(1, 14))}))
MIXES = 50
GPU = torch.device("cuda", 0)


@pytest.mark.parametrize("format", FORMATS)
def test_each_form_of_a_format(format: str) -> None:
    """Layers with a gradient and without, with adapters, a hint of rows, slots of no expert; products, rows moved."""
    checked = check(format, Experts.drawn(format, TOKENS, GPU), sizes=SIZES, mixes=MIXES, free=False)
    assert checked.skipped is None
    assert {name: result for name, result in checked.results.items() if result.differing} == {}
    assert all(result.batches for result in checked.results.values())


@pytest.mark.parametrize("format", FORMATS)
def test_the_bits_are_those_of_other_gpus_and_bundles(format: str) -> None:
    """SHA-256 of each result of 64 tokens, as another GPU of this capability had them, by other bundles' choices.

    PRETUNED_RECORD_BITS=FILE adds them to a file, which then takes the place of the golden one.
    """
    sm = local_gpu(0).sm
    golden = Path(__file__).parents[1] / "golden" / f"batch-invariant-sm{sm}.json"
    experts = Experts.drawn(format, 64, GPU)
    bits = {}
    for name, mode in {"given": Invariance(), "quantised": Invariance(quantize_x=True)}.items():
        with hooks.within(mode):
            for form, run in forms(experts).items():
                for result, rows in run(torch.arange(64)).items():
                    raw = rows.contiguous().view(torch.uint8).cpu().numpy().tobytes()
                    bits[f"x {name}: {form}: {result}"] = hashlib.sha256(raw).hexdigest()[:16]
    if record := os.environ.get("PRETUNED_RECORD_BITS"):
        path = Path(record)
        recorded = json.loads(path.read_text()) if path.exists() else {}
        path.write_text(json.dumps(recorded | {format: bits}, indent=1) + "\n")
        return
    if not golden.exists():
        pytest.skip(f"no bits are recorded for sm_{sm}")
    assert bits == json.loads(golden.read_text())[format]


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_x_that_is_always_quantised(format: str) -> None:
    if local_gpu(0).sm < 89:
        pytest.skip("products of e4m3")
    experts = Experts.drawn(format, TOKENS, GPU)
    checked = check(format, experts, mode=Invariance(quantize_x=True), sizes=SIZES, mixes=10, free=False)
    assert checked.skipped is None
    assert {name: result for name, result in checked.results.items() if result.differing} == {}


def test_without_the_mode_some_bits_differ() -> None:
    """Without the mode the tests above fail."""
    if local_gpu(0).sm != 90:
        pytest.skip("kernels that share out K are for sm_90")
    differing = []
    with hooks.within(None):
        for format in ("mxfp4", "int4_g128", "fp8_block"):
            results = compared(Experts.drawn(format, 4096, GPU).layer, 4096, (1, 4, 64, 1024), 0)
            differing += [name for name, counted in results.items() if counted.differing]
    assert differing


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["nk", "kn"])
def test_products_of_plain_weights(dtype: torch.dtype, layout: str) -> None:
    """Forward and dX of sorted rows, aligned and not, in both layouts, of 50 ways in which rows fall on experts."""
    E, N, K, M = 16, 768, 1536, 4096
    generator = torch.Generator("cuda").manual_seed(2)
    w = torch.randn((E, N, K) if layout == "nk" else (E, K, N), generator=generator, device="cuda").to(dtype)
    x, dy = (torch.randn(M, size, generator=generator, device="cuda").to(dtype) for size in (K, N))
    expert = 5

    def rows(before: int, mine: int, after: int, shift: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """y and dx of the first ``mine`` rows by one expert, among others' rows before and after."""
        count = before + mine + after
        sizes = torch.zeros(E, dtype=torch.int32, device="cuda")
        sizes[expert], sizes[expert - 1], sizes[expert + 1] = mine, before, after
        results = []
        for rows, call in ((x, grouped_gemm), (dy, grouped_gemm_dX)):
            memory = torch.zeros(count * rows.shape[1] + shift, dtype=dtype, device="cuda")
            moved = memory[shift:].view(count, -1)
            moved[:before], moved[before : before + mine] = rows[mine : mine + before], rows[:mine]
            moved[before + mine :] = rows[mine + before : count]
            results.append(call(moved, w, sizes, w_layout=layout)[before : before + mine])
        return results[0], results[1]

    pick = torch.Generator().manual_seed(3)
    with batch_invariant():
        whole = rows(0, 1024, 0)
        for shift in (0, 1):
            for mine in (1, 2, 7, 64, 300, 1024):
                for _ in range(4):
                    before, after = (int(count) for count in torch.randint(0, 1500, (2,), generator=pick))
                    for got, want in zip(rows(before, mine, after, shift), whole, strict=True):
                        assert torch.equal(got, want[:mine]), (mine, before, after, shift)


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "int4_g128", "fp8_block", "fp8_channel"])
def test_padded_rows(format: str) -> None:
    """A row [E, M_max, K] has the bits of the same row among packed ones, whatever others are there."""
    E, M_max = 8, 257
    experts = Experts.drawn(format, E * M_max, GPU)
    x = experts.x.view(E, M_max, -1)
    full = torch.full((E,), M_max, dtype=torch.int32, device="cuda")
    pick = torch.Generator().manual_seed(6)
    with batch_invariant(), torch.no_grad():
        packed = grouped_gemm(experts.x, experts.gate_up, full).view(E, M_max, -1)
        layer = experts_mlp(x, experts.gate_up, experts.down, full)
        for _ in range(MIXES):
            few = 2.0 ** (8 * torch.rand(E, generator=pick))
            sizes = torch.where(torch.rand(E, generator=pick) < 0.2, 0, few).int().to("cuda")
            y = grouped_gemm(x, experts.gate_up, sizes)
            out = experts_mlp(x, experts.gate_up, experts.down, sizes)
            for e, count in enumerate(sizes.tolist()):
                assert torch.equal(y[e, :count], packed[e, :count]), (e, count)
                assert torch.equal(out[e, :count], layer[e, :count]), (e, count)


@pytest.mark.parametrize("format", ["bf16", "mxfp4", "fp8_block"])
def test_a_captured_graph_has_the_same_bits(format: str) -> None:
    experts = Experts.drawn(format, 64, GPU)
    with batch_invariant():
        out = torch.empty_like(experts.x)

        def call() -> None:
            moe_mlp(experts.x, experts.gate_up, experts.down, experts.ids, experts.weights, out=out)

        call()
        wanted, graph = out.clone(), torch.cuda.CUDAGraph()
        torch.cuda.synchronize()
        with torch.cuda.graph(graph):
            call()
        out.zero_()
        graph.replay()
        assert torch.equal(out, wanted)
        alone = moe_mlp(experts.x[9:10], experts.gate_up, experts.down, experts.ids[9:10], experts.weights[9:10])
        assert torch.equal(alone, wanted[9:10])


def test_a_bias_behind_scales_of_whole_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is added after the outer scale: contracted into one instruction in some tiles, sums would differ."""
    generator = torch.Generator("cuda").manual_seed(4)
    for format in ("nvfp4", "fp8_channel", "mxfp4"):
        w = ExpertWeights.quantize(torch.randn(8, 512, 1024, generator=generator, device="cuda"), format).prepare()
        bias = torch.randn(8, 512, generator=generator, device="cuda").bfloat16()
        x = torch.randn(4096, 1024, generator=generator, device="cuda").bfloat16()
        for mode in (Invariance(), Invariance(quantize_x=True)):
            with hooks.within(mode):
                sizes = torch.zeros(8, dtype=torch.int32, device="cuda")
                sizes[2] = 4096
                whole = grouped_gemm(x, w, sizes, bias=bias)
                for count in (1, 5, 16, 50, 200, 1000):
                    sizes[2] = count
                    assert torch.equal(grouped_gemm(x[:count], w, sizes, bias=bias), whole[:count]), (format, count)


def test_the_command_tells_its_progress() -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "pretuned.runtime", "--batch-invariance"], capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 0, ended.stdout
    lines = [line for line in ended.stderr.splitlines() if "s left" in line]
    assert len(lines) >= len(FORMATS)
    assert lines[-1].endswith("about 0 s left")


def test_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PRETUNED_BATCH_INVARIANT", "1")
    reload()
    try:
        experts = Experts.drawn("mxfp4", 512, GPU)
        assert not any(counted.differing for counted in compared(experts.layer, 512, (1, 9, 100), 4).values())
    finally:
        monkeypatch.undo()
        reload()
