"""CLoVE against a plain loop over clients, its matching against brute force, and its price."""

from __future__ import annotations

import copy
import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, serve, two_clusters
from scipy.optimize import linear_sum_assignment
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import nn

from securecluster import Federation
from securecluster.errors import FrameError, PolicyError, UsageError
from securecluster.messaging.bounds import Limits, check
from securecluster.messaging.messages import Rows
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.loss_mechanism import LARGEST_SENT_LOSS
from securecluster.protocols import CLoVE, Settings
from securecluster.protocols.common.averages.model_sets import AssignedModel
from securecluster.protocols.common.averages.restarts import Restart
from securecluster.protocols.contrib.clove import LossVector, matched_models
from securecluster.runtime.call_context import CallContext
from securecluster.training.local_trainer import LocalTraining

SIZES = (7, 12, 20, 9, 15, 10, 8)


def tiny() -> Federation:
    """Seven clients of unequal sizes, whose labels follow one of two rules."""
    draw = np.random.default_rng(1)
    clients = {}
    for i, n in enumerate(SIZES):
        x = draw.normal(size=(n, 8))
        clients[f"c{i}"] = (x, (np.argmax(x[:, :3], 1) + (i % 2)) % 3)
    truth = {name: i % 2 for i, name in enumerate(clients)}
    return Federation.from_arrays(clients, test=clients, truth=truth, classes=3, seed=3)


@pytest.fixture(scope="module")
def digits() -> Federation:
    """Ten clients of two kinds, which swap two labels."""
    return two_clusters(10, 60)


def made(**params: Any) -> CLoVE:
    """Return a small protocol with two models."""
    return CLoVE(**{"k": 2, "rounds": 4, "epochs": 1, "model": "linear", **params})


