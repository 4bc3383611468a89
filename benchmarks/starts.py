"""How often IFCA finds the clusters from one start, and from the best of several short ones.

python -m securecluster.benchmarks.starts [--seeds 20] [--full] [--minutes 10]

Digits, label swap in four clusters, 20 clients, k = 4, 20 rounds. `--full` is the same at 40
rounds.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from securecluster import Federation
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.protocols import IFCA

KINDS = ((1, 1), (10, 3), (10, 5))  # starts, rounds of each
ROUNDS = {"cpu": 20, "full": 40}


def cells(scale: str, seeds: int) -> list[Cell]:
    """Kinds of restarts by seed."""
    kinds = [(seed, starts, each) for seed in range(seeds) for starts, each in KINDS]
    return [
        {"scale": scale, "rounds": ROUNDS[scale], "starts": s, "start_rounds": e, "seed": seed}
        for seed, s, e in kinds
    ]


def measure(cell: Cell) -> dict[str, Any]:
    """One run."""
    fitted = IFCA(rounds=cell["rounds"], starts=cell["starts"], start_rounds=cell["start_rounds"])
    fitted.fit(Federation.simulate("digits", seed=cell["seed"]))
    assert fitted.agreement_ is not None
    sent = fitted.bytes_["up"] + fitted.bytes_["down"]
    return {
        "exact": fitted.agreement_["exact"],
        "accuracy": fitted.history_[-1]["accuracy"],
        "bytes": sent,
    }


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen, sheet = options(__doc__, argv, seeds=20), Sheet("starts")
    rows = sheet.fill(cells(chosen.scale, chosen.seeds), measure, chosen.minutes)
    summarise(rows, ["rounds", "starts", "start_rounds"], ["exact", "accuracy", "bytes"])
    return sheet.path


if __name__ == "__main__":
    print(main())
