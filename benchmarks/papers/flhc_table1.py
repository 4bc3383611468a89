"""Pathological MNIST (Briggs et al. 2020, Table I): over client fraction cf and rounds n before the
clustering.

python -m securecluster.benchmarks.papers.flhc_table1 [--seeds 3] [--full] [--minutes 10]

Each client holds two labels. The threshold is the paper's, 3.0.
Scales and columns are `flhc_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.benchmarks.papers.flhc_runs import grid, table
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options

# by (cf, n): accuracy after the clustering and at round 50, share of clients at the target after it
# and at round 50, with ratios to FL
PAPER = {
    (0.1, 1): "91.1 (1.9x) 98.5 (1.0x) 62.0 (20.7x) 83.0 (1.8x)",
    (0.1, 3): "80.4 (1.7x) 97.1 (1.0x) 46.0 (46.0x) 67.0 (1.5x)",
    (0.1, 5): "89.3 (1.1x) 97.9 (1.0x) 45.0 (7.5x) 74.0 (1.6x)",
    (0.1, 10): "92.0 (1.1x) 98.2 (1.0x) 40.0 (2.9x) 77.0 (1.7x)",
    (0.2, 1): "91.4 (1.6x) 98.7 (1.0x) 63.0 (31.5x) 87.0 (2.0x)",
    (0.2, 3): "92.5 (1.6x) 98.3 (1.0x) 58.0 (14.5x) 73.0 (1.7x)",
    (0.2, 5): "90.2 (1.0x) 98.4 (1.0x) 49.0 (5.4x) 74.0 (1.7x)",
    (0.2, 10): "93.6 (1.0x) 98.3 (1.0x) 55.0 (3.9x) 71.0 (1.6x)",
    (0.5, 1): "91.9 (1.5x) 98.7 (1.0x) 68.0 (68.0x) 89.0 (1.7x)",
    (0.5, 3): "94.6 (1.1x) 98.8 (1.0x) 67.0 (16.8x) 83.0 (1.6x)",
    (0.5, 5): "93.6 (1.0x) 98.3 (1.0x) 61.0 (7.6x) 78.0 (1.5x)",
    (0.5, 10): "93.8 (1.0x) 98.0 (1.0x) 39.0 (2.0x) 63.0 (1.2x)",
    (1.0, 1): "94.1 (1.3x) 98.6 (1.0x) 64.0 (32.0x) 77.0 (1.6x)",
    (1.0, 3): "94.3 (1.1x) 98.5 (1.0x) 64.0 (8.0x) 81.0 (1.7x)",
    (1.0, 5): "93.6 (1.0x) 99.1 (1.0x) 61.0 (5.1x) 82.0 (1.7x)",
    (1.0, 10): "95.6 (1.0x) 98.8 (1.0x) 48.0 (2.8x) 70.0 (1.4x)",
}


def cells(scale: str, seeds: int) -> list[Cell]:
    """FL, and FL+HC with ward, l2 and the threshold 3.0."""
    return grid("mnist", "pathological", scale, seeds, 3.0, PAPER)


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure, print."""
    return table("flhc_table1", cells, ("cf", "n"), options(__doc__, argv))


if __name__ == "__main__":
    main()
