"""FL+HC: what it recovers, what the clustering round costs and moves, who is missing, who comes
later, and what is refused.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from sklearn.cluster import AgglomerativeClustering

from securecluster import Federation, Iid, LabelSwap
from securecluster.clustering.agglomerative import nearest, representatives
from securecluster.core.serialization import pack, unpack
from securecluster.data.scenarios import Scenario
from securecluster.errors import PolicyError, UpdateError, UsageError
from securecluster.messaging.messages import Call, Empty
from securecluster.messaging.transcript import Transcript
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import FLHC, IFCA, LocalKMeans, Settings
from securecluster.protocols.common.averages.pending_updates import PendingUpdates
from securecluster.protocols.flhc import FLHCState
from securecluster.protocols.registry import protocol_class
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.run import Run
from securecluster.runtime.transport import InProcess, Recorded

FULL = Settings(transcript="full")
PAIRS = [
    ("l1", "complete"), ("l1", "single"), ("l2", "average"), ("l2", "ward"), ("cosine", "complete"),
    ("cosine", "average"),
]  # fmt: skip


def some(federation: Federation, who: range) -> Federation:
    """A few of a federation's clients."""
    truth = federation.truth and tuple(federation.truth[i] for i in who)
    names, shards = (tuple(of[i] for i in who) for of in (federation.names, federation.shards))
    return replace(federation, names=names, shards=shards, truth=truth)


def odd_one_out() -> Federation:
    """Five clients alike, and client 2 with all labels turned around."""
    federation = Federation.simulate("digits", scenario=Iid(), clients=6, samples=60, seed=0)
    shards = [
        replace(s, y=9 - s.y, y_test=9 - s.y_test) if i == 2 else s
        for i, s in enumerate(federation.shards)
    ]
    return replace(federation, shards=tuple(shards), truth=(0, 0, 1, 0, 0, 0))


def calls(fitted: Any, name: str) -> list[Any]:
    return [(k, e) for k, e in enumerate(fitted.transcript_.entries) if e.method == name]


def run_with(
    method: FLHC, federation: Federation, lost: Any
) -> tuple[FLHCState, Transcript, Any, Run]:
    """A run by hand, whose transport loses who `lost` says."""
    endpoint, transcript = build_client(method, federation, Settings()), Transcript("sizes")
    net = build_network(
        method,
        Recorded(InProcess(endpoint.answer, lost), transcript),
        method.config(federation, "float32"),
    )
    run = Run(begin=lambda number: setattr(net, "round", number))
    return method.run_server(net, run), transcript, endpoint.client, run


@pytest.mark.parametrize("seed", cases.seeds(1, of=10))
@pytest.mark.parametrize(("scenario", "clusters"), [(LabelSwap(), 4), (Iid(), 1)])
def test_the_defaults_recover_label_swap_and_leave_iid_clients_together(
    scenario: Scenario, clusters: int, seed: int
) -> None:
    fitted = FLHC(rounds=11).fit(Federation.simulate("digits", scenario=scenario, seed=seed))
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]
    assert set(fitted.labels_) == set(range(clusters))


def test_after_the_clustering_the_clusters_do_better_than_the_joint_model() -> None:
    lines = FLHC(rounds=25, pre_rounds=10).fit(Federation.simulate("digits", seed=1)).history_
    assert [line["clusters"] for line in lines] == [1] * 10 + [4] * 15
    assert lines[-1]["accuracy"] > lines[9]["accuracy"] + 0.15


@pytest.mark.few(3)
@pytest.mark.parametrize(("metric", "linkage"), PAIRS)
@pytest.mark.parametrize("at", [0.3, 0.7, 0.9])
def test_the_clusters_are_scikit_learns_on_the_updates_the_server_got(
    metric: str, linkage: str, at: float
) -> None:
    federation = Federation.simulate("digits", clients=12, samples=40, seed=3)
    params: dict[str, Any] = {"rounds": 3, "pre_rounds": 2, "metric": metric, "linkage": linkage}
    merges = np.array(FLHC(**params).fit(federation).history_[2]["merges"])
    threshold = float(np.quantile(merges[:, 2], at))
    fitted = FLHC(**params, threshold=threshold, mask="none").fit(federation, FULL)
    ((place, _),) = calls(fitted, "train")
    updates = fitted.transcript_.content(place)[1].reply.delta.values.double().numpy()
    model = AgglomerativeClustering(
        None,
        metric={"l1": "manhattan"}.get(metric, metric),
        linkage=linkage,
        distance_threshold=threshold,
    )
    if linkage == "ward":
        model.set_params(metric="euclidean")
    expected = model.fit_predict(updates)
    groups = {frozenset(np.flatnonzero(expected == c).tolist()) for c in set(expected)}
    assert {frozenset(group) for group in fitted.history_[2]["clustered"]} == groups
    assert len(groups) > 1


