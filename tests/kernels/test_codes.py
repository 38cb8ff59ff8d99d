"""Arguments of codes and scales in blocks that kernels get, compared with the formats."""

from __future__ import annotations

import pytest
from portable_formats import PORTABLE

from pretuned.artifacts.records import PRECISIONS, DType
from pretuned.kernels.codes import BLOCK, CODES, WORD_ROW, CodeLayout

THREADS = 4  # that share a row of a block
FORMATS = pytest.mark.parametrize(("name", "codes"), CODES.items(), ids=list(CODES))


def test_there_is_a_row_for_each_dtype_that_is_put_in_order() -> None:
    assert list(CODES) == [
        dtype.value
        for dtype in DType
        if dtype.quantised
        and not dtype.quantises_x
        and dtype.precision.w.scale is not None
        and not dtype.precision.w.scale.zero_bits
        and dtype is not DType.MXFP8
        and dtype.value not in PORTABLE
    ]


@FORMATS
def test_codes_are_the_format_s(name: str, codes: CodeLayout) -> None:
    w = PRECISIONS[name].w
    assert codes.codes == w.name
    assert codes.words * 4 * THREADS * BLOCK == BLOCK * BLOCK * w.bits // 8
    assert codes.words * WORD_ROW * 4 == BLOCK * BLOCK * w.bits // 8  # rows of the descriptor: a block is whole ones


@FORMATS
def test_scales_are_the_format_s(name: str, codes: CodeLayout) -> None:
    scale = PRECISIONS[name].w.scale
    assert scale is not None
    if scale.rows > 1:
        assert (codes.scales, scale.rows % BLOCK, scale.columns % BLOCK) == ("block", 0, 0)
        assert (codes.groups, codes.blocks_per_scale, codes.scale_bytes) == (1, 1, 16)  # one bf16, eight times
    elif not scale.columns:
        assert (codes.scales, codes.scale_bytes) == ("none", 0)  # multiplied with the sums
    else:
        assert codes.scales == scale.name
        assert codes.groups * scale.columns == BLOCK * codes.blocks_per_scale
        bits = {"e8m0": 8, "e4m3": 8, "bf16": 16}[scale.name]
        assert codes.scale_bytes == BLOCK * codes.groups * bits // 8
    assert codes.outer is (scale.outer is not None or not scale.columns)


@FORMATS
def test_bytes_of_blocks_are_those_of_a_matrix(name: str, codes: CodeLayout) -> None:
    """Prepared weights take as many bytes as the checkpoint's, but for scales of blocks."""
    N, K = 256, 512
    blocks = N * K // BLOCK**2
    scales = blocks // codes.blocks_per_scale * codes.scale_bytes
    w = PRECISIONS[name].w
    assert w.scale is not None
    outer = 0 if w.scale.outer is None else w.scale.outer.nbytes(N, K)
    extra = PRECISIONS[name].w_bytes(N, K) - N * K * w.bits // 8 - outer
    if codes.scales == "block":
        assert (scales, extra) == (blocks * 16, blocks // 4 * 4)
    else:
        assert scales == (0 if codes.scales == "none" else extra)


def test_rows_of_shared_memory_for_scales() -> None:
    """Shared memory has as many rows of scales as blocks of K, or as lie 128 bytes apart."""
    assert [CODES["mxfp4"].places(width) for width in (1, 2, 16)] == [1, 2, 16]
    assert [CODES["int4_g128"].places(width) for width in (2, 4, 16)] == [1, 2, 8]
    assert [CODES["fp8_block_a16"].places(width) for width in (1, 8, 16)] == [8, 8, 16]
    assert CODES["fp8_channel_a16"].places(4) == 4
    for codes in CODES.values():
        for blocks in (2, 4, 8, 16):
            assert codes.places(blocks) * codes.scale_bytes % 128 == 0
