"""CFL-GP against a plain loop that keeps the whole gradient profile, and its price."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, serve, two_clusters
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from securecluster import CFLGP, Federation, Rotation
from securecluster.clustering.similarity import gram
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import epsilon
from securecluster.protocols.common.averages.restarts import Restart
from securecluster.protocols.contrib.cflgp import CFLGPState, criterion_of, kept_numbers, partition

SIZES = (17, 12, 20, 9, 15, 10, 18, 14)
WIDTH = 8
CLASSES = 3


def tiny(kinds: int = 2) -> Federation:
    """Eight clients of unequal sizes, whose labels follow one of a few rules."""
    draw = np.random.default_rng(1)
    clients = {}
    for i, n in enumerate(SIZES):
        x = draw.normal(size=(n, WIDTH))
        clients[f"c{i}"] = (x, (np.argmax(x[:, :3], 1) + i % kinds) % CLASSES)
    truth = {name: i % kinds for i, name in enumerate(clients)}
    return Federation.from_arrays(clients, test=clients, truth=truth, classes=CLASSES, seed=3)


@pytest.fixture(scope="module")
def digits() -> Federation:
    """Ten clients of two kinds, which swap two labels."""
    return two_clusters(10, 60)


def made(**params: Any) -> CFLGP:
    """Return a small protocol with two models."""
    return CFLGP(**{"k": 2, "rounds": 4, "epochs": 1, "model": "linear", **params})


class PlainLoop:
    """Softmax regression by full gradients, with the profile itself and its singular vectors."""

    def __init__(self, protocol: CFLGP, federation: Federation, first: Any) -> None:
        self.first = np.array(first)
        self.protocol = protocol
        self.shards = federation.shards
        cohort = build_client(protocol, federation, DOUBLE).client.cohort
        self.models = [cohort.start.numpy()]
        for j in range(1, protocol.k):
            self.models.append(cohort.drawn("start", 0, j).numpy())
        self.blocks: list[np.ndarray] = []
        self.choice: np.ndarray | None = None

    def run(self) -> tuple[list[int], np.ndarray]:
        protocol = self.protocol
        visits = itertools.cycle(range(protocol.k))
        for t in range(1, protocol.rounds + 1):
            if t % protocol.period == 1 % protocol.period and t <= protocol.cluster_rounds:
                theta = self.models[next(visits)]
                gradients = [self.gradient(theta, i) for i in range(len(SIZES))]
                self.blocks.append(np.stack(gradients, 1))
                self.choice = self.matched(self.clustered())
            self.models = [self.average(j) for j in range(protocol.k)]
        assert self.choice is not None
        return self.choice.tolist(), np.stack([self.models[j] for j in self.choice])

    def gradient(self, theta: np.ndarray, i: int) -> np.ndarray:
        x = self.shards[i].x.astype(np.float64)
        weight = theta[: CLASSES * WIDTH].reshape(CLASSES, WIDTH)
        scores = x @ weight.T + theta[CLASSES * WIDTH :]
        shares = np.exp(scores - scores.max(1, keepdims=True))
        shares /= shares.sum(1, keepdims=True)
        error = (shares - np.eye(CLASSES)[self.shards[i].y]) / len(x)
        return np.concatenate([(error.T @ x).ravel(), error.sum(0)])

    def clustered(self) -> np.ndarray:
        profile = np.concatenate(self.blocks)
        left, _, _ = np.linalg.svd(profile, full_matrices=False)
        columns = (left[:, : self.protocol.k].T @ profile).T
        labels: np.ndarray = KMeans(self.protocol.k, n_init=20, random_state=0).fit_predict(columns)
        return labels

    def matched(self, labels: np.ndarray) -> np.ndarray:
        before = self.first if self.choice is None else self.choice
        orders = itertools.permutations(range(self.protocol.k))
        renamed = [np.array(order)[labels] for order in orders]
        best = max(renamed, key=lambda other: int((other == before).sum()))
        if self.choice is None:
            self.first = best
        return best

    def average(self, j: int) -> np.ndarray:
        assert self.choice is not None
        members = np.flatnonzero(self.choice == j)
        if not len(members):
            return self.models[j]
        theta = self.models[j]
        trained = [theta - self.protocol.lr * self.gradient(theta, i) for i in members]
        mean: np.ndarray = np.average(trained, axis=0, weights=[SIZES[i] for i in members])
        return mean


@pytest.mark.parametrize(
    ("k", "period", "mask"), [(2, 1, "none"), (2, 2, "rotation"), (3, 2, "permutation")]
)
def test_cflgp_equals_a_plain_loop(k: int, period: int, mask: str) -> None:
    federation = tiny(k)
    params: dict[str, Any] = {"k": k, "period": period, "cluster_rounds": 6, "mask": mask}
    params |= {"lr": 0.3, "batch_size": 100}  # all samples of a client
    protocol = made(rounds=8, **params)
    served = serve(protocol, federation)
    # k-means numbers the first clusters as it likes
    first = serve(made(rounds=1, **params), federation).state.running.choice
    loop = PlainLoop(protocol, federation, first)
    expected, models = loop.run()
    assert loop.first.tolist() == first
    assert served.state.running.choice == expected
    final = protocol.observer.final_models(served.endpoint.client, served.state).values
    np.testing.assert_allclose(final.numpy(), models, rtol=0, atol=1e-9)
    # the mean over calls of inner products is that of the profile
    profile = np.concatenate(loop.blocks)
    inner = profile.T @ profile / len(loop.blocks)
    np.testing.assert_allclose(served.state.profile(), inner, rtol=0, atol=1e-9)


@pytest.mark.parametrize("seed", range(4))
def test_clusters_are_those_of_k_means_on_projected_columns(seed: int) -> None:
    draw = np.random.default_rng(seed)
    truth = np.repeat(np.arange(3), 8)
    profile = 2 * draw.normal(size=(60, 3))[:, truth] + draw.normal(size=(60, 24))
    left, _, _ = np.linalg.svd(profile, full_matrices=False)
    columns = (left[:, :3].T @ profile).T
    expected = KMeans(3, n_init=20, random_state=0).fit_predict(columns)
    found = partition(profile.T @ profile, 3, seed)
    assert adjusted_rand_score(expected, found) == 1
    assert adjusted_rand_score(truth, found) == 1


def test_as_many_clients_as_possible_keep_their_number() -> None:
    draw = np.random.default_rng(0)
    for _ in range(20):
        labels = draw.integers(0, 4, 12).tolist()
        old = [None if number == 4 else int(number) for number in draw.integers(0, 5, 12)]
        best = 0
        for order in itertools.permutations(range(4)):
            kept = sum(order[c] == number for c, number in zip(labels, old, strict=True))
            best = max(best, kept)
        found = kept_numbers(labels, old, 4)
        assert sum(a == b for a, b in zip(found, old, strict=True)) == best
        assert adjusted_rand_score(labels, found) == 1


def test_the_criterion_goes_through_all_models() -> None:
    assert [criterion_of(t, 2, 3) for t in range(1, 14, 2)] == [0, 1, 2, 0, 1, 2, 0]


@pytest.mark.parametrize("mask", ["none", "haar"])
def test_swapped_labels_are_found(mask: str, digits: Federation) -> None:
    assert made(mask=mask).fit(digits).agreement_["exact"]


def test_turned_images_are_found() -> None:
    turned = Federation.simulate("digits", scenario=Rotation(), clients=12, samples=60, seed=0)
    assert made(k=4, rounds=6).fit(turned).agreement_["exact"]


def test_gradients_accumulate_until_noise_no_longer_hides_clusters() -> None:
    draw = np.random.default_rng(0)
    truth = np.repeat(np.arange(2), 8)
    width = 400
    exact = draw.normal(size=(2, width))[truth]
    sigma = 8.0
    state = CFLGPState(Restart.begin(0, 2, 16, fresh=False))
    found = []
    for _ in range(40):
        noisy = torch.as_tensor(exact + sigma * draw.normal(size=exact.shape))
        state.accumulate(range(16), gram(noisy, noise=sigma**2 * width))
        labels = partition(state.profile(), 2, 0)
        found.append(adjusted_rand_score(truth, labels))
    assert found[0] < 0.5
    assert found[-1] == 1
    # no term of the noise remains on the diagonal, whose mean is a squared norm
    assert np.diag(state.profile()).mean() == pytest.approx(width, rel=0.2)


def test_gradients_are_asked_once_in_a_period_in_the_first_rounds(digits: Federation) -> None:
    fitted = made(rounds=9, period=2, cluster_rounds=6).fit(digits)
    rounds = {e.round for e in fitted.ledger_.events if e.method == "send_gradient"}
    assert rounds == {1, 3, 5}


def test_all_clients_are_clustered_whatever_their_share_of_the_rounds(digits: Federation) -> None:
    fitted = made(rounds=6, participation=0.5).fit(digits)
    assert fitted.agreement_["exact"]
    trained = {e.round: len(e.ids) for e in fitted.ledger_.events if e.method == "contribute"}
    assert trained[1] == 10
    assert trained[2] == 5


def test_clients_without_a_reply_join_by_the_gradients_of_other_rounds(digits: Federation) -> None:
    def lost(call: Call) -> set[int]:
        if call.method != "send_gradient":
            return set()
        return {0} if call.round == 1 else {1, 2} if call.round == 3 else set()

    served = serve(made(rounds=6), digits, lost)
    assert adjusted_rand_score(digits.truth, served.state.labels) == 1
    # of the calls in rounds 1, 3 and 5
    assert served.state.together[:4, :4].tolist() == [
        [2, 1, 1, 2],
        [1, 2, 2, 2],
        [1, 2, 2, 2],
        [2, 2, 2, 3],
    ]


def test_secure_sums_hide_updates_and_change_no_cluster(digits: Federation) -> None:
    fitted = made(rounds=6, aggregation="secagg").fit(digits)
    assert fitted.agreement_["exact"]


@pytest.mark.parametrize("ratio", [0.5, 1.0])
def test_the_price_is_that_of_full_gradients_and_of_batches(
    ratio: float, digits: Federation
) -> None:
    params: dict[str, Any] = {"rounds": 5, "batch_size": 20, "gradient_noise": ratio}
    fitted = made(clip=1.0, noise=1.2, dp_unit="example", **params).fit(digits)
    costs = []
    for shard in digits.shards:
        n = len(shard.y)
        steps = 5 * math.ceil(n / 20)
        # rounds 1, 3 and 5 have a gradient over all samples
        costs.append(epsilon([(ratio * 1.2, 1.0, 3), (1.2, min(1, 20 / n), steps)], 1e-5).epsilon)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(max(costs), rel=1e-6)


@pytest.mark.parametrize("ratio", [1.0, 3.0])
def test_the_noise_of_a_gradient_is_that_of_its_sensitivity(ratio: float) -> None:
    federation = tiny()
    z, clip = 0.5, 2.0
    noisy = {"clip": clip, "noise": z, "dp_unit": "example", "gradient_noise": ratio}
    endpoint = build_client(made(mask="none", **noisy), federation, DOUBLE)
    client: Any = endpoint.client
    ids = tuple(range(len(SIZES)))
    query = Restart.begin(0, 2, len(SIZES), fresh=False).message_for(ids)
    draws = []
    for step in range(1, 151):
        context = endpoint.context(ids, 1, step, "send_gradient")
        draws.append(client.send_gradient(context, query).delta.values.numpy())
    measured = np.stack(draws).std(axis=0).mean(1)
    # one of n clipped gradients moves their mean by at most S/n
    expected = ratio * z * clip / np.array(SIZES)
    np.testing.assert_allclose(measured, expected, rtol=0.1)


def test_a_late_request_is_refused() -> None:
    federation = tiny()
    endpoint = build_client(made(mask="none"), federation, DOUBLE)
    client: Any = endpoint.client
    running = Restart.begin(0, 2, len(SIZES), fresh=False)
    earlier = running.message_for((0,))
    running.post(1, torch.ones(2, client.cohort.model.dimension).double(), torch.ones(2))
    client.send_gradient(endpoint.context((0,), 3, 3, "send_gradient"), running.message_for((0,)))
    with pytest.raises(PolicyError, match="too late"):
        client.send_gradient(endpoint.context((0,), 1, 2, "send_gradient"), earlier)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"k": 11}, "k"),
        ({"period": 0}, "period"),
        ({"cluster_rounds": 0}, "cluster_rounds"),
        ({"gradient_noise": 0.0}, "gradient_noise"),
        ({"gradient_noise": 0.5, "clip": 1.0, "noise": 1.0}, "take dp_unit example"),
        (
            {"aggregation": "secagg", "clip": 1.0, "noise": 1.0, "placement": "distributed"},
            "send_gradient",
        ),
    ],
    ids=str,
)
def test_options_that_cannot_work_are_refused(
    params: dict[str, Any], sentence: str, digits: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**params).fit(digits)
