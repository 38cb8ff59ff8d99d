"""Reports of racecheck on three shipped cubins, and made-up reports. No GPU is needed."""

from __future__ import annotations

import itertools
import re
import subprocess
import sys
from pathlib import Path

import pytest
import self_test_files

pytest.importorskip("triton")  # (its package has nvdisasm)
import sass

HERE = Path(__file__).resolve().parents[1] / "gpu"
sys.path.append(str(HERE))
import races  # noqa: E402

TOLD = HERE.parent / "support" / "racecheck.txt"
BUNDLE = HERE.parents[1] / "artifacts" / "bundles" / "candidates-sm90.msgpack.xz"
CUBINS = dict(reversed(line.split()[1:]) for line in TOLD.read_text().splitlines() if line.startswith("cubin"))


@pytest.fixture(scope="module")
def shipped():
    return races.Shipped([BUNDLE])


def judged(shipped, lines, expected=None):
    return races.judge(lines, shipped, races.expected_kinds() if expected is None else expected)


def report(kernel, write, read, severity="Error"):
    return [
        f"cubin {CUBINS[kernel]} {kernel}",
        f"========= {severity}: Race reported between Write access at {kernel}+{write:#x}",
        f"=========     and Read access at {kernel}+{read:#x} [16 hazards]",
    ]


@pytest.mark.slow
def test_what_was_reported_has_an_order(shipped):
    result = judged(shipped, TOLD.read_text().splitlines())
    assert not result.wrong
    assert result.cubins == set(CUBINS.values())
    assert {(kind.kernel, kind.order) for kind in result.kinds} == {
        ("weight", "the order of one warp's program"),
        *(
            (kernel, order)
            for kernel in ("weight_specialized", "rows_w8a8")
            for order in ("two mbarriers", "named barrier 1")
        ),
    }
    assert result.kinds.total() == 18


def test_each_order(shipped):
    code = shipped(CUBINS["weight_specialized"])[1]
    assert code.order(0x7230, 0x7BA0) == ("mbarrier 0x379e0", "mbarrier 0x379f0", "two mbarriers")
    assert code.order(0x7230, 0x280)[:2] == ("mbarrier 0x379e0 or its second", "mbarrier 0x379f0 or its second")
    assert code.order(0x150, 0x8AF0) == ("named barrier 1", "named barrier 1", "named barrier 1")
    passed = code.counts("0x1", 3)
    assert [passed[code.at[offset]] for offset in (0x150, 0x8AF0, 0xA720)] == [{1}, {0}, {0}]


def test_a_kind_that_nobody_expects(shipped):
    race_report = report("weight_specialized", 0x7230, 0x280)
    assert not judged(shipped, race_report).wrong
    assert (
        "STS.128 LDS.128 two mbarriers, is not in expected_races.json" in judged(shipped, race_report, set()).wrong[0]
    )


def test_without_the_arrival_there_is_no_order(shipped):
    """Each of the two mbarriers is needed, and so is the named one."""
    code = shipped(CUBINS["weight_specialized"])[1]
    for what, first, second in (
        (r"SYNCS.ARRIVE.*\+0x379e", 0x7230, 0x280),
        (r"SYNCS.ARRIVE.*\+0x379f", 0x7230, 0x280),
        (r"SYNCS.PHASECHK.*\+0x379e", 0x7230, 0x280),
        (r"BAR.SYNC.*0x1$", 0x8AF0, 0x150),
    ):
        assert code.order(first, second)
        less = sass.Code("")
        less.ops = [
            op._replace(name="NOP", operands="") if re.match(what, f"{op.name} {op.operands}") else op
            for op in code.ops
        ]
        assert less.ops != code.ops
        less.at, less.after, less.before = code.at, code.after, code.before
        assert less.order(first, second) is None


def accesses(code, name):
    return [op.offset for op in code.ops if op.kind == name]


@pytest.mark.slow  # each access of a kernel with each; processes
def test_a_pair_that_is_made_up(shipped):
    """Two accesses between which nothing is: what is read of the queue, and what a product is stored by."""
    code = shipped(CUBINS["weight_specialized"])[1]
    pairs = itertools.product(accesses(code, "STS.128"), accesses(code, "LDS.128"))
    unordered = next(pair for pair in pairs if not code.order(*pair))
    wrong = judged(shipped, report("weight_specialized", *unordered)).wrong
    assert len(wrong) == 1
    assert wrong[0].endswith("no barrier orders them")


@pytest.mark.parametrize(("write", "read"), [(0x7240, 0x280), (0x280, 0x7230), (0x7230, 0x7FFFF0)])
def test_offsets_that_are_no_such_accesses(shipped, write, read):
    wrong = judged(shipped, report("weight_specialized", write, read)).wrong
    assert len(wrong) == 1
    assert "no such accesses" in wrong[0]


def test_of_another_kernel(shipped):
    race_report = report("weight_specialized", 0x7230, 0x280)
    other = [f"cubin {CUBINS['weight']} weight", *race_report[1:]]
    assert "no such accesses" in judged(shipped, other).wrong[0]
    assert "no such accesses" in judged(shipped, race_report[1:]).wrong[0]
    late = [race_report[0], *other]  # what is told of one cubin can come after the next one's name
    assert not judged(shipped, late).wrong


def test_one_warps_order_is_no_error_of_two(shipped):
    assert not judged(shipped, report("weight", 0x1DC0, 0x2220, "Warning")).wrong
    assert judged(shipped, report("weight", 0x1DC0, 0x2220)).wrong[0].endswith("no barrier orders them")


@pytest.mark.parametrize("line", ["========= Invalid __shared__ read of size 4 bytes", "========= Error: no device"])
def test_another_line_of_the_tool(shipped, line):
    assert judged(shipped, [line]).wrong == [f"no report: {line}"]


A = "0" * 64
BEGUN = "========= COMPUTE-SANITIZER"


@pytest.mark.slow  # each access of a kernel with each; processes
def test_a_list_of_those_seen_is_added_to_and_left_out(tmp_path):
    listed, race_log = tmp_path / "seen.txt", tmp_path / "race.txt"
    cubin, before = CUBINS["weight"], CUBINS["rows_w8a8"]
    listed.write_text(f"{before[:16]} rows_w8a8\n")
    command = [sys.executable, HERE / "races.py", race_log, "--bundles", BUNDLE, "--seen", listed]
    for wrong in (True, False):
        end = ["========= Error: no device"] if wrong else []
        race_log.write_text("\n".join([BEGUN, f"cubin {cubin} weight 0.1", f"cubin {A} rows 2.0", *end]))
        assert subprocess.run(command, capture_output=True, check=False).returncode == wrong
        assert (cubin[:16] in listed.read_text()) is not wrong
    assert listed.read_text().split() == [before[:16], "rows_w8a8", cubin[:16], "weight"]
    after = set(listed.read_text().split())
    whole, rest = (
        {bundle.variant(i).cubin_sha256.hex() for bundle, i in self_test_files.each_cubin([str(BUNDLE)], lines)}
        for lines in ((), after)
    )
    assert whole - rest == {cubin, before}


@pytest.mark.slow
def test_the_command(tmp_path):
    wrong = tmp_path / "race.txt"
    wrong.write_text("\n".join(report("weight", 0x1DC0, 0x2220)))
    command = [sys.executable, HERE / "races.py", wrong, "--bundles", BUNDLE]
    ended = subprocess.run(command, capture_output=True, text=True, check=False)
    assert ended.returncode == 1, ended.stderr
    assert "no barrier orders them (1 times)" in ended.stdout
