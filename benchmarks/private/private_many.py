"""Measure clusters and accuracy under DP-SGD at a meaningful ε, with a thousand samples a client.

python -m benchmarks.private.private_many [--seeds 3] [--minutes 20]

12 clients of Fashion-MNIST with four swapped labels have 1000 samples each, and train for 20 rounds
of one epoch in batches of 50 (`oneshot`: 10 clients in three tasks, T given, 16 public
frequencies). The unit of privacy is one sample. Its gradient is clipped to norm 1, chosen by trial
on these data. Every noise has the same multiplier, so methods are compared at equal noise and not
at equal ε, which the table has, too. δ is 1e-5.

IFCA has its default ten starts, and in a second case three, which cost less. It, Local-KMeans and
`oneshot` are given the true number of clusters. SR-FCA trains alone for 10 rounds and then averages
twice for 10 rounds. "average" is `--clusterer average`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from benchmarks.grid import Grid, product, with_seeds
from benchmarks.private.private_runs import DELTA, PROTOCOLS
from benchmarks.sheet import Cell
from benchmarks.table import RESULTS, SEEDED
from securecluster import Federation
from securecluster.data.scenarios import Tasks

# multipliers z, the same for every mechanism of a run
NOISES = (0.0, 1.0, 2.0)
OWN: dict[str, dict[str, Any]] = {
    "cfl": {},
    "cfl average": {"clusterer": "average"},
    "flhc": {},
    "flhc average": {"clusterer": "average"},
    "srfca": {"local_rounds": 10, "rounds": 10, "distance": "loss"},
    # ten starts by default: the rounds of each are releases, so ε is the highest of the table
    "ifca": {},
    "ifca, three starts": {"starts": 3},
    "local-kmeans": {"local_rounds": 10},
    "oneshot": {"tasks": 3, "features": "dct"},
    "fedavg": {},
}
PLAN: dict[str, Any] = {"rounds": 20, "epochs": 1, "batch_size": 50}


def measure(cell: Cell) -> dict[str, Any]:
    """Run one protocol.

    Args:
        cell: a protocol with its hyper-parameters, a key of `OWN`; a noise multiplier; and a seed.

    Returns:
        epsilon at `DELTA`, ari, accuracy (mean over clients), and bytes up and down.
    """
    name = cell["protocol"]
    z = cell["noise"]
    clients = 12
    scenario = None
    # one-shot clustering cannot see swapped labels
    if name == "oneshot":
        clients = 10
        # 10 % of each client's labels are of another task (Ali & Arafa 2024)
        scenario = Tasks(minority=0.1)
    federation = Federation.simulate(
        "fashion_mnist", scenario=scenario, clients=clients, samples=1000, seed=cell["seed"]
    )
    params = {**PLAN, **OWN[name]}
    if z:
        params |= {"clip": 1.0, "noise": z, "dp_unit": "example"}
        if name == "oneshot":
            # relevance follows from the noisy Gram matrix, so this one release covers it
            params["gram_noise"] = z
    # the first word of a case is the protocol's name
    protocol_name = name.split()[0].rstrip(",")
    fitted = PROTOCOLS[protocol_name](**params).fit(federation, SEEDED)
    price = fitted.ledger_.price(DELTA)
    assert fitted.agreement_ is not None
    return {
        "epsilon": price.epsilon,
        "ari": fitted.agreement_["ari"],
        "accuracy": float(np.nanmean(fitted.scores_)),
        "up": fitted.bytes_["up"],
        "down": fitted.bytes_["down"],
    }


def cells(scale: str, seeds: int) -> list[Cell]:
    """Return protocol by noise by seed; there is one scale."""
    return with_seeds(product(protocol=OWN, noise=NOISES), range(seeds))


GRID = Grid(
    __doc__,
    "private_many",
    cells,
    measure,
    by=["protocol", "noise"],
    values=["epsilon", "ari", "accuracy"],
    minutes=20.0,
    folder=RESULTS,
)

if __name__ == "__main__":
    print(GRID.main())
