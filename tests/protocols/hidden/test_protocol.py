"""Hidden assignment: what the server reads, what it costs, and which models follow."""

from __future__ import annotations

import dataclasses
import math
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, serve, serve_nodes, two_clusters

from benchmarks.private.hidden import assigned, of_residuals
from securecluster import Federation
from securecluster.cli.main import main
from securecluster.clustering.noisy_centres import SHARES, SHARES_WITH_PARTS, unit
from securecluster.core.randomness import Randomness
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Empty, Picks, Rows, Shared
from securecluster.parties.deployment import Deployment
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import Hidden
from securecluster.protocols.hidden.client import BlockAverages, HiddenClient
from securecluster.runtime.call_context import CallContext

CENTRAL: dict[str, Any] = {"clip": 1.0, "placement": "central", "aggregation": "plain"}
SPREAD: dict[str, Any] = {"clip": 1.0, "placement": "distributed", "aggregation": "secagg"}
SUMS = ("send_point", "send_moments", "send_cell", "send_step")
WITH_PARTS = ("send_parts", "send_residual", *SUMS[1:])


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


@pytest.fixture(scope="module")
def dozen() -> Federation:
    """As many clients as fill the blocks of secure sums."""
    return two_clusters(12, 30)


def make(**params: Any) -> Any:
    """Hidden with two clusters, two rounds and plain sums."""
    small: dict[str, Any] = {
        "k": 2, "rounds": 2, "epochs": 1, "model": "linear", "mask": "none", "points": "means",
    }  # fmt: skip
    return Hidden(**{**small, "aggregation": "plain", **params})


# --- the clusters ---


def test_clients_take_the_clusters_that_the_same_sums_give_in_one_place() -> None:
    federation = two_clusters(20, 60, seed=1)
    served = serve(make(rounds=1), federation)
    client = served.endpoint.client
    context = CallContext(tuple(range(20)), tuple(range(20)), 1, 1)
    points = client._unit_points(context)
    np.testing.assert_allclose(points, unit(points), atol=1e-12)
    expected = assigned(points, 2, 0.0, Randomness(0).generator())
    match = np.array(client.labels) == np.array(expected)
    assert match.all() or not match.any()
    assert len(set(client.labels)) == 2
    truth = np.array(federation.truth)
    right = (np.array(client.labels) == truth).mean()
    assert max(right, 1 - right) == 1.0


def test_residuals_give_the_clusters_that_the_same_sums_give_in_one_place() -> None:
    served = serve(make(rounds=1, residuals=True), two_clusters(20, 60, seed=1))
    client = served.endpoint.client
    context = CallContext(tuple(range(20)), tuple(range(20)), 1, 1)
    rows = client._part_rows(context)
    np.testing.assert_allclose(np.linalg.norm(rows.reshape(20, -1), axis=1), 1.0)
    labels, _ = of_residuals(rows, 2, 0.0, Randomness(0).generator())
    match = np.array(client.labels) == np.array(labels)
    assert match.all() or not match.any()
    assert served.state.centres.parts.shape == (10, 10)
    methods = [entry.method for entry in served.transcript.entries if entry.method in WITH_PARTS]
    assert methods == list(WITH_PARTS)


def test_secure_sums_of_residuals_give_the_clusters_of_plain_ones(dozen: Federation) -> None:
    plain = make(residuals=True).fit(dozen, DOUBLE)
    secure = make(residuals=True, aggregation="secagg").fit(dozen, DOUBLE)
    assert list(plain.labels_) == list(secure.labels_)
    torch.testing.assert_close(
        plain.state_.centres.parts, secure.state_.centres.parts, rtol=0, atol=1e-6
    )


def test_the_server_knows_no_label(federation: Federation) -> None:
    fitted = make().fit(federation, FULL)
    assert set(fitted.labels_) == {0, 1}
    assert list(fitted.state_.labels) == [0] * 6
    replies = {event.method: event.verb for event in fitted.ledger_.events}
    assert replies == dict.fromkeys((*SUMS, "contribute_block"), "sum")


def test_secure_sums_give_the_models_of_plain_ones(dozen: Federation) -> None:
    # batches follow from the number of the call, and secure sums have more calls
    plain = make(batch_size=30).fit(dozen, DOUBLE)
    secure = make(batch_size=30, aggregation="secagg").fit(dozen, DOUBLE)
    assert list(plain.labels_) == list(secure.labels_)
    torch.testing.assert_close(
        plain.client_models_.values, secure.client_models_.values, rtol=0, atol=1e-6
    )
    assert secure.transcript_.entries != plain.transcript_.entries


