"""A layer whose products read codes of both operands, on the emulated GPU.

Its row kernels do what the real ones do; a product multiplies the codes that it is given by the weights that the test
has in float32.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from emulated_driver import H200, EmulatedGpu, Launch, emulated
from emulated_kernels import bundle_of, made
from host_gpu import SLOTS, publish_alone

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.bundle import Choice, Source
from pretuned.artifacts.records.precision import DType
from pretuned.artifacts.records.problem import Op, Problem, RowOp
from pretuned.kernels.contract.activations import Activation
from pretuned.kernels.contract.config import Config, Loads, Schedule, TileRows
from pretuned.kernels.contract.spec import Spec
from pretuned.kernels.hopper_w8a8_block import scale_columns
from pretuned.kernels.rowops import RowOpSpec
from pretuned.runtime import ExpertWeights, batch_invariant, grouped_gemm, moe_mlp
from pretuned.runtime.weights.row_codes import values_of_rows

E, T, TOP_K, H, I = 4, 24, 2, 256, 128  # noqa: E741
ONE, TWO = [RowOp.ACTIVATION_CODES], [RowOp.ACTIVATION, RowOp.QUANTIZE]
PASSES = (
    RowOp.ACTIVATION,
    RowOp.ACTIVATION_CODES,
    RowOp.QUANTIZE,
    RowOp.COMBINE,
    RowOp.QUANTIZE_ROWS,
    RowOp.ACTIVATION_ROW_CODES,
)
SCALED = Config(128, 256, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_BLOCK)
MIXED = Config(16, 64, 128, 8, 3, loads=Loads.TMA, schedule=Schedule.W4A16)
BY_ROW = Config(256, 128, 128, 8, 4, loads=Loads.TMA, schedule=Schedule.W8A8_CHANNEL, rows=TileRows.FITTED)
PRODUCTS = (
    Spec(Op.FORWARD, DType.FP8_BLOCK, SCALED),
    Spec(Op.FORWARD, DType.FP8_BLOCK_A16, MIXED),
    Spec(Op.FORWARD, DType.FP8_CHANNEL, BY_ROW),
    Spec(Op.FORWARD, DType.FP8_CHANNEL_A16, MIXED),
)


def tensor_at(address: int, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The memory that begins there."""
    held = (ctypes.c_uint8 * (math.prod(shape) * dtype.itemsize)).from_address(address)
    return torch.frombuffer(held, dtype=dtype).view(shape)


