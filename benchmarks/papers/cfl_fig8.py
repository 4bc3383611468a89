"""CFL on CIFAR-10 with permuted labels (Sattler et al. 2019, Fig. 8): accuracy and separation gap
per cluster over rounds.

python -m securecluster.benchmarks.papers.cfl_fig8 [--seeds 3] [--full] [--minutes 10]

The paper: the training data split evenly among 20 clients in 4 clusters, each with one random
    permutation of the labels (test labels too),
a 5-layer convolutional network, 3 local epochs at batch 100; splits in rounds 50, 100 and 150;
accuracy stagnates at about 20 % before the first and is close to 60 % after the last; g is large
before a split and below zero in every cluster at the end. `--full` has this setting with cnn-cifar
and 200 rounds, and needs a GPU; the scale for a CPU has cnn-ali, 300 samples a client, batch 20 and
60 rounds. Ours: the learning rate; and, since ε1 and ε2 are not printed, the rounds of splits are
given: clusters may split in 50, 100, 150 of 200 alone (in proportion where there are fewer), and do
so where CFL's default significance test and γ_max say so. The rows have the true g of those rounds,
so a correct split that was refused shows. A client is tested on its share of the test set, not on
all of it. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Federation, LabelPermutation
from securecluster.benchmarks.papers.cfl_runs import training
from securecluster.benchmarks.papers.sheet import (
    Cell,
    Row,
    Sheet,
    figure,
    numbers,
    options,
    summarise,
)
from securecluster.clustering.similarity import cosine
from securecluster.protocols import CFL
from securecluster.protocols.cfl.separation import separation_gap
from securecluster.protocols.cfl.split_test import SplitStatistics
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel

COMMON = {"data": "cifar10", "clients": 20, "clusters": 4, "epochs": 3, "lr": 0.1}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"model": "cnn-ali", "samples": 300, "batch_size": 20, "rounds": 60},
    "full": {"model": "cnn-cifar", "samples": None, "batch_size": 100, "rounds": 200},
}
PAPER = (
    "splits in rounds 50, 100, 150; accuracy 20 % before, close to 60 % after; "
    "g below zero at the end"
)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return one run a seed."""
    return [
        {"scale": scale, **COMMON, **SCALES[scale], "seed": seed, "paper": PAPER}
        for seed in range(seeds)
    ]


def splits(rounds: int) -> list[int]:
    """Return the rounds in which clusters may split: after a quarter, a half and three quarters."""
    return [rounds * quarter // 4 for quarter in (1, 2, 3)]


@dataclass
class Watched(CFL):
    """CFL that splits in set rounds, with an observer of separation gaps.

    The observer adds the true gap of each cluster and the accuracy of each true cluster.
    """

    # of this round, and rounds so far; without annotations, so no hyper-parameters
    split_tests = tuple[SplitStatistics, ...]()
    seen = 0  # rounds

    def _test(self, net: ServerChannel, state: Any, statistics: SplitStatistics) -> None:
        super()._test(net, state, statistics)
        self.split_tests = (*self.split_tests, statistics)

    def _incongruent(self, state: Any, statistics: SplitStatistics) -> bool:
        return self.seen + 1 in splits(self.rounds) and super()._incongruent(state, statistics)

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add `gaps`, (cluster, g) pairs, and `by_truth`, a list over true clusters."""
        line = super().observe(federation, client, state, accuracy)
        truth = federation.truth
        assert truth is not None
        gaps = []
        for statistics in self.split_tests:
            alpha = cosine(statistics.inner).cpu().numpy()
            clusters = [truth[i] for i in statistics.replied]
            gaps.append((statistics.cluster, separation_gap(alpha, clusters)))
        by_truth = []
        for c in sorted(set(truth)):
            members = np.equal(truth, c)
            by_truth.append(float(np.nanmean(accuracy[members])))
        self.split_tests = ()
        self.seen += 1
        return {**line, "gaps": gaps, "by_truth": by_truth}


def measure(cell: Cell) -> dict[str, Any]:
    """Return splits, accuracy in the round of the first split and at the end, and gaps then.

    Beside them are the curves that the picture needs.
    """
    scenario = LabelPermutation(clusters=cell["clusters"])
    federation = Federation.simulate(
        cell["data"],
        scenario=scenario,
        clients=cell["clients"],
        samples=cell["samples"],
        seed=cell["seed"],
    )
    fitted = Watched(**training(cell), eps1=1.0, tree=False).fit(federation)
    history = fitted.history_
    agreement = fitted.agreement_
    assert agreement is not None
    gaps_by_round = [dict(line["gaps"]) for line in history]
    last_gaps = [gap for _, gap in history[-1]["gaps"] if gap is not None]
    first = next((line for line in history if line["splits"]), None)
    results = {
        "splits": [line["round"] for line in history if line["splits"]],
        "exact": agreement["exact"],
        "accuracy_before": first and first["accuracy"],
        "accuracy_after": history[-1]["accuracy"],
        "gap_at_first_split": first and first["gaps"][0][1],
        "largest_gap_at_end": max(last_gaps, default=None),
    }
    for c in range(cell["clusters"]):
        results[f"accuracy_{c}"] = [line["by_truth"][c] for line in history]
        results[f"gap_{c}"] = [gaps.get(c) for gaps in gaps_by_round]
    return results


def draw(rows: Sequence[Row]) -> Any:
    """Draw accuracy by true cluster above and g by found cluster below.

    There is a column for each seed.
    """
    done = [row for row in rows if row.get("exact")]
    columns = max(1, len(done))
    picture, axes = figure(4.2 * columns, 5.6, rows=2, columns=columns)
    for (top, bottom), row in zip(axes.T, done, strict=False):
        for c in range(int(row["clusters"])):
            for axis, name in ((top, f"accuracy_{c}"), (bottom, f"gap_{c}")):
                curve = numbers(row[name])
                rounds = range(1, len(curve) + 1)
                label = name.replace("_", " of cluster ")
                axis.plot(rounds, curve, color=f"C{c}", linewidth=1, label=label)
        mark_splits((top, bottom), row)
        top.set(title=f"{row['data']}, seed {row['seed']}", ylabel="test accuracy (true clusters)")
        bottom.set(xlabel="round", ylabel="separation gap g (found clusters)")
    return picture


def mark_splits(axes: Sequence[Any], row: Row) -> None:
    """Draw the rounds of splits and the legends of one seed, and in its lower panel g = 0.

    Args:
        axes: the upper and the lower panel.
        row: the seed's measurements.
    """
    for axis in axes:
        for number in numbers(row["splits"]):
            axis.axvline(number, color="grey", linestyle=":", linewidth=1)
        axis.legend(fontsize=6)
    axes[-1].axhline(0, color="grey", linewidth=0.8)


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, print, draw."""
    chosen = options(__doc__, argv)
    sheet = Sheet("cfl_fig8")
    requested = cells(chosen.scale, chosen.seeds)
    rows = sheet.fill(requested, measure, chosen.minutes)
    sheet.expect(cells("full", chosen.seeds))
    summarise(
        rows,
        ["data", "samples"],
        ["exact", "accuracy_before", "accuracy_after", "gap_at_first_split", "largest_gap_at_end"],
    )
    for row in rows:
        print(f"seed {row['seed']}: {row['status']}, splits in rounds {row.get('splits')}")
    return sheet.save(draw(rows), chosen.scale)


if __name__ == "__main__":
    print(main())
