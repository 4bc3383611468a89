"""Measure accuracy and separation gaps of CFL on CIFAR-10 with permuted labels.

This is Fig. 8 of Sattler et al. 2019.

python -m benchmarks.papers.cfl.fig8 [--seeds 3] [--full] [--minutes 10]

The paper: the training data are split evenly among 20 clients in 4 clusters, each with one random
permutation of the labels (test labels too); a 5-layer convolutional network trains for 3 local
epochs at batch 100; clusters split in rounds 50, 100 and 150. Accuracy stagnates at about 20 %
before the first split and is close to 60 % after the last; g is large before a split and below zero
in every cluster at the end.

`--full` has this setting with cnn-cifar and 200 rounds, and needs a GPU. The scale for a CPU has
cnn-ali, 300 samples a client, batch 20 and 60 rounds, and the first seed also with 1,000 samples.
Rows of scale "any round" are for comparison: CFL's defaults, by which clusters split in any round.

The learning rate is not in the paper. Neither are ε1 and ε2, so the rounds of splits are given:
clusters may split only in rounds 50, 100 and 150 of 200 (in proportion where there are fewer), and
do so where CFL's default significance test and γ_max allow it. The rows have the true g of those
rounds, so a correct split that was refused shows. A client is tested on its share of the test set,
not on all of it. Images are read from SECURECLUSTER_DATA or the hub.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, federation_of, with_seeds
from benchmarks.papers.cfl.runs import training
from benchmarks.sheet import Cell, Row, figure, numbers
from benchmarks.table import SEEDED
from securecluster import Federation, LabelPermutation
from securecluster.protocols import CFL
from securecluster.protocols.cfl.protocol import CFLObserver
from securecluster.protocols.cfl.separation import separation_gap
from securecluster.protocols.cfl.split_test import SplitStatistics
from securecluster.runtime.run import Line
from securecluster.runtime.server_channel import ServerChannel

COMMON = {
    "data": "cifar10",
    "clients": 20,
    "clusters": 4,
    "epochs": 3,  # as in all experiments of VI-C
    "lr": 0.1,  # not in the paper
}
SCALES: dict[str, dict[str, Any]] = {
    "cpu": {"model": "cnn-ali", "samples": 300, "batch_size": 20, "rounds": 60},
    # all samples, and batches of 100 as in VI-C
    "full": {"model": "cnn-cifar", "samples": None, "batch_size": 100, "rounds": 200},
}
MORE_SAMPLES = 1000  # about 20 minutes of a processor
ANY_ROUND = "any round"  # scale of runs with CFL's own rule of when clusters split
ROUNDS_OF_OWN_RULE = 20
PAPER = (
    "splits in rounds 50, 100, 150; accuracy 20 % before, close to 60 % after; "
    "g below zero at the end"
)


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return a run for each seed; for a CPU also with more samples, and each by CFL's own rule."""
    setting = {"scale": scale, **COMMON, **SCALES[scale], "paper": PAPER}
    runs = with_seeds([setting], range(seeds))
    if scale != "cpu":
        return runs
    runs.append({**setting, "samples": MORE_SAMPLES, "seed": 0})
    own_rule = {"scale": ANY_ROUND, "rounds": ROUNDS_OF_OWN_RULE}
    return runs + [{**run, **own_rule} for run in runs]