class Machine(EmulatedGpu):
    """An H200 whose bundle has the products of codes, and measured that quantising x is faster, or slower."""

    def __init__(self, folder: Path) -> None:
        super().__init__(H200)
        self.folder, self.dense = folder, dict[int, torch.Tensor]()
        self.after |= {made(one)[0].cubin_sha256: self.multiply for one in PRODUCTS}
        self.publish()

    def publish(self, *, without: RowOp | None = None, quantises: bool = True) -> None:
        specs = [*PRODUCTS, *(RowOpSpec(op, DType.BF16) for op in PASSES if op is not without)]
        """Of 8 rows and fewer quantising x is slower in either case."""

        def ns(spec: Spec, bucket: int) -> int:
            codes_us = 1 if quantises and bucket > 8 else 2000
            return 1000 * (codes_us if spec.dtype.quantises_x else 1000)

        choices = {
            Problem(Op.FORWARD, spec.dtype, E, N, K): [
                Choice(bucket, index, Source.MEASURED, ns(spec, bucket), gpu=0) for bucket in (4, 8, 32, 64)
            ]
            for index, spec in enumerate(PRODUCTS)
            for N, K in ((2 * I, H), (I, H), (H, I))
        }
        sort = made(RowOpSpec(RowOp.SORT_SLOTS, DType.FP32, 1), block=SLOTS)
        publish_alone(self.folder, bundle_of([*map(made, specs), sort], choices, gpus=[H200]))
        self.launches.clear()

    @property
    def ran(self) -> list[RowOp]:
        """The row kernels that were launched, but for the sort."""
        return [RowOp(one.code.op) for one in self.passes if one.code.op is not RowOp.SORT_SLOTS]

    def multiply(self, launch: Launch) -> None:
        words, at = launch.words, launch.addresses()
        M, N, K = (words[name] for name in ("M", "N", "K"))
        if "x_scale" in at:
            codes = tensor_at(at["x"], (M, K), torch.float8_e4m3fn)
            by_row = launch.code.dtype is DType.FP8_CHANNEL
            scale = tensor_at(at["x_scale"], (M,) if by_row else (K // 128, scale_columns(M)), torch.float32)
            values, row = values_of_rows(codes, scale, slice(0, M)), 0
        else:
            values, row = tensor_at(at["x"], (M, K), torch.bfloat16).float(), 0
        stored = tensor_at(at["y"], (M, N), torch.bfloat16)
        for e, count in enumerate(tensor_at(at["m_sizes"], (E,), torch.int32).tolist()):
            stored[row : row + count] = values[row : row + count] @ self.dense[at["w"]][e].T
            row += count
        if words["flags"] & 16:
            stored[row:] = 0

    def layer(self, gated: bool, format: str = "fp8_block") -> tuple[ExpertWeights, ExpertWeights]:
        """Prepared weights, whose values the GPU knows."""
        up, down = layer_of(gated, format)
        self.dense |= {one.codes.data_ptr(): one.dequantize(torch.float32) for one in (up, down)}
        return up, down


@pytest.fixture
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Machine(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]


def layer_of(gated: bool, format: str) -> tuple[ExpertWeights, ExpertWeights]:
    g = torch.Generator().manual_seed(3)
    pairs = ((1 + gated) * I, H), (H, I)
    up, down = (ExpertWeights.quantize(torch.randn(E, N, K, generator=g) / K**0.5, format) for N, K in pairs)
    return up.prepare(), down.prepare()


def routed(T: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    g = torch.Generator().manual_seed(T)
    ids = torch.rand(T, E, generator=g).topk(TOP_K).indices
    ids[T // 2 :, 1] = -1  # of no expert
    return torch.randn(T, H, generator=g).bfloat16(), ids, torch.rand(T, TOP_K, generator=g)


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_expected_rows_decide_whether_x_is_quantised(machine: Machine, format: str) -> None:
    """In each product, by the first call and by its plan."""
    up, down = machine.layer(True, format)
    hidden, ids, weights = routed(T)
    coded = {made(one)[0].cubin_sha256 for one in PRODUCTS if one.dtype.quantises_x}
    results = {}
    for hint in (None, 6, 6, 30, 30, 6, None):
        machine.launches.clear()
        out = moe_mlp(hidden, up, down, ids, weights, expected_rows=hint)
        quantises = [one.digest in coded for one in machine.products]
        assert quantises == [hint != 6] * 2
        assert {one.words["M"] for one in machine.products} == {T * TOP_K}
        assert torch.equal(results.setdefault(hint, out), out)
    assert torch.equal(results[None], results[30])
    assert not torch.equal(results[None], results[6])
    torch.testing.assert_close(results[6], results[None], rtol=0.1, atol=0.1)


ACTS: list[tuple[str | Activation, bool, bool]] = [
    ("silu", True, False),
    ("swiglu_oai", True, True),
    ("relu2", False, False),
    (Activation("situ", beta=1.5, linear_beta=2.0), True, False),
]


@pytest.mark.parametrize(("act", "gated", "interleaved"), ACTS)
def test_one_pass_does_what_two_did(machine: Machine, act: str | Activation, gated: bool, interleaved: bool) -> None:
    """Also in a call that comes again, of another number of rows, which is a program's."""
    up, down = machine.layer(gated)

    def run(T: int) -> torch.Tensor:
        hidden, ids, weights = routed(T)
        return moe_mlp(hidden, up, down, ids, weights, activation=act, gated=gated, interleaved=interleaved)

    found = []
    for T in (24, 24, 23):
        machine.launches.clear()
        found.append(run(T))
        assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    machine.publish(without=RowOp.ACTIVATION_CODES)
    for one, T in zip(found, (24, 24, 23), strict=True):
        machine.launches.clear()
        assert torch.equal(run(T), one)
        assert machine.ran == [RowOp.QUANTIZE, *TWO, RowOp.COMBINE]


@pytest.mark.parametrize(("act", "gated", "interleaved"), ACTS[:3])
def test_weights_with_a_scale_a_row_have_row_kernels_of_their_own(
    machine: Machine, act: str | Activation, gated: bool, interleaved: bool
) -> None:
    up, down = machine.layer(gated, "fp8_channel")
    hidden, ids, weights = routed(T)

    def run() -> torch.Tensor:
        machine.launches.clear()
        return moe_mlp(hidden, up, down, ids, weights, activation=act, gated=gated, interleaved=interleaved)

    first = [run() for _ in range(2)]
    assert machine.ran == [RowOp.QUANTIZE_ROWS, RowOp.ACTIVATION_ROW_CODES, RowOp.COMBINE]
    machine.publish(without=RowOp.ACTIVATION_ROW_CODES)
    assert torch.equal(run(), first[0])
    assert machine.ran == [RowOp.QUANTIZE_ROWS, RowOp.ACTIVATION, RowOp.QUANTIZE_ROWS, RowOp.COMBINE]
    assert torch.equal(*first)


def test_a_bundle_without_the_pass_runs_as_before(machine: Machine) -> None:
    machine.publish(without=RowOp.ACTIVATION_CODES)
    up, down = machine.layer(True)
    hidden, ids, weights = routed(T)
    moe_mlp(hidden, up, down, ids, weights)
    assert machine.ran == [RowOp.QUANTIZE, *TWO, RowOp.COMBINE]


def test_x_that_stays_as_it_is_is_activated_alone(machine: Machine) -> None:
    """Where the second product reads no codes the activation is stored."""
    machine.publish(quantises=False)
    up, down = machine.layer(True)
    hidden, ids, weights = routed(T)
    moe_mlp(hidden, up, down, ids, weights)
    assert machine.ran == [RowOp.ACTIVATION, RowOp.COMBINE]
    machine.publish()
    machine.launches.clear()
    dense = ExpertWeights.dequantize(down, torch.bfloat16)
    moe_mlp(hidden, up, dense, ids, weights)
    assert RowOp.ACTIVATION in machine.ran
    assert RowOp.ACTIVATION_CODES not in machine.ran


def test_what_a_gradient_needs_is_kept(machine: Machine) -> None:
    """That is h, which the pass reads; the activation itself is nowhere."""
    up, down = machine.layer(True)
    hidden, ids, weights = routed(T)
    want = moe_mlp(hidden, up, down, ids, weights)
    machine.launches.clear()
    found = moe_mlp(hidden.requires_grad_(), up, down, ids, weights)
    assert torch.equal(found, want)
    assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    assert found.grad_fn is not None


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("always", [False, True])
def test_the_batch_invariant_mode_always_quantises_x_or_never(machine: Machine, format: str, always: bool) -> None:
    """Of any number of tokens, with any hint; and where it can't, of rows that lie apart, it says so."""
    up, down = machine.layer(True, format)
    coded = {made(one)[0].cubin_sha256 for one in PRODUCTS if one.dtype.quantises_x}
    with batch_invariant(quantize_x=always):
        for tokens in (1, 3, T):
            hidden, ids, weights = routed(tokens)
            for hint in (None, 1, None):
                machine.launches.clear()
                moe_mlp(hidden, up, down, ids, weights, expected_rows=hint)
                assert [one.digest in coded for one in machine.products] == [always] * 2
        counts, wide = torch.tensor([3, 0, 1, 2], dtype=torch.int32), torch.zeros(6, 2 * H).bfloat16()[:, :H]
        if always:
            with pytest.raises(InputError, match=r"rows that lie apart, which can't be quantised: pass x.contiguous"):
                grouped_gemm(wide, up, counts)
        else:
            grouped_gemm(wide, up, counts)
