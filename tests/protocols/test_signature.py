"""Clusters by signatures of gradients: releases and their cost, what clients refuse, newcomers."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from cases import DOUBLE, FULL, serve, two_clusters

from securecluster import CFL, Dirichlet, Federation, Iid, LabelSwap, Pathological, Tasks
from securecluster.clustering.labels import relabel
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import Scenario
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Empty, Shared
from securecluster.models.objectives import Language
from securecluster.parties.endpoints import build_client
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.privacy.gradient_signatures import GradientSketch, signature_mean
from securecluster.protocols import Settings, Signature
from securecluster.protocols.common.comparison.gradient_signatures import (
    ClassMeans,
    ResidualDirections,
    SignatureClient,
    SignatureDirections,
    SignatureRequest,
)
from securecluster.protocols.common.comparison.packed_signatures import (
    BlockSignatures,
    ResidualSignatures,
    SketchSignatures,
)
from securecluster.protocols.common.comparison.signature_plan import (
    AXES,
    RESIDUAL_AXES,
    example_map,
    plan_of,
)

PLAIN: dict[str, Any] = {"signature_blocks": "plain"}
BLOCKS: dict[str, Any] = {"signature_blocks": "blocks"}
RESIDUALS: dict[str, Any] = {"signature_blocks": "residuals"}
Z = 0.02  # so little noise that the clusters of few samples are clear


@pytest.fixture(scope="module")
def clients() -> Federation:
    return two_clusters(8, 60)


def made(**params: Any) -> Signature:
    """Return a small protocol with two clusters."""
    return Signature(**{"k": 2, "rounds": 1, "epochs": 1, "model": "linear", **params})


@pytest.mark.parametrize(
    "params",
    [
        PLAIN,
        BLOCKS,
        {**PLAIN, "signature_noise": Z},
        {**PLAIN, "signature_noise": Z, "signature_releases": 1},
        {**BLOCKS, "signature_noise": Z},
        {**RESIDUALS, "signature_noise": Z},
        {**PLAIN, "signature_noise": Z, "dp_unit": "client"},
        RESIDUALS,
        {},
        {"signature_noise": Z},
    ],
)
def test_every_kind_of_signature_finds_swapped_labels(params: dict[str, Any]) -> None:
    federation = two_clusters(6, 200)
    assert made(**params).fit(federation).agreement_["exact"]


@pytest.mark.parametrize("unit", [0.1, 3.0])
def test_units_of_the_data_change_no_number_of_clusters_without_noise(unit: float) -> None:
    shown = two_clusters(16, 80)
    arrays = {
        name: (shard.x * unit, shard.y)
        for name, shard in zip("abcdefghijklmnop", shown.shards, strict=True)
    }
    truth = dict(zip(arrays, shown.truth, strict=True))
    scaled = Federation.from_arrays(arrays, classes=shown.classes, truth=truth, seed=0)
    fitted = made(k=None, signature_centre=0.31 * unit).fit(scaled)
    assert fitted.agreement_["exact"]


def test_without_noise_the_server_gets_the_mean_sketch_of_each_client(clients: Federation) -> None:
    served = serve(made(**PLAIN, mask="none"), clients)
    sketch = GradientSketch(64, 64, clients.classes, 0.31, Randomness(clients.seed))
    rows = SketchSignatures.unpacked(served.state.signatures.rows).first
    for row, shard in zip(rows, clients.shards, strict=True):
        x, y = torch.from_numpy(shard.x), torch.from_numpy(shard.y)
        np.testing.assert_allclose(row, signature_mean(sketch, x, y, 1.0).numpy(), atol=1e-6)


@pytest.mark.parametrize("kind", ["plain", "blocks", "residuals"])
def test_noisy_signatures_of_images_are_of_their_lowest_frequencies(kind: str) -> None:
    def smooth(side: int, **params: Any) -> Any:
        draw = np.random.default_rng(0)
        data = {
            name: (draw.random((8, 3, side, side)).astype(np.float32), np.arange(8) % 2)
            for name in "ab"
        }
        federation = Federation.from_arrays(data, classes=2, seed=0)
        config = made(signature_blocks=kind, **params).config(federation, "float32")
        return example_map(config, kind, 0.0).smooth

    assert smooth(16, signature_noise=1.0).shape == (3, 16, 16)
    assert smooth(16) is None and smooth(13, signature_noise=1.0) is None


@pytest.mark.parametrize("kind", [PLAIN, BLOCKS])
def test_the_noise_of_examples_has_the_size_that_the_server_takes(
    kind: dict[str, Any], clients: Federation
) -> None:
    """The difference from exact signatures, over the stated deviation, is standard normal."""
    exact = serve(made(**kind, mask="none"), clients).state.signatures.rows
    noisy = serve(made(**kind, mask="none", signature_noise=9.0), clients).state.signatures.rows
    deviations: Any
    if kind is PLAIN:
        one, other = SketchSignatures.unpacked(exact), SketchSignatures.unpacked(noisy)
        standard = (other.first - one.first) / other.deviations[:, None]
        deviations = other.deviations
        expected = 9.0 * math.sqrt(2)  # half of the budget
    else:
        before, after = BlockSignatures.unpacked(exact), BlockSignatures.unpacked(noisy)
        standard = (after.blocks - before.blocks) / after.deviations[:, None, None]
        deviations = after.deviations
        expected = 9.0
    sizes = np.array([len(shard.y) for shard in clients.shards])
    np.testing.assert_allclose(deviations, expected / sizes)
    assert 0.85 < standard.std() < 1.15


@pytest.mark.parametrize("kind", [PLAIN, BLOCKS])
@pytest.mark.parametrize("unit", ["example", "client"])
def test_clients_tell_their_number_of_samples_where_the_server_reads_it_anyway(
    unit: str, kind: dict[str, Any], clients: Federation
) -> None:
    clipped = {"dp_unit": "client", "clip": 1.0}  # these updates are not weighted
    for hides in ({}, {"signature_noise": 1.0}, {"aggregation": "secagg"}, clipped):
        served = serve(made(**{**kind, "dp_unit": unit, **hides}), clients)
        replies = [
            served.transcript.content(k)[1].reply
            for k, entry in enumerate(served.transcript.entries)
            if entry.method in ("send_signature", "send_class_sums")
        ]
        assert len(replies) == 1
        told = replies[0].size
        if hides:
            assert told is None
        else:
            assert told.values.tolist() == [len(shard.y) for shard in clients.shards]


@pytest.mark.parametrize("kind", [PLAIN, BLOCKS])
def test_clients_of_one_distribution_with_few_and_many_samples_are_one_cluster(
    kind: dict[str, Any],
) -> None:
    dealt = Federation.simulate("digits", scenario=Iid(), clients=8, samples=160, seed=0)
    shards = []
    for i, shard in enumerate(dealt.shards):
        n = (15, 40, 160)[i % 3]
        shards.append(replace(shard, x=shard.x[:n], y=shard.y[:n]))
    mixed = replace(dealt, shards=tuple(shards), recipe=None)
    assert len(set(made(k=None, **kind).fit(mixed).labels_)) == 1


def test_the_noise_of_whole_clients_is_that_of_a_row_of_norm_one(clients: Federation) -> None:
    own = {**PLAIN, "mask": "none", "dp_unit": "client"}
    exact = serve(made(**own), clients).state.signatures.rows
    noisy = serve(made(**own, signature_noise=9.0), clients).state.signatures.rows
    one, other = SketchSignatures.unpacked(exact), SketchSignatures.unpacked(noisy)
    np.testing.assert_allclose(np.linalg.norm(one.first, axis=1), 1.0, rtol=1e-6)
    np.testing.assert_allclose(other.deviations, 9.0)
    assert 0.85 < ((other.first - one.first) / 9.0).std() < 1.15


def test_the_second_release_has_a_fifth_of_the_noise_of_the_first(clients: Federation) -> None:
    rows = serve(made(**PLAIN, signature_noise=500.0), clients).state.signatures.rows
    noisy = SketchSignatures.unpacked(rows)
    assert noisy.second.shape[1] >= AXES
    standard = noisy.second / (0.2 * noisy.deviations[:, None])
    assert 0.7 < standard.std() < 1.3


@pytest.mark.parametrize("releases", [1, 2])
@pytest.mark.parametrize("kind", [PLAIN, BLOCKS])
def test_all_releases_together_cost_what_one_does(
    kind: dict[str, Any], releases: int, clients: Federation
) -> None:
    priced = priced_events(made(**kind, signature_noise=2.0, signature_releases=releases), clients)
    assert len(priced) == (releases if kind is PLAIN else 1)
    assert sum(z**-2 for z in priced) == pytest.approx(2.0**-2)


@pytest.mark.parametrize("centre", [None, 0.3])
@pytest.mark.parametrize("kind", [RESIDUALS, {}, PLAIN, BLOCKS])
def test_choosing_a_kind_and_a_centre_is_within_the_price(
    kind: dict[str, Any], centre: float | None, clients: Federation
) -> None:
    own = nameless(clients)  # of which nobody declared a centre
    priced = priced_events(made(**kind, signature_noise=2.0, signature_centre=centre), own)
    assert sum(z**-2 for z in priced) == pytest.approx(2.0**-2)
    assert len(priced) == {"plain": 2, "blocks": 1}.get(kind.get("signature_blocks", ""), 3) + (
        centre is None
    )


def priced_events(protocol: Signature, federation: Federation) -> list[float]:
    """Return the noise multipliers of what clients send before training."""
    events = protocol.fit(federation).ledger_.events
    sent = [event for event in events if event.method.startswith("send")]
    return [event.noise_multiplier for event in sent if event.noise_multiplier]


def nameless(federation: Federation) -> Federation:
    """Return the clients of a federation as a user's own data."""
    clients = {f"c{i}": (shard.x, shard.y) for i, shard in enumerate(federation.shards)}
    test = {f"c{i}": (shard.x_test, shard.y_test) for i, shard in enumerate(federation.shards)}
    return Federation.from_arrays(clients, test=test, seed=federation.seed, classes=10)