def splits(rounds: int) -> list[int]:
    """Return the rounds in which clusters may split: after a quarter, a half and three quarters."""
    # 50, 100 and 150 of 200 rounds, as in the paper
    return [rounds * quarter // 4 for quarter in (1, 2, 3)]


class GapObserver(CFLObserver):
    """CFL's observer that adds the gap of each cluster and the accuracy of each true cluster."""

    def observe(
        self, federation: Federation, client: Any, state: Any, accuracy: NDArray[np.float64]
    ) -> Line:
        """Add `gaps`, (cluster, g) pairs, and `by_truth`, a list over true clusters.

        Args:
            federation: the clients' data and their true clusters.
            client: the clients' side of the run.
            state: the server's state.
            accuracy: each client's test accuracy, (m,).
        """
        line = super().observe(federation, client, state, accuracy)
        truth = federation.truth
        assert truth is not None
        gaps = []
        for statistics in self.method.split_tests:
            alpha = statistics.evidence.similarities()
            clusters = [truth[i] for i in statistics.evidence.ids]
            # eq. 28 needs the true clusters, so only an observer can compute g
            gap = separation_gap(alpha, clusters)
            gaps.append((statistics.cluster, gap))
        by_truth = []
        for c in sorted(set(truth)):
            members = np.equal(truth, c)
            mean = np.nanmean(accuracy[members])
            by_truth.append(float(mean))
        type(self.method).split_tests = ()
        type(self.method).seen += 1
        return {**line, "gaps": gaps, "by_truth": by_truth}


@dataclass
class Watched(CFL):
    """CFL that splits in set rounds, or by its own rule, with an observer of separation gaps.

    The observer adds the true gap of each cluster and the accuracy of each true cluster. Server and
    observer are objects of their own, so what they share belongs to the class, of which each run
    has one (`of_one_run`).
    """

    # without annotations, so that the data class does not take them for hyper-parameters
    split_tests = tuple[SplitStatistics, ...]()  # of this round
    seen = 0  # rounds so far
    own_rule = False

    @classmethod
    def of_one_run(cls, own_rule: bool = False) -> type[Watched]:
        """Return a class for one run.

        Args:
            own_rule: whether clusters may split in any round.
        """
        return type(cls.__name__, (cls,), {"split_tests": (), "seen": 0, "own_rule": own_rule})

    def _test(self, net: ServerChannel, state: Any, statistics: SplitStatistics) -> None:
        super()._test(net, state, statistics)
        type(self).split_tests = (*self.split_tests, statistics)

    def _incongruent(self, state: Any, statistics: SplitStatistics) -> bool:
        # ε1 and ε2 are not printed, so the figure's rounds take the place of the first test
        if not self.own_rule and self.seen + 1 not in splits(self.rounds):
            return False
        return super()._incongruent(state, statistics)

    @property
    def observer(self) -> GapObserver:
        """Return what the experimenter computes outside the protocol."""
        return GapObserver(self)


def measure(cell: Cell) -> dict[str, Any]:
    """Return splits, accuracy in the round of the first split and at the end, and gaps then.

    Beside them are the curves that the picture needs.

    Args:
        cell: the setting of the run.
    """
    federation = federation_of(cell, LabelPermutation(clusters=cell["clusters"]))
    own_rule = cell["scale"] == ANY_ROUND
    watched = Watched.of_one_run(own_rule)
    # ‖mean Δ‖ is at most max ‖Δ‖, so a share of 1 leaves the time of splits to `_incongruent`
    share = {} if own_rule else {"eps1": 1.0}
    protocol = watched(**training(cell), **share, tree=False)
    fitted = protocol.fit(federation, SEEDED)
    history = fitted.history_
    agreement = fitted.agreement_
    assert agreement is not None
    split_lines = [line for line in history if line["splits"]]
    results: dict[str, Any] = {
        "splits": [line["round"] for line in split_lines],
        "exact": agreement["exact"],
        "accuracy_before": None,
        "accuracy_after": history[-1]["accuracy"],
        "gap_at_first_split": None,
        "largest_gap_at_end": largest_gap(history[-1]),
    }
    if split_lines:
        first = split_lines[0]
        results["accuracy_before"] = first["accuracy"]
        # until the first split there is one cluster, whose gap is the only one
        results["gap_at_first_split"] = first["gaps"][0][1]
    return results | curves_by_cluster(history, cell["clusters"], "accuracy")


def curves_by_cluster(history: Sequence[Line], clusters: int, score: str) -> dict[str, Any]:
    """Return the score of each true cluster and the gap of each found one, over rounds.

    Args:
        history: of a run with `GapObserver`.
        clusters: number of true clusters.
        score: the beginning of its columns' names; those of gaps begin with "gap".
    """
    gaps_by_round = [dict(line["gaps"]) for line in history]
    curves: dict[str, Any] = {}
    for c in range(clusters):
        curves[f"{score}_{c}"] = [line["by_truth"][c] for line in history]
        curves[f"gap_{c}"] = [gaps.get(c) for gaps in gaps_by_round]
    return curves


def largest_gap(line: Line) -> float | None:
    """Return the largest defined gap over the clusters of one round."""
    gaps = [gap for _, gap in line["gaps"] if gap is not None]
    return max(gaps, default=None)


def gaps_when_due(row: Row) -> list[float]:
    """Return the largest gap over found clusters in each round in which clusters may split.

    Args:
        row: a seed's measurements.
    """
    curves = [numbers(row[f"gap_{c}"]) for c in range(int(row["clusters"]))]
    # rounds count from one
    due = [[curve[number - 1] for curve in curves] for number in splits(int(row["rounds"]))]
    return [float(np.nanmax(gaps)) for gaps in due]


def draw(rows: Sequence[Row]) -> Any:
    """Draw accuracy by true cluster above and g by predicted cluster below.

    There is a column for each run.
    """
    measured = [row for row in rows if row.get("exact") and row["scale"] != ANY_ROUND]
    columns = max(1, len(measured))
    picture, axes = figure(4.2 * columns, 5.6, rows=2, columns=columns)
    for (top, bottom), row in zip(axes.T, measured, strict=False):
        for c in range(int(row["clusters"])):
            accuracy = numbers(row[f"accuracy_{c}"])
            gap = numbers(row[f"gap_{c}"])
            curve(top, accuracy, f"C{c}", f"accuracy of cluster {c}")
            curve(bottom, gap, f"C{c}", f"gap of cluster {c}")
        mark_splits((top, bottom), row)
        title = f"{row['data']}, {row['samples'] or 'all'} samples, seed {row['seed']}"
        top.set(title=title, ylabel="test accuracy (true clusters)")
        bottom.set(xlabel="round", ylabel="separation gap g (found clusters)")
    return picture


def curve(
    axis: Any, values: Any, color: str, label: str, style: str = "-", width: float = 1.0
) -> None:
    """Draw values over rounds, which count from one.

    Args:
        axis: the panel.
        values: a value for each round.
        color: the line's color.
        label: the legend's text.
        style: the line's style.
        width: the line's width, in points.
    """
    rounds = range(1, len(values) + 1)
    axis.plot(rounds, values, color=color, linestyle=style, linewidth=width, label=label)


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


def report(rows: Sequence[Row]) -> None:
    """Print the rounds of the splits of each run, and the gaps when splits were due.

    Args:
        rows: of the sheet.
    """
    for row in rows:
        name = f"{row['scale']}, {row['samples'] or 'all'} samples, seed {row['seed']}"
        line = f"{name}: {row['status']}, splits in rounds {row.get('splits')}"
        if row.get("exact") and row["scale"] != ANY_ROUND:
            line += ", largest gaps when due " + ", ".join(f"{g:.3f}" for g in gaps_when_due(row))
        print(line)


GRID = Grid(
    __doc__,
    "cfl_fig8",
    cells,
    measure,
    by=["data", "samples", "scale"],
    values=[
        "exact",
        "accuracy_before",
        "accuracy_after",
        "gap_at_first_split",
        "largest_gap_at_end",
    ],
    full="last",
    report=report,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
