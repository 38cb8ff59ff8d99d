"""How one matrix (or E of them stacked) lies in a checkpoint: a function for each packing. ``checkpoints.py`` asks."""

from __future__ import annotations

import torch

from ...artifacts.errors import InputError
from .codes import Quantised, e8m0, pack, unpack

BLOCK = 128  # of fp8
_INT4_GROUP = 128  # the largest
_ZERO = 8
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight columns in a word: AWQ stores 0 2 4 6 1 3 5 7
E8M0: torch.dtype | None = getattr(torch, "float8_e8m0fnu", None)  # (torch 2.7 and later; the next 2.8)
_E2M1X2: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)


class Suffixes(dict[str, torch.Tensor]):
    """One matrix's tensors by the last word of their names. ``name`` is one of them, whole."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    @property
    def stacked(self) -> bool:
        """Whether these are all experts' matrices."""
        return any(one.dim() > 2 for one in self.values())

    def get_one(self, *names: str, dims: int = 0) -> torch.Tensor:
        """The tensor of the first of these suffixes that is there, of so many dimensions or more."""
        for name in names:
            if name in self:
                if self[name].dim() < dims:
                    raise bad(
                        f"{self.name!r}, or its {name},", f"of shape {list(self[name].shape)}", "a matrix, or several"
                    )
                return self[name]
        raise bad(f"what belongs to {self.name!r}", f"{sorted(self)}", f"{' or '.join(map(repr, names))} among it")

    def of(self, names: tuple[str, ...], *dtypes: torch.dtype | None) -> torch.Tensor:
        """The same of matrices of one of these dtypes."""
        found = self.get_one(*names, dims=2)
        if found.dtype not in dtypes:
            wanted = " or ".join(str(one) for one in dtypes if one)
            raise bad(f"{self.name!r}, or its {names[0]},", f"{found.dtype}", wanted)
        return found


def fp8_blocks(one: Suffixes) -> Quantised:
    """A scale for each 128 x 128: DeepSeek's ``weight_scale_inv`` (which multiplies) or ``scale``, ``weight_scale``."""
    return Quantised(
        one.of(("weight",), torch.float8_e4m3fn),
        _fp32(one.get_one("weight_scale_inv", "scale", "weight_scale", dims=2)),
    )


def fp8_rows(one: Suffixes) -> Quantised:
    """A scale for each row, [N] or [N, 1], or one for the matrix."""
    weight, scale = one.of(("weight",), torch.float8_e4m3fn), _fp32(one.get_one("weight_scale", "weight_scale_inv"))
    *front, N, _ = weight.shape
    rows = (*front, N)
    if scale.numel() == weight[..., 0].numel():
        return Quantised(weight, scale.reshape(rows))
    if scale.numel() == weight[..., 0, 0].numel():
        return Quantised(weight, scale.reshape(*front, 1).expand(rows).contiguous())
    raise bad(f"{one.name!r}, or its weight_scale,", f"of shape {list(scale.shape)}",
        f"a scale for each row, {list(rows)}, or for each matrix")  # fmt: skip


def blocks(one: Suffixes) -> Quantised:
    """gpt-oss: ``blocks`` [.., N, K/32, 16] and ``scales`` [.., N, K/32]."""
    return Quantised(_bytes(one, "blocks").flatten(-2), _e8m0(one.get_one("scales", dims=2)))


def deepseek_fp4(one: Suffixes) -> Quantised:
    """DeepSeek-V4: ``weight`` int8 [N, K/2], ``scale`` e8m0 [N, K/32]."""
    return Quantised(_bytes(one, "weight"), _e8m0(one.get_one("scale", "weight_scale_inv", dims=2)))


def packed_mxfp4(one: Suffixes) -> Quantised:
    """compressed-tensors: ``weight_packed`` uint8 [N, K/2], ``weight_scale`` uint8 [N, K/32]."""
    return Quantised(_bytes(one, "weight_packed"), _e8m0(one.get_one("weight_scale", dims=2)))


def packed_nvfp4(one: Suffixes) -> Quantised:
    """compressed-tensors: ``weight_packed``, ``weight_scale`` e4m3 [N, K/16]; ``weight_global_scale`` divides."""
    return _nvfp4(one, "weight_packed", 1 / _fp32(one.get_one("weight_global_scale")))


def modelopt_nvfp4(one: Suffixes) -> Quantised:
    """modelopt: ``weight`` uint8 [N, K/2], ``weight_scale`` e4m3 [N, K/16]; ``weight_scale_2`` multiplies."""
    return _nvfp4(one, "weight", _fp32(one.get_one("weight_scale_2")))


def _nvfp4(one: Suffixes, codes: str, outer: torch.Tensor) -> Quantised:
    scale = one.of(("weight_scale",), torch.float8_e4m3fn)
    each = scale.shape[:-2]
    if outer.numel() != each.numel():
        raise bad(f"the global scale of {one.name!r}", f"of shape {list(outer.shape)}", f"one a matrix, {list(each)}")
    return Quantised(_bytes(one, codes), scale, None, outer.reshape(each))


