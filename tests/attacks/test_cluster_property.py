"""What clusters tell of their members, and that nothing is told where nobody knows them."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest
import torch
from attacked import FULL, digits, result_of, samples_of, scene, score_of

from securecluster import Federation, Iid, Pathological
from securecluster.attacks.base import Guess, Truth
from securecluster.attacks.cluster_property import (
    PROPERTIES,
    ClusterProperty,
    PropertiesFound,
    cluster_models,
)
from securecluster.attacks.scoring import score
from securecluster.attacks.views import knowledge_of, view_of
from securecluster.data.transforms import Rotation
from securecluster.errors import UsageError
from securecluster.messaging.parties import SERVER
from securecluster.protocols import FLHC, IFCA, FedAvg, RandomClusters

RESAMPLES = (100, 50)

SHORT: dict[str, Any] = {"rounds": 3, "epochs": 3, "model": "linear"}
FEDERATION = digits(scenario=Pathological(clusters=3, labels=1), clients=12, samples=20)
PUBLIC = samples_of(FEDERATION, part="_test")
CHOOSING: dict[str, Any] = {
    "rounds": 1, "starts": 1, "epochs": 1, "model": "linear", "k": 2, "mask": "none",
}  # fmt: skip


@pytest.fixture(scope="module")
def clustered() -> FLHC:
    """Clusters and their models are seen, and no update is."""
    secure = FLHC(**SHORT, pre_rounds=1, mask="none", aggregation="secagg")
    return secure.fit(FEDERATION, FULL)


@pytest.fixture(scope="module")
def masked() -> FLHC:
    return FLHC(**SHORT, pre_rounds=1, mask="permutation").fit(FEDERATION, FULL)


def test_the_model_of_a_cluster_tells_the_class_of_its_members(clustered: FLHC) -> None:
    found = score_of(ClusterProperty(), clustered, FEDERATION, PUBLIC)
    assert (found.value, found.units) == (1.0, 12)
    assert found.beats_chance
    # three classes of four clients each: the commonest one is right for a third
    assert 1 / 3 <= found.chance < 0.5


def test_one_colluding_member_tells_the_class_of_a_masked_cluster(masked: FLHC) -> None:
    colluders = [list(masked.labels_).index(cluster) for cluster in range(3)]
    found = score_of(ClusterProperty(), masked, FEDERATION, colluders=colluders)
    assert (found.value, found.units) == (1.0, 9)
    assert found.beats_chance
    known = {client: int(FEDERATION.shards[client].y[0]) for client in colluders}
    assert result_of(ClusterProperty(public=known), masked, FEDERATION) == found


def test_clusters_that_say_nothing_are_at_chance() -> None:
    random = RandomClusters(**SHORT, k=3, mask="none").fit(FEDERATION, FULL)
    assert not score_of(ClusterProperty(), random, FEDERATION, PUBLIC).beats_chance


def test_the_models_read_are_the_clusters_own(clustered: FLHC) -> None:
    view = view_of(clustered)
    models = cluster_models(view, knowledge_of(clustered))
    assert sorted(models) == [0, 1, 2]
    for client, cluster in view.clusters.items():
        own = clustered.client_models_.row(client)
        assert torch.allclose(models[cluster], own, atol=1e-6)


def test_the_rotation_of_a_cluster_is_that_of_which_its_model_knows_digits() -> None:
    turned = digits(scenario=Rotation(clusters=2), clients=8, samples=40)
    upright = Federation.simulate("digits", scenario=Iid(), clients=4, samples=40, seed=7)
    made = FLHC(rounds=3, pre_rounds=1, epochs=8, model="linear", mask="none")
    fitted = made.fit(turned, FULL)
    view, knowledge, truth = scene(fitted, turned, samples_of(upright, part="_test"))
    attack = ClusterProperty("rotation")
    guess = attack.run(view, knowledge)
    assert guess.values == {k: 2 * cluster for k, cluster in enumerate(turned.truth or ())}
    assert score(attack.scorer, guess, truth).beats_chance
    other = replace(truth, federation=FEDERATION)
    with pytest.raises(UsageError, match="have no rotation: ask for another property"):
        PROPERTIES["rotation"].of_client(other, 0)


def test_chance_is_the_better_of_permuted_labels_and_the_commonest_property() -> None:
    counts = np.array([[9, 1]] * 8 + [[1, 9]] * 2)
    truth = cast(Truth, SimpleNamespace(label_counts=lambda client: counts[client]))
    # eight of ten are right, as with the commonest class; a permuted guess has about 0.62
    guessed = [0] * 7 + [1, 0, 1]
    guess = Guess("majority class", dict(enumerate(guessed)))
    found = score(PropertiesFound(), guess, truth)
    assert found.value == 0.8
    assert found.chance >= 0.8
    assert not found.beats_chance


def test_clusters_are_known_where_the_server_computes_them(clustered: FLHC) -> None:
    assert view_of(clustered).clusters == dict(enumerate(clustered.labels_.tolist()))
    for parties in ("wire", 3, [0, 1]):
        assert view_of(clustered, parties).clusters == {}
    assert view_of(clustered, anonymous=True).clusters == {}


def test_the_attack_says_why_it_does_not_apply(clustered: FLHC, masked: FLHC) -> None:
    everything = ClusterProperty(public=dict.fromkeys(range(12), 0))
    joint = FedAvg(**{**SHORT, "rounds": 1}).fit(FEDERATION, FULL)
    for attack, fitted, samples, parties, reason in (
        (
            ClusterProperty(),
            clustered,
            PUBLIC,
            "wire",
            "the parties do not know which clients are in",
        ),
        (ClusterProperty(), masked, PUBLIC, SERVER, "nothing is known of a client or of a cluster"),
        (everything, masked, None, SERVER, "the property of every client is known"),
        (ClusterProperty(), joint, PUBLIC, SERVER, "all clients are in one cluster"),
    ):
        said = result_of(attack, fitted, FEDERATION, samples, parties=parties)
        assert said.startswith(f"not applicable: {reason}")


def test_clusters_that_clients_choose_in_secret_are_unknown() -> None:
    few = FEDERATION.select(range(4))
    fitted = IFCA(**CHOOSING, aggregation="secagg").fit(few, FULL)
    view, colluding, _ = scene(fitted, few, samples_of(few, part="_test"), colluders=[0, 1])
    assert view.clusters == {}
    assert ClusterProperty().applies(view, colluding) == (
        "not applicable: the parties do not know which clients are in a cluster"
    )
    told = IFCA(**CHOOSING).fit(few, FULL)
    assert view_of(told).clusters == dict(enumerate(told.labels_.tolist()))
