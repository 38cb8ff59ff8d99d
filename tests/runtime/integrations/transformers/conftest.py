"""PEFT, and small checkpoints with quantised experts that stay quantised."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import tiny_quantised

from pretuned.integrations import transformers as ours
from pretuned.integrations.transformers.packed import keep_mxfp4


@pytest.fixture(scope="module")
def peft() -> Any:
    pytest.importorskip("transformers", minversion="5.23")
    pytest.importorskip("compressed_tensors")
    ours.register()
    return pytest.importorskip("peft", minversion="0.21")


@pytest.fixture(scope="module")
def keeping(peft: Any) -> Iterator[None]:
    """Checkpoints stay quantised: gpt-oss by pretuned's loader, fp8 without the GPU that transformers' asks for."""
    from transformers.quantizers import auto
    from transformers.quantizers.quantizer_finegrained_fp8 import FineGrainedFP8HfQuantizer

    before = auto.AUTO_QUANTIZER_MAPPING["mxfp4"]
    keep_mxfp4()
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(FineGrainedFP8HfQuantizer, "validate_environment", lambda self, *_, **__: None)
        yield
    auto.AUTO_QUANTIZER_MAPPING["mxfp4"] = before


@pytest.fixture(scope="module")
def checkpoints(keeping: None, tmp_path_factory: pytest.TempPathFactory) -> dict[str, tiny_quantised.Pair]:
    checkpoints = {
        kind: getattr(tiny_quantised, kind)(tmp_path_factory.mktemp(kind)) for kind in ("fp8", "mxfp4", "int4")
    }
    return checkpoints | {"packed": tiny_quantised.compressed(tmp_path_factory.mktemp("packed"), "mxfp4")}