def test_the_centre_is_that_of_the_data_set_or_the_mean_that_clients_tell(
    clients: Federation,
) -> None:
    assert made().config(clients, "float32")["signature_centre"] == 0.31
    assert made(signature_centre=0.5).config(clients, "float32")["signature_centre"] == 0.5
    own = nameless(clients)
    assert made().config(own, "float32")["signature_centre"] is None
    exact = serve(made(**PLAIN), own).state.signatures.asked.centre
    means = [float(shard.x.mean()) for shard in own.shards]
    assert exact == pytest.approx(np.mean(means), rel=1e-6)
    noisy = serve(made(**PLAIN, signature_noise=20.0), own).state.signatures.asked.centre
    # 20/√0.02 over 60 samples and √8 clients
    assert 0 < abs(noisy - exact) < 4 * 20 / math.sqrt(0.02) / 60 / math.sqrt(8)


@pytest.mark.parametrize(
    ("noise", "shares", "kind"),
    [
        (0.0, "equal", "residuals"), (0.5, "equal", "residuals"), (0.0, "own", "blocks"),
        (0.5, "own", "residuals"), (0.0, "clusters", "plain"), (0.5, "clusters", "plain"),
    ],
)  # fmt: skip
def test_shares_of_classes_choose_the_kind(noise: float, shares: str, kind: str) -> None:
    """Clients have all ten classes, five of their own choice, or one half of them or the other."""
    federation = two_clusters(16, 60)
    first = {"equal": [0] * 16, "own": range(16), "clusters": [0, 5] * 8}[shares]
    shards = []
    for i, shard in zip(first, federation.shards, strict=True):
        kept = (shard.y - i) % 10 < (10 if shares == "equal" else 5)
        shards.append(replace(shard, x=shard.x[kept], y=shard.y[kept]))
    fitted = made(signature_noise=noise).fit(replace(federation, shards=tuple(shards), recipe=None))
    assert "send_class_sums" in fitted.bytes_["by_message"]
    assert fitted.result_.method.report_fields(fitted.state_)["signature_kind"] == kind


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "scenario",
    [
        Tasks(),
        Pathological(clusters=3, overlap=True),
        Dirichlet(clusters=3, overlap=True),
        LabelSwap(3),
    ],
    ids=lambda one: one.name,
)
def test_less_noise_loses_no_clusters(scenario: Scenario) -> None:
    """All scenarios, by ε and with intervals: `benchmarks.private.monotone`."""
    federation = Federation.simulate("digits", scenario=scenario, clients=12, samples=80, seed=0)
    found = []
    for noise in (2.0, 0.5, 0.1, 0.02):
        fitted = made(k=None, signature_noise=noise).fit(federation)
        found.append((fitted.agreement_ or {})["ari"])
    assert found == sorted(found) and found[-1] == 1


