"""Measure FL+HC on IID MNIST, whose clients should stay one cluster.

This is in Sections III-A and III-B of Briggs et al. 2020.

python -m benchmarks.papers.flhc_iid [--seeds 3] [--full] [--minutes 10]

Clusters are counted over cf and n, and over metric and linkage.

The paper, in words: with l2, ward and the threshold 3.0 there is one cluster but for n = 1; with l2
and cosine there is one cluster whatever the linkage, with l1 there are several. Here the pairs of
metric and linkage are cut by the default rule (not in the paper). Scales and columns are
`flhc_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from benchmarks.papers.flhc_runs import BEFORE, PAIRS, SHARES, grid, pairs, table
from benchmarks.papers.sheet import Cell, Sheet, options

PAPER: dict[tuple[float, int], str] = {}
# III-A: clusters at n = 1 alone, whatever the client fraction
for _cf in SHARES:
    for _n in BEFORE:
        PAPER[_cf, _n] = "one cluster, as FL"
    PAPER[_cf, 1] = "several clusters, accuracy very slightly lower"
BY_PAIR = dict.fromkeys(PAIRS, "one cluster, as FL")
for _metric, _linkage in PAIRS:
    # III-B: the Manhattan distance alone splits iid clients
    if _metric == "l1":
        BY_PAIR[_metric, _linkage] = "several clusters, accuracy lower"


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return FL, FL+HC with the paper's threshold over cf and n, and with the default rule by pair.

    A pair is one of metric and linkage.

    Args:
        scale: "cpu" or "full".
        seeds: the number of seeds.
    """
    over_rounds = grid("mnist", "iid", scale, seeds, 3.0, PAPER)
    # the thresholds of III-B are not printed
    by_pair = pairs("mnist", "iid", scale, seeds, "gap", BY_PAIR)
    # the cells of FL are in the grid already
    clustered = [cell for cell in by_pair if cell["method"] == "flhc"]
    return [*over_rounds, *clustered]


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure, print."""
    by = ("cf", "n", "metric", "linkage", "threshold")
    return table("flhc_iid", cells, by, options(__doc__, argv))


if __name__ == "__main__":
    main()
