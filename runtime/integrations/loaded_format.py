"""Describes how an engine's parameters store quantised weights, and makes ExpertWeights from them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from ..artifacts.errors import InputError
from ..artifacts.records import PRECISIONS, DType, Scale, dtypes_of
from ..runtime.api.expert_weights import ExpertWeights
from ..runtime.weights.codes import unpack
from ..runtime.weights.packings import awq_experts, gptq_experts, packed_experts

GROUPS = (32, 64, 128)  # supported group sizes of int4
STATIC_X = "the checkpoint's static scales of x are not used: a call makes scales of its own where it quantises x"
A4 = "x is not quantised to fp4"


@dataclass(frozen=True)
class LoadedFormat:
    """The format of one product's parameters in an engine's layer.

    Attributes
    ----------
    name
        One of ``PRECISIONS``.
    ends
        The ends of the parameters' names: of codes, scales and, where the format has them, zero points or global
        scales.
    packing
        ``""``: rows of codes, as ``ExpertWeights`` has them, and zero points as compressed-tensors packs them, eight in
        a word along N. ``bytes``: rows of codes, and zero points two in a byte along N. ``gptq`` and ``awq``: K before
        N; GPTQ packs codes along K, AWQ along N, and both pack zero points along N.
    divides
        Whether the global scale divides, as compressed-tensors' does.
    less_one, by_word
        How GPTQ's zero points are stored: as in ``packings.gptq``.
    note
        How results differ from the engine's, for the log.
    """

    name: str
    ends: tuple[str, ...]
    packing: str = ""
    divides: bool = False
    less_one: bool = True
    by_word: bool = False
    note: str = ""

    @property
    def dtype(self) -> DType | None:
        """The weights' dtype; None if no kernel reads them."""
        return next(iter(dtypes_of(self.name)), None)

    @property
    def scale(self) -> Scale:
        """The part of w that one scale covers."""
        scale = PRECISIONS[self.name].w.scale
        if scale is None:
            raise AssertionError(f"{self.name} has no scale")
        return scale

    @property
    def has_zeros(self) -> bool:
        """True if each group has a zero point."""
        return bool(self.scale.zero_bits)

    @property
    def K_first(self) -> bool:
        """True if the parameters have K before N."""
        return self.packing in ("gptq", "awq")

    @property
    def derived(self) -> tuple[str, ...]:
        """The name ends of parameters that ``weights`` copies: zero points, and scales of whole matrices."""
        return self.ends[1:] if self.name == "fp8_channel" else self.ends[2:]

    def weights(self, *tensors: torch.Tensor) -> ExpertWeights:
        """The weights of one product, from its parameters in the order of ``ends``. Those of ``derived`` are copied.

        Raises
        ------
        InputError
            if gate and up have different global scales, and for tensors that ``ExpertWeights`` refuses.
        """
        codes, scale, *more = tensors
        if self.name.startswith("int4"):
            return self._int4(codes, scale, *more)
        if self.name == "mxfp4":
            return ExpertWeights.mxfp4(codes, scale)
        if self.name == "mxfp8":
            return ExpertWeights.mxfp8(codes, scale)
        if self.name == "nvfp4":
            outer = _one_each(more[0])
            return ExpertWeights.nvfp4(codes, scale, 1 / outer if self.divides else outer)
        if self.name == "fp8_channel":
            return ExpertWeights.fp8_channel(codes, scale_of_rows(scale, codes.shape[1]))
        return ExpertWeights.fp8_block(codes, scale)

    def _int4(self, codes: torch.Tensor, scale: torch.Tensor, *zero: torch.Tensor) -> ExpertWeights:
        group = self.scale.columns
        if self.packing == "gptq":
            zero = zero if self.has_zeros else ()
            read = partial(gptq_experts, group=group, less_one=self.less_one, by_word=self.by_word)
            return ExpertWeights.int4(*read(codes, scale, *zero))
        if self.packing == "awq":
            return ExpertWeights.int4(*awq_experts(codes, scale, *zero, group=group))
        if self.packing == "bytes" and zero:
            return ExpertWeights.int4(codes, scale, unpack(zero[0].mT).mT.contiguous())
        if zero:
            return ExpertWeights.int4(*packed_experts(codes, scale, *zero, group=group))
        return ExpertWeights.int4(codes.view(torch.uint8), scale)

    def tensors_of(self, weights: ExpertWeights) -> dict[str, torch.Tensor]:
        """The tensors of weights, by the name ends of their parameters."""
        more = weights.zero if weights.global_scale is None else weights.global_scale
        tensors = (weights.codes, weights.scale, more)
        return {end: tensor for end, tensor in zip(self.ends, tensors, strict=False) if tensor is not None}


def scale_of_rows(scale: torch.Tensor, N: int) -> torch.Tensor:
    """Scales [E, N], one for each row: given so, or repeated from one scale for each matrix, or for gate and for up."""
    each = scale.flatten(1) if scale.dim() > 1 else scale[:, None]
    return each.repeat_interleave(N // each.shape[1], 1) if each.shape[1] < N else each


def _one_each(scale: torch.Tensor) -> torch.Tensor:
    """The global scale [E] of each expert. InputError if gate and up have different scales."""
    each = scale.flatten(1) if scale.dim() > 1 else scale[:, None]
    if not each.is_meta and bool((each != each[:, :1]).any()):
        e = int((each != each[:, :1]).any(1).nonzero()[0])
        raise InputError(
            f"pretuned: gate and up of expert {e} have the global scales {each[e].tolist()}, wanted one for both: "
            "quantise the model anew, with gate and up together"
        )
    return each[:, 0].float().contiguous()


def int4_name(bits: int, group: int, *, zeros: bool) -> tuple[str | None, str]:
    """(the format's name, ""), such as int4_g128; or (None, why pretuned does not support such weights)."""
    if bits != 4 or group not in GROUPS:
        return None, f"{bits} bits in groups of {group}: pretuned serves 4 in groups of 32, 64 or 128"
    return f"int4_g{group}{'_zp' if zeros else ''}", ""


def order_refusal(actorder: Any) -> str | None:
    """Why pretuned does not support compressed-tensors' ``actorder``; None if a group's columns are contiguous in K."""
    order = getattr(actorder, "value", actorder)
    if order in (None, False, "static", "weight"):
        return None
    return f"groups of another order (actorder {order}, weight_g_idx)"
