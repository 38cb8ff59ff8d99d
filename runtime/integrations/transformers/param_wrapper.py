"""PEFT's layer around a parameter, for quantised experts. Imported when PEFT makes such a layer (``injection.py``)."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any, NoReturn

import torch
from peft.tuners.lora import layer
from peft.utils.other import get_pattern_key

from ...artifacts.errors import InputError
from ...runtime.check.call import MAX_RANK
from ...runtime.check.tensors import bad
from ...runtime.ops.low_rank import Lora
from .adapters import held, view
from .quantised import quantised


def check_rank(config: Any, key: str) -> None:
    """Refuse a LoraConfig whose rank for the weight of this name is above 256, before the model is changed."""
    ranks = config.rank_pattern or {}  # AdaLora has none
    r = ranks.get(get_pattern_key(list(ranks), key), config.r)
    if r is not None and r > MAX_RANK:
        doubled = " (gate_proj and up_proj together have twice the r of each)" if r == 2 * config.r else ""
        bad("r", f"{r} for {key}{doubled}", f"at most {MAX_RANK} on quantised experts", "LoraConfig")


class ParamWrapper(layer.ParamWrapper):  # PEFT looks for this class name
    """y = x @ (W + sum over active adapters of scaling * B A).T, for W in codes: the experts' call gets A and B.

    A and B have the shapes and the dtype that they have for a plain W [E, N, K] in the model's dtype.
    """

    unmergeable = True

    def get_param(self) -> torch.Tensor:
        """A placeholder with W's shape, dtype and device, but without W's values.

        Raises
        ------
        InputError
            if the experts no longer run on pretuned, or their codes were removed.
        """
        experts = self.get_base_layer()
        weight = view(experts, self.parameter_name)
        if weight is None:
            running = getattr(getattr(experts, "config", None), "_experts_implementation", None)
            raise InputError(
                f"{self._said}: the experts run on {running!r}, wanted 'pretuned', the only one with adapters on "
                "quantised weights: call model.set_experts_implementation('pretuned')"
            )
        return weight

    @property
    def _said(self) -> str:
        return f"the adapter of {type(self.get_base_layer()).__name__}.{self.parameter_name}"

    @contextlib.contextmanager
    def _activate_lora(self, active_adapters: list[str]) -> Iterator[None]:
        names = [name for name in active_adapters if name in self.lora_A]
        if not names:
            yield
            return
        experts, adapters = self.get_base_layer(), []
        for name in names:
            lhs, rhs, scaling = self.get_delta_factors(name)  # type: ignore[no-untyped-call]
            A, B = (lhs.mT, rhs.mT) if experts.is_transposed else (rhs, lhs)
            adapters.append(Lora(A, B, float(scaling)))
        if len(adapters) > 1:  # their sum is one adapter, whose rank is the sum of ranks
            rank = sum(adapter.A.shape[1] for adapter in adapters)
            if rank > MAX_RANK:
                bad("the rank of the active adapters", f"{rank} together", f"at most {MAX_RANK}", self._said)
            B = torch.cat([adapter.B * adapter.scale for adapter in adapters], 2)
            adapters = [Lora(torch.cat([adapter.A for adapter in adapters], 1), B)]
        with held(experts, self.parameter_name, adapters[0]):
            yield

    def merge(self, safe_merge: bool = False, adapter_names: list[str] | None = None) -> None:
        """Refuse to merge: codes can't represent W + scaling * B A.

        Raises
        ------
        InputError
            always.
        """
        self._unmerged()

    def _unmerged(self) -> NoReturn:
        w = quantised(self.get_base_layer(), self.parameter_name)
        kind = "quantised" if w is None else w.format
        raise InputError(
            f"{self._said} can't be merged: the weight is {kind}, W + scaling * B A is not. Save it with "
            "save_pretrained, load the model in bf16 (a quantised checkpoint by its quantization_config with "
            "dequantize=True), and merge there: PeftModel.from_pretrained(model, saved).merge_and_unload()"
        )