def test_clusters_of_shares_that_a_run_mixes_are_said() -> None:
    federation = Federation.simulate("digits", scenario=Tasks(), clients=8, samples=60, seed=0)
    fitted = made(**RESIDUALS, signature_noise=0.1).fit(federation)
    truth = list(federation.truth or ())
    collected = fitted.state_.signatures
    assert collected.by_shares == relabel(truth)
    assert collected.doubt(truth) is None and collected.doubt(list(range(8))) is None
    assert "form 2 clusters, and the 1 of this run mix them" in str(collected.doubt([0] * 8))


def test_without_noise_few_clients_are_compared_by_blocks(clients: Federation) -> None:
    fitted = made().fit(clients)
    assert fitted.result_.method.report_fields(fitted.state_)["signature_kind"] == "blocks"


def test_noise_in_which_no_shares_are_seen_leaves_sketches(clients: Federation) -> None:
    fitted = made(signature_noise=50.0).fit(clients)
    assert "send_signature" in fitted.bytes_["by_message"]
    assert fitted.result_.method.report_fields(fitted.state_)["signature_kind"] == "plain"


def test_whole_clients_with_noise_send_sketches_alone(clients: Federation) -> None:
    config = made(signature_noise=0.1, dp_unit="client").config(clients, "float32")
    assert config["signature_kind"] == "plain"


