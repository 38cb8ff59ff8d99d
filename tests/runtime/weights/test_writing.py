"""New numbers in weights that there are: in place, all or nothing, with the bits of a new quantisation."""

from __future__ import annotations

import contextlib
import copy
import math
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, TypeAlias

import pytest
import torch
from emulated_driver import EmulatedGpu, emulated
from pairwise import pairwise
from portable_formats import PORTABLE
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils._python_dispatch import TorchDispatchMode

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import PRECISIONS
from pretuned.runtime import ExpertWeights, Lora, experts_mlp, grouped_gemm, moe_mlp
from pretuned.runtime.weights import codes
from pretuned.runtime.weights.prepared_layout import ORDERS

E, N, K = 3, 128, 256
FORMATS = [name for name, precision in PRECISIONS.items() if precision.quantised and name not in PORTABLE]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


def numbers(seed: int, size: float = 0.05, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)) * size).to(dtype)


def packed_weights(format: str, *, prepared: bool, seed: int = 0) -> ExpertWeights:
    w = ExpertWeights.quantize(numbers(seed), format)
    return w.prepare() if prepared else w


def every_bit(w: ExpertWeights) -> dict[str, torch.Tensor]:
    tensors = w.tensors() | ({} if w.derived is None else {"derived": w.derived})
    return {name: tensor.reshape(-1).view(torch.uint8).clone() for name, tensor in tensors.items()}


def equal(w: ExpertWeights, bits: dict[str, torch.Tensor]) -> bool:
    now = every_bit(w)
    return now.keys() == bits.keys() and all(torch.equal(tensor, bits[name]) for name, tensor in now.items())


def addresses(w: ExpertWeights) -> list[int]:
    tensors = [*w.tensors().values(), *([] if w.derived is None else [w.derived])]
    return [tensor.data_ptr() for tensor in tensors]


@pairwise({"format": FORMATS, "prepared": [False, True], "dtype": DTYPES})
def test_w_is_quantised_in_place_to_the_bits_of_new_weights(format: str, prepared: bool, dtype: torch.dtype) -> None:
    w, new = packed_weights(format, prepared=prepared), numbers(1, dtype=dtype)
    before = addresses(w)
    want = ExpertWeights.quantize(new, format)
    assert w.copy_(new) is w
    assert addresses(w) == before
    assert equal(w, every_bit(want.prepare() if prepared else want))
    x, m_sizes = torch.randn(6, K), torch.tensor([1, 2, 3], dtype=torch.int32)
    fresh = packed_weights(format, prepared=prepared, seed=1) if dtype is torch.bfloat16 else copy.deepcopy(w)
    assert torch.equal(grouped_gemm(x, w, m_sizes), grouped_gemm(x, fresh, m_sizes))
    again = packed_weights(format, prepared=prepared)
    assert ExpertWeights.quantize(new, format, out=again, check=False) is again
    assert equal(again, every_bit(w))


