"""Local-KMeans against scikit-learn on the models themselves, and random clusters against the
baselines they lie between.
"""

from __future__ import annotations

from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import DOUBLE, serve
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score

from securecluster import Federation, LabelSwap
from securecluster.errors import PolicyError, UsageError
from securecluster.messaging.messages import Call, Empty, Rows
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FedAvg, Local, LocalKMeans, RandomClusters
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.runtime.call_context import CallContext


@pytest.fixture(scope="module")
def three() -> Federation:
    """Nine clients in three clusters."""
    return Federation.simulate("digits", scenario=LabelSwap(clusters=3), clients=9, seed=0)


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "mask", ["none", "permutation", cases.exhaustive("signed-permutation"), "rotation"]
)
def test_the_clusters_are_those_of_k_means_on_the_models_themselves(
    mask: str, three: Federation
) -> None:
    fitted = LocalKMeans(k=4, rounds=2, local_rounds=2, mask=mask).fit(three, DOUBLE)
    alone = Local(rounds=2).fit(three, DOUBLE).client_models_.values  # the same batches
    best = min(
        (KMeans(4, n_init=50, random_state=s).fit(alone.numpy()) for s in range(3)),
        key=lambda found: float(found.inertia_),
    )
    assert adjusted_rand_score(best.labels_, fitted.labels_) == 1
    for i, own in enumerate(fitted.client_models_.values):
        mean = alone[[j for j in range(9) if fitted.labels_[j] == fitted.labels_[i]]].mean(0)
        torch.testing.assert_close(own, mean, rtol=0, atol=1e-9)


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_clusters_go_on_by_weighted_averages_from_the_mean_of_their_models(
    mask: str, three: Federation
) -> None:
    made = LocalKMeans(k=3, rounds=3, local_rounds=3, mask=mask)
    cohort = build_client(made, three, DOUBLE).client.cohort
    start = made.fit(three, DOUBLE).client_models_.values.clone()
    fitted = made.set_params(rounds=4).fit(three, DOUBLE)
    # three calls to train alone, one to hand in
    plan = made.training.usual(made, {"lr": 0.2})
    updates = cohort.train(Rows(start), range(9), plan, 5)
    for i in range(9):
        peers = [j for j in range(9) if fitted.labels_[j] == fitted.labels_[i]]
        mean = np.average(updates[peers].numpy(), axis=0, weights=[cohort.sizes[j] for j in peers])
        torch.testing.assert_close(
            fitted.client_models_.values[i], start[i] + torch.as_tensor(mean), rtol=0, atol=1e-9
        )


@pytest.mark.always
@pytest.mark.parametrize("seed", cases.seeds(1, of=3))
def test_the_clusters_of_swapped_digits_are_found(seed: int) -> None:
    fitted = LocalKMeans(rounds=10).fit(Federation.simulate("digits", seed=seed))
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["none", "permutation", "haar"])
def test_who_does_not_reply_is_asked_again_under_the_same_mask(
    mask: str, three: Federation
) -> None:
    made, asked = (
        LocalKMeans(k=3, rounds=4, local_rounds=2, mask=mask, model="linear"),
        list[tuple[int, ...]](),
    )

    def lost(call: Call) -> set[int]:
        if call.method != "send_model":
            return set()
        asked.append(call.to)
        return {1, 4} if len(asked) == 1 else {4} if len(asked) == 2 else set()

    (state, endpoint, *_), (plain, other, *_) = serve(made, three, lost), serve(made, three)
    assert asked == [tuple(range(9)), (1, 4), (4,)]
    assert adjusted_rand_score(state.labels, plain.labels) == 1
    torch.testing.assert_close(
        made.observer.final_models(endpoint.client, state).values,
        made.observer.final_models(other.client, plain).values,
        rtol=0,
        atol=1e-9,
    )


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_who_never_hands_in_goes_on_alone(mask: str, three: Federation) -> None:
    made = LocalKMeans(k=3, rounds=4, local_rounds=2, mask=mask)
    state, endpoint, _, transcript = serve(
        made, three, lambda call: {4} if call.method == "send_model" else set()
    )
    assert state.labels[4] == 3 and state.labels.count(3) == 1
    assert sum(e.method == "send_model" for e in transcript.entries) == 5
    cohort, theta = endpoint.client.cohort, endpoint.client.cohort.start
    plan = made.training.usual(made, {"lr": 0.2})
    # the calls to hand in count as one; each later round has one to train alone and one to train
    # together
    for step in (1, 2, 4, 6):
        theta = theta + cohort.train(Rows(theta[None]), [4], plan, step)[0]
    torch.testing.assert_close(
        made.observer.final_models(endpoint.client, state).row(4), theta, rtol=0, atol=1e-9
    )


