"""Which clients are of one cluster, and membership by the models of clusters of several sizes."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from attacked import FULL, digits, result_of, samples_of, scene, score_of
from sklearn.metrics import roc_auc_score
from sklearn.metrics.pairwise import cosine_similarity

from securecluster import Federation, LabelSwap
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.on_models.clusters import (
    MEMBERS,
    ClusterIdentity,
    ClusterModelMembership,
    OfOneSize,
    SameCluster,
    similarities,
)
from securecluster.attacks.scoring import score
from securecluster.protocols import IFCA, FedAvg

pytestmark = pytest.mark.filterwarnings("ignore:on their own test samples")

RESAMPLES = (100, 100)
SMALL: dict[str, Any] = {"rounds": 1, "epochs": 5, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return digits(scenario=LabelSwap(clusters=2), clients=12, samples=40)


@pytest.mark.parametrize(
    ("options", "better"),
    [
        ({"mask": "none"}, True),
        ({"mask": "permutation"}, True),  # a mask keeps inner products
        ({"mask": "none", "clip": 1.0, "noise": 5.0}, False),  # some draws leave it undecided
    ],
)
def test_updates_tell_who_is_alike_unless_there_is_noise(
    federation: Federation, options: dict[str, Any], better: bool
) -> None:
    fitted = FedAvg(**SMALL, **options).fit(federation, FULL)
    verdict = score_of(ClusterIdentity(), fitted, federation).verdict
    assert (verdict == "better than chance") == better


def test_sums_leave_no_updates_to_compare(federation: Federation) -> None:
    fitted = FedAvg(**SMALL, aggregation="secagg").fit(federation, FULL)
    assert "know no clusters" in result_of(ClusterIdentity(), fitted, federation)


@pytest.mark.always
def test_a_server_that_is_told_choices_knows_clusters_until_sums_hide_them(
    federation: Federation,
) -> None:
    options: dict[str, Any] = {"k": 2, "rounds": 5, "epochs": 1, "model": "linear", "starts": 1}
    told = IFCA(**options).fit(federation, FULL)
    by_labels = score_of(ClusterIdentity(), told, federation)
    labels, true = np.asarray(told.labels_), np.asarray(federation.truth)
    pairs = ~np.eye(len(labels), dtype=bool)
    same = [(a[:, None] == a[None])[pairs] for a in (true, labels)]
    assert by_labels.value == pytest.approx(roc_auc_score(*same))
    hidden = IFCA(**options, aggregation="secagg").fit(federation, FULL)
    assert "know no clusters" in result_of(ClusterIdentity(), hidden, federation)


def test_similarities_and_their_auc_are_those_of_scikit_learn() -> None:
    rows = np.random.default_rng(1).standard_normal((6, 4))
    found = similarities(dict(enumerate(rows)))
    expected = cosine_similarity(rows)
    assert all(np.allclose(row, np.delete(expected[k], k)) for k, row in found.items())
    clusters = (0, 0, 1, 1, 2, 2)
    truth = Truth(federation=SimpleNamespace(truth=clusters))  # type: ignore[arg-type]
    guess = Guess("same cluster", found)
    same = np.equal.outer(clusters, clusters)[~np.eye(6, dtype=bool)]
    auc = SameCluster().summary(SameCluster().units(guess, truth))
    assert auc == pytest.approx(roc_auc_score(same, np.concatenate(guess.listed)))


def sizes(small: int) -> Federation:
    """Two clusters that code the label differently, of few clients and of many."""
    data = {}
    for i in range(12):
        draw = np.random.default_rng(i)
        x = draw.standard_normal((40, 60)).astype("float32")
        x[:, 0] *= 5
        y = ((x[:, 0] > 0) == (i < small)).astype(int)
        data[f"c{i}"] = (x, np.where(draw.random(40) < 0.2, 1 - y, y))
    truth = {name: int(i < small) for i, name in enumerate(data)}
    return Federation.from_arrays(data, classes=2, seed=0, truth=truth)


def attacked(**protection: Any) -> tuple[Any, Guess, Truth]:
    federation = sizes(2)
    options: dict[str, Any] = {
        "k": 2, "rounds": 20, "epochs": 3, "model": "mlp", "lr": 0.3, "starts": 1, "mask": "none",
    }  # fmt: skip
    fitted = IFCA(**options, **protection).fit(federation, FULL)
    inside, outside = samples_of(federation), samples_of(federation, part="_test")
    samples = tuple(np.concatenate(pair) for pair in zip(inside, outside, strict=True))
    view, knowledge, truth = scene(fitted, federation, samples)  # type: ignore[arg-type]
    attack = ClusterModelMembership()
    assert attack.applies(view, knowledge) is None
    guess = attack.run(view, knowledge)
    return score(attack.scorer, guess, truth), guess, truth


def test_the_fewer_clients_a_cluster_has_the_more_its_model_tells() -> None:
    found, guess, truth = attacked()
    assert found.beats_chance
    assert sorted(map(len, guess.details[MEMBERS].values())) == [2, 10]
    few, many = (score(scorer, guess, truth) for scorer in ClusterModelMembership.further)
    assert few.value > many.value + 0.05
    assert few.units == 2 * 40 and many.units == 10 * 40
    (cluster,) = (c for c, clients in guess.details[MEMBERS].items() if len(clients) == 2)
    shards = truth.federation.shards
    inside = sum(len(shard.y) for shard in shards)
    first, end = len(shards[0].y), len(shards[0].y) + len(shards[1].y)
    held = inside + len(shards[0].y_test) + len(shards[1].y_test)
    row = guess.values[cluster]
    own = np.concatenate([row[:end], row[inside:held]])
    trained = np.arange(len(own)) < end
    assert first < end and few.value == pytest.approx(roc_auc_score(trained, own))


@pytest.mark.filterwarnings("ignore::securecluster.errors.SecureClusterWarning")
def test_noise_leaves_membership_of_clusters_at_chance() -> None:
    found, _, _ = attacked(clip=1.0, noise=2.0)
    assert found.at_chance


def test_secure_sums_hide_no_average_of_all_clients(federation: Federation) -> None:
    fitted = FedAvg(**SMALL, mask="none", aggregation="secagg").fit(federation, FULL)
    samples = samples_of(federation)
    assert score_of(ClusterModelMembership(), fitted, federation, samples).units > 0
    masked = FedAvg(**SMALL, mask="permutation").fit(federation, FULL)
    assert "under a mask" in result_of(ClusterModelMembership(), masked, federation, samples)


def test_clusters_of_one_size_are_not_compared() -> None:
    guess = Guess("membership in a cluster", {0: np.zeros(2)}, {MEMBERS: {0: [1]}})
    assert OfOneSize(smallest=True).why_not(guess, Truth(None)) is not None  # type: ignore[arg-type]