@pytest.mark.parametrize("to_prepared", [False, True])
@pytest.mark.parametrize("of_prepared", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_weights_are_copied_from_either_layout_to_either(format: str, of_prepared: bool, to_prepared: bool) -> None:
    w, other = packed_weights(format, prepared=to_prepared), packed_weights(format, prepared=of_prepared, seed=1)
    before = addresses(w)
    w.copy_(other, check=to_prepared)
    assert addresses(w) == before
    assert equal(w, every_bit(packed_weights(format, prepared=to_prepared, seed=1)))


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_what_is_refused_changes_nothing(format: str, prepared: bool) -> None:
    w = packed_weights(format, prepared=prepared)
    before, fine = every_bit(w), numbers(1)
    for value in (math.nan, math.inf, -math.inf):
        wrong = fine.clone()
        wrong[E - 1, N - 1, K - 1] = value
        with pytest.raises(InputError, match="w is NaN or infinite in places, wanted finite numbers"):
            w.copy_(wrong)
        with pytest.raises(InputError, match="NaN or infinite"):
            ExpertWeights.quantize(wrong, format, out=w)
    for new, message in (
        (fine[:2], r"wanted \[3, 128, 256\]"),
        (fine.mT, r"wanted \[3, 128, 256\]"),
        (fine.to(torch.int32), "a floating-point type"),
        (torch.zeros(1, 1, 1).expand(E, N, K), "repeats elements"),
        (fine.to("meta"), "on meta"),
        ([1.0], "list, wanted"),
    ):
        with pytest.raises(InputError, match=message):
            w.copy_(new)  # type: ignore[arg-type]
    other = "mxfp4" if format != "mxfp4" else "mxfp8"
    with pytest.raises(InputError, match=f"copy_'s argument is ExpertWeights.{other}"):
        w.copy_(packed_weights(other, prepared=False))
    with pytest.raises(InputError, match=f"out is .*, wanted {other} weights"):
        ExpertWeights.quantize(fine, other, out=w)
    with pytest.raises(InputError, match="check is 'no', wanted True or False"):
        w.copy_(fine, check="no")  # type: ignore[arg-type]
    with pytest.raises(InputError, match="on meta"):
        w.copy_(packed_weights(format, prepared=prepared).to("meta"))
    assert equal(w, before)


@pytest.mark.parametrize("format", [format for format in FORMATS if ORDERS[format].most < math.inf])
def test_no_number_is_larger_than_prepared_weights_have_room_for(format: str) -> None:
    """Below ``most`` every scale has room; from there on a copy is refused, whichever sign."""
    w, most = packed_weights(format, prepared=True), ORDERS[format].most
    new = numbers(1, dtype=torch.float32)
    for sign in (1, -1):
        new[1, 5, 7] = torch.tensor(sign * most).nextafter(torch.tensor(0.0))
        assert ORDERS[format].room(ExpertWeights.quantize(new, format).scale)
        w.copy_(new)
        before = every_bit(w)
        new[1, 5, 7] = sign * most
        with pytest.raises(InputError, match=r"what prepared .* weights have room for"):
            w.copy_(new)
        assert equal(w, before)
        packed_weights(format, prepared=False).copy_(new)  # the checkpoint's layout has room
    huge = torch.full((128, 256), 2 * most)
    huge[:, ::2] *= -1
    assert not ORDERS[format].room(codes.quantise(format, huge).scale)


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("format", FORMATS)
def test_no_number_is_larger_than_float32_has_room_for(format: str, prepared: bool) -> None:
    """Scales are computed in float32: of what is infinite there, all codes of a group would be wrong."""
    w, new = packed_weights(format, prepared=prepared), numbers(1).double()
    before = every_bit(w)
    new[1, 5, 7] = 1e39
    with pytest.raises(InputError, match="w is NaN or infinite"):
        w.copy_(new)
    assert equal(w, before)
    largest = numbers(1, dtype=torch.float32)
    largest[1, 5, 6], largest[1, 5, 7] = 3e38, -3e38  # of int4 with zero points the range of both counts
    if (prepared and ORDERS[format].most < math.inf) or format.endswith("_zp"):
        with pytest.raises(InputError, match="room for"):
            w.copy_(largest)
        assert equal(w, before)
    else:
        w.copy_(largest)
        assert w.dequantize(torch.float32).isfinite().all()


@pytest.mark.parametrize("prepared", [False, True])
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize("format", ["int4_g32", "int4_g128_zp"])
def test_int4_with_scales_of_another_dtype(format: str, dtype: torch.dtype, prepared: bool) -> None:
    """They are numbers that bf16 has, too: what kernels read is what is stored."""
    plain = packed_weights(format, prepared=False)
    w = ExpertWeights.int4(plain.codes, plain.scale.to(dtype), plain.zero)
    w = w.prepare() if prepared else w
    new = numbers(1)
    new[0] *= 1e-4  # a scale that is subnormal in fp16
    w.copy_(new)
    assert w.scale.dtype is dtype
    assert torch.equal(w.scale.to(torch.bfloat16).to(dtype), w.scale)
    assert (w.dequantize(torch.float32) - new.float()).abs().max() < 0.05
    want = ExpertWeights.quantize(new, format)
    if dtype is torch.float32:
        assert torch.equal(w.dequantize(torch.float32), want.dequantize(torch.float32))
    if dtype is torch.float16:
        new[2, 0, 0] = 3e38
        with pytest.raises(InputError, match="room for"):
            w.copy_(new)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "int4_g64_zp", "nvfp4"])
