"""aot bench on the CPU: real times of the reference and of torch in a table, JSON and a plot; what is left out, why."""

from __future__ import annotations

import json
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from pretuned.aot.cli.main import run
from pretuned.aot.compare.result import OURS, kind_of
from pretuned.aot.compare.run import (
    LOOP,
    TORCH,
    Inputs,
    Libraries,
    Library,
    NoCall,
    PeerProduct,
    PreparedCall,
    _Compared,
    _deepgemm_call,
    _vllm_call,
    capture_call,
    cells_of,
    find_libraries,
    matmul_loop,
    replayed_error,
)
from pretuned.aot.measure.clock import HostClock
from pretuned.aot.measure.inputs import activations, routed_rows, weights
from pretuned.aot.models.load import load_models
from pretuned.artifacts.records import Op

CPU = torch.device("cpu")
EVEN, ODD = "shape:E=4,H=64,I=32,k=2 name=even", "shape:E=4,H=50,I=33,k=2 name=odd"


@pytest.fixture
def bench(tmp_path, monkeypatch, capsys):
    """``aot bench`` on the CPU: its exit code, stdout and stderr."""
    monkeypatch.chdir(tmp_path)

    def command(*arguments, device="cpu"):
        code = run(["bench", "--device", device, "--budget-ms", "1", *map(str, arguments)])
        output = capsys.readouterr()
        return code, output.out, output.err

    return command


@pytest.mark.slow  # draws
def test_times_of_all_that_is_here_and_a_plot(bench, tmp_path):
    code, out, err = bench("--models", EVEN, "--tokens", "1,1024", "--plot", "b.png", "--json")
    assert code == 0, err
    report = json.loads(out)
    assert report["device"] == "CPU"
    assert [(cell["gemm"], cell["op"], cell["tokens"]) for cell in report["cells"]] == [
        ("gate_up", "forward", 1),
        ("down", "forward", 1),
        *((gemm, op, 1024) for gemm in ("gate_up", "down") for op in ("forward", "dX", "dW")),
    ]
    torch = TORCH.replace(" ", "_")  # no key has a blank
    for cell in report["cells"]:
        assert set(cell["us"]) == {OURS, torch, LOOP.replace(" ", "_")} == set(cell["error"])
        assert all(us > 0 for us in cell["us"].values())
        assert max(cell["error"].values()) < 1e-2
        assert cell["ratio"][torch] == pytest.approx(cell["us"][torch] / cell["us"][OURS])
        assert cell["tflops"] == pytest.approx(2e-6 * cell["M"] * cell["N"] * cell["K"] / cell["us"][OURS])
        assert cell["runs"] == "reference"
    assert [line.split(" x ")[1].split(" over ")[0] for line in report["headlines"]] == [TORCH, LOOP]
    assert all("over 8 cells" in line for line in report["headlines"])
    assert (tmp_path / "b.png").read_bytes().startswith(b"\x89PNG")


def test_a_library_that_refuses_a_shape_is_left_out_there_and_said(bench):
    """33 bf16 elements are no multiple of 16 bytes: torch's own words say so."""
    code, out, err = bench("--models", EVEN, "--models", ODD, "--tokens", "4", "--ops", "forward", "--plot", "b.svg")
    assert code == 0, err
    rows = [line.split() for line in out.splitlines() if line.startswith(("even", "odd"))]
    assert [(row[0], row[3], row[-2] == "-") for row in rows] == [
        ("even", "gate_up", False),
        ("even", "down", False),
        ("odd", "gate_up", True),
        ("odd", "down", True),
    ]
    assert f"{TORCH} over 2 cells" in out
    assert f"{LOOP} over 4 cells" in out
    assert f"left out: {TORCH} in 2 cells of 4: strides should be multiple of 16 bytes" in err
    assert "left out: vLLM: " in err
    assert "left out: DeepGEMM: " in err
    code, out, _ = bench("--models", ODD, "--tokens", "4", "--ops", "forward", "--quiet")
    assert (code, len(out.splitlines())) == (0, 1)


