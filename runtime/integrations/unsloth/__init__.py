"""Drop-in replacements for the documented calls of Unsloth's MoE kernels: change the import, and pretuned runs them.

    from pretuned.integrations.unsloth import grouped_gemm, get_or_autotune_moe_kernels

Written from Unsloth's documentation alone. The tiles, warps, stages and TMA of a call are preferences: the nearest
config that a bundle has for the call runs, and is logged at level DEBUG. Nothing of Unsloth is imported; Triton and
``pretuned.aot`` are imported only for tuning.
"""

from __future__ import annotations

import dataclasses
import importlib
import logging
from typing import TYPE_CHECKING, Any, TypeAlias

import torch

from ...artifacts.errors import HostError
from ...artifacts.records import DType, Fusion, Layout, Op, Problem
from ...runtime.api.gradients import grouped_gemm_dW as _dW
from ...runtime.api.gradients import grouped_gemm_dX as _dX
from ...runtime.api.grouped_gemm import grouped_gemm as _grouped_gemm
from ...runtime.check.tensors import DTYPES
from ...runtime.dispatch import snapshot as dispatch_snapshot
from ...runtime.dispatch.pin import KernelPair, Preference, nearest
from ...runtime.driver.device import local_gpu
from .cache import clear_cache, load_cached_config, save_cached_config

if TYPE_CHECKING:
    from ...kernels.spec import Config

__all__ = [
    "GroupedGemm",
    "KernelConfig",
    "KernelConfigBackward_dW",
    "KernelConfigBackward_dX",
    "KernelConfigForward",
    "clear_cache",
    "get_or_autotune_moe_kernels",
    "grouped_gemm",
    "grouped_gemm_dW",
    "grouped_gemm_dX",
    "grouped_gemm_forward",
    "load_cached_config",
    "save_cached_config",
]

_log = logging.getLogger(__name__)
_logged: set[str] = set()


@dataclasses.dataclass
class KernelConfig:
    """A preferred kernel: a tile, its warps and stages. Settings that pretuned lacks change nothing.

    ``permute_x``, ``permute_y`` and ``fuse_mul_post`` are parameters of the call; ``flatten`` and
    ``use_tma_store`` have no counterpart here.
    """

    BLOCK_SIZE_M: int = 32
    BLOCK_SIZE_N: int = 32
    BLOCK_SIZE_K: int = 32
    num_warps: int = 4
    num_stages: int = 2
    flatten: bool = True
    permute_x: bool = False
    permute_y: bool = False
    fuse_mul_post: bool = False
    use_tma_store: bool = False

    @property
    def knobs(self) -> dict[str, int]:
        """The preferred values, by the names of a ``Config``'s knobs."""
        from ...kernels.spec import Loads

        named = {"block_m": self.BLOCK_SIZE_M, "block_n": self.BLOCK_SIZE_N, "block_k": self.BLOCK_SIZE_K}
        loads = any(getattr(self, f"use_tma_load_{name}", False) for name in ("w", "x", "dy"))
        more = {"num_warps": self.num_warps, "num_stages": self.num_stages}
        return {**named, **more, "loads": Loads.TMA if loads else Loads.POINTER}


@dataclasses.dataclass
class KernelConfigForward(KernelConfig):
    """A preferred kernel for y."""

    use_tma_load_w: bool = False
    use_tma_load_x: bool = False


@dataclasses.dataclass
class KernelConfigBackward_dX(KernelConfig):  # noqa: N801, the documented name
    """A preferred kernel for dX."""

    use_tma_load_dy: bool = False
    use_tma_load_w: bool = False


@dataclasses.dataclass
class KernelConfigBackward_dW(KernelConfig):  # noqa: N801, the documented name
    """A preferred kernel for dW."""

    use_tma_load_dy: bool = False
    use_tma_load_x: bool = False


_ELSEWHERE = {"debug", "use_tma_load_w", "use_tma_load_x", "use_tma_load_dy"}  # accepted by forward, dX and dW

_AnyConfig: TypeAlias = "KernelConfig | KernelPair | Preference | Config | None"


