"""The quantised weights of an experts' module of a transformers model.

A module's parameters for codes and scales are replaced by prepared ones (``ExpertWeights.prepare``) when the module is
moved to a GPU that has a kernel for prepared weights, or in its first call there. Prepared parameters have another
dtype and shape, which all code that reads them sees; ``state_dict`` and ``load_state_dict`` use the checkpoint's
layout. If other code replaces the parameters for each forward (FSDP2, offloading), they are used as they are.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import torch

from ...runtime.api.expert_weights import ExpertWeights
from ...runtime.check.tensors import bad
from ...runtime.driver.device import capturing
from ...runtime.settings import lock
from ...runtime.weights.codes import E8M0
from ...runtime.weights.expert_weights import checked, int4_format, scale_shape, synchronize, version_of
from ...runtime.weights.packings import fp8_scale
from ...runtime.weights.prepared_layout import ORDERS, PREPARED_DIMS
from ...runtime.weights.validate import fit, nan_among
from ...runtime.weights.writing import codes_room, move_codes, move_scale, mover, scale_room
from ..loaded_format import scale_of_rows

_NAME = "_pretuned_weights"
_STORED = "_pretuned_stored"
CAPTURED = "_pretuned_captured"  # attribute of a module whose checkpoint-layout parameters a CUDA graph reads
# Name ends of codes and scales: transformers' fp8, gpt-oss, compressed-tensors' packed and other codes.
ENDS = (("", "_scale_inv"), ("_blocks", "_scales"), ("_packed", "_scale"), ("", "_scale"))
_GROUPS = (32, 64, 128)  # group sizes of int4


class _Stored(NamedTuple):
    """A product whose parameters were prepared: their names, and their dtypes and shapes in the checkpoint's layout."""

    codes: str
    scale: str
    codes_like: tuple[torch.dtype, tuple[int, ...]]  # the dtype, and the shape for one expert
    scale_like: tuple[torch.dtype, tuple[int, ...]]


class _KnownWeights(NamedTuple):
    """The weights of one product, and the parameters from which they were made."""

    codes: weakref.ref[torch.Tensor]
    scale: weakref.ref[torch.Tensor]
    state: tuple[object, ...]  # identity of the parameters' memory
    weights: ExpertWeights
    version: list[int | None]  # write counts of the scales that were copied into ``weights``


class _Known(dict[str, _KnownWeights]):
    """The cached weights of a module's products. A copy of the module starts with an empty cache."""

    def __deepcopy__(self, _: Any) -> _Known:
        return _Known()

    def __reduce__(self) -> Any:
        return _Known, ()


def quantised(experts: Any, name: str) -> ExpertWeights | None:
    """A module's weights of a product, if they are quantised: fp8, mxfp4 or int4.

    Raises
    ------
    InputError
        for scales of an unsupported block, and for tensors that ``ExpertWeights`` refuses.
    """
    parameters = _parameters(experts, name)
    if parameters is None:
        return None
    codes, scale, codes_name = parameters
    if codes_name in experts.__dict__.get("_modules", {}).get("parametrizations", ()):
        bad(
            name,
            "codes that a parametrization adds to (PEFT's, as adapters are put on while experts don't run on pretuned)",
            "adapters put on by get_peft_model after register(), of a model with experts_implementation='pretuned'",
            "experts_forward",
        )
    if torch.compiler.is_compiling():
        traced = _weights(codes, scale, by_matrix=_by_matrix(experts))
        if not traced.is_prepared:  # a traced graph can check shapes, but no values
            fit("scale", traced.scale, scale_shape(traced), traced.codes)
        return traced
    cached = _known(experts)
    entry, state = cached.get(name), (*_state(codes), *_state(scale))
    if entry is not None and entry.codes() is codes and entry.scale() is scale and entry.state == state:
        _follow_scale(entry, scale)
        return entry.weights
    # Not in inference mode: a copy of scales that is made here is written later.
    with torch.inference_mode(False), torch.no_grad():
        weights = checked(_weights(codes.detach(), scale.detach(), by_matrix=_by_matrix(experts)))
    if isinstance(codes, torch.nn.Parameter):  # any other tensor is there for one call
        _keep(cached, name, codes, scale, weights)
    return weights


