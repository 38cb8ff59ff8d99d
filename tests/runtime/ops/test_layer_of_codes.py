"""A layer whose products read codes of both operands, on the emulated GPU of tests/support/coded_machine.py."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from coded_machine import PRODUCTS, TOP_K, H, Machine, T, routed
from emulated_driver import emulated
from emulated_kernels import variant_and_code

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import RowOp
from pretuned.kernels.activations import Activation
from pretuned.runtime import ExpertWeights, batch_invariant, grouped_gemm, moe_mlp

ONE, TWO = [RowOp.ACTIVATION_CODES], [RowOp.ACTIVATION, RowOp.QUANTIZE]


@pytest.fixture
def machine(clean_places: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Machine]:
    monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
    with emulated(Machine(clean_places)) as gpu:
        yield gpu  # type: ignore[misc]


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
def test_expected_rows_decide_whether_x_is_quantised(machine: Machine, format: str) -> None:
    """In each product, by the first call and by its plan."""
    up, down = machine.layer(True, format)
    hidden, ids, weights = routed(T)
    coded = {variant_and_code(spec)[0].cubin_sha256 for spec in PRODUCTS if spec.dtype.quantises_x}
    results = {}
    for hint in (None, 6, 6, 30, 30, 6, None):
        machine.launches.clear()
        out = moe_mlp(hidden, up, down, ids, weights, expected_rows=hint)
        quantises = [launch.digest in coded for launch in machine.products]
        assert quantises == [hint != 6] * 2
        assert {launch.words["M"] for launch in machine.products} == {T * TOP_K}
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

    def run(many: int) -> torch.Tensor:
        hidden, ids, weights = routed(many)
        return moe_mlp(hidden, up, down, ids, weights, activation=act, gated=gated, interleaved=interleaved)

    results = []
    for many in (24, 24, 23):
        machine.launches.clear()
        results.append(run(many))
        assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    machine.publish(without=RowOp.ACTIVATION_CODES)
    for launches, many in zip(results, (24, 24, 23), strict=True):
        machine.launches.clear()
        assert torch.equal(run(many), launches)
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
    out = moe_mlp(hidden.requires_grad_(), up, down, ids, weights)
    assert torch.equal(out, want)
    assert machine.ran == [RowOp.QUANTIZE, *ONE, RowOp.COMBINE]
    assert out.grad_fn is not None


@pytest.mark.parametrize("format", ["fp8_block", "fp8_channel"])
@pytest.mark.parametrize("always", [False, True])
def test_the_batch_invariant_mode_always_quantises_x_or_never(machine: Machine, format: str, always: bool) -> None:
    """Of any number of tokens, with any hint; and where it can't, of rows that lie apart, it says so."""
    up, down = machine.layer(True, format)
    coded = {variant_and_code(spec)[0].cubin_sha256 for spec in PRODUCTS if spec.dtype.quantises_x}
    with batch_invariant(quantize_x=always):
        for tokens in (1, 3, T):
            hidden, ids, weights = routed(tokens)
            for hint in (None, 1, None):
                machine.launches.clear()
                moe_mlp(hidden, up, down, ids, weights, expected_rows=hint)
                assert [launch.digest in coded for launch in machine.products] == [always] * 2
        counts, wide = torch.tensor([3, 0, 1, 2], dtype=torch.int32), torch.zeros(6, 2 * H).bfloat16()[:, :H]
        if always:
            with pytest.raises(InputError, match=r"rows that lie apart, which can't be quantised: pass x.contiguous"):
                grouped_gemm(wide, up, counts)
        else:
            grouped_gemm(wide, up, counts)
