"""Measure what each method makes of clients whose distribution changes after half of the rounds.

python -m benchmarks.clusters.drift [--seeds 5] [--minutes 30]

12 clients (MNIST, 100 samples each, 150 with noise; two clusters of swapped labels) run eight
rounds. Then a third of each cluster takes the labels of the other one, all clients have new
samples, and eight more rounds follow, in one of two ways:

- on: the method goes on as its later rounds do. IFCA and CFL start from the models that they have,
  and assign or split; all others, which cluster once, average within the clusters that they found.
- again: the method is asked again, on the new samples and from θ_0.

With ε = 4 single samples are protected. No sample is in both halves, so each is in one release of
at most this ε.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, as_told, product, with_seeds
from benchmarks.sheet import Cell, Row
from benchmarks.sheet import numbers as read_numbers
from benchmarks.table import SEEDED
from securecluster import FedAvg, Federation, LabelSwap
from securecluster.clustering.labels import members
from securecluster.clustering.metrics import agreement
from securecluster.core.client_names import at
from securecluster.protocols.registry import protocol_class

CLIENTS = 12
SAMPLES = {0: 100, 4: 150}  # of a client, by ε
ROUNDS = 8
FIRST_SEED = 5200
TRAINING = {"model": "linear", "rounds": ROUNDS, "epochs": 2, "batch_size": 25}
PRIVATE = {"dp_unit": "example", "clip": 1.0, "target_epsilon": 4.0}
OPTIONS: dict[str, dict[str, Any]] = {
    "signature": {"k": 2},
    "cfl": {},
    "flhc": {"pre_rounds": 2},
    "srfca": {"local_rounds": 3, "rounds": 3, "refine": 1, "retrain": 2},
    "ifca": {"k": 2, "starts": 3, "start_rounds": 1},
    "clove": {"k": 2},
    "fedavg": {},
}
WITH_NOISE = ("signature", "cfl", "ifca", "fedavg")


def drifting(
    source: Federation, moved: float, seed: int
) -> tuple[Federation, Federation, NDArray[np.bool_]]:
    """Return the clients of a run before and after some of them change their cluster.

    Args:
        source: clients of at least two true clusters. The first half are those before the change;
            the samples of the second half are what these have after it, so no sample is in both.
        moved: share of each cluster's clients that go to the next cluster.
        seed: of who moves, and of whose samples each client gets.

    Returns:
        Both federations, with the same names and each with its true clusters, and who moved (m,).

    Raises:
        ValueError: the second half has too few clients of a cluster.
    """
    assert source.truth is not None
    m = len(source) // 2
    before = source.select(map(at, range(m)))
    truth = np.array(source.truth)
    draw = np.random.default_rng(seed)
    later, moves = truth[:m].copy(), np.zeros(m, dtype=bool)
    clusters = np.unique(truth)
    for place, cluster in enumerate(clusters):
        own = draw.permutation(np.flatnonzero(truth[:m] == cluster))
        gone = own[: round(moved * len(own))]
        later[gone], moves[gone] = clusters[(place + 1) % len(clusters)], True
    samples = {c: iter(draw.permutation(np.flatnonzero(truth[m:] == c)) + m) for c in clusters}
    taken = [next(samples[cluster], None) for cluster in later]
    if None in taken:
        raise ValueError("the second half has too few clients of a cluster: take more clients")
    after = source.select([at(int(k)) for k in taken if k is not None])
    return before, replace(after, names=before.names), moves


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return method by ε by seed; ε = 0 is without noise.

    Args:
        scale: "cpu"; there is no other.
        seeds: how many.
    """
    of_seeds = range(FIRST_SEED, FIRST_SEED + seeds)
    without = with_seeds(product(epsilon=[0], method=OPTIONS), of_seeds)
    return without + with_seeds(product(epsilon=[4], method=WITH_NOISE), of_seeds)


def measure(cell: Cell) -> dict[str, Any]:
    """Run a method, let clients change, and go on in both ways.

    Args:
        cell: one of `cells`.

    Returns:
        ARI with the true clusters of the time before the change, at once after it, and at the end
        of either way; the mean accuracy of clients by round, and over the rounds after the change;
        and that of clients that moved, at the end.
    """
    # of a cluster there are as many samples as clients may need
    scenario = LabelSwap(clusters=2)
    source = Federation.simulate(
        "mnist",
        scenario=scenario,
        clients=4 * CLIENTS,
        samples=SAMPLES[cell["epsilon"]],
        seed=cell["seed"],
    )
    source = balanced(source, CLIENTS)
    before, after, moved = drifting(source, 1 / 3, cell["seed"])
    options = {**TRAINING, **OPTIONS[cell["method"]], **(PRIVATE if cell["epsilon"] else {})}
    method = protocol_class(cell["method"])
    first = as_told(method, options).fit(before, SEEDED)
    labels = first.labels_.tolist()
    results: dict[str, Any] = {
        "ari_before": ari(labels, before),
        "ari_changed": ari(labels, after),
        "before": [line["accuracy"] for line in first.history_],
    }
    ways = {"on": go_on(method, options, first, after), "again": again(method, options, after)}
    for way, (found, rounds, last) in ways.items():
        results[f"ari_{way}"] = ari(found, after)
        results[way] = rounds
        results[f"accuracy_{way}"] = fmean(rounds)
        results[f"moved_{way}"] = float(np.mean(last[moved]))
    return results


