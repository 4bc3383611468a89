"""Do the pieces in order, within a budget, and send the watchdog each beginning and each result.

An event is one line of JSON on standard output. The watchdog may end this process at any moment: it
has received all events until then.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from benchmarks.gpu.pieces import Budget, Check, Piece, Skipped
from securecluster.errors import UsageError

if TYPE_CHECKING:
    import torch

Tell = Callable[[dict[str, Any]], None]
# seconds that a piece may take whatever its estimate: libraries are loaded on the way
PATIENCE = 60.0


def work(pieces: Sequence[Piece], device: torch.device, budget: Budget, tell: Tell) -> None:
    """Do the pieces that fit into the budget.

    An exception in one piece is an event like a result, and the other pieces follow.

    Args:
        pieces: in the order in which they are done.
        device: the one that is checked or timed.
        budget: the remaining time, and this machine's pace.
        tell: sends an event to the watchdog.
    """
    for piece in pieces:
        needed = piece.needs(device, budget)
        remaining = budget.left()
        if needed > remaining:
            reason = f"needs about {needed:.0f} s, and {max(remaining, 0):.0f} s were left"
            tell(_skipped(piece, reason))
            continue
        # a timing fits itself into the remaining time, so only checks have a limit of their own
        limit = PATIENCE + remaining
        if piece.category == "check":
            limit = PATIENCE + 5 * needed
        tell({"event": "begin", "piece": piece.name, "kind": piece.category, "limit": limit})
        began = budget.now()
        for event in _done(piece, device, budget):
            tell(event)
        # a timing takes as many turns as fit, so it says nothing about the pace
        if piece.category == "check":
            budget.learn(piece.cost, budget.now() - began)


def _done(piece: Piece, device: torch.device, budget: Budget) -> list[dict[str, Any]]:
    """Return the events that a piece ends with.

    Args:
        piece: a check or a timing.
        device: the one that is checked or timed.
        budget: the remaining time, and this machine's pace.
    """
    try:
        rows = piece.run(device, budget)
        return [{"event": piece.category, "piece": piece.name, "rows": rows}]
    except Skipped as reason:
        return [_skipped(piece, str(reason))]
    except ImportError as error:
        package = error.name or error
        return [_skipped(piece, f"the package {package} cannot be imported")]
    except Exception as error:
        # on one line, for the CSV
        sentence = " ".join(str(error).split())
        message = f"{type(error).__name__}: {sentence[:300]}"
        _forget_memory(device)
        if isinstance(piece, Check):
            row = piece.row("failed", message=message)
            return [{"event": "check", "piece": piece.name, "rows": [row]}]
        return [_skipped(piece, message)]


def _skipped(piece: Piece, reason: str) -> dict[str, Any]:
    return {"event": "skipped", "piece": piece.name, "kind": piece.category, "reason": reason}


def _forget_memory(device: torch.device) -> None:
    """Give back what an error (out of memory, say) left on the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    """Return the device, the processor and the software that results come from, by name."""
    import torch

    from benchmarks.table import machine as processor

    facts = {"device": str(device), "processor": processor()}
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        memory = properties.total_memory / (1 << 30)
        facts |= {
            "GPU": torch.cuda.get_device_name(device),
            "GPU memory": f"{memory:.0f} GiB",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "driver": _driver(),
        }
    return facts


def _driver() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    output = done.stdout
    if not output.strip():
        return "unknown"
    first_line = output.splitlines()[0]
    return first_line.strip()


def every_piece() -> list[Piece]:
    """Return all checks and timings, in the order in which they are done."""
    from benchmarks.gpu.checks import every_check
    from benchmarks.gpu.sweeps import sweep_checks, sweep_timings
    from benchmarks.gpu.timings import every_timing

    return [*every_check(), *sweep_checks(), *sweep_timings(), *every_timing()]


def main() -> None:
    """Do the task on standard input: a device's name, seconds, and the pieces that are done."""
    task = json.loads(sys.stdin.readline())
    budget = Budget(float(task["seconds"]))
    events = sys.stdout
    sys.stdout = sys.stderr  # what libraries print is no event

    def tell(event: dict[str, Any]) -> None:
        events.write(json.dumps(event) + "\n")
        events.flush()

    from securecluster.core.devices import choose_device, reproducible

    try:
        device = choose_device(task["device"])
    except UsageError as error:
        tell({"event": "usage", "message": str(error)})
        return
    pieces = every_piece()
    names = [[piece.name, piece.category] for piece in pieces]
    notes = []
    if task["device"] == "auto" and device.type == "cpu":
        notes.append(
            "no CUDA device is here, so everything ran on the CPU: no CUDA path was checked"
        )
    tell({"event": "machine", "machine": machine(device), "pieces": names, "notes": notes})
    done = set(task["done"])
    # as in runs: no TF32, and no kernels that sum in any order
    with reproducible(device):
        remaining = [piece for piece in pieces if piece.name not in done]
        work(remaining, device, budget, tell)
    tell({"event": "end"})


if __name__ == "__main__":
    main()
