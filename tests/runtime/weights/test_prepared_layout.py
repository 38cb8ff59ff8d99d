"""Prepared weights: their layout, what writes to them, and what kernels read of them.

What the kernels' PTX makes of prepared words is emulated here, and compared with what the weights are.
"""

from __future__ import annotations

import copy
import itertools
import pickle
import re
import struct
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from portable_formats import PORTABLE
from torch.utils._python_dispatch import TorchDispatchMode

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import PRECISIONS, DType
from pretuned.kernels.hopper_w4a16 import can_be_prepared
from pretuned.runtime import ExpertWeights, grouped_gemm
from pretuned.runtime.weights import codes
from pretuned.runtime.weights.prepared_layout import BLOCK, K_ORDER, ORDERS


@pytest.fixture
def w() -> ExpertWeights:
    return packed_weights("mxfp4")


def test_a_zero_point_that_has_no_room_leaves_all_as_they_are() -> None:
    """Kernels read four bits of it."""
    w = packed_weights("int4_g32_zp")
    assert w.zero is not None
    assert (int(w.zero.min()), int(w.zero.max())) == (0, 15)
    w.zero[1, 3, 2] = 16
    before = bits_of(w)
    assert not w.can_be_prepared
    assert w.prepare() is w.prepare_in_place() is w
    assert w.order == 0
    assert all(same(w, before))
    assert w.restore() is w
    w.zero[1, 3, 2] = 15
    assert w.prepare().order == 1