def balanced(source: Federation, each: int) -> Federation:
    """Return a federation whose halves have as many clients of each of two clusters.

    Args:
        source: with at least `each` clients of each cluster.
        each: number of clients of a cluster.
    """
    assert source.truth is not None
    truth = np.array(source.truth)
    picks = [np.flatnonzero(truth == cluster)[:each].tolist() for cluster in np.unique(truth)]
    return source.select([at(k) for pair in zip(*picks, strict=True) for k in pair])


def ari(labels: Sequence[int], federation: Federation) -> float:
    """Return the adjusted Rand index of labels and a federation's true clusters."""
    assert federation.truth is not None
    return float(agreement(labels, federation.truth)["ari"])


Way = tuple[list[int], list[float], NDArray[np.float64]]


def again(method: Any, options: Mapping[str, Any], after: Federation) -> Way:
    """Return labels, accuracy by round and clients' last accuracies of a run from θ_0."""
    fitted = as_told(method, options).fit(after, SEEDED)
    return _way(fitted)


def go_on(method: Any, options: Mapping[str, Any], first: Any, after: Federation) -> Way:
    """Return the same of a run that goes on from the models that were found.

    Args:
        method: class of the run.
        options: of it.
        first: the run before the change.
        after: the clients, in the same order.
    """
    if method.name == "ifca":
        made = as_told(method, {**options, "start": first, "starts": 1, "start_rounds": None})
        return _way(made.fit(after, SEEDED))
    plain = {name: value for name, value in options.items() if name in {**TRAINING, **PRIVATE}}
    plain["rounds"] = ROUNDS
    later = method if method.name == "cfl" else FedAvg
    labels, last = [0] * len(after), np.zeros(len(after))
    rounds, clusters = np.zeros(ROUNDS), 0
    for cluster, own in enumerate(members(first.labels_.tolist())):
        if len(own) == 1:  # nobody to go on with: the model stays as it is
            found, curve, scores = [0], [_accuracy(first, own[0], after)] * ROUNDS, np.zeros(1)
            scores[0] = curve[0]
        else:
            made = as_told(later, {**plain, "start": (first, cluster)})
            found, curve, scores = _way(made.fit(after.select(map(at, own)), SEEDED))
        for k, label, score in zip(own, found, scores, strict=True):
            labels[k], last[k] = clusters + label, score
        clusters += 1 + max(found)
        rounds += np.array(curve) * len(own) / len(after)
    return labels, rounds.tolist(), last


def _way(fitted: Any) -> Way:
    rounds = [line["accuracy"] for line in fitted.history_]
    return fitted.labels_.tolist(), rounds, np.array(fitted.scores_, dtype=float)


def _accuracy(fitted: Any, k: int, after: Federation) -> float:
    """Return the accuracy of a client's softmax regression on its new test samples."""
    weight, bias = (value.double().numpy() for value in fitted.model_of(at(k)).values())
    shard = after.shards[k]
    x = np.asarray(shard.test_samples, dtype=float).reshape(len(shard.y_test), -1)
    return float(np.mean((x @ weight.T + bias).argmax(1) == np.asarray(shard.y_test)))


def draw(rows: Sequence[Row]) -> Any:
    """Return the curves of accuracy by round: both ways in one panel for each method.

    Args:
        rows: of the sheet.
    """
    from securecluster.figures.figure import figure
    from securecluster.figures.looks import name_of

    groups = list(dict.fromkeys((row["method"], row["epsilon"]) for row in rows))
    picture, axes = figure(6.8, 4.8, rows=3, columns=4)
    panels = list(axes.flat)
    for panel, group in zip(panels, groups, strict=False):
        own = [row for row in rows if (row["method"], row["epsilon"]) == group and row["on"]]
        for way, first, style in _curves():
            means = np.mean([read_numbers(row[way]) for row in own], 0) if own else []
            places = np.arange(first, first + len(means))
            panel.plot(places, means, style, color="0.1" if way != "again" else "0.5", ms=3)
        panel.axvline(ROUNDS + 0.5, color="0.8", lw=0.8)
        noise = f", ε = {group[1]}" if group[1] != "0" else ""
        panel.set_title(name_of(group[0]) + noise, fontsize=8)
        panel.set_ylim(0.2, 1)
    for panel in panels[len(groups) :]:
        panel.axis("off")
    picture.supxlabel("round")
    picture.supylabel("accuracy")
    picture.suptitle("goes on: circles; asked again: crosses", fontsize=8)
    return picture


def _curves() -> Iterator[tuple[str, int, str]]:
    yield "before", 1, "o-"
    yield "on", ROUNDS + 1, "o-"
    yield "again", ROUNDS + 1, "x--"


GRID = Grid(
    __doc__,
    "changing_clients",
    cells,
    measure,
    by=["epsilon", "method"],
    values=["ari_before", "ari_on", "ari_again", "accuracy_on", "accuracy_again"],
    seeds=5,
    minutes=30.0,
    draw=draw,
)

if __name__ == "__main__":
    print(GRID.main())