def test_memory_is_of_one_expert_beside_the_result(format: str) -> None:
    class Largest(TorchDispatchMode):
        most = 0

        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            out = func(*args, **(kwargs or {}))
            for tensor in out if isinstance(out, tuple | list) else (out,):
                if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in storages:
                    self.most = max(self.most, tensor.untyped_storage().nbytes())
            return out

    many = 24
    w = ExpertWeights.quantize(numbers(0)[:1].expand(many, N, K).contiguous(), format).prepare()
    new, other = torch.randn(many, N, K), ExpertWeights.quantize(torch.randn(many, N, K), format)
    tensors = [new, *w.tensors().values(), *other.tensors().values(), *([] if w.derived is None else [w.derived])]
    storages = {tensor.untyped_storage().data_ptr() for tensor in tensors}
    of_expert = 4 * N * K
    with Largest() as seen:
        w.copy_(new)
        w.copy_(other)
    assert 0 < seen.most <= 4 * of_expert  # float32, twice, of one; all are 24 of them


def test_a_copy_without_the_check_reads_nothing_beforehand() -> None:
    w, new = packed_weights("fp8_channel", prepared=True), numbers(1)
    new[0, 0, 0] = math.inf
    w.copy_(new, check=False)
    want = ExpertWeights.quantize(new[1:], "fp8_channel").prepare()
    assert torch.equal(w.codes[1:], want.codes)


Capture: TypeAlias = "Callable[[], contextlib.AbstractContextManager[object]]"


