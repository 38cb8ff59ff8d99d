"""A bundle of what an H100 took for rows at odd multiples of 16 bytes: torch runs what it was faster for."""

from __future__ import annotations

from pathlib import Path

from small_bundles import ON_H100, ON_H200, snapshot

from pretuned.aot.choose.candidates import read_candidates
from pretuned.artifacts.records import Op
from pretuned.runtime.dispatch.decide import Decision, decide
from pretuned.runtime.inspect.explain import examine

JOURNAL = Path(__file__).parents[2] / "benchmarks" / "results" / "unknown-h100-odd-k.journal.xz"


def test_torch_runs_what_it_was_faster_for(tmp_path: Path) -> None:
    from benchmarks.model.unknown import BUNDLE
    from benchmarks.speed.by_torch import CELLS, built

    built(CELLS, read_candidates(BUNDLE), JOURNAL, tmp_path / "a.msgpack")
    bundle_set = snapshot(tmp_path)
    by_torch = set()
    for problem, buckets in CELLS.items():
        for M in buckets:
            ran, elsewhere = decide(bundle_set, problem, M, ON_H100), decide(bundle_set, problem, M, ON_H200)
            assert isinstance(ran, Decision)
            assert isinstance(elsewhere, Decision)
            assert elsewhere.chosen.torch_us is None
            if ran.chosen.torch_us is not None:
                by_torch.add((problem.op, problem.K, M))
                assert ran.chosen.torch_us < ran.chosen.time_us
                assert examine(bundle_set, problem, M, ON_H100, aligned=True).runs == "torch"
    large = {(Op.FORWARD, problem.K, 65536) for problem in CELLS}
    assert by_torch == {*large, (Op.FORWARD, 4104, 8192), (Op.FORWARD, 2056, 8192), (Op.DX, 1448, 65536)}
