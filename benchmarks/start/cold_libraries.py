"""The libraries that ``cold_start`` times, each in steps: import, prepare, compile and call.

Each library multiplies with the calls that an engine would use, and compiles its own kernels. Its inputs are ready
beforehand: rows sorted by expert, and the library's form of the routing, unless a kernel of its own makes this form.
"""

from __future__ import annotations

import importlib
from abc import ABC, abstractmethod
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ..peers.products import Call, Cell, Product

BLOCK = [128, 128]


class Library(ABC):
    """One library in one weight format."""

    name: str
    title: str  # the name in tables and pictures
    format: str
    model: str
    needs: tuple[str, ...] = ()  # "vllm": its wheel, unpacked; else packages that must be importable

    def __init__(self, place: Path | None) -> None:
        self.place = place

    def set_up(self) -> None:  # noqa: B027 - some need nothing
        """Import what this benchmark itself needs. Not timed."""

    def load(self) -> None:  # noqa: B027 - torch is loaded
        """Import the library. Timed."""

    def prepare(self, product: Product) -> Any:
        """Put the weights into the layout that the library reads. Timed by itself: a server does it during loading."""
        return product.operands

    @abstractmethod
    def arrange(self, weights: Any, cell: Cell) -> Call:
        """A call whose inputs are ready. Not timed, so it runs no kernel of the library."""

    def compile(self, weights: list[Any], cells: list[list[Cell]]) -> None:  # noqa: B027
        """Compile all kernels that the calls need, if the library can do so beforehand. Timed. Default: do nothing."""


class Pretuned(Library):
    """pretuned by its public call."""

    title = "pretuned"

    def load(self) -> None:
        from pretuned import ExpertWeights, grouped_gemm

        self.multiply, self.weights = grouped_gemm, ExpertWeights

    def prepare(self, product: Product) -> Any:
        if product.format == "bf16":
            return product.operands[0]
        return getattr(self.weights, product.format)(*product.operands).prepare()

    def arrange(self, weights: Any, cell: Cell) -> Call:
        return partial(self.multiply, cell.x, weights, cell.m_sizes)


class TorchGroupedMm(Library):
    """torch's grouped_mm."""

    name, title, format, model = "torch", "torch grouped_mm", "bf16", "qwen3-30b"

    def arrange(self, weights: Any, cell: Cell) -> Call:
        w, ends = weights[0].transpose(-2, -1), cell.m_sizes.cumsum(0).int()
        return lambda: torch._grouped_mm(cell.x, w, offs=ends)


class VllmTriton(Library):
    """vLLM's fused_moe kernel by its heuristic. vLLM itself is not imported; in fp8, x is quantised beforehand."""

    title, needs = "vLLM fused_moe (Triton)", ("vllm",)

    def set_up(self) -> None:
        from benchmarks.peers import vllm_kernels

        self.kernels = vllm_kernels

    def load(self) -> None:
        assert self.place is not None
        self.theirs = self.kernels.FusedMoe(self.place)

    def arrange(self, weights: Any, cell: Cell) -> Call:
        quantised = cell.product.format == "fp8_block"
        sizes = cell.T, cell.E, cell.product.width, cell.K, cell.product.top_k
        names = self.theirs.fused_moe
        config = names["get_default_config"](*sizes, *(("fp8_w8a8", BLOCK) if quantised else (None,)))
        rows = self.kernels.assignment(cell.m_sizes, cell.M, config["BLOCK_SIZE_M"])
        (x, x_scale), (w, *scale) = cell.quantised if quantised else (cell.x, None), weights
        named = {"use_fp8_w8a8": quantised, "block_shape": BLOCK} if quantised else {"use_fp8_w8a8": False}

        def call() -> torch.Tensor:
            y = torch.empty(cell.M, 1, cell.N, device=cell.x.device, dtype=torch.bfloat16)
            names["invoke_fused_moe_triton_kernel"](
                x,
                w,
                y,
                x_scale,
                *(scale or [None]),
                None,
                *rows,
                False,
                1,
                config,
                compute_type=self.theirs.bf16,
                use_int8_w8a8=False,
                use_int8_w8a16=False,
                use_int4_w4a16=False,
                per_channel_quant=False,
                **named,
            )
            return y.view(cell.M, cell.N)

        return call


