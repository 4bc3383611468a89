"""Measure perplexity of CFL's clusters and of the shared model on AG-News.

This is Fig. 9 of Sattler et al. 2019.

python -m benchmarks.papers.cfl.fig9 [--seeds 3] [--full] [--minutes 25]

The paper: 120,000 articles in 20 corpora of one size, each of one of four topics; a two-layer LSTM
predicts the next word; 100 rounds of 3 local epochs at batch 100. Clients are separated in rounds
30, 60 and 90. The shared model stagnates at a perplexity of 42 to 43, and after the last separation
every client is below 36.

`--full` has these with all articles at hand, and needs a GPU. The scale for a CPU has 300 windows
of 20 words a client, one epoch at batch 10 and 24 rounds.

Not in the paper: the vocabulary of 2000 words (so perplexities cannot be compared with the
paper's), the widths of lstm-words and the learning rate. ε1 and ε2 are not printed either: after
30 %, 60 % and 90 % of the rounds one cluster splits, the one whose sides are the least similar
(the smallest α_cross^max), where γ_max allows it. So three splits are given, and the members of
each half are found. A client is tested on windows of its own topic. Articles are read from
SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from benchmarks.grid import Grid, federation_of, with_seeds
from benchmarks.papers.cfl import fig8 as cfl_fig8
from benchmarks.papers.cfl.fig8 import curve, mark_splits, report
from benchmarks.papers.cfl.runs import training
from benchmarks.sheet import Cell, Row, figure, numbers
from benchmarks.table import SEEDED
from securecluster.clustering.bipartition import bipartition
from securecluster.data import Topics
from securecluster.protocols import FedAvg
from securecluster.protocols.cfl.split_test import SplitStatistics
from securecluster.runtime.server_channel import ServerChannel

COMMON = {
    "data": "ag_news",
    "clients": 20,
    "clusters": 4,
    "model": "lstm-words",
    "lr": 5.0,  # not in the paper
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"samples": 300, "epochs": 1, "batch_size": 10, "rounds": 24},
    # epochs, batch size and rounds of VI-C; the CPU's are not in the paper
    "full": {"samples": None, "epochs": 3, "batch_size": 100, "rounds": 100},
}
PAPER = (
    "separated in rounds 30, 60 and 90; perplexity 43 before, less than 36 after, "
    "42 for the shared model"
)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one run of CFL and one of FedAvg a seed."""
    setting = {"scale": scale, **COMMON, **SCALES[scale], "paper": PAPER}
    return with_seeds([setting], range(seeds))


def splits(rounds: int) -> list[int]:
    """Return the rounds in which clusters may split: after 30, 60 and 90 %."""
    # 30, 60 and 90 of the paper's 100 rounds
    return [rounds * share // 10 for share in (3, 6, 9)]


@dataclass
class Watched(cfl_fig8.Watched):
    """CFL that splits one cluster in each of the rounds of this figure."""

    def _test(self, net: ServerChannel, state: Any, statistics: SplitStatistics) -> None:
        super()._test(net, state, statistics)
        rivals = [other for other in self.split_tests if other.sides]
        rivals.sort(key=alike)
        # only the cluster with the least similar sides splits
        for other in rivals[1:]:
            other.sides = None

    def _incongruent(self, state: Any, statistics: SplitStatistics) -> bool:
        return self.seen + 1 in splits(self.rounds)

    def _significant(self, *_: Any) -> bool:
        # three splits are given, so no test decides whether there is one
        return True


def alike(statistics: SplitStatistics) -> float:
    """Return α_cross^max of a cluster's bipartition.

    Args:
        statistics: of the cluster's split test.
    """
    alpha = statistics.evidence.similarities()
    return bipartition(alpha).cross_max


def measure(cell: Cell) -> dict[str, Any]:
    """Return splits, perplexities and ARI of both methods, and the curves of the picture.

    Args:
        cell: the setting of both runs.
    """
    federation = federation_of(cell, Topics(clusters=cell["clusters"]))
    watched = Watched.of_one_run()
    protocol = watched(**training(cell), eps1=1.0, tree=False)
    fitted = protocol.fit(federation, SEEDED)
    # the dotted line of the paper's figure: one shared model, trained for as many rounds
    baseline = FedAvg(**training(cell)).fit(federation, SEEDED)
    shared = [line["perplexity"] for line in baseline.history_]
    history = fitted.history_
    split_lines = [line for line in history if line["splits"]]
    results: dict[str, Any] = {
        "splits": [line["round"] for line in split_lines],
        "perplexity_before": None,
        "perplexity_after": history[-1]["perplexity"],
        "perplexity_shared": shared[-1],
        "exact": fitted.agreement_ and fitted.agreement_["exact"],
        "ari": [line["ari"] for line in history],
        "gap_at_first_split": None,
        "largest_gap_at_end": cfl_fig8.largest_gap(history[-1]),
        "shared": shared,
    }
    if split_lines:
        first = split_lines[0]
        results["perplexity_before"] = first["perplexity"]
        results["gap_at_first_split"] = first["gaps"][0][1]
    return results | cfl_fig8.curves_by_cluster(history, cell["clusters"], "perplexity")


def draw(rows: Sequence[Row]) -> Any:
    """Draw perplexity above and g by predicted cluster below, with a column for each seed.

    Perplexity is that of each topic and of the shared model.
    """
    measured = [row for row in rows if row.get("exact")]
    columns = max(1, len(measured))
    picture, axes = figure(4.2 * columns, 5.6, rows=2, columns=columns)
    for (top, bottom), row in zip(axes.T, measured, strict=False):
        topics = []
        for c in range(int(row["clusters"])):
            perplexity = numbers(row[f"perplexity_{c}"])
            gap = numbers(row[f"gap_{c}"])
            curve(top, perplexity, f"C{c}", f"topic {c}")
            curve(bottom, gap, f"C{c}", f"found cluster {c}")
            topics.append(perplexity)
        mean = np.mean(topics, axis=0)
        shared = numbers(row["shared"])
        curve(top, mean, "black", "clusters, mean", width=1.6)
        curve(top, shared, "black", "shared model, mean", style=":", width=1.6)
        mark_splits((top, bottom), row)
        title = f"{row['data']}, seed {row['seed']}"
        top.set(title=title, ylabel="perplexity on held-out text")
        bottom.set(xlabel="round", ylabel="separation gap g (found clusters)")
    return picture


GRID = Grid(
    __doc__,
    "cfl_fig9",
    cells,
    measure,
    by=["data", "samples"],
    values=[
        "exact",
        "perplexity_before",
        "perplexity_after",
        "perplexity_shared",
        "gap_at_first_split",
        "largest_gap_at_end",
    ],
    minutes=25.0,
    full="last",
    report=report,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