def _known(experts: Any) -> _Known:
    cached: _Known | None = experts.__dict__.get(_NAME)
    if cached is None:
        cached = experts.__dict__.setdefault(_NAME, _Known())
        experts.register_load_state_dict_post_hook(_after_load)
    return cached


def _parameters(experts: Any, name: str) -> tuple[torch.Tensor, torch.Tensor, str] | None:
    """A product's codes and scales, and the name of the codes; None if the product is not quantised."""
    parameters = experts.__dict__.get("_parameters", {})  # read once: another thread may replace it
    for codes_end, scale_end in ENDS:  # the scale first: reading a plain w with PEFT's adapter would compute W + s B A
        scale = parameters.get(name + scale_end, None)
        scale = getattr(experts, name + scale_end, None) if scale is None else scale
        codes = None if scale is None else parameters.get(name + codes_end, None)
        codes = getattr(experts, name + codes_end, None) if codes is None and scale is not None else codes
        if codes is not None:
            break
    else:
        return None
    if not isinstance(codes, torch.Tensor) or not isinstance(scale, torch.Tensor):
        return None
    if _is_cast(codes, scale):
        bad(
            name,
            f"codes and scales that were cast, to {codes.dtype} and {scale.dtype}",
            "those of the checkpoint: load the model anew, and leave the dtype out of .to()",
            "experts_forward",
        )
    if codes.dtype is torch.int8 and scale.is_floating_point() and scale.dtype is not E8M0:
        bad(name, f"fp4 with scales of {scale.dtype}", "scales of e8m0 (scale_fmt ue8m0)", "experts_forward")
    if codes.element_size() != 1 and codes.dtype is not torch.int32:
        return None
    return codes, scale, name + codes_end


def _is_cast(codes: torch.Tensor, scale: torch.Tensor) -> bool:
    """True if an fp8 module was cast (``model.to(dtype)``): its codes are now bf16 or wider, still unscaled."""
    wide = codes.is_floating_point() and codes.element_size() > 1
    return wide and codes.dim() == scale.dim() == 3 and codes.shape[0] == scale.shape[0]


def was_cast(experts: Any) -> bool:
    """True if the module's codes were cast: its own forward would then ignore the scales."""
    parameters = experts.__dict__.get("_parameters", {})
    pairs = (
        [parameters.get(name + end) for end in ends]
        for name in ("gate_up_proj", "up_proj", "down_proj")
        for ends in ENDS
    )
    return any(None not in (codes, scale) and _is_cast(codes, scale) for codes, scale in pairs)


def _state(parameter: torch.Tensor) -> tuple[object, ...]:
    return parameter.data_ptr(), parameter.dtype, parameter.shape, parameter.device


def _keep(cached: _Known, name: str, codes: torch.Tensor, scale: torch.Tensor, weights: ExpertWeights) -> None:
    """Cache weights until one of the parameters from which they were made is deleted."""

    def forget(gone: weakref.ref[torch.Tensor]) -> None:
        entry = cached.get(name)
        if entry is not None and (entry.codes is gone or entry.scale is gone):
            cached.pop(name, None)

    state = (*_state(codes), *_state(scale))
    refs = weakref.ref(codes, forget), weakref.ref(scale, forget)
    cached[name] = _KnownWeights(*refs, state, weights, [version_of(scale)])


def _follow_scale(entry: _KnownWeights, scale: torch.Tensor) -> None:
    """Copy a parameter's scales again, if they were written since and the cached weights have a copy of them."""
    version = version_of(scale)
    if entry.version[0] != version:
        if scale.data_ptr() != entry.weights.scale.data_ptr():
            new_scale = fp8_scale(scale.detach())
            rows = entry.weights.scale
            rows.copy_(new_scale if rows.dim() > 2 else scale_of_rows(new_scale, rows.shape[1]))
            if capturing():  # the copy is captured, and runs in a replay only: so the next call must copy again
                return
            synchronize(entry.weights.scale)
        entry.version[0] = version


def refresh(model: torch.nn.Module) -> None:
    """Read the scales of a model's quantised experts again, after a write that torch does not count.

    Such writes go through ``.data``, come from a kernel of your own, or go to tensors made in inference mode.
    """
    for experts in model.modules():
        _after_load(experts)


