"""grouped_gemm on a real GPU. PRETUNED_BUNDLES names a bundle of bf16, fp16, fp32 and tf32 for E=8 H=768 I=512."""

from __future__ import annotations

import os
import threading
from importlib.resources import files

import pytest
import torch

from pretuned.artifacts.errors import InputError
from pretuned.artifacts.records import Op
from pretuned.kernels import reference
from pretuned.runtime import explain, grouped_gemm, preload, reload
from pretuned.runtime.dispatch import snapshot as dispatch_snapshot
from pretuned.runtime.launch.loader import loaded_count

pytestmark = [
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA GPU"),
    pytest.mark.skipif(
        not os.environ.get("PRETUNED_BUNDLES"), reason="needs PRETUNED_BUNDLES to name bundles for this GPU"
    ),
]

E, N, K = 8, 1024, 768
RAGGED = (0, 5, 130, 1, 0, 64, 17, 300)


def inputs(
    dtype: torch.dtype = torch.bfloat16, sizes: tuple[int, ...] = RAGGED, M: int | None = None, n: int = N, k: int = K
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(1)
    rows = sum(max(0, size) for size in sizes) if M is None else M
    x = torch.randn(rows, k, device="cuda", generator=generator).to(dtype)
    w = torch.randn(len(sizes), n, k, device="cuda", generator=generator).to(dtype) / k**0.5
    return x, w, torch.tensor(sizes, dtype=torch.int32, device="cuda")


def assert_right(y: torch.Tensor, x: torch.Tensor, w: torch.Tensor, m_sizes: torch.Tensor, most: float = 1e-2) -> None:
    wanted = reference.forward(x.double(), w.double(), m_sizes)
    rows = reference.expert_bounds(m_sizes, x.shape[0])[-1][1]
    error = (y[:rows].double() - wanted[:rows]).norm() / wanted[:rows].norm()
    assert error < most


@pytest.mark.parametrize(("dtype", "most"), [(torch.bfloat16, 1e-2), (torch.float16, 2e-3), (torch.float32, 1e-5)])
def test_every_dtype(dtype: torch.dtype, most: float) -> None:
    x, w, m_sizes = inputs(dtype)
    assert explain(x, w, m_sizes).chosen is not None
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes, most)
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes, most)


