"""FLUX: what its server gets, what it finds under each kind of shift, newcomers, and its price."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.metrics import homogeneity_score

from securecluster import FLUX, Federation, LabelSplit, LabelSwap, Rotation, Settings
from securecluster.errors import UpdateError, UsageError
from securecluster.models.objectives import Language, Trajectory
from securecluster.parties.derived import initial_model
from securecluster.privacy.dp.accounting import epsilon
from securecluster.privacy.dp.client_noise import ClientNoise
from securecluster.privacy.dp.noise_streams import NoiseStreams
from securecluster.protocols.contrib.flux.client import release_sums
from securecluster.protocols.contrib.flux.density import Scaling, density_clusters
from securecluster.protocols.contrib.flux.descriptors import DescriptorMap
from securecluster.runtime.call_context import outside_run

FULL = Settings(transcript="full")
SHIFTS: dict[str, Any] = {
    "P(Y|X)": LabelSwap(clusters=2),
    "P(X), P(X|Y)": Rotation(clusters=2),
    "P(Y)": LabelSplit(clusters=2),
}
SMALL: dict[str, Any] = {"rounds": 3, "pre_rounds": 1, "model": "linear", "mask": "none"}


def clients(scenario: Any, count: int = 8, samples: int = 110, seed: int = 0) -> Federation:
    return Federation.simulate(
        "digits", scenario=scenario, clients=count, samples=samples, seed=seed
    )


@pytest.fixture(scope="module")
def turned() -> Federation:
    return clients(Rotation(clusters=2))


@pytest.fixture(scope="module")
def swapped() -> Federation:
    return clients(LabelSwap(clusters=2))


def reply(fitted: Any, name: str) -> np.ndarray:
    """Return the descriptors that the server got in the only call of a method."""
    entries = fitted.transcript_.entries
    (place,) = [k for k, entry in enumerate(entries) if entry.method == name]
    moments = fitted.transcript_.content(place)[1].reply.moments.values
    return np.asarray(moments.double().numpy())


@pytest.mark.parametrize("shift", SHIFTS)
@pytest.mark.parametrize("model", ["linear", "mlp"])
def test_clients_are_clustered_under_every_kind_of_shift(shift: str, model: str) -> None:
    federation = clients(SHIFTS[shift])
    told = FLUX(**{**SMALL, "model": model}, k=2).fit(federation)
    assert told.agreement_["ari"] == 1
    # DBSCAN's radius on eight clients divides clusters, and mixes none
    found = FLUX(**{**SMALL, "model": model}).fit(federation)
    assert homogeneity_score(federation.truth, found.labels_) == pytest.approx(1)
    assert max(found.labels_) < 7


def test_dbscan_finds_the_number_of_clusters_of_equal_clients() -> None:
    federation = clients(LabelSwap(clusters=3), count=3, samples=60)
    shards = {f"c{i}": (federation.shards[i % 3].x, federation.shards[i % 3].y) for i in range(9)}
    # each client has all but one sample of one of three clients
    draws = {name: np.delete(np.arange(60), i) for i, name in enumerate(shards)}
    data = {name: (x[draws[name]], y[draws[name]]) for name, (x, y) in shards.items()}
    copies = Federation.from_arrays(data, seed=0)
    fitted = FLUX(**SMALL, radius_scale=1.5).fit(copies)
    assert fitted.labels_.tolist() == [0, 1, 2] * 3


def test_the_server_gets_the_moments_of_latent_vectors_under_the_first_model(
    swapped: Federation,
) -> None:
    made = FLUX(**{**SMALL, "pre_rounds": 0, "model": "mlp-32"}, components=6)
    fitted = made.fit(swapped, FULL)
    told = reply(fitted, "describe")
    model = initial_model(made, swapped)
    weights = {name: value.numpy() for name, value in model.views(model.initial()).items()}
    first, bias = (weights[name] for name in list(weights)[:2])
    plan = DescriptorMap(32, 6, 10, swapped.seed)
    for i, shard in enumerate(swapped.shards):
        hidden = np.maximum(shard.x.reshape(len(shard.y), -1) @ first.T + bias, 0)
        z = hidden @ plan.directions.T
        np.testing.assert_allclose(told[i, 0], z.mean(0), atol=1e-5)
        np.testing.assert_allclose(told[i, 1], z.std(0), atol=1e-5)
        for u in range(10):
            own = z[shard.y == u]
            np.testing.assert_allclose(told[i, 2 + u], own.mean(0), atol=1e-5)
            np.testing.assert_allclose(told[i, 12 + u], own.std(0), atol=1e-5)
    labels, radius = density_clusters(Scaling.of(told).scaled(told))
    assert fitted.labels_.tolist() == labels
    assert fitted.history_[0]["radius"] == pytest.approx(radius)


def test_clients_describe_their_samples_under_the_model_of_all(swapped: Federation) -> None:
    first = reply(
        FLUX(**{**SMALL, "model": "mlp-32", "pre_rounds": 0}).fit(swapped, FULL), "describe"
    )
    later = FLUX(**{**SMALL, "model": "mlp-32", "pre_rounds": 2}).fit(swapped, FULL)
    assert not np.allclose(first, reply(later, "describe"), atol=1e-3)
    assert [line["clusters"] for line in later.history_[:2]] == [1, 1]
    assert later.history_[2]["clusters"] > 1


def test_silent_clients_join_the_largest_cluster_and_are_named(swapped: Federation) -> None:
    fitted = FLUX(**SMALL, k=2).fit(swapped, Settings(dropout=0.7))
    (line,) = [line for line in fitted.history_ if "absent" in line]
    sizes = np.bincount(fitted.labels_)
    assert line["absent"]
    assert {int(fitted.labels_[i]) for i in line["absent"]} == {int(sizes.argmax())}


@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_unlabelled_newcomers_join_by_their_features_alone(mask: str) -> None:
    everyone = clients(Rotation(clusters=2), count=12)
    run, late = everyone.select(range(8)), everyone.select(range(8, 12))
    fitted = FLUX(**{**SMALL, "mask": mask}, k=2).fit(run)
    joined = fitted.join(late).tolist()
    expected = [fitted.labels_[run.truth.index(cluster)] for cluster in late.truth]
    assert joined == expected
    # whatever their labels are
    shards = tuple(replace(shard, y=np.zeros_like(shard.y)) for shard in late.shards)
    assert fitted.join(replace(late, shards=shards)).tolist() == expected


def test_labels_tell_newcomers_apart_whose_features_are_alike() -> None:
    everyone = clients(LabelSwap(clusters=2), count=12)
    run, late = everyone.select(range(8)), everyone.select(range(8, 12))
    fitted = FLUX(**SMALL, k=2, newcomers_by="labels").fit(run)
    expected = [fitted.labels_[run.truth.index(cluster)] for cluster in late.truth]
    assert len(set(expected)) == 2
    assert fitted.join(late).tolist() == expected
    blind = FLUX(**SMALL, k=2).fit(run)
    assert blind.join(late).tolist() == blind.join(_with_other_labels(late)).tolist()


def _with_other_labels(federation: Federation) -> Federation:
    shards = tuple(replace(shard, y=9 - shard.y) for shard in federation.shards)
    return replace(federation, shards=shards)


def test_clients_of_the_run_are_their_own_nearest(turned: Federation) -> None:
    fitted = FLUX(**SMALL, k=2, newcomers_by="labels").fit(turned)
    assert fitted.join(turned).tolist() == fitted.labels_.tolist()


def test_newcomers_need_a_clustering_round_with_replies(turned: Federation) -> None:
    silent = FLUX(**SMALL, k=2).fit(turned, Settings(dropout=0.999))
    with pytest.raises(UpdateError, match="nothing to compare newcomers with"):
        silent.join(turned)


@pytest.mark.parametrize("unit", ["example", "client"])
@pytest.mark.parametrize("moments", [1, 2])
def test_little_noise_changes_no_cluster_and_much_does(
    unit: str, moments: int, turned: Federation
) -> None:
    params: dict[str, Any] = {**SMALL, "k": 2, "clip": 1.0, "dp_unit": unit, "moments": moments}
    # training hardly costs anything beside the descriptor
    little = FLUX(**params, noise=100.0, descriptor_noise=1e-5).fit(turned)
    assert little.agreement_["ari"] == 1
    much = FLUX(**params, noise=100.0, descriptor_noise=1e4).fit(turned)
    assert much.agreement_["ari"] < 1


def test_the_price_is_that_of_one_descriptor_and_of_training(turned: Federation) -> None:
    params: dict[str, Any] = {**SMALL, "k": 1, "epochs": 1, "batch_size": 20, "clip": 1.0}
    fitted = FLUX(**params, noise=1.2, descriptor_noise=3.0).fit(turned)
    rows = {(row.method, row.mechanism): row for row in fitted.ledger_.summary()}
    assert rows["describe", "gaussian"].noise_multiplier == pytest.approx(3.6)
    assert rows["describe", "gaussian"].count == 1
    costs = []
    for n in (len(shard.y) for shard in turned.shards):
        steps = 3 * math.ceil(n / 20)
        history = [(1.2, min(1, 20 / n), steps), (3.6, 1.0, 1)]
        costs.append(epsilon(history, 1e-5).epsilon)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(max(costs), rel=1e-6)


@pytest.mark.parametrize("by", ["features", "labels"])
def test_newcomers_pay_for_one_descriptor(by: str, turned: Federation) -> None:
    run, late = turned.select(range(6)), turned.select(range(6, 8))
    params: dict[str, Any] = {**SMALL, "k": 2, "clip": 1.0, "noise": 2.0}
    fitted = FLUX(**params, newcomers_by=by).fit(run)
    before = len(fitted.ledger_.events)
    fitted.join(late)
    added = fitted.ledger_.events[before:]
    name = {"features": "describe_features", "labels": "describe"}[by]
    assert {event.method for event in added if event.mechanism == "gaussian"} == {name}
    assert not fitted.ledger_.exact()


def test_a_mean_leaves_where_clients_are_protected_and_a_sum_where_samples_are() -> None:
    sums = np.full((1, 2, 5), 12.0)
    streams = NoiseStreams(lambda client: bytes(32), "test")
    for unit, expected in (("example", 12.0), ("client", 12.0 / 40)):
        context = outside_run(ClientNoise(unit, 0.0, 0.0, 1.0, streams))
        told = release_sums(context, sums, [40], 1e-9)
        np.testing.assert_allclose(told, np.full((1, 2, 5), expected), atol=1e-6)


@pytest.mark.parametrize(
    ("params", "reason"),
    [
        ({"k": 9}, "k = 9"),
        ({"k": 2, "radius_scale": 2.0}, "radius_scale is of DBSCAN"),
        ({"pre_rounds": 3}, "the clustering comes after pre_rounds"),
        ({"pre_rounds": 0.5}, "the clustering comes after pre_rounds"),
        ({"radius_scale": 0.0}, "radius_scale"),
        ({"components": 0}, "components"),
        ({"moments": 3}, "moments"),
        ({"newcomers_by": "names"}, "newcomers_by"),
        ({"descriptor_noise": 0.0}, "descriptor_noise"),
        ({"descriptor_clip": 0.0}, "descriptor_clip"),
        ({"noise": 1.0}, "noise without a clip"),
    ],
)
def test_mistakes_are_one_sentence(
    params: dict[str, Any], reason: str, swapped: Federation
) -> None:
    with pytest.raises(UsageError, match=reason) as caught:
        FLUX(**{**SMALL, **params}).fit(swapped)
    assert "\n" not in str(caught.value)


def test_samples_without_classes_are_refused() -> None:
    texts = {f"c{i}": (np.full((8, 5), i), np.full((8, 5), i)) for i in range(3)}
    federation = Federation.from_arrays(texts, objective=Language(), seed=0)
    with pytest.raises(UsageError, match="FLUX describes samples by class"):
        FLUX(rounds=4).fit(federation)
    steps = {f"c{i}": (np.full((8, 2, 2), i / 4), np.full((8, 2), 0.5)) for i in range(3)}
    walks = Federation.from_arrays(
        steps, objective=Trajectory(metres=(1000, 1000)), classes=2, seed=0
    )
    with pytest.raises(UsageError, match="FLUX describes samples by class"):
        FLUX(rounds=4).fit(walks)


def test_a_network_without_a_dense_layer_is_refused(swapped: Federation) -> None:
    network = torch.nn.Sequential(
        torch.nn.Conv2d(1, 10, 3), torch.nn.AdaptiveAvgPool2d(1), torch.nn.Flatten()
    )
    with pytest.raises(UsageError, match=r"no nn\.Linear"):
        FLUX(rounds=4, model=network).fit(swapped)