def test_handing_in_again_gives_the_same_answer_and_the_first_average_counts_from_the_start(
    small: Federation,
) -> None:
    client: Any = build_client(LocalKMeans(mask="none"), small, DOUBLE).client
    client.models = Rows(client.cohort.start + torch.arange(6.0, dtype=torch.float64)[:, None])
    client.models = Rows(client.models.table, tuple(range(6)))
    one = client.send_model(CallContext((1, 3), (1, 3), 1, 1), Empty()).delta.values
    two = client.send_model(CallContext((3, 5), (3, 5), 1, 1), Empty()).delta.values
    torch.testing.assert_close(one[:, 0], torch.tensor([1.0, 3.0], dtype=torch.float64))
    torch.testing.assert_close(two[:, 0], torch.tensor([3.0, 5.0], dtype=torch.float64))
    box = PendingUpdates.start(6, fresh=False)
    box.post(1, torch.full_like(client.cohort.start, 0.5)[None], [0] * 6)
    client.receive(CallContext((1, 3), (1, 3), 2, 2), box.message_for([1, 3]))
    found = (client.models.values - client.cohort.start)[:, 0]
    torch.testing.assert_close(found, torch.tensor([0.0, 0.5, 2, 0.5, 4, 5], dtype=torch.float64))
    with pytest.raises(PolicyError, match="before the first average"):
        client.send_model(CallContext((1,), (1,), 2, 3), Empty())


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["none", "permutation", "rotation"])
def test_newcomers_join_the_cluster_of_the_nearest_centre(mask: str, three: Federation) -> None:
    fitted = LocalKMeans(k=3, rounds=6, local_rounds=5, mask=mask).fit(three)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]
    fresh = Federation.simulate("digits", scenario=LabelSwap(clusters=3), clients=12, seed=0)
    labels, cluster = (
        fitted.join(fresh),
        dict(zip(three.truth or (), fitted.labels_, strict=True)),
    )
    assert list(labels) == [cluster[c] for c in fresh.truth or ()]
    events = [(e.method, e.verb, e.clients) for e in fitted.joined_.ledger.events]
    assert events == [("send_model", "gather", 12)]


def test_nothing_leaves_while_clients_train_alone(small: Federation) -> None:
    fitted = LocalKMeans(k=2, rounds=5, local_rounds=3).fit(small)
    assert next((e.method, e.round) for e in fitted.ledger_.events) == ("send_model", 3)
    assert [line["clusters"] for line in fitted.history_] == [6, 6, 2, 2, 2]


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"k": 7}, "k = 7 clusters cannot be made of 6 clients"),
        ({"k": 0}, "k = 0"),
        ({"local_rounds": 0}, "local_rounds = 0"),
        ({"local_rounds": 2.5}, "local_rounds = 2.5"),
    ],
)
def test_what_cannot_work_is_refused(params: dict[str, Any], word: str, small: Federation) -> None:
    with pytest.raises(UsageError, match=word):
        LocalKMeans(**params).fit(small)
    if "k" in params:
        with pytest.raises(UsageError, match=word):
            RandomClusters(**params).fit(small)


def test_random_clusters_are_of_equal_size_and_follow_the_seed_alone(three: Federation) -> None:
    one, two = (RandomClusters(k=4, rounds=1, lr=lr).fit(three).labels_ for lr in (0.1, 0.2))
    assert sorted(np.bincount(one)) == [2, 2, 2, 3] and list(one) == list(two)
    others = [
        Federation.simulate("digits", scenario=LabelSwap(clusters=3), clients=9, samples=20, seed=s)
        for s in range(1, 5)
    ]
    assert len({tuple(RandomClusters(k=4, rounds=1).fit(other).labels_) for other in others}) > 1


def test_random_clusters_lie_between_one_model_and_one_for_each(small: Federation) -> None:
    whole, apart = (RandomClusters(k=k, rounds=3).fit(small).client_models_.values for k in (1, 6))
    assert torch.equal(whole, FedAvg(rounds=3).fit(small).client_models_.values)
    assert torch.equal(apart, Local(rounds=3).fit(small).client_models_.values)


def test_a_newcomer_draws_a_cluster_that_does_not_depend_on_who_joins_with_it(
    small: Federation,
) -> None:
    fitted = RandomClusters(k=3, rounds=1).fit(small)
    many = cases.two_clusters(30, 10)
    few = cases.two_clusters(5, 10)
    labels = fitted.join(many)
    assert set(labels) == {0, 1, 2} and list(fitted.join(few)) == list(labels[:5])
    assert fitted.joined_.bytes["up"] == 0
