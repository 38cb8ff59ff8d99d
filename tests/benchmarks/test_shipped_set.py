"""The time that the shipped set loses, by the committed bundle and journal."""

from __future__ import annotations

import itertools
import json
import lzma
import sys
from dataclasses import replace
from pathlib import Path
from types import ModuleType

import pytest

from pretuned.aot.journal.file import read_journal
from pretuned.aot.journal.records import Rematch
from pretuned.aot.journal.timings import CellTimes
from pretuned.artifacts.bundle_file import open_bundle

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
BUNDLE = ROOT / "artifacts" / "bundles" / "catalogue-sm90.msgpack"
JOURNAL = ROOT / "benchmarks" / "results" / "catalogue-h200.journal.xz"
FIRST = str(ROOT / "benchmarks" / "shipped.txt")
H200 = "NVIDIA H200"


@pytest.fixture
def tool() -> ModuleType:
    from benchmarks.model import shipped

    return shipped


@pytest.mark.nightly
def test_the_set_is_small_and_loses_next_to_nothing(tool: ModuleType) -> None:
    with open_bundle(BUNDLE) as bundle:
        assert len(bundle.gpus) == 2
        report = tool.report(tool.of_gpu(bundle, H200, [FIRST]), read_journal(JOURNAL))
    assert max(report["configs"].values()) <= 20  # of two builds, each of 16 at most
    assert report["choices"] == 5606
    for figures, over in ((report["as_timed"], 0.01), (report["beyond_noise"], 0.005)):
        assert figures["mean_loss"] < 0.005
        assert figures["over_2_percent"] < over * report["choices"]
        assert figures["worst"][0][0] < 1.1
    assert sum(row["choices"] for row in report["by_rows"]) == report["choices"]
    assert all(row["mean_loss"] < 0.005 for row in report["by_rows"])
    assert report["in_records"]["mean_loss"] < 0.001  # no clock comes in here
    assert report["in_records"]["most"] < 1.1
    assert report["beside_torch"] > 2500
    assert len(report["behind_torch_by_over_3_percent"]) < 0.005 * report["beside_torch"]


@pytest.mark.nightly
def test_shards_lose_little_beside_what_was_timed(tool: ModuleType) -> None:
    with open_bundle(BUNDLE) as bundle:
        lost = tool.losses(tool.of_gpu(bundle, H200), read_journal(JOURNAL), raw=True)
    assert len(lost) > 64_000
    assert tool._summary(lost)["mean_loss"] < 0.002
    assert sum(loss > tool.OVER for loss, *_ in lost) < 0.02 * len(lost)


def test_what_a_kind_gains(tool: ModuleType) -> None:
    """Tiles that are fitted to the rows are for experts of 128 to 511; those in turns for dW of more."""
    with open_bundle(BUNDLE) as bundle:
        kinds = tool.kinds(tool.of_gpu(bundle, H200, [FIRST]), read_journal(JOURNAL))
    by_kind = {(kind["kind"], kind["op"], kind["rows_from"]): kind for kind in kinds}
    for figures in by_kind.values():
        assert figures["least"] <= figures["gain"] <= figures["most"]
        assert figures["kept"] >= max(1.0, figures["gain"]) - 1e-9
    for op in ("forward", "dX"):
        assert by_kind["fitted", op, 128.0]["kept"] > 1.03 > by_kind["fitted", op, 1024.0]["kept"]
        assert by_kind["fitted", op, 128.0]["chosen"] > by_kind["fitted", op, 128.0]["cells"] / 2
    assert by_kind["pingpong", "dW", 512.0]["gain"] > 1.05
    assert by_kind["streamed", "dW", 16.0]["gain"] > 1.03 > 1.0 > by_kind["streamed", "dW", 128.0]["gain"]


def test_what_is_faster_by_noise_alone_is_not(tool: ModuleType) -> None:
    cell = CellTimes(
        {b"m": 1000, b"near": 998, b"far": 900, b"slow": 1100},
        dict.fromkeys([b"m", b"near", b"far", b"slow"], 0.0),
        (),
        0,
    )
    lost = Rematch(b"far", b"m", (1010,), (1000,), 1.01, 0.005)
    for chosen, timed, beyond, fought in (
        (b"m", 1000 / 900, 1000 / 900, 1.0),
        (b"near", 998 / 900, 998 / 900, 998 / 900),
        (b"far", 1.0, 1.0, 1.0),
        (b"slow", 1100 / 900, 1100 / 900, 1100 / 900),
    ):
        assert tool.loss_of(cell, chosen, raw=True) == timed
        assert tool.loss_of(cell, chosen, raw=False) == beyond
        assert tool.loss_of(replace(cell, duels=(lost,)), chosen, raw=False) == fought


@pytest.mark.nightly
def test_json_has_it_all(tool: ModuleType, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "argv", ["shipped.py", str(BUNDLE), str(JOURNAL), "--json"])
    tool.main()
    report = json.loads(capsys.readouterr().out)
    monkeypatch.setattr(sys, "argv", sys.argv[:-1])
    tool.main()
    over = report["beyond_noise"]["over_2_percent"]
    assert f"{report['choices']} choices, by more than noise: {over} take over 2 %" in capsys.readouterr().out


def test_a_journal_of_other_cells_is_reported(
    tool: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    journal = tmp_path / "some.journal"  # its first 2,000 of 69,000 records
    with lzma.open(JOURNAL) as packed:
        journal.write_bytes(b"".join(itertools.islice(packed, 2001)))
    monkeypatch.setattr(sys, "argv", ["shipped.py", str(BUNDLE.with_name("catalogue-sm80.msgpack")), str(journal)])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "no cell of this bundle's choices" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", ["shipped.py", str(BUNDLE), str(journal), "--gpu", "NVIDIA H300"])
    with pytest.raises(SystemExit, match="2"):
        tool.main()
    assert "no choice is of NVIDIA H300, but of NVIDIA H100 80GB HBM3, NVIDIA H200" in capsys.readouterr().err
