from __future__ import annotations

import re

import pytest

from pretuned.aot.compile import compile_variant
from pretuned.aot.streaming import streamed
from pretuned.artifacts.types import DType, Fusion, Layout, Op
from pretuned.kernels.abi import Spec
from pretuned.kernels.config import Config, invalid

LOAD = (
    "\t@%p9 cp.async.bulk.tensor.{rank}d.shared::cta.global.mbarrier::complete_tx::bytes [%r1], [%rd3, {{%r2, %r4}}], "
    "[%r5];\n"
)


def test_every_load_of_w_gets_the_hint_and_no_other() -> None:
    ptx = LOAD.format(rank=2) + LOAD.format(rank=3) + LOAD.format(rank=3)
    text = streamed(ptx)
    x, *w, end = text.split("\n")
    assert x in ptx
    assert end == ""
    for line in w:
        assert ".mbarrier::complete_tx::bytes.L2::cache_hint [%r1]" in line
        assert line.endswith(", [%r5], 0x12f0000000000000;")
    assert re.sub(r"\.L2::cache_hint|, 0x12f0000000000000", "", text) == ptx


def test_code_that_loads_no_w_or_has_hints_already_is_an_error() -> None:
    with pytest.raises(ValueError, match="0 TMA loads of w"):
        streamed(LOAD.format(rank=2))
    with pytest.raises(ValueError, match="2 have a hint already"):
        streamed(streamed(LOAD.format(rank=3) * 2) + LOAD.format(rank=3))


@pytest.mark.parametrize(("layout", "fusion"), [(Layout.NK, Fusion.NONE), (Layout.KN, Fusion.GATHER)])
def test_a_streamed_variant_is_the_same_code_but_for_the_hints(layout: Layout, fusion: Fusion) -> None:
    plain, hinted = (
        compile_variant(
            Spec(
                Op.FORWARD,
                DType.BF16,
                Config(16, 64, 128, 4, 3, tma=True, persistent=False, streamed=on),
                layout,
                fusion,
            ),
            90,
        )
        for on in (False, True)
    )
    assert hinted.cubin != plain.cubin
    assert hinted.variant.arguments == plain.variant.arguments
    assert hinted.variant.tensor_maps == plain.variant.tensor_maps
    assert (hinted.variant.threads, hinted.variant.shared_bytes) == (plain.variant.threads, plain.variant.shared_bytes)
    again = compile_variant(
        Spec(Op.FORWARD, DType.BF16, Config(16, 64, 128, 4, 3, tma=True, persistent=False), layout, fusion), 90
    )
    assert again.cubin == plain.cubin, "the hook is gone after it"


def test_what_can_be_streamed() -> None:
    assert invalid(Config(16, 64, 128, 4, 3, tma=True, persistent=False, streamed=True)) is None
    assert "streamed" in str(invalid(Config(16, 64, 128, 4, 3, streamed=True)))
    assert "streamed" in str(invalid(Config(128, 256, 64, 8, 4, tma=True, specialized=True, streamed=True)))
    assert str(Config(16, 64, 128, 4, 3, tma=True, persistent=False, streamed=True)).endswith(" tma streamed")