@pytest.mark.skipif(torch.cuda.is_available() and torch.cuda.get_device_capability() < (9, 0), reason="needs TMA")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("n", [1, 333, 666, 1021])
@pytest.mark.parametrize("sizes", [RAGGED, (0, 0, 0, 0, 0, 0, 0, 1), (900, 0, 0, 1, 0, 0, 700, 3)])
def test_rows_of_y_that_are_no_whole_16_bytes(dtype: torch.dtype, n: int, sizes: tuple[int, ...]) -> None:
    """Aligned code runs: nothing is read past w, and nothing comes of the next expert's rows."""
    x, w, m_sizes = inputs(dtype, sizes, n=n)
    w = torch.cat([w, torch.full_like(w[:1], float("nan"))])[:-1]  # what lies past the last expert
    explanation = explain(x, w, m_sizes)
    for _ in range(3):
        y = grouped_gemm(x, w, m_sizes)
        assert y.stride() == (-(-n // 8) * 8, 1)
        assert_right(y, x, w, m_sizes)
    assert "each row of y is filled up" in explanation.reason
    wide = w.new_full((len(sizes), n, K), float("nan"))
    wide[3] = w[3]
    start = sum(sizes[:3])
    rows = slice(start, start + sizes[3])
    torch.testing.assert_close(grouped_gemm(x, wide, m_sizes)[rows], y[rows], rtol=0, atol=0)  # NaN stays in its expert


def test_tf32_only_where_torch_allows_it() -> None:
    x, w, m_sizes = inputs(torch.float32)
    ieee = grouped_gemm(x, w, m_sizes)
    torch.backends.cuda.matmul.allow_tf32 = True
    try:
        assert "tf32" in str(explain(x, w, m_sizes))
        fast = grouped_gemm(x, w, m_sizes)
    finally:
        torch.backends.cuda.matmul.allow_tf32 = False
    assert_right(fast, x, w, m_sizes, 5e-3)
    assert not torch.equal(ieee, fast)
    assert torch.equal(grouped_gemm(x, w, m_sizes), ieee)


def test_second_call_takes_the_short_way() -> None:
    x, w, m_sizes = inputs()
    reload()
    first = grouped_gemm(x, w, m_sizes)
    assert len(dispatch_snapshot.snapshot().plans) == 1
    assert torch.equal(grouped_gemm(x, w, m_sizes), first)
    assert len(dispatch_snapshot.snapshot().plans) == 1


def test_a_repeated_call_is_known_by_its_tensors() -> None:
    x, w, m_sizes = inputs()
    reload()
    wanted = [grouped_gemm(x, w, m_sizes) for _ in range(4)]
    assert len(dispatch_snapshot.snapshot().plans) == 1
    assert all(torch.equal(y, wanted[0]) for y in wanted)
    assert len({y.data_ptr() for y in wanted}) == 4
    m_sizes.copy_(m_sizes.flip(0))
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)
    for _ in range(3):
        assert_right(grouped_gemm(x, w, m_sizes.long()), x, w, m_sizes)
        assert torch.equal(grouped_gemm(x[:512], w, m_sizes)[:500], grouped_gemm(x, w, m_sizes)[:500])
        half = x[:, : K // 2], w[:, :, : K // 2]  # the same addresses
        assert_right(grouped_gemm(*half, m_sizes), *half, m_sizes)
        fewer = w[:, : N // 2]
        assert grouped_gemm(x, fewer, m_sizes).shape == (x.shape[0], N // 2)
        assert_right(grouped_gemm(x, fewer, m_sizes), x, fewer, m_sizes)
        with torch.inference_mode():
            assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)
        with torch.no_grad():
            assert_right(grouped_gemm(x, torch.nn.Parameter(w), m_sizes), x, w, m_sizes)
        assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)


def test_int64_and_negative_counts_and_rows_past_the_sum() -> None:
    sizes = (0, 5, -3, 1, 0, 64, -1, 3)
    x, w, m_sizes = inputs(sizes=sizes, M=100)
    out = torch.full((100, N), 3.0, dtype=x.dtype, device="cuda")
    assert grouped_gemm(x, w, m_sizes, out=out) is out
    assert_right(out, x, w, m_sizes)
    assert (out[73:] == 3).all()
    assert torch.equal(grouped_gemm(x, w, m_sizes.long(), out=torch.full_like(out, 3.0)), out)
    zeroed = grouped_gemm(x, w, m_sizes, zero_tail=True)
    assert (zeroed[73:] == 0).all()
    assert torch.equal(zeroed[:73], out[:73])


def test_counts_past_M_are_cut() -> None:
    x, w, m_sizes = inputs(sizes=(10, 1000, 2_000_000_000, 2_000_000_000), M=50)
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)


@pytest.mark.parametrize(("n", "k"), [(777, 513), (1, 1), (1024, 770), (1026, 768)])
def test_any_size_runs(n: int, k: int) -> None:
    x, w, m_sizes = inputs(n=n, k=k)
    explained = explain(x, w, m_sizes)
    assert explained.aligned == (k % 8 == 0)  # rows of y are filled up
    assert explained.chosen is not None
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes, 2e-2)


