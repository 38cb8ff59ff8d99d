"""One product of quantised weights: operands for our kernels and for other libraries, and the error of a result.

Importing this imports nothing of pretuned: ``cold_start`` times that import.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, TypeAlias

import torch

if TYPE_CHECKING:
    from pretuned.runtime import ExpertWeights

Call: TypeAlias = Callable[[], torch.Tensor]
INT4 = ("int4_g32", "int4_g128")
INT4_ZERO = "int4_g128_zp"  # with zero points
OF_CODES = ("fp8_block", "fp8_channel")  # formats whose products quantise x, too
MODELS = {  # E, H, I, top_k
    "mxfp4": {"gpt-oss-20b": (32, 2880, 2880, 4), "gpt-oss-120b": (128, 2880, 2880, 4)},
    "fp8_block": {
        "qwen3-30b": (128, 2048, 768, 8),
        "qwen3-235b": (128, 4096, 1536, 8),
        "deepseek-v3": (256, 7168, 2048, 8),
    },
    "mxfp8": {"minimax-m3-ep8": (16, 6144, 3072, 4), "minimax-m3-tp8": (128, 6144, 384, 4)},
    "fp8_channel": {
        "qwen3-30b": (128, 2048, 768, 8),
        "qwen3-235b": (128, 4096, 1536, 8),
        "mixtral-8x7b": (8, 4096, 14336, 2),
        "llama-4-maverick-ep4": (32, 5120, 8192, 1),
    },
    "int4_g32": {"kimi-k2": (384, 7168, 2048, 8)},
    "int4_g128": {"qwen3-30b": (128, 2048, 768, 8), "mixtral-8x7b": (8, 4096, 14336, 2)},
}
MODELS[INT4_ZERO] = MODELS["int4_g128"]

FLAGSHIPS = {  # measured on request; for ep=8 one rank's experts, with the rows that T tokens a rank give it
    "mxfp4": {
        "v4-flash": (256, 4096, 2048, 6),
        "v4-pro-ep8": (48, 7168, 3072, 6),
        "kimi-k3-ep8": (112, 3584, 3072, 16),
    },
    "fp8_block": {"glm-5.3-flash": (288, 4096, 2048, 8)},
}


def models_of(format: str) -> dict[str, tuple[int, int, int, int]]:
    """All models of a format; those of ``FLAGSHIPS`` come last."""
    return MODELS[format] | FLAGSHIPS.get(format, {})


@dataclass(frozen=True)
class Product:
    """w [E, N, K] of a model's layer: codes and scales in a checkpoint's layout, drawn at first use."""

    format: str
    model: str
    gemm: str
    E: int
    N: int
    K: int
    width: int
    top_k: int
    device: str = "cuda"

    @property
    def group(self) -> int:
        """The number of elements of K that share a scale."""
        return {"mxfp4": 32, "mxfp8": 32, "int4_g32": 32, "fp8_channel": self.K}.get(self.format, 128)

    @cached_property
    def operands(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Codes and scales of w."""
        g, (E, N, K) = torch.Generator(self.device).manual_seed(1), (self.E, self.N, self.K)

        def drawn(low: int, high: int, *shape: int) -> torch.Tensor:
            return torch.randint(low, high, shape, dtype=torch.uint8, device=self.device, generator=g)

        if self.format in (*OF_CODES, "mxfp8"):
            codes = torch.empty(E, N, K, dtype=torch.float8_e4m3fn, device=self.device)
            for matrix in codes:
                matrix.copy_((torch.randn(N, K, generator=g, device=self.device) * 100).clamp(-448, 448))
            if self.format == "mxfp8":
                return codes, drawn(112, 116, E, N, K // self.group)
            blocks = (E, -(-N // 128), -(-K // 128)) if self.format == "fp8_block" else (E, N)
            return codes, (torch.rand(blocks, generator=g, device=self.device) + 0.5) * 5e-4
        codes, groups = drawn(0, 256, E, N, K // 2), (E, N, K // self.group)
        if self.format == "mxfp4":
            return codes, drawn(119, 124, *groups)
        return codes, ((torch.rand(groups, generator=g, device=self.device) + 0.5) * 1e-2).bfloat16()

    @cached_property
    def zero(self) -> torch.Tensor | None:
        """Zero points, uint8 in the scales' shape; None for a format without them."""
        if self.format != INT4_ZERO:
            return None
        g = torch.Generator(self.device).manual_seed(3)
        shape = (self.E, self.N, self.K // self.group)
        return torch.randint(0, 16, shape, dtype=torch.uint8, device=self.device, generator=g)

    @cached_property
    def weights(self) -> ExpertWeights:
        """The weights as pretuned's prepared ``ExpertWeights``."""
        from pretuned.runtime import ExpertWeights

        codes, scale = (tensor.clone() for tensor in self.operands)
        if self.format in (*INT4, INT4_ZERO):
            return ExpertWeights.int4(codes, scale, None if self.zero is None else self.zero.clone()).prepare()
        return getattr(ExpertWeights, self.format)(codes, scale).prepare()  # type: ignore[no-any-return]


def products(formats: list[str], models: list[str] | None = None) -> Iterator[Product]:
    """Both products of each model, one after another: a caller that drops a product frees its memory."""
    for format in formats:
        for model, (E, H, width, top_k) in models_of(format).items():
            if model in (MODELS[format] if models is None else models):
                yield Product(format, model, "gate_up", E, 2 * width, H, width, top_k)
                yield Product(format, model, "down", E, H, width, width, top_k)


class Cell:
    """A product of T tokens: x, and each sorted row's expert.

    ``m_sizes`` [E] are each expert's rows; default: the rows of pretuned's measurements.
    """

    def __init__(self, product: Product, T: int, m_sizes: torch.Tensor | None = None) -> None:
        self.product, self.T, self.M = product, T, T * product.top_k
        self.E, self.N, self.K, self.device = product.E, product.N, product.K, product.device
        if m_sizes is None:
            from pretuned.aot.measure.inputs import routed_rows

            m_sizes = routed_rows(self.E, product.top_k, T)
        self.m_sizes = m_sizes.to(self.device)
        g = torch.Generator(self.device).manual_seed(2)
        self.x = torch.randn(self.M, self.K, device=self.device, generator=g).bfloat16()
        n = self.m_sizes.long()
        self.first = n.cumsum(0) - n
        self.owner = torch.repeat_interleave(torch.arange(self.E, device=self.device), n)

    @cached_property
    def quantised(self) -> tuple[torch.Tensor, torch.Tensor]:
        """x in e4m3 and its scales [M, K / 128], or [M, 1]."""
        parts = self.x.float().view(self.M, -1, self.product.group)
        scale = parts.abs().amax(-1).clamp(1e-4) / 448
        return (parts / scale[..., None]).to(torch.float8_e4m3fn).view(self.M, self.K), scale

    def slots(self, block: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Rows padded to whole blocks an expert (M stands for none), each block's expert, and the rows in all."""
        blocks = (self.m_sizes.long() + block - 1) // block
        total = int(blocks.sum()) * block
        slots = torch.full((max(total, block),), self.M, dtype=torch.int32, device=self.device)
        rows = torch.arange(self.M, device=self.device)
        slots[((blocks.cumsum(0) - blocks) * block - self.first)[self.owner] + rows] = rows.int()
        experts = torch.repeat_interleave(torch.arange(self.E, device=self.device), blocks).int()
        return slots, experts, torch.tensor([total], dtype=torch.int32, device=self.device)

    def error(self, y: torch.Tensor, *, of_codes: bool) -> float:
        """The relative error of three experts' rows, against fp32 of the dequantised weights and of x or x's codes."""
        off = total = 0.0
        there = (self.m_sizes > 0).nonzero()[:, 0]
        for e in {int(self.m_sizes.argmax()), int(there[0]), int(there[-1])}:
            rows = slice(int(self.first[e]), int(self.first[e]) + min(int(self.m_sizes[e]), 64))
            x = self.x[rows].float()
            if of_codes:
                parts = self.quantised[0][rows].float().view(len(x), -1, self.product.group)
                x = (parts * self.quantised[1][rows, :, None]).view_as(x)
            wanted = x @ self.product.weights.dequantize(torch.float32, e).T
            off += float((y[rows].float() - wanted).square().sum())
            total += float(wanted.square().sum())
        return (off / total) ** 0.5