@pytest.mark.parametrize(
    ("arguments", "complaint"),
    [
        (["--models", "nothing/of-the-kind"], "nothing/of-the-kind"),
        (["--models", EVEN, "--tokens", "none"], "--tokens none: wanted numbers from 1 to"),
        (["--models", EVEN, "--tokens", "0"], "--tokens 0: wanted numbers from 1 to"),
        (["--models", EVEN, "--tokens", "9999999"], "wanted numbers from 1 to"),
        (["--models", EVEN, "--ops", "dX", "--tokens", "16"], "nothing to time: gradients are timed from 1024 tokens"),
        (["--models", EVEN, "--plot", "b.jpg"], "ends in .png or .svg"),
        (["--models", EVEN, "--plot", "taken.png"], "is there and is no png image"),
        ([], "--models"),
    ],
)
def test_what_is_refused(bench, tmp_path, arguments, complaint):
    (tmp_path / "taken.png").write_text("a text")
    code, out, err = bench(*arguments)
    assert (code, out) == (2, "")
    assert complaint in err


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_to_do(bench):
    code, out, err = bench("--models", EVEN, device="cuda")
    assert (code, out) == (1, "")
    assert err.startswith("error: aot bench needs a GPU that torch can use")
    assert len(err.splitlines()) == 1


def peer_inputs(sizes=(3, 0, 130, 1), N=6, K=5, op="forward"):
    m_sizes = torch.tensor(sizes, dtype=torch.int32)
    M = sum(sizes)
    dy = None if op == "forward" else activations(M, N, torch.bfloat16, CPU)
    return Inputs(activations(M, K, torch.bfloat16, CPU), weights(len(sizes), N, K, torch.bfloat16, CPU), m_sizes, dy)


@pytest.mark.parametrize("op", ["forward", "dX", "dW"])
def test_the_loop_over_experts_is_right(op):
    clock, inputs = (
        HostClock(),
        peer_inputs(op=op),
    )  # its second expert has no rows: dw is zero there, whatever lay there before
    assert replayed_error(clock, capture_call(clock, matmul_loop(op, inputs)), inputs, op) < 1e-2


def test_libraries_that_are_wrong_or_fail_are_left_out():
    (shard,) = load_models([EVEN]).shapes
    (gemm, _) = shard.gemms()

    def fails(product: PeerProduct) -> PreparedCall:
        raise RuntimeError("no such\nconfig")

    def refuses(product: PeerProduct) -> PreparedCall:
        raise NoCall("never of this kind")

    def wrong(product: PeerProduct) -> PreparedCall:
        return PreparedCall(lambda: 1.5 * matmul_loop(product.op, product.inputs)())

    here = (*find_libraries(CPU).here, *(Library(prepare.__name__, "", prepare) for prepare in (fails, refuses, wrong)))
    bench = _Compared(Libraries(here, {}), CPU, 1.0, gemm.E * gemm.N * gemm.K)
    (cell,) = bench.all([(shard, gemm, Op.FORWARD, 16)])
    assert set(cell.us) == {OURS, TORCH, LOOP}
    assert cell.left_out.keys() == {"fails", "refuses", "wrong"}
    assert cell.left_out["fails"] == "no such"
    assert cell.left_out["refuses"] == "never of this kind"
    assert cell.left_out["wrong"].startswith("wrong: relative error 0.5")


def test_what_a_replay_does_not_write_is_an_error():
    clock, inputs = HostClock(), peer_inputs()
    results = [matmul_loop("forward", inputs)()] * 2
    call = capture_call(clock, lambda: results[0])
    assert not replayed_error(clock, call, inputs, "forward") < 1e-2  # NaN was written over it, and stayed


def test_deepgemms_rows_are_padded_and_found_again():
    """Its contiguous form, computed by torch: whole blocks of 128 rows, each of one expert."""

    def product(x, w, y, experts):
        for begin in range(0, len(x), 128):
            (expert,) = set(experts[begin : begin + 128].tolist())
            y[begin : begin + 128] = x[begin : begin + 128] @ w[expert].T

    inputs = peer_inputs()
    padded = _deepgemm_call(
        SimpleNamespace(m_grouped_bf16_gemm_nt_contiguous=product), PeerProduct("forward", inputs, 3, 2, 64)
    )
    clock = HostClock()
    assert padded.at is not None
    assert replayed_error(clock, capture_call(clock, padded.call), inputs, "forward", padded.at) < 1e-2
    with pytest.raises(NoCall, match="gradients"):
        _deepgemm_call(SimpleNamespace(), PeerProduct("dX", inputs, 3, 2, 64))


