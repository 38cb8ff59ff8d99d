"""SGLang's MoE layers with quantised weights: the formats that pretuned reads, and how their tensors are prepared.

SGLang makes and loads its own parameters. If pretuned runs the layer, they are prepared in place, not for the backend
that SGLang chose, and then have the dtype and shape of prepared weights; padded weights get new memory. Before a reload
the parameters get the checkpoint's layout back, so that SGLang may load only some of them. Zero points, and scales that
are repeated for rows, are small: they are prepared in new tensors.

Imported only inside SGLang, by ``experts.py``.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

from ...artifacts.errors import InputError
from ...artifacts.records import PRECISIONS
from ...runtime.ops.activation import RowActivation
from ...runtime.weights.checkpoints import gptq_zeros
from ...runtime.weights.codes import unpack
from ...runtime.weights.expert_weights import ExpertWeights
from ...runtime.weights.packings import awq_codes, awq_columns, awq_words, gptq_codes, gptq_words
from ...runtime.weights.padding import narrowed
from ..loaded_format import A4, STATIC_X, LoadedFormat, int4_name, order_refusal
from ..served_layer import follow, pad_bias, prepared, widened

_TRITON, _MARLIN = "triton", "marlin"
_WHICH = ("w13", "w2")
_MOVES = {"gptq": (gptq_codes, gptq_words), "awq": (awq_codes, awq_words)}
_BORROWED = 15  # a zero point of 0, stored as (0 - 1) mod 16


@dataclass(frozen=True)
class Packing(LoadedFormat):
    """The format of a layer's parameters, and SGLang's ``runners`` that leave them as the checkpoint has them."""

    runners: tuple[str, ...] = ()

    def shapes(self, layer: Any) -> list[tuple[int, int]]:
        """N and K of the layer's two products, by the shapes of its parameters."""
        sizes = []
        for which in _WHICH:
            codes = getattr(layer, f"{which}_{self.ends[0]}")
            rows, columns = codes.shape[1:]
            weights = codes.element_size() * 8 // PRECISIONS[self.name].w.bits  # weights per element of the codes
            if self.packing == "awq":
                sizes.append((columns * weights, rows))
            else:
                sizes.append((columns, rows * weights) if self.K_first else (rows, columns * weights))
        return sizes

    def product(self, layer: Any, which: str) -> ExpertWeights:
        """The weights of one product, in the memory of the layer's parameters after ``turn``.

        Zero points, and scales of matrices, are new tensors.
        """
        codes, scale, *more = (getattr(layer, f"{which}_{end}").data for end in self.ends)
        if not self.K_first:
            return self.weights(codes, scale, *more)
        E, (N, K) = codes.shape[0], self.shapes(layer)[_WHICH.index(which)]
        zeros = (torch.stack([awq_columns(words) for words in packed]) for packed in more)
        return ExpertWeights.int4(codes.view(torch.uint8).view(E, N, K // 2), scale.view(E, N, -1), *zeros)

    def turn(self, layer: Any, *, undo: bool = False) -> None:
        """Transpose the parameters' contents from K x N to N x K in place, expert by expert; their shapes stay."""
        for which, (N, K) in zip(_WHICH, self.shapes(layer), strict=True) if self.K_first else ():
            there, back = _MOVES[self.packing]
            for codes in getattr(layer, f"{which}_{self.ends[0]}").data:
                rows = codes.view(torch.uint8).view(N, K // 2)
                _ = codes.copy_(back(rows.clone())) if undo else rows.copy_(there(codes.clone()))
            for scale in getattr(layer, f"{which}_{self.ends[1]}").data:
                rows = scale.view(N, -1)
                _ = scale.copy_(rows.mT.clone()) if undo else rows.copy_(scale.mT.clone())


class Experts:
    """The state of a layer that pretuned runs, apart from its parameters. ``weights`` is None until they are loaded.

    ``own`` is SGLang's runner, which takes the layer if its weights can't be prepared. ``width`` is I of the prepared
    weights.
    """

    def __init__(self, format: Packing, runner: Any, width: int, own: Any = None) -> None:
        self.format, self.runner, self.width, self.own = format, runner, width, own
        self.weights: tuple[ExpertWeights, ...] | None = None
        self.is_raw = True  # parameters are in the layout that SGLang's loader writes and reads
        self.unreadable: str | None = None  # why the loaded weights differ from the checkpoint's
        self._raw: dict[str, tuple[torch.dtype, torch.Size]] = {}  # original dtypes and shapes of replaced parameters
        self._sizes: list[tuple[int, int]] = []  # N and K of the products as SGLang loads them
        self._parts = 1  # matrices in gate_up, each padded by itself
        self._bias: torch.Tensor | None = None  # the padded bias of gate and up

    @property
    def is_padded(self) -> bool:
        """True if I of the prepared weights is larger than I of the loaded weights."""
        return bool(self._sizes) and self._sizes[1][1] != self.width

    def prepare(self, layer: Any) -> None:
        """Prepare the weights that were just loaded, in their own memory or, if padded, in the first weights' memory.

        Raises
        ------
        InputError
            for scales that no kernel supports, for reloaded weights in another layout than the first, for an
            unsupported activation that the model set after making the layer, and for zero points that SGLang's loader
            changes.
        """
        form, act = self.format, self.runner.runner_core.activation()
        if self.unreadable:
            raise InputError(f"pretuned: {self.unreadable}")
        self._sizes, self._parts = form.shapes(layer), 2 if act.gated and not act.interleaved else 1
        form.turn(layer)
        raw = [form.product(layer, which) for which in _WHICH]
        if self.is_padded:
            raw = [
                widened(weights, self.width, act, down=which == "w2")
                for weights, which in zip(raw, _WHICH, strict=True)
            ]
            self._pad_bias(layer, act)
        on_gpu = getattr(layer, f"w2_{form.ends[0]}").is_cuda
        ready = prepared(raw, "PRETUNED_SGLANG", on_gpu=on_gpu, in_place=True)
        first = self.weights
        if first is None or not (self.is_padded or all(map(_in_one_place, first, ready))):
            first = ready
        else:
            follow(first, ready)
        for which, of_product in zip(_WHICH, first, strict=True):
            for end, tensor in zip(form.ends[:2], (of_product.codes, of_product.scale), strict=True):
                name = f"{which}_{end}"
                parameter = getattr(layer, name)
                if end not in form.derived and (self.is_padded or tensor.dim() > parameter.dim()):
                    self._raw[name] = parameter.dtype, parameter.shape
                    parameter.data = tensor
        self.weights, self.is_raw = first, False

    def _pad_bias(self, layer: Any, act: RowActivation) -> None:
        bias = getattr(layer, "w13_weight_bias", None) if layer.with_bias else None
        if bias is not None:
            padded = pad_bias(bias.data, self._sizes[1][1], self.width, act)
            self._bias = padded if self._bias is None else self._bias.copy_(padded)

    def give_back(self, method: Any, layer: Any) -> None:
        """Undo what ``prepare`` did before it failed the first time, and have SGLang's own runner run the layer."""
        self._unprepare(layer)
        del layer.pretuned_experts
        run_by(method, layer, self.own)
        # SGLang's layers have copies of these attributes of their runner.
        layer.runner_backend = layer.moe_runner_config.runner_backend = method.get_moe_runner_backend(layer)
        layer.runner = method.runner
        layer._set_runner_flags()
        layer.dispatcher = create_moe_dispatcher(layer.moe_runner_config, quant_method=method)

    def restore(self, layer: Any) -> None:
        """Give the parameters the layout of SGLang's loader again. Captured graphs' other tensors keep their memory."""
        self.unreadable = None
        if self.is_raw or self.weights is None:
            return
        self._unprepare(layer)

    def _unprepare(self, layer: Any) -> None:
        if not self._sizes:  # nothing was prepared yet
            return
        for i, which in enumerate(_WHICH):
            names = [f"{which}_{end}" for end in self.format.ends[:2] if f"{which}_{end}" in self._raw]
            codes, scale = (getattr(layer, f"{which}_{end}").data for end in self.format.ends[:2])
            if self.is_padded and names and self.weights is not None:
                parts = self._parts if which == "w13" else 1
                plain = narrowed(self.weights[i].restore(), *self._sizes[i], parts=parts)
                codes, scale = plain.codes, plain.scale
            elif codes.dim() > 3:
                ExpertWeights(self.format.name, codes, scale).restore_in_place()
            for name, there in zip(names, (codes, scale), strict=False):
                dtype, shape = self._raw.pop(name)
                getattr(layer, name).data = there.flatten(1).view(torch.uint8).view(dtype).view(shape)
        self.format.turn(layer, undo=True)
        self.is_raw = True

    def run(self, layer: Any, dispatch_output: Any) -> Any:
        """Run the layer on the tokens of ``dispatch_output``."""
        w13, w2 = self.weights or ()
        b13, b2 = (getattr(layer, f"{which}_weight_bias", None) if layer.with_bias else None for which in _WHICH)
        b13 = b13 if self._bias is None else self._bias
        return self.runner.run(dispatch_output, TritonMoeQuantInfo(w13_weight=w13, w2_weight=w2, b13=b13, b2=b2))


def _in_one_place(first: ExpertWeights, now: ExpertWeights) -> bool:
    return first.codes.data_ptr() == now.codes.data_ptr()


def format_of(method: Any, layer: Any) -> Packing | str:
    """The format of the weights of a layer with SGLang's ``method``, or why pretuned does not read them."""
    how = _scheme(method, layer)
    read = _FORMATS.get(type(how).__name__)
    return f"{type(how).__name__} is none of pretuned's formats" if read is None else read(how)


def _scheme(method: Any, layer: Any) -> Any:
    """The object that knows a layer's format: compressed-tensors' methods ask the layer's own scheme."""
    return layer.scheme if type(method).__name__ == "CompressedTensorsFusedMoEMethod" else method


def runs_by(method: Any, layer: Any) -> Any:
    """The object with the ``runner`` of a layer: the method, the layer's scheme or, for GPTQ, the scheme's kernel."""
    scheme = getattr(layer, "scheme", None)
    return method if scheme is None else getattr(scheme, "kernel", scheme)


def run_by(method: Any, layer: Any, runner: Any) -> None:
    """Have a runner run a layer."""
    runs_by(method, layer).runner = runner
    if method.get_moe_runner_backend(layer) is not runner.runner_backend:  # a modelopt method has a backend of its own
        method._moe_runner_backend = runner.runner_backend


def _fp8(method: Any) -> Packing | str:
    how = method.quant_config
    is_static = how.activation_scheme != "dynamic"
    if method.is_fp4_expert:
        return "fp8 checkpoints' experts in mxfp4 (DeepSeek-V4), which SGLang prepares in several ways"
    if method.use_mxfp8:
        return "mxfp8"
    if not how.is_checkpoint_fp8_serialized:
        return "its weights are quantised at load"
    if method.weight_block_size is None:
        return _fp8_rows("weight_scale", is_static=is_static)
    if list(method.weight_block_size) != [128, 128] or is_static:
        return f"its fp8 weights have no scale for each 128 x 128 (blocks of {method.weight_block_size})"
    return Packing("fp8_block", ("weight", "weight_scale_inv"), runners=(_TRITON,))


def _fp8_rows(scale: str, *, is_static: bool) -> Packing:
    """fp8 with a scale for each row or for each matrix; the loaded scales' shape decides."""
    return Packing("fp8_channel", ("weight", scale), runners=(_TRITON,), note=STATIC_X if is_static else "")


def _compressed_fp8(scheme: Any) -> Packing | str:
    if scheme.weight_block_size is None:
        return _fp8_rows("weight_scale", is_static=scheme.static_input_scales)
    if list(scheme.weight_block_size) != [128, 128] or scheme.static_input_scales:
        return f"its fp8 weights have no scale for each 128 x 128 (blocks of {scheme.weight_block_size})"
    return Packing("fp8_block", ("weight", "weight_scale"), runners=(_TRITON,))


def _modelopt_fp8(method: Any) -> Packing | str:
    if not method.quant_config.is_checkpoint_fp8_serialized:
        return "its weights are quantised at load"
    return _fp8_rows("weight_scale", is_static=True)


def _mxfp4(method: Any) -> Packing | str:
    return Packing("mxfp4", ("weight", "weight_scale"), runners=(_TRITON, "triton_kernel"))


def _compressed_nvfp4(scheme: Any) -> Packing | str:
    note = A4 if scheme.has_input_global_scale else ""
    ends = ("weight_packed", "weight_scale", "weight_global_scale")
    return Packing("nvfp4", ends, divides=True, note=note, runners=(_MARLIN,))


def _modelopt_nvfp4(method: Any) -> Packing | str:
    how = method.quant_config
    if not how.is_checkpoint_nvfp4_serialized:
        return "its weights are quantised at load"
    if how.group_size != 16:
        return f"nvfp4 in groups of {how.group_size}: pretuned serves groups of 16"
    if method.load_up_proj_weight_first:
        return "its loader has up before gate"
    note = "" if getattr(how, "is_w4a16", False) else A4
    return Packing("nvfp4", ("weight", "weight_scale", "weight_scale_2"), note=note, runners=(_MARLIN,))


def _int4(
    bits: int, group: int, ends: tuple[str, ...], packing: str, *, runner: str = _MARLIN, why: str | None = None
) -> Packing | str:
    name, refused = int4_name(bits, group, zeros=len(ends) > 2)
    if name is None or why:
        return why or refused
    return Packing(name, ends, packing, runners=(runner, _TRITON))


def _compressed_int4(scheme: Any) -> Packing | str:
    why = None if scheme.sym else "zero points of compressed-tensors, which SGLang loads in another shape"
    why = why or order_refusal(scheme.actorder)
    return _int4(scheme.num_bits, scheme.group_size, ("weight_packed", "weight_scale"), "gptq", why=why)


def _gptq(method: Any) -> Packing | str:
    how = method.quant_config
    why = "zero points" if not how.is_sym else "groups of another order (desc_act, g_idx)" if how.desc_act else None
    if why is None and how.dynamic:
        why = "bits that differ by layer (dynamic)"
    return _int4(how.weight_bits, how.group_size, ("qweight", "scales"), "gptq", why=why)


def _awq(method: Any) -> Packing | str:
    how = method.quant_config
    why = None if how.zero_point else "AWQ without zero points"
    return _int4(how.weight_bits, how.group_size, ("qweight", "scales", "qzeros"), "awq", why=why)


def _wna16(method: Any) -> Packing | str:
    """AWQ or GPTQ tensors. SGLang's loader converts them to rows of codes, and adds 1 to GPTQ's stored zero points."""
    how, why = method.quant_config, None
    if how.linear_quant_method == "awq" and not how.has_zp:
        why = "AWQ without zero points"
    if how.full_config.get("desc_act"):
        why = "groups of another order (desc_act, g_idx)"
    elif how.has_zp and how.linear_quant_method == "gptq" and not gptq_zeros(how.full_config)[0]:
        why = "zero points of gptq_v2, to which SGLang adds one"
    ends = ("qweight", "scales", "qzeros") if how.has_zp else ("qweight", "scales")
    return _int4(how.weight_bits, how.group_size, ends, "bytes", runner=_TRITON, why=why)


def watch(ours: Experts, layer: Any, method: Any) -> None:
    """Have a layer's loader note GPTQ zero points of 0, stored as 15: SGLang's loader wrongly makes them 16."""
    if type(method).__name__ != "MoeWNA16Method":
        return
    how = method.quant_config
    if not how.has_zp or how.linear_quant_method != "gptq":
        return
    for which in _WHICH:
        parameter = getattr(layer, f"{which}_qzeros")
        parameter.weight_loader = functools.partial(_load_zeros, ours, parameter.weight_loader)


def _load_zeros(
    ours: Experts, load: Callable[..., Any], param: Any, words: torch.Tensor, *arguments: Any, **more: Any
) -> Any:
    if bool((unpack(words.contiguous().view(torch.uint8)) == _BORROWED).any()):
        ours.unreadable = "a zero point of 0, which SGLang's loader makes 16"
    return load(param, words, *arguments, **more)


# By the class name of SGLang's method, or of compressed-tensors' scheme.
_FORMATS: dict[str, Callable[[Any], Packing | str]] = {
    "Fp8MoEMethod": _fp8,
    "W8A8FP8MoEMethod": lambda _: _fp8_rows("weight_scale", is_static=False),
    "ModelOptFp8MoEMethod": _modelopt_fp8,
    "ModelOptNvFp4FusedMoEMethod": _modelopt_nvfp4,
    "Mxfp4MoEMethod": _mxfp4,
    "CompressedTensorsW8A8Fp8MoE": _compressed_fp8,
    "CompressedTensorsW4A16Nvfp4MoE": _compressed_nvfp4,
    "CompressedTensorsWNA16MoE": _compressed_int4,
    "CompressedTensorsWNA16TritonMoE": _compressed_int4,
    "AWQMoEMethod": _awq,
    "GPTQMarlinMoEMethod": _gptq,
    "MoeWNA16Method": _wna16,
}
