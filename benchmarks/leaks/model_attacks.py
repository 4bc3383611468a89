"""Five attacks beside their papers, without a protection and with one at a time.

python -m benchmarks.leaks.model_attacks [--seeds 1] [--minutes 10]

`centres` is Lloyd's algorithm on Iris from three random flowers, data of arXiv 2511.07073: scores
are shares of 50 starts. All others are runs of clients, with a softmax regression or a
perceptron. What a protection leaves nothing to attack of has no score, and says why.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from benchmarks.grid import Grid, with_seeds
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS
from securecluster import Federation, LabelSwap
from securecluster.attacks.experiments import tapped
from securecluster.attacks.on_models.centres import Iteration, moved_alone, solved
from securecluster.attacks.registry import attack_named
from securecluster.attacks.scoring import Score, further_scores
from securecluster.audits.run_audit import adversary_of, finding_of
from securecluster.errors import SecureClusterWarning
from securecluster.protocols import IFCA, FedAvg, Settings

NONE: dict[str, Any] = {}
SUMS: dict[str, Any] = {"aggregation": "secagg"}
CLIP: dict[str, Any] = {"clip": 1.0}
NOISE: dict[str, Any] = {"clip": 1.0, "noise": 1.0}
PROTECTIONS = {"none": NONE, "secure sums": SUMS, "clip": CLIP, "sums and clip": SUMS | CLIP}
PROTECTIONS |= {"noise": NOISE}
ATTACKS = (
    "centres",
    "sums-single-coordinate",
    "cluster-identity",
    "membership-cluster-model",
    "membership-all-rounds",
    "crafted-model",
)
FURTHER = {
    "membership TPR at 1 % FPR": "tpr 1",
    "membership TPR at 0.1 % FPR": "tpr 0.1",
    "AUC of membership in a cluster of the fewest clients": "fewest",
    "AUC of membership in a cluster of the most clients": "most",
}
STARTS = 50
ITERATIONS = 20
CENTRES = 3


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return the cells.

    Args:
        scale: one scale alone is measured.
        seeds: number of seeds.
    """
    settings = []
    for attack in ATTACKS:
        for protection in PROTECTIONS:
            if attack != "centres" or protection in ("none", "noise"):
                settings.append({"attack": attack, "protection": protection})
    return with_seeds(settings, range(seeds))


def rotated(seed: int) -> Federation:
    """Return 12 clients of MNIST, of whom two turn their images: a minority of two."""
    plain = Federation.simulate("mnist", clients=12, samples=50, scenario="iid", seed=seed)
    data = {}
    held_out = {}
    for i, (name, shard) in enumerate(zip(plain.names, plain.shards, strict=True)):
        turns = 2 if i < 2 else 0
        data[name] = (np.rot90(shard.x, turns, (-2, -1)).copy(), shard.y)
        held_out[name] = (np.rot90(shard.x_test, turns, (-2, -1)).copy(), shard.y_test)
    return Federation.from_arrays(data, test=held_out, classes=10, seed=seed)


def categories(seed: int) -> Federation:
    """Return six clients with a table, one of whom alone has a category."""
    data = {}
    for i in range(6):
        draw = np.random.default_rng([seed, i])
        x = 0.1 + draw.random((30, 8)).astype("float32")
        x[:, 7] = 0
        if i == 1:
            x[:6, 7] = 1
        data[f"c{i}"] = (x, draw.integers(0, 3, 30))
    return Federation.from_arrays(data, classes=3, seed=seed)


def case_of(attack: str, seed: int) -> tuple[Any, dict[str, Any], Federation]:
    """Return the protocol, its options and the clients that an attack is tried on."""
    step = {"rounds": 1, "epochs": 1, "batch_size": 1000}
    if attack == "sums-single-coordinate":
        return FedAvg, {**step, "model": "linear", "lr": 1.0}, categories(seed)
    if attack == "cluster-identity":
        scenario = LabelSwap(clusters=4)
        federation = Federation.simulate(
            "mnist", clients=20, samples=50, scenario=scenario, seed=seed
        )
        return FedAvg, {"rounds": 1, "epochs": 3, "model": "linear"}, federation
    if attack == "membership-cluster-model":
        options = {"k": 2, "rounds": 15, "epochs": 5, "model": "mlp", "starts": 3, "lr": 0.1}
        return IFCA, options, rotated(seed)
    data = "cifar100" if attack == "membership-all-rounds" else "cifar10"
    federation = Federation.simulate(data, clients=10, samples=20, scenario="iid", seed=seed)
    if attack == "crafted-model":
        return FedAvg, {**step, "model": "mlp"}, federation
    return FedAvg, {"rounds": 10, "epochs": 1, "model": "linear"}, federation