def test_residuals_are_refused_for_whole_clients_with_noise(clients: Federation) -> None:
    with pytest.raises(UsageError, match="privacy of single examples"):
        made(**RESIDUALS, signature_noise=1.0, dp_unit="client").fit(clients)


def test_the_noise_of_residuals_has_the_size_that_the_server_takes(clients: Federation) -> None:
    served = serve(made(**RESIDUALS, mask="none", signature_noise=500.0), clients)
    noisy = ResidualSignatures.unpacked(served.state.signatures.rows)
    # a seventh client's direction is the last one of eight rows
    assert noisy.second.shape == (8, 7)
    np.testing.assert_allclose(noisy.deviations, 500 * math.sqrt(2 / 0.85) / 60)
    standard = noisy.second / (0.2 * noisy.deviations[:, None])
    assert 0.7 < standard.std() < 1.3


def test_there_are_directions_for_as_many_clusters_as_are_told(clients: Federation) -> None:
    wide = made(k=8).config(clients, "float32")
    assert plan_of(wide).axes == RESIDUAL_AXES
    assert plan_of({**wide, "k": 31}).axes == 30


@pytest.mark.exhaustive
def test_with_noise_on_training_too_epsilon_is_finite_and_more_than_the_signatures(
    clients: Federation,
) -> None:
    params = {**PLAIN, "signature_noise": 2.0, "clip": 1.0, "noise": 2.0}
    fitted = made(**params).fit(clients)
    assert gaussian_epsilon(0.5, 1e-5) < fitted.ledger_.epsilon < math.inf