def packed_int4(one: Suffixes) -> Quantised:
    """compressed-tensors: ``weight_packed`` int32 [N, K/8], ``weight_zero_point`` int32 [N/8, K/g], both plus 8."""
    packed, scale = one.of(("weight_packed",), torch.int32), one.get_one("weight_scale", dims=2)
    _check_order(one, "weight_g_idx")
    K = held = packed.shape[-1] * 8
    if "weight_shape" in one and not one["weight_shape"].is_meta:
        shape = one["weight_shape"]
        if shape.dtype not in (torch.int64, torch.int32):
            raise bad(f"weight_shape of {one.name!r}", str(shape.dtype), "torch.int64 or torch.int32")
        K = int(shape.reshape(-1)[-1])
    if not held - 8 < K <= held:
        raise bad(f"the last of weight_shape of {one.name!r}", f"{K}", f"{held - 7} to {held}, as weight_packed has")
    zero = None
    if "weight_zero_point" in one:
        zero = _nibbles(one.of(("weight_zero_point",), torch.int32).mT).mT[..., : packed.shape[-2], :]
    return Quantised(_contiguous(packed).view(torch.uint8)[..., : (K + 1) // 2], scale, zero)


def gptq(one: Suffixes, group: object, *, newer: bool) -> Quantised:
    """``qweight`` int32 [K/8, N], ``qzeros`` [K/g, N/8] (less one, but for gptq_v2), ``scales`` [K/g, N]."""
    qweight, scales = one.of(("qweight",), torch.int32), one.get_one("scales", dims=2)
    _check_order(one, "g_idx", group if isinstance(group, int) else 0)
    zero = _nibbles(one.of(("qzeros",), torch.int32)).mT
    if not newer:
        zero = zero + 1 & 15
    return Quantised(_contiguous(qweight.mT).view(torch.uint8), scales.mT, zero)


def awq(one: Suffixes) -> Quantised:
    """``qweight`` int32 [K, N/8], ``qzeros`` [K/g, N/8], ``scales`` [K/g, N]; a word's columns are 0 2 4 6 1 3 5 7."""
    code, zero = (
        _nibbles(words := one.of((name,), torch.int32)).view(*words.shape, 8)[..., _AWQ_PLACES].flatten(-2).mT
        for name in ("qweight", "qzeros")
    )
    return Quantised(pack(code), one.get_one("scales", dims=2).mT, zero)


def whole_groups(found: Quantised) -> Quantised:
    """int4 as ``ExpertWeights`` has it: contiguous, no zero points where all are 8, one scale a row for each group."""
    codes, scale, zero, _ = found
    if zero is not None and not zero.is_meta and bool((zero == _ZERO).all()):
        zero = None
    K = codes.shape[-1] * 2
    if scale.shape[-1] == 1 and K > _INT4_GROUP:  # one a row
        many = (*scale.shape[:-1], -(-K // _INT4_GROUP))
        scale, zero = scale.expand(many), None if zero is None else zero.expand(many)
    return Quantised(codes.contiguous(), scale.contiguous(), None if zero is None else zero.contiguous())


def _check_order(one: Suffixes, name: str, group: int = 0) -> None:
    """Raise InputError for groups that are not of neighbours (act-order, desc_act)."""
    if name in one and not one[name].is_meta:
        index = one[name].reshape(-1, one[name].shape[-1] if one[name].dim() else 1).long().cpu()
        steps = index.diff(dim=-1)
        if bool((steps < 0).any()) or (group > 0 and bool((index != torch.arange(index.shape[-1]) // group).any())):
            raise bad(f"{name} of {one.name!r}", "of another order (act-order, desc_act)", "groups of neighbours in K")


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of int32 words, the lowest first: [..., n] to [..., 8n] uint8."""
    return unpack(_contiguous(words).view(torch.uint8))


def _contiguous(words: torch.Tensor) -> torch.Tensor:
    """Contiguous in its strides, too: torch takes a matrix of one column for that, however they are."""
    if words.stride()[-1] != 1:
        return words.clone(memory_format=torch.contiguous_format)
    return words.contiguous()


def _bytes(one: Suffixes, name: str) -> torch.Tensor:
    return one.of((name,), torch.uint8, torch.int8, _E2M1X2).view(torch.uint8)


def _e8m0(scale: torch.Tensor) -> torch.Tensor:
    if scale.dtype is torch.int8 or scale.dtype is E8M0:
        return scale.view(torch.uint8)
    return scale


def _fp32(scale: torch.Tensor) -> torch.Tensor:
    """An fp32 scale that may be stored in fewer bits."""
    return e8m0(scale.view(torch.uint8)) if scale.dtype is E8M0 else scale.float()


def bad(name: str, got: str, wanted: str) -> InputError:
    """The error for what a checkpoint has."""
    return InputError(f"ExpertWeights.from_tensors: {name} is {got}, wanted {wanted}")
