"""A program that begins with torch imported ends, and says, what it does in an interpreter of its own."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
import warm

pytestmark = pytest.mark.slow

SCRIPT = """
import os, sys
print(__name__, sys.argv[1:], os.environ["GIVEN"], os.getcwd(), "PATH" in os.environ, input())
print("told", file=sys.stderr)
import beside
sys.exit(beside.CODE)
"""


@pytest.mark.parametrize(
    "words",
    [
        ["script.py", "a", "b"],
        ["-m", "script", "a"],
        ["-c", "import sys; print(sys.argv, __name__); sys.exit('no')", "x"],
        ["-c", "import atexit; atexit.register(print, 'at last'); print('first')"],
        ["-c", "import sys; print(input()); sys.exit(None)"],
        ["-c", "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('late'))).start()"],
    ],
    ids=" ".join,
)
def test_it_is_as_in_an_interpreter_of_its_own(words: list[str], tmp_path: Path) -> None:
    (tmp_path / "script.py").write_text(SCRIPT)
    (tmp_path / "beside.py").write_text("CODE = 3\n")
    env = {"GIVEN": "yes"}
    own = subprocess.run(
        [sys.executable, *words], cwd=tmp_path, env=env, input="line\n", capture_output=True, text=True, check=False
    )
    ours = warm.run(words, cwd=tmp_path, env=env, stdin="line\n")
    assert (ours.returncode, ours.stdout, ours.stderr) == (own.returncode, own.stdout, own.stderr)


def test_an_error_is_reported_with_its_traceback() -> None:
    done = warm.run(["-c", "1 / 0"])
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1] == "ZeroDivisionError: division by zero"


def test_it_has_torch_and_nothing_of_ours_yet() -> None:
    code = "import sys; print('torch' in sys.modules, any(one.split('.')[0] == 'pretuned' for one in sys.modules))"
    assert warm.run(["-c", code]).stdout == "True False\n"


def test_signals_reach_it() -> None:
    program = warm.Program(["-c", "import time; time.sleep(60)"], env=os.environ)
    program.send_signal(signal.SIGTERM)
    assert program.wait(30).returncode == -signal.SIGTERM
    program = warm.Program(["-c", "import time; time.sleep(60)"])
    with pytest.raises(subprocess.TimeoutExpired):
        program.wait(0.2)