def test_a_cluster_of_one_is_dissolved_where_no_noise_covers_it(federation: Federation) -> None:
    found = Counter(make(minimum_size=2).fit(federation).labels_)
    smallest = min(found.values())
    assert smallest >= 2
    alone = make(minimum_size=smallest + 1).fit(federation)
    assert set(alone.labels_) == {0} and len(alone.state_.centres.sizes) == 1


# --- training ---


def test_each_update_is_in_the_block_of_its_cluster_and_each_client_applies_its_own(
    federation: Federation,
) -> None:
    served = serve(make(rounds=1), federation)
    client = served.endpoint.client
    (place,) = [
        k for k, e in enumerate(served.transcript.entries) if e.method == "contribute_block"
    ]
    _, response = served.transcript.content(place)
    blocks = response.reply.blocks.values
    weight = response.reply.weight.values
    start = client.cohort.start
    for i, label in enumerate(client.labels):
        assert blocks[i, label].any() and not blocks[i, 1 - label].any()
        assert weight[i].tolist() == [client.cohort.sizes[i] * (c == label) for c in (0, 1)]
        mean = blocks[:, label].sum(0) / weight[:, label].sum()
        torch.testing.assert_close(client.models.row(i), start + mean, rtol=0, atol=1e-12)


@pytest.mark.parametrize("form", [(0,), (0, 0, 0), (0, 3)])
def test_no_averages_are_nothing_to_apply_whatever_their_form(
    form: tuple[int, ...], federation: Federation
) -> None:
    client = serve(make(rounds=1), federation).endpoint.client
    before = client.models.values.clone()
    nothing = BlockAverages(
        means=Picks(torch.zeros(form), ((),) * 6),
        steps=Picks(torch.zeros(0, dtype=torch.int64), ((),) * 6),
        absolute=False,
        count=Rows(torch.ones(6, dtype=torch.int64)),
    )
    context = CallContext(tuple(range(6)), tuple(range(6)), 2, 9)
    client.receive_blocks(context, nothing)
    assert torch.equal(client.models.values, before)


def test_clipped_sums_are_divided_by_what_clustering_found(federation: Federation) -> None:
    served = serve(make(rounds=1, clip=1e6), federation)
    client = served.endpoint.client
    plain = serve(make(rounds=1), federation).endpoint.client
    assert client.labels == plain.labels
    # all clients have as many samples, so weights change nothing
    assert len(set(client.cohort.sizes)) == 1
    for label in (0, 1):
        i = client.labels.index(label)
        members = client.labels.count(label)
        found = client.models.row(i) - client.cohort.start
        exact = plain.models.row(i) - client.cohort.start
        ratio = served.state.centres.sizes[label] / members
        torch.testing.assert_close(found * ratio, exact, rtol=1e-5, atol=1e-9)


# --- the price ---


@pytest.mark.parametrize("residuals", [False, True])
@pytest.mark.parametrize("share", [0.2, 0.6])
def test_clustering_costs_its_share_and_all_is_in_the_ledger(
    share: float, residuals: bool, federation: Federation
) -> None:
    z = 3.0
    made = make(**CENTRAL, noise=z, cluster_share=share, residuals=residuals)
    fitted = made.fit(federation)
    budget = {"clustering": 0.0, "training": 0.0}
    for event in fitted.ledger_.events:
        kind = "training" if event.method == "contribute_block" else "clustering"
        budget[kind] += event.noise_multiplier**-2
        assert event.mechanism == "gaussian" and len(event.ids) == 6
    assert budget["training"] == pytest.approx(2 / z**2)
    total = sum(budget.values())
    assert budget["clustering"] == pytest.approx(share * total)
    by_field = {e.method: e.noise_multiplier**-2 for e in fitted.ledger_.events}
    assert sum(SHARES) == pytest.approx(1) and sum(SHARES_WITH_PARTS) == pytest.approx(1)
    methods, shares = (WITH_PARTS, SHARES_WITH_PARTS) if residuals else (SUMS, SHARES)
    for name, part in zip(methods, shares, strict=True):
        assert by_field[name] == pytest.approx(part * share * total)
    exact = gaussian_epsilon(math.sqrt(total), 1e-5)
    assert fitted.ledger_.price(1e-5).epsilon == pytest.approx(exact, rel=1e-6)