class NothingIsRead(TorchDispatchMode):
    """An error where a number of a tensor is read: the capture of a CUDA graph can't wait for it."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        assert func not in (torch.ops.aten._local_scalar_dense.default, torch.ops.aten.equal.default), "read"
        return func(*args, **(kwargs or {}))


@pytest.fixture
def capture(clean_places: Path) -> Iterator[Capture]:
    """A context in which the current stream of an emulated GPU, for which no bundle has a kernel, is captured."""
    with emulated(EmulatedGpu()) as gpu:

        @contextlib.contextmanager
        def captured() -> Iterator[None]:
            gpu.capturing = True
            with NothingIsRead():
                yield
            gpu.capturing = False

        yield captured


def test_a_copy_in_a_capture_is_to_be_without_the_check(capture: Capture) -> None:
    w = packed_weights("mxfp4", prepared=True)
    before = every_bit(w)
    with capture(), pytest.raises(InputError, match="can't be checked, wanted check=False"):
        w.copy_(numbers(1))
    assert equal(w, before)
    with capture():
        w.copy_(numbers(1), check=False)
    assert equal(w, every_bit(packed_weights("mxfp4", prepared=True, seed=1)))


def test_weights_in_a_capture(capture: Capture) -> None:
    """Nothing is read there: prepared weights were checked when they were made, others need ``check=False``."""
    w = packed_weights("fp8_block", prepared=True)
    plain, ready = (packed_weights("fp8_block", prepared=prepared, seed=1) for prepared in (False, True))
    before, want = every_bit(w), every_bit(ready)
    with capture(), pytest.raises(InputError, match="in the capture of a CUDA graph, wanted check=False there"):
        w.copy_(plain)
    assert equal(w, before)
    for new in (ready, numbers(1), plain):
        with capture():
            w.copy_(numbers(0), check=False)
        assert equal(w, before)
        with capture():
            w.copy_(new, check=new is ready)
        assert equal(w, want)
    assert not w._is_current()  # the replay writes the scale, and the next call what is derived of it
    assert equal(w, want)


@pytest.mark.parametrize("format", ["fp8_block", "mxfp4", "int4_g32_zp"])
def test_weights_in_the_same_memory_are_not_moved_over_themselves(format: str) -> None:
    """A kernel would read what it has written."""
    stored = packed_weights(format, prepared=False)
    first = copy.deepcopy(stored)
    ready = stored.prepare_in_place()
    before = every_bit(ready)
    for to, other in ((ready, stored), (stored, ready)):
        with pytest.raises(InputError, match=r"in the memory of these weights, wanted prepare_in_place\(\) or"):
            to.copy_(other, check=False)
    whole = torch.zeros(ready.codes.untyped_storage().nbytes() * 8, dtype=torch.uint8)
    codes = whole[: ready.codes.nbytes].view(torch.int32).view(ready.codes.shape).copy_(ready.codes)
    apart = ExpertWeights(
        format, codes, *(None if tensor is None else tensor.clone() for tensor in ready._quantised[1:])
    )
    w = whole.view(torch.bfloat16)[64 : 64 + E * N * K].view(E, N, K)
    with pytest.raises(InputError, match="w is in the memory of these weights"):
        apart.copy_(w)
    assert equal(ready, before)
    assert equal(ready.copy_(ready), before)
    assert equal(ready.copy_(ready.restore()), before)
    assert equal(ready.copy_(first), before)


def test_a_wrapper_of_tensors_is_refused() -> None:
    """A kernel would get the address that it says, which is none."""
    w, new = packed_weights("mxfp4", prepared=True), numbers(1)
    before = every_bit(w)
    with pytest.raises(InputError, match=r"w is a TwoTensor, wanted .* full_tensor\(\)"):
        w.copy_(TwoTensor(new, new.clone()))
    assert equal(w, before)


def test_w_may_be_a_view_of_other_memory() -> None:
    """Gate and up are halves of a trainer's, or K comes first."""
    new = numbers(1)
    both = torch.cat((torch.zeros_like(new), new), 1)[:, N:]
    for wrong in (both, new.mT.contiguous().mT, new.requires_grad_()):
        w = packed_weights("fp8_block", prepared=True).copy_(wrong)
        assert equal(w, every_bit(packed_weights("fp8_block", prepared=True, seed=1)))
    w = packed_weights("fp8_block", prepared=True)
    threads = [threading.Thread(target=w.copy_, args=(new,)) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert equal(w, every_bit(packed_weights("fp8_block", prepared=True, seed=1)))


@pytest.mark.parametrize("format", FORMATS)
def test_weights_of_any_size_are_written_in_the_checkpoints_layout(format: str) -> None:
    new = torch.randn(2, 130, 90)
    w = ExpertWeights.quantize(torch.zeros(2, 130, 90), format)
    w.copy_(new)
    assert equal(w, every_bit(ExpertWeights.quantize(new, format)))


def test_what_fp8_has_is_quantised_to_its_own_codes() -> None:
    """A refit with the numbers that the weights have changes no bit."""
    for format in ("fp8_block", "fp8_channel", "mxfp8", "mxfp4"):
        w = packed_weights(format, prepared=True)
        before = every_bit(w)
        w.copy_(w.dequantize(torch.float32))
        assert equal(w, before), format


@pytest.mark.parametrize("write", ["copy_", "quantize", "prepare_in_place", "scale"])
@pytest.mark.parametrize("call", ["grouped_gemm", "grouped_gemm, adapter", "padded", "moe_mlp", "moe_mlp, adapter"])
def test_no_backward_reads_weights_that_were_written_after_its_forward(call: str, write: str) -> None:
    """The gradient would be that of the new numbers; torch's own functions refuse it for tensors."""
    g = torch.Generator().manual_seed(3)
    e, h, i, r = 2, 64, 64, 4
    gate_up, down = (
        ExpertWeights.quantize(torch.randn(e, *shape, generator=g).bfloat16(), "mxfp4")
        for shape in ((2 * i, h), (h, i))
    )
    x = torch.randn(6, h, generator=g).bfloat16().requires_grad_()
    counts = torch.tensor([4, 2], dtype=torch.int32)
    low = [
        Lora(torch.randn(e, r, k, generator=g).bfloat16(), torch.randn(e, n, r, generator=g).bfloat16(), 1.0)
        for n, k in ((2 * i, h), (h, i))
    ]
    ids, weights = torch.tensor([[0, 1]] * 6), torch.rand(6, 2, generator=g)
    calls = {
        "grouped_gemm": lambda: grouped_gemm(x, gate_up, counts),
        "grouped_gemm, adapter": lambda: grouped_gemm(x, gate_up, counts, lora=low[0]),
        "padded": lambda: experts_mlp(x.view(2, 3, h), gate_up, down, torch.tensor([3, 1], dtype=torch.int32)),
        "moe_mlp": lambda: moe_mlp(x, gate_up, down, ids, weights),
        "moe_mlp, adapter": lambda: moe_mlp(x, gate_up, down, ids, weights, lora=(low[0], low[1])),
    }
    calls[call]().sum().backward()  # written by nobody
    y = calls[call]()
    new = torch.randn(e, 2 * i, h, generator=g).bfloat16()
    {
        "copy_": lambda: gate_up.copy_(new),
        "quantize": lambda: ExpertWeights.quantize(new, "mxfp4", out=gate_up),
        "prepare_in_place": gate_up.prepare_in_place,
        "scale": lambda: gate_up.scale.add_(1),
    }[write]()
    with pytest.raises(InputError, match="written after a forward"):
        y.sum().backward()
