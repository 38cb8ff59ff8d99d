"""A serving engine's layer of experts: whether the bundles have kernels for it, and how these are loaded."""

from __future__ import annotations

import functools
import math
import os
from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from ..artifacts.errors import InputError
from ..artifacts.records import DType, Layout, LocalGpu, Op, Problem, buckets_between, dtypes_of
from ..kernels.arch import refusal
from ..kernels.hopper_w4a16 import padded_width
from ..kernels.registry import has_code
from ..kernels.rowops import CODE_OPS
from ..runtime import hooks
from ..runtime.api.expert_weights import ExpertWeights
from ..runtime.dispatch import snapshot as dispatch_snapshot
from ..runtime.dispatch.decide import Decision, Match, Origin, settle
from ..runtime.driver.device import platform_name, platform_supported
from ..runtime.inspect.preload import Preloaded, preload
from ..runtime.ops.activation import RowActivation
from ..runtime.settings import BATCH_INVARIANT, Invariance, settings
from ..runtime.weights.padding import padded

if TYPE_CHECKING:
    import torch

_ROWS = 1 << 16  # the most rows to check: more rows use the choice for this number
_NEAR = 2  # a time measured at up to twice, or down to half, the rows counts for these rows


def expected_rows(tokens: int, top_k: int, here: int, experts: int, shared: int = 0) -> int | None:
    """The expected number of (token, slot) pairs for this rank's experts; None if this rank has all experts.

    This rank has ``here`` of ``experts``; all are equally likely, except ``shared`` of them, which are on every rank
    and which every token chooses.
    """
    own, total = here - shared, experts - shared
    return tokens * shared + tokens * (top_k - shared) * own // total if 0 < own < total else None


def received_rows(tokens: int, top_k: int, here: int, experts: int, shared: int = 0) -> int | None:
    """``expected_rows`` for tokens that an all-to-all has brought: each chooses at least one expert of this rank."""
    own, total, routed = here - shared, experts - shared, top_k - shared
    if not 0 < own < total:
        return None
    arrives = 1.0 if shared else 1 - math.comb(total - own, routed) / math.comb(total, routed)
    return min(tokens * top_k, round(tokens * (shared + routed * own / total / arrives)))


class ServedLayer(NamedTuple):
    """One rank's part of a layer: ``E`` experts of [H -> I -> H]. Each token chooses ``top_k`` of all ranks' experts.

    All ranks together have ``experts`` experts; 0 means E. ``shared`` of E are on each rank, and every token chooses
    them.

    ``dtype`` is the dtype of the checkpoint's weights. If they are quantised and I is not a multiple of 64, preparing
    pads I to ``width``.
    """

    E: int
    H: int
    I: int  # noqa: E741
    top_k: int
    dtype: DType
    act: RowActivation
    experts: int = 0
    shared: int = 0

    def rows(self, tokens: int) -> int:
        """The number of rows that kernels are chosen for in a step of ``tokens`` tokens."""
        expected = expected_rows(tokens, self.top_k, self.E, self.experts, self.shared)
        return tokens * self.top_k if expected is None else expected

    @property
    def width(self) -> int:
        """I of prepared weights, with padding."""
        return padded_width(self.dtype, self.I)

    @property
    def problems(self) -> tuple[Problem, Problem]:
        """The layer's two forwards with bf16 x: gate and up together, and down."""
        return self.products(self.width)

    def products(self, width: int) -> tuple[Problem, Problem]:
        """``problems`` for weights with I = ``width``."""
        *_, dtype = dtypes_of(self.dtype.value)
        return self._products(dtype, width)

    @property
    def all_problems(self) -> tuple[Problem, ...]:
        """``problems``, also with quantised x if the checkpoint asks for it and prepared weights support it."""
        dtypes = [dtype for dtype in dtypes_of(self.dtype.value) if not dtype.quantises_x or dtype in CODE_OPS]
        return tuple(problem for dtype in dtypes for problem in self._products(dtype, self.width))

    def _products(self, dtype: DType, width: int) -> tuple[Problem, Problem]:
        wide = 2 * width if self.act.gated else width
        return (
            Problem(Op.FORWARD, dtype, self.E, wide, self.H, Layout.NK),
            Problem(Op.FORWARD, dtype, self.E, self.H, width, Layout.NK),
        )

    @property
    def build_line(self) -> str:
        """The command that builds a bundle for the layer and, on a machine with the GPU, measures its kernels."""
        options = "" if self.act.gated else " gated=0"
        if self.dtype.quantised:
            options += f" weights={self.dtype.value.removesuffix('_a16')}"
        elif self.dtype is not DType.BF16:
            options += f" dtype={self.dtype.value}"
        return f'aot build --models "shape:E={self.E},H={self.H},I={self.I},k={self.top_k}{options} ops=forward"'

    def __str__(self) -> str:
        more = self.width / self.I - 1
        wide = f" (padded to {self.width}: {more:.1%} more memory)" if more else ""
        return f"E={self.E} H={self.H} I={self.I}{wide} k={self.top_k} {self.dtype.value} {self.act.function}"


def choose_invariantly() -> Invariance | None:
    """Turn the batch-invariant mode on in this process and its children, because the engine's own switch is on.

    PRETUNED_BATCH_INVARIANT=0 overrides the switch: then return None.
    """
    if BATCH_INVARIANT not in os.environ:
        os.environ[BATCH_INVARIANT] = "1"
        hooks.reload()
    return settings().invariance


