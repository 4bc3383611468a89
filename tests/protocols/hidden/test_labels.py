"""Hidden assignment by label maps: clusters, the price of each way on, and what clients refuse."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, serve, two_clusters

from securecluster import Federation
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Empty, Shared
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import Hidden
from securecluster.protocols.hidden import label_search
from securecluster.runtime.call_context import CallContext

CENTRAL: dict[str, Any] = {"clip": 1.0, "placement": "central", "aggregation": "plain"}
SPREAD: dict[str, Any] = {"clip": 1.0, "placement": "distributed", "aggregation": "secagg"}
# what the server decides by, and the sums that follow those of the anchors
WAYS: dict[str, tuple[dict[str, float], list[str]]] = {
    "labels": ({"ALIKE": -math.inf, "LEAST_CLEAR": 0}, ["send_map"] * 2),
    "points, once": (
        {"ALIKE": -math.inf, "LEAST_CLEAR": math.inf},
        ["send_map", "send_point", "send_moments", "send_cell", "send_step"],
    ),
    "points, twice": (
        {"ALIKE": math.inf},
        ["send_point", "send_moments", "send_cell", "send_step"] * 2,
    ),
}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


def make(**params: Any) -> Any:
    """Hidden with two clusters by label maps, two rounds and plain sums."""
    small: dict[str, Any] = {"k": 2, "rounds": 2, "epochs": 1, "model": "linear", "mask": "none"}
    return Hidden(**{**small, "aggregation": "plain", "points": "labels", **params})


def test_clients_find_the_true_clusters_by_plain_and_by_secure_sums() -> None:
    federation = two_clusters(20, 60, seed=1)
    for aggregation in ("plain", "secagg"):
        fitted = make(rounds=1, aggregation=aggregation).fit(federation, DOUBLE)
        assert fitted.agreement_["ari"] == 1.0
        assert set(fitted.state_.labels) == {0}  # the server knows none
        sizes = sorted(Counter(fitted.labels_).values())
        assert sorted(fitted.state_.centres.sizes) == pytest.approx(sizes, abs=1e-6)
        verbs = {event.method: event.verb for event in fitted.ledger_.events}
        counted = "count_map" if aggregation == "secagg" else "send_map"
        assert {"send_means", "send_matched", counted} < set(verbs)
        assert set(verbs.values()) == {"sum"}
    assert label_search.labels_warning(fitted.state_.centres, 2, False) is None


def test_no_client_changes_a_sum_by_more_than_its_price_says() -> None:
    """Extremal clients: one class, one sample, huge values, and labels of every order."""
    usual = two_clusters(5, 30)
    draw = np.random.default_rng(0)
    shape = usual.shards[0].x.shape[1:]
    extremes = {
        "one sample": (np.ones((1, *shape)), [3]),
        "huge": (1e30 * draw.standard_normal((20, *shape)), [0, 1] * 10),
        "tiny": (1e-30 * draw.standard_normal((20, *shape)), list(range(10)) * 2),
        "constant": (np.zeros((20, *shape)), list(range(10)) * 2),
        "random": (draw.standard_normal((30, *shape)), list(range(10)) * 3),
    }
    for name, (x, y) in extremes.items():
        shard = dataclasses.replace(
            usual.shards[0], x=x.astype(np.float32), y=np.array(y, dtype=np.int64)
        )
        clients = dataclasses.replace(usual, shards=[shard, *usual.shards[1:]])
        client = serve(make(rounds=1), clients).endpoint.client
        everyone = CallContext(tuple(range(5)), tuple(range(5)), 1, 99)
        others = CallContext(tuple(range(1, 5)), tuple(range(1, 5)), 1, 99)
        anchors = draw.standard_normal(client.send_means(everyone, Empty()).anchors.values[0].shape)
        for method, query in (("send_means", Empty()), ("send_map", anchors)):
            if not isinstance(query, Empty):
                query = _anchors(query)
            (rows,) = vars(getattr(client, method)(everyone, query)).values()
            (rest,) = vars(getattr(client, method)(others, query)).values()
            change = rows.values.double().sum(0) - rest.values.double().sum(0)
            assert float(change.norm()) <= 1 + 1e-9, name
            assert float(change.norm()) > 0.999 or name in ("one sample", "constant")


def _anchors(values: np.ndarray) -> Any:
    from securecluster.protocols.hidden.label_client import PublicAnchors

    return PublicAnchors(Shared(torch.as_tensor(values)))


@pytest.mark.parametrize("way", WAYS)
def test_every_way_on_costs_the_share_of_clustering(
    way: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    decisions, methods = WAYS[way]
    for name, value in decisions.items():
        monkeypatch.setattr(label_search, name, value)
    z, share = 3.0, 0.3
    fitted = make(**CENTRAL, noise=z, cluster_share=share, points="auto").fit(federation, FULL)
    events = [e for e in fitted.ledger_.events if e.method != "contribute_block"]
    sums = Counter(event.method for event in events)
    assert sums == Counter(["send_means", "send_matched", "send_matched", *methods])
    total = sum(event.noise_multiplier**-2 for event in fitted.ledger_.events)
    assert sum(event.noise_multiplier**-2 for event in events) == pytest.approx(share * total)
    exact = gaussian_epsilon(math.sqrt(total), 1e-5)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(exact, rel=1e-6)
    assert ("label_mass" in fitted.result_.method.report_fields(fitted.state_)) == (way == "labels")


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("way", WAYS)
def test_the_target_is_kept_whatever_was_released(
    way: str, federation: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in WAYS[way][0].items():
        monkeypatch.setattr(label_search, name, value)
    fitted = make(**SPREAD, target_epsilon=4.0, points="auto", rounds=1).fit(federation)
    assert 3.8 < fitted.ledger_.price(1e-5).epsilon <= 4.0
    assert fitted.ledger_.exact() == []


def test_the_noise_of_each_sum_is_that_of_its_price(federation: Federation) -> None:
    fitted = make(**CENTRAL, noise=50.0, rounds=1).fit(federation, FULL)
    priced = {e.method: e.noise_multiplier for e in fitted.ledger_.events}
    for outcome in fitted.verb_outcomes():
        if outcome.method in ("send_means", "send_map"):
            (rows,) = vars(outcome.content).values()
            noise = rows.table[0].double()
            assert noise.numel() >= 128
            assert float(noise.std()) == pytest.approx(priced[outcome.method], rel=0.2)


def test_a_client_assigns_itself_once_and_by_one_way(federation: Federation) -> None:
    served = serve(make(), federation)
    client, centres = served.endpoint.client, served.state.centres
    context = CallContext(tuple(range(6)), tuple(range(6)), 1, 99)
    from securecluster.protocols.hidden.label_client import PublicMaps

    same = PublicMaps(Shared(centres.anchors), Shared(torch.tensor(centres.places)))
    client.assign_by_map(context, same)
    turned = dataclasses.replace(same, anchors=Shared(-same.anchors.value))
    with pytest.raises(PolicyError, match="assigned itself before"):
        client.assign_by_map(context, turned)
    by_points = serve(make(points="means"), federation)
    with pytest.raises(PolicyError, match="assigned itself before"):
        client.assign(context, by_points.state.centres.message())
    with pytest.raises(PolicyError, match="finds them by points"):
        by_points.endpoint.client.send_means(context, Empty())


def test_residuals_of_labels_are_refused(federation: Federation) -> None:
    with pytest.raises(UsageError, match="residuals are of points"):
        make(residuals=True).fit(federation)


def test_a_run_says_where_label_maps_tell_nothing(federation: Federation) -> None:
    drowned = make(**CENTRAL, noise=50.0, rounds=1).fit(federation)
    text = drowned.state_.doubt(drowned.result_.method)
    assert text is not None and "than noise alone shows" in text and "--points means" in text
    for clear, mass, alike, expected in (
        (2, 0.3, 1.0, "only 30% of the clients"),
        (2, 1.0, 0.3, "class means have 0.30 in common"),
        (1, 1.0, 0.3, "than noise alone shows"),
        (2, 0.7, 0.6, "None"),
    ):
        found = label_search.FoundMaps(np.zeros((2, 2)), [1, 2], [3.0] * 2, clear, mass, alike)
        assert expected in str(label_search.labels_warning(found, 2, True))