class PlainLoop:
    """The algorithm client by client, with torch.optim, sklearn and scipy.

    Batches and first models are those that the clients draw for the same call.
    """

    def __init__(self, protocol: CLoVE, federation: Federation) -> None:
        self.protocol = protocol
        self.shards = federation.shards
        self.cohort = build_client(protocol, federation, Settings(dtype="float64")).client.cohort
        self.models = [self.cohort.start]
        for j in range(1, protocol.k):
            self.models.append(self.cohort.drawn("start", 0, j))
        self.history: list[list[int]] = []

    def run(self) -> tuple[list[int], torch.Tensor]:
        for t in range(1, self.protocol.rounds + 1):
            last = self.history[-3:]
            if len(last) < 3 or not last[0] == last[1] == last[2]:
                self.history.append(self.assignment())
            step = 2 * t  # a call for losses, or for averages, and one for updates
            self.models = [self.average(j, step) for j in range(self.protocol.k)]
        choice = self.history[-1]
        return choice, torch.stack([self.models[j] for j in choice])

    def assignment(self) -> list[int]:
        rows = [[self.loss(theta, i) for theta in self.models] for i in range(len(SIZES))]
        losses = np.array(rows)
        estimator = KMeans(self.protocol.k, n_init=20, random_state=0)
        clusters = estimator.fit_predict(losses)
        cost = np.zeros((self.protocol.k, self.protocol.k))
        for i, cluster in enumerate(clusters):
            cost[cluster] += losses[i]
        matching = linear_sum_assignment(cost)[1]
        return [int(matching[cluster]) for cluster in clusters]

    def average(self, j: int, step: int) -> torch.Tensor:
        members = [i for i, model in enumerate(self.history[-1]) if model == j]
        if not members:
            return self.models[j]
        total = torch.zeros_like(self.models[j])
        for i in members:
            total += SIZES[i] * self.trained(self.models[j], i, step)
        return total / sum(SIZES[i] for i in members)

    def module(self, theta: torch.Tensor) -> nn.Module:
        module = copy.deepcopy(self.cohort.model.module)
        nn.utils.vector_to_parameters(theta.clone(), module.parameters())
        return module

    def samples(self, i: int, rows: Any = slice(None)) -> tuple[torch.Tensor, torch.Tensor]:
        shard = self.shards[i]
        return torch.as_tensor(shard.x[rows]).double(), torch.as_tensor(shard.y[rows])

    def loss(self, theta: torch.Tensor, i: int) -> float:
        x, y = self.samples(i)
        with torch.no_grad():
            return float(nn.functional.cross_entropy(self.module(theta)(x), y))

    def trained(self, theta: torch.Tensor, i: int, step: int) -> torch.Tensor:
        protocol = self.protocol
        module = self.module(theta)
        optimizer = torch.optim.SGD(module.parameters(), lr=protocol.lr)
        plan = LocalTraining(protocol.lr, protocol.epochs, protocol.batch_size)
        for batch in self.cohort.batches(i, plan, step):
            x, y = self.samples(i, batch - sum(SIZES[:i]))
            optimizer.zero_grad()
            nn.functional.cross_entropy(module(x), y).backward()
            optimizer.step()
        return nn.utils.parameters_to_vector(module.parameters()).detach()


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("k", "rounds", "mask"), [(2, 6, "none"), (2, 6, "rotation"), (3, 5, "permutation")]
)
def test_clove_equals_a_plain_loop(k: int, rounds: int, mask: str) -> None:
    federation = tiny()
    params = {"model": "mlp-32", "lr": 0.1, "epochs": 2, "batch_size": 6}
    protocol = CLoVE(k=k, rounds=rounds, mask=mask, **params)
    served = serve(protocol, federation)
    expected, models = PlainLoop(protocol, federation).run()
    assert served.state.running.choice == expected
    assert adjusted_rand_score(served.state.labels, expected) == 1
    final = protocol.observer.final_models(served.endpoint.client, served.state).values
    torch.testing.assert_close(final, models, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_those_of_k_means_and_models_match_at_least_loss(seed: int) -> None:
    draw = np.random.default_rng(seed)
    centres = draw.uniform(0, 3, size=(4, 4))
    losses = np.concatenate([centre + 0.01 * draw.normal(size=(5, 4)) for centre in centres])
    models = np.array(matched_models(losses, 4, seed=7))
    clusters = KMeans(4, n_init=20, random_state=1).fit_predict(losses)
    assert adjusted_rand_score(models, clusters) == 1
    least = math.inf
    for matching in itertools.permutations(range(4)):
        total = sum(losses[i, matching[cluster]] for i, cluster in enumerate(clusters))
        least = min(least, total)
    assert losses[range(20), models].sum() == pytest.approx(least)


def test_fewer_clients_than_models_take_some_of_the_models() -> None:
    losses = np.array([[2.0, 1.0, 3.0], [1.0, 2.0, 0.5]])
    assert matched_models(losses, 3, seed=0) == [1, 2]


def test_losses_of_any_size_that_a_frame_may_hold_are_clustered() -> None:
    limits = Limits({"models": 2})
    lying = torch.tensor(
        [[LARGEST_SENT_LOSS, 0.2], [0.3, -LARGEST_SENT_LOSS], [0.1, 0.4]], dtype=torch.float64
    )
    check(LossVector(Rows(lying)), limits)
    assert len(matched_models(lying.numpy(), 2, seed=0)) == 3
    # the squares of these are infinite, and have no eigenvalues
    with pytest.raises(FrameError, match=r"LossVector\.losses"):
        check(LossVector(Rows(1e170 * lying)), limits)


@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_swapped_labels_are_found(mask: str, digits: Federation) -> None:
    fitted = made(mask=mask, rounds=6).fit(digits)
    assert fitted.agreement_["exact"]


def test_losses_are_no_longer_sent_once_clusters_are_stable(digits: Federation) -> None:
    fitted = made(rounds=8, stable_rounds=2).fit(digits, FULL)
    stable = [line["stable"] for line in fitted.history_]
    first = stable.index(True) + 1
    assert 2 <= first < 8
    methods = [(entry.round, entry.method) for entry in fitted.transcript_.entries]
    assert {t for t, method in methods if method == "measure"} == {*range(1, first + 1)}
    assert all(stable[first - 1 :])


def test_losses_are_asked_in_the_first_rounds_at_most(digits: Federation) -> None:
    fitted = made(rounds=5, stable_rounds=9, cluster_rounds=2).fit(digits)
    rounds = {e.round for e in fitted.ledger_.events if "losses" in e.fields}
    assert rounds == {1, 2}


def test_clients_of_a_share_of_the_rounds_are_all_assigned(digits: Federation) -> None:
    fitted = made(rounds=8, participation=0.5, stable_rounds=1).fit(digits)
    assert fitted.agreement_["exact"]


@pytest.mark.parametrize("unit", ["example", "client"])
def test_the_noise_of_a_loss_vector_is_that_of_its_sensitivity(unit: str) -> None:
    federation = tiny()
    z, bound, k = 0.5, 2.0, 4
    protocol = made(
        k=k, dp_unit=unit, clip=1.0, noise=z, loss_clip=bound, mask="none", model="linear"
    )
    endpoint = build_client(protocol, federation, DOUBLE)
    client: Any = endpoint.client
    ids = tuple(range(len(SIZES)))
    query = Restart.begin(0, k, len(SIZES), fresh=False).message_for(ids)
    models = [client.cohort.start]
    models += [client.cohort.drawn("start", 0, j) for j in range(1, k)]
    exact = client.cohort.losses(torch.stack(models), ids, bound)
    draws = []
    for step in range(1, 151):
        reply = client.measure(endpoint.context(ids, step, step, "measure"), query)
        draws.append(reply.losses.values.numpy() - exact)
    measured = np.stack(draws).std(axis=(0, 2))
    # one of n samples moves each of the k means by at most B/n; a client moves them by at most B
    divisor = np.array(SIZES) if unit == "example" else np.ones(len(SIZES))
    np.testing.assert_allclose(measured, z * bound * math.sqrt(k) / divisor, rtol=0.12)


def test_clients_contribute_to_models_that_they_have_only() -> None:
    federation = tiny()
    client: Any = build_client(made(mask="none"), federation, DOUBLE).client
    query = AssignedModel(Rows(torch.tensor([1])))
    with pytest.raises(PolicyError, match="before it received any"):
        client.contribute(CallContext((0,), (0,), 1, 1), query)
    models = Restart.begin(0, 2, len(SIZES), fresh=False).message_for((0,))
    client.measure(CallContext((0,), (0,), 1, 2), models)
    with pytest.raises(PolicyError, match="late"):
        client.contribute(CallContext((0,), (0,), 1, 1), query)
    assert client.contribute(CallContext((0,), (0,), 1, 3), query).size.values.tolist() == [7]


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"k": 11}, "k"),
        ({"stable_rounds": 0}, "stable_rounds"),
        ({"cluster_rounds": 0}, "cluster_rounds"),
        ({"aggregation": "secagg"}, "clusters anew in every round"),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    params: dict[str, Any], sentence: str, digits: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**params).fit(digits)