def test_the_clustering_round_costs_bytes_and_moves_no_model(small: Federation) -> None:
    fitted = FLHC(rounds=2, pre_rounds=1, threshold=1e9, mask="none").fit(small, FULL)
    ((_, entry),) = calls(fitted, "train")
    assert (entry.to, entry.round, min(entry.up) > 4 * 4810) == (tuple(range(6)), 2, True)
    assert sum(entry.up) + sum(e.up[0] for _, e in calls(fitted, "post")) < fitted.bytes_["up"]
    before, after = fitted.history_
    assert after["up"] - before["up"] > 2 * sum(entry.up)
    start = build_client(FLHC(), small, Settings()).client.cohort.start
    means = []
    for k, _ in calls(fitted, "contribute"):
        reply = fitted.transcript_.content(k)[1].reply
        means.append(reply.delta.values.sum(0) / reply.size.values.sum())
    assert len(means) == 2
    torch.testing.assert_close(
        fitted.client_models_.row(0), start + means[0] + means[1], rtol=1e-5, atol=1e-6
    )


def test_only_the_clustering_round_reads_single_updates(small: Federation) -> None:
    fitted = FLHC(rounds=5, pre_rounds=2).fit(small, FULL)
    read = [
        (e.round, e.method)
        for e in fitted.transcript_.entries
        if e.verb == "gather" and max(e.up) > 4 * 4810
    ]
    assert read == [(3, "train"), (3, "post")]


def test_a_client_that_is_a_cluster_of_its_own_trains_alone_and_sends_nothing_more() -> None:
    fitted = FLHC(rounds=12, pre_rounds=3, linkage="average").fit(odd_one_out(), FULL)
    assert list(fitted.labels_) == [0, 0, 1, 0, 0, 0]
    assert all(2 not in e.to for _, e in calls(fitted, "contribute") if e.round > 3)
    assert [(e.to, e.round) for _, e in calls(fitted, "train_locally")] == [
        ((2,), t) for t in range(4, 13)
    ]
    assert not torch.equal(fitted.client_models_.row(2), fitted.client_models_.row(0))
    assert fitted.accuracy_[2] > 0.5


def test_no_server_has_a_model_posted_that_was_trained_alone(small: Federation) -> None:
    made = FLHC(mask="none", model="linear", clip=1.0, noise=1.0)
    endpoint, config = (
        build_client(made, small, Settings()),
        config_hash(made.config(small, "float32")),
    )

    def ask(name: str, sent: Any, who: int) -> Any:
        return endpoint.answer(Call(config, name, "gather", 1, 1, (who,), sent, (1,))).reply

    assert not ask("post", Empty(), 3).delta.values.any()
    ask("train_locally", PendingUpdates.start(6, fresh=False).message_for([3]), 3)
    kept = unpack(pack(endpoint.client.state(endpoint.keys.secrets)), ClientState)
    for _ in range(2):  # also after it was stopped and goes on
        with pytest.raises(PolicyError, match="trained alone"):
            ask("post", Empty(), 3)
        assert not ask("post", Empty(), 2).delta.values.any()
        endpoint = build_client(made, small, Settings())
        endpoint.client.restore(kept)


def test_who_is_missing_in_the_clustering_round_is_asked_again_under_the_same_mask() -> None:
    federation = Federation.simulate("digits", clients=12, samples=60, seed=0)
    asked: list[tuple[int, ...]] = []

    def lost(call: Call) -> set[int]:
        if call.method != "train":
            return set()
        asked.append(call.to)
        return {1, 4} if len(asked) == 1 else ({4} if len(asked) == 2 else set())

    method = FLHC(rounds=6, pre_rounds=4)
    state, transcript, _, run = run_with(method, federation, lost)
    assert asked == [tuple(range(12)), (1, 4), (4,)]
    assert len({e.step for e in transcript.entries if e.method == "train"}) == 1
    assert state.absent == run.history[4]["absent"] == []
    assert state.linkage is not None and state.linkage.ids == list(range(12))
    assert state.labels == method.fit(federation).labels_.tolist()
    torch.testing.assert_close(
        state.linkage.distance,
        unpack(method.server_state_, FLHCState).linkage.distance,
        rtol=0,
        atol=0,
    )  # type: ignore[union-attr]


