"""Weights that row kernels write and read: which calls they take, on the emulated GPU."""

from __future__ import annotations

import functools
from collections.abc import Iterator
from pathlib import Path

import emulated_kernels
import pytest
import torch
from emulated_driver import A100, H200, EmulatedGpu, Launch, emulated, forget

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import DType, RowOp, Variant
from pretuned.kernels import rowops
from pretuned.kernels.registry import unlaunchable
from pretuned.runtime import ExpertWeights, reload, self_test_results
from pretuned.runtime.launch import weights as launch_weights
from pretuned.runtime.settings import lock

E, N, K = 3, 128, 192
FORMATS = [dtype.value for dtype in DType if dtype.quantised]
DTYPES = [torch.bfloat16, torch.float16, torch.float32]


@pytest.fixture
def gpu(clean_places: Path) -> Iterator[EmulatedGpu]:
    """With a bundle of all kernels of weights."""
    publish(clean_places / "weights.msgpack", bundle())
    with emulated(EmulatedGpu(H200)) as gpu:
        reload()
        yield gpu
        gpu.visible = True


@functools.cache
def bundle() -> bytes:
    return encode(emulated_kernels.bundle_of(of_weights()))


def of_weights() -> list[tuple[Variant, bytes]]:
    return [emulated_kernels.variant_and_code(spec) for spec in rowops.weight_specs(tuple(DType))]


def another_process(gpu: EmulatedGpu) -> None:
    """One that has tested no kernel, nor finds what others tested: it has another driver."""
    self_test_results._memory.__init__()  # type: ignore[misc]
    forget()
    gpu.gpu = gpu.gpu._replace(driver=gpu.gpu.driver + 10)
    reload()


