"""The experts of transformers' models: ``experts_implementation="pretuned"``.

    from pretuned.integrations.transformers import register

    register()
    model = AutoModelForCausalLM.from_pretrained("Qwen/Qwen3-30B-A3B", experts_implementation="pretuned")

From 5.8 on, transformers calls a registered function with the experts' module, whose attributes say the layout of its
weights, and with the tokens and their routing. For experts in fp8 with a scale for each 128 x 128 (DeepSeek-V3,
Qwen3-*-FP8), or in DeepSeek-V4's fp4, transformers has a second interface; the function is registered there, too. Other
quantised experts stay quantised if ``packed.py`` loads them so. Only ``register`` imports transformers.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from typing import Any, TypeAlias

import torch

from ...artifacts.errors import InputError, PretunedError
from ...artifacts.records import DType, Layout, Op, Problem
from ...runtime.api.grouped_gemm import grouped_gemm
from ...runtime.api.moe import moe_mlp
from ...runtime.api.routing import sort_routing
from ...runtime.check import tensors as check_tensors
from ...runtime.check.tensors import DTYPES, PLAIN, bad
from ...runtime.dispatch import snapshot as dispatch_snapshot
from ...runtime.driver.device import capturing, local_gpu
from ...runtime.inspect.preload import preload
from ...runtime.launch.quantised import wants_order
from ...runtime.ops.layer import FrozenWeights, Weights, weights_of
from ...runtime.ops.low_rank import Lora
from ...runtime.settings import lock, settings
from ...runtime.weights.expert_weights import ExpertWeights
from ..served_layer import expected_rows
from .adapters import NAME, adapted, adds_to_codes, any_held, held_by
from .gates import recognise
from .injection import watch, watch_loaded
from .packed import keep_compressed_tensors
from .packed import keep_mxfp4 as keep_mxfp4
from .quantised import CAPTURED, drop_stale, prepare_parameters, quantised, was_cast, was_prepared
from .quantised import refresh as refresh
from .quantised import restore as restore
from .usage import watch_models

# A config's names for the number of experts of all ranks.
_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")
_CALLED = "_pretuned_called"  # attribute of a module after its first call

_Adapters: TypeAlias = tuple[Lora | None, Lora | None]

_transformed = torch._C._are_functorch_transforms_active
_COMPUTED = (*DTYPES, torch.float64)
_training: str | None = None  # the argument of ``register``

_log = logging.getLogger(__name__)


def register(training: str | None = None) -> None:
    """Make ``experts_implementation="pretuned"`` known to transformers. A second call changes ``training`` alone.

    Experts of models made from now on are prepared when they come to a GPU (``prepare``), by
    ``from_pretrained(device_map=...)`` or ``model.to``, not in the first step. Experts of compressed-tensors
    checkpoints stay quantised (``keep_compressed_tensors``). If pretuned can't run a module, the module's own code
    runs, and the reason is logged once; ``PRETUNED_STRICT=1`` makes that an error. For each model, one line at level
    INFO names the layers that pretuned runs (``usage.py``).

    Parameters
    ----------
    training
        "fp8" runs experts whose weights require a gradient in fp8, also in evaluation: ``precision`` of ``moe_mlp``.
        Experts with adapters, or that fp8 does not support, keep their precision, and the reason is logged once. With
        None, all experts keep their precision.

    Raises
    ------
    InputError
        for another ``training``.
    ImportError
        for a transformers before 5.8, which has no interface for experts.
    """
    global _training
    if training not in (None, "fp8"):
        raise InputError(f"register: training is {training!r}, wanted 'fp8', or None for the weights' precision")
    from transformers.integrations.moe import ExpertsInterface

    _training = training
    ExpertsInterface.register(NAME, experts_or_own)
    with contextlib.suppress(ImportError):  # transformers before 5.23 lacks it
        from transformers.integrations.finegrained_fp8 import FP8ExpertsInterface

        FP8ExpertsInterface.register(NAME, experts_or_own)
    keep_compressed_tensors()
    _watch_models()


@functools.cache
def _watch_models() -> None:
    from transformers import PreTrainedModel

    torch.nn.modules.module.register_module_module_registration_hook(_seen)
    watch_loaded()
    watch_models(PreTrainedModel)


def _seen(parent: Any, name: str, module: Any) -> None:
    """torch's hook for a module ``parent`` that gets a submodule: patch the classes that experts need.

    The class of an experts' module then prepares experts when they are moved to a GPU. A PEFT class that wraps a model
    then sees quantised experts as weights (``injection.py``).
    """
    if "is_transposed" in getattr(module, "__dict__", ()) and hasattr(module, "_apply_gate"):
        _prepares(type(module))  # type: ignore[arg-type]
    elif name == "model":
        watch(parent, module)


@functools.cache
def _prepares(kind: Any) -> None:
    """Wrap a class once: ``_apply``, which moves parameters, and ``train``, which from_pretrained calls last."""
    for name in ("_apply", "train"):
        setattr(kind, name, _then_prepare(getattr(kind, name)))


def _then_prepare(own: Any) -> Any:
    @functools.wraps(own)
    def call(self: Any, *args: Any, **more: Any) -> Any:
        done = own(self, *args, **more)
        drop_stale(self)
        if _on_gpu(self) and getattr(self.config, "_experts_implementation", None) == NAME:
            prepare(self)
        return done

    return call


def _on_gpu(experts: Any) -> bool:
    parameter = next(experts.parameters(recurse=False), None)
    return parameter is not None and parameter.is_cuda


def prepare(experts: Any) -> None:
    """Load the kernels that an experts' module can need, and prepare its quantised weights for these kernels.

    If that fails, the reason is logged once, and the first call tries again.
    """
    try:
        first = "gate_up_proj" if getattr(experts, "has_gate", True) else "up_proj"
        names, device = (first, "down_proj"), next(experts.parameters(recurse=False)).get_device()
        prepare_parameters(experts, names, lambda w: wants_order(w, device))
        _load(_problems(experts, names, [quantised(experts, name) for name in names]), device)
    except PretunedError as error:
        _tell(f"{type(experts).__name__} is not prepared: {error}")


@functools.cache
def _load(problems: frozenset[Problem], device: int) -> None:
    there, local = dispatch_snapshot.snapshot(), local_gpu(device)
    wanted = [problem for problem in problems if not problem.dtype.quantises_x or there.serves(problem, local)]
    if wanted:
        preload(problems=wanted, device=device)


def _problems(experts: Any, names: tuple[str, str], codes: list[ExpertWeights | None]) -> frozenset[Problem]:
    """The problems of a module: the forward's products, and the gradients' for weights that require a gradient."""
    problems: set[Problem] = set()
    layout = Layout.KN if experts.is_transposed else Layout.NK
    for name, weights in zip(names, codes, strict=True):
        if weights is not None:
            (E, N, K), lies = weights.shape, Layout.NK if weights.is_prepared else Layout.STORED
            problems |= {Problem(Op.FORWARD, dtype, E, N, K, lies) for dtype in weights.kernel_dtypes}
            continue
        w, _ = adapted(experts, name)
        if w.dtype not in DTYPES or type(w) not in PLAIN:
            continue
        E, N, K = w.shape if layout is Layout.NK else (w.shape[0], w.shape[2], w.shape[1])
        if _training == "fp8" and w.requires_grad and not (N % 128 or K % 128):
            problems |= {Problem(Op.FORWARD, DType.FP8_BLOCK, E, *sizes) for sizes in ((N, K), (K, N))}
            problems.add(Problem(Op.DW, DType.FP8_BLOCK, *w.shape))
        problems.add(Problem(Op.FORWARD, DTYPES[w.dtype], E, N, K, layout))
        if w.requires_grad:
            problems.add(Problem(Op.DX, DTYPES[w.dtype], E, N, K, layout))
            problems.add(Problem(Op.DW, DTYPES[w.dtype], *w.shape))
    return frozenset(problems)


@functools.cache
def _tell(line: str) -> None:
    _log.warning("pretuned: %s", line)


def experts_or_own(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """Run ``experts_forward``, or the module's own code if ``experts_forward`` refuses the module."""
    if torch.compiler.is_compiling():
        if "parametrizations" in self._modules:  # a traced read of parametrized weights is wrong
            return torch.compiler.disable(experts_or_own)(self, hidden_states, top_k_index, top_k_weights)  # type: ignore[no-untyped-call,no-any-return]
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    try:
        return experts_forward(self, hidden_states, top_k_index, top_k_weights)
    except InputError as error:
        own = _own(type(self))  # type: ignore[arg-type]
        if own is None or settings().strict or any_held(self) or adds_to_codes(self):  # own code ignores these adapters
            raise
        if was_cast(self):
            raise
        _tell(f"{type(self).__name__} runs its own code: {error}")
        restore(self)
    out: torch.Tensor = own(self, hidden_states, top_k_index, top_k_weights)
    return out


