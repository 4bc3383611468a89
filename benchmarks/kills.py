"""kill -9 at random moments of the default run, resume, and compare with the run that was left alone.

python -m securecluster.benchmarks.kills [number of kills, 50]
"""

from __future__ import annotations

import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from securecluster.benchmarks.table import write

SAME = ("history.jsonl", "models.safetensors", "server.safetensors", "transcript/index.jsonl")
COMMAND = [sys.executable, "-m", "securecluster"]


def result(folder: Path) -> dict[str, Any]:
    """result.json without its clock."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    del found["seconds"]
    return found


def kill_once(out: Path, delay: float) -> tuple[bool, int]:
    """Start a run, kill it after `delay` seconds; whether it left a folder, and the rounds it had written."""
    with subprocess.Popen([*COMMAND, "run", "cfl", "--quiet", "--dropout", "0.02", "--out", str(out)]) as process:
        time.sleep(delay)
        process.kill()
    history = out / "history.jsonl"
    return (out / "config.json").exists(), len(history.read_text().splitlines()) if history.exists() else 0


def main(kills: int = 50) -> None:
    """Print and write one row per kill."""
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as parent:
        whole = Path(parent) / "whole"
        start = time.monotonic()
        subprocess.run([*COMMAND, "run", "cfl", "--quiet", "--dropout", "0.02", "--out", str(whole)], check=True)
        length = time.monotonic() - start
        tries = 0
        while len(rows) < kills:
            tries += 1
            out, delay = Path(parent) / f"run{tries}", draw.uniform(0.1, 1.0) * length
            began, rounds = kill_once(out, delay)
            if not began:  # killed before there was anything to resume
                assert not out.exists(), "a half-written folder"
                continue
            if (out / "result.json").exists():  # killed after it had ended
                continue
            subprocess.run([*COMMAND, "resume", str(out), "--quiet"], check=True)
            equal = result(out) == result(whole) and all((out / n).read_bytes() == (whole / n).read_bytes() for n in SAME)
            rows.append({"kill": len(rows), "seconds": round(delay, 3), "rounds_written": rounds, "equal": equal})
            print(rows[-1], flush=True)
    print(f"equal {sum(r['equal'] for r in rows)} of {kills}")
    print(write("kills", rows))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
