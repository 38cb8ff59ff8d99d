"""Codes and scales to numbers and back, against tables written out and torch's own conversions."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from portable_formats import PORTABLE

from pretuned.artifacts.records import PRECISIONS, Scale
from pretuned.kernels import rowops
from pretuned.runtime.weights import codes
from pretuned.runtime.weights.codes import Quantised
from pretuned.runtime.weights.expert_weights import ExpertWeights

E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]
FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised]


def test_every_byte_of_e2m1_is_two_of_the_table() -> None:
    all_codes = torch.arange(256, dtype=torch.uint8).view(1, 256)
    got = codes.values("mxfp4", Quantised(all_codes, torch.full((1, 16), 127, dtype=torch.uint8)))
    want = torch.tensor([[nibble for byte in range(256) for nibble in (E2M1[byte & 15], E2M1[byte >> 4])]])
    assert torch.equal(got, want)
    assert torch.equal(got.signbit(), want.signbit())


def test_every_e8m0_is_torchs() -> None:
    all_codes = torch.arange(256, dtype=torch.uint8)
    want = all_codes.view(torch.float8_e8m0fnu).float()
    torch.testing.assert_close(codes.e8m0(all_codes), want, rtol=0, atol=0, equal_nan=True)
    assert codes.e8m0(all_codes)[0] == 2.0**-127
    assert codes.e8m0(all_codes)[254] == 2.0**127
    assert codes.e8m0(all_codes)[255].isnan()


def test_every_e4m3_is_torchs() -> None:
    all_codes = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).view(2, 128)
    result = codes.values("fp8_channel", Quantised(all_codes, torch.tensor([1.0, 0.5])))
    torch.testing.assert_close(result, all_codes.float() * torch.tensor([[1.0], [0.5]]), rtol=0, atol=0, equal_nan=True)
    sizes = result[0].abs()  # 2**-9 is the least, subnormal; 448 the largest
    assert (sizes[sizes > 0].min(), sizes[:127].max()) == (2.0**-9, 448)


def test_both_ends_of_e8m0_times_e2m1_are_what_float32_has() -> None:
    byte = torch.tensor([[0x71] * 16], dtype=torch.uint8)  # 0.5 and 6
    least = codes.values("mxfp4", Quantised(byte, torch.tensor([[0]], dtype=torch.uint8)))
    assert least[0, :2].tolist() == [2.0**-128, 6 * 2.0**-127]
    most = codes.values("mxfp4", Quantised(byte, torch.tensor([[254]], dtype=torch.uint8)))
    assert most[0, :2].tolist() == [2.0**126, math.inf]  # 6 * 2**127 is no float32


def test_mxfp8_is_quantised_by_the_rule_of_ocp() -> None:
    """The scale is 2**(floor(log2(the largest)) - 8), and codes past 448 saturate."""
    w = torch.tensor([[1.0, -0.4375, 0.001953125] + [0.0] * 29 + [1.75, 1.9] + [0.0] * 30 + [-3.0]])
    packed = codes.quantise("mxfp8", w)
    assert packed.codes.dtype is torch.float8_e4m3fn
    assert packed.scale.tolist() == [[127 - 8, 127 - 8, 127 + 1 - 8]]
    assert packed.codes.float()[0, [0, 1, 2, 32, 33, 64]].tolist() == [256, -112, 0.5, 448, 448, -384]
    assert codes.values("mxfp8", packed)[0, [0, 1, 2, 32, 33, 64]].tolist() == [1, -0.4375, 2.0**-9, 1.75, 1.75, -3]


def test_both_ends_of_e8m0_times_e4m3_are_what_float32_has() -> None:
    code = torch.tensor([[448.0, 2.0**-9, float("nan")] + [1.0] * 29]).to(torch.float8_e4m3fn)
    for scale, wanted in ((0, [448 * 2.0**-127, 2.0**-136]), (254, [math.inf, 2.0**118]), (255, [math.nan] * 2)):
        value = codes.values("mxfp8", Quantised(code, torch.tensor([[scale]], dtype=torch.uint8)))[0]
        assert value[:2].tolist() == pytest.approx(wanted, rel=0, abs=0, nan_ok=True)
        assert math.isnan(value[2])


def test_nibbles_are_packed_low_first() -> None:
    assert codes.unpack(torch.tensor([0x21, 0xF3], dtype=torch.uint8)).tolist() == [1, 2, 3, 15]
    all_codes = torch.arange(256, dtype=torch.uint8)
    assert torch.equal(codes.pack(codes.unpack(all_codes)), all_codes)


def test_int4_is_less_8_or_less_its_zero_point() -> None:
    byte = torch.tensor([[0x80, 0x0F] + [0x88] * 14], dtype=torch.uint8)
    scale = torch.tensor([[0.25]], dtype=torch.bfloat16)
    plain = codes.values("int4_g32", Quantised(byte, scale))
    assert plain[0, :5].tolist() == [-2.0, 0.0, 1.75, -2.0, 0.0]
    shifted = codes.values("int4_g32_zp", Quantised(byte, scale, torch.tensor([[3]], dtype=torch.uint8)))
    assert shifted[0, :5].tolist() == [-0.75, 1.25, 3.0, -0.75, 1.25]


def test_nvfp4_has_a_scale_of_its_scales() -> None:
    byte = torch.full((1, 16), 0x27, dtype=torch.uint8)  # 6 and 1
    scale = torch.tensor([[448.0, 2.0**-9]]).to(torch.float8_e4m3fn)  # its largest and its least
    result = codes.values("nvfp4", Quantised(byte, scale, None, torch.tensor(0.5)))
    assert result[0, [0, 1, 16, 17]].tolist() == [1344, 224, 6 * 2.0**-10, 2.0**-10]


def test_blocks_cut_off_at_the_edges_have_their_own_scale() -> None:
    N, K = 130, 300
    scale = torch.arange(1, 7, dtype=torch.float32).view(2, 3)
    tensor = codes.values("fp8_block", Quantised(torch.ones((N, K)).to(torch.float8_e4m3fn), scale))
    want = torch.tensor([[scale[n // 128, k // 128] for k in range(K)] for n in range(N)])
    assert torch.equal(tensor, want)
    tensor = codes.values(
        "mxfp4", Quantised(torch.full((1, 20), 0x22, dtype=torch.uint8), torch.tensor([[127, 128]], dtype=torch.uint8))
    )
    assert tensor.tolist() == [[1.0] * 32 + [2.0] * 8]


@pytest.mark.parametrize("format", FORMATS)
def test_what_a_format_can_say_is_quantised_to_itself(format: str) -> None:
    torch.manual_seed(0)
    scale = PRECISIONS[format].w.scale
    assert scale is not None
    w = codes.values(format, codes.quantise(format, torch.randn(130, 300)))
    again = codes.quantise(format, w)
    assert torch.equal(codes.values(format, again), w) or format.startswith(("int4", "nvfp4"))
    error = (codes.values(format, again) - w).norm() / w.norm()
    assert error < 1e-2  # (their scale is not the largest element over the largest code)


# Half the distance between neighbours where the largest is 1: e4m3's 32 / 448, e2m1's 2 / 6 (4 of 6 with a power of 2
# for a scale, which may cut off a quarter, and of e4m3 an eighth), int4's 1 / 7, 1 / 15 of the whole range with a zero
# point.
_STEP = {"fp8": 16 / 448, "mxfp4": 0.25, "mxfp8": 0.125, "nvfp4": 0.19, "int4": 0.075}


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("size", [1e-30, 1.0, 1e30])
def test_no_element_is_further_off_than_half_a_step(format: str, size: float) -> None:
    torch.manual_seed(1)
    w = (torch.rand(128, 256) * 2 - 1) * size
    result = codes.values(format, codes.quantise(format, w))
    step = next(value for name, value in _STEP.items() if format.startswith(name))
    assert (result - w).abs().max() <= step * size * 1.01


@pytest.mark.parametrize("format", FORMATS)
def test_zeros_stay_zeros(format: str) -> None:
    packed = codes.quantise(format, torch.zeros(128, 256))
    assert not codes.values(format, packed).any()
    assert packed.scale.float().isfinite().all()
    assert not packed.scale.float().signbit().any()  # nvfp4's kernels read none


@settings(max_examples=200, deadline=None)
@given(st.floats(-8, 8, width=32))
def test_e2m1_is_the_nearest_and_of_two_the_even_one(value: float) -> None:
    w = torch.zeros(1, 32)
    w[0, 0], w[0, 1] = value, 6.0  # the scale is 1
    code = int(codes.unpack(codes.quantise("mxfp4", w.clamp(-7.9, 7.9)).codes)[0, 0])
    best = min(abs(abs(value) - number) for number in E2M1[:8])
    nearest = [i for i in range(8) if abs(abs(value) - E2M1[i]) == best]
    assert code & 7 == next(i for i in nearest if len(nearest) == 1 or i % 2 == 0)
    assert code >> 3 == int(math.copysign(1, value) < 0)


E4M3 = [
    math.ldexp(byte & 7, -9) if not byte >> 3 else math.ldexp(8 + (byte & 7), (byte >> 3) - 10) for byte in range(127)
]


def test_the_table_of_e4m3_is_torchs() -> None:
    assert torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).tolist() == E4M3


@settings(max_examples=60, deadline=None)
@given(st.sampled_from(FORMATS), st.integers(1, 140), st.integers(1, 90), st.data())
def test_every_value_is_what_its_tables_say(format: str, N: int, half: int, data: st.DataObject) -> None:
    K, elements = 2 * half, PRECISIONS[format].w
    scale = elements.scale
    assert scale is not None
    generator = torch.Generator().manual_seed(data.draw(st.integers(0, 1 << 30)))

    def drawn(most: int, *shape: int) -> torch.Tensor:
        return torch.randint(0, most, shape, generator=generator, dtype=torch.uint8)

    groups = -(-K // scale.columns) if scale.columns else 1
    shape = (-(-N // scale.rows), groups) if scale.columns else (N,)
    exponents, outer = drawn(127, *shape), 1.0
    factor: list[float]
    if scale.name == "e8m0":
        stored, factor = exponents + 64, [math.ldexp(1.0, int(code) + 64 - 127) for code in exponents.flatten()]
    elif scale.name == "e4m3":
        stored, factor = exponents.view(torch.float8_e4m3fn), [E4M3[int(code)] for code in exponents.flatten()]
        outer = 0.375
    else:
        stored = (exponents.float() / 64).to(torch.bfloat16 if scale.name == "bf16" else torch.float32)
        factor = stored.flatten().tolist()
    zero = drawn(17, *shape) if scale.zero_bits else None
    codes = drawn(127, N, K).view(torch.float8_e4m3fn) if elements.bits == 8 else drawn(255, N, half)
    tensor = codes_values(format, codes, stored, zero, outer if scale.outer else None)
    for n, k in ((0, 0), (N - 1, K - 1), *[(int(n), int(k)) for n, k in zip(drawn(N, 9), drawn(K, 9), strict=True)]):
        at = (n // max(scale.rows, 1)) * groups + (k // scale.columns if scale.columns else 0)
        if elements.bits == 8:
            value = E4M3[int(codes.view(torch.uint8)[n, k])]
        else:
            nibble = int(codes[n, k // 2]) >> 4 * (k % 2) & 15
            value = (
                E2M1[nibble] if elements.name == "e2m1" else nibble - (8 if zero is None else int(zero.flatten()[at]))
            )
        assert float(tensor[n, k]) == pytest.approx(value * factor[at] * outer, rel=1e-6, abs=0)


def codes_values(
    format: str, code: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None, outer: float | None
) -> torch.Tensor:
    return codes.values(format, Quantised(code, scale, zero, None if outer is None else torch.tensor(outer)))


def test_rows_for_fp8_have_448_where_their_largest_is() -> None:
    torch.manual_seed(2)
    x = torch.randn(5, 300).to(torch.bfloat16)
    x[1, :128] = 0
    x[2, 130] = 1e4
    coded = codes.quantise_rows(x, Scale("fp32", 1, 128))
    want = torch.zeros(5, 300)
    for m in range(5):
        for first in (0, 128, 256):
            part = x[m, first : first + 128].float()
            scale = part.abs().max() / 448 if part.any() else torch.tensor(1.0)
            want[m, first : first + 128] = (part / scale).to(torch.float8_e4m3fn).float() * scale
    assert torch.equal(coded, want)
    whole = codes.quantise_rows(x, Scale("fp32", 1, 0))
    scale = x.float().abs().amax(1, keepdim=True) / 448
    assert torch.equal(whole, (x.float() / scale).to(torch.float8_e4m3fn).float() * scale)


def test_what_is_no_number_stays_in_its_row_and_block() -> None:
    x = torch.ones(3, 256)
    x[0, 0], x[1, 200] = math.nan, math.inf
    coded = codes.quantise_rows(x, Scale("fp32", 1, 128))
    assert not coded[0, :128].isfinite().all()
    assert not coded[1, 128:].isfinite().all()
    assert coded[0, 128:].eq(1).all()
    assert coded[1, :128].eq(1).all()
    assert coded[2].eq(1).all()


def test_rows_as_small_as_float32_has_them_are_no_nan() -> None:
    x = torch.full((1, 128), 2.0**-149)
    x[0, 0] = 3e-43
    assert codes.quantise_rows(x, Scale("fp32", 1, 128)).isfinite().all()


@pytest.mark.parametrize(("like", "name"), [("fp8_block", "bf16"), ("nvfp4", "fp32"), ("mxfp8", "e4m3")])
def test_a_new_pair_of_codes_and_scales_has_no_rule_of_another(
    like: str, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    precision = PRECISIONS[like]
    scale = precision.w.scale
    assert scale is not None
    new = precision._replace(name="new", w=precision.w._replace(scale=scale._replace(name=name)))
    monkeypatch.setitem(PRECISIONS, "new", new)
    with pytest.raises(NotImplementedError, match="no rule quantises to new"):
        codes.quantise("new", torch.ones(128, 128))


def test_kernels_have_the_rules_that_torch_has() -> None:
    """A pair of codes and scales that one of the two lacks would be quantised by another's rule."""
    elements = [PRECISIONS[name].w for name in PORTABLE]
    assert {(each.name, each.scale.name) for each in elements if each.scale is not None} == codes._RULES - rowops._RULES
    assert rowops._RULES <= codes._RULES


def test_scales_of_another_dtype_reach_kernels_in_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever the codes are: a kernel is compiled for the scales' type, and would read others as numbers of it."""
    precision = PRECISIONS["mxfp8"]
    assert precision.w.scale is not None
    new = precision._replace(name="new", w=precision.w._replace(scale=precision.w.scale._replace(name="bf16")))
    monkeypatch.setitem(PRECISIONS, "new", new)
    weights = ExpertWeights("new", torch.zeros(1, 2, 32).to(torch.float8_e4m3fn), torch.full((1, 2, 1), 3.0))
    assert weights.plain_scale is not None
    assert weights.plain_scale.dtype is torch.bfloat16
    assert weights.plain_scale.tolist() == [[[3.0], [3.0]]]