@functools.cache
def _own(kind: Any) -> Any:
    """The module's forward inside transformers' dispatch, or None. FP8Experts are wrapped anew for each layer."""
    forward, dispatch = kind.forward, getattr(kind.forward, "__code__", None)
    if not hasattr(forward, "__wrapped__"):
        return None
    while hasattr(forward, "__wrapped__") and forward.__code__ is dispatch:
        forward = forward.__wrapped__
    return forward


def experts_forward(
    self: Any, hidden_states: torch.Tensor, top_k_index: torch.Tensor, top_k_weights: torch.Tensor
) -> torch.Tensor:
    """out[t] = sum over slots s of weight[t, s] * expert[t, s](hidden[t]); an id outside [0, E) takes no part.

    ``self`` is the experts' module: gate_up_proj (up_proj without a gate) and down_proj, [E, N, K] or, with
    ``is_transposed``, [E, K, N]. If a weight has an adapter by PEFT's ``target_parameters``, A and B are multiplied
    apart, and W + s B A is not computed (``adapters.py``). hidden_states is [T, H], top_k_index and top_k_weights are
    [T, k]. A product is computed in the dtype of its weight, to which its input and bias are cast; with quantised
    weights (``quantised.py``), in the tokens' dtype.

    One ``moe_mlp`` runs if the module's code between its products is transformers' own code for an activation that
    ``activate`` has (``gates.py``). Otherwise, and if torch.compile traces the call, two grouped GEMMs run around the
    module's own code. Inside torch.func's transforms torch computes each slot with a copy of its expert's weights.

    Raises
    ------
    InputError
        for weights in an unsupported quantised format, or split over ranks other than by whole experts.
    """
    # Older modules lack these attributes.
    gated, normed = getattr(self, "has_gate", True), getattr(self, "has_post_expert_norm", False)
    compiling = torch.compiler.is_compiling()
    sliced = not compiling and _transformed()
    first_name = "gate_up_proj" if gated else "up_proj"
    layer_weights, lora = _weights(self, first_name, hidden_states.dtype, as_read=compiling or sliced)
    w1, w2, b1, b2 = layer_weights
    for name, tensor in (("hidden_states", hidden_states), ("top_k_weights", top_k_weights)):
        if type(tensor) not in PLAIN and _is_spread(tensor):
            bad(name, _spread(tensor), f"a torch.Tensor of this rank: pass {name}.to_local()", "experts_forward")
    first, second = (hidden_states.dtype if isinstance(w, ExpertWeights) else w.dtype for w in (w1, w2))
    hidden = hidden_states.to(first)
    act = None if compiling or sliced or normed or first is not second else recognise(self, gated)
    if act is not None:
        out = _in_training(
            self,
            (w1, w2, *lora),
            functools.partial(
                moe_mlp,
                hidden,
                w1,
                w2,
                top_k_index,
                top_k_weights,
                act.function,
                gated=gated,
                interleaved=act.interleaved,
                gate_up_bias=b1,
                down_bias=b2,
                w_layout="kn" if self.is_transposed else "nk",
                expected_rows=_expected(self, top_k_index),
            ),
            lora,
        )
        return out.to(hidden_states.dtype)
    (T, k), E = top_k_index.shape, w1.shape[0]
    ids = top_k_index.long()
    outside = (ids < 0) | (ids >= E)
    if sliced:
        y = _slot_by_slot(self, hidden, layer_weights, ids.masked_fill(outside, 0), gated, second, lora)
    else:
        y = _grouped(self, hidden, layer_weights, top_k_index, gated, second, lora)
    wide = torch.promote_types(y.dtype, torch.float32)
    if normed:  # the norm's result for a row without an expert is dropped
        y = self.post_expert_norm(y).masked_fill(outside.reshape(-1, 1), 0)
    weights = top_k_weights.masked_fill(outside, 0)[..., None].to(wide)
    return (y.view(T, k, -1).to(wide) * weights).sum(1).to(hidden_states.dtype)


