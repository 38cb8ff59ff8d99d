"""Outputs of memcheck that are made up, and which cubins a tool has seen. No GPU is needed."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
import seen_cubins

HERE = Path(__file__).resolve().parents[1] / "gpu"
sys.path.append(str(HERE))
import checked  # noqa: E402

A, B, C, D = ("0123456789abcdef"[i] * 64 for i in range(4))
BEGUN = "========= COMPUTE-SANITIZER"
LIMIT = "========= Warning: Maximum number of hazards reached. Environment variable X can be used"
END = "2 cubins on NVIDIA H200 (9.0, 132 SMs, 143155 MiB), 0 wrong, 0 that no block has the memory for"
STOPPED = [
    "Traceback (most recent call last):",
    '  File "tests/support/self_test_files.py", line 87, in <module>',
    "    sys.exit(main())",
    "             ^^^^^^",
    "KeyboardInterrupt",
    "terminate called without an active exception",
]
WHOLE = [BEGUN, f"cubin {A} rows 0.1", f"cubin {B} weight 1.5", END, "========= ERROR SUMMARY: 0 errors"]


@pytest.mark.parametrize(
    ("lines", "names"),
    [
        (WHOLE, "AB"),
        (WHOLE[1:], ""),
        ([BEGUN, f"cubin {A} rows", f"cubin {B} weight", *STOPPED], "A"),
        ([BEGUN, f"cubin {A} rows", f"cubin {B} weight", "=========", *STOPPED], "A"),
        ([BEGUN, f"cubin {A} rows", f"cubin {B} rows", "x.msgpack: variant 1, rows: nan", f"cubin {C} rows", ""], "A"),
        ([BEGUN, *(f"cubin {digest} rows" for digest in (A, B, C)), LIMIT, f"cubin {D} rows", "4 cubins on"], "A"),
    ],
    ids=["to the end", "without the tool", "stopped", "stopped after a report", "wrong", "at racecheck's limit"],
)
def test_which_cubins_were_seen(lines, names):
    assert set(seen_cubins.seen(lines)) == {{"A": A, "B": B, "C": C}[name] for name in names}


@pytest.mark.parametrize("lines", [WHOLE, [*WHOLE[:3], *STOPPED]], ids=["to the end", "stopped"])
def test_nothing_is_wrong(lines):
    assert not [*checked.wrong_lines(lines)]


@pytest.mark.parametrize(
    "line",
    [
        "========= Invalid __global__ read of size 4 bytes",
        "=========     at rows+0x120",
        "========= ERROR SUMMARY: 1 error",
        "artifacts/bundles/x.msgpack: variant 1, rows forward bf16: y[0, 0] is nan, wanted 0",
        END.replace("0 wrong", "1 wrong"),
        "Segmentation fault (core dumped)",
    ],
)
def test_what_is_wrong(line):
    assert [*checked.wrong_lines([*WHOLE[:3], line, *WHOLE[3:]])] == [line]


@pytest.mark.parametrize("after", [[], ["torch.OutOfMemoryError: CUDA out of memory"]], ids=["cut off", "an error"])
def test_a_program_that_ended_of_itself(after):
    assert [*checked.wrong_lines([*WHOLE[:3], *STOPPED[:4], *after])] == [STOPPED[0], *after]


def test_the_list_is_added_to_where_nothing_is_wrong(tmp_path):
    listed, memory_log = tmp_path / "seen.txt", tmp_path / "memory.txt"
    listed.write_text(f"{C[:16]} rows\n")
    command = [sys.executable, HERE / "checked.py", memory_log, "--seen", listed]
    for wrong in (True, False):
        memory_log.write_text("\n".join(WHOLE[:3] + ["========= Invalid read"] * wrong + STOPPED))
        ended = subprocess.run(command, capture_output=True, text=True, check=False)
        assert ended.returncode == wrong, ended.stderr
        assert (A[:16] in listed.read_text()) is not wrong
    assert listed.read_text().splitlines() == [f"{A[:16]} rows", f"{C[:16]} rows"]
    assert "1 cubins are new" in ended.stdout