def test_directions_are_answered_once(clients: Federation) -> None:
    served = serve(made(**PLAIN, signature_noise=1.0), clients)
    net = served.net
    step = served.state.signatures.step
    crafted = torch.eye(RESIDUAL_AXES, 64, dtype=torch.float64)
    query = SignatureDirections(Shared(crafted), step)
    with pytest.raises(PolicyError, match="have answered other directions"):
        net.gather(SignatureClient.send_coordinates, query, to=[0, 1])


def test_means_and_directions_of_residuals_are_answered_once(clients: Federation) -> None:
    served = serve(made(**RESIDUALS, signature_noise=1.0), clients)
    net = served.net
    signatures = served.state.signatures
    asked = signatures.asked
    other = ClassMeans(Shared(asked.means + 1), asked.means_step)
    with pytest.raises(PolicyError, match="have answered other means of classes"):
        net.gather(SignatureClient.send_residuals, other, to=[0, 1])
    crafted = ResidualDirections(
        Shared(2 * asked.directions),
        Shared(asked.shifts),
        signatures.step,
        Shared(asked.means),
        asked.means_step,
    )
    with pytest.raises(PolicyError, match="have answered other directions"):
        net.gather(SignatureClient.send_residual_coordinates, crafted, to=[0, 1])


def test_a_client_sends_signatures_of_one_kind_and_one_centre(clients: Federation) -> None:
    served = serve(made(signature_noise=1.0), nameless(clients))
    assert served.state.signatures.asked.name == "residuals"
    net = served.net
    with pytest.raises(PolicyError, match="another kind than plain"):
        centre = torch.tensor([served.state.signatures.asked.centre], dtype=torch.float64)
        net.gather(SignatureClient.send_signature, SignatureRequest(Shared(centre)), to=[0])
    with pytest.raises(PolicyError, match="have answered other centre"):
        net.gather(SignatureClient.send_class_sums, request(0.7), to=[0])
    declared = serve(made(signature_noise=1.0), clients).net
    with pytest.raises(PolicyError, match=r"another centre than 0\.31"):
        declared.gather(SignatureClient.send_class_sums, request(0.7), to=[0])
    with pytest.raises(PolicyError, match="no centre is known"):
        declared.gather(SignatureClient.send_mean_number, Empty(), to=[0])


def request(centre: float) -> SignatureRequest:
    """Return a request of signatures with a centre."""
    return SignatureRequest(Shared(torch.tensor([centre], dtype=torch.float64)))


def test_a_restarted_client_remembers_which_directions_it_answered(clients: Federation) -> None:
    protocol = made(**PLAIN, signature_noise=1.0)
    served = serve(protocol, clients)
    again = build_client(protocol, clients, DOUBLE)
    assert not again.client.memory()["answered"].any()
    again.client.recall(served.endpoint.client.memory())
    assert again.client.memory()["answered"].any(1).all()


@pytest.mark.parametrize(
    ("params", "method"),
    [(PLAIN, SignatureClient.send_class_sums), (BLOCKS, SignatureClient.send_signature)],
)
def test_clients_send_no_signature_of_the_other_kind(
    params: dict[str, Any], method: Any, clients: Federation
) -> None:
    net = serve(made(**params, signature_noise=1.0), clients).net
    with pytest.raises(PolicyError, match="this run has"):
        net.gather(method, request(0.31), to=[0])


def test_clients_of_one_release_answer_no_directions(clients: Federation) -> None:
    served = serve(made(**PLAIN, signature_noise=1.0, signature_releases=1), clients)
    query = SignatureDirections(
        Shared(torch.zeros(RESIDUAL_AXES, 64, dtype=torch.float64)), served.state.signatures.step
    )
    with pytest.raises(PolicyError, match="this run has one alone"):
        served.net.gather(SignatureClient.send_coordinates, query, to=[0])