@pytest.mark.parametrize("group", [32, 64, 128])
def test_zero_points_lie_as_scales_do_less_8(group: int) -> None:
    w = packed_weights(f"int4_g{group}_zp")
    assert w.zero is not None
    plain = w.zero.clone()
    w = w.prepare()
    assert w.zero is not None
    assert w.zero.dtype is torch.int8
    assert w.zero.shape == w.scale.shape
    groups = max(1, BLOCK // group)
    for n, k in itertools.product((0, 70, 191), (0, 1, plain.shape[2] - 1)):
        assert w.zero[1, n // BLOCK, k // groups, n % BLOCK, k % groups] == int(plain[1, n, k]) - 8


def test_zero_points_of_another_layout_than_the_codes_are_refused() -> None:
    w, other = packed_weights("int4_g32_zp"), packed_weights("int4_g32_zp")
    plain = other.zero
    w = w.prepare()
    with pytest.raises(InputError, match=r"zero is torch.uint8 of shape .*, wanted torch.int8"):
        ExpertWeights.from_state_dict("int4_g32_zp", w.state_dict() | {"zero": plain})
    with pytest.raises(InputError, match=r"zero is of shape .* wanted \[2, 3, 4, 64, 2\]"):
        ExpertWeights.from_state_dict("int4_g32_zp", w.state_dict() | {"zero": plain.to(torch.int8)})
    with pytest.raises(InputError, match=r"zero is torch.int8 of shape .*, wanted torch.uint8"):
        ExpertWeights.from_state_dict("int4_g32_zp", other.state_dict() | {"zero": w.zero})
    with pytest.raises(InputError, match="zero is out of range for prepared codes, wanted 0 to 15"):
        ExpertWeights.from_state_dict("int4_g32_zp", w.state_dict() | {"zero": w.zero + 1})
    assert torch.equal(ExpertWeights.from_state_dict("int4_g32_zp", w.state_dict()).dequantize(), other.dequantize())


def test_copy_writes_no_zero_point_that_has_no_room() -> None:
    w, other = packed_weights("int4_g64_zp").prepare(), packed_weights("int4_g64_zp")
    values = w.dequantize(torch.float32)
    assert other.zero is not None
    other.codes.copy_(other.codes.flip(0))
    other.zero[0, 0, 0] = 16
    with pytest.raises(InputError, match="zero is out of range for prepared codes, wanted 0 to 15"):
        w.copy_(other)
    assert torch.equal(w.dequantize(torch.float32), values)
    plain = packed_weights("int4_g64_zp")
    plain.copy_(other)  # the checkpoint's layout has room
    assert torch.equal(plain.dequantize(torch.float32), other.dequantize(torch.float32))


def test_prepare_changes_nothing_that_it_was_given(w: ExpertWeights) -> None:
    codes, scale = w.codes, w.scale
    before, values = [codes.clone(), scale.clone()], w.dequantize(torch.float32)
    prepared = w.prepare()
    assert torch.equal(codes, before[0])
    assert torch.equal(scale, before[1])
    assert prepared.codes.untyped_storage().data_ptr() != codes.untyped_storage().data_ptr()
    assert torch.equal(ExpertWeights.mxfp4(codes, scale).dequantize(torch.float32), values)  # others over these tensors
    assert torch.equal(prepared.dequantize(torch.float32), values)


def test_weights_that_were_prepared_are_released_and_say_so(w: ExpertWeights) -> None:
    codes = weakref.ref(w.codes)
    prepared = w.prepare()
    assert codes() is None
    assert w.prepare() is prepared
    assert prepared.prepare() is prepared
    assert repr(w) == "ExpertWeights(mxfp4, released by prepare())"
    x, m_sizes = torch.randn(4, 256), torch.tensor([2, 2], dtype=torch.int32)
    for use in (
        lambda: w.codes,
        lambda: w.scale,
        lambda: w.zero,
        lambda: w.global_scale,
        lambda: w.shape,
        lambda: w.dequantize(),
        lambda: w.state_dict(),
        lambda: w.restore(),
        lambda: w.to("meta"),
        lambda: copy.deepcopy(w),
        lambda: pickle.dumps(w),
        lambda: grouped_gemm(x, w, m_sizes),
        lambda: prepared.copy_(w),
        lambda: w.refresh(),
    ):
        with pytest.raises(InputError, match=r"these mxfp4 weights were prepared.*: use what prepare\(\) returned"):
            use()


def test_threads_that_prepare_the_same_weights_have_one_result() -> None:
    for _ in range(20):
        w = packed_weights("mxfp4", E=4)
        values, begin = w.dequantize(torch.float32), threading.Barrier(4)

        def prepare(w: ExpertWeights = w, begin: threading.Barrier = begin) -> ExpertWeights:
            begin.wait()
            return w.prepare()

        with ThreadPoolExecutor(4) as pool:
            results = [future.result() for future in [pool.submit(prepare) for _ in range(4)]]
        assert all(result is results[0] for result in results)
        assert torch.equal(results[0].dequantize(torch.float32), values)


@pytest.mark.parametrize("format", ["mxfp4", "int4_g128", "fp8_block"])
def test_a_checkpoint_s_tensor_does_not_fit_into_prepared_codes(format: str) -> None:
    """(For E, N and K of 1 and of one block, too, where shapes broadcast.)"""
    for E, N, K in ((2, 128, 256), (1, 128, 128), (1, 64, 64), (1, 64, 4096), (1, 64, 1024), (1, 64, 128)):
        if not can_be_prepared(packed_weights(format, E, N, K).kernel_dtypes[-1], N, K):
            continue
        w, other = packed_weights(format, E, N, K), packed_weights(format, E, N, K)
        prepared = w.prepare()
        assert prepared.is_prepared
        for other_codes in (other.codes, other.codes.view(torch.uint8), other.codes.view(torch.int32)):
            with pytest.raises(RuntimeError):
                prepared.codes.copy_(other_codes)
        if prepared.scale.dim() == 5:
            try:
                prepared.scale.copy_(other.scale)  # of one group and block both layouts are the same
            except RuntimeError:
                continue
            assert torch.equal(prepared.dequantize(torch.float32), other.dequantize(torch.float32))


def test_codes_and_scales_of_two_layouts_are_refused(w: ExpertWeights) -> None:
    other = packed_weights("mxfp4")
    codes = w.prepare().codes
    with pytest.raises(InputError, match="in the checkpoint's layout, wanted that of the codes, which are prepared"):
        ExpertWeights.mxfp4(codes, other.scale)
    with pytest.raises(InputError, match=r"scale is of shape .* wanted \[2, 192, 8\]"):
        ExpertWeights.mxfp4(other.codes, packed_weights("mxfp4").prepare().scale)
    with pytest.raises(InputError, match=r"wanted int32 \[E, N/64, K/64, 64, 4, 4\] of prepared weights"):
        ExpertWeights.fp8_channel(codes, torch.ones(2, 192))


def test_the_layout_travels_with_the_tensors(w: ExpertWeights) -> None:
    values = w.dequantize(torch.float32)
    state = w.prepare().state_dict()
    again = ExpertWeights.from_state_dict("mxfp4", {name: tensor.clone() for name, tensor in state.items()})
    assert again.order == 1
    assert torch.equal(again.dequantize(torch.float32), values)


@pytest.mark.parametrize("codes_are_prepared", [False, True])
def test_another_layout_than_this_version_knows_is_refused(w: ExpertWeights, codes_are_prepared: bool) -> None:
    state = (w.prepare() if codes_are_prepared else w).state_dict() | {"order": torch.tensor(7)}
    with pytest.raises(InputError, match=r"order is 7 with codes torch.* wanted one that this version knows .*0 or 1"):
        ExpertWeights.from_state_dict("mxfp4", state)
    with pytest.raises(InputError, match="order is"):  # as an earlier version, which kept the shape, has saved it
        ExpertWeights.from_state_dict("mxfp4", packed_weights("mxfp4").state_dict() | {"order": torch.tensor(1)})


@pytest.mark.parametrize(
    ("format", "N", "K"),
    [
        ("mxfp4", 128, 128),
        ("mxfp8", 128, 128),
        ("nvfp4", 128, 128),
        ("int4_g128", 128, 128),
        ("int4_g32_zp", 128, 128),
        ("fp8_block", 256, 128),
        ("fp8_channel", 128, 128),
        ("nvfp4", 128, 64),
        ("mxfp4", 64, 64),
    ],
)
def test_prepared_in_place_and_back(format: str, N: int, K: int) -> None:
    w = packed_weights(format, N=N, K=K)
    before, at, values = bits_of(w), w.codes.data_ptr(), w.dequantize(torch.float32)
    prepared = w.prepare_in_place()
    assert prepared.is_prepared
    assert prepared.codes.data_ptr() == at
    assert torch.equal(prepared.dequantize(torch.float32), values)
    back = prepared.restore_in_place()
    assert back.codes.data_ptr() == at
    assert all(same(back, before))
    assert all(same(w, before))  # over the same memory


class FailsAt(TorchDispatchMode):
    """No memory for the ``at``th tensor that gets memory of its own."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.left = at

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not any(value.alias_info for value in func._schema.returns):
            self.left -= 1
            if self.left == 0:
                raise MemoryError
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize("at_once", [1, 32 << 20])
@pytest.mark.parametrize("change", ["prepare", "prepare_in_place", "restore_in_place"])
@pytest.mark.parametrize("format", ["mxfp4", "int4_g32_zp"])
def test_what_fails_half_way_leaves_all_as_they_were(
    format: str, change: str, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also the codes, if it is scales or zero points that there is no memory for; also by some experts at a time."""
    monkeypatch.setattr("pretuned.runtime.weights.prepared_layout._CHUNK_BYTES", at_once)
    w = packed_weights(format, N=64, K=64)
    w = w.prepare() if change == "restore_in_place" else w
    before = bits_of(w)
    for at in itertools.count(1):
        try:
            with FailsAt(at):
                changed = getattr(w, change)()
            break
        except MemoryError:
            assert all(same(w, before)), at
    assert at > 20
    assert changed.is_prepared is (change != "restore_in_place")
    assert torch.equal(changed.dequantize(torch.float32), packed_weights(format, N=64, K=64).dequantize(torch.float32))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("format", ["int4_g32", "fp8_block"])
def test_scales_that_are_written_to_are_read_anew(format: str, prepared: bool, dtype: torch.dtype) -> None:
    w = packed_weights(format, N=256, dtype=dtype)
    w = w.prepare() if prepared else w

    def read() -> torch.Tensor:
        scale = w.kernel_scale if prepared else w.plain_scale
        assert scale is not None
        return scale.float().clone()

    first, at = read(), None if w.derived is None else w.derived.data_ptr()
    w.scale.mul_(2)
    torch.testing.assert_close(read(), first * 2, rtol=0, atol=0)
    w.scale.data.mul_(2)  # which torch does not count
    torch.testing.assert_close(w.refresh() and read(), first * 4, rtol=0, atol=0)
    w.scale = w.scale * 2
    torch.testing.assert_close(read(), first * 8, rtol=0, atol=0)
    assert at == (None if w.derived is None else w.derived.data_ptr())  # a captured graph reads there


@pytest.mark.parametrize("to", [False, True])
@pytest.mark.parametrize("of", [False, True])
@pytest.mark.parametrize(
    "format",
    ["mxfp4", "mxfp8", "nvfp4", "int4_g32", "int4_g128", "int4_g32_zp", "int4_g128_zp", "fp8_block", "fp8_channel"],
)
def test_copy_has_the_other_s_numbers_where_these_are(format: str, of: bool, to: bool) -> None:
    w, other = packed_weights(format, N=256), packed_weights(format, N=256)
    other.codes.view(torch.uint8).copy_(other.codes.view(torch.uint8).flip(0))
    other.scale.view(torch.uint8).copy_(other.scale.view(torch.uint8).flip(0))
    if other.zero is not None:
        other.zero.copy_(other.zero.flip(0))
    values = other.dequantize(torch.float32)
    w, other = w.prepare() if to else w, other.prepare() if of else other
    assert not torch.equal(w.dequantize(torch.float32), values)
    read = w.kernel_scale if to else w.plain_scale
    at = {name: tensor.data_ptr() for name, tensor in w.tensors().items()} | {
        "": read.data_ptr() if read is not None else 0
    }
    assert w.copy_(other) is w
    assert w.is_prepared is to
    assert torch.equal(w.dequantize(torch.float32), values)
    read = w.kernel_scale if to else w.plain_scale
    assert at == {name: tensor.data_ptr() for name, tensor in w.tensors().items()} | {
        "": read.data_ptr() if read is not None else 0
    }
    wanted = w.derived_now()
    assert wanted is None or torch.equal(wanted, w.derived)


def test_copy_writes_nothing_that_does_not_fit(w: ExpertWeights) -> None:
    w = w.prepare()
    values, large = w.dequantize(torch.float32), packed_weights("mxfp4")
    large.scale[1, 3, 2] = 129
    for other in (large, packed_weights("nvfp4"), packed_weights("mxfp4", N=128), torch.ones(1)):
        with pytest.raises(InputError):
            w.copy_(other)  # type: ignore[arg-type]
    with pytest.raises(InputError, match=r"scale is torch.float16, wanted torch.bfloat16"):
        packed_weights("int4_g32").copy_(packed_weights("int4_g32", dtype=torch.float16))
    assert torch.equal(w.dequantize(torch.float32), values)


def packed_weights(
    format: str, E: int = 2, N: int = 192, K: int = 256, dtype: torch.dtype = torch.bfloat16
) -> ExpertWeights:
    """Weights with every code; ``dtype`` is of int4's scales."""
    g = torch.Generator().manual_seed(E + N + K)
    elements = PRECISIONS[format].w
    scale = elements.scale
    assert scale is not None

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)

    if elements.bits == 8:
        bits = drawn(0, 127, E, N, K) | drawn(0, 2, E, N, K) << 7
        if format == "mxfp8":
            return ExpertWeights.mxfp8(bits.view(torch.float8_e4m3fn), drawn(0, 135, E, N, -(-K // 32)))
        sizes = (E, -(-N // 128), -(-K // 128)) if scale.columns else (E, N)
        make = ExpertWeights.fp8_block if scale.columns else ExpertWeights.fp8_channel
        parts = bits.view(torch.float8_e4m3fn), torch.rand(sizes, generator=g) + 0.01
        return make(*parts, quantize_x=not format.endswith("a16"))
    bits, groups = drawn(0, 256, E, N, K // 2), (E, N, -(-K // scale.columns))
    if format == "mxfp4":
        return ExpertWeights.mxfp4(bits, drawn(0, 129, *groups))
    if format == "nvfp4":
        outer = torch.rand(E, generator=g) + 0.1
        return ExpertWeights.nvfp4(bits, drawn(0, 127, *groups).view(torch.float8_e4m3fn), outer)
    zero = drawn(0, 16, *groups) if scale.zero_bits else None
    return ExpertWeights.int4(bits, (torch.rand(groups, generator=g) + 0.1).to(dtype), zero)


def bits_of(w: ExpertWeights) -> list[torch.Tensor]:
    return [tensor.view(torch.uint8).clone() for tensor in w.tensors().values()]


def same(weights: ExpertWeights, other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(bits_of(weights), other, strict=True)]


@pytest.mark.parametrize("format", ORDERS)
@pytest.mark.parametrize(("N", "K"), [(64, 64), (192, 256), (128, 128), (256, 640)])
def test_prepared_weights_are_the_same_and_go_back_bit_for_bit(format: str, N: int, K: int) -> None:
    w = packed_weights(format, 2, N, K)
    before, values = bits_of(w), w.dequantize(torch.float32)
    dtype = w.kernel_dtypes[0]
    w = w.prepare()
    assert w.order == (ORDERS[format].number if can_be_prepared(dtype, N, K) else 0)
    assert w.is_prepared or all(same(w, before))
    assert torch.equal(w.dequantize(torch.float32), values)
    state = {name: tensor.clone() for name, tensor in w.state_dict().items()}
    again = ExpertWeights.from_state_dict(format, state)
    assert again.order == w.order
    assert torch.equal(again.dequantize(torch.float32), values)
    if w.order:
        mine, other = w.kernel_scale, again.kernel_scale
        assert (mine is None) is (other is None) is (format.startswith("fp8_channel"))
        assert mine is None or other is None or torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert w.restore().order == 0
    assert all(same(w.restore(), before))
    assert all(same(again.restore(), before))


@pytest.mark.parametrize("format", ORDERS)
def test_what_a_kernel_needs_is_what_weights_are_prepared_for(format: str) -> None:
    """The plan asks ``can_be_prepared`` of sizes alone, before there are weights."""
    for N, K in itertools.product((32, 64, 96, 128, 192), (32, 64, 96, 128, 160, 192)):
        w = packed_weights(format, 1, N, K)
        dtype = w.kernel_dtypes[0]
        assert bool(w.prepare().order) is can_be_prepared(dtype, N, K), (N, K)


def test_an_mxfp4_scale_that_has_no_room_leaves_all_as_they_are() -> None:
    w = packed_weights("mxfp4")
    w.scale[1, 3, 2] = 129
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))
    w.scale[1, 3, 2] = 128
    assert w.prepare().order == 1


def test_an_mxfp8_scale_that_has_no_room_leaves_all_as_they_are() -> None:
    """Above 128, 2^(134 - 127), the power of two in bf16 would be none."""
    w = packed_weights("mxfp8")
    w.scale[1, 3, 2] = 135
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))
    w.scale[1, 3, 2] = 134
    assert w.prepare().order == 2


def test_an_fp8_scale_that_has_no_room_leaves_all_as_they_are() -> None:
    w = packed_weights("fp8_block", N=256)
    w.scale[1, 1, 1] = -128.0
    assert w.prepare().order == 0
    w.scale[1, 1, 1] = -127.0
    assert w.prepare().order == 2


def test_a_negative_nvfp4_scale_leaves_all_as_they_are() -> None:
    """The kernel takes a scale's highest bit for a number's."""
    w = packed_weights("nvfp4")
    w.scale.view(torch.uint8)[1, 3, 2] |= 0x80
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("large", [1024.0, -1024.0, float("nan"), float("-inf")])
def test_an_int4_scale_that_has_no_room_leaves_all_as_they_are(large: float, dtype: torch.dtype) -> None:
    """The kernel makes a scale 2^117 times what it is, in bf16."""
    w = packed_weights("int4_g32", dtype=dtype)
    w.scale[1, 3, 2] = large
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))
    w.scale[1, 3, 2] = -1020.0
    assert w.prepare().order == 1


E4M3 = ["mxfp8", "fp8_block", "fp8_block_a16", "fp8_channel", "fp8_channel_a16"]


def put_nan(w: ExpertWeights, bits: int = 0xFF) -> ExpertWeights:
    """Make w[1, 3, 5] and w[1, 130, 0] NaN."""
    w.codes.view(torch.uint8)[1, 3, 5] = bits
    w.codes.view(torch.uint8)[1, 130, 0] = bits
    return w


@pytest.mark.parametrize("bits", [0x7F, 0xFF])
@pytest.mark.parametrize("format", E4M3)
def test_a_nan_among_e4m3_codes_leaves_all_as_they_are(
    format: str, bits: int, caplog: pytest.LogCaptureFixture
) -> None:
    """The kernels of prepared weights make 480 of it, where torch and the portable kernel make NaN."""
    w = put_nan(packed_weights(format, N=256), bits)
    before, nan = bits_of(w), w.dequantize(torch.float32).isnan()
    assert nan.nonzero().tolist() == [[1, 3, 5], [1, 130, 0]]
    assert not w.can_be_prepared
    assert w.prepare() is w.prepare_in_place() is w
    assert all(same(w, before))
    message = f"{format} codes are NaN at expert 1, row 3, column 5 and 1 other place"
    assert [record.getMessage().partition(":")[2].strip().partition(":")[0] for record in caplog.records] == [
        message
    ] * 2
    x = torch.ones(4, 256, dtype=torch.bfloat16)
    y = grouped_gemm(x, w, torch.tensor([2, 2], dtype=torch.int32))
    assert y.isnan().nonzero().tolist() == [[2, 3], [2, 130], [3, 3], [3, 130]]
    w.codes.view(torch.uint8)[1, 3, 5] = w.codes.view(torch.uint8)[1, 130, 0] = 0x7E
    caplog.clear()
    assert w.prepare().is_prepared
    assert not caplog.records


@pytest.mark.parametrize("format", E4M3)
def test_no_nan_is_written_to_prepared_codes(format: str) -> None:
    w = packed_weights(format, N=256).prepare()
    values = w.dequantize(torch.float32)
    with pytest.raises(
        InputError, match=r"codes is NaN at expert 1, row 3, column 5 and 1 other place, wanted numbers:"
    ):
        w.copy_(put_nan(packed_weights(format, N=256)))
    assert torch.equal(w.dequantize(torch.float32), values)
    plain = packed_weights(format, N=256).copy_(
        put_nan(packed_weights(format, N=256))
    )  # the checkpoint's layout keeps it
    assert int(plain.dequantize(torch.float32).isnan().sum()) == 2


@pytest.mark.parametrize("format", E4M3)
def test_a_nan_in_prepared_codes_is_refused(format: str) -> None:
    """Of a saved state, and of what wrote into the tensors."""
    w = packed_weights(format, N=256).prepare()
    flat = w.codes.view(torch.uint8).view(-1)
    kept, flat[-7] = flat[-7].clone(), 0x7F
    (at,) = w.dequantize(torch.float32).isnan().nonzero().tolist()
    message = "codes is NaN at expert {}, row {}, column {}, wanted numbers: ".format(*at)
    for use in (
        lambda: ExpertWeights.from_state_dict(format, w.state_dict()),
        lambda: pickle.loads(pickle.dumps(w)),
        lambda: w.refresh(),
    ):
        with pytest.raises(InputError, match=message):
            use()
    assert int(w.restore().dequantize(torch.float32).isnan().sum()) == 1  # which has room for it
    flat[-7] = kept
    assert w.refresh() is w


@pytest.mark.parametrize(
    ("format", "bad"),
    [
        ("mxfp4", 129),
        ("mxfp4", 255),
        ("mxfp8", 135),
        ("mxfp8", 255),
        ("nvfp4", 0x7F),
        ("nvfp4", 0xFF),
        ("nvfp4", 0x81),
        ("int4_g32", float("nan")),
        ("int4_g128_zp", float("inf")),
        ("fp8_block", float("nan")),
        ("fp8_block_a16", 128.0),
        ("fp8_channel", float("nan")),
    ],
)
def test_scales_that_were_written_beside_prepared_codes_are_refused(format: str, bad: float) -> None:
    """A kernel would take them for other numbers."""
    w, other = packed_weights(format, N=256).prepare(), packed_weights(format, N=256)
    values = w.dequantize(torch.float32)
    scales = [packed.scale.view(torch.uint8) if format == "nvfp4" else packed.scale for packed in (w, other)]
    scales[1][1].view(-1)[3] = bad
    with pytest.raises(InputError, match="scale is "):
        w.copy_(other)
    assert torch.equal(w.dequantize(torch.float32), values)
    if format.startswith("int4") or (format == "nvfp4" and bad == 0x7F):
        with pytest.raises(InputError, match="scale is "):
            w.copy_(other.prepare() if other.can_be_prepared else other)
    scales[0][1].view(-1)[3] = bad
    with pytest.raises(InputError, match="scale is "):
        w.refresh()


def test_a_nan_nvfp4_scale_leaves_all_as_they_are() -> None:
    w = packed_weights("nvfp4")
    w.scale.view(torch.uint8)[1, 3, 2] = 0x7F
    before = bits_of(w)
    assert w.prepare() is w
    assert all(same(w, before))


def test_an_nvfp4_global_scale_that_is_nan_is_not_copied() -> None:
    w, other = packed_weights("nvfp4").prepare(), packed_weights("nvfp4")
    assert other.global_scale is not None
    other.global_scale[1] = float("nan")
    with pytest.raises(InputError, match=r"global_scale is nan at \[1\], one of 1"):
        w.copy_(other)


@pytest.mark.parametrize("format", E4M3)
def test_every_code_that_may_be_prepared_is_what_the_kernel_s_instructions_read(format: str) -> None:
    """All 256 bytes: the instructions give the number, or the weights are not prepared."""
    dequantize = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize")
    read = torch.tensor(
        [bf16(emulated(dequantize._E4M3.value, [byte << 8, 0, 0, 0])[0] & 0xFFFF) * 2.0**120 for byte in range(256)]
    )
    bytes = torch.arange(256, dtype=torch.uint8)
    right = read == bytes.view(torch.float8_e4m3fn).float()
    assert right.sum() == 254
    for byte in (0, 1, 0x7E, 0x7F, 0x80, 0xFE, 0xFF):
        w = packed_weights(format, N=256)
        w.codes.view(torch.uint8)[0, 0, 0] = byte
        assert w.can_be_prepared is bool(right[byte]), byte


@pytest.mark.parametrize(("format", "large"), [("int4_g32", 4096.0), ("mxfp4", 129), ("mxfp8", 135)])
def test_a_scale_of_a_state_in_order_that_has_no_room_is_refused(format: str, large: float) -> None:
    """``torch.save`` of the weights is refused as well; the given state stays as it is."""
    w = packed_weights(format).prepare()
    w.scale[1, 2, 3, 5, 1] = large
    state = {name: tensor.clone() for name, tensor in w.state_dict().items()}
    kept = {name: tensor.clone() for name, tensor in state.items()}
    for load in (lambda: ExpertWeights.from_state_dict(format, state), lambda: pickle.loads(pickle.dumps(w))):
        with pytest.raises(
            InputError, match="scale is too large for prepared codes, wanted mxfp4's up to 2, mxfp8's up to 128, int4's"
        ):
            load()
    assert all(torch.equal(state[name], tensor) for name, tensor in kept.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("zero", ["", "_zp"])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernels_read_int4_s_scales_in_bf16_by_blocks(group: int, zero: str, dtype: torch.dtype) -> None:
    w = packed_weights(f"int4_g{group}{zero}", dtype=dtype)
    plain = w.scale.clone()
    w = w.prepare()
    scale = w.kernel_scale
    assert scale is not None
    assert (scale is w.scale) is (dtype is torch.bfloat16)
    assert dtype is torch.bfloat16 or torch.equal(w.scale, plain)
    groups = max(1, BLOCK // group)
    blocks = scale.view(2, 192 // BLOCK, -1, BLOCK, groups)  # E, blocks of rows, blocks of K, rows, groups
    for n, k in ((0, 0), (70, 1), (191, plain.shape[2] - 1)):
        assert blocks[1, n // BLOCK, k // groups, n % BLOCK, k % groups] == plain[1, n, k].to(torch.bfloat16)


def test_kernels_read_a_block_s_scale_in_bf16_and_what_that_leaves_of_it() -> None:
    w = packed_weights("fp8_block_a16", N=256).prepare()
    kernel_scale = w.kernel_scale
    assert kernel_scale is not None
    assert (kernel_scale.dtype, kernel_scale.shape) == (torch.bfloat16, (2, 4, 4, 8))
    for n, k in itertools.product(range(4), range(4)):
        scale = w.scale[1, n // 2, k // 2].double() * 2.0**120
        near = scale.to(torch.bfloat16)
        rest = (scale - near.double()).to(torch.bfloat16)
        assert kernel_scale[1, n, k].tolist() == [near.item(), near.item(), rest.item(), rest.item()] * 2
        assert abs(near.double() + rest.double() - scale) <= 2.0**-16 * scale


@pytest.mark.parametrize("format", ["fp8_block", "int4_g32"])
def test_weights_that_travel_have_their_kernels_scales_at_once(format: str) -> None:
    """Tensors that are made of them in a graph capture are there when the graph has run, and not before."""
    w = packed_weights(format, N=256, dtype=torch.float16).prepare()
    assert w.derived is not None
    state = {name: tensor.clone() for name, tensor in w.state_dict().items()}
    again, there = ExpertWeights.from_state_dict(format, state), w.to("meta")
    assert again.derived is not None
    assert torch.equal(again.derived, w.derived)
    assert there.derived is not None
    assert there.derived.shape == w.derived.shape
    kept = w.__getstate__()
    assert "derived" not in kept
    old = ExpertWeights.__new__(ExpertWeights)
    old.__setstate__(kept)
    assert old.derived is not None
    assert torch.equal(old.derived, w.derived)


# What dequantize.py says in PTX, on 32-bit words.


def bf16(half: int) -> float:
    """The number that a half of a word is."""
    return float(struct.unpack("<f", struct.pack("<I", half << 16))[0])


def emulated(text: str, words: list[int]) -> list[int]:
    """The results $0 ... $7 of the PTX, of the words $8 and on."""
    registers = {f"${8 + i}": word for i, word in enumerate(words)}

    def value(name: str) -> int:
        return int(name, 16) if name.startswith("0x") else int(name) if name.isdigit() else registers[name]

    def run(operation: str, operands: list[int]) -> int:
        a, *rest = operands
        if operation == "mov.b32":
            return a
        if operation == "and.b32":
            return a & rest[0]
        if operation == "shl.b32":
            return a << rest[0] & 0xFFFFFFFF
        if operation == "shr.u32":
            return a >> rest[0]
        assert operation == "lop3.b32"
        b, c, table = rest
        assert table == 0xEA  # (a & b) | c, by the table of 0xF0, 0xCC and 0xAA
        return a & b | c

    assert text.startswith("{")
    assert text.endswith("}")
    for line in re.split(r"[;\n]", text[1:-1]):
        operation, _, rest = line.strip().partition(" ")
        if operation and not operation.startswith("."):
            target, *operands = (operand.strip() for operand in rest.split(","))
            registers[target] = run(operation, [value(operand) for operand in operands])
    return [registers[f"${i}"] for i in range(8)]


def test_the_emulator_knows_arithmetic() -> None:
    """A check of the checker: by numbers that are known."""
    text = "{\n.reg .b32 t;\nmov.b32 t, 0x43084308;\nmov.b32 $0, t;\nshl.b32 $1, $8, 4; shr.u32 $2, $8, 8;\n"
    text += "and.b32 $3, $8, 0xFF; lop3.b32 $4, $8, 0xF0, t, 0xEA;\n" + "".join(
        f"mov.b32 ${i}, 0;\n" for i in (5, 6, 7)
    )
    assert emulated(text + "}", [0x430F4300])[:5] == [0x43084308, 0x30F43000, 0x430F43, 0x00, 0x43084308]


# (int4 and nvfp4, whose scales are in the same instructions: tests/kernels/hopper_w4a16/test_dequantize.py.)
@pytest.mark.parametrize("format", ["mxfp4", "fp8_block_a16", "fp8_channel_a16"])
def test_the_kernel_s_instructions_read_what_was_written(format: str) -> None:
    """Each register's halves are the codes of K = 16 s + 8 h + 2 c and the next, times their scales."""
    dequantize = pytest.importorskip("pretuned.kernels.hopper_w4a16.dequantize")
    elements = PRECISIONS[format].w
    text = {"e2m1": dequantize._E2M1, "e4m3": dequantize._E4M3}[elements.name].value
    N, K = 128, 128
    w = packed_weights(format, 1, N, K)
    wanted, plain = w.dequantize(torch.float32)[0].double(), w.scale[0].clone()
    scale = elements.scale
    assert scale is not None
    w = w.prepare()
    assert w.order == ORDERS[format].number
    words_each = 4 if elements.bits == 8 else 2
    words = w.codes[0].view(torch.uint8).flatten().view(torch.int32)
    blocks = words.view(N // BLOCK, K // BLOCK, BLOCK, 4, words_each)
    seen, codes_seen = set(), set()
    code_bytes = packed_weights(format, 1, N, K).codes[0].view(torch.uint8)
    code_bytes = code_bytes if elements.bits == 8 else codes.unpack(code_bytes)
    for nb, kb, row, c in itertools.product(range(N // BLOCK), range(K // BLOCK), range(0, BLOCK, 3), range(4)):
        at = c ^ row // 2 % 4 if elements.bits == 8 else c  # dequantize._SWIZZLED
        got = emulated(text, [int(word) & 0xFFFFFFFF for word in blocks[nb, kb, row, at]])
        n = nb * BLOCK + row
        for i, register in enumerate(got):
            s, h = place_of(i, words_each)
            for p in range(2):
                k = kb * BLOCK + 16 * s + 8 * h + 2 * c + p
                value = bf16(register >> 16 * p & 0xFFFF)
                seen.add((n, k))
                codes_seen.add(int(code_bytes[n, k]))
                if elements.name == "e4m3":
                    number = value * 2.0**120 * float(plain[n] if plain.dim() == 1 else plain[n // 128, k // 128])
                else:
                    number = value * bf16(int(plain[n, k // scale.columns]) + 126 << 7)  # the exponent of bf16
                assert number == pytest.approx(float(wanted[n, k]), rel=1e-6, abs=0), (n, k)
    assert len(seen) == 2 * len(range(0, BLOCK, 3)) * K
    assert len(codes_seen) == (254 if elements.bits == 8 else 16)  # all that are numbers


def place_of(register: int, words: int) -> tuple[int, int]:
    """(s, h) of the numbers in the PTX's i-th result, as dequantize._unpack joins them.

    Of two words with codes of 4 bits result j is a register, whose halves are of one word's halves; of four of 8 bits
    it is two registers, of the words 0 and 1 and of 2 and 3.
    """
    if words == 2:
        return register >> 1, register & 1
    result, upper = register >> 1, register & 1
    return 2 * upper + (result >> 1), result & 1


def test_all_formats_with_code_have_an_order() -> None:
    assert set(ORDERS) == {name for name, precision in PRECISIONS.items() if precision.quantised} - PORTABLE
    assert {dtype for packed in map(packed_weights, ORDERS) for dtype in packed.kernel_dtypes} == {
        dtype for dtype in DType if dtype.quantised and dtype.value not in PORTABLE
    }


def test_codes_of_8_bits_are_an_operand_in_a_swizzle_of_64_bytes() -> None:
    """kernels/hopper_w8a8_block/rows.py loads TMA's image of 64 rows of 64 bytes, each row's K in ``K_ORDER``."""
    w = packed_weights("fp8_block", 1, 128, 128)
    plain = w.codes[0].view(torch.uint8).clone()
    blocks = w.prepare().codes[0].view(torch.uint8).view(2, 2, BLOCK * BLOCK)
    assert sorted(K_ORDER) == list(range(BLOCK))
    for nb, kb, row in itertools.product(range(2), range(2), range(BLOCK)):
        for chunk in range(4):
            at = 64 * row + 16 * chunk
            at ^= (at >> 3) & 0x30  # CU_TENSOR_MAP_SWIZZLE_64B: bits 4 and 5 by bits 7 and 8
            wanted = [plain[nb * BLOCK + row, kb * BLOCK + k] for k in K_ORDER[16 * chunk : 16 * chunk + 16]]
            assert blocks[nb, kb, at : at + 16].tolist() == [int(code) for code in wanted]