def test_who_never_replies_goes_to_the_largest_cluster_and_is_named() -> None:
    federation = odd_one_out()
    method = FLHC(rounds=6, pre_rounds=3, linkage="average")
    state, transcript, client, run = run_with(
        method, federation, lambda call: {4} if call.round == 4 else set()
    )
    assert (state.labels, state.absent) == ([0, 0, 1, 0, 0, 0], [4])
    assert run.history[3]["clustered"] == [[0, 1, 3, 4, 5], [2]]
    assert run.history[3]["absent"] == [4]
    assert len([e for e in transcript.entries if e.method == "train"]) == 5
    assert torch.equal(client.models.row(4), client.models.row(0))  # it caught up


def test_without_two_replies_nobody_is_parted() -> None:
    federation = odd_one_out()
    method = FLHC(rounds=3, pre_rounds=1)
    for here in ({0}, set()):
        state, _, _, run = run_with(
            method,
            federation,
            lambda call, here=here: set(range(6)) - here if call.method == "train" else set(),
        )
        assert (state.labels, state.linkage) == ([0] * 6, None)
        assert run.history[1]["clustered"] == [list(range(6))]


def test_random_dropouts_and_partial_participation_keep_the_clusters() -> None:
    federation = Federation.simulate("digits", seed=2)
    for method, dropout in ((FLHC(rounds=14), 0.3), (FLHC(rounds=20, participation=0.3), 0.0)):
        fitted = method.fit(federation, Settings(dropout=dropout))
        assert fitted.agreement_ is not None and fitted.agreement_["exact"]
    asked = {e.round: len(e.to) for _, e in calls(fitted, "contribute")}
    assert asked == {t: 6 if t <= 10 else 8 for t in range(1, 21)}  # 0.3 of 20; two of each five
    assert [(len(e.to), e.round) for _, e in calls(fitted, "train")] == [(20, 11)]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("metric", "linkage"),
    [
        ("l2", "ward"),
        ("l2", "centroid"),
        ("l2", "average"),
        ("l1", "complete"),
        ("cosine", "single"),
    ],
)
def test_newcomers_join_the_cluster_their_update_is_nearest_to(
    metric: str, linkage: str, tmp_path: Path
) -> None:
    whole = Federation.simulate("digits", scenario=LabelSwap(2), clients=24, samples=50, seed=0)
    old, new = some(whole, range(16)), some(whole, range(16, 24))
    tree = (
        FLHC(rounds=5, pre_rounds=4, metric=metric, linkage=linkage).fit(old).history_[4]["merges"]
    )
    method = FLHC(
        rounds=5,
        pre_rounds=4,
        metric=metric,
        linkage=linkage,
        threshold=(max(tree[-2][2], tree[-3][2]) + tree[-1][2]) / 2,
    )
    fitted = method.fit(old)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]
    name = dict(zip(old.truth or (), fitted.labels_.tolist(), strict=True))
    found = fitted.join(new).tolist()
    assert found == [name[c] for c in new.truth or ()]
    assert fitted.joined_.bytes["up"] > 8 * 4 * 4810
    plain = FLHC(**{**method.get_params(), "mask": "none"}).fit(old)
    assert plain.join(new).tolist() == found
    fitted.save(tmp_path)
    assert FLHC.load(tmp_path).join(new).tolist() == found
    rows = unpack(fitted.server_state_, FLHCState).memory.rows  # type: ignore[union-attr]
    assert len(rows) == (2 if linkage in ("ward", "centroid") else 16)


def test_newcomers_of_a_run_that_remembers_nothing_are_told_so() -> None:
    whole = Federation.simulate("digits", scenario=Iid(), clients=6, samples=40, seed=0)
    method = FLHC(rounds=3, pre_rounds=1)
    state, *_ = run_with(
        method,
        some(whole, range(4)),
        lambda call: set(range(4)) if call.method in ("train", "post") else set(),
    )
    net = build_network(
        method,
        InProcess(lambda call: pytest.fail("nobody is asked")),
        method.config(some(whole, range(4)), "float32"),
    )
    with pytest.raises(UsageError, match="run it anew"):
        method.assign_newcomers(net, state, [4, 5])


