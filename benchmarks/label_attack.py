"""Label distributions that a server reads from masked updates: what a permutation of coordinates
hides, and what not.

python -m securecluster.benchmarks.label_attack [--seeds 3] [--minutes 10]

One round of FedAvg on digits, 40 clients. Under a permutation a coordinate of all clients' updates
is still one column, and the weights of an output unit move together over clients: by how many
samples of its label each holds. The server groups columns that move alike, by k-means, and takes
each group's mean over its columns as a guess of one label's share at every client. It cannot name
the labels, so groups are matched with labels by the truth: a score up to naming.

`correlation` is the mean over labels of Pearson's correlation, over clients, of a label's share
with its group's mean. `chance` is the same matching with the clients of the truth shuffled, on
average over SHUFFLES draws.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster import Dirichlet, Federation, Pathological
from securecluster.benchmarks.papers.sheet import Cell, Sheet, options, summarise
from securecluster.benchmarks.table import RESULTS
from securecluster.data.scenarios import Scenario
from securecluster.messaging.parties import SERVER
from securecluster.protocols import ClusteringProtocol, FedAvg, Settings

Array = NDArray[np.float64]

CLIENTS = 40
GROUPS = 30  # more than labels: hidden units move together, too
KEPT = 0.2  # share of columns, those that vary most over clients
SHUFFLES = 20
SCENARIOS: dict[str, Scenario] = {
    "dirichlet 0.3": Dirichlet(alpha=0.3),
    "two labels": Pathological(),
}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {"mask": "none"},
    "permutation": {"mask": "permutation"},
    "signed-permutation": {"mask": "signed-permutation"},
    "rotation": {"mask": "rotation"},
    "permutation, clip 1, noise 0.1": {"mask": "permutation", "clip": 1.0, "noise": 0.1},
    "permutation, clip 1, noise 1": {"mask": "permutation", "clip": 1.0, "noise": 1.0},
}


def observed_updates(fitted: ClusteringProtocol) -> Array:
    """Return the updates (m, d) that the server of a run of FedAvg read in its first round, by
    client.
    """
    rows: dict[int, Array] = {}
    for seen in fitted.transcript_.seen_by(SERVER):
        first = seen.method == "contribute" and seen.round == 1
        if not first or seen.receiver != SERVER or seen.content is None:
            continue
        update = seen.content.delta.values[0].double().cpu().numpy()
        size, client = seen.content.size, seen.sender.index
        assert client is not None
        rows[client] = update if size is None else update / float(size.values[0])
    return np.stack([rows[client] for client in sorted(rows)])


def label_shares(federation: Federation) -> Array:
    """Return each client's share of every label among its training samples, (m, classes)."""
    counts = [np.bincount(shard.y, minlength=federation.classes) for shard in federation.shards]
    shares: Array = np.stack([count / count.sum() for count in counts])
    return shares


def guess_shares(updates: Array, groups: int = GROUPS, seed: int = 0) -> Array:
    """Return a guess (m, groups) of labels' shares: means of columns of the updates (m, d) that
    move alike.

    Args:
        updates: what the server read, under one mask.
        groups: how many groups of columns are made.
        seed: of k-means.
    """
    from sklearn.cluster import KMeans

    centred = updates - updates.mean(0)
    spread = np.linalg.norm(centred, axis=0)
    kept = spread >= np.quantile(spread, 1 - KEPT)
    columns, scale = centred[:, kept], spread[kept]
    directions = (columns / scale).T
    group = KMeans(groups, n_init=4, random_state=seed).fit_predict(directions)
    return np.stack([columns[:, group == g].mean(1) for g in range(groups)], axis=1)


def matched_correlation(guess: Array, shares: Array) -> float:
    """Return the mean correlation of labels' shares (m, k) with columns of a guess (m, g), best
    matched one to one.
    """
    from scipy.optimize import linear_sum_assignment

    correlation = _standardised(shares).T @ _standardised(guess)
    labels, groups = linear_sum_assignment(-correlation)
    return float(correlation[labels, groups].mean())


def _standardised(table: Array) -> Array:
    """Return columns with mean zero and norm one; a constant column is zero."""
    centred = table - table.mean(0)
    norms = np.linalg.norm(centred, axis=0)
    found: Array = centred / np.where(norms > 0, norms, 1.0)
    return found


def attack(federation: Federation, seed: int = 0, **params: Any) -> dict[str, float]:
    """Run one round of FedAvg and attack what its server read.

    Args:
        federation: the clients.
        seed: of the attack's own draws.
        params: of FedAvg: its mask, clip and noise.
    """
    protocol = FedAvg(**{"rounds": 1, "model": "mlp", **params})
    fitted = protocol.fit(federation, Settings(transcript="full", threads=1))
    shares = label_shares(federation)
    guess = guess_shares(observed_updates(fitted), min(GROUPS, 3 * len(federation)), seed)
    draw = np.random.default_rng(seed)
    shuffled = [
        matched_correlation(guess, shares[draw.permutation(len(shares))]) for _ in range(SHUFFLES)
    ]
    return {
        "correlation": matched_correlation(guess, shares),
        "chance": float(np.mean(shuffled)),
        "epsilon": fitted.ledger_.epsilon,
    }


def cells(seeds: int) -> list[Cell]:
    """Return every protection under every scenario and seed."""
    found: list[Cell] = []
    for scenario in SCENARIOS:
        for protection in PROTECTIONS:
            found += [
                {"scenario": scenario, "protection": protection, "seed": seed}
                for seed in range(seeds)
            ]
    return found


def measure(cell: Cell) -> dict[str, Any]:
    """Attack one run."""
    scenario = SCENARIOS[cell["scenario"]]
    federation = Federation.simulate(
        "digits", scenario=scenario, clients=CLIENTS, seed=cell["seed"]
    )
    found = attack(federation, cell["seed"], **PROTECTIONS[cell["protection"]])
    return {name: round(value, 4) for name, value in found.items()}


def main(argv: Sequence[str] | None = None) -> Path:
    """Measure what is missing, and print."""
    chosen, sheet = options(__doc__, argv, seeds=3), Sheet("label_attack", RESULTS)
    rows = sheet.fill(cells(chosen.seeds), measure, chosen.minutes)
    summarise(rows, ["scenario", "protection"], ["correlation", "chance", "epsilon"])
    return sheet.path


if __name__ == "__main__":
    print(main())
