"""The kernel for codes of rows that lie apart: its entry, its cubins, and the order in which it takes 64 codes of K."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from compiled import assert_as_shipped

from pretuned.aot.compile.triton import compile_variant
from pretuned.aot.plan.families import starts_specs
from pretuned.artifacts.records import DType, Fusion, Layout, Op, Problem
from pretuned.kernels import registry
from pretuned.kernels.arch import arch_of
from pretuned.kernels.cost import rejection
from pretuned.kernels.hopper_w8a8_block import ROWS_W8A8_STARTS, STARTS_CONFIGS, stage_bytes
from pretuned.kernels.hopper_w8a8_block import starts as kernel
from pretuned.kernels.registry import refusal, undeclared, unlaunchable
from pretuned.kernels.search import candidates
from pretuned.kernels.spec import Config, Spec, code_of, reads_in_place
from pretuned.runtime.weights.prepared_layout import K_ORDER

SPECS = [Spec(Op.FORWARD, DType.FP8_BLOCK, config, fusion=Fusion.STARTS) for config in STARTS_CONFIGS]
PROBLEM = Problem(Op.FORWARD, DType.FP8_BLOCK, 32, 4096, 7168)


@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_config_is_this_kernels_alone_and_comes_back(spec: Spec) -> None:
    assert refusal(spec, 90) is None
    assert registry.entry_of(spec) is ROWS_W8A8_STARTS
    assert Config.from_pairs(spec.config.pairs()) == spec.config
    for other in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER):
        assert refusal(spec._replace(fusion=other), 90) is not None
    assert refusal(spec._replace(dtype=DType.FP8_CHANNEL), 90) is not None
    assert "has no " in str(refusal(spec, 100))
    room_bytes = arch_of(90).limits.shared_per_block_bytes
    assert spec.config.num_stages * stage_bytes() < room_bytes


def test_no_other_kernel_has_the_fusion_and_none_is_measured() -> None:
    others = [Spec(Op.FORWARD, DType.FP8_BLOCK, c) for c in candidates(Op.FORWARD, DType.FP8_BLOCK, 90)]
    assert all(refusal(spec._replace(fusion=Fusion.STARTS), 90) for spec in others)
    assert not {spec.config for spec in others} & set(STARTS_CONFIGS)


def test_the_fusion_goes_alone() -> None:
    assert code_of(Op.FORWARD, Fusion.STARTS) is Fusion.STARTS
    for op, fusion in (
        (Op.DX, Fusion.STARTS),
        (Op.FORWARD, Fusion.STARTS | Fusion.BIAS),
        (Op.FORWARD, Fusion.STARTS | Fusion.SILU),
    ):
        with pytest.raises(ValueError, match="STARTS goes alone"):
            code_of(op, fusion)


def test_which_plans_have_it() -> None:
    assert reads_in_place(PROBLEM)
    assert list(starts_specs([PROBLEM, PROBLEM], 90)) == SPECS
    for other in (
        PROBLEM._replace(dtype=DType.FP8_CHANNEL),
        PROBLEM._replace(dtype=DType.BF16),
        PROBLEM._replace(layout=Layout.STORED),
        PROBLEM._replace(fusion=Fusion.SCATTER),
        PROBLEM._replace(op=Op.DX),
    ):
        assert starts_specs([other], 90) == ()
    assert starts_specs([PROBLEM], 100) == ()


@pytest.mark.slow
@pytest.mark.parametrize("spec", SPECS, ids=str)
def test_a_cubin_is_as_declared_and_does_not_spill(spec: Spec) -> None:
    compiled = compile_variant(spec, 90)
    assert_as_shipped(spec, compiled)
    variant = compiled.variant
    assert unlaunchable(variant) is None
    assert undeclared(variant, arch_of(90).limits) is None
    assert rejection(variant, arch_of(90)) is None
    assert variant.spill_bytes <= 32
    assert variant.scratch_bytes == 0


def _permuted(text: str, low: np.ndarray, high: np.ndarray) -> list[np.ndarray]:
    """Return the result of two prmt instructions on the four bytes of a word each, in the last dimension."""
    results = []
    for selector in re.findall(r"prmt\.b32 \$\d, \$2, \$3, 0x([0-9A-F]{4});", text):
        both = np.concatenate([low, high], -1)
        results.append(both[..., [int(nibble, 16) for nibble in reversed(selector)]])
    return results


def test_two_byte_permutations_put_64_codes_in_order() -> None:
    """The permutations do what ``_in_order`` does; no byte changes its thread except as the operand's layout has it."""
    codes = np.arange(3 * 64).reshape(3, 64)
    words = codes.reshape(3, 4, 2, 2, 4).transpose(0, 1, 3, 4, 2)
    even, odd = _permuted(kernel._TWO_WORDS.value, words[..., 0], words[..., 1])
    ordered = np.stack([even, odd], -1).transpose(0, 2, 4, 1, 3).reshape(3, 64)
    assert ordered.tolist() == torch.tensor(codes)[:, torch.tensor(K_ORDER)].tolist()
