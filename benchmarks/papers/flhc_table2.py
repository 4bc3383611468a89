"""Label-swapped MNIST (Briggs et al. 2020, Table II): over client fraction cf and rounds n before
the clustering.

python -m securecluster.benchmarks.papers.flhc_table2 [--seeds 3] [--full] [--minutes 10]

Four groups of 25 clients, each with two labels swapped. The threshold is the paper's, 3.0.
Scales and columns are `flhc_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.benchmarks.papers.flhc_runs import grid, table
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options

# by (cf, n): accuracy after the clustering and at round 50, share of clients at the target after it
# and at round 50, with ratios to FL
PAPER = {
    (0.1, 1): "98.2 (1.3x) 98.7 (1.3x) 49.0 (–) 61.0 (–)",
    (0.1, 3): "98.1 (1.3x) 99.0 (1.3x) 46.0 (–) 74.0 (–)",
    (0.1, 5): "98.4 (1.3x) 99.0 (1.3x) 48.0 (–) 73.0 (–)",
    (0.1, 10): "98.6 (1.4x) 99.0 (1.3x) 63.0 (5.3x) 75.0 (–)",
    (0.2, 1): "98.2 (1.3x) 98.6 (1.2x) 48.0 (–) 64.0 (–)",
    (0.2, 3): "98.2 (1.3x) 99.1 (1.3x) 43.0 (–) 77.0 (–)",
    (0.2, 5): "98.4 (1.3x) 99.1 (1.3x) 52.0 (–) 80.0 (–)",
    (0.2, 10): "98.6 (1.2x) 99.0 (1.3x) 57.0 (–) 77.0 (–)",
    (0.5, 1): "98.1 (1.3x) 98.5 (1.2x) 49.0 (–) 54.0 (–)",
    (0.5, 3): "98.3 (1.3x) 99.0 (1.2x) 51.0 (–) 73.0 (–)",
    (0.5, 5): "98.5 (1.3x) 99.1 (1.2x) 54.0 (–) 76.0 (–)",
    (0.5, 10): "98.6 (1.2x) 99.2 (1.2x) 61.0 (–) 79.0 (–)",
    (1.0, 1): "98.3 (1.3x) 98.4 (1.2x) 53.0 (–) 56.0 (–)",
    (1.0, 3): "98.3 (1.3x) 99.0 (1.2x) 54.0 (–) 74.0 (–)",
    (1.0, 5): "98.5 (1.3x) 99.0 (1.2x) 59.0 (–) 76.0 (–)",
    (1.0, 10): "98.6 (1.2x) 99.0 (1.2x) 59.0 (–) 74.0 (–)",
}


def cells(scale: str, seeds: int) -> list[Cell]:
    """FL, and FL+HC with ward, l2 and the threshold 3.0."""
    return grid("mnist", "label-swap", scale, seeds, 3.0, PAPER)


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure, print."""
    return table("flhc_table2", cells, ("cf", "n"), options(__doc__, argv))


if __name__ == "__main__":
    main()