def _after_load(experts: Any, *_: Any) -> None:
    """Update everything that was computed from scales now: replaying a captured graph calls no code that could."""
    cached: _Known = experts.__dict__.get(_NAME, _Known())
    for name, entry in list(cached.items()):
        scale = entry.scale()
        if scale is not None and not scale.untyped_storage().nbytes():  # FSDP2 gathers it in the next forward
            cached.pop(name, None)
        elif scale is not None:
            entry.version[0] = -1
            _follow_scale(entry, scale)
            entry.weights.refresh()


def drop_stale(experts: Any) -> None:
    """Drop cached weights whose parameters have moved to other memory, so that the old memory is freed."""
    cached: _Known = experts.__dict__.get(_NAME, _Known())
    for name, entry in list(cached.items()):
        codes, scale = entry.codes(), entry.scale()
        if codes is None or scale is None or entry.state != (*_state(codes), *_state(scale)):
            cached.pop(name, None)


def _by_matrix(experts: Any) -> bool:
    """True if transformers' fp8 has one scale for each matrix: gate, up and down."""
    return getattr(experts, "block_size", ()) is None


def _weights(codes: torch.Tensor, scale: torch.Tensor, *, by_matrix: bool = False) -> ExpertWeights:
    """The weights of parameters in the checkpoint's or the prepared layout. Their values are not checked."""
    prepared = codes.dim() == PREPARED_DIMS
    if codes.dtype is torch.float8_e4m3fn or (prepared and codes.shape[-1] == 4):
        N = codes.shape[1] * (codes.shape[3] if prepared else 1)
        if scale.dim() == 3 and (by_matrix or scale.shape[1:] == (N, 1)):
            return ExpertWeights("fp8_channel_a16", codes, scale_of_rows(fp8_scale(scale), N))
        return ExpertWeights("fp8_block_a16", codes, fp8_scale(scale))
    if scale.is_floating_point() and scale.dtype is not E8M0:
        return ExpertWeights(_int4_format(codes, scale), codes if prepared else codes.view(torch.uint8), scale)
    return ExpertWeights("mxfp4", codes if prepared else codes.view(torch.uint8).flatten(2), scale.view(torch.uint8))


def _int4_format(codes: torch.Tensor, scale: torch.Tensor) -> str:
    """The int4 format that the shapes fit; InputError if they fit none."""
    if codes.dim() != PREPARED_DIMS:
        return int4_format(codes.view(torch.uint8), scale, None)
    K, groups = codes.shape[2] * 64, scale.shape[2] * (scale.shape[-1] if scale.dim() == 5 else 1)
    for group in _GROUPS:
        if groups * group == K:
            return f"int4_g{group}"
    return bad("scale", f"of shape {list(scale.shape)}", f"groups of 32, 64 or 128 of K={K}", "experts_forward")


def prepare_parameters(experts: Any, names: tuple[str, str], wanted: Callable[[ExpertWeights], bool]) -> None:
    """Replace a module's parameters for codes and scales by prepared ones, product by product, if ``wanted`` says so.

    Not replaced are parameters that other code sets for one call, that are prepared already, or that a captured graph
    reads.
    """
    if torch.compiler.is_compiling() or CAPTURED in experts.__dict__ or _is_lent(experts):
        return
    with lock("experts of transformers"):
        for name in names:
            parameters = _parameters(experts, name)
            if parameters is not None and parameters[0].dim() != PREPARED_DIMS:
                _prepare(experts, name, *parameters, wanted)


def _is_lent(experts: Any) -> bool:
    """True if the module has its parameters only during a call: accelerate's offloading, ZeRO or FSDP2."""
    hook = getattr(experts, "_hf_hook", None)
    hooks = getattr(hook, "hooks", (hook,))
    if getattr(experts, "_is_replica", False) or any(getattr(hook, "offload", False) for hook in hooks):
        return True
    return any(hasattr(parameter, "ds_id") for parameter in experts.parameters(recurse=False)) or _is_gathered(experts)


def _is_gathered(experts: Any) -> bool:
    """True if FSDP2 gathers the module's parameters for each forward.

    Only private attributes of torch show that. If a later torch lacks them, experts are prepared once in vain.
    """
    records = getattr(sys.modules.get("torch.distributed._composable_state"), "_module_state_mapping", {})
    for state in [refer() for refer in list(records.values())]:
        groups = getattr(state, "_fsdp_param_groups", None) or [getattr(state, "_fsdp_param_group", None)]
        for group in groups:
            infos = (getattr(parameter, "_module_info", None) for parameter in getattr(group, "fsdp_params", ()))
            if any(experts is info.module for info in infos if info is not None):
                return True
    return False


