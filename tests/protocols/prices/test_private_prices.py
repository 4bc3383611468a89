"""What private clustering costs, counted by hand and priced by scipy, for runs and newcomers."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import pytest
from cases import two_clusters
from scipy.optimize import brentq
from scipy.stats import norm

from securecluster import FLHC, IFCA, MRMTL, PACFL, CLoVE, Federation, Hidden, Signature
from securecluster.protocols import ClusteringProtocol

DELTA = 1e-6
Z = 2.0  # of updates, losses and training
OTHER = 3.0  # of signatures and Gram matrices
ROUNDS = 3

# by name: the protocol, Σ 1/z² over all releases of a client in its run, and of a newcomer
Case = tuple[Callable[..., ClusteringProtocol], dict[str, Any], float, float]
CASES: dict[str, Case] = {
    "signature": (Signature, {"k": 2, "signature_noise": OTHER}, 3 / 4 + 1 / 9, 1 / 9),
    "class blocks": (
        Signature,
        {"k": 2, "signature_noise": OTHER, "signature_blocks": "blocks"},
        3 / 4 + 1 / 9,
        1 / 9,
    ),
    "flhc by signatures": (
        FLHC,
        {"signature": "gradient", "signature_noise": OTHER, "pre_rounds": 1},
        3 / 4 + 1 / 9,
        1 / 9,
    ),
    "pacfl": (PACFL, {"k": 2, "gram_noise": OTHER}, 3 / 4 + 1 / 9, 1 / 9),
    # updates, and losses in the first round
    "clove": (CLoVE, {"k": 2, "cluster_rounds": 1}, 3 / 4 + 1 / 4, 1 / 4),
    # updates, a choice in each round and one at the end
    "ifca": (IFCA, {"k": 2, "starts": 1, "rebalance": 2}, 3 / 4 + 4 / 4, 1 / 4),
    # rounds of both starts are counted as one, and the lowest loss of both
    "ifca with starts": (
        IFCA,
        {"k": 2, "starts": 2, "start_rounds": 1, "rebalance": 2},
        3 / 4 + 4 / 4 + 2 / 4,
        1 / 4,
    ),
    "mrmtl": (MRMTL, {}, 3 / 4, 0.0),
    # a quarter of the whole is for the four sums that find clusters
    "hidden": (Hidden, {"k": 2, "cluster_share": 0.25, "placement": "local"}, 3 / 4 / 0.75, 0.0),
}


@pytest.fixture(scope="module")
def clients() -> Federation:
    return two_clusters(6, 60)


@pytest.fixture(scope="module")
def newcomers(clients: Federation) -> Federation:
    shards = {}
    for name, shard in zip(clients.names, clients.shards, strict=True):
        shards[f"new {name}"] = (shard.x, shard.y)
    test = {name: (x[:0], y[:0]) for name, (x, y) in shards.items()}
    return Federation.from_arrays(shards, test=test, seed=0)


def gaussian_epsilon(squared_mean: float) -> float:
    """Return ε at DELTA of unit Gaussians some distance apart (Balle & Wang 2018, theorem 8)."""
    mean = math.sqrt(squared_mean)
    if not mean:
        return 0.0

    def excess(epsilon: float) -> float:
        above = norm.cdf(mean / 2 - epsilon / mean)
        below = norm.cdf(-mean / 2 - epsilon / mean)
        return float(above - math.exp(epsilon) * below - DELTA)

    return float(brentq(excess, 0, 100, xtol=1e-12))


def made(name: str, **params: Any) -> ClusteringProtocol:
    """Return the protocol of a case for whole clients."""
    method, own, _, _ = CASES[name]
    common = {"rounds": ROUNDS, "model": "linear", "clip": 1.0, "delta": DELTA}
    return method(**common, **own, **{"dp_unit": "client", **params})


@pytest.mark.parametrize("name", CASES)
def test_a_run_and_its_newcomers_cost_what_they_release(
    name: str, clients: Federation, newcomers: Federation
) -> None:
    _, _, spent, spent_by_newcomers = CASES[name]
    fitted = made(name, noise=Z).fit(clients)
    ledger = fitted.ledger_
    assert ledger.exact() == []
    assert ledger.price(DELTA).epsilon == pytest.approx(gaussian_epsilon(spent), rel=1e-6)
    replaced = ledger.price(DELTA, "replace")
    assert replaced is not None
    assert replaced.epsilon <= gaussian_epsilon(4 * spent) * (1 + 1e-6)
    fitted.join(newcomers)
    known = set(newcomers.names) & set(ledger.names.values())
    price = ledger.of(known).price(DELTA)
    assert price.epsilon == pytest.approx(gaussian_epsilon(spent_by_newcomers), rel=1e-6)
