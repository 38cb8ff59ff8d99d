"""The configs of a layer's two GEMMs, as tuning on demand returns them and ``kernel_config_*`` takes them."""

from __future__ import annotations

from dataclasses import dataclass

from ..artifacts.records.problem import Fusion, Op
from ..kernels.contract.config import Config


@dataclass(frozen=True, slots=True)
class Preferred:
    """The config to run one GEMM with, by the form of the call's code.

    A preference: where no usable bundle has it for a call, the bundles' own choice runs. None of a form: the same.
    """

    configs: tuple[tuple[Fusion, Config], ...] = ()

    @property
    def config(self) -> Config | None:
        """That of the plain form."""
        return self.of(Fusion.NONE)

    def of(self, fusion: Fusion) -> Config | None:
        """That of one form's code."""
        return dict(self.configs).get(fusion)


NOTHING = Preferred()


@dataclass(frozen=True, slots=True)
class KernelPair:
    """What to run the first and the second GEMM of a layer with, for one op: ``is_first_gemm`` picks."""

    op: Op
    first: Preferred = NOTHING
    second: Preferred = NOTHING

    def of(self, *, is_first_gemm: bool) -> Preferred:
        """That of one of the two."""
        return self.first if is_first_gemm else self.second
