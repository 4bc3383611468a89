"""Whatever a command leaves running ends with it, by its number, and nothing else does."""

from __future__ import annotations

import subprocess
import sys
import time
from pathlib import Path

import pytest

REAPED = Path(__file__).resolve().parent.parent / ".ci" / "reaped.py"
LEAVES = """
import subprocess, sys
sleeps = [sys.executable, "-c", "import time; print('up', flush=True); time.sleep(600)"]
stays = [*sleeps[:2], "import signal; signal.signal(signal.SIGTERM, signal.SIG_IGN);" + sleeps[2]]
for command in (sleeps, stays):
    left = subprocess.Popen(command, start_new_session=True, stdout=subprocess.PIPE)
    left.stdout.readline()
    print(left.pid, flush=True)
sys.exit(3)
"""


def is_there(number: int) -> bool:
    return Path(f"/proc/{number}").exists()


@pytest.mark.skipif(sys.platform != "linux", reason="orphans are adopted on Linux alone")
def test_what_a_command_leaves_ends_and_nothing_else() -> None:
    other = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    try:
        done = subprocess.run(
            [sys.executable, str(REAPED), sys.executable, "-c", LEAVES],
            capture_output=True,
            text=True,
            check=False,
        )
        assert done.returncode == 3, done.stderr
        left = [int(line) for line in done.stdout.split()]
        assert len(left) == 2
        due = time.monotonic() + 60
        while any(map(is_there, left)) and time.monotonic() < due:
            time.sleep(0.05)
        assert not any(map(is_there, left))
        assert other.poll() is None
    finally:
        other.kill()
        other.wait()
