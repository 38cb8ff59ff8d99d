"""The quantised weights of a layer's experts as one thing: what ``grouped_gemm`` and ``moe_mlp`` take for w."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from ...artifacts.records.precision import PRECISIONS, DType, Precision, dtypes_of
from .given import as_bytes, bad, check_finite, check_flag, fit, flat, of_dtype, repeated, told

if TYPE_CHECKING:
    from .codes import Quantised
    from .order import CodeOrder

_SCALE_DTYPES = {"fp32": (torch.float32,), "e8m0": (torch.uint8,), "e4m3": (torch.float8_e4m3fn,),
                 "bf16": (torch.bfloat16, torch.float16, torch.float32)}  # fmt: skip
_GROUPS = (32, 64, 128)  # of int4


@dataclass(eq=False, repr=False)
class ExpertWeights:
    """w[e] = (codes[e] - zero[e]) * (scale[e] * global_scale[e]): E matrices [N, K], each multiplied as x @ w[e].T.

    Made by ``fp8_block``, ``fp8_channel``, ``mxfp4``, ``int4`` and ``nvfp4`` of tensors in these shapes, which are not
    copied and belong to it from then on; by ``from_tensors`` of tensors as a checkpoint names and packs them; or by
    ``quantize``. It is frozen: it has no gradient.

    Attributes
    ----------
    format
        A name of ``pretuned.artifacts.PRECISIONS``, which says what codes and scales are, and whether x is quantised.
    codes
        [E, N, K] float8_e4m3fn, or [E, N, K/2] uint8 with two codes a byte, the low four bits first.
    scale
        One for each block of the format: [E, ceil(N/128), ceil(K/128)], [E, N] or [E, N, ceil(K/group)].
    zero
        uint8 in scale's shape: what code stands for 0. None: 8 for int4; the others have none.
    global_scale
        [E] float32 of nvfp4, else None.
    order
        Which order codes and scales are in (``prepare``): 0 is the checkpoint's own.
    """

    format: str
    codes: torch.Tensor
    scale: torch.Tensor
    zero: torch.Tensor | None = None
    global_scale: torch.Tensor | None = None
    order: int = 0
    _derived: torch.Tensor | None = field(default=None, init=False)
    refused: bool = field(default=False, init=False)  # prepare() found scales that there is no order for

    @classmethod
    def fp8_block(cls, codes: torch.Tensor, scale: torch.Tensor, *, quantize_x: bool = True) -> ExpertWeights:
        """fp8 with a scale for each 128 x 128: ``weight`` and ``weight_scale_inv`` of DeepSeek-V3, stacked.

        codes [E, N, K] float8_e4m3fn, scale [E, ceil(N/128), ceil(K/128)] float32. With ``quantize_x`` x is quantised,
        too (w8a8): to e4m3, with a scale for each row and 128 of K.

        Raises
        ------
        InputError
            for a wrong shape, dtype, device or stride, or a scale that is NaN or infinite; the others likewise.
        """
        check_flag("quantize_x", quantize_x)
        return _checked(cls("fp8_block" if quantize_x else "fp8_block_a16", codes, scale))

    @classmethod
    def fp8_channel(cls, codes: torch.Tensor, scale: torch.Tensor, *, quantize_x: bool = True) -> ExpertWeights:
        """fp8 with a scale for each row of w: codes [E, N, K] float8_e4m3fn, scale [E, N] float32.

        With ``quantize_x`` x is quantised, too (w8a8): to e4m3, with a scale a row.
        """
        check_flag("quantize_x", quantize_x)
        return _checked(cls("fp8_channel" if quantize_x else "fp8_channel_a16", codes, scale))

    @classmethod
    def mxfp4(cls, codes: torch.Tensor, scale: torch.Tensor) -> ExpertWeights:
        """e2m1 in groups of 32: codes [E, N, K/2] or (gpt-oss) [E, N, K/32, 16] uint8, the low nibble first.

        scale [E, N, ceil(K/32)] uint8 (or float8_e8m0fnu): e8m0, 2**(scale - 127); 255 is NaN.
        """
        return _checked(cls("mxfp4", flat(codes), as_bytes(scale)))

    @classmethod
    def int4(cls, codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None = None) -> ExpertWeights:
        """w = (code - zero) * scale in groups of 32, 64 or 128 of K; zero is 8 where it is None.

        codes [E, N, K/2] uint8, the low nibble first; scale [E, N, ceil(K/group)] bfloat16, float16 or float32; zero
        uint8 in scale's shape. The group is told by the shapes.
        """
        return _checked(cls(_int4_format(codes, scale, zero), codes, scale, zero))

    @classmethod
    def nvfp4(cls, codes: torch.Tensor, scale: torch.Tensor, global_scale: torch.Tensor) -> ExpertWeights:
        """w = code * (scale * global_scale), e2m1 in groups of 16: codes [E, N, K/2] uint8, the low nibble first.

        scale [E, N, ceil(K/16)] float8_e4m3fn; global_scale [E] float32, which is multiplied (modelopt's
        ``weight_scale_2``; the inverse of compressed-tensors' ``weight_global_scale``). x stays in its type.
        """
        return _checked(cls("nvfp4", codes, scale, None, global_scale))

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, torch.Tensor], quantization_config: Mapping[str, Any], part: str | None = None,
        *, quantize_x: bool | None = None,
    ) -> ExpertWeights:  # fmt: skip
        """The weights of one product, of the tensors of one layer as a checkpoint names and packs them.

        Parameters
        ----------
        tensors
            By their names: ``...experts.0.gate_proj.weight_scale_inv`` and so on, each expert's own or all stacked, or
            the last word alone of stacked ones. Others of the layer are passed over. Copied where they are stacked or
            packed otherwise, expert by expert; gpt-oss's are used as they are.
        quantization_config
            Of the checkpoint's config.json (the whole of it will do), or its hf_quant_config.json: ``fp8``, ``mxfp4``,
            ``compressed-tensors``, ``gptq``, ``awq``, ``auto-round`` and ``modelopt``.
        part
            ``"gate_up"`` (the rows of gate, then those of up) or ``"down"``; needed where ``tensors`` has both.
        quantize_x
            Whether fp8 products quantise x. None: what the config says.

        Raises
        ------
        InputError
            for a format that is not among these, a tensor that is missing or does not fit, more than one layer.
        """
        from . import checkpoints  # here, as a process that is given codes and scales reads none

        if quantize_x is not None:
            check_flag("quantize_x", quantize_x, " or None")
        format, found = checkpoints.read(tensors, quantization_config, part, quantize_x)
        return _checked(cls(format if format != "int4" else _int4_format(*found[:3]), *found))

    @classmethod
    def quantize(cls, w: torch.Tensor, format: str) -> ExpertWeights:
        """w [E, N, K], floating point and finite, rounded to a format's nearest codes: for tests and first trials."""
        if not isinstance(w, torch.Tensor) or w.dim() != 3 or not w.is_floating_point() or not w.numel():
            raise bad("w", told(w), "[E, N, K] of a floating-point type, E, N and K of at least 1")
        if w.layout is torch.strided and repeated(w):
            raise bad("w", f"with strides {list(w.stride())}, which repeats elements", "memory for each of them")
        precision = _precision(format)
        if precision.w.bits == 4 and w.shape[2] % 2:
            raise bad("w", told(w), "an even K: two codes share a byte")
        if not torch.isfinite(w).all():
            raise bad("w", "NaN or infinite in places", "finite numbers")
        from .codes import cat, quantise  # here, as most processes have no quantised weights

        every = [quantise(format, one.detach()) for one in w]
        codes, scale = cat([one.codes[None] for one in every], 0), cat([one.scale[None] for one in every], 0)
        zeros = [one.zero[None] for one in every if one.zero is not None]
        outer = [one.global_scale[None] for one in every if one.global_scale is not None]
        return _checked(cls(format, codes, scale, cat(zeros, 0) if zeros else None, cat(outer, 0) if outer else None))

    @classmethod
    def from_state_dict(cls, format: str, state: Mapping[str, torch.Tensor]) -> ExpertWeights:
        """What ``state_dict`` gave, with ``format``."""
        given = dict(state)
        number = torch.as_tensor(given.pop("order", torch.zeros(())))
        if number.dtype is torch.bool or number.dim():
            raise bad("order", told(number), "a number, as state_dict has it")
        try:
            return _checked(cls(format, **given, order=int(number)))
        except TypeError:
            raise bad("the state", f"of {sorted(state)}", "codes, scale, order and, where the format has them, zero "
                       "and global_scale") from None  # fmt: skip

    @property
    def precision(self) -> Precision:
        """The format's row of ``PRECISIONS``."""
        return PRECISIONS[self.format]

    @property
    def shape(self) -> torch.Size:
        """[E, N, K]."""
        E, N, last = self.codes.shape
        return torch.Size((E, N, last * 8 // self.precision.w.bits))

    @property
    def requires_grad(self) -> bool:
        """It is frozen."""
        return False

    @property
    def device(self) -> torch.device:
        """Where all of its tensors are."""
        return self.codes.device

    def dequantize(self, dtype: torch.dtype = torch.bfloat16, expert: int | None = None) -> torch.Tensor:
        """w [E, N, K], or [N, K] of one ``expert``, in ``dtype``: computed in float32 and rounded once."""
        E, N, K = self.shape
        if expert is not None:
            if not -E <= expert < E:
                raise bad("expert", f"{expert}", f"one of the {E} that there are")
            return self._values(expert).to(dtype)
        w = torch.empty((E, N, K), dtype=dtype, device=self.device)
        for one in range(E):
            w[one] = self._values(one)
        return w

    def prepare(self) -> ExpertWeights:
        """Put codes and scales into the order that kernels read: in place, expert by expert, once. Returns itself.

        ``order`` tells; ``restore`` undoes it. Weights that no kernel reads in another order are left as they are: of
        N or K that are no multiples of 64 (of 128 where a scale is of so many), or with a scale above 2 of mxfp4 or of
        1,024 and more of int4. No call may use them meanwhile.
        """
        from .order import ORDERS

        order = ORDERS.get(self.format)
        if order is not None and self.order != order.number:
            self.restore()
            self.refused = not order.fits(self._quantised)
            if not self.refused:
                self._reorder(order, undo=False)
                self.order, self._derived = order.number, None
                _ = self.kernel_scale  # made now: not in a graph capture
        return self

    def restore(self) -> ExpertWeights:
        """Put codes and scales back into the checkpoint's order, bit for bit. Returns itself."""
        if self.order:
            self._reorder(_order_of(self), undo=True)
            self.order, self._derived = 0, None
        return self

    @property
    def kernel_scale(self) -> torch.Tensor | None:
        """The scales in blocks that kernels read of prepared weights; None where they read none.

        ``scale`` itself, or made of it when it is first asked for, where kernels read another type.
        """
        order = _order_of(self)
        if order.moves(self.scale):
            return self.scale
        if self._derived is None and order.derived is not None:
            self._derived = order.derived(self.scale)
        return self._derived

    @property
    def plain_scale(self) -> torch.Tensor | None:
        """The scales that the kernel for every GPU reads of codes in their order: those of 4 bits lie as the codes do.

        ``scale`` itself, or the same in bf16 where int4 has another type: made when it is first asked for.
        """
        if self.precision.w.name != "int4":
            return self.scale
        if self.order:
            return self.kernel_scale
        if self.scale.dtype is torch.bfloat16:
            return self.scale
        if self._derived is None:
            self._derived = self.scale.to(torch.bfloat16)
        return self._derived

    @property
    def kernel_dtypes(self) -> tuple[DType, ...]:
        """What a bundle's problems with these weights can be of: ``precision.dtypes_of``."""
        return dtypes_of(self.format)

    @property
    def outer_scale(self) -> torch.Tensor | None:
        """The scales that kernels multiply sums by: of experts [E], or of y's columns [E, N]; else None."""
        return self.scale if self.scale.dim() == 2 else self.global_scale

    def to(self, device: torch.device | str | int, *, non_blocking: bool = False) -> ExpertWeights:
        """The same on another device; itself if it is there."""
        if self.codes.to(device, non_blocking=non_blocking) is self.codes:
            return self
        moved = {name: one.to(device, non_blocking=non_blocking) for name, one in self.tensors().items()}
        there = ExpertWeights(self.format, **moved, order=self.order)
        if there.order:
            _ = there.kernel_scale  # made now: not in a graph capture
        return there

    def tensors(self) -> dict[str, torch.Tensor]:
        """The tensors that there are, by the names of the attributes."""
        every = {"codes": self.codes, "scale": self.scale, "zero": self.zero, "global_scale": self.global_scale}
        return {name: one for name, one in every.items() if one is not None}

    def state_dict(self) -> dict[str, torch.Tensor]:
        """``tensors()``, and the order of the codes as ``order``: what to save beside ``format``."""
        return {**self.tensors(), "order": torch.tensor(self.order)}

    def __getstate__(self) -> dict[str, Any]:
        """What a copy or pickle keeps: float8 as bytes, for torch can't pickle it by itself.

        Not what is made of scales for this version's kernels: another version's may read it in another way.
        """
        kept = self.__dict__ | {"_derived": None}
        for name, one in self.tensors().items():
            kept[name] = one.view(torch.uint8) if one.dtype is torch.float8_e4m3fn else one
        return kept

    def __setstate__(self, kept: dict[str, Any]) -> None:
        self.__dict__.update(kept)
        elements = self.precision.w
        if elements.name == "e4m3":
            self.codes = self.codes.view(torch.float8_e4m3fn)
        if elements.scale is not None and elements.scale.name == "e4m3":
            self.scale = self.scale.view(torch.float8_e4m3fn)
        self._derived = None  # (a pickle of an earlier version has its own)
        if self.order and _checked(self).order:
            _ = self.kernel_scale  # made now: not in a graph capture

    def __repr__(self) -> str:
        E, N, K = self.shape
        return f"ExpertWeights({self.format}, E={E}, N={N}, K={K}, device={str(self.device)!r}, order={self.order})"

    def _values(self, expert: int) -> torch.Tensor:
        """w[expert] in float32."""
        from .codes import Quantised, values

        codes, scale = self.codes[expert], self.scale[expert]
        if self.order:
            codes, scale = _order_of(self).undone(codes, scale)
        zero, outer = (None if one is None else one[expert] for one in (self.zero, self.global_scale))
        return values(self.format, Quantised(codes, scale, zero, outer))

    @property
    def _quantised(self) -> Quantised:
        from .codes import Quantised

        return Quantised(self.codes, self.scale, self.zero, self.global_scale)

    def _reorder(self, order: CodeOrder, *, undo: bool) -> None:
        from .order import reorder

        with torch.inference_mode():  # (tensors that were made there can be changed nowhere else)
            reorder(self._quantised, order, undo=undo)


def _order_of(weights: ExpertWeights) -> CodeOrder:
    """The order that the codes are in."""
    from .order import ORDERS

    order = ORDERS.get(weights.format)
    if order is None or order.number != weights.order:
        raise bad("order", f"{weights.order}", f"one that this version knows for {weights.format}: 0"
             + ("" if order is None else f" or {order.number}"))  # fmt: skip
    return order


def _precision(format: str) -> Precision:
    precision = PRECISIONS.get(format) if isinstance(format, str) else None
    if precision is None or not precision.quantised:
        known = ", ".join(name for name, one in PRECISIONS.items() if one.quantised)
        raise bad("format", repr(format), f"one of {known}")
    return precision


def _int4_format(codes: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor | None) -> str:
    """The name of the group that the shapes tell; where one group is all, of the smallest that holds it."""
    for name, one in (("codes", codes), ("scale", scale)):
        if not isinstance(one, torch.Tensor) or one.dim() != 3:
            raise bad(name, told(one), "[E, N, K/2] uint8" if name == "codes" else "[E, N, ceil(K/group)]")
    K, groups = codes.shape[2] * 2, scale.shape[2]
    for group in _GROUPS:
        if -(-K // group) == groups:
            return f"int4_g{group}{'' if zero is None else '_zp'}"
    wanted = " or ".join(str(-(-K // group)) for group in reversed(_GROUPS))
    raise bad("scale", f"of shape {list(scale.shape)}", f"{wanted} groups for K={K}: of 128, 64 or 32")


def _checked(weights: ExpertWeights) -> ExpertWeights:
    """The weights, if they can be used; InputError names the first that is wrong."""
    precision = _precision(weights.format)
    elements, scale = precision.w, precision.w.scale
    if scale is None:
        raise AssertionError(f"{precision.name} has no scale")
    four = elements.bits == 4
    codes = of_dtype("codes", weights.codes, (torch.uint8 if four else torch.float8_e4m3fn,))
    shape = "[E, N, K/2]" if four else "[E, N, K]"
    if codes.dim() != 3 or not codes.numel():
        raise bad("codes", f"of shape {list(codes.shape)}", f"{shape}, E, N and K of at least 1")
    E, N, K = weights.shape
    blocks = (E, N, -(-K // scale.columns)) if scale.columns else (E, N)
    if scale.rows > 1:
        blocks = (E, -(-N // scale.rows), -(-K // scale.columns))
    fit("scale", of_dtype("scale", weights.scale, _SCALE_DTYPES[scale.name]), blocks, codes)
    if scale.zero_bits:
        fit("zero", of_dtype("zero", weights.zero, (torch.uint8,)), blocks, codes)
    if scale.outer is not None:
        fit("global_scale", of_dtype("global_scale", weights.global_scale, (torch.float32,)), (E,), codes)
    for name, one in weights.tensors().items():
        if not one.is_contiguous():
            raise bad(name, f"with strides {list(one.stride())}", "contiguous (it is never copied): pass .contiguous()")
        setattr(weights, name, one.detach())
    for name, given in (("scale", weights.scale), ("global_scale", weights.global_scale)):
        if given is not None and given.device.type != "meta":
            check_finite(name, given)
    if weights.order:
        _ = weights.kernel_scale
    if weights.order and not weights.codes.is_meta and not _order_of(weights).room(weights._quantised):
        raise bad("scale", "too large for codes in order", "mxfp4's up to 2, int4's below 1,024: load the checkpoint")
    return weights