@pytest.mark.parametrize(
    "params",
    [
        {**PLAIN, "signature_noise": Z},
        {**BLOCKS},
        {**RESIDUALS, "signature_noise": Z},
        {"mask": "haar", "signature_noise": Z},
        {"signature_centre": None},
    ],
)
def test_newcomers_join_the_cluster_of_their_labels(params: dict[str, Any]) -> None:
    whole = two_clusters(12, 60)
    fitted = made(**params).fit(whole.select(range(8)), FULL)
    placed = fitted.join(whole.select(range(8, 12)))
    truth = whole.truth
    assert truth is not None
    by_truth = {int(truth[i]): int(fitted.labels_[i]) for i in range(8)}
    assert placed.tolist() == [by_truth[int(truth[i])] for i in range(8, 12)]


def test_auto_and_sizes_are_in_the_configuration_of_runs_with_noise(clients: Federation) -> None:
    exact = made().config(clients, "float32")
    assert exact["signature_kind"] == "auto"
    assert exact["signature_sizes"] == []
    noisy = made(signature_noise=1.0).config(clients, "float32")
    assert noisy["signature_kind"] == "auto"
    assert noisy["signature_sizes"] == [60] * 8
    assert plan_of(noisy).examples([3, 99]).tolist() == [60.0, 60.0]


def test_samples_that_are_kept_out_of_training_are_in_no_signature(clients: Federation) -> None:
    # the server takes the noise of a signature to be divided by the number that clients divide by
    params: dict[str, Any] = {"rounds": 1, "model": "linear", "signature": "gradient"}
    fitted = CFL(**params, fallback=0.25, signature_noise=1.0, dp_unit="example").fit(clients)
    sizes = fitted.kept_.learned.config["signature_sizes"]
    assert sizes == [45] * 8  # of 60
    client = build_client(fitted, clients, Settings()).client
    assert [len(client.cohort.labels(k)) for k in range(8)] == sizes


def test_a_signature_fits_into_a_kilobyte(clients: Federation) -> None:
    for params in (PLAIN, BLOCKS, RESIDUALS):
        fitted = made(**params).fit(clients)
        sent = fitted.bytes_["by_message"]
        for name in ("send_signature", "send_class_sums", "send_residuals"):
            assert sent.get(name, {"up": 0})["up"] <= 1024 * len(clients)


@pytest.mark.parametrize(
    ("params", "sentence"),
    [
        ({"signature_blocks": "some"}, "signature_blocks"),
        ({"signature_noise": -1.0}, "signature_noise"),
        ({"signature_size": 0}, "signature_size"),
        # a softmax regression of 64 inputs and a bias, 10 classes
        ({"signature_size": 651, "signature_blocks": "plain"}, "more than the 650 numbers"),
        ({"signature_size": 65, "signature_blocks": "blocks"}, "more than the 64 numbers"),
        ({"signature_releases": 3}, "signature_releases"),
        ({"k": 9}, "9"),
        ({"signature_noise": 1.0, "target_epsilon": 8.0, "clip": 1.0}, "both say how much noise"),
    ],
)
def test_options_that_cannot_work_are_refused(
    params: dict[str, Any], sentence: str, clients: Federation
) -> None:
    with pytest.raises(UsageError, match=sentence):
        made(**params).fit(clients)


def test_data_without_classes_are_refused() -> None:
    draw = np.random.default_rng(0)
    texts = {f"c{k}": (t := draw.integers(0, 5, (8, 6)), np.roll(t, -1, 1)) for k in range(3)}
    federation = Federation.from_arrays(texts, objective=Language(), seed=0)
    with pytest.raises(UsageError, match=r"samples with classes, .* choose another protocol"):
        Signature(rounds=1, k=2).fit(federation)
    with pytest.raises(UsageError, match=r"samples with classes, .* take signature update"):
        CFL(rounds=1, signature="gradient").fit(federation)