@pytest.mark.parametrize("way", [CENTRAL, SPREAD])
def test_the_target_is_what_the_whole_run_costs(way: Any, federation: Federation) -> None:
    fitted = make(**way, target_epsilon=4.0).fit(federation)
    assert 3.9 < fitted.ledger_.price(1e-5).epsilon <= 4.0
    assert fitted.ledger_.exact() == []


@pytest.mark.parametrize("way", [CENTRAL, SPREAD])
def test_the_noise_of_each_sum_is_that_of_its_price(way: Any, federation: Federation) -> None:
    made = make(**way, noise=50.0, rounds=1, signature_size=40, residuals=True)
    fitted = made.fit(federation, FULL)
    priced = {e.method: e.noise_multiplier for e in fitted.ledger_.events}
    outcomes = {o.method: o.content for o in fitted.verb_outcomes()}
    # Each sum has a norm of at most 6, and 820 or 410 numbers of noise. Shares are planned for 4
    # survivors of 6, and all 6 survive.
    spare = math.sqrt(6 / 4) if way is SPREAD else 1.0
    moments = outcomes["send_moments"].moments.table[0].double()
    assert float(moments.std()) == pytest.approx(priced["send_moments"] * spare, rel=0.1)
    parts = outcomes["send_parts"].parts.table[0].double()
    assert parts.shape == (10, 41)
    assert float(parts.std()) == pytest.approx(priced["send_parts"] * spare, rel=0.1)


def test_shares_of_noise_are_of_rows_of_norm_one(federation: Federation) -> None:
    made = make(**SPREAD, noise=3.0)
    config = made.config(federation, "float64")
    mechanisms = Deployment(made, config).row_noise_in_shares()
    for name, part in zip(("point", "moments", "cells", "steps"), SHARES, strict=True):
        mechanism = mechanisms[name]
        assert mechanism.norm == 1.0
        assert mechanism.multiplier**-2 == pytest.approx(part * 0.25 * 2 / 3.0**2)
    fitted = made.fit(federation, DOUBLE)
    for event in fitted.ledger_.events:
        assert event.mechanism == "skellam"
    assert math.isfinite(fitted.ledger_.price(1e-5).epsilon)


# --- clients do not trust the server ---


@pytest.fixture(scope="module")
def asked(federation: Federation) -> tuple[HiddenClient, Any, CallContext]:
    served = serve(make(), federation)
    context = CallContext(tuple(range(6)), tuple(range(6)), 1, 99)
    return served.endpoint.client, served.state.centres.message(), context


def test_a_client_assigns_itself_once(asked: Any) -> None:
    client, centres, context = asked
    client.assign(context, centres)  # the same again
    other = dataclasses.replace(centres, centres=Shared(centres.centres.value.flip(0)))
    with pytest.raises(PolicyError, match="assigned itself before"):
        client.assign(context, other)


def test_no_refusal_of_other_centres_tells_a_cluster(asked: Any) -> None:
    # everyone is nearest to the first of these centres, or everyone to the second: a client that
    # took the centres of its own cluster would tell by that which it is
    client, centres, context = asked
    near, far = torch.zeros(1, 1), torch.full((1, 1), 100.0)
    for order in ((near, far), (far, near)):
        everyone = dataclasses.replace(centres, centres=Shared(torch.cat(order).double()))
        for k, label in enumerate(list(client.labels)):
            alone = CallContext((k,), (k,), context.round, context.step)
            with pytest.raises(PolicyError, match="assigned itself before"):
                client.assign(alone, everyone)
            assert client.labels[k] == label


def test_a_restarted_client_remembers_its_centres(asked: Any) -> None:
    client, centres, context = asked
    memory = {name: value.clone() for name, value in client.memory().items()}
    client.recall(memory)
    other = dataclasses.replace(centres, mean=Shared(centres.mean.value + 1e-9))
    with pytest.raises(PolicyError, match="assigned itself before"):
        client.assign(context, other)
    client.assign(context, centres)


def test_a_client_with_residuals_refuses_other_mean_parts(federation: Federation) -> None:
    served = serve(make(residuals=True), federation)
    centres = served.state.centres.message()
    context = CallContext(tuple(range(6)), tuple(range(6)), 1, 99)
    assert centres.parts is not None
    other = dataclasses.replace(centres, parts=Shared(centres.parts.value + 1e-9))
    with pytest.raises(PolicyError, match="assigned itself before"):
        served.endpoint.client.assign(context, other)