def numbers(seed: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    return (torch.randn(E, N, K, generator=torch.Generator().manual_seed(seed)) * 0.05).to(dtype)


def bits(w: ExpertWeights) -> list[torch.Tensor]:
    return [tensor.reshape(-1).view(torch.uint8).clone() for tensor in w.tensors().values()]


def same(w: ExpertWeights, want: list[torch.Tensor]) -> bool:
    return all(torch.equal(bit, other) for bit, other in zip(bits(w), want, strict=True))


def ops(gpu: EmulatedGpu) -> list[RowOp]:
    """Return the row kernels launched since, without self-tests, which have a stream of their own."""
    own = launch_weights.current_stream(0)
    results = [
        row_kernel.code.op
        for row_kernel in gpu.passes
        if isinstance(row_kernel.code.op, RowOp) and row_kernel.stream == own
    ]
    gpu.launches.clear()
    return results


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", FORMATS)
def test_all_is_done_by_kernels(
    format: str, dtype: torch.dtype, gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    if dtype is not torch.bfloat16:  # w's dtype is an argument of the same kernels: their self-tests ran for bf16
        monkeypatch.setenv("PRETUNED_DISABLE_SELF_TEST", "1")
        reload()
    w, new = numbers(0, dtype), numbers(1, dtype)
    gpu.visible = False  # torch quantises tensors of the host
    plain = ExpertWeights.quantize(w, format)
    want = [bits(plain), bits(ExpertWeights.quantize(new, format))]
    can = plain.can_be_prepared
    values = plain.dequantize(dtype)
    ready = plain.prepare()
    want += [bits(ready), bits(ExpertWeights.quantize(new, format).prepare())]
    assert not gpu.launches
    gpu.visible = True
    outer = [RowOp.LARGEST_WEIGHT] if format == "nvfp4" else []
    weights = ExpertWeights.quantize(w, format)
    assert ops(gpu) == [RowOp.LARGEST_WEIGHT, *outer, RowOp.QUANTIZE_WEIGHTS]
    assert same(weights, want[0])
    assert torch.equal(weights.dequantize(dtype), values)
    assert ops(gpu) == [RowOp.DEQUANTIZE_WEIGHTS]
    assert same(weights.copy_(new, check=False), want[1])
    assert ops(gpu) == [*outer, RowOp.QUANTIZE_WEIGHTS]
    assert can == (K % 128 == 0 or not format.startswith(("fp8_block", "int4_g128")))
    if not can:
        return
    weights = ExpertWeights.quantize(w, format)
    stored = ExpertWeights.quantize(w, format)
    ops(gpu)
    weights = weights.prepare()
    assert ops(gpu) == [RowOp.MOVE_CODES]
    assert same(weights, want[2])
    assert torch.equal(weights.dequantize(dtype), values)
    assert ops(gpu) == [RowOp.DEQUANTIZE_WEIGHTS]
    assert same(weights.restore(), want[0])
    assert ops(gpu) == [RowOp.MOVE_CODES]
    assert same(weights.copy_(new), want[3])
    assert ops(gpu) == [RowOp.LARGEST_WEIGHT, *outer, RowOp.QUANTIZE_WEIGHTS]
    assert same(weights.copy_(stored), want[2])
    assert ops(gpu) == [RowOp.MOVE_CODES]


def test_a_bundle_built_for_another_capability_has_them(clean_places: Path) -> None:
    """``aot build --new-weights`` adds the row kernels of its models' formats."""
    built = [emulated_kernels.variant_and_code(spec, 80) for spec in rowops.weight_specs((DType.FP8_BLOCK_A16,))]
    emulated_kernels.write(clean_places / "mine.msgpack", built, sm=80)
    with emulated(EmulatedGpu(A100, 80)) as gpu:
        reload()
        weights = ExpertWeights.quantize(numbers(0), "fp8_block_a16").copy_(numbers(1), check=False)
        assert ops(gpu) == [RowOp.LARGEST_WEIGHT, *[RowOp.QUANTIZE_WEIGHTS] * 2]
        ExpertWeights.quantize(numbers(0), "mxfp4", check=False)
        assert ops(gpu) == []
        gpu.visible = True
    assert same(weights, bits(ExpertWeights.quantize(numbers(1), "fp8_block_a16")))


@pytest.mark.parametrize("change", ["prepare", "prepare_in_place"])
@pytest.mark.parametrize("format", ["fp8_channel", "mxfp8"])
def test_the_kernel_that_moves_codes_sees_nan_among_them(
    format: str, change: str, gpu: EmulatedGpu, caplog: pytest.LogCaptureFixture
) -> None:
    """Without another read of the codes; nothing was changed then, though it was moved."""
    w = ExpertWeights.quantize(numbers(0), format)
    w.codes.view(torch.uint8)[2, 77, 150] = 0xFF
    want = bits(w)
    ops(gpu)
    assert getattr(w, change)() is w
    assert ops(gpu) == [RowOp.MOVE_CODES] * (1 if change == "prepare" else 2)  # and back
    assert same(w, want)
    assert "codes are NaN at expert 2, row 77, column 150" in caplog.text
    w.codes.view(torch.uint8)[2, 77, 150] = 0
    assert getattr(w, change)().is_prepared


def test_what_kernels_do_not_take_torch_does(gpu: EmulatedGpu) -> None:
    wide = torch.cat([numbers(1), numbers(1)], 1)
    bent = torch.zeros(E * N * K + 1, dtype=torch.bfloat16)[1:].view(E, N, K).copy_(numbers(1))
    for new, taken in (
        (wide[:, N:], True),  # rows of a fused tensor
        (wide[::1, ::2], True),  # each other row
        (numbers(1).mT.contiguous().mT, False),
        (bent, False),
        (numbers(1).double(), False),
    ):
        w = ExpertWeights.quantize(numbers(0), "mxfp4").prepare()
        ops(gpu)
        w.copy_(new)
        assert (RowOp.QUANTIZE_WEIGHTS in ops(gpu)) is taken
        assert same(w, bits(ExpertWeights.quantize(new, "mxfp4").prepare()))
    plain = ExpertWeights.quantize(numbers(0), "int4_g32")
    w = ExpertWeights.int4(plain.codes, plain.scale.float())
    ops(gpu)
    w.copy_(numbers(1))
    assert ops(gpu) == [RowOp.LARGEST_WEIGHT]
    assert torch.equal(w.codes, ExpertWeights.quantize(numbers(1), "int4_g32").codes)
    ops(gpu)
    odd = ExpertWeights.quantize(torch.randn(2, 10, 40), "fp8_channel")
    assert RowOp.QUANTIZE_WEIGHTS not in ops(gpu)
    odd.dequantize()
    assert ops(gpu) == []


def test_numbers_that_are_none_are_found_by_the_kernel(gpu: EmulatedGpu) -> None:
    w = ExpertWeights.quantize(numbers(0), "mxfp4").prepare()
    before = bits(w)
    for value in (float("nan"), float("inf"), -16.0):
        new = numbers(1)
        new[2, 77, 5] = value
        ops(gpu)
        with pytest.raises(InputError, match=r"NaN or infinite|as large as 16"):
            w.copy_(new)
        assert ops(gpu) == [RowOp.LARGEST_WEIGHT]
        assert same(w, before)


@pytest.mark.parametrize("format", ["fp8_channel", "mxfp4", "int4_g32_zp", "nvfp4"])
def test_writes_of_kernels_are_counted(format: str, gpu: EmulatedGpu) -> None:
    """A backward pass that saved the tensors is to fail, and what is derived of scales to be made anew."""
    w, stored = ExpertWeights.quantize(numbers(0), format).prepare(), ExpertWeights.quantize(numbers(1), format)
    versions = [tensor._version for tensor in w.tensors().values()]
    for new in (stored, numbers(1)):
        gpu.launches.clear()
        w.copy_(new, check=False)
        assert len(ops(gpu)) >= 1
        now = [tensor._version for tensor in w.tensors().values()]
        assert all(version > before for version, before in zip(now, versions, strict=True))
        versions = now
    with torch.inference_mode():
        of_no_version = ExpertWeights.quantize(numbers(0), format).copy_(numbers(1))
    assert same(of_no_version, bits(stored))


def test_kernels_are_launched_on_the_weights_device(gpu: EmulatedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whichever GPU is torch's current one."""
    gpu.count = 2
    w, stored = ExpertWeights.quantize(numbers(0), "nvfp4").prepare(), ExpertWeights.quantize(numbers(1), "nvfp4")
    w.copy_(stored).dequantize()
    monkeypatch.setattr(torch.Tensor, "get_device", lambda _: 1)
    w.copy_(numbers(1)).copy_(stored).dequantize()  # finds the kernels of this device, and tests them
    gpu.streams_asked.clear()
    w.copy_(numbers(1))
    w.copy_(stored)
    w.dequantize()
    assert gpu.streams_asked == [(1, 1)] * 5  # two searches for the largest, quantised, moved, dequantised
    assert gpu.current == 0


@pytest.mark.parametrize("of", ["prepare", "restore", "prepare_in_place", "restore_in_place"])
def test_no_kernel_is_looked_for_while_weights_are_locked(of: str, gpu: EmulatedGpu) -> None:
    """To find one may wait for a self-test, which may wait for that lock."""
    w = ExpertWeights.quantize(numbers(0), "fp8_channel")
    if of.startswith("restore"):
        w = w.prepare()
    another_process(gpu)
    free = []

    def tested(launch: Launch) -> None:
        if launch.code.op is RowOp.MOVE_CODES and launch.stream:  # a self-test
            free.append(lock("prepare").acquire(blocking=False))
            lock("prepare").release()

    for variant, _ in of_weights():
        gpu.after[variant.cubin_sha256] = tested
    getattr(w, of)()
    assert free
    assert all(free)


def test_without_a_kernel_torch_does_it(clean_places: Path, caplog: pytest.LogCaptureFixture) -> None:
    with emulated(EmulatedGpu(H200)) as gpu, caplog.at_level("INFO"):
        reload()
        weights = ExpertWeights.quantize(numbers(0), "int4_g64_zp").prepare().copy_(numbers(1))
        assert not gpu.passes
    assert same(weights, bits(ExpertWeights.quantize(numbers(1), "int4_g64_zp").prepare()))
    message = "no usable bundle has a kernel for quantize_weights int4_g64_zp: torch does it"
    assert any(message in record.getMessage() for record in caplog.records)


def test_a_record_with_another_tile_is_not_launched() -> None:
    """The grid is counted by this version's tiles."""
    variant, _ = emulated_kernels.variant_and_code(rowops.RowOpSpec(RowOp.QUANTIZE_WEIGHTS, DType.MXFP4))
    assert unlaunchable(variant) is None
    assert "this version launches block 128 w4" in str(
        unlaunchable(variant._replace(config=(("block", 64), ("num_warps", 4))))
    )
    assert "no kernel for bf16" in str(unlaunchable(variant._replace(dtype=DType.BF16)))
    assert "no kernel for fp8_block_a16" in str(unlaunchable(variant._replace(dtype=DType.FP8_BLOCK_A16)))
    assert launch_weights.KIND_FLAGS.keys() == set(DTYPES)