def _prepare(
    experts: Any,
    name: str,
    codes: torch.Tensor,
    scale: torch.Tensor,
    codes_name: str,
    wanted: Callable[[ExpertWeights], bool],
) -> None:
    parameters = experts._parameters
    scale_name = next((each for each, parameter in parameters.items() if parameter is scale), "")
    if any(type(parameters.get(each)) is not torch.nn.Parameter for each in (codes_name, scale_name)):
        return
    stored = experts.__dict__.setdefault(_STORED, {})
    with torch.inference_mode(False), torch.no_grad():
        weights = checked(_weights(codes.detach(), scale.detach(), by_matrix=_by_matrix(experts)))
        if not wanted(weights):
            return
        prepared = weights.prepare()
        if not prepared.is_prepared:
            return
        if not stored:
            _watch(experts)
        stored[name] = _Stored(
            codes_name, scale_name, (codes.dtype, tuple(codes.shape[1:])), (scale.dtype, tuple(scale.shape[1:]))
        )
        if prepared.scale.dim() < PREPARED_DIMS - 1:  # scales whose layout does not change
            made_scale: torch.nn.Parameter = parameters[scale_name]
        else:
            made_scale = torch.nn.Parameter(prepared.scale, requires_grad=False)
        made_codes = torch.nn.Parameter(prepared.codes, requires_grad=False)
    _exchange(experts, {codes_name: made_codes, scale_name: made_scale})
    _keep(_known(experts), name, made_codes, made_scale, prepared)


def _exchange(experts: Any, replaced: dict[str, torch.nn.Parameter]) -> None:
    """Replace parameters of a module in one step, so that no thread sees some of them."""
    experts.__dict__["_parameters"] = {**experts._parameters, **replaced}


def was_prepared(experts: Any) -> bool:
    """True if parameters of the module were ever prepared."""
    return bool(experts.__dict__.get(_STORED))


def restore(model: torch.nn.Module) -> None:
    """Replace a model's prepared parameters by those of the checkpoint's layout.

    Raises
    ------
    InputError
        in the capture of a CUDA graph.
    """
    for experts in model.modules():
        _restore(experts)


def _restore(experts: Any, names: Iterable[str] | None = None) -> None:
    """Restore the parameters of the products ``names`` of one module, or of all its products."""
    with lock("experts of transformers"):
        for name, stored in experts.__dict__.get(_STORED, {}).items():
            codes, scale = (experts._parameters.get(each) for each in stored[:2])
            if codes is None or scale is None or codes.dim() != PREPARED_DIMS or (names and name not in names):
                continue
            if capturing():
                bad(
                    name,
                    "prepared, and a CUDA graph is being captured",
                    "a call before the capture, which restores the checkpoint's layout",
                    "restore",
                )
            tensors = _translated(stored, codes.detach(), scale.detach())
            _exchange(
                experts, {each: torch.nn.Parameter(tensor, requires_grad=False) for each, tensor in tensors.items()}
            )


def _translated(stored: _Stored, codes: torch.Tensor, scale: torch.Tensor) -> dict[str, torch.Tensor]:
    """The checkpoint-layout tensors of prepared codes and scales, by name; without scales that kept their layout."""
    with torch.inference_mode(False), torch.no_grad():
        plain = _weights(_local(codes), _local(scale)).restore()
        E, (dtype, shape) = plain.codes.shape[0], stored.codes_like
        tensors = {stored.codes: _like(codes, plain.codes.view(dtype).view(E, *shape))}
        if scale.dim() == PREPARED_DIMS - 1:
            dtype, shape = stored.scale_like
            plain_scale = plain.scale.view(dtype) if plain.scale.dtype is torch.uint8 else plain.scale  # others: cast
            tensors[stored.scale] = _like(scale, plain_scale.view(E, *shape))
        return tensors


def _local(tensor: Any) -> torch.Tensor:
    """The tensor, or this rank's experts of a DTensor.

    Raises
    ------
    InputError
        if a DTensor is split other than by whole experts.
    """
    if not hasattr(tensor, "placements"):
        return tensor  # type: ignore[no-any-return]
    if any(place.is_partial() or (place.is_shard() and place.dim != 0) for place in tensor.placements):
        bad(
            "quantised weights",
            f"a DTensor with placements {list(tensor.placements)}",
            "whole experts on each rank: Shard(0)",
            "state_dict",
        )
    return tensor.to_local()  # type: ignore[no-any-return]


