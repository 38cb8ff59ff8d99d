"""Statistics of batches: ratios, their draws, and failures."""

from __future__ import annotations

import pytest

from benchmarks.speed import host_ratios
from benchmarks.speed.host_ratios import Pair


def pair(factor: float, torchs: float = 1.0) -> Pair:
    """Three adjacent batches, in the second of which the machine was slow."""
    old = [10.0, 40.0, 12.0]
    return {
        "old": {"call": old, "torch_mm": old},
        "new": {"call": [time * factor for time in old], "torch_mm": [time * torchs for time in old]},
    }


def test_a_ratio_is_the_median_of_adjacent_batches() -> None:
    row = host_ratios.rows([pair(1.1), pair(1.2), pair(1.3)])["call"]
    assert row.ratio == pytest.approx(1.2)
    assert row.pairs == pytest.approx([1.1, 1.2, 1.3])
    assert (row.old, row.new) == pytest.approx((12, 14.4))
    assert (row.medians, row.least) == pytest.approx((1.2, 1.1))
    low, high = row.interval()
    assert (low, high) == pytest.approx((1.1, 1.3))
    line = row.as_dict()
    assert (line["ratio"], line["low"], line["high"]) == (1.2, 1.1, 1.3)
    assert host_ratios.rows([pair(1.1), pair(1.2), pair(1.3)])["call"] == row  # the same draws


def test_of_one_pair_no_interval_is_known(capsys: pytest.CaptureFixture[str]) -> None:
    line = host_ratios.rows([pair(0.9)])["call"].as_dict()
    assert (line["ratio"], line["low"], line["high"]) == (0.9, None, None)
    assert host_ratios.show([pair(0.9)], 1.03) == []
    assert "not shown to be within 1.03" in capsys.readouterr().out


def test_means_are_of_ours_and_of_torchs_apart(capsys: pytest.CaptureFixture[str]) -> None:
    calls = host_ratios.rows([pair(1.1, 0.98), pair(1.1, 0.98)])
    assert list(host_ratios.ours(calls)) == ["call"]
    assert host_ratios.mean(list(host_ratios.torchs(calls).values())).ratio == pytest.approx(0.98)
    both = host_ratios.mean(list(calls.values()))
    assert both.ratio == pytest.approx((1.1 * 0.98) ** 0.5)
    assert both.interval() == pytest.approx((both.ratio, both.ratio))
    host_ratios.show([pair(1.1, 0.98)], 1.2)
    assert "torch's ratios are off 1 by 2.0% (root mean square), at most 2.0%" in capsys.readouterr().out


@pytest.mark.parametrize(("factor", "slower"), [(1.02, []), (1.04, ["call"])])
def test_which_are_slower(factor: float, slower: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert host_ratios.show([pair(factor, 1.5)] * 2, 1.03) == slower  # torch's is no fault of ours
    assert "not shown" not in capsys.readouterr().out
