"""How the pass that copies rows of x is launched: a row a program, or each token's row once. On host memory."""

from __future__ import annotations

import pytest
import torch
from host_gpu import Device
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pretuned.artifacts.records import RowOp
from pretuned.kernels import rowops as contract
from pretuned.runtime.ops import gather_combine

LARGE = 128 << 20


@pytest.mark.parametrize(
    ("M", "row_bytes", "slots", "top_k", "once"),
    [
        (1 << 15, LARGE >> 15, 1 << 15, 8, True),
        ((1 << 15) - 1, LARGE >> 15, 1 << 15, 8, False),  # too small
        (1 << 15, LARGE >> 15, 1 << 15, 1, False),  # each row goes to one place
        (1 << 15, LARGE >> 15, 1 << 16, 2, True),
        (1 << 15, LARGE >> 15, (1 << 16) + 8, 8, False),  # most slots are elsewhere
        (1 << 15, LARGE >> 15, 0, 8, False),  # nobody said how many
    ],
)
def test_when_each_row_is_read_once(M: int, row_bytes: int, slots: int, top_k: int, once: bool) -> None:
    assert contract.by_token(M, row_bytes, slots, top_k) is once


@settings(max_examples=40, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(T=st.integers(1, 40), top_k=st.integers(1, 9), wide=st.booleans(), old=st.booleans(), data=st.data())
def test_every_index_gives_its_rows(
    device: Device, T: int, top_k: int, wide: bool, old: bool, data: st.DataObject
) -> None:
    slots = st.integers(0, T * top_k - 1)
    picked = data.draw(st.lists(slots, min_size=1, max_size=2 * T * top_k, unique=data.draw(st.booleans())))
    index = torch.tensor(picked, dtype=torch.int64 if wide else torch.int32)
    used = data.draw(st.one_of(st.none(), st.integers(0, len(picked) + 3)))
    x = torch.randn(T, 5, generator=torch.Generator().manual_seed(T))
    bounds = None if used is None else torch.tensor([0, used], dtype=torch.int32)
    end = len(picked) if used is None else used
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(contract, "BY_TOKEN_LEAST_BYTES", 1 << 40 if old else 0)
        device.launches.clear()
        got = gather_combine.gather(x, index, top_k, bounds)
    assert torch.equal(got[:end], x[index.long() // top_k][:end])
    once = not old and top_k > 1 and 2 * len(picked) >= T * top_k
    assert device.passed == [RowOp.GATHER] * (2 if once else 1)