def measure(cell: Cell) -> Mapping[str, Any]:
    """Return the score of one attack, its chance, and the rates of attacks on membership.

    Args:
        cell: one of `cells`.
    """
    if cell["attack"] == "centres":
        return centres(cell)
    kind, options, federation = case_of(cell["attack"], cell["seed"])
    made = {**options, "mask": "none", **PROTECTIONS[cell["protection"]]}
    settings = Settings(threads=1, keys_from_seed=True, transcript="full")
    attack = attack_named(cell["attack"])
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SecureClusterWarning)
        fitted, taps = tapped(kind(**made), federation, settings)
        server = adversary_of(federation.names, "server")
        finding = finding_of(attack, fitted, federation, server, taps)
    if finding.score is None or finding.guess is None or finding.truth is None:
        return {"said": finding.reason}
    row = {"score": finding.score.value, "chance": finding.score.chance, "said": finding.verdict}
    for metric, further in further_scores(attack, finding.guess, finding.truth).items():
        name = FURTHER.get(metric)
        if name is not None and isinstance(further, Score):
            row[name] = further.value
            if further.interval is not None:
                row[f"{name} low"], row[f"{name} high"] = (
                    further.interval.low,
                    further.interval.high,
                )
    return row


def centres(cell: Cell) -> Mapping[str, Any]:
    """Return in which share of the starts a flower is read, and how many are on average.

    `score` is with known assignments, and `counts` by counts alone.

    Args:
        cell: with a seed, of the starts and of the noise.
    """
    from sklearn.datasets import load_iris

    rows = load_iris().data
    draw = np.random.default_rng(cell["seed"])
    deviation = 0.1 if cell["protection"] == "noise" else 0.0
    by_known = []
    by_counts = []
    for _ in range(STARTS):
        assignments, iterations = lloyd(rows, deviation, draw)
        known = solved(assignments, np.stack([each.sums for each in iterations]))
        by_known.append(sum(np.allclose(row, rows[i], atol=1e-6) for i, row in known.items()))
        moves = [moved_alone(*pair) for pair in pairwise(iterations)]
        by_counts.append(sum(map(len, moves)))
    return {
        "score": float(np.mean(np.asarray(by_known) > 0)),
        "counts": float(np.mean(np.asarray(by_counts) > 0)),
        "flowers": float(np.mean(by_known)),
        "chance": 0.0,
    }


def lloyd(rows: Any, deviation: float, draw: np.random.Generator) -> tuple[Any, list[Iteration]]:
    """Return who is in which cluster, (iterations, n), and what a server reads of each iteration.

    Args:
        rows: (n, d).
        deviation: of the noise in each number of a sum.
        draw: of the start and of the noise.
    """
    from sklearn.metrics import pairwise_distances_argmin

    means = rows[draw.choice(len(rows), CENTRES, replace=False)]
    assignments = []
    iterations = []
    for _ in range(ITERATIONS):
        labels = pairwise_distances_argmin(rows, means)
        one_hot = np.eye(CENTRES)[labels]
        sums = one_hot.T @ rows + deviation * draw.standard_normal(means.shape)
        counts = one_hot.sum(0)
        iterations.append(Iteration(counts, sums))
        assignments.append(labels)
        means = sums / np.maximum(counts, 1)[:, None]
    return np.stack(assignments), iterations


GRID = Grid(
    __doc__,
    "model_attacks",
    cells,
    measure,
    by=["attack", "protection"],
    values=["score", "chance", "tpr 1", "tpr 0.1", "fewest", "most", "counts"],
    seeds=1,
    minutes=10.0,
    folder=RESULTS,
)


def main(argv: Sequence[str] | None = None) -> Any:
    """Measure what is missing, and print.

    Args:
        argv: the arguments; those of the command line by default.
    """
    return GRID.main(argv)


if __name__ == "__main__":
    print(main())
