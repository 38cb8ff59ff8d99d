"""Copy tokens' rows into the sorted order, and sum each token's sorted rows: by a bundle's kernel, or torch."""

from __future__ import annotations

import torch

from ...artifacts.records import RowOp
from ...kernels.rowops import BIASED
from ..driver.device import on
from ..launch import gather as launch_gather
from ..launch import rowops
from ..launch.program import EAGER, EagerExecutor, Step

_CHUNK_ELEMENTS = 1 << 24


def gather(
    x: torch.Tensor,
    index: torch.Tensor,
    top_k: int,
    bounds: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
) -> torch.Tensor:
    """x[index[i] // top_k] of x [T, H], [M, H]; ``index`` [M] int32 or int64 is within [0, T*top_k).

    With ``bounds`` (``routing.Routing``) rows of no expert hold anything.
    """
    M, H = index.shape[0], x.shape[1]
    x = x.contiguous()
    launch = rowops.for_rows(RowOp.GATHER, H, M, x)
    if launch is None:
        executor.unplanned()
        return x.index_select(0, index // top_k if top_k > 1 else index)
    step = launch_gather.step(
        launch, x, top_k=top_k, M=M, index_step=2 if index.dtype is torch.int64 else 1, used=rowops.used(bounds)
    )
    with on(x.get_device()):
        out: torch.Tensor = executor.new(x, (M, H))
        executor.run(step, M, {"x": x, "index": index, "bounds": bounds, "rows": out})
    return out


def combine(
    y: torch.Tensor,
    places: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None = None,
    experts: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    executor: EagerExecutor = EAGER,
    *,
    into: torch.Tensor | None = None,
) -> torch.Tensor:
    """out[t] = sum over slots s, in their order, of weights[t, s] * (y[places[t, s]] + bias[experts[t, s]]).

    y [T*top_k, H] in the sorted order, ``places`` and ``experts`` (``routing.Routing``) int32 [T*top_k], ``weights``
    [T*top_k] float32 or in y's dtype (else one), beside them bias [E, H] in y's dtype (else zero). Summed in float32
    (or wider) and rounded once. Of slots without a place nothing is read. out is ``into`` [T, H], dense, if given.
    """
    T, H = y.shape[0] // top_k, y.shape[1]
    launch = rowops.for_rows(RowOp.COMBINE, H, T, *(tensor for tensor in (y, bias, into) if tensor is not None))
    if launch is None:
        executor.unplanned()
        summed = _combined_by_torch(y, places, top_k, weights, experts, bias)
        return summed if into is None else into.copy_(summed)
    flags = rowops.weighing(weights) | (0 if bias is None else BIASED)
    with on(y.get_device()):
        out: torch.Tensor = executor.new(y, (T, H), per=top_k) if into is None else into
        name = f"sum of {top_k} rows of {H} columns"
        step = Step.of(launch, name, per=top_k, columns=H, top_k=top_k, flags=flags)
        operands = {"y": y, "places": places, "row_weights": weights, "experts": experts, "bias": bias, "out": out}
        executor.run(step, y.shape[0], operands)
    return out


def _combined_by_torch(
    y: torch.Tensor,
    places: torch.Tensor,
    top_k: int,
    weights: torch.Tensor | None,
    experts: torch.Tensor | None,
    bias: torch.Tensor | None,
) -> torch.Tensor:
    T, wide = y.shape[0] // top_k, torch.promote_types(y.dtype, torch.float32)
    step = max(1, _CHUNK_ELEMENTS // max(1, top_k * y.shape[1]))  # tokens at a time, to limit float32 temporaries
    parts = []
    for start in range(0, T, step):
        slots = slice(start * top_k, (start + step) * top_k)
        place = places[slots]
        rows = y.index_select(0, place.clamp(min=0)).to(wide)
        if bias is not None and experts is not None and len(bias):
            rows += bias.detach().index_select(0, experts[slots].clamp(0, len(bias) - 1)).to(wide)
        if weights is not None:
            rows *= weights[slots, None].to(wide)
        rows = torch.where((place >= 0)[:, None], rows, 0)
        parts.append(rows.view(-1, top_k, y.shape[1]).sum(1).to(y.dtype))
    return torch.cat(parts) if parts else y.new_empty((0, y.shape[1]))
