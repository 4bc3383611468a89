"""Measure how well a server reads clients' label distributions from masked updates.

python -m benchmarks.leaks.label_attack [--seeds 3] [--minutes 10]

40 clients of the digits run one round of FedAvg, and the server runs the attack
`securecluster.attacks.label_distributions` on their updates. It cannot name the labels, so the
truth is used to match its groups with labels, and the score holds up to the labels' names.

`correlation` is Pearson's correlation, over clients, of a label's share with its group's mean, on
average over labels. `chance` is that of the same matching after the clients of the truth are
shuffled, on average over SHUFFLES draws.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.grid import Grid, product
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS
from securecluster import Dirichlet, Federation, Pathological
from securecluster.attacks.label_distributions import GROUPS, guess_shares, matched_correlation
from securecluster.data.scenarios import Scenario
from securecluster.messaging.parties import SERVER
from securecluster.protocols import ClusteringProtocol, FedAvg, Settings

Array = NDArray[np.float64]

CLIENTS = 40
SHUFFLES = 20
SCENARIOS: dict[str, Scenario] = {
    "dirichlet 0.3": Dirichlet(alpha=0.3),
    "two labels": Pathological(),
}
PROTECTIONS: dict[str, dict[str, Any]] = {
    "none": {"mask": "none"},
    "permutation": {"mask": "permutation"},
    "signed-permutation": {"mask": "signed-permutation"},
    # mixes coordinates: a column is no longer one weight's, and the correlation falls to 0.6 to 0.7
    "rotation": {"mask": "rotation"},
    # noise of clients with multipliers 0.1 and 1, which one round prices at ε = 91.8 and 4.38
    "permutation, clip 1, noise 0.1": {"mask": "permutation", "clip": 1.0, "noise": 0.1},
    "permutation, clip 1, noise 1": {"mask": "permutation", "clip": 1.0, "noise": 1.0},
}


def observed_updates(fitted: ClusteringProtocol) -> Array:
    """Return the updates (m, d) that the server of a run of FedAvg read in its first round, by
    client.

    Args:
        fitted: after a run with a full transcript.
    """
    rows: dict[int, Array] = {}
    for message in fitted.transcript_.seen_by(SERVER):
        if message.method != "contribute" or message.round != 1:
            continue
        if message.receiver != SERVER or message.content is None:
            continue
        row = message.content.delta.values[0]
        update = row.double().cpu().numpy()
        size = message.content.size
        client = message.sender.index
        assert client is not None
        # a weighted update is multiplied by its client's number of samples
        if size is not None:
            update = update / float(size.values[0])
        rows[client] = update
    return np.stack([rows[client] for client in sorted(rows)])


def label_shares(federation: Federation) -> Array:
    """Return each client's share of every label among its training samples, (m, classes).

    Args:
        federation: the m clients.
    """
    rows = []
    for shard in federation.shards:
        counts = np.bincount(shard.y, minlength=federation.classes)
        rows.append(counts / counts.sum())
    shares: Array = np.stack(rows)
    return shares


def attack(federation: Federation, seed: int = 0, **params: Any) -> dict[str, float]:
    """Run one round of FedAvg and attack what its server read.

    Args:
        federation: the clients.
        seed: of the attack's own draws.
        params: of FedAvg: its mask, clip and noise.

    Returns:
        The correlation of the guess with the truth, its level by chance, and ε of the run.
    """
    # in the first round all clients start from the same weights, so updates compare directly
    protocol = FedAvg(**{"rounds": 1, "model": "mlp", **params})
    settings = Settings(transcript="full", threads=1, keys_from_seed=True)
    fitted = protocol.fit(federation, settings)
    shares = label_shares(federation)
    groups = min(GROUPS, 3 * len(federation))
    updates = observed_updates(fitted)
    guess = guess_shares(updates, groups, seed)
    draw = np.random.default_rng(seed)
    # shares of other clients: the correlation that matching alone gives
    shuffled = []
    for _ in range(SHUFFLES):
        order = draw.permutation(len(shares))
        shuffled.append(matched_correlation(guess, shares[order]))
    return {
        "correlation": matched_correlation(guess, shares),
        "chance": float(np.mean(shuffled)),
        "epsilon": fitted.ledger_.epsilon,
    }


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return scenario by protection by seed; there is one scale."""
    return product(scenario=SCENARIOS, protection=PROTECTIONS, seed=range(seeds))


def measure(cell: Cell) -> dict[str, Any]:
    """Attack one run.

    Args:
        cell: one of `cells`.
    """
    scenario = SCENARIOS[cell["scenario"]]
    federation = Federation.simulate(
        "digits", scenario=scenario, clients=CLIENTS, seed=cell["seed"]
    )
    protection = PROTECTIONS[cell["protection"]]
    results = attack(federation, cell["seed"], **protection)
    return {name: round(value, 4) for name, value in results.items()}


GRID = Grid(
    __doc__,
    "label_attack",
    cells,
    measure,
    by=["scenario", "protection"],
    values=["correlation", "chance", "epsilon"],
    folder=RESULTS,
)

if __name__ == "__main__":
    print(GRID.main())