def _in_training(experts: Any, weights: tuple[Any, ...], call: Any, lora: Any) -> torch.Tensor:
    """Run a call in ``register``'s precision if all weights require a gradient and none has an adapter.

    ``weights`` are the call's weights and adapters.
    """
    learns = _training is not None and not torch.compiler.is_compiling()
    if learns and all(w is None or (isinstance(w, torch.Tensor) and w.requires_grad) for w in weights):
        try:
            return call(precision=_training)  # type: ignore[no-any-return]
        except InputError as error:
            if settings().strict:
                raise
            _tell(f"{type(experts).__name__} is not trained in {_training}: {error}")
    return call(lora=lora)  # type: ignore[no-any-return]


def _between(experts: Any, h: torch.Tensor, gated: bool, dtype: torch.dtype) -> torch.Tensor:
    """The module's own code between its products, in the second weight's dtype, as transformers runs it."""
    a: torch.Tensor = experts._apply_gate(h) if gated else experts.act_fn(h)
    return a.to(dtype)


def _grouped(
    experts: Any,
    hidden: torch.Tensor,
    layer_weights: Weights | FrozenWeights,
    ids: torch.Tensor,
    gated: bool,
    dtype: torch.dtype,
    lora: _Adapters,
) -> torch.Tensor:
    """y [T*k, H] of every slot by two grouped GEMMs; zeros for a slot without an expert."""
    w1, w2, b1, b2 = layer_weights
    k, layout = ids.shape[1], "kn" if experts.is_transposed else "nk"
    routing = sort_routing(ids, w1.shape[0])
    rows, m_sizes, expected = routing.gather_indices, routing.m_sizes, _expected(experts, ids)
    # Rows without an expert are zero: nothing reads them, but the gradient of the module's code must not make them NaN.
    zeroes = torch.is_grad_enabled()
    first = functools.partial(
        grouped_gemm,
        hidden,
        w1,
        m_sizes,
        k,
        rows,
        permute_x=True,
        w_layout=layout,
        bias=b1,
        zero_tail=zeroes,
        expected_rows=expected,
    )
    h = _in_training(experts, (w1, lora[0]), first, lora[0])
    a = _between(experts, h, gated, dtype)
    second = functools.partial(
        grouped_gemm,
        a,
        w2,
        m_sizes,
        k,
        rows,
        permute_y=True,
        is_first_gemm=False,
        w_layout=layout,
        bias=b2,
        expected_rows=expected,
    )
    return _in_training(experts, (w2, lora[1]), second, lora[1])


