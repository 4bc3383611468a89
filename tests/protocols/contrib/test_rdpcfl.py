"""R-DPCFL: its clustering against scikit-learn and formulas, its loop, and the price of a run."""

from __future__ import annotations

import itertools
import math
from typing import Any

import numpy as np
import pytest
from cases import serve, two_clusters
from sklearn.decomposition import PCA
from sklearn.metrics import adjusted_rand_score
from sklearn.mixture import GaussianMixture
from sklearn.preprocessing import StandardScaler

from securecluster import RDPCFL, Federation, Settings
from securecluster.core.lazy_torch import torch
from securecluster.errors import UsageError
from securecluster.messaging.messages import Rows
from securecluster.models.objectives import Trajectory
from securecluster.parties.derived import initial_model
from securecluster.privacy.dp.accounting import epsilon
from securecluster.privacy.dp.exponential_mechanism import noise_multiplier
from securecluster.protocols.contrib.rdpcfl import projected, soft_clusters

FOUR = np.repeat(np.arange(4), 5)


@pytest.fixture(scope="module")
def swapped() -> Federation:
    return two_clusters(8, 100)


def blobs(spread: float, seed: int = 0) -> np.ndarray:
    """Return 20 rows around four corners, which the first two coordinates tell apart."""
    draw = np.random.default_rng(seed)
    corners = np.array([[0, 0], [8, 0], [0, 8], [8, 8]])[FOUR]
    return np.hstack([corners, np.zeros((20, 4))]) + spread * draw.normal(size=(20, 6))


def test_directions_are_those_of_scikit_learn_on_standardised_coordinates() -> None:
    updates = blobs(0.5)
    points = projected(updates)
    pca = PCA(2).fit(StandardScaler().fit_transform(updates))
    expected = updates @ pca.components_.T
    scaled = (expected - expected.min(0)) / np.ptp(expected, axis=0)
    for axis in range(2):
        # a direction's sign is arbitrary
        same = np.allclose(points[:, axis], scaled[:, axis])
        mirrored = np.allclose(points[:, axis], 1 - scaled[:, axis])
        assert same or mirrored
    assert points.min() == 0 and points.max() == 1


def test_coordinates_may_come_in_any_order() -> None:
    updates = blobs(0.5)
    order = np.random.default_rng(1).permutation(6)
    found = soft_clusters(updates[:, order], 4, 0).shares.argmax(1)
    assert adjusted_rand_score(FOUR, found) == 1


def test_shares_are_certain_far_apart_and_the_overlap_grows_with_the_spread() -> None:
    near, far = soft_clusters(blobs(2.0), 4, 0), soft_clusters(blobs(0.1), 4, 0)
    np.testing.assert_allclose(far.shares.sum(1), 1)
    assert adjusted_rand_score(FOUR, far.shares.argmax(1)) == 1
    assert far.shares.max(1).min() > 0.999
    assert 0 <= far.overlap < 1e-6 < near.overlap < 1


def test_the_number_of_components_is_that_of_the_largest_separation() -> None:
    updates = blobs(1.0)
    points = projected(updates)
    separations = {}
    for k in range(2, 7):
        mixture = GaussianMixture(
            k, covariance_type="spherical", init_params="k-means++", n_init=5, random_state=0
        ).fit(points)
        deviations = np.sqrt(mixture.covariances_)
        separations[k] = min(
            np.linalg.norm(mixture.means_[a] - mixture.means_[b])
            / (2 * max(deviations[a], deviations[b]))
            for a, b in itertools.combinations(range(k), 2)
        )
    best = max(separations, key=separations.__getitem__)
    found = soft_clusters(updates, None, 0)
    assert found.shares.shape[1] == best
    # 1 − erf(s/√2)
    assert found.overlap == pytest.approx(1 - math.erf(separations[best] / math.sqrt(2)), abs=1e-9)


def test_a_run_finds_its_clusters_without_noise_and_often_with_it() -> None:
    # some draws lose a client, also of hardly any noise
    noise = {"clip": 1.0, "target_epsilon": 1000.0}
    found: dict[str, list[float]] = {"without": [], "with": []}
    for seed in range(4):
        clients = two_clusters(8, 100, seed=seed)
        for name, options in (("without", {}), ("with", noise)):
            fitted = RDPCFL(k=2, rounds=20, model="linear", **options).fit(clients)
            found[name].append(fitted.agreement_["ari"])
    assert found["without"] == [1.0] * 4
    assert found["with"].count(1.0) >= 2


def test_models_of_the_first_round_are_means_of_first_updates(swapped: Federation) -> None:
    # one round is the full gradient step alone: θ_c is the mean over the cluster's clients
    params: dict[str, Any] = {"k": 2, "model": "linear", "lr": 0.5, "mask": "none"}
    fitted = RDPCFL(rounds=1, **params).fit(swapped, Settings(dtype="float64"))
    expected = []
    for shard in swapped.shards:
        x = torch.as_tensor(shard.x).flatten(1).double()
        y = torch.as_tensor(shard.y)
        # softmax regression that begins where the run's model does
        start = initial_model(fitted, swapped).initial().double()
        weight = start[: 10 * x.shape[1]].view(10, -1).clone().requires_grad_()
        bias = start[10 * x.shape[1] :].clone().requires_grad_()
        loss = torch.nn.functional.cross_entropy(x @ weight.T + bias, y)
        gradients = torch.autograd.grad(loss, (weight, bias))
        expected.append(-0.5 * torch.cat([gradient.flatten() for gradient in gradients]))
    start = initial_model(fitted, swapped).initial().double()
    for i, label in enumerate(fitted.labels_):
        members = [expected[j] for j, other in enumerate(fitted.labels_) if other == label]
        mean = torch.stack(members).mean(0)
        torch.testing.assert_close(fitted.client_models_.row(i) - start, mean, rtol=0, atol=1e-9)


