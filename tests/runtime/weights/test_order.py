"""Codes and scales in another order, in place: of made-up orders, and of those that kernels read.

What the kernels' PTX makes of prepared words is emulated here, and held against what the weights are.
"""

from __future__ import annotations

import itertools
import pickle
import re
import struct
from collections.abc import Callable

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records.precision import PRECISIONS, DType
from pretuned.kernels.contract.mixed_input import prepares
from pretuned.runtime import ExpertWeights
from pretuned.runtime.weights import codes
from pretuned.runtime.weights.codes import Quantised
from pretuned.runtime.weights.order import BLOCK, K_ORDER, ORDERS, CodeOrder, reorder


def _interleaved(given: torch.Tensor, undo: bool) -> torch.Tensor:
    """The nibbles of each 16 bytes: those of the low halves, then those of the high ones."""
    nibbles = codes.unpack(given).view(*given.shape[:-1], -1, 32)
    halves = (16, 2) if undo else (2, 16)
    moved = nibbles.view(*nibbles.shape[:-1], *(halves[::-1] if not undo else (2, 16))).transpose(-1, -2)
    return codes.pack(moved.flatten(-2).flatten(-2))


def _always(_: Quantised) -> bool:
    return True


def _flipped(given: torch.Tensor, undo: bool) -> torch.Tensor:
    return given.flip(-1)


FIRST, SECOND = CodeOrder(7, _always, _always, _interleaved), CodeOrder(8, _always, _always, _flipped)
BOTH = CodeOrder(9, _always, _always, _interleaved, _flipped, torch.uint8)  # scales, too


@pytest.fixture
def w() -> ExpertWeights:
    torch.manual_seed(0)
    return ExpertWeights.quantize(torch.randn(3, 6, 64), "mxfp4")


def test_a_format_without_an_order_is_left_as_it_is() -> None:
    w = ExpertWeights.quantize(torch.randn(1, 64, 128), "int4_g32_zp")
    before = w.codes.clone()
    assert w.prepare() is w
    assert w.order == 0
    assert torch.equal(w.codes, before)
    assert w.restore() is w


@pytest.mark.parametrize("order", [FIRST, BOTH])
def test_codes_move_in_place_and_back_bit_for_bit(
    w: ExpertWeights, monkeypatch: pytest.MonkeyPatch, order: CodeOrder
) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", order)
    before, at, values = [w.codes.clone(), w.scale.clone()], w.codes.data_ptr(), w.dequantize(torch.float32)
    assert w.prepare().order == order.number
    assert w.codes.data_ptr() == at
    assert not torch.equal(w.codes, before[0])
    assert torch.equal(w.scale, before[1]) is (order is FIRST)
    assert torch.equal(w.dequantize(torch.float32), values)
    moved = w.codes.clone()
    w.prepare()  # once is enough
    assert torch.equal(w.codes, moved)
    assert w.restore().order == 0
    assert torch.equal(w.codes, before[0])
    assert torch.equal(w.scale, before[1])