@pytest.mark.parametrize("sizes", [(3, 0, 130, 1), (0,) * 7 + (1,)])
def test_vllms_rows_stand_in_blocks_of_their_expert(sizes):
    """Its functions, computed by torch, with the arguments that vLLM 0.20 and 0.32 have."""
    asked = []

    def config(w1, w2, top_k, dtype, tokens):
        asked.append((w1, w2, top_k, dtype, tokens))
        return {"BLOCK_SIZE_M": 16}

    def align(ids, block, experts):
        blocks = [(e, (ids[:, 0] == e).nonzero()[:, 0].split(block)) for e in range(experts) if (ids == e).any()]
        parts = [(e, rows) for e, all_rows in blocks for rows in all_rows]
        slots = [torch.cat([rows, rows.new_full((block - len(rows),), len(ids))]) for _, rows in parts]
        return torch.cat(slots), torch.tensor([e for e, _ in parts]), torch.tensor([block * len(parts)])

    def invoke(
        A,
        B,
        C,
        A_scale,
        B_scale,
        topk_weights,
        sorted_token_ids,
        expert_ids,
        num_tokens_post_padded,
        mul_routed_weight,
        top_k,
        config,
        compute_type,
        use_fp8_w8a8,
        use_int8_w8a8,
        use_int8_w8a16,
        use_int4_w4a16,
        per_channel_quant,
        block_shape=None,
        B_bias=None,
    ):
        assert (A_scale, B_scale, topk_weights, mul_routed_weight, top_k) == (None, None, None, False, 1)
        assert not any((use_fp8_w8a8, use_int8_w8a8, use_int8_w8a16, use_int4_w4a16, per_channel_quant))
        for number, expert in enumerate(expert_ids.tolist()):
            rows = [number] if sorted_token_ids is None else sorted_token_ids[16 * number : 16 * number + 16].tolist()
            for row in rows:
                if row < len(A):
                    C[row, 0] = A[row] @ B[expert].T

    inputs = peer_inputs(sizes)
    module = SimpleNamespace(try_get_optimal_moe_config=config, invoke_fused_moe_triton_kernel=invoke)
    clock = HostClock()
    call = _vllm_call(module, align, None, PeerProduct("forward", inputs, 3, 2, 64))
    assert replayed_error(clock, capture_call(clock, call.call), inputs, "forward", call.at) < 1e-2
    assert asked == [((len(sizes), 6, 5), (len(sizes), 5, 3), 2, None, 64)]
    with pytest.raises(NoCall, match="gradients"):
        _vllm_call(module, align, None, PeerProduct("dX", inputs, 3, 2, 64))


def test_few_tokens_come_first_and_gradients_from_1024_on():
    shards = load_models([EVEN]).shapes
    cells = cells_of(shards, tuple(Op), (1024, 1))
    assert [(gemm.role, op.value, T) for _, gemm, op, T in cells] == [
        ("gate_up", "forward", 1),
        ("down", "forward", 1),
        *((gemm, op, 1024) for gemm in ("gate_up", "down") for op in ("forward", "dX", "dW")),
    ]


def test_experts_of_a_rank_get_its_share_of_a_token():
    (shard,) = load_models(["shape:E=8,H=64,I=32,k=4 ep=4"]).shapes
    bench = _Compared(find_libraries(CPU), CPU, 1.0, 2 * 64 * 64)
    (cell,) = bench.all([(shard, shard.gemms()[0], Op.FORWARD, 16)])
    assert (cell.E, cell.M) == (2, 16)
    assert int(routed_rows(2, 1, 16).sum()) == cell.M


def test_help_and_mistakes_need_no_torch():
    code = "import sys; from pretuned.aot.cli.main import run; run(sys.argv[1:]); assert 'torch' not in sys.modules"
    for arguments in (["bench", "--help"], ["bench", "--models", EVEN, "--tokens", "x"]):
        assert (
            subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, check=False).returncode == 0
        )


def test_kinds_of_plot():
    from pathlib import Path

    assert [kind_of(Path(name)) for name in ("a.png", "a.SVG", "a.pdf", "png")] == ["png", "svg", None, None]