class TritonKernels(Library):
    """matmul_ogs with the routing's metadata, which its own kernels compute, as in each step of a server."""

    name, title, format, model = "triton_kernels", "triton_kernels", "mxfp4", "gpt-oss-20b"
    needs = ("vllm",)

    def set_up(self) -> None:
        from ..peers import w4a16

        self.peers = w4a16

    def load(self) -> None:
        for name in ("matmul_ogs", "tensor", "numerics", "tensor_details.layout"):
            importlib.import_module(f"triton_kernels.{name}")

    def prepare(self, product: Product) -> Any:
        assert self.place is not None
        return self.peers.triton_kernels(self.place, product, [])

    def arrange(self, weights: Any, cell: Cell) -> Call:
        return lambda: next(iter(weights(cell).values()))()  # with the metadata


class Marlin(Library):
    """vLLM's Marlin. Its code is PTX, which the driver compiles when the library is first used."""

    name, title, format, model = "marlin", "Marlin (vLLM)", "mxfp4", "gpt-oss-20b"
    needs = ("vllm",)

    def set_up(self) -> None:
        from ..peers import w4a16

        self.peers = w4a16

    def load(self) -> None:
        assert self.place is not None
        self.peers.Marlin(self.place)

    def prepare(self, product: Product) -> Any:
        assert self.place is not None
        return self.peers.marlin(self.place, product, [])

    def arrange(self, weights: Any, cell: Cell) -> Call:
        (call,) = weights(cell).values()
        gemm: Call = call
        return gemm


class DeepGemm(Library):
    """DeepGEMM's contiguous form, every expert's rows padded to 128, x quantised beforehand."""

    name, title, format, model = "deepgemm", "DeepGEMM", "fp8_block", "qwen3-30b"
    needs = ("vllm",)

    def set_up(self) -> None:
        from ..peers import w8a8

        self.peers = w8a8

    def load(self) -> None:
        self.deep_gemm = importlib.import_module("deep_gemm")

    def arrange(self, weights: Any, cell: Cell) -> Call:
        x, x_scale, y, experts, at = self.peers.contiguous(cell)
        gemm = self.deep_gemm

        def call() -> torch.Tensor:
            scale = gemm.get_mn_major_tma_aligned_tensor(x_scale)  # launches a kernel
            gemm.m_grouped_fp8_gemm_nt_contiguous((x, scale), weights, y, experts, disable_ue8m0_cast=True)
            return y[at]

        return call


class Humming(Library):
    """Humming by its heuristic, x in bf16. It compiles its kernels in threads, all at once, as its layer does."""

    title, needs = "Humming", ("humming",)

    def set_up(self) -> None:
        from ..peers import w4a16

        self.peers = w4a16

    def load(self) -> None:
        for name in ("ops", "config", "kernel.humming", "schema", "transform", "tune"):
            importlib.import_module(f"humming.{name}")

    def prepare(self, product: Product) -> Any:
        theirs = self.peers.Humming(product)
        theirs.prepare()
        return theirs

    def arrange(self, weights: Any, cell: Cell) -> Call:
        gemm: Call = weights.call(cell)
        return gemm

    def compile(self, weights: list[Any], cells: list[list[Cell]]) -> None:
        for theirs, own in zip(weights, cells, strict=True):
            theirs.kernels([cell.M for cell in own])


def _of(kind: type[Library], name: str, format: str, model: str) -> type[Library]:
    """A library for a format, by a class that supports several formats."""
    return type(f"{kind.__name__}_{format}", (kind,), {"name": name, "format": format, "model": model})


LIBRARIES: dict[str, type[Library]] = {  # in the order of their turns: what may take long comes last
    library.name: library
    for library in (
        _of(Pretuned, "pretuned_bf16", "bf16", "qwen3-30b"),
        _of(Pretuned, "pretuned_fp8", "fp8_block", "qwen3-30b"),
        _of(Pretuned, "pretuned_mxfp4", "mxfp4", "gpt-oss-20b"),
        TorchGroupedMm,
        _of(VllmTriton, "vllm_bf16", "bf16", "qwen3-30b"),
        _of(VllmTriton, "vllm_fp8", "fp8_block", "qwen3-30b"),
        TritonKernels,
        DeepGemm,
        _of(Humming, "humming_mxfp4", "mxfp4", "gpt-oss-20b"),
        Marlin,
        _of(Humming, "humming_fp8", "fp8_block", "qwen3-30b"),
    )
}