@pytest.mark.filterwarnings("ignore:all 8 clients ended in one cluster")
def test_the_price_is_that_of_one_full_step_of_batches_and_of_choices(swapped: Federation) -> None:
    params: dict[str, Any] = {
        "k": 2, "rounds": 10, "epochs": 1, "batch_size": 20, "model": "linear",
    }  # fmt: skip
    fitted = RDPCFL(clip=1.0, noise=1.2, selection_noise=5.0, **params).fit(swapped)
    rows = {(row.method, row.mechanism): row for row in fitted.ledger_.summary()}
    assert rows["choose", "gaussian"].noise_multiplier == pytest.approx(6.0)
    assert rows["choose", "gaussian"].count == 1
    samples = [len(shard.y) for shard in swapped.shards]
    costs = []
    for n in samples:
        rate = min(1, 20 / n)
        history = [(1.2, 1.0, 1), (1.2, rate, 9 * math.ceil(n / 20)), (6.0, 1.0, 1)]
        costs.append(epsilon(history, 1e-5).epsilon)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(max(costs), rel=1e-6)


@pytest.mark.filterwarnings("ignore:.*lost in the noise")
@pytest.mark.filterwarnings("ignore:.*most likely of noise")
def test_choices_with_noise_are_those_of_the_exponential_mechanism(swapped: Federation) -> None:
    # so little noise that the best model is chosen, and so much that either is
    assert noise_multiplier(60.0) < 0.2
    settings: dict[str, Any] = {
        "k": 2, "rounds": 20, "model": "linear", "clip": 1.0, "noise": 0.005,
    }  # fmt: skip
    sure = RDPCFL(selection_noise=10.0, **settings).fit(swapped)
    assert sure.agreement_["ari"] == 1
    unsure = RDPCFL(selection_noise=1e6, **settings).fit(swapped)
    assert unsure.agreement_["ari"] < 1


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"k": 9}, "k = 9"),
        ({"selection_share": 0.0}, "selection_share"),
        ({"selection_noise": 0.0}, "selection_noise"),
        ({"selection_noise": 1e-300, "clip": 1.0, "target_epsilon": 4.0}, "selection_noise"),
        ({"aggregation": "secagg"}, "R-DPCFL's server draws clusters anew"),
    ],
)
def test_mistakes_are_one_sentence(
    params: dict[str, Any], reason: str, swapped: Federation
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        RDPCFL(rounds=3, model="linear", **params).fit(swapped)
    assert "\n" not in str(caught.value)


def test_newcomers_join_the_cluster_whose_model_fits(swapped: Federation) -> None:
    fitted = RDPCFL(k=2, rounds=20, model="linear").fit(swapped)
    assert fitted.join(swapped).tolist() == fitted.labels_.tolist()


@pytest.mark.filterwarnings("ignore:.*lost in the noise|.*most likely of noise")
def test_a_whole_client_changes_shares_of_right_answers(swapped: Federation) -> None:
    # with the unit "client" a choice depends on shares in [0, 1], so little noise hides most of it
    settings: dict[str, Any] = {"k": 2, "rounds": 20, "model": "linear", "clip": 100.0}
    settings |= {"noise": 1e-4, "selection_noise": 2e4}
    by_samples = RDPCFL(dp_unit="example", **settings).fit(swapped)
    assert by_samples.agreement_["ari"] == 1
    by_clients = RDPCFL(dp_unit="client", **settings).fit(swapped)
    assert by_clients.agreement_["ari"] < 1


@pytest.fixture(scope="module")
def paths() -> Federation:
    """Six clients that walk on by the last step, or back by it."""
    clients = {}
    for i in range(6):
        draw = np.random.default_rng(i)
        steps = draw.normal(scale=0.1, size=(20, 2))
        before = draw.uniform(0.4, 0.6, size=(20, 2))
        last = before + steps
        direction = 1 if i < 3 else -1
        clients[f"c{i}"] = (np.stack([before, last], 1), last + direction * steps)
    truth = {f"c{i}": int(i >= 3) for i in range(6)}
    return Federation.from_arrays(
        clients, truth=truth, objective=Trajectory(metres=(1000, 1000)), classes=2, seed=0
    )


def test_without_classes_the_model_of_the_least_loss_is_chosen(paths: Federation) -> None:
    client = serve(RDPCFL(k=2, rounds=4, model="linear"), paths).endpoint.client
    zeros = torch.zeros_like(client.cohort.start)
    far = zeros + 10
    expected: list[list[float]] = []
    counts = []
    for theta in (zeros, far):
        expected.append([])
        for shard in paths.shards:
            # all parameters of the linear model are the same number
            inputs = shard.x.reshape(len(shard.y), -1)
            outputs = float(theta[0]) * (1 + inputs.sum(1, keepdims=True))
            squared = np.square(outputs - shard.y).mean(1)
            expected[-1].append((1 - np.minimum(squared, 0.25) / 0.25).sum())
        rows = Rows(theta[None], (0,) * len(paths))
        counts.append(client._right_answers(rows, range(len(paths))))
    np.testing.assert_allclose(counts, expected, rtol=1e-5, atol=1e-5)
    assert (counts[0] > counts[1]).all()


def test_rounds_of_choices_without_any_reply_change_nothing(swapped: Federation) -> None:
    params: dict[str, Any] = {"k": 2, "rounds": 6, "selection_share": 0.5, "model": "linear"}
    for seed in range(3):
        silent = Settings(dropout=0.95)
        federation = two_clusters(4, 20, seed=seed)
        fitted = RDPCFL(**params).fit(federation, silent)
        assert len(fitted.labels_) == 4
