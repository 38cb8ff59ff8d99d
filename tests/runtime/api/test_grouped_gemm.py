"""grouped_gemm on the host: the reference behind every check that a call on CUDA goes through."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from emulated_driver import H200, EmulatedGpu, emulated
from emulated_kernels import bundle_of, variant_and_code
from host_gpu import Device

from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Choice, DType, Gpu, Layout, Op, Problem, Source, bucket_of
from pretuned.kernels import reference
from pretuned.kernels.spec import Config, Spec
from pretuned.runtime import grouped_gemm
from pretuned.runtime.check.call import Rows
from pretuned.runtime.check.tensors import check
from pretuned.runtime.launch import steps
from pretuned.runtime.launch.product_kernels import rows_aligned

SHIPPED = Path(__file__).parents[3] / "artifacts" / "bundles"
E, N, K, M = 3, 10, 8, 12
BF16 = torch.bfloat16


def call(dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(M, K, generator=generator).to(dtype)
    w = torch.randn(E, N, K, generator=generator).to(dtype)
    return x, w, torch.tensor([5, 0, 4], dtype=torch.int32)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("counts", [torch.int32, torch.int64])
def test_it_is_the_reference(dtype: torch.dtype, counts: torch.dtype) -> None:
    x, w, m_sizes = call(dtype)
    wanted = reference.forward(x, w, m_sizes)[:9]
    assert torch.equal(grouped_gemm(x, w, m_sizes.to(counts))[:9], wanted)


def test_every_layout_of_w() -> None:
    x, w, m_sizes = call()
    wanted = grouped_gemm(x, w, m_sizes)[:9]
    kn = w.transpose(1, 2).contiguous()
    for same, layout in (
        (w.view(E * N, K), "nk"),
        (kn, "kn"),
        (kn.view(E * K, N), "kn"),
        (torch.cat([w, w], dim=2)[:, :, :K], "nk"),
        (torch.cat([w, w], dim=1)[:, :N], "nk"),
        (torch.cat([w.view(E * N, K)] * 2, dim=1)[:, :K], "nk"),
    ):
        torch.testing.assert_close(grouped_gemm(x, same, m_sizes, w_layout=layout)[:9], wanted)


def test_x_of_any_stride() -> None:
    x, w, m_sizes = call()
    wanted = grouped_gemm(x, w, m_sizes)[:9]
    assert torch.equal(grouped_gemm(torch.cat([x, x], dim=1)[:, :K], w, m_sizes)[:9], wanted)
    assert torch.equal(grouped_gemm(x.t().contiguous().t(), w, m_sizes)[:9], wanted)


def test_out_and_the_tail() -> None:
    x, w, m_sizes = call()
    out = torch.full((M, N), 7.0)
    assert grouped_gemm(x, w, m_sizes, out=out) is out
    assert (out[9:] == 7).all()
    assert torch.equal(out[:9], reference.forward(x, w, m_sizes)[:9])
    grouped_gemm(x, w, m_sizes, out=out, zero_tail=True)
    assert (out[9:] == 0).all()
    assert (grouped_gemm(x, w, m_sizes, zero_tail=True)[9:] == 0).all()


def test_no_rows() -> None:
    x, w, m_sizes = call()
    assert grouped_gemm(x[:0], w, m_sizes).shape == (0, N)


def test_the_host_has_gradients() -> None:
    x, w, m_sizes = (tensor.double() if tensor.is_floating_point() else tensor for tensor in call())
    x.requires_grad_()
    w.requires_grad_()
    assert torch.autograd.gradcheck(lambda a, b: grouped_gemm(a, b, m_sizes, zero_tail=True), (x, w))


X, W, SIZES = call()


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ({"x": [1.0]}, "x is a list, wanted a torch.Tensor"),
        ({"w": None}, "w is a NoneType"),
        ({"m_sizes": 3}, "m_sizes is a int"),
        ({"x": X[None]}, r"x is of shape \[1, 12, 8\], wanted \[E, M_max, K\] with E=3"),
        ({"x": X[0]}, r"x is of shape \[8\], wanted \[M, K\]"),
        ({"m_sizes": SIZES[None]}, r"m_sizes is of shape \[1, 3\], wanted \[E\]"),
        ({"m_sizes": SIZES.float()}, "m_sizes is torch.float32, wanted torch.int32 or torch.int64"),
        ({"m_sizes": SIZES.repeat_interleave(2)[::2]}, "m_sizes is of stride 2, wanted contiguous"),
        ({"m_sizes": SIZES[:2]}, r"w is of shape \[3, 10, 8\], wanted \[E, N, K\] with E=2"),
        ({"w": W[:, :, :7]}, r"w is of shape \[3, 10, 7\], wanted \[E, N, K\] with K=8"),
        ({"w": W.transpose(1, 2).contiguous()}, "is it w_layout='kn'"),
        ({"w": W.transpose(1, 2), "w_layout": "kn"}, r"w is with strides \[80, 1, 8\].*w_layout='nk' can be used"),
        ({"w": W.view(-1, K)[:-1]}, "its rows must divide by the 3 experts"),
        ({"w": W[0, 0]}, "flattened"),
        ({"w": W.half()}, "w is torch.float16, wanted x's dtype, torch.float32"),
        ({"x": X.long(), "w": W.long()}, "x is torch.int64"),
        ({"x": X.to(torch.float8_e5m2), "w": W.to(torch.float8_e5m2)}, "x is torch.float8_e5m2, wanted torch.bfloat16"),
        ({"w": W.to("meta")}, "w is on meta, wanted x's device, cpu"),
        ({"m_sizes": SIZES.to("meta")}, "m_sizes is on meta"),
        ({"w_layout": "NK"}, "w_layout is 'NK', wanted 'nk'"),
        ({"w_layout": ["nk"]}, r"w_layout is \['nk'\]"),
        ({"out": torch.zeros(M, N + 1)}, r"out is of shape \[12, 11\], wanted \[M, N\] = \[12, 10\]"),
        ({"out": torch.zeros(M, N, dtype=BF16)}, "out is torch.bfloat16 on cpu, wanted x's torch.float32"),
        ({"out": torch.zeros(N, M).t()}, "out is with strides"),
        ({"out": torch.zeros(1, N).expand(M, N)}, "out is with strides"),
        ({"out": 1}, "out is a int"),
        ({"out": torch.tensor(1.0)}, r"out is of shape \[\]"),
        ({"out": torch.zeros(M, N, requires_grad=True)}, "out is a tensor that requires grad"),
    ],
)
def test_what_cannot_be_used_is_named(how: dict[str, object], words: str) -> None:
    inputs = {"x": X, "w": W, "m_sizes": SIZES, **how}
    with pytest.raises(InputError, match=f"^grouped_gemm: .*{words}"):
        grouped_gemm(**inputs)  # type: ignore[arg-type]


def test_rows_beyond_int32_are_refused() -> None:
    x = torch.empty(1, K).expand(2**31, K)
    with pytest.raises(InputError, match=r"x is M=2147483648, wanted at most 2147483647"):
        check(x, W, SIZES, "nk")


@pytest.mark.parametrize(
    ("x", "w", "aligned"),
    [
        (torch.empty(4, 64, dtype=BF16), torch.empty(2, 32, 64, dtype=BF16), True),
        (torch.empty(4, 64, dtype=BF16), torch.empty(2, 33, 64, dtype=BF16), False),
        (torch.empty(4, 60, dtype=BF16), torch.empty(2, 32, 60, dtype=BF16), False),
        (torch.empty(4, 60), torch.empty(2, 32, 60), True),
        (torch.empty(4, 72, dtype=BF16)[:, 8:], torch.empty(2, 32, 64, dtype=BF16), True),
        (torch.empty(4, 72, dtype=BF16)[:, 4:68], torch.empty(2, 32, 64, dtype=BF16), False),
        (torch.empty(4, 68, dtype=BF16)[:, :64], torch.empty(2, 32, 64, dtype=BF16), False),
        (torch.empty(1, 68, dtype=BF16)[:, :64], torch.empty(2, 32, 64, dtype=BF16), True),
        (torch.empty(4, 64, dtype=BF16), torch.empty(2, 32, 68, dtype=BF16)[:, :, :64], False),
        (torch.empty(4, 64, dtype=BF16), torch.empty(2, 32, 72, dtype=BF16)[:, :, :64], True),
        (torch.empty(4, 64, dtype=BF16), torch.empty(1, 32, 64, dtype=BF16).expand(2, 32, 64), False),
    ],
)
def test_what_counts_as_aligned(x: torch.Tensor, w: torch.Tensor, aligned: bool) -> None:
    call = Rows(Op.FORWARD, x, w, torch.zeros(2, dtype=torch.int32), Layout.NK, len(x))
    assert rows_aligned(call, torch.empty(len(x), w.shape[1], dtype=x.dtype)) is aligned


def test_the_alignment_of_out_counts() -> None:
    x, w = torch.empty(4, 64, dtype=BF16), torch.empty(2, 32, 64, dtype=BF16)
    call = Rows(Op.FORWARD, x, w, torch.zeros(2, dtype=torch.int32), Layout.NK, 4)
    wide = torch.empty(4, 40, dtype=BF16)
    assert rows_aligned(call, wide[:, 8:])
    assert not rows_aligned(call, wide[:, 4:36])
    assert not rows_aligned(call, torch.empty(4, 36, dtype=BF16)[:, :32])


@pytest.mark.parametrize("rows", [(1100, 2000, 1400, 1500), (2000, 1100, 1500, 1400), (1024, 1448, 1449, 2048)])
def test_a_plain_call_takes_the_kernel_of_its_own_bucket(device: Device, rows: tuple[int, ...]) -> None:
    """Calls of one kind share a launcher where they share a bucket, in whatever order."""
    problem = Problem(Op.FORWARD, DType.BF16, 2, 16, 16)
    configs = {1024: Config(16, 64, 64, 4, 2), 2048: Config(64, 64, 64, 4, 2)}
    choices = {problem: [Choice(bucket, i, Source.MEASURED, 1000, gpu=0) for i, bucket in enumerate(configs)]}
    variants = [variant_and_code(Spec(Op.FORWARD, DType.BF16, config)) for config in configs.values()]
    device.publish(encode(bundle_of(variants, choices, gpus=[H200])))
    device.computes = False
    w = torch.randn(2, 16, 16, dtype=torch.bfloat16)
    for M in rows * 2:
        grouped_gemm(torch.randn(M, 16, dtype=torch.bfloat16), w, torch.tensor([M, 0]))
    assert [launch.code.config for launch in device.launches] == [configs[bucket_of(M)].pairs() for M in rows * 2]


def test_rows_of_y_that_are_no_whole_16_bytes_are_filled_up(clean_places: Path) -> None:
    """A plain call runs aligned code on rows that lie further apart: w's descriptor has its own rows, y's are a view.

    The code is what ships.
    """
    E, N, K, M = 4, 333, 512, 40
    x, w = torch.randn(M, K).bfloat16(), torch.randn(E, N, K).bfloat16()
    m_sizes = torch.full((E,), M // E, dtype=torch.int32)
    with emulated(EmulatedGpu(Gpu("NVIDIA H200", 132, 143155, 13000))) as gpu:
        gpu.know(SHIPPED / "catalogue-sm90.msgpack")
        for _ in range(3):  # the first of its kind, one like it, and the same again
            y = grouped_gemm(x, w, m_sizes)
            assert (y.shape, y.stride()) == ((M, N), (336, 1))
            assert y.untyped_storage().nbytes() == M * 336 * 2
            torch.testing.assert_close(y, reference.forward(x, w, m_sizes), rtol=2e-2, atol=5e-1)
            read = gpu.launches[-1].words
            assert (read["N"], read["K"], read["M"], read["stride_y_m"]) == (336, K, M, 336)
            assert (read["stride_w_e"], read["stride_w_row"]) == (N * K, K)
            assert (read["w"].sizes, read["w"].strides) == ((E, N, K), (2 * N * K, 2 * K))
        assert len(gpu.loads) == 1
        assert len(gpu.launches) == 3
        assert steps.resolve_wide(Rows(Op.FORWARD, x, w[:, :328].contiguous(), m_sizes, Layout.NK, M)) is None
        shifted = torch.randn(M * K + 1).bfloat16()[1:].view(M, K)  # no 16 bytes
        assert steps.resolve_wide(Rows(Op.FORWARD, shifted, w, m_sizes, Layout.NK, M)) is None
