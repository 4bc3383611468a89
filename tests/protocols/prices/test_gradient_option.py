"""CFL, FL+HC and methods that cluster once, by gradient signatures in place of their own."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from cases import FULL, NOISE, serve, two_clusters

from securecluster import Federation, LabelSwap, Tasks
from securecluster.clustering.metrics import agreement
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Empty
from securecluster.privacy.dp.accounting import gaussian_epsilon
from securecluster.protocols import CFL, FLHC, PACFL, Settings, Signature
from securecluster.protocols.authoring import (
    ClusterOnce,
    SignatureClient,
    SumClient,
    TrainingClient,
    check_clusters,
    linkage_clusters,
    nearest,
    protocol,
)
from securecluster.protocols.common.comparison.signature_collection import comparable

GRADIENT: dict[str, Any] = {"signature": "gradient", "rounds": 3, "epochs": 1, "model": "linear"}
KINDS: tuple[dict[str, Any], ...] = ({"signature_blocks": "plain"}, {"signature_blocks": "blocks"})
PLAIN = KINDS[0]
SEEDS = range(3)


@protocol
class Rows(ClusterOnce):
    """Average linkage on whatever rows there are."""

    k: int | None = None
    """number of clusters"""

    name: ClassVar[str] = "rows"
    client: ClassVar[type[TrainingClient]] = SignatureClient
    signature_method: ClassVar[Any] = SignatureClient.send_signature
    clusters_rows: ClassVar[bool] = True

    def cluster(self, signatures: torch.Tensor, seed: int) -> list[int]:
        """Return the cluster of each client."""
        distance = torch.cdist(signatures, signatures).double().numpy()
        return linkage_clusters(distance, "average", count=self.k)

    def assign_signatures(
        self, newcomers: torch.Tensor, signatures: torch.Tensor, labels: Sequence[int]
    ) -> list[int]:
        """Return the nearest cluster on average."""
        distance = torch.cdist(newcomers, signatures).double().numpy()
        return nearest(distance, labels, "average")

    def check(self, clients: int) -> None:
        """Check the number of clusters, too."""
        super().check(clients)
        if self.k is not None:
            check_clusters(self.k, clients)


METHODS: tuple[tuple[type, dict[str, Any]], ...] = (
    (CFL, {}),
    (FLHC, {"pre_rounds": 1}),
    (Rows, {"k": 2}),
)
BOTH = pytest.mark.parametrize(("method", "own"), METHODS[:2])
EVERY = pytest.mark.parametrize(("method", "own"), METHODS)


def swapped(seed: int, clients: int = 8, samples: int = 170) -> Federation:
    """Return digits of two clusters that swap two labels."""
    return two_clusters(clients, samples, seed=seed)


@pytest.fixture(scope="module")
def clients() -> Federation:
    return two_clusters(6, 40)


@EVERY
@pytest.mark.parametrize("kind", KINDS)
def test_rows_are_those_of_the_protocol_signature(
    method: type, own: dict[str, Any], kind: dict[str, Any], clients: Federation
) -> None:
    if method is Rows and kind is not PLAIN:
        return  # which clusters rows
    common = {**GRADIENT, **kind, "mask": "none", "dp_unit": "example"}
    theirs = serve(Signature(**{**common, "k": 2}), clients).state.signatures
    if method is CFL:
        # its clients tell their numbers of samples, too, as Signature's do
        own = {**own, "average": "weighted"}
    ours = serve(method(**{**common, **own}), clients).state.signatures
    assert ours.ids == theirs.ids
    torch.testing.assert_close(ours.rows, theirs.rows, rtol=0, atol=0)


@pytest.mark.few(1)
@BOTH
def test_labels_are_found_at_an_epsilon_at_which_updates_find_none(
    method: type, own: dict[str, Any]
) -> None:
    """ε = 2 is that of the whole run."""
    params = {**GRADIENT, **own, "clip": 1.0, "dp_unit": "example", "batch_size": 50}
    found: dict[str, list[float]] = {"gradient": [], "update": []}
    for seed in SEEDS:
        federation = swapped(seed)
        for signature, scores in found.items():
            made = method(**{**params, "signature": signature, "target_epsilon": 2.0})
            fitted = made.fit(federation)
            assert 1.9 < fitted.ledger_.epsilon <= 2.0
            assert fitted.agreement_ is not None
            scores.append(fitted.agreement_["ari"])
    # one draw of the noise in three may lose the clusters
    assert np.mean(found["gradient"]) > 0.6
    assert np.mean(found["update"]) < 0.4


@EVERY
@pytest.mark.parametrize("noise", [0.0, 0.02, 0.5])
def test_clusters_of_label_shares_are_found_at_any_noise(
    method: type, own: dict[str, Any], noise: float
) -> None:
    federation = Federation.simulate("digits", scenario=Tasks(), clients=8, samples=60, seed=0)
    made = method(**{**GRADIENT, **own, "dp_unit": "example", "signature_noise": noise})
    fitted = made.fit(federation)
    assert fitted.agreement_["exact"]
    newcomers = Federation.simulate("digits", scenario=Tasks(), clients=10, samples=60, seed=0)
    assert agreement(fitted.join(newcomers), newcomers.truth)["exact"]


@pytest.mark.parametrize("clusterer", ["average", "spectral", "kmeans"])
@BOTH
def test_other_clusterers_find_them_too(method: type, own: dict[str, Any], clusterer: str) -> None:
    made = method(**GRADIENT, **own, **PLAIN, clusterer=clusterer, signature_noise=0.5)
    made.set_params(dp_unit="example")
    assert made.fit(swapped(0)).agreement_["exact"]


@BOTH
def test_without_noise_the_methods_own_test_decides(method: type, own: dict[str, Any]) -> None:
    made = method(**GRADIENT, **own, signature_blocks="blocks")
    assert made.fit(swapped(0)).agreement_["exact"]
    alike = Federation.simulate(
        "digits", scenario=LabelSwap(clusters=1), clients=8, samples=170, seed=0
    )
    assert max(made.fit(alike).labels_) == 0


@EVERY
def test_a_signature_costs_what_it_does_in_the_protocol_signature(
    method: type, own: dict[str, Any], clients: Federation
) -> None:
    noisy = {**GRADIENT, **PLAIN, "signature_noise": 2.0, "dp_unit": "example"}
    priced = {}
    for made in (method(**noisy, **own), Signature(**noisy, k=2)):
        events = [e for e in made.fit(clients).ledger_.events if e.method.startswith("send")]
        priced[type(made)] = sorted((e.method, e.noise_multiplier) for e in events)
    assert priced[method] == priced[Signature]
    squared_mu = sum(z**-2 for _, z in priced[method])
    assert squared_mu == pytest.approx(2.0**-2)


@EVERY
@pytest.mark.parametrize("unit", ["client", "example"])
def test_epsilon_is_more_than_the_signatures_and_finite(
    method: type, own: dict[str, Any], unit: str, clients: Federation
) -> None:
    params = {**GRADIENT, **own, **PLAIN, **NOISE, "signature_noise": 3.0, "dp_unit": unit}
    fitted = method(**params).fit(clients)
    assert gaussian_epsilon(1 / 3.0, 1e-5) < fitted.ledger_.epsilon < math.inf
    assert fitted.ledger_.exact() == []


@BOTH
@pytest.mark.parametrize("kind", KINDS)
def test_no_update_is_read_alone(
    method: type, own: dict[str, Any], kind: dict[str, Any], clients: Federation
) -> None:
    """Signatures and models made of averages alone leave by themselves, also with secure sums."""
    made = method(**GRADIENT, **own, **kind, aggregation="secagg")
    fitted = made.fit(clients, FULL)
    methods = {entry.method for entry in fitted.transcript_.entries if entry.verb == "gather"}
    assert methods & {"send_signature", "send_class_sums"}
    assert not methods & {"train", "gradient", "send_compressed_update"}
    assert any("signature" in view for view in made.disclosures().server)


@EVERY
def test_newcomers_join_the_cluster_of_their_labels(method: type, own: dict[str, Any]) -> None:
    whole = swapped(1, clients=12, samples=110)
    truth = whole.truth
    assert truth is not None
    params = {**GRADIENT, **own, **PLAIN, "signature_noise": 0.2, "dp_unit": "example"}
    fitted = method(**params).fit(whole.select(range(8)), Settings(transcript="full"))
    by_truth = {int(truth[i]): int(fitted.labels_[i]) for i in range(8)}
    placed = fitted.join(whole.select(range(8, 12)))
    assert placed.tolist() == [by_truth[int(truth[i])] for i in range(8, 12)]
    released = {e.method for e in fitted.joined_.ledger.events}
    assert released == {"send_signature", "send_coordinates"}


@pytest.mark.parametrize("average", ["uniform", "weighted"])
def test_averages_by_sums_are_those_of_updates(average: str, clients: Federation) -> None:
    """Clients take one step along the gradient, so that no order of samples matters."""
    arrays = {}
    for k, shard in enumerate(clients.shards):
        samples = slice(0, 10 + 5 * k)
        arrays[f"c{k}"] = (shard.x[samples], shard.y[samples])
    unequal = Federation.from_arrays(arrays, seed=0)
    params = {**GRADIENT, "rounds": 1, "average": average, "batch_size": 100}
    by_sums = CFL(**params).fit(unequal).client_models_.values
    by_updates = CFL(**{**params, "signature": "update"}).fit(unequal).client_models_.values
    torch.testing.assert_close(by_sums, by_updates, rtol=0, atol=1e-6)


def test_clients_send_no_signature_in_runs_without_any(clients: Federation) -> None:
    for method, own in METHODS[:2]:
        net = serve(method(rounds=2, epochs=1, model="linear", **own), clients).net
        for name in ("send_signature", "send_class_sums"):
            with pytest.raises(PolicyError, match="has no gradient signatures"):
                net.gather(getattr(method.client, name), Empty(), to=[0])  # type: ignore[attr-defined]


@pytest.mark.parametrize("method", [CFL, FLHC])
@pytest.mark.parametrize(
    ("options", "signatures", "shares"),
    [
        ({}, False, False),
        ({"signature": "gradient"}, True, True),
        ({"signature": "gradient", "signature_blocks": "plain"}, True, False),
    ],
)
def test_what_the_server_sees_of_signatures_is_said_of_runs_that_have_some(
    method: type, options: dict[str, Any], signatures: bool, shares: bool
) -> None:
    told = " ".join(method(**options).disclosures().server)
    assert ("all clients' gradient signature, sent one by one" in told) is signatures
    assert ("each client's share of each class" in told) is shares


def test_a_run_without_signatures_has_none_of_their_options(clients: Federation) -> None:
    """The configuration decides noise, which must not change with options that are not used."""
    for made in (CFL(), FLHC(), PACFL()):
        config = made.config(clients, "float32")
        assert not [name for name in config if name.startswith("signature")]
    assert "signature" not in Signature().config(clients, "float32")


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (CFL(signature_noise=1.0), "take signature gradient, or leave it out"),
        (FLHC(signature_releases=1), "take signature gradient, or leave it out"),
        (CFL(signature="own"), "signature"),
        (CFL(signature="gradient", criterion="absolute"), "take criterion relative"),
        (CFL(signature="gradient", similarity="gradient"), "take similarity update"),
        (CFL(signature="gradient", sketch=64), "leave sketch and compress out"),
        (FLHC(signature="gradient", compress="8bit"), "leave sketch and compress out"),
        (FLHC(signature="gradient", metric="l1", linkage="average"), "take metric chord or l2"),
        (FLHC(signature="gradient", signature_size=0), "signature_size"),
        (Signature(signature="own"), "signature"),
        (PACFL(signature="gradient"), "take signature own"),
        (Rows(signature="gradient", signature_blocks="blocks"), "take signature_blocks plain"),
        (
            CFL(signature="gradient", signature_noise=1.0, target_epsilon=2.0, clip=1.0),
            "both say how much noise",
        ),
    ],
)
def test_options_that_cannot_work_are_refused(made: Any, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence) as caught:
        made.check(8)
    assert "\n" not in str(caught.value)


def test_the_server_is_said_to_see_signatures_where_there_are_any() -> None:
    sentence = "norms and inner products of all clients' gradient signature, sent one by one"
    assert sentence in CFL(signature="gradient").disclosures().server
    assert not any("gradient signature" in line for line in CFL().disclosures().server)


def test_clients_that_send_no_gradients_are_named() -> None:
    @protocol
    class Plain(Rows):
        """As `Rows`, of clients that send no gradients."""

        client: ClassVar[type[TrainingClient]] = SumClient

    with pytest.raises(UsageError, match="SumClient sends no gradient signatures"):
        Plain(signature="gradient").check(8)


def test_silent_clients_stay_with_most_others() -> None:
    federation = swapped(0)

    def lost(call: Any) -> set[int]:
        return {5} if call.method == "send_signature" else set()

    truth = federation.truth
    assert truth is not None
    for method, own in METHODS[:2]:
        made = method(**GRADIENT, **own, **PLAIN, signature_noise=0.5, dp_unit="example")
        labels = serve(made, federation, lost).state.labels
        others = [i for i in range(8) if i != 5]
        groups = {(labels[i], truth[i]) for i in others}
        assert len(groups) == 2
        sizes = np.bincount([labels[i] for i in others])
        assert labels[5] == int(np.argmax(sizes))


def test_compared_rows_of_some_clients_are_those_of_all(clients: Federation) -> None:
    noisy = Signature(**GRADIENT, **PLAIN, k=2, signature_noise=0.1)
    rows = serve(noisy, clients).state.signatures.rows
    whole: Any = comparable(rows, rows)
    some = whole.select([4, 1])
    every_distance = whole.squared_distances(whole)
    np.testing.assert_allclose(some.squared_distances(whole), every_distance[[4, 1]])
    assert some.count() <= 2