def _like(like: Any, tensor: torch.Tensor) -> torch.Tensor:
    """Return ``tensor``, which was computed from ``_local(like)``, as a DTensor split as ``like``."""
    if not hasattr(like, "placements"):
        return tensor
    from torch.distributed.tensor import DTensor

    shape = torch.Size((like.shape[0], *tensor.shape[1:]))
    stride = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    spread: torch.Tensor = DTensor.from_local(
        tensor, like.device_mesh, like.placements, run_check=False, shape=shape, stride=stride
    )
    return spread


def _watch(experts: Any) -> None:
    """Hook the module: state_dict, load_state_dict and other expert implementations see the checkpoint's layout."""
    experts.register_state_dict_post_hook(_after_state)
    experts.register_load_state_dict_pre_hook(_before_load)
    experts.register_forward_pre_hook(_before_forward)


def _after_state(experts: Any, state: dict[str, Any], prefix: str, _: Any) -> None:
    """Put copies of prepared tensors, in the checkpoint's layout and in host memory, into a state_dict."""
    for stored in experts.__dict__.get(_STORED, {}).values():
        codes, scale = (state.get(prefix + name) for name in stored[:2])
        if codes is not None and scale is not None and codes.dim() == PREPARED_DIMS:
            for name, tensor in _translated(stored, codes.detach(), scale.detach()).items():
                state[prefix + name] = tensor if hasattr(tensor, "placements") else tensor.cpu()


def _before_load(experts: Any, state: dict[str, Any], prefix: str, local: dict[str, Any], *_: Any) -> None:
    """Translate a checkpoint's tensors for prepared parameters; if that can't be done, restore the parameters."""
    for name, stored in experts.__dict__.get(_STORED, {}).items():
        held = experts._parameters.get(stored.codes)
        keys = [prefix + each for each in stored[:2]]
        if held is None or held.dim() != PREPARED_DIMS or not any(key in state for key in keys):
            continue
        translated = None if local.get("assign_to_params_buffers") else _prepared_state(experts, stored, state, keys)
        if translated is None:
            _restore(experts, (name,))
        else:
            state.update(translated)


def _prepared_state(
    experts: Any, stored: _Stored, state: dict[str, Any], keys: list[str]
) -> dict[str, torch.Tensor] | None:
    """Write a checkpoint's tensors to prepared parameters, expert by expert, and return these for torch to copy.

    None, and nothing was written, for scales or codes that the prepared layout can't represent.
    """
    parameters = [experts._parameters[name] for name in stored[:2]]
    format = _weights(*(_local(parameter.detach()) for parameter in parameters), by_matrix=_by_matrix(experts)).format
    order, of_fp8 = ORDERS[format], format.startswith("fp8")
    parts = []
    for key, held, (dtype, shape) in zip(keys, parameters, stored[2:], strict=True):
        tensor = state.get(key)
        if tensor is None or tuple(tensor.shape[1:]) != shape:
            continue  # torch itself reports a wrong shape
        with torch.no_grad():
            here = _local(tensor.detach()).to(dtype)
            plain = here if dtype.is_floating_point and dtype is not E8M0 else here.view(torch.uint8)
            if key == keys[1] and not order.room(fp8_scale(here) if of_fp8 else plain):
                return None
            if key == keys[0] and of_fp8 and not plain.is_meta and nan_among(plain):
                return None
            if held.dim() >= PREPARED_DIMS - 1:
                parts.append((key, held.detach(), plain.flatten(2)))
    translated = {}
    for key, held, flat in parts:
        is_codes, to = key == keys[0], _local(held)
        is_ours = to.shape[0] == flat.shape[0] and hasattr(state[key], "placements") == hasattr(held, "placements")
        if not is_ours:
            to = (codes_room if is_codes else scale_room)(format, flat)
        if is_codes:
            move_codes(format, flat, to, mover(format, to))
        else:
            move_scale(format, flat, to)
        translated[key] = held if is_ours else _like(state[key], to)
    return translated


def _before_forward(experts: Any, _: Any) -> None:
    if getattr(experts.config, "_experts_implementation", None) != "pretuned":
        _restore(experts)