def test_strides_of_x_w_and_out() -> None:
    x, w, m_sizes = inputs()
    wanted = grouped_gemm(x, w, m_sizes)
    padded = torch.empty(x.shape[0], K + 64, dtype=x.dtype, device="cuda")
    padded[:, :K] = x
    assert torch.equal(grouped_gemm(padded[:, :K], w, m_sizes), wanted)
    odd = torch.empty(x.shape[0], K + 3, dtype=x.dtype, device="cuda")
    odd[:, 3:] = x
    assert_right(grouped_gemm(odd[:, 3:], w, m_sizes), x, w, m_sizes)
    assert torch.equal(grouped_gemm(x.t().contiguous().t(), w, m_sizes), wanted)
    strided = torch.empty(E, N + 8, K + 16, dtype=x.dtype, device="cuda")[:, :N, :K].copy_(w)
    assert torch.equal(grouped_gemm(x, strided, m_sizes), wanted)
    assert torch.equal(grouped_gemm(x, w.view(E * N, K), m_sizes), wanted)
    out = torch.zeros(x.shape[0], N + 24, dtype=x.dtype, device="cuda")
    grouped_gemm(x, w, m_sizes, out=out[:, 8 : 8 + N])
    assert torch.equal(out[:, 8 : 8 + N], wanted)
    assert not out[:, :8].any()
    assert not out[:, 8 + N :].any()
    shared = w[:1].expand(E, N, K)
    assert_right(grouped_gemm(x, shared, m_sizes), x, shared, m_sizes)
    one_row = x[:1].expand(x.shape[0], K)
    assert_right(grouped_gemm(one_row, w, m_sizes), one_row, w, m_sizes)


def test_out_of_every_kind_again_and_again() -> None:
    x, w, m_sizes = inputs()
    wanted = grouped_gemm(x, w, m_sizes)
    rows = x.shape[0]
    for _ in range(3):
        for offset, width in ((0, N), (0, N + 8), (8, N + 8), (3, N + 3), (0, N + 1)):
            held = torch.full((rows, width), 3.0, dtype=x.dtype, device="cuda")
            out = held[:, offset : offset + N]
            assert grouped_gemm(x, w, m_sizes, out=out) is out
            torch.testing.assert_close(out, wanted, rtol=2e-2, atol=2e-2)
            assert (held[:, :offset] == 3).all()
            assert (held[:, offset + N :] == 3).all()
        with pytest.raises(InputError, match="out is of shape"):
            grouped_gemm(x, w, m_sizes, out=wanted[1:])
        with pytest.raises(InputError, match=r"out is torch\.float32"):
            grouped_gemm(x, w, m_sizes, out=wanted.float())
        single = torch.zeros(1, N, dtype=x.dtype, device="cuda")
        grouped_gemm(x[:1], w, m_sizes, out=single)
        torch.testing.assert_close(single, wanted[:1], rtol=2e-2, atol=2e-2)


def test_one_row_of_any_stride() -> None:
    x, w, _ = inputs()
    m_sizes = torch.tensor([0, 0, 0, 1, 0, 0, 0, 0], device="cuda")
    wanted = grouped_gemm(x[:1].clone(), w, m_sizes)
    assert torch.equal(grouped_gemm(x[0].as_strided((1, K), (1, 1)), w, m_sizes), wanted)


def test_no_rows_and_no_experts_launch_nothing() -> None:
    x, w, m_sizes = inputs()
    assert grouped_gemm(x[:0], w, m_sizes).shape == (0, N)
    assert grouped_gemm(x, w[:0], m_sizes[:0]).shape == (x.shape[0], N)
    assert not grouped_gemm(x[:, :0], w[:, :, :0], m_sizes).any()


def test_kn_layout_runs_somewhere() -> None:
    x, w, m_sizes = inputs()
    kn = w.transpose(1, 2).contiguous()
    assert_right(grouped_gemm(x, kn, m_sizes, w_layout="kn"), x, w, m_sizes)
    assert_right(grouped_gemm(x, w.transpose(1, 2).contiguous().view(-1, N), m_sizes, w_layout="kn"), x, w, m_sizes)


