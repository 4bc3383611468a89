"""Measure whether more ε ever loses clusters: `signature` in every scenario, over ε.

python -m benchmarks.private.monotone [--seeds 7101 7102] [--scenarios tasks rotation]
python -m benchmarks.private.monotone --summary

Runs are those of `signature_frontier` with the automatic kind: 20 clients of 300 MNIST images each,
one round, ε of all that a client releases before it, for single examples, k told and found. Rules
and constants were chosen on seeds 11 to 16 and 400 to 409. Left out are scenarios of other data
(natural, topics) and those without common clusters (`dirichlet` and `pathological` without a number
of them). Rows are written as they are measured, and a run that was cut off goes on.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from itertools import combinations, product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.private.signature_frontier import measured
from benchmarks.table import RESULTS, Journal, read, write
from securecluster import Federation
from securecluster.data.scenarios import scenario

SCENARIOS: dict[str, tuple[str, int | None, dict[str, Any]]] = {
    "iid": ("iid", None, {}),
    "label-swap": ("label-swap", 4, {}),
    "label-permutation": ("label-permutation", 4, {}),
    "rotation": ("rotation", 4, {}),
    "inversion": ("inversion", 2, {}),
    "pathological": ("pathological", 4, {}),
    "dirichlet": ("dirichlet", 4, {}),
    "client-dirichlet": ("client-dirichlet", None, {}),
    "label-split": ("label-split", 2, {}),
    "tasks": ("tasks", None, {}),
    "label-swap+client-dirichlet": ("label-swap+client-dirichlet", 4, {"alpha": 1.0}),
}
EPSILONS = (0.5, 1.0, 2.0, 4.0, 8.0, 16.0)
SEEDS = tuple(range(7101, 7111))
CLIENTS, SAMPLES = 20, 300
KEY = ("setting", "kind", "epsilon", "seed")
COLUMNS = (*KEY, "chosen", "ari", "exact", "found", "right", "ari_found")
# 97.5 % quantile of Student's t by degrees of freedom, of 3 to 10 federations
STUDENT = {2: 4.303, 3: 3.182, 4: 2.776, 5: 2.571, 6: 2.447, 7: 2.365, 8: 2.306, 9: 2.262}


def dealt(name: str, seed: int) -> Federation:
    """Return the clients of a scenario.

    Args:
        name: one of `SCENARIOS`.
        seed: of the federation.
    """
    text, clusters, options = SCENARIOS[name]
    return Federation.simulate(
        "mnist",
        scenario=scenario(text, clusters, **options),
        clients=CLIENTS,
        samples=SAMPLES,
        seed=seed,
    )


def falls(scores: NDArray[np.float64]) -> Iterator[tuple[float, float]]:
    """Yield by how much the mean falls from each ε to each larger one, and the interval of that.

    Args:
        scores: (federations, ε) in ascending order of ε.

    Yields:
        The mean fall, and the half-width of its paired 95 % t interval.
    """
    n, levels = scores.shape
    for low, high in combinations(range(levels), 2):
        fall = scores[:, low] - scores[:, high]
        yield float(fall.mean()), STUDENT[n - 1] * float(fall.std(ddof=1)) / n**0.5


def summary(path: Path) -> Iterator[dict[str, Any]]:
    """Yield, for each scenario and column, its means over ε and its largest fall.

    Args:
        path: of the measurements.
    """
    rows = list(read(path))
    for name, column in product(SCENARIOS, ("ari", "ari_found")):
        values = [
            [
                float(row[column])
                for row in rows
                if row["setting"] == name and float(row["epsilon"]) == epsilon
            ]
            for epsilon in EPSILONS
        ]
        scores = np.array(values).T
        means = scores.mean(0)
        pairs = list(falls(scores))
        fall, width = max(pairs)
        yield {
            "scenario": name,
            "k": "told" if column == "ari" else "found",
            "runs": len(scores),
            **{f"at {epsilon:g}": round(float(means[n]), 4) for n, epsilon in enumerate(EPSILONS)},
            "fall": round(fall, 4),
            "interval": round(width, 4),
            "falls": any(fall > width for fall, width in pairs),
        }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure what the file does not have yet.

    Args:
        arguments: of the command line.
    """
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=list(SEEDS))
    parser.add_argument("--scenarios", nargs="+", default=list(SCENARIOS), choices=list(SCENARIOS))
    parser.add_argument("--epsilons", type=float, nargs="+", default=list(EPSILONS))
    parser.add_argument("--out", type=Path, default=RESULTS / "monotone.csv")
    parser.add_argument("--summary", action="store_true", help="write means and falls")
    options = parser.parse_args(arguments)
    if options.summary:
        print(write("monotone_summary", list(summary(options.out))))
        return
    journal = Journal(options.out, KEY, COLUMNS)
    for seed in options.seeds:
        for name in options.scenarios:
            federation = dealt(name, seed)
            for epsilon in options.epsilons:
                cell = {"setting": name, "kind": "auto", "epsilon": epsilon, "seed": seed}
                if journal.lacks(cell):
                    journal.append([measured(name, "auto", epsilon, seed, federation, None)])


if __name__ == "__main__":
    main()