def grouped_gemm(
    X: torch.Tensor,
    W: torch.Tensor,
    m_sizes: torch.Tensor,
    topk: int,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    topk_weights: torch.Tensor | None = None,
    fuse_mul_post: bool = False,
    kernel_config_fwd: _AnyConfig = None,
    kernel_config_bwd_dX: _AnyConfig = None,
    kernel_config_bwd_dW: _AnyConfig = None,
    autotune: bool = False,
    is_first_gemm: bool = True,
    dX_only: bool = False,
    dW_only: bool = False,
) -> torch.Tensor:
    """y = X @ W.T of each expert, like ``pretuned.runtime.grouped_gemm``: X [M or T, K], W [E, N, K] or [E*N, K].

    A ``kernel_config`` may be one of the KernelConfig classes here, what ``get_or_autotune_moe_kernels`` returned, or
    all that ``pretuned.runtime.grouped_gemm`` takes.

    Raises
    ------
    InputError
        for a tensor that can't be used, or parameters that make no sense together.
    """
    fwd, dX, dW = (
        _resolved(config, op, X, W, m_sizes)
        for config, op in zip((kernel_config_fwd, kernel_config_bwd_dX, kernel_config_bwd_dW), Op, strict=True)
    )
    return _grouped_gemm(
        X,
        W,
        m_sizes,
        topk,
        gather_indices,
        permute_x,
        permute_y,
        topk_weights,
        fuse_mul_post,
        fwd,
        dX,
        dW,
        autotune and _can_tune(X),
        is_first_gemm,
        dX_only,
        dW_only,
    )


class _Applied:
    """The documented autograd function: ``GroupedGemm.apply`` takes the parameters of ``grouped_gemm``."""

    apply = staticmethod(grouped_gemm)


GroupedGemm = _Applied


def grouped_gemm_forward(
    X: torch.Tensor,
    W: torch.Tensor,
    topk: int,
    m_sizes: torch.Tensor,
    gather_indices: torch.Tensor | None = None,
    topk_weights: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    fuse_mul_post: bool = False,
    autotune: bool = False,
    **knobs: Any,
) -> torch.Tensor:
    """y of ``grouped_gemm``, without a gradient.

    ``knobs`` are the documented knobs: BLOCK_SIZE_M, BLOCK_SIZE_N, BLOCK_SIZE_K, num_warps, num_stages, use_tma_load_w,
    use_tma_load_x, use_tma_store, flatten and debug. Without any, the bundles' best choice runs. ``grouped_gemm_dX``
    and ``grouped_gemm_dW`` also accept each other's use_tma_load_*, which then change nothing.

    Raises
    ------
    InputError
        as ``grouped_gemm``.
    TypeError
        for another keyword.
    """
    config = None if autotune else _preferred(KernelConfigForward, "grouped_gemm_forward", knobs)
    with torch.no_grad():
        return grouped_gemm(
            X,
            W,
            m_sizes,
            topk,
            gather_indices,
            permute_x,
            permute_y,
            topk_weights,
            fuse_mul_post,
            kernel_config_fwd=config,
            autotune=autotune,
        )


def grouped_gemm_dX(
    dY: torch.Tensor,
    W: torch.Tensor,
    *,
    m_sizes: torch.Tensor,
    topk: int,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    autotune: bool = False,
    **knobs: Any,
) -> torch.Tensor:
    """The gradient of X, as ``pretuned.runtime.grouped_gemm_dX``: [M, K], or [T, K] with ``permute_x``.

    With ``permute_x`` a token's slots are summed.

    ``knobs``: as ``grouped_gemm_forward``, with use_tma_load_dy and use_tma_load_w.

    Raises
    ------
    InputError, TypeError
        as ``grouped_gemm_forward``.
    """
    config = None if autotune else _preferred(KernelConfigBackward_dX, "grouped_gemm_dX", knobs)
    pin = _resolved(config, Op.DX, dY, W, m_sizes)
    return _dX(dY, W, m_sizes, topk, gather_indices, permute_x, permute_y, kernel_config_bwd_dX=pin)


def grouped_gemm_dW(
    X: torch.Tensor,
    dY: torch.Tensor,
    *,
    m_sizes: torch.Tensor,
    topk: int,
    gather_indices: torch.Tensor | None = None,
    permute_x: bool = False,
    permute_y: bool = False,
    autotune: bool = False,
    **knobs: Any,
) -> torch.Tensor:
    """The gradient of W [E, N, K], as ``pretuned.runtime.grouped_gemm_dW``.

    ``knobs``: as ``grouped_gemm_forward``, with use_tma_load_dy and use_tma_load_x.

    Raises
    ------
    InputError, TypeError
        as ``grouped_gemm_forward``.
    """
    config = None if autotune else _preferred(KernelConfigBackward_dW, "grouped_gemm_dW", knobs)
    pin = _resolved(config, Op.DW, dY, None, m_sizes, X.shape[-1])
    return _dW(dY, X, m_sizes, topk, gather_indices, permute_x, permute_y, kernel_config_bwd_dW=pin)