def test_the_order_travels_with_the_tensors(w: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", BOTH)
    values = w.dequantize(torch.float32)
    state = w.prepare().state_dict()
    again = ExpertWeights.from_state_dict("mxfp4", {name: one.clone() for name, one in state.items()})
    assert again.order == 9
    assert torch.equal(again.dequantize(torch.float32), values)


def test_another_order_than_this_version_knows_is_refused(w: ExpertWeights, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(ORDERS, "mxfp4", FIRST)
    state = w.prepare().state_dict()
    monkeypatch.setitem(ORDERS, "mxfp4", SECOND)
    with pytest.raises(InputError, match="order is 7, wanted one that this version knows for mxfp4: 0 or 8"):
        ExpertWeights.from_state_dict("mxfp4", state)


@pytest.mark.parametrize("at", [3, 5])  # of three experts' codes, then of their scales
def test_what_fails_half_way_leaves_all_as_they_were(w: ExpertWeights, at: int) -> None:
    before, done = [w.codes.clone(), w.scale.clone()], []

    def fails(move: Callable[[torch.Tensor, bool], torch.Tensor]) -> Callable[[torch.Tensor, bool], torch.Tensor]:
        def moved(given: torch.Tensor, undo: bool) -> torch.Tensor:
            done.append(undo)
            if len(done) == at:
                raise MemoryError
            return move(given, undo)

        return moved

    order = CodeOrder(1, _always, _always, fails(_interleaved), fails(_flipped), torch.uint8)
    with pytest.raises(MemoryError):
        reorder(Quantised(w.codes, w.scale), order, undo=False)
    assert done == [False] * at + [True] * (at - 1)
    assert torch.equal(w.codes, before[0])
    assert torch.equal(w.scale, before[1])


def made(format: str, E: int = 2, N: int = 192, K: int = 256, dtype: torch.dtype = torch.bfloat16) -> ExpertWeights:
    """Weights with every code; ``dtype`` is of int4's scales."""
    g = torch.Generator().manual_seed(E + N + K)
    elements = PRECISIONS[format].w
    scale = elements.scale
    assert scale is not None

    def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
        return torch.randint(low, high, shape, dtype=torch.uint8, generator=g)

    if elements.bits == 8:
        bits = drawn(0, 127, E, N, K) | drawn(0, 2, E, N, K) << 7
        sizes = (E, -(-N // 128), -(-K // 128)) if scale.columns else (E, N)
        make = ExpertWeights.fp8_block if scale.columns else ExpertWeights.fp8_channel
        given = bits.view(torch.float8_e4m3fn), torch.rand(sizes, generator=g) + 0.01
        return make(*given, quantize_x=not format.endswith("a16"))
    bits, groups = drawn(0, 256, E, N, K // 2), (E, N, -(-K // scale.columns))
    if format == "mxfp4":
        return ExpertWeights.mxfp4(bits, drawn(0, 129, *groups))
    if format == "nvfp4":
        outer = torch.rand(E, generator=g) + 0.1
        return ExpertWeights.nvfp4(bits, drawn(0, 127, *groups).view(torch.float8_e4m3fn), outer)
    return ExpertWeights.int4(bits, (torch.rand(groups, generator=g) + 0.1).to(dtype))


def bits_of(w: ExpertWeights) -> list[torch.Tensor]:
    return [one.view(torch.uint8).clone() for one in w.tensors().values()]


def same(one: ExpertWeights, other: list[torch.Tensor]) -> list[bool]:
    return [torch.equal(a, b) for a, b in zip(bits_of(one), other, strict=True)]


@pytest.mark.parametrize("format", ORDERS)
@pytest.mark.parametrize(("N", "K"), [(64, 64), (192, 256), (128, 128), (256, 640)])
def test_prepared_weights_are_the_same_and_go_back_bit_for_bit(format: str, N: int, K: int) -> None:
    w = made(format, 2, N, K)
    before, at, values = bits_of(w), w.codes.data_ptr(), w.dequantize(torch.float32)
    dtype = w.kernel_dtypes[0]
    assert w.prepare().order == (ORDERS[format].number if prepares(dtype, N, K) else 0)
    if w.order:
        assert not same(w, before)[0]
        assert w.codes.data_ptr() == at
    else:
        assert all(same(w, before))
    assert torch.equal(w.dequantize(torch.float32), values)
    state = {name: one.clone() for name, one in w.state_dict().items()}
    again = ExpertWeights.from_state_dict(format, state)
    assert again.order == w.order
    assert torch.equal(again.dequantize(torch.float32), values)
    if w.order:
        mine, other = w.kernel_scale, again.kernel_scale
        assert (mine is None) is (other is None) is (format.startswith("fp8_channel"))
        assert mine is None or other is None or torch.equal(mine.view(torch.uint8), other.view(torch.uint8))
    assert w.restore().order == 0
    assert all(same(w, before))
    assert all(same(again.restore(), before))


@pytest.mark.parametrize("format", ORDERS)
def test_what_a_kernel_needs_is_what_weights_are_prepared_for(format: str) -> None:
    """The plan asks ``prepares`` of sizes alone, before there are weights."""
    for N, K in itertools.product((32, 64, 96, 128, 192), (32, 64, 96, 128, 160, 192)):
        w = made(format, 1, N, K)
        dtype = w.kernel_dtypes[0]
        assert bool(w.prepare().order) is prepares(dtype, N, K), (N, K)


def test_an_mxfp4_scale_that_has_no_room_leaves_all_as_they_are() -> None:
    w = made("mxfp4")
    w.scale[1, 3, 2] = 129
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))
    w.scale[1, 3, 2] = 128
    assert w.prepare().order == 1


def test_an_fp8_scale_that_has_no_room_leaves_all_as_they_are() -> None:
    w = made("fp8_block", N=256)
    w.scale[1, 1, 1] = -128.0
    assert w.prepare().order == 0
    w.scale[1, 1, 1] = -127.0
    assert w.prepare().order == 2


def test_a_negative_nvfp4_scale_leaves_all_as_they_are() -> None:
    """The kernel takes a scale's highest bit for a number's."""
    w = made("nvfp4")
    w.scale.view(torch.uint8)[1, 3, 2] |= 0x80
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("large", [1024.0, -1024.0, float("nan"), float("-inf")])
def test_an_int4_scale_that_has_no_room_leaves_all_as_they_are(large: float, dtype: torch.dtype) -> None:
    """The kernel makes a scale 2^117 times what it is, in bf16."""
    w = made("int4_g32", dtype=dtype)
    w.scale[1, 3, 2] = large
    before = bits_of(w)
    assert w.prepare().order == 0
    assert all(same(w, before))
    w.scale[1, 3, 2] = -1020.0
    assert w.prepare().order == 1


@pytest.mark.parametrize(("format", "large"), [("int4_g32", 4096.0), ("mxfp4", 129)])
def test_a_scale_of_a_state_in_order_that_has_no_room_is_refused(format: str, large: float) -> None:
    """As is ``torch.save`` of the weights; and what was given stays as it is."""
    w = made(format).prepare()
    w.scale[1, 3, 2] = large
    state = {name: one.clone() for name, one in w.state_dict().items()}
    kept = {name: one.clone() for name, one in state.items()}
    for load in (lambda: ExpertWeights.from_state_dict(format, state), lambda: pickle.loads(pickle.dumps(w))):
        with pytest.raises(
            InputError, match="scale is too large for codes in order, wanted mxfp4's up to 2, int4's below"
        ):
            load()
    assert all(torch.equal(state[name], one) for name, one in kept.items())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("group", [32, 64, 128])
def test_kernels_read_int4_s_scales_in_bf16_by_blocks(group: int, dtype: torch.dtype) -> None:
    w = made(f"int4_g{group}", dtype=dtype)
    plain = w.scale.clone()
    found = w.prepare().kernel_scale
    assert found is not None
    assert (found is w.scale) is (dtype is torch.bfloat16)
    assert dtype is torch.bfloat16 or torch.equal(w.scale, plain)
    groups = max(1, BLOCK // group)
    blocks = found.view(2, 192 // BLOCK, -1, BLOCK, groups)  # E, blocks of rows, blocks of K, rows, groups
    for n, k in ((0, 0), (70, 1), (191, plain.shape[2] - 1)):
        assert blocks[1, n // BLOCK, k // groups, n % BLOCK, k % groups] == plain[1, n, k].to(torch.bfloat16)


def test_kernels_read_a_block_s_scale_in_bf16_and_what_that_leaves_of_it() -> None:
    w = made("fp8_block_a16", N=256)
    found = w.prepare().kernel_scale
    assert found is not None
    assert (found.dtype, found.shape) == (torch.bfloat16, (2, 4, 4, 8))
    for n, k in itertools.product(range(4), range(4)):
        scale = w.scale[1, n // 2, k // 2].double() * 2.0**120
        near = scale.to(torch.bfloat16)
        rest = (scale - near.double()).to(torch.bfloat16)
        assert found[1, n, k].tolist() == [near.item(), near.item(), rest.item(), rest.item()] * 2
        assert abs(near.double() + rest.double() - scale) <= 2.0**-16 * scale


@pytest.mark.parametrize("format", ["fp8_block", "int4_g32"])
def test_weights_that_travel_have_their_kernels_scales_at_once(format: str) -> None:
    """What is made of them in a graph capture is there when the graph has run, and not before."""
    w = made(format, N=256, dtype=torch.float16).prepare()
    assert w._derived is not None
    state = {name: one.clone() for name, one in w.state_dict().items()}
    again, there = ExpertWeights.from_state_dict(format, state), w.to("meta")
    assert again._derived is not None
    assert torch.equal(again._derived, w._derived)
    assert there._derived is not None
    assert there._derived.shape == w._derived.shape
    kept = w.__getstate__()
    assert kept["_derived"] is None
    old = ExpertWeights.__new__(ExpertWeights)
    old.__setstate__(kept | {"_derived": torch.zeros_like(w._derived)})  # as a version with another way of them kept it
    assert old._derived is not None
    assert torch.equal(old._derived, w._derived)


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
            target, *operands = (one.strip() for one in rest.split(","))
            registers[target] = run(operation, [value(one) for one in operands])
    return [registers[f"${i}"] for i in range(8)]


def test_the_emulator_knows_arithmetic() -> None:
    """A check of the checker: by numbers that are known."""
    text = "{\n.reg .b32 t;\nmov.b32 t, 0x43084308;\nmov.b32 $0, t;\nshl.b32 $1, $8, 4; shr.u32 $2, $8, 8;\n"
    text += "and.b32 $3, $8, 0xFF; lop3.b32 $4, $8, 0xF0, t, 0xEA;\n" + "".join(
        f"mov.b32 ${i}, 0;\n" for i in (5, 6, 7)
    )
    assert emulated(text + "}", [0x430F4300])[:5] == [0x43084308, 0x30F43000, 0x430F43, 0x00, 0x43084308]


# (int4 and nvfp4, whose scales are in the same instructions: tests/kernels/gemm/hopper/operand/test_dequantize.py.)
@pytest.mark.parametrize("format", ["mxfp4", "fp8_block_a16", "fp8_channel_a16"])
def test_the_kernel_s_instructions_read_what_was_written(format: str) -> None:
    """Each register's halves are the codes of K = 16 s + 8 h + 2 c and the next, times their scales."""
    dequantize = pytest.importorskip("pretuned.kernels.gemm.hopper.operand.dequantize")
    elements = PRECISIONS[format].w
    text = {"e2m1": dequantize._E2M1, "e4m3": dequantize._E4M3}[elements.name].value
    N, K = 128, 128
    w = made(format, 1, N, K)
    wanted, plain = w.dequantize(torch.float32)[0].double(), w.scale[0].clone()
    scale = elements.scale
    assert scale is not None
    assert w.prepare().order == ORDERS[format].number
    words_each = 4 if elements.bits == 8 else 2
    words = w.codes[0].view(torch.uint8).flatten().view(torch.int32)
    blocks = words.view(N // BLOCK, K // BLOCK, BLOCK, 4, words_each)
    seen, codes_seen = set(), set()
    given = made(format, 1, N, K).codes[0].view(torch.uint8)
    given = given if elements.bits == 8 else codes.unpack(given)
    for nb, kb, row, c in itertools.product(range(N // BLOCK), range(K // BLOCK), range(0, BLOCK, 3), range(4)):
        at = c ^ row // 2 % 4 if elements.bits == 8 else c  # dequantize._SWIZZLED
        found = emulated(text, [int(one) & 0xFFFFFFFF for one in blocks[nb, kb, row, at]])
        n = nb * BLOCK + row
        for i, register in enumerate(found):
            s, h = place_of(i, words_each)
            for p in range(2):
                k = kb * BLOCK + 16 * s + 8 * h + 2 * c + p
                value = bf16(register >> 16 * p & 0xFFFF)
                seen.add((n, k))
                codes_seen.add(int(given[n, k]))
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
    formats = {name for name, one in PRECISIONS.items() if one.quantised and not name.endswith("_zp")}
    assert set(ORDERS) == formats
    assert {dtype for one in map(made, ORDERS) for dtype in one.kernel_dtypes} == {
        one for one in DType if one.quantised and not one.value.endswith("_zp")
    }


def test_codes_of_8_bits_are_an_operand_in_a_swizzle_of_64_bytes() -> None:
    """What kernels/gemm/hopper/w8a8.py loads: TMA's image of 64 rows of 64 bytes, each row's K in ``K_ORDER``."""
    w = made("fp8_block", 1, 128, 128)
    plain = w.codes[0].view(torch.uint8).clone()
    blocks = w.prepare().codes[0].view(torch.uint8).view(2, 2, BLOCK * BLOCK)
    assert sorted(K_ORDER) == list(range(BLOCK))
    for nb, kb, row in itertools.product(range(2), range(2), range(BLOCK)):
        for chunk in range(4):
            at = 64 * row + 16 * chunk
            at ^= (at >> 3) & 0x30  # CU_TENSOR_MAP_SWIZZLE_64B: bits 4 and 5 by bits 7 and 8
            wanted = [plain[nb * BLOCK + row, kb * BLOCK + k] for k in K_ORDER[16 * chunk : 16 * chunk + 16]]
            assert blocks[nb, kb, at : at + 16].tolist() == [int(one) for one in wanted]
