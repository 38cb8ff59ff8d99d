"""A bundle whose code wants a newer driver than this GPU's: both numbers are told, and no code is loaded.

    python -m pytest -q tests/gpu/test_driver.py

The driver's own answer is what it is held against. It takes what ships for this GPU's capability.
"""

from __future__ import annotations

from importlib.resources import files
from pathlib import Path

import pytest
import torch
from calls import calls_of

from pretuned.artifacts.bundle_file import open_bundle
from pretuned.artifacts.codec import encode
from pretuned.artifacts.errors import DriverTooOld
from pretuned.artifacts.publishing import publish
from pretuned.artifacts.records import Bundle, DType, Op, cuda_version
from pretuned.kernels import reference
from pretuned.runtime import explain, grouped_gemm, reload
from pretuned.runtime.driver import cuda
from pretuned.runtime.driver.device import local_gpu
from pretuned.runtime.launch import loader


def shipped() -> Bundle | None:
    """The shipped bundle for this GPU's capability."""
    if not torch.cuda.is_available():
        return None
    path = Path(str(files("pretuned.artifacts"))) / f"bundles/catalogue-sm{local_gpu(0).sm}.msgpack"
    if not path.exists():
        return None
    with open_bundle(path) as file:
        return file.load()


SHIPPED = shipped()
pytestmark = pytest.mark.skipif(SHIPPED is None, reason="needs a GPU that a bundle ships for")


def test_a_driver_that_is_too_old_is_reported_before_anything_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert SHIPPED is not None
    here = local_gpu(0).gpu.driver
    assert here == cuda.driver_version() >= SHIPPED.min_driver > 0
    plain = (
        choice
        for choice in SHIPPED.choices
        if choice.op is Op.FORWARD and choice.dtype is DType.BF16 and not choice.fusion
    )
    problem = min(plain, key=lambda tensor: tensor.E * tensor.N * tensor.K)
    x = torch.randn(64, problem.K, device="cuda", dtype=torch.bfloat16)
    w = torch.randn(problem.E, problem.N, problem.K, device="cuda", dtype=torch.bfloat16) * problem.K**-0.5
    m_sizes = torch.zeros(problem.E, dtype=torch.int32, device="cuda")
    m_sizes[0], m_sizes[-1] = 40, 24
    path = tmp_path / "bundle.msgpack"
    monkeypatch.setenv("PRETUNED_BUNDLES", str(path))
    try:
        publish(path, encode(SHIPPED._replace(min_driver=here + 10)))
        reload()
        both = f"CUDA {cuda_version(here + 10)} or later.*CUDA {cuda_version(here)}".replace(".", r"\.", 1)
        with calls_of(loader.loaded) as loads, pytest.raises(DriverTooOld, match=both):
            grouped_gemm(x, w, m_sizes)
        assert loads == []
        publish(path, encode(SHIPPED._replace(min_driver=here)))
        reload()
        y = grouped_gemm(x, w, m_sizes)
        chosen = explain(x, w, m_sizes).chosen
        assert chosen is not None
        assert chosen.usable.bundle.path == str(path)
    finally:
        monkeypatch.undo()
        reload()
    right = reference.forward(x.double(), w.double(), m_sizes)
    assert (y.double() - right).norm() < 1e-2 * right.norm()
