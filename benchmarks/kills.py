"""Stop runs of every protocol at random moments, resume them, and compare with runs that were left
alone.

python -m securecluster.benchmarks.kills [--kills 4] [--protocols cfl flhc ...]

Half of the runs are killed (`kill -9`), a quarter each get SIGTERM and Ctrl-C. What a resumed run
leaves must be byte for byte what the run that was left alone leaves, clocks aside.
"""

from __future__ import annotations

import argparse
import json
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from securecluster.app.registry import PROTOCOLS
from securecluster.benchmarks.table import write

SAME = (
    "history.jsonl", "ledger.jsonl", "models.safetensors", "server.safetensors",
    "transcript/index.jsonl",
)  # fmt: skip
COMMAND = [sys.executable, "-m", "securecluster"]
OPTIONS = [
    "--clients",
    "6",
    "--samples",
    "24",
    "--model",
    "mlp-32",
    "--rounds",
    "14",
    "--dropout",
    "0.05",
]
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
OWN = {"nsim": ["--data", "mobility", "--samples", "60", "--synthetic", "8", "--model", "auto"]}


def result(folder: Path) -> dict[str, Any]:
    """Return result.json without its clock."""
    found: dict[str, Any] = json.loads((folder / "result.json").read_text())
    del found["seconds"]
    return found


def command(protocol: str, out: Path) -> list[str]:
    """Return the command of one run."""
    own = OWN.get(protocol, ["--clusters", "2"])
    return [*COMMAND, "run", protocol, *OPTIONS, *own, "--quiet", "--out", str(out)]


def same(one: Path, other: Path) -> bool:
    """Return whether two run folders hold the same, clocks aside."""
    if result(one) != result(other):
        return False
    return all(content(one / name) == content(other / name) for name in SAME)


def content(path: Path) -> bytes | None:
    """Return a file's bytes; None where there is no such file, as of a ledger without releases."""
    return path.read_bytes() if path.is_file() else None


def stop_once(protocol: str, out: Path, how: signal.Signals, delay: float) -> int | None:
    """Start a run and stop it after `delay` seconds.

    Returns:
        The rounds that it had written; None where it was not stopped within a run.
    """
    with subprocess.Popen(command(protocol, out), stderr=subprocess.DEVNULL) as process:
        time.sleep(delay)
        process.send_signal(how)
    if not (out / "config.json").exists() or (out / "result.json").exists():
        return None
    history = out / "history.jsonl"
    return len(history.read_text().splitlines()) if history.exists() else 0


def measure(protocol: str, kills: int, home: Path, draw: random.Random) -> list[dict[str, Any]]:
    """Return a row for each time that a run of a protocol was stopped."""
    whole = home / f"{protocol}-whole"
    began = time.monotonic()
    subprocess.run(command(protocol, whole), check=True)
    length = time.monotonic() - began
    rows: list[dict[str, Any]] = []
    for attempt in range(20 * kills):
        if len(rows) == kills:
            break
        how = SIGNALS[len(rows) % len(SIGNALS)]
        out, delay = home / f"{protocol}-{attempt}", draw.uniform(0.3, 1.0) * length
        rounds = stop_once(protocol, out, how, delay)
        if rounds is None:
            continue
        subprocess.run([*COMMAND, "resume", str(out), "--quiet"], check=True)
        row = {
            "protocol": protocol,
            "signal": how.name,
            "seconds": round(delay, 3),
            "rounds_written": rounds,
            "equal": same(out, whole),
        }
        rows.append(row)
        print(row, flush=True)
    return rows


def main() -> None:
    """Print and write one row per stopped run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4, help="of each protocol")
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS))
    options = parser.parse_args()
    draw = random.Random(0)
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as home:
        for protocol in options.protocols:
            rows += measure(protocol, options.kills, Path(home), draw)
            path = write("kills", rows)  # after each protocol, so that a long run loses nothing
    print(f"equal {sum(row['equal'] for row in rows)} of {len(rows)}")
    print(path)


if __name__ == "__main__":
    main()