def _expected(experts: Any, ids: torch.Tensor) -> int | None:
    """The expected number of ids for this rank's experts, if other ranks have the rest; None if every id is for them.

    With one id for each token, every id is for this rank: transformers' all-to-all sends tokens so, only to the rank of
    their expert.
    """
    tokens, top_k = ids.shape
    if not getattr(experts, "_is_expert_parallel", False) or top_k == 1:
        return None
    config = getattr(experts, "config", None)
    counts = (getattr(config, name, None) for name in _COUNTS)
    total = next((count for count in counts if isinstance(count, int)), 0)
    return expected_rows(tokens, top_k, experts.num_experts, total)


def _slot_by_slot(
    experts: Any,
    hidden: torch.Tensor,
    layer_weights: Weights | FrozenWeights,
    ids: torch.Tensor,
    gated: bool,
    dtype: torch.dtype,
    lora: _Adapters,
) -> torch.Tensor:
    """y of every slot like ``_grouped``, by operations that torch.func's transforms know; ids in [0, E)."""
    w1, w2 = (_whole(w, adapter, dtype) for w, adapter in zip(layer_weights[:2], lora, strict=True))
    b1, b2 = layer_weights[2:]
    k, chosen = ids.shape[1], ids.reshape(-1)

    def product(x: torch.Tensor, w: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        w = w[chosen]
        y = torch.bmm(x[:, None], w if experts.is_transposed else w.transpose(1, 2))[:, 0]
        return y if bias is None else y + bias[chosen]

    h = product(hidden.repeat_interleave(k, 0), w1, b1)
    return product(_between(experts, h, gated, dtype), w2, b2)


def _whole(w: torch.Tensor | ExpertWeights, lora: Lora | None, dtype: torch.dtype) -> torch.Tensor:
    """W + scale B A of quantised weights, [E, N, K]. Others contain their adapter, and are returned unchanged."""
    if not isinstance(w, ExpertWeights):
        return w
    dense = w.dequantize(dtype)
    return dense if lora is None else dense + lora.scale * (lora.B.to(dtype) @ lora.A.to(dtype))


def _weights(
    experts: Any, first: str, dtype: torch.dtype, *, as_read: bool
) -> tuple[Weights | FrozenWeights, _Adapters]:
    """The module's weights as this rank has them, its biases in their dtypes, and the adapters of the weights.

    InputError for unusable tensors. With quantised weights, biases are cast to ``dtype``. With ``as_read`` weights are
    read with their adapters merged, except quantised weights, whose adapters are returned.
    """
    compiling = torch.compiler.is_compiling()
    gate_up, down = quantised(experts, first), quantised(experts, "down_proj")
    if gate_up is not None and not (gate_up.is_prepared or compiling) and _prepare_first(experts, gate_up):
        gate_up, down = quantised(experts, first), quantised(experts, "down_proj")
    if gate_up is not None and down is not None:
        _check_held(experts, first, gate_up.shape[0])
        biases = (
            getattr(experts, f"{name}_bias").to(dtype) if experts.has_bias else None for name in (first, "down_proj")
        )
        return weights_of(gate_up, down, *biases), (held_by(experts, first), held_by(experts, "down_proj"))
    names = first, "down_proj"
    pairs = [(getattr(experts, name), None) if as_read else adapted(experts, name) for name in names]
    w1, w2 = (_usable(experts, name, w) for name, (w, _) in zip(names, pairs, strict=True))
    lora = pairs[0][1], pairs[1][1]
    if not experts.has_bias:
        return Weights(w1, w2, None, None), lora
    b1, b2 = (_usable(experts, f"{name}_bias", getattr(experts, f"{name}_bias")) for name in names)
    return Weights(w1, w2, b1.to(w1.dtype), b2.to(w2.dtype)), lora


def _prepare_here(w: ExpertWeights) -> bool:
    return check_tensors.on_gpu(w.codes)


def _captures(w: ExpertWeights) -> bool:
    return check_tensors.on_gpu(w.codes) and capturing()


def _prepare_first(experts: Any, w: ExpertWeights) -> bool:
    """Prepare a module in its first call, if no hook has done so before. Returns whether the weights changed."""
    if _captures(w):
        experts.__dict__[CAPTURED] = True
        return False
    if _CALLED in experts.__dict__ or not _prepare_here(w):
        return False
    with lock("first call of experts"):  # one thread prepares, the others wait
        if _CALLED not in experts.__dict__ and not was_prepared(experts):
            prepare(experts)
        experts.__dict__[_CALLED] = True
    return True


def _usable(experts: Any, name: str, tensor: torch.Tensor) -> torch.Tensor:
    if tensor.dtype not in _COMPUTED:
        bad(
            name,
            f"{tensor.dtype}",
            "torch.bfloat16, torch.float16, torch.float32 (the CPU: torch.float64). "
            "Quantised weights don't run here: dequantise them, or leave these experts to transformers' own "
            "code with model.set_experts_implementation('eager')",
            "experts_forward",
        )
    if type(tensor) not in PLAIN and _is_spread(tensor):
        tensor = _of_this_rank(experts, name, tensor)
    _check_held(experts, name, tensor.shape[0])
    return tensor


def _check_held(experts: Any, name: str, many: int) -> None:
    """Raise InputError if the ids are for another number of experts than this module has."""
    held = getattr(experts, "num_experts", None)
    if getattr(experts, "_is_expert_parallel", False) and held is not None and held != many:
        # Ids are relative to this rank's experts: an id of another rank's expert would select one of these.
        bad(
            name,
            f"{many} experts",
            f"the module's num_experts, {held}: it decides which ids are here. "
            "Where experts don't divide by the ranks, set num_experts to those that each rank has",
            "experts_forward",
        )


def _is_spread(tensor: torch.Tensor) -> bool:
    """True if ``tensor`` is a DTensor, of which this rank has a part."""
    tensors = sys.modules.get("torch.distributed.tensor")  # imported if there is any DTensor
    return tensors is not None and isinstance(tensor, tensors.DTensor)


def _spread(tensor: Any) -> str:
    placements, mesh = list(tensor.placements), tensor.device_mesh.shape
    return f"a DTensor of {list(tensor.shape)} with placements {placements} over a mesh of {mesh}"


def _of_this_rank(experts: Any, name: str, tensor: Any) -> torch.Tensor:
    """This rank's part of a DTensor that is split by whole experts, with ids relative to this rank; else InputError."""
    shard = sys.modules["torch.distributed.tensor"].Shard
    by_experts = all(
        many == 1 or (type(place) is shard and place.dim == 0)
        for place, many in zip(tensor.placements, tensor.device_mesh.shape, strict=True)
    )
    local: torch.Tensor = tensor.to_local()
    held = getattr(experts, "num_experts", None)
    if not by_experts or held != local.shape[0]:
        bad(
            name,
            f"{_spread(tensor)} ({local.shape[0]} experts on this rank; the module's num_experts is {held})",
            "a torch.Tensor, or Shard(0) with num_experts set to this rank's experts and ids that count these: "
            "gather it (FSDP: unshard the module), or shard whole experts (transformers: "
            "DistributedConfig(ep_size=...))",
            "experts_forward",
        )
    return local