@pytest.mark.parametrize("rows", [1, 40, 3000])
def test_weights_that_lie_the_other_way_run_what_ships(rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bundles that ship were built for w [E, N, K] alone: dX's code runs the forward of [E, K, N], and it dX's."""
    major, minor = torch.cuda.get_device_capability()
    path = files("pretuned.artifacts") / "bundles" / f"catalogue-sm{major}{minor}.msgpack"
    if not path.is_file():
        pytest.skip(f"none ships for {major}.{minor}")
    monkeypatch.setenv("PRETUNED_BUNDLES", str(path))
    reload()
    try:
        x, w, m_sizes = inputs(sizes=(0, rows, 0, rows // 2, 3, 0, 0, 1))
        kn = w.transpose(1, 2).contiguous()
        explanation = explain(x, kn, m_sizes, w_layout="kn")
        assert explanation.chosen is not None
        assert explanation.chosen.variant.op is Op.DX
        leaves = x.clone().requires_grad_(), kn.clone().requires_grad_()
        y = grouped_gemm(*leaves, m_sizes, w_layout="kn")
        assert_right(y.detach(), x, w, m_sizes)
        dy = torch.randn_like(y)
        y.backward(dy)
        dx, dw = (leaf.grad for leaf in leaves)
        assert dx is not None
        assert dw is not None
        assert_right(dx, dy, kn, m_sizes)
        for g, (start, end) in enumerate(reference.expert_bounds(m_sizes, len(x))):
            wanted = x[start:end].double().T @ dy[start:end].double()
            assert (dw[g].double() - wanted).norm() <= 1e-2 * wanted.norm()
    finally:
        monkeypatch.undo()
        reload()


def test_more_experts_than_a_kernel_keeps_in_registers() -> None:
    x, w, m_sizes = inputs(sizes=(1,) * 5000, n=16, k=16)
    assert explain(x, w, m_sizes).chosen is not None
    assert_right(grouped_gemm(x, w, m_sizes), x, w, m_sizes)


def test_a_gradient_asked_for_later_is_not_lost() -> None:
    x, w, m_sizes = inputs()
    for _ in range(3):  # the short ways
        grouped_gemm(x, w, m_sizes)
    w.requires_grad_()
    y = grouped_gemm(x, w, m_sizes)
    assert y.requires_grad
    y.sum().backward()
    assert w.grad is not None
    with torch.no_grad():
        for _ in range(3):
            y = grouped_gemm(x, w, m_sizes)
            assert not y.requires_grad
            assert_right(y, x, w, m_sizes)
    assert grouped_gemm(x, w, m_sizes).requires_grad


def test_capture_and_replay_with_other_counts() -> None:
    x, w, m_sizes = inputs()
    reload()
    y = torch.zeros(x.shape[0], N, dtype=x.dtype, device="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        grouped_gemm(x, w, m_sizes, out=y)
    m_sizes.copy_(torch.tensor([100, 0, 0, 7, 200, 0, 1, 3], dtype=torch.int32))
    graph.replay()
    assert_right(y, x, w, m_sizes)


def test_streams_and_threads() -> None:
    x, w, m_sizes = inputs()
    wanted = grouped_gemm(x, w, m_sizes)
    results: list[torch.Tensor] = []

    def work() -> None:
        with torch.cuda.stream(torch.cuda.Stream()):
            for _ in range(50):
                y = grouped_gemm(x, w, m_sizes)
            torch.cuda.current_stream().synchronize()
            results.append(y)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(results) == 8
    assert all(torch.equal(y, wanted) for y in results)


def test_after_preload_nothing_is_loaded() -> None:
    reload()
    done = preload()
    assert done.count > 0
    count = loaded_count()
    for rows in (1, 3, 40, 700, 5000):
        for n, k in ((1024, 768), (768, 512)):
            x, w, m_sizes = inputs(sizes=(rows, 0, 0, 0, 0, 0, 0, 0), n=n, k=k)
            grouped_gemm(x, w, m_sizes)
    assert loaded_count() == count
    assert preload(problems=[]).count == 0
