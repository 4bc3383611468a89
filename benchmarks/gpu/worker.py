"""Do the pieces in order, within a budget, and send the watchdog each beginning and each result.

An event is one line of JSON on standard output. The watchdog may end this process at any moment: it
has all that was told.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from securecluster.benchmarks.gpu.pieces import Budget, Check, Piece, Skipped
from securecluster.errors import UsageError

if TYPE_CHECKING:
    import torch

Tell = Callable[[dict[str, Any]], None]
# seconds that a piece may take whatever its estimate: libraries are loaded on the way
PATIENCE = 60.0


def work(pieces: Sequence[Piece], device: torch.device, budget: Budget, tell: Tell) -> None:
    """Do what fits into the budget; an exception in one piece is told, and the rest goes on."""
    for piece in pieces:
        needed = piece.needs(device, budget)
        left = budget.left()
        if needed > left:
            reason = f"needs about {needed:.0f} s, and {max(left, 0):.0f} s were left"
            tell({"event": "skipped", "piece": piece.name, "kind": piece.kind, "reason": reason})
            continue
        limit = PATIENCE + 5 * needed if piece.kind == "check" else PATIENCE + left
        tell({"event": "begin", "piece": piece.name, "kind": piece.kind, "limit": limit})
        began = budget.now()
        for event in _done(piece, device, budget):
            tell(event)
        if piece.kind == "check":
            budget.learn(piece.cost, budget.now() - began)


def _done(piece: Piece, device: torch.device, budget: Budget) -> list[dict[str, Any]]:
    """Return the events that a piece ends with."""
    try:
        rows = piece.run(device, budget)
        return [{"event": piece.kind, "piece": piece.name, "rows": rows}]
    except Skipped as reason:
        return [_skipped(piece, str(reason))]
    except ImportError as error:
        return [_skipped(piece, f"the package {error.name or error} cannot be imported")]
    except Exception as error:
        message = f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
        _forget_memory(device)
        if isinstance(piece, Check):
            row = piece.row("failed", message=message)
            return [{"event": "check", "piece": piece.name, "rows": [row]}]
        return [_skipped(piece, message)]


def _skipped(piece: Piece, reason: str) -> dict[str, Any]:
    return {"event": "skipped", "piece": piece.name, "kind": piece.kind, "reason": reason}


def _forget_memory(device: torch.device) -> None:
    """Give back what an error (out of memory, say) left on the device."""
    if device.type == "cuda":
        import torch

        torch.cuda.empty_cache()


def machine(device: torch.device) -> dict[str, str]:
    """Return what the results come from."""
    import torch

    from securecluster.benchmarks.table import machine as processor

    found = {"device": str(device), "processor": processor()}
    if device.type == "cuda":
        memory = torch.cuda.get_device_properties(device).total_memory / (1 << 30)
        found |= {
            "GPU": torch.cuda.get_device_name(device),
            "GPU memory": f"{memory:.0f} GiB",
            "CUDA": str(torch.version.cuda),
            "cuDNN": str(torch.backends.cudnn.version()),  # type: ignore[no-untyped-call]
            "driver": _driver(),
        }
    return found


def _driver() -> str:
    import subprocess

    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, check=True, timeout=20)
    except (OSError, subprocess.SubprocessError):
        return "unknown"
    if not done.stdout.strip():
        return "unknown"
    return done.stdout.splitlines()[0].strip()


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
    from securecluster.benchmarks.gpu.checks import every_check
    from securecluster.benchmarks.gpu.timings import every_timing

    pieces: list[Piece] = [*every_check(), *every_timing()]
    names = [[piece.name, piece.kind] for piece in pieces]
    notes = []
    if task["device"] == "auto" and device.type == "cpu":
        notes.append(
            "no CUDA device is here, so everything ran on the CPU: no CUDA path was checked"
        )
    tell({"event": "machine", "machine": machine(device), "pieces": names, "notes": notes})
    done = set(task["done"])
    with reproducible(device):
        work([piece for piece in pieces if piece.name not in done], device, budget, tell)
    tell({"event": "end"})


if __name__ == "__main__":
    main()
