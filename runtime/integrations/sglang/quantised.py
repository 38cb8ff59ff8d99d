"""SGLang's MoE layers with quantised weights: which formats are pretuned's, and how their tensors are prepared.

SGLang makes and loads its own parameters. If a layer is pretuned's they are prepared in place, instead of for the
backend that SGLang chose, and have the dtype and shape of prepared weights then. Before weights are loaded again they
are in the checkpoint's layout, in the same memory, so a part of them can be loaded.

Imported inside SGLang alone, by ``experts.py``.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.moe.fused_moe_triton.layer import create_moe_dispatcher
from sglang.srt.layers.moe.moe_runner.triton import TritonMoeQuantInfo

from ...artifacts.records.precision import DType, dtypes_of
from ...runtime.weights.expert_weights import ExpertWeights
from ..served_layer import follow, prepared

_TRITON, _MARLIN = "triton", "marlin"
_GROUPS = (32, 64, 128)  # of int4
_WHICH = ("w13", "w2")


class Packing(NamedTuple):
    """What a layer's tensors are. ``name`` is one of ``PRECISIONS``, ``codes`` and ``scale`` end their names.

    ``runners``: SGLang's, whose parameters are made as the checkpoint has them. With ``is_turned`` these have K before
    N, [E, K/8, N] words of eight codes and scales [E, K/group, N].
    """

    name: str
    codes: str
    scale: str
    runners: tuple[str, ...]
    is_turned: bool = False

    @property
    def dtype(self) -> DType:
        """Of the weights."""
        return dtypes_of(self.name)[0]

    def shapes(self, layer: Any) -> list[tuple[int, int]]:
        """N and K of its two products, as its parameters have room for."""
        found = []
        for which in _WHICH:
            codes = getattr(layer, f"{which}_{self.codes}")
            N, K = codes.shape[:0:-1] if self.is_turned else codes.shape[1:]
            found.append((N, K * codes.element_size() * (1 if self.name == "fp8_block" else 2)))
        return found

    def weights(self, layer: Any, which: str) -> ExpertWeights:
        """The weights of one product, over the layer's parameters as ``turn`` leaves them."""
        codes, scale = (getattr(layer, f"{which}_{one}").data for one in (self.codes, self.scale))
        if self.is_turned:
            codes, scale = (one.view(one.shape[0], one.shape[2], one.shape[1]) for one in (codes, scale))
        if self.name != "fp8_block":
            codes = codes.view(torch.uint8)
        make = {"fp8_block": ExpertWeights.fp8_block, "mxfp4": ExpertWeights.mxfp4}.get(self.name, ExpertWeights.int4)
        return make(codes, scale)

    def turn(self, layer: Any, *, undo: bool = False) -> None:
        """Exchange N and K of what lies in the parameters, in place and expert by expert; their shapes stay."""
        for which in _WHICH if self.is_turned else ():
            for name in (self.codes, self.scale):
                for one in getattr(layer, f"{which}_{name}").data:
                    K, N = one.shape
                    one.copy_(one.view(N, K).mT.clone() if undo else one.mT.reshape(K, N))


class Experts:
    """What a layer of pretuned's has beside its parameters. ``weights`` are None until they were loaded.

    ``own`` is SGLang's runner, which has the layer if its weights can't be prepared.
    """

    def __init__(self, format: Packing, runner: Any, own: Any = None) -> None:
        self.format, self.runner, self.own = format, runner, own
        self.weights: tuple[ExpertWeights, ...] | None = None
        self.is_raw = True  # as SGLang's loader writes and reads them
        self._raw: dict[str, tuple[torch.dtype, torch.Size]] = {}  # dtypes and shapes of the parameters then

    def prepare(self, layer: Any) -> None:
        """Prepare what was just loaded, in its memory.

        Raises
        ------
        InputError
            for scales that no kernel takes, for weights loaded later that have another order than the first, and for
            an activation that the model set after its layer was made and pretuned lacks.
        """
        self.runner.runner_core.activation()
        self.format.turn(layer)
        on_gpu = getattr(layer, f"w2_{self.format.codes}").is_cuda
        raw = [self.format.weights(layer, one) for one in _WHICH]
        given = prepared(raw, "PRETUNED_SGLANG", on_gpu=on_gpu, in_place=True)
        for which, of_product in zip(_WHICH, given, strict=True):
            for end, made in ((self.format.codes, of_product.codes), (self.format.scale, of_product.scale)):
                parameter = getattr(layer, f"{which}_{end}")
                self._raw[f"{which}_{end}"] = parameter.dtype, parameter.shape
                if made.dim() > parameter.dim():
                    parameter.data = made
        self.is_raw = False
        if self.weights is not None and all(
            one.codes.data_ptr() == first.codes.data_ptr() for one, first in zip(given, self.weights, strict=True)
        ):
            follow(self.weights, given)
        else:
            self.weights = given

    def give_back(self, method: Any, layer: Any) -> None:
        """Undo what ``prepare`` did before it failed the first time, and have SGLang's own runner run the layer."""
        self._unprepare(layer)
        del layer.pretuned_experts
        runs_by(method, layer).runner = self.own
        # What the layer took from the runner after it was made.
        layer.runner_backend = layer.moe_runner_config.runner_backend = method.get_moe_runner_backend(layer)
        layer.runner = method.runner
        layer._set_runner_flags()
        layer.dispatcher = create_moe_dispatcher(layer.moe_runner_config, quant_method=method)

    def restore(self, layer: Any) -> None:
        """Put them back as SGLang's loader writes them. What captured graphs read beside them stays where it is."""
        if self.is_raw or self.weights is None:
            return
        self._unprepare(layer)

    def _unprepare(self, layer: Any) -> None:
        for which in _WHICH:
            names = f"{which}_{self.format.codes}", f"{which}_{self.format.scale}"
            codes, scale = (getattr(layer, name) for name in names)
            if codes.dim() > 3:
                ExpertWeights(self.format.name, codes.data, scale.data).restore_in_place()
            for name, parameter in zip(names, (codes, scale), strict=True):
                dtype, shape = self._raw.get(name, (parameter.dtype, parameter.shape))
                parameter.data = parameter.data.flatten(1).view(torch.uint8).view(dtype).view(shape)
        self.format.turn(layer, undo=True)
        self.is_raw = True

    def run(self, layer: Any, dispatch_output: Any) -> Any:
        """The layer of a dispatch's tokens."""
        w13, w2 = self.weights or ()
        b13, b2 = (getattr(layer, f"{one}_weight_bias", None) if layer.with_bias else None for one in _WHICH)
        return self.runner.run(dispatch_output, TritonMoeQuantInfo(w13_weight=w13, w2_weight=w2, b13=b13, b2=b2))