@pytest.mark.parametrize(
    "method",
    [
        FLHC(rounds=3, pre_rounds=1),
        IFCA(k=2, starts=1, rounds=1),
        LocalKMeans(k=2, rounds=2, local_rounds=1),
    ],
)
def test_newcomers_that_do_not_reply_are_named_and_placed_nowhere(method: Any) -> None:
    federation = Federation.simulate("digits", scenario=Iid(), clients=4, samples=40, seed=0)
    fitted = method.set_params(mask="none").fit(federation)
    net = build_network(
        fitted,
        InProcess(lambda call: pytest.fail("nobody answers"), lambda call: set(call.to)),
        fitted.kept_.learned.config,
    )
    with pytest.raises(UpdateError, match=r"4, 5 do not reply"):
        fitted.assign_newcomers(net, fitted.state_, [4, 5])


@given(st.integers(0, 10**6), st.integers(3, 12), st.integers(1, 3))
def test_the_nearest_cluster_by_brute_force(seed: int, m: int, clusters: int) -> None:
    draw = np.random.default_rng(seed)
    rows, new = draw.normal(size=(m, 4)), draw.normal(size=(5, 4))
    labels = [*range(clusters), *draw.integers(0, clusters, m - clusters)]
    own = [rows[np.array(labels) == c] for c in range(clusters)]

    def sse(points: np.ndarray) -> float:
        return float(np.square(points - points.mean(0)).sum())

    def height(x: np.ndarray, c: int, linkage: str) -> float:
        apart = np.linalg.norm(own[c] - x, axis=1)
        if linkage == "ward":  # by its definition: what the merge adds to the squared errors
            return sse(np.vstack([own[c], x])) - sse(own[c])
        each = {"single": apart.min(), "complete": apart.max(), "average": apart.mean()}
        return float(each[linkage] if linkage in each else np.linalg.norm(own[c].mean(0) - x))

    for linkage in ("single", "complete", "average", "centroid", "ward"):
        kept, of, sizes = representatives(torch.from_numpy(rows), [int(c) for c in labels], linkage)
        assert len(kept) == (clusters if linkage in ("centroid", "ward") else m)
        distance = np.linalg.norm(new[:, None] - kept.numpy()[None], axis=2)
        expected = [int(np.argmin([height(x, c, linkage) for c in range(clusters)])) for x in new]
        assert nearest(distance, of, linkage, sizes) == expected


@pytest.mark.parametrize(
    ("params", "says"),
    [
        ({"metric": "l3"}, "unknown metric 'l3'"),
        ({"linkage": "wards"}, "unknown linkage 'wards'"),
        ({"metric": "cosine"}, "linkage 'ward' is defined for the metrics l2 and chord only"),
        (
            {"metric": "l1", "linkage": "centroid"},
            "linkage 'centroid' is defined for the metrics l2 and chord only",
        ),
        (
            {"metric": "l1", "linkage": "complete", "mask": "rotation"},
            "mask 'rotation' mixes coordinates, which changes l1 distances: use a permutation",
        ),
        ({"metric": "l1", "linkage": "complete", "mask": "haar"}, "mask 'haar' mixes coordinates"),
        ({"pre_rounds": 40}, "pre_rounds = 40 of 40 rounds"),
        ({"pre_rounds": -1}, "pre_rounds = -1"),
        ({"pre_rounds": 2.5}, "pre_rounds = 2.5"),
        ({"threshold": -1.0}, "threshold = -1.0 is no distance"),
        ({"threshold": float("nan")}, "threshold = nan is no distance"),
        ({"threshold": "3"}, "threshold = '3' is no distance"),
    ],
)
def test_what_cannot_work_is_refused_in_one_sentence(
    params: dict[str, Any], says: str, small: Federation
) -> None:
    with pytest.raises(UsageError, match=says) as caught:
        FLHC(**params).fit(small)
    assert "\n" not in str(caught.value)


def test_what_the_run_says_of_itself(small: Federation) -> None:
    fitted = FLHC(rounds=4, pre_rounds=2, threshold=0.0).fit(small)
    assert protocol_class("flhc") is FLHC
    assert [
        set(line) >= {"clustered", "merges", "threshold", "absent"} for line in fitted.history_
    ] == [False, False, True, False]
    assert fitted.history_[2]["clustered"] == [[i] for i in range(6)]
    assert len(fitted.history_[2]["merges"]) == 5
    assert any("distances" in seen for seen in fitted.disclosures().server)
    linkage = unpack(fitted.server_state_, FLHCState).linkage
    assert (
        linkage is not None
        and linkage.distance.shape == (6, 6)
        and linkage.merges.tolist() == fitted.history_[2]["merges"]
    )
