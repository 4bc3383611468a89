"""Stop runs of every protocol at random moments, resume them, and compare them with undisturbed
runs.

python -m benchmarks.kills [--kills 4] [--protocols cfl flhc ...]

Half of the runs are killed (`kill -9`), and a quarter each get SIGTERM and Ctrl-C. The files of a
resumed run must be, byte for byte, those of the undisturbed run, except for clocks.
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

from benchmarks.table import tabulate
from securecluster.protocols.registry import PROTOCOLS

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
    # clients do not reply to some calls; a resumed run has to draw the same ones
    "--dropout",
    "0.05",
    # two runs are compared with each other, noise and all
    "--keys-from-seed",
]
# half of the runs are killed
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGKILL, signal.SIGINT)
OWN = {"nsim": ["--data", "mobility", "--samples", "60", "--synthetic", "8", "--model", "auto"]}


def result(folder: Path) -> dict[str, Any]:
    """Return the values of result.json without its clock.

    Args:
        folder: of a finished run.
    """
    values: dict[str, Any] = json.loads((folder / "result.json").read_text())
    # the wall time of the run, the only value that may differ
    del values["seconds"]
    return values


def command(protocol: str, out: Path) -> list[str]:
    """Return the command of one run.

    Args:
        protocol: its name.
        out: the run's folder.
    """
    data = OWN.get(protocol, ["--clusters", "2"])
    # of an option that stands twice, the last value holds
    return [*COMMAND, "run", protocol, *OPTIONS, *data, "--quiet", "--out", str(out)]


def same(one: Path, other: Path) -> bool:
    """Return whether two run folders have equal contents, except for clocks."""
    if result(one) != result(other):
        return False
    return all(content(one / name) == content(other / name) for name in SAME)


def content(path: Path) -> bytes | None:
    """Return a file's bytes; None where there is no such file."""
    # a run without releases has no ledger
    if not path.is_file():
        return None
    return path.read_bytes()


def stop_once(protocol: str, out: Path, how: signal.Signals, delay: float) -> int | None:
    """Start a run and stop it.

    Args:
        protocol: its name.
        out: the run's folder.
        how: the signal.
        delay: seconds from the start to the signal.

    Returns:
        The number of rounds that it had written; None where it had not begun, or was finished.
    """
    with subprocess.Popen(command(protocol, out), stderr=subprocess.DEVNULL) as process:
        time.sleep(delay)
        process.send_signal(how)
    if not (out / "config.json").exists() or (out / "result.json").exists():
        return None
    history = out / "history.jsonl"
    if not history.exists():
        return 0
    return len(history.read_text().splitlines())


def measure(protocol: str, kills: int, home: Path, draw: random.Random) -> list[dict[str, Any]]:
    """Stop and resume runs of one protocol.

    Args:
        protocol: its name.
        kills: how many runs are stopped.
        home: the folder of all run folders.
        draw: of the moments.

    Returns:
        A line of the table for each stopped run.
    """
    undisturbed = home / f"{protocol}-whole"
    start = time.monotonic()
    subprocess.run(command(protocol, undisturbed), check=True)
    length = time.monotonic() - start
    rows: list[dict[str, Any]] = []
    # a signal that comes before or after a run does not count, so there are more attempts
    for attempt in range(20 * kills):
        if len(rows) == kills:
            break
        how = SIGNALS[len(rows) % len(SIGNALS)]
        out = home / f"{protocol}-{attempt}"
        delay = draw.uniform(0.3, 1.0) * length
        rounds = stop_once(protocol, out, how, delay)
        if rounds is None:
            continue
        subprocess.run([*COMMAND, "resume", str(out), "--quiet"], check=True)
        row = {
            "protocol": protocol,
            "signal": how.name,
            "seconds": round(delay, 3),
            "rounds_written": rounds,
            "equal": same(out, undisturbed),
        }
        rows.append(row)
    return rows


def main() -> None:
    """Print and write one row per stopped run."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=4, help="of each protocol")
    parser.add_argument("--protocols", nargs="+", default=list(PROTOCOLS))
    options = parser.parse_args()
    # shells start background jobs with Ctrl-C ignored, and runs would inherit that
    signal.signal(signal.SIGINT, signal.default_int_handler)
    draw = random.Random(0)
    with tempfile.TemporaryDirectory() as home:
        measured = (
            measure(protocol, options.kills, Path(home), draw) for protocol in options.protocols
        )
        print(tabulate("kills", measured, counted=("equal",)))


if __name__ == "__main__":
    main()