def get_or_autotune_moe_kernels(
    num_experts: int,
    hidden_dim: int,
    intermediate_dim: int,
    top_k: int,
    dtype: torch.dtype,
    force_autotune: bool = False,
    seq_len: int = 8192,
) -> tuple[KernelPair, KernelPair, KernelPair]:
    """The configs of a gated layer's two products for the forward, dX and dW, as ``pretuned.aot`` returns them.

    If ``pretuned.aot`` can't tune (no GPU, or not installed), warn once and return empty pairs, with which the bundles'
    own choice runs.

    Raises
    ------
    InputError
        on a GPU, for sizes that no layer can have, or a dtype that no kernel computes.
    """
    why = _no_tuner()
    if why is None:
        try:
            pairs: tuple[KernelPair, KernelPair, KernelPair] = importlib.import_module(
                "pretuned.aot"
            ).get_or_autotune_moe_kernels(
                num_experts, hidden_dim, intermediate_dim, top_k, dtype, force_autotune, seq_len
            )
            return pairs
        except HostError as error:
            why = str(error)
    _warn_once(f"get_or_autotune_moe_kernels: {why}: the configs are the ordinary choices")
    fwd, dX, dW = (KernelPair(op) for op in Op)
    return fwd, dX, dW


def _no_tuner() -> str | None:
    """Why nothing can be tuned here; None if tuning works."""
    try:
        importlib.import_module("pretuned.aot")  # registers a tuner; the runtime has no static import of it
    except ImportError as error:
        return f"no builder is installed ({error}; pip install 'pretuned[aot]')"
    return None if torch.cuda.is_available() else "no CUDA GPU here"


def _can_tune(X: torch.Tensor) -> bool:
    if not (isinstance(X, torch.Tensor) and X.is_cuda):
        return False
    why = _no_tuner()
    if why is not None:
        _warn_once(f"autotune=True: {why}: the ordinary choices run")
    return why is None


def _warn_once(text: str) -> None:
    if text not in _logged:
        _logged.add(text)
        _log.warning("pretuned: %s", text)


def _preferred(kind: type[KernelConfig], call: str, knobs: dict[str, Any]) -> KernelConfig | None:
    """The config by a call's documented keywords; None if the call has none of them.

    Keywords of the other calls are about tensors that this call does not load: they change nothing.
    """
    accepted = {field.name for field in dataclasses.fields(kind)} - {"permute_x", "permute_y", "fuse_mul_post"}
    unknown = sorted(knobs.keys() - accepted - _ELSEWHERE)
    if unknown:
        raise TypeError(
            f"{call}() got unexpected keyword arguments {unknown}, wanted of {sorted(accepted | _ELSEWHERE)}"
        )
    idle = sorted(knobs.keys() - accepted)
    if idle:
        _log.debug("pretuned: %s: %s changes nothing there", call, ", ".join(idle))
    knobs = {name: value for name, value in knobs.items() if name in accepted}
    return kind(**knobs) if knobs else None


def _resolved(config: Any, op: Op, x: torch.Tensor, w: torch.Tensor | None, m_sizes: torch.Tensor, K: int = 0) -> Any:
    """Return the runtime's config: for a KernelConfig the nearest in the bundles, anything else unchanged.

    x is dY for the gradients. If w is None, K is the columns of X.
    """
    if not isinstance(config, KernelConfig):
        return config
    if not (isinstance(x, torch.Tensor) and x.is_cuda and x.dtype in DTYPES):
        _log.debug("pretuned: %s: no kernel is launched, nothing to choose", config)
        return None
    E, columns = m_sizes.shape[0], x.shape[-1]
    if w is None:
        N = columns
    else:
        N, K = w.numel() // (E * w.shape[-1]) if E and w.shape[-1] else 0, w.shape[-1]
    return _nearest(config, op, DTYPES[x.dtype], (E, N, K), x.get_device())


def _nearest(kernel_config: KernelConfig, op: Op, dtype: DType, sizes: tuple[int, int, int], device: int) -> Preference:
    snapshot, local, knobs = dispatch_snapshot.snapshot(), local_gpu(device), kernel_config.knobs
    key = (op, dtype, sizes, device, tuple(knobs.items()))
    preference: Preference | None = snapshot.preferences.get(key)
    if preference is None:
        configs = []
        for form in (Fusion.NONE, Fusion.SCATTER, Fusion.GATHER):
            if op is Op.DW and form is not Fusion.NONE:
                continue  # dW has no fusions
            config = nearest(snapshot, knobs, Problem(op, dtype, *sizes, Layout.NK, form), local, aligned=True)
            if config is not None:
                configs.append((form, config))
        preference = snapshot.preferences[key] = Preference(tuple(configs))
        _log.debug(
            "pretuned: %s of %s E=%d N=%d K=%d: the nearest are %s",
            kernel_config,
            op.value,
            *sizes,
            ", ".join(str(config) for _, config in configs) or "none",
        )
    return preference