def test_a_client_without_residuals_sends_no_parts(asked: Any) -> None:
    client, _, context = asked
    with pytest.raises(PolicyError, match="with residuals only"):
        client.send_parts(context, Empty())


def test_a_client_refuses_more_centres_than_clusters(asked: Any) -> None:
    client, centres, context = asked
    many = dataclasses.replace(centres, centres=Shared(torch.zeros(3, 1)))
    with pytest.raises(PolicyError, match="are not those of 2 clusters"):
        client.assign(context, many)


def test_a_client_without_a_cluster_sends_no_update(federation: Federation) -> None:
    made = make()
    served = serve(made, federation)
    place = [e.method for e in served.transcript.entries].index("contribute_block")
    call, _ = served.transcript.content(place)
    fresh = build_client(made, federation, DOUBLE)
    with pytest.raises(PolicyError, match="assign comes first"):
        fresh.answer(call)


# --- whole runs ---


@pytest.mark.always
def test_a_run_folder_is_replayed_up_to_the_labels_that_the_server_never_learns(
    federation: Federation, tmp_path: Path
) -> None:
    make(aggregation="secagg").fit(federation, FULL, folder=tmp_path)
    assert main(["replay", str(tmp_path)]) == 0


@pytest.mark.parametrize("residuals", [False, True])
def test_nodes_assign_themselves_as_clients_in_one_batch_do(
    residuals: bool, federation: Federation
) -> None:
    made = make(mask="permutation", residuals=residuals)
    state, nodes = serve_nodes(made, federation)
    apart = torch.cat([made.observer.final_models(node.client, state).values for node in nodes])
    together = made.fit(federation, DOUBLE)
    torch.testing.assert_close(apart, together.client_models_.values, rtol=0, atol=1e-9)
    assert [node.client.labels[0] for node in nodes] == list(together.labels_)


def test_the_network_is_small_by_default_where_updates_have_noise(federation: Federation) -> None:
    """The report and the configuration name it, and any other can be asked for."""
    names = {}
    for noise in (0.0, 1.0):
        for model in ("auto", "mlp-32"):
            made = make(model=model, clip=1.0, noise=noise)
            names[model, noise] = made.config(federation, "float32")["model"]
    assert names == {
        ("auto", 0.0): "mlp",
        ("auto", 1.0): "linear",
        ("mlp-32", 0.0): "mlp-32",
        ("mlp-32", 1.0): "mlp-32",
    }
    fitted = make(model="auto", **CENTRAL, noise=0.5).fit(federation)
    assert fitted.client_models_.values.shape[1] == 64 * 10 + 10
    inputs = federation.shards[0].x[:5]
    predicted = fitted.predict_samples(0, inputs)
    assert len(predicted) == len(inputs)


def test_the_code_book_follows_from_the_noise(federation: Federation) -> None:
    """Noise that leaves 24 cells few clients each leaves 12 of them twice as many."""
    for noise, cells in ((0.0, 12), (0.001, 12), (50.0, 6)):
        made = make(k=3, clip=1.0, noise=noise, placement="central")
        config = made.config(federation, "float32")
        assert made.frame_sizes(config)["cells"] == cells


def test_newcomers_assign_themselves_and_release_nothing(federation: Federation) -> None:
    fitted = make(**CENTRAL, noise=0.5).fit(federation)
    labels = fitted.join(federation)  # the same data, so the same clusters
    assert list(labels) == list(fitted.labels_)
    assert fitted.joined_.ledger.events == []


REFUSED = {
    "examples": ({"clip": 1.0, "noise": 1.0, "dp_unit": "example"}, "dp_unit client"),
    "trust": ({**CENTRAL, "noise": 1.0, "aggregation": "secagg"}, "aggregation plain"),
    "one cluster": ({"k": 1}, "k = 1"),
    "a small point": ({"k": 4, "signature_size": 2}, "signature_size"),
    # of 10 classes with 7 · 7 frequencies each
    "a long point": ({"signature_size": 491}, "more than the 490 numbers"),
    "all for clusters": ({"cluster_share": 1.0}, "cluster_share"),
}


@pytest.mark.parametrize("case", list(REFUSED))
def test_what_cannot_work_is_refused(case: str, federation: Federation) -> None:
    params, words = REFUSED[case]
    with pytest.raises(UsageError, match=words):
        make(**params).fit(federation)
