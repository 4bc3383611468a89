"""IID MNIST (Briggs et al. 2020, III-A and III-B): clients that should stay one cluster, over cf
and n, and over metric and linkage.

python -m securecluster.benchmarks.papers.flhc_iid [--seeds 3] [--full] [--minutes 10]

The paper, in words: with l2, ward and the threshold 3.0 one cluster but for n = 1; with l2 and
    cosine one cluster whatever the linkage,
with l1 several. Here the pairs of metric and linkage are cut by our default rule. Scales and
columns are `flhc_runs`'s. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence

from securecluster.benchmarks.papers.flhc_runs import BEFORE, PAIRS, SHARES, grid, pairs, table
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options

PAPER: dict[tuple[float, int], str] = {}
for _cf in SHARES:
    for _n in BEFORE:
        PAPER[_cf, _n] = "one cluster, as FL"
    PAPER[_cf, 1] = "several clusters, accuracy very slightly lower"
BY_PAIR = dict.fromkeys(PAIRS, "one cluster, as FL")
for _metric, _linkage in PAIRS:
    if _metric == "l1":
        BY_PAIR[_metric, _linkage] = "several clusters, accuracy lower"


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return FL, FL+HC with the paper's threshold over cf and n, and with our default rule by pair.

    A pair is one of metric and linkage.
    """
    by_pair = [
        cell
        for cell in pairs("mnist", "iid", scale, seeds, "gap", BY_PAIR)
        if cell["method"] == "flhc"
    ]
    return [*grid("mnist", "iid", scale, seeds, 3.0, PAPER), *by_pair]


def main(argv: Sequence[str] | None = None) -> Sheet:
    """Measure, print."""
    return table(
        "flhc_iid", cells, ("cf", "n", "metric", "linkage", "threshold"), options(__doc__, argv)
    )


if __name__ == "__main__":
    main()