def format_of(method: Any, layer: Any) -> Packing | str:
    """What the weights of a layer with SGLang's ``method`` are, or why they are none that pretuned reads."""
    how = _scheme(method, layer)
    read = _FORMATS.get(type(how).__name__)
    return f"{type(how).__name__} is none of pretuned's formats" if read is None else read(how)


def _scheme(method: Any, layer: Any) -> Any:
    """What knows a layer's format: compressed-tensors' methods ask the layer's own scheme."""
    return layer.scheme if type(method).__name__ == "CompressedTensorsFusedMoEMethod" else method


def runs_by(method: Any, layer: Any) -> Any:
    """What has the ``runner`` of a layer: the method, the layer's scheme or, of GPTQ, the scheme's kernel."""
    scheme = getattr(layer, "scheme", None)
    return method if scheme is None else getattr(scheme, "kernel", scheme)


def _fp8(method: Any) -> Packing | str:
    how = method.quant_config
    if method.is_fp4_expert:
        return "fp8 checkpoints' experts in mxfp4 (DeepSeek-V4), which SGLang prepares in several ways"
    if method.use_mxfp8 or list(method.weight_block_size or ()) != [128, 128]:
        return f"its fp8 weights have no scale for each 128 x 128 (blocks of {method.weight_block_size})"
    if not how.is_checkpoint_fp8_serialized or how.activation_scheme != "dynamic":
        return "its weights are quantised at load, or its tokens with static scales"
    return Packing("fp8_block", "weight", "weight_scale_inv", (_TRITON,))


def _compressed_fp8(scheme: Any) -> Packing | str:
    if list(scheme.weight_block_size or ()) != [128, 128] or scheme.static_input_scales:
        return f"its fp8 weights have no scale for each 128 x 128 (blocks of {scheme.weight_block_size})"
    return Packing("fp8_block", "weight", "weight_scale", (_TRITON,))


def _mxfp4(method: Any) -> Packing | str:
    return Packing("mxfp4", "weight", "weight_scale", (_TRITON, "triton_kernel"))


def _int4(bits: int, group: int, what: str | None, names: tuple[str, str], runner: str) -> Packing | str:
    if what is not None:
        return what
    if bits != 4 or group not in _GROUPS:
        return f"{bits} bits in groups of {group}: pretuned serves 4 in groups of 32, 64 or 128"
    return Packing(f"int4_g{group}", *names, (runner, _TRITON), is_turned=runner == _MARLIN)


def _compressed_int4(scheme: Any) -> Packing | str:
    what = None if scheme.sym else "zero points"
    if scheme.actorder is not None:
        what = "groups of another order (actorder)"
    return _int4(scheme.num_bits, scheme.group_size, what, ("weight_packed", "weight_scale"), _MARLIN)


def _gptq(method: Any) -> Packing | str:
    how = method.quant_config
    what = "zero points" if not how.is_sym else "groups of another order (desc_act)" if how.desc_act else None
    if what is None and how.dynamic:
        what = "bits that differ by layer (dynamic)"
    return _int4(how.weight_bits, how.group_size, what, ("qweight", "scales"), _MARLIN)


def _wna16(method: Any) -> Packing | str:
    how = method.quant_config
    what = "zero points" if how.has_zp else None
    return _int4(how.weight_bits, how.group_size, what, ("qweight", "scales"), _TRITON)


# By the name of SGLang's class, of its method or of compressed-tensors' scheme.
_FORMATS: dict[str, Callable[[Any], Packing | str]] = {
    "Fp8MoEMethod": _fp8,
    "Mxfp4MoEMethod": _mxfp4,
    "CompressedTensorsW8A8Fp8MoE": _compressed_fp8,
    "CompressedTensorsWNA16MoE": _compressed_int4,
    "CompressedTensorsWNA16TritonMoE": _compressed_int4,
    "GPTQMarlinMoEMethod": _gptq,
    "MoeWNA16Method": _wna16,
}
