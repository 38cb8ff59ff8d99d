"""Where no bundle can run a call."""

from __future__ import annotations

import logging

import pytest
import torch

from pretuned.runtime import fallback, grouped_gemm


def test_the_reference_is_told_once(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG, fallback.__name__)
    fallback.tell_reference.cache_clear()
    x, w, m_sizes = torch.randn(6, 8), torch.randn(2, 4, 8, requires_grad=True), torch.tensor([2, 4])
    for _ in range(2):
        grouped_gemm(x, w, m_sizes).sum().backward()
    assert [(record.levelno, record.getMessage()) for record in caplog.records] == [
        (logging.DEBUG, "pretuned: tensors on cpu: the torch reference runs")
    ]
