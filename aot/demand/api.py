"""Tune a layer on demand: return its configs, measuring them now if nobody has on this GPU.

    from pretuned.aot import get_or_autotune_moe_kernels
    fwd, dX, dW = get_or_autotune_moe_kernels(128, 2048, 768, 8, torch.bfloat16)
    y = grouped_gemm(x, w, m_sizes, kernel_config_fwd=fwd, kernel_config_bwd_dX=dX, kernel_config_bwd_dW=dW)

The configs come from memory or its files, else from choices measured on this very GPU, else from the tuner, one process
at a time, else from the runtime's ordinary choice. Errors on the way are logged, and cost only the tuning.
"""

from __future__ import annotations

from ...artifacts.errors import InputError
from ...artifacts.records import PLAIN_DTYPES, DType, Layout, LocalGpu, Op, bucket_of
from ...kernels.registry import ENTRIES
from ...runtime.driver.device import current_device, local_gpu
from ...runtime.inspect.query import dtype_of_weights
from ...runtime.weights.expert_weights import ExpertWeights
from ..models.layer import ExpertLayer
from ..plan.plan import without_code
from .tuner import CacheKey, Configs, OnDemand, dtype_of, measure_in_child, planned_for, shape_of

_WHO = "get_or_autotune_moe_kernels"
_default = OnDemand(measure_in_child)
tune_call = _default.tune_call
load_cached_config = _default.load
save_cached_config = _default.save
clear_cache = _default.clear


def get_or_autotune_moe_kernels(
    num_experts: int,
    hidden_dim: int,
    intermediate_dim: int,
    top_k: int,
    dtype: object,
    force_autotune: bool = False,
    seq_len: int = 8192,
    weights: str | ExpertWeights | None = None,
) -> Configs:
    """The configs of a gated MoE layer's two grouped GEMMs on torch's current GPU: (forward, dX, dW).

    The first GEMM's weight is [num_experts, 2 * intermediate_dim, hidden_dim], the second's [num_experts,
    hidden_dim, intermediate_dim]; seq_len tokens make seq_len * top_k rows.

    Parameters
    ----------
    num_experts, hidden_dim, intermediate_dim, top_k
        E, H, I, and the experts of a token.
    dtype
        The dtype of x: a torch dtype, or its name: bf16, fp16, fp32.
    force_autotune
        Measure again, even if there are measured configs.
    seq_len
        Tokens of one step. Row counts with one nearest power of two share configs.
    weights
        The format of quantised weights, as a spec of ``aot build`` names it (``mxfp4``, ``fp8_block``, ...), or
        ``ExpertWeights`` of it, prepared if this GPU has kernels for that; x is bf16 then. The forward and dX are
        tuned; quantised weights are frozen, so the pair of dW is empty.

    Returns
    -------
    tuple[KernelPair, KernelPair, KernelPair]
        For ``kernel_config_fwd``, ``kernel_config_bwd_dX`` and ``kernel_config_bwd_dW`` of ``grouped_gemm``;
        its ``is_first_gemm`` picks one of the pair.

    Raises
    ------
    InputError
        for sizes that no layer can have, a dtype or weights that no kernel computes, or weights in a checkpoint's
        layout if the measured kernels are for prepared weights.
    HostError
        if there is no GPU.
    ProblemNotInBundle
        with PRETUNED_STRICT=1 and PRETUNED_DISABLE_AUTOTUNE=1, if no bundle was built for the layer.

    Notes
    -----
    It looks in memory and in the files of the overlay, then for choices measured on this very GPU. Then it tunes into
    the overlay, one process at a time while others wait and read. If that fails, or with PRETUNED_DISABLE_AUTOTUNE=1
    or PRETUNED_TRUSTED_KEYS, it returns the runtime's ordinary choice, and does not cache it.
    """
    device = current_device()
    key = cache_key(num_experts, hidden_dim, intermediate_dim, top_k, dtype, seq_len, device, weights)
    if isinstance(weights, ExpertWeights):
        refuse_unprepared(weights, key)
    return _default.configs(key, device, force=force_autotune)


def cache_key(
    num_experts: int,
    hidden_dim: int,
    intermediate_dim: int,
    top_k: int,
    dtype: object,
    seq_len: int = 8192,
    device: int | None = None,
    weights: str | ExpertWeights | None = None,
) -> CacheKey:
    """The key of a layer's cached configs; the parameters are those of ``get_or_autotune_moe_kernels``.

    Raises
    ------
    InputError, HostError
        as ``get_or_autotune_moe_kernels``.
    """
    return key_for(
        local_gpu(current_device() if device is None else device),
        num_experts,
        hidden_dim,
        intermediate_dim,
        top_k,
        dtype,
        seq_len,
        weights,
    )


def key_for(
    local: LocalGpu,
    num_experts: int,
    hidden_dim: int,
    intermediate_dim: int,
    top_k: int,
    dtype: object,
    seq_len: int,
    weights: object = None,
) -> CacheKey:
    """The cache key of a layer on the GPU ``local``."""
    try:
        x_dtype = dtype_of(dtype)
    except ValueError:
        known_names = ", ".join(plain.value for plain in DType if plain in PLAIN_DTYPES)
        raise InputError(f"dtype is {dtype!r}, wanted one of {known_names}") from None
    sizes = {
        "num_experts": num_experts,
        "hidden_dim": hidden_dim,
        "intermediate_dim": intermediate_dim,
        "top_k": top_k,
        "seq_len": seq_len,
    }
    format_ = x_dtype.value if weights is None else _format_of(weights, x_dtype)
    for name, value in sizes.items():
        if not isinstance(value, int) or isinstance(value, bool) or value < 1:
            raise InputError(f"{name} is {value!r}, wanted a whole number from 1 on")
    gpu = local.gpu
    key = CacheKey(
        gpu.name,
        local.sm,
        gpu.sm_count,
        round(gpu.memory_mib / 1024),
        tuple(sorted((name, entry.revision) for name, entry in ENTRIES.items())),
        tuple(op.value for op in Op),
        num_experts,
        hidden_dim,
        intermediate_dim,
        top_k,
        format_,
        bucket_of(seq_len * top_k),
    )
    layer = ExpertLayer(num_experts, top_k, hidden_dim, intermediate_dim)
    shape = shape_of(key)
    if contradictions := [*layer.contradictions(), *shape.contradictions(), *without_code([shape])]:
        raise InputError("; ".join(contradictions))
    return key


def refuse_unprepared(weights: ExpertWeights, key: CacheKey) -> None:
    """Refuse weights that would run none of the kernels measured for the key.

    Raises
    ------
    InputError
        for weights in a checkpoint's layout if the kernels are for prepared weights.
    """
    ordered = (problem.layout is not Layout.STORED for problem in planned_for(key, shape_of(key)).problems)
    if not weights.is_prepared and any(ordered):
        raise InputError(
            f"{_WHO}: these {weights.format} weights are in the layout of a checkpoint, and the kernels measured here "
            f"are for prepared weights: pass w.prepare(), and call with it, or weights={weights.format!r}"
        )


def _format_of(weights: object, dtype: DType) -> str:
    """The requested format; InputError if x's dtype does not go with it."""
    asked = weights.format if isinstance(weights, ExpertWeights) else weights
    of_products = dtype_of_weights(asked, _WHO)
    wanted = DType.BF16 if of_products.quantised else of_products
    if dtype is not wanted:
        raise InputError(f"{_WHO}: dtype is {dtype.value}, wanted {wanted.value}: x of {asked} weights is of that")
    return str(asked)