def lacks(layer: ServedLayer, local: LocalGpu, *, tokens: int, any_variant: bool = False) -> str | None:
    """Why the bundles do not suit this layer on a GPU, in steps of 1 to ``tokens`` tokens; None if they do.

    Both products need choices of their own, measured on a GPU of this capability, near every number of rows that a step
    chooses kernels for. If the engine would quantise x, the product with quantised x needs such choices, too: for many
    rows, the product with bf16 x takes 1.5x as long. With ``any_variant`` any kernel suffices. In the batch-invariant
    mode only the product that runs is checked, and measured choices of similar shapes suffice: for some rows, no choice
    sums in the order of the others.
    """
    if not platform_supported():
        return f"bundles run on linux x86_64 and aarch64, this is {platform_name()}"
    if layer.dtype.quantised and not has_code(Op.FORWARD, layer.problems[0].dtype, local.sm, Layout.NK):
        return f"no kernel for {local} reads {layer.dtype.value} weights in the order that engines' layers are put into"
    key = ("lacks", layer, local, tokens, any_variant)
    answers = dispatch_snapshot.snapshot().rankers  # cached: a model's layers are equal
    if key not in answers:
        answers[key] = _lacks(layer, local, tokens, any_variant)
    answer: str | None = answers[key]
    return answer


def _lacks(layer: ServedLayer, local: LocalGpu, tokens: int, any_variant: bool) -> str | None:
    fewest, most = (min(layer.rows(count), _ROWS) for count in (1, max(tokens, 1)))
    invariance = dispatch_snapshot.snapshot().invariance
    never = invariance is not None and not invariance.quantize_x
    for problem in layer.problems if any_variant or never else layer.all_problems:
        for bucket in buckets_between(fewest, most):
            decision = settle(dispatch_snapshot.snapshot(), problem, bucket, local, aligned=True, strict=False)
            is_known = isinstance(decision, Decision) and (
                any_variant or _is_measured(decision) or (invariance is not None and decision.chosen.near is not None)
            )
            if not is_known:
                what = "has a kernel" if any_variant else "was measured"
                where = f"{problem} at about {bucket} rows on {local}"
                todo = refusal(local.sm) or f"Build one here with: {layer.build_line}"
                return f"no bundle {what} for {where}. {todo}"
    return None


def _is_measured(decision: Decision) -> bool:
    at = decision.chosen.bucket
    near = at <= _NEAR * decision.bucket and decision.bucket <= _NEAR * at
    return near and decision.chosen.match is not Match.COST_MODEL and decision.chosen.origin <= Origin.THIS_CAPABILITY


@functools.cache
def load(layer: ServedLayer, device: int) -> Preloaded:
    """Load all kernels that the layer's calls can need: later calls load nothing, and can be captured in a graph."""
    return preload(problems=layer.all_problems, device=device)


def prepared(
    weights: Iterable[ExpertWeights], switch: str, *, on_gpu: bool, in_place: bool = False
) -> tuple[ExpertWeights, ...]:
    """Return prepared weights, in new tensors or, with ``in_place``, in the memory of ``weights``.

    Raises
    ------
    InputError
        for scales or codes that no kernel supports, with ``on_gpu``. The message names ``switch``, the variable that
        leaves a checkpoint to the engine.
    """
    ready: list[ExpertWeights] = []
    try:
        for w in weights:
            ready.append(w.prepare_in_place() if in_place else w.prepare())
        if on_gpu and not all(w.is_prepared for w in ready):
            raise InputError(
                f"pretuned: no kernel takes the scales of {tuple(ready)}, such as mxfp4's above 2 or int4's of 1,024, "
                f"or NaN among fp8 codes: {switch}=0 serves this checkpoint by the engine alone"
            )
    except BaseException:
        for w in ready if in_place else ():
            w.restore_in_place()
        raise
    return tuple(ready)


def widened(weights: ExpertWeights, width: int, act: RowActivation, *, down: bool) -> ExpertWeights:
    """Pad the weights of gate_up, or with ``down`` of down, with zeros from I to ``width``.

    ``act`` says where gate_up's rows of zeros belong: after gate's and after up's rows, or after pairs of rows.
    """
    _, N, K = weights.shape
    if down:
        return padded(weights, N, width)
    halves = 2 if act.gated else 1
    return padded(weights, halves * width, K, parts=1 if act.interleaved else halves)


def pad_bias(bias: torch.Tensor, own: int, width: int, act: RowActivation) -> torch.Tensor:
    """gate_up's bias [E, 2 * own, or longer], with zeros where ``widened`` pads the weights with rows of zeros."""
    halves = 2 if act.gated else 1
    parts = 1 if act.interleaved else halves
    wide = bias.new_zeros(bias.shape[0], parts, halves * width // parts)
    wide[..., : halves * own // parts] = bias[:, : halves * own].reshape(bias.shape[0], parts, -1)
    return wide.flatten(1)


def follow(first: Iterable[ExpertWeights], now: Iterable[ExpertWeights]) -> None:
    """Copy weights that were loaded again to the first ones' memory, from which captured graphs read them.

    Raises
    ------
    InputError
        if the weights are in another layout than the first.
    """
    for old, new in zip(first, now, strict=True):
        if old.is_prepared != new.is_prepared:
            raise InputError(f"pretuned: the weights loaded again are {new}, the first were {old}: start anew")
        tensors = new.tensors()
        for name, mine in old.tensors().items():
            if tensors[name].data_ptr() != mine.data_ptr():
                mine.copy_(tensors[name])
        if old.derived is not None and new.derived is not None:
            old.derived.copy_(new.derived)
