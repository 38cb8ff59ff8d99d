"""Readers of one matrix, or E stacked ones, from a checkpoint: a function for each packing."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch

from ...artifacts.errors import InputError
from ...artifacts.tuples import NamedTuple
from . import validate
from .codes import E8M0, Quantised, e8m0, pack, unpack

BLOCK = 128  # rows and columns of an fp8 block
_INT4_GROUPS = (128, 64, 32)
_ZERO = 8
MX = 32  # weights in a group of mxfp4 and mxfp8
_NV = 16  # weights in a group of nvfp4
_E8M0_MOST = 255
_LOWEST_BITS = 0x11111111  # 1 in each nibble of a word
_AWQ_COLUMNS = (0, 2, 4, 6, 1, 3, 5, 7)  # of a word, from the lowest nibble on
_AWQ_PLACES = (0, 4, 1, 5, 2, 6, 3, 7)  # of the eight columns in a word
_E2M1X2: torch.dtype | None = getattr(torch, "float4_e2m1fn_x2", None)  # torch 2.8 and later
_FLOATS = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
_BYTES = (torch.uint8, torch.int8)
_INTEGERS = (torch.int64, torch.int32, torch.int16, *_BYTES)
_WORDS = (torch.int32,)


class Suffixes(dict[str, torch.Tensor]):
    """The tensors of one matrix, or of all experts' matrices stacked, by the last word of their names.

    ``name`` is the whole name of one of them.
    """

    def __init__(self, name: str) -> None:
        super().__init__()
        self.name = name

    def get_one(self, *names: str, dtypes: tuple[torch.dtype | None, ...] | None = None) -> torch.Tensor:
        """The tensor of the first of these suffixes that the checkpoint has; it must have one of ``dtypes``."""
        for name in names:
            if name in self:
                tensor = self[name]
                if dtypes is not None and tensor.dtype not in dtypes:
                    raise self.bad(name, str(tensor.dtype), " or ".join(str(dtype) for dtype in dtypes if dtype))
                return tensor
        raise bad(f"what belongs to {self.name!r}", f"{sorted(self)}", f"{' or '.join(map(repr, names))} among it")

    def matrix(self, name: str, *dtypes: torch.dtype | None, dims: int = 2) -> torch.Tensor:
        """The tensor of this suffix: a matrix, or several of them stacked, of one of ``dtypes``."""
        tensor = self.get_one(name, dtypes=dtypes)
        if tensor.dim() not in (dims, dims + 1):
            raise self.bad(
                name, f"of shape {list(tensor.shape)}", f"{dims} dimensions, or {dims + 1} of stacked experts"
            )
        return tensor

    def fit(self, name: str, tensor: torch.Tensor, shape: tuple[int, ...]) -> torch.Tensor:
        """Return ``tensor``, which comes from the tensor of this suffix; InputError if it has another shape."""
        if tuple(tensor.shape) != shape:
            raise self.bad(name, f"of shape {list(tensor.shape)}", f"{list(shape)}")
        return tensor

    def bad(self, name: str, got: str, wanted: str) -> InputError:
        """The error for the tensor of this suffix."""
        return bad(f"{self.name!r}, or its {name},", got, wanted)


def fp8_blocks(suffixes: Suffixes, *, ue8m0: bool = False) -> Quantised:
    """A scale for each 128 x 128: DeepSeek's ``weight_scale_inv`` (which multiplies) or ``scale``, ``weight_scale``."""
    weight, names = suffixes.matrix("weight", torch.float8_e4m3fn), ("weight_scale_inv", "scale", "weight_scale")
    *front, N, K = weight.shape
    scale = suffixes.fit(_of(suffixes, names), suffixes.get_one(*names), (*front, -(-N // BLOCK), -(-K // BLOCK)))
    return Quantised(weight, fp8_scale(scale, ue8m0=ue8m0))


def fp8_rows(suffixes: Suffixes, *, ue8m0: bool = False) -> Quantised:
    """A scale for each row, [N] or [N, 1], or a single scale for the matrix."""
    weight, names = suffixes.matrix("weight", torch.float8_e4m3fn), ("weight_scale", "weight_scale_inv")
    scale = suffixes.get_one(*names)
    *front, N, _ = weight.shape
    rows, shape = (*front, N), tuple(scale.shape)
    if shape not in (rows, (*rows, 1), (*front,), (*front, 1), (*front, 1, 1)):
        raise suffixes.bad(
            _of(suffixes, names), f"of shape {list(shape)}", f"a scale for each row, {list(rows)}, or each matrix"
        )
    scale = fp8_scale(scale, ue8m0=ue8m0)
    if shape in (rows, (*rows, 1)):
        return Quantised(weight, scale.reshape(rows))
    return Quantised(weight, scale.reshape(*front, 1).expand(rows).contiguous())


def fp8_scale(scale: torch.Tensor, *, ue8m0: bool = False) -> torch.Tensor:
    """Return the scale of fp8 codes in float32. Bytes are e8m0, and so are wider integers if the config says so.

    Raises
    ------
    InputError
        for other types, and integers that are no bytes.
    """
    if scale.dtype is E8M0 or scale.dtype in _BYTES:
        return e8m0(scale.view(torch.uint8))
    if scale.dtype in _FLOATS:
        return scale.float()
    if scale.dtype not in _INTEGERS or not ue8m0:
        wanted = "a floating-point type or e8m0 bytes" + ("" if ue8m0 else " (no scale_fmt of the config says ue8m0)")
        raise validate.bad("the scale of fp8 codes", str(scale.dtype), wanted)
    if not scale.is_meta and bool(((scale < 0) | (scale > _E8M0_MOST)).any()):
        raise validate.bad(
            "the scale of fp8 codes",
            f"{scale.dtype} from {int(scale.min())} to {int(scale.max())}",
            f"an e8m0 byte in each, 0 to {_E8M0_MOST}",
        )
    return e8m0(scale.to(torch.uint8))


def blocks(suffixes: Suffixes) -> Quantised:
    """gpt-oss: ``blocks`` [.., N, K/32, 16] and ``scales`` [.., N, K/32]."""
    codes = suffixes.matrix("blocks", *_BYTES, dims=3)
    if codes.shape[-1] != MX // 2:
        raise suffixes.bad("blocks", f"of shape {list(codes.shape)}", f"{MX // 2} bytes in each block")
    return _mxfp4(suffixes, codes.flatten(-2), "scales")


def deepseek_fp4(suffixes: Suffixes) -> Quantised:
    """DeepSeek-V4: ``weight`` int8 [N, K/2], ``scale`` e8m0 [N, K/32]."""
    names = ("scale", "weight_scale_inv")
    return _mxfp4(suffixes, suffixes.matrix("weight", *_BYTES, _E2M1X2), *names)


def packed_mxfp4(suffixes: Suffixes) -> Quantised:
    """compressed-tensors: ``weight_packed`` uint8 [N, K/2], ``weight_scale`` uint8 [N, K/32]."""
    return _mxfp4(suffixes, suffixes.matrix("weight_packed", *_BYTES, _E2M1X2), "weight_scale")


def _mxfp4(suffixes: Suffixes, codes: torch.Tensor, *names: str) -> Quantised:
    return Quantised(codes.view(torch.uint8), _e8m0_of(suffixes, codes.shape[-1] * 2, codes, names))


def mxfp8(suffixes: Suffixes) -> Quantised:
    """``weight`` e4m3 [N, K], and ``weight_scale``, ``weight_scale_inv`` or ``scale`` e8m0 [N, K/32], which multiplies.

    https://github.com/vllm-project/compressed-tensors, compressors/mxfp8; modelopt and MiniMax have the same.
    """
    weight = suffixes.matrix("weight", torch.float8_e4m3fn)
    return Quantised(
        weight, _e8m0_of(suffixes, weight.shape[-1], weight, ("weight_scale", "weight_scale_inv", "scale"))
    )


def _e8m0_of(suffixes: Suffixes, K: int, codes: torch.Tensor, names: tuple[str, ...]) -> torch.Tensor:
    """The bytes of the first of these suffixes: a scale for each row of codes and 32 of K."""
    scale = suffixes.get_one(*names, dtypes=(*_BYTES, E8M0))
    return suffixes.fit(_of(suffixes, names), scale, (*codes.shape[:-1], -(-K // MX))).view(torch.uint8)


def packed_nvfp4(suffixes: Suffixes) -> Quantised:
    """compressed-tensors: ``weight_packed``, ``weight_scale`` e4m3 [N, K/16]; ``weight_global_scale`` divides."""
    return _nvfp4(suffixes, "weight_packed", 1 / suffixes.get_one("weight_global_scale", dtypes=_FLOATS).float())


def modelopt_nvfp4(suffixes: Suffixes) -> Quantised:
    """modelopt: ``weight`` uint8 [N, K/2], ``weight_scale`` e4m3 [N, K/16]; ``weight_scale_2`` multiplies."""
    return _nvfp4(suffixes, "weight", suffixes.get_one("weight_scale_2", dtypes=_FLOATS).float())


def _nvfp4(suffixes: Suffixes, name: str, outer: torch.Tensor) -> Quantised:
    codes = suffixes.matrix(name, *_BYTES, _E2M1X2)
    scale, each = suffixes.get_one("weight_scale", dtypes=(torch.float8_e4m3fn,)), codes.shape[:-2]
    suffixes.fit("weight_scale", scale, (*codes.shape[:-1], -(-codes.shape[-1] * 2 // _NV)))
    if outer.numel() != each.numel():
        raise bad(
            f"the global scale of {suffixes.name!r}", f"of shape {list(outer.shape)}", f"one a matrix, {list(each)}"
        )
    return Quantised(codes.view(torch.uint8), scale, None, outer.reshape(each))


class Int4(NamedTuple):
    """A config's settings of int4 weights.

    ``group`` counts the columns that share a scale, -1 for all; None if the config does not say. Zero points are never
    read if ``symmetric``. ``act_order``: ``g_idx`` decides which columns share a scale.
    """

    group: int | None = None
    symmetric: bool = False
    act_order: bool = False


def packed_int4(suffixes: Suffixes, how: Int4) -> Quantised:
    """compressed-tensors: ``weight_packed`` int32 [N, K/8], ``weight_zero_point`` int32 [N/8, K/g], stored plus 8."""
    packed = suffixes.matrix("weight_packed", *_WORDS)
    *front, N, words = packed.shape
    K = held = words * 8
    if "weight_shape" in suffixes and not suffixes["weight_shape"].is_meta:
        shape = suffixes.get_one("weight_shape", dtypes=(torch.int64, torch.int32)).reshape(-1).tolist()
        if len(shape) % 2 or {*shape[::2]} != {N} or len({*shape[1::2]}) != 1:
            raise suffixes.bad("weight_shape", f"{shape[:8]}", f"N and K, {N} and {held}, as weight_packed has")
        K = shape[1]
    if not held - 8 < K <= held:
        raise bad(
            f"the last of weight_shape of {suffixes.name!r}", f"{K}", f"{held - 7} to {held}, as weight_packed has"
        )
    zero = None
    if not how.symmetric:
        zero = suffixes.matrix("weight_zero_point", *_WORDS)
        suffixes.fit("weight_zero_point", zero, (*front, -(-N // 8), zero.shape[-1]))
        zero = _nibbles(zero.mT).mT[..., :N, :]
    codes = _contiguous(packed).view(torch.uint8)[..., : (K + 1) // 2]
    return _int4(
        suffixes, codes, ("weight_scale", suffixes.matrix("weight_scale", *_FLOATS)), zero, how, "weight_g_idx"
    )


def gptq(suffixes: Suffixes, how: Int4, *, less_one: bool = True, by_word: bool = False) -> Quantised:
    """``qweight`` int32 [K/8, N], ``qzeros`` [K/g, N/8], ``scales`` [K/g, N].

    ``less_one``: zero points are stored minus one, as in all formats but gptq_v2. ``by_word``: the one was subtracted
    from whole words, so a zero point of 0 borrowed from its neighbour (GPTQModel).
    """
    qweight, scales = suffixes.matrix("qweight", *_WORDS), suffixes.matrix("scales", *_FLOATS)
    zero = None
    if not how.symmetric:
        words = suffixes.matrix("qzeros", *_WORDS)
        suffixes.fit("qzeros", words, (*scales.shape[:-1], -(-scales.shape[-1] // 8)))
        zero = _nibbles(words + _LOWEST_BITS if less_one and by_word else words)[..., : scales.shape[-1]].mT
        if less_one and not by_word:
            zero = zero + 1 & 15
    return _int4(suffixes, gptq_codes(qweight), ("scales", scales.mT), zero, how, "g_idx")


def awq(suffixes: Suffixes, how: Int4) -> Quantised:
    """``qweight`` int32 [K, N/8], ``qzeros`` [K/g, N/8], ``scales`` [K/g, N]; a word's columns are 0 2 4 6 1 3 5 7."""
    qweight, scales = suffixes.matrix("qweight", *_WORDS), suffixes.matrix("scales", *_FLOATS)
    if qweight.shape[-2] % 2:
        raise suffixes.bad(
            "qweight", f"of shape {list(qweight.shape)}", "an even number of rows: two codes share a byte"
        )
    zero = None if how.symmetric else awq_columns(suffixes.matrix("qzeros", *_WORDS))
    return _int4(suffixes, awq_codes(qweight), ("scales", scales.mT), zero, how, "g_idx")


def awq_experts(
    qweight: torch.Tensor, scales: torch.Tensor, qzeros: torch.Tensor, *, group: int
) -> tuple[torch.Tensor, ...]:
    """The codes, scales and zero points of E stacked experts of AWQ's tensors, copied an expert at a time."""
    return _each(awq, {"qweight": qweight, "scales": scales, "qzeros": qzeros}, group)


def packed_experts(
    packed: torch.Tensor, scale: torch.Tensor, zero: torch.Tensor, *, group: int
) -> tuple[torch.Tensor, ...]:
    """The codes, scales and zero points of E stacked experts of compressed-tensors' tensors."""
    return _each(packed_int4, {"weight_packed": packed, "weight_scale": scale, "weight_zero_point": zero}, group)


def gptq_experts(
    qweight: torch.Tensor,
    scales: torch.Tensor,
    qzeros: torch.Tensor | None = None,
    *,
    group: int,
    less_one: bool = True,
    by_word: bool = False,
) -> tuple[torch.Tensor, ...]:
    """The codes, scales and zero points of E stacked experts of GPTQ's tensors, symmetric without ``qzeros``.

    The flags are those of ``gptq``.
    """
    stacked = {"qweight": qweight, "scales": scales} | ({} if qzeros is None else {"qzeros": qzeros})
    return _each(partial(gptq, less_one=less_one, by_word=by_word), stacked, group, symmetric=qzeros is None)


def _each(
    read: Callable[[Suffixes, Int4], Quantised],
    stacked: Mapping[str, torch.Tensor],
    group: int,
    *,
    symmetric: bool = False,
) -> tuple[torch.Tensor, ...]:
    experts: list[list[torch.Tensor]] = []
    for tensors in zip(*stacked.values(), strict=True):
        suffixes = Suffixes("an expert")
        suffixes.update(zip(stacked, tensors, strict=True))
        parts = read(suffixes, Int4(group, symmetric))
        experts.append([part.contiguous() for part in parts if part is not None])
    return tuple(torch.stack(parts) for parts in zip(*experts, strict=True))


def awq_columns(words: torch.Tensor) -> torch.Tensor:
    """Unpack words [.., R, n] to codes [.., 8n, R]."""
    return _nibbles(words).view(*words.shape, 8)[..., _AWQ_PLACES].flatten(-2).mT


def awq_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack one matrix in ``awq``'s form: [N, K/2] uint8 to [K, N/8] int32."""
    columns = unpack(codes).mT
    words = columns.reshape(columns.shape[0], -1, 8)[..., _AWQ_COLUMNS].flatten(1)
    return pack(words).view(torch.int32)


def awq_codes(words: torch.Tensor) -> torch.Tensor:
    """Undo ``awq_words``: [K, N/8] int32 of one matrix to [N, K/2] uint8."""
    return pack(awq_columns(words))


def gptq_words(codes: torch.Tensor) -> torch.Tensor:
    """Pack one matrix in ``gptq``'s form: [N, K/2] uint8 to [K/8, N] int32."""
    return _contiguous(codes.view(torch.int32).mT)


def gptq_codes(words: torch.Tensor) -> torch.Tensor:
    """Undo ``gptq_words``: [K/8, N] int32 of one matrix to [N, K/2] uint8."""
    return _contiguous(words.mT).view(torch.uint8)


def _int4(
    suffixes: Suffixes,
    codes: torch.Tensor,
    scale: tuple[str, torch.Tensor],
    zero: torch.Tensor | None,
    how: Int4,
    index: str,
) -> Quantised:
    """Codes [.., N, K/2], and scales and zero points [.., N, groups] in groups of 128, 64 or 32.

    A group of another multiple of 32, or of a whole row, is split into smaller groups with equal scales.
    """
    name, factors = scale
    *front, N, half = codes.shape
    K, groups = half * 2, factors.shape[-1]
    group = how.group
    if group is None:
        group = next((size for size in _INT4_GROUPS if -(-K // size) == groups), -1)
        if group < 0 and groups > 1:
            raise suffixes.bad(name, f"of shape {list(factors.shape)}", f"groups of 128, 64 or 32 of K={K}")
    count = -(-K // group) if group > 0 else 1
    suffixes.fit(name, factors, (*front, N, count))
    if zero is not None:
        suffixes.fit("zero points", zero, (*front, N, count))
    _check_order(suffixes, index, how.act_order, K, group)
    unit = _INT4_GROUPS[0] if count == 1 else next((size for size in _INT4_GROUPS if group % size == 0), 0)
    if not unit:
        raise bad(f"the group of {suffixes.name!r}", f"{group}", "a multiple of 32, or -1")
    many = -(-K // unit)
    if many != count:
        factors = _repeated(factors, many, group // unit)
        zero = None if zero is None else _repeated(zero, many, group // unit)
    return Quantised(codes, factors, zero)


def _repeated(factors: torch.Tensor, many: int, times: int) -> torch.Tensor:
    """Repeat each entry of the last dimension; a single entry fills all. ``many`` entries in all."""
    if factors.shape[-1] == 1:
        return factors.expand(*factors.shape[:-1], many)
    return factors.repeat_interleave(times, -1)[..., :many]


def whole_groups(weights: Quantised) -> Quantised:
    """int4 as ``ExpertWeights`` has it: contiguous, and without zero points if all are 8."""
    codes, scale, zero, _ = weights
    if zero is not None and not zero.is_meta and bool((zero == _ZERO).all()):
        zero = None
    return Quantised(codes.contiguous(), scale.contiguous(), None if zero is None else zero.contiguous())


def _check_order(suffixes: Suffixes, name: str, act_order: bool, K: int, group: int) -> None:
    """Raise InputError for groups that are not of neighbours (act-order, desc_act).

    A constant index (0 in AutoGPTQ, -1 in compressed-tensors) is ignored, unless the config demands ``act_order``.
    """
    if name not in suffixes:
        if act_order and 0 < group < K:
            suffixes.get_one(name)
        return
    index = suffixes.get_one(name, dtypes=_INTEGERS)
    if index.is_meta:
        return
    index = index.reshape(-1, index.shape[-1] if index.dim() else 1)
    natural = torch.arange(index.shape[-1], device=index.device)
    natural = natural // group if 0 < group < K else torch.zeros_like(natural)
    if not act_order and bool((index == index[0, 0]).all()) and int(index[0, 0]) in (0, -1):
        return
    if not K - 2 < index.shape[-1] <= K or bool((index != natural).any()):
        raise bad(f"{name} of {suffixes.name!r}", "of another order (act-order, desc_act)", "groups of neighbours in K")


def _of(suffixes: Suffixes, names: tuple[str, ...]) -> str:
    """The first of these suffixes that the checkpoint has."""
    return next((name for name in names if name in suffixes), names[0])


def _nibbles(words: torch.Tensor) -> torch.Tensor:
    """The eight nibbles of int32 words, the lowest first: [..., n] to [..., 8n] uint8."""
    return unpack(_contiguous(words).view(torch.uint8))


def _contiguous(words: torch.Tensor) -> torch.Tensor:
    """Make contiguous, including the strides: torch accepts any stride in a matrix of one column."""
    if words.stride()[-1] != 1:
        return words.clone(memory_format=torch.contiguous_format)
    return words.contiguous()


def bad(name: str, got: str, wanted: str) -> InputError:
    """The error for an unsupported value in a checkpoint."""
    return InputError(f"ExpertWeights.from_tensors: {name} is {got}, wanted {wanted}")
