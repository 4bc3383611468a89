"""SR-FCA: clusters without k, the algorithms against plain loops in float64, and what happens when
clients do not reply.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import cases
import numpy as np
import pytest
import torch
from cases import DOUBLE, serve
from scipy.spatial.distance import cdist
from scipy.stats import trim_mean
from sklearn.metrics import adjusted_rand_score

from securecluster import Federation, Iid, LabelSwap, Rotation
from securecluster.core.randomness import Randomness
from securecluster.data.scenarios import LabelPermutation
from securecluster.errors import FrameError, SecureClusterWarning, UpdateError, UsageError
from securecluster.messaging.messages import Call, Picks, Response, Rows, Shared
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import SRFCA, Local, Settings
from securecluster.protocols.srfca.client import RelayedModels, SRFCAClient
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import InProcess

FULL = Settings(transcript="full")


@pytest.fixture(scope="module")
def two() -> Federation:
    """Eight clients in two clusters, far apart."""
    return Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=8, samples=40, seed=0
    )


def overlapping(scenario: Any, share: float, seed: int) -> Federation:
    """Return 20 clients of digits in four clusters, who have a share of their samples from the
    other clusters.
    """
    plain = Federation.simulate("digits", scenario=Iid(), clients=20, seed=seed)
    rng = np.random.default_rng(seed)

    def changed(own: int, x: Any, y: Any) -> tuple[Any, Any]:
        other = (own + 1 + rng.integers(0, 3, len(y))) % 4
        cluster = np.where(rng.random(len(y)) < share, other, own)
        x, y = x.copy(), y.copy()
        for c in range(4):
            members = cluster == c
            x[members], y[members] = scenario.transform(
                c, x[members], y[members], 10, Randomness(seed)
            )
        return x, y

    pairs = list(zip(plain.names, plain.shards, strict=True))
    train = {name: changed(i % 4, shard.x, shard.y) for i, (name, shard) in enumerate(pairs)}
    test = {
        name: changed(i % 4, shard.x_test, shard.y_test) for i, (name, shard) in enumerate(pairs)
    }
    truth = {name: i % 4 for i, (name, _) in enumerate(pairs)}
    return Federation.from_arrays(train, test=test, truth=truth, classes=10, seed=seed)


def short(**params: Any) -> SRFCA:
    """Enough rounds for two clusters of rotated digits."""
    return SRFCA(
        **{"local_rounds": 8, "rounds": 3, "refine": 2, "model": "linear", "mask": "none", **params}
    )


def notes(fitted: SRFCA, name: str) -> list[Any]:
    return [line[name] for line in fitted.history_ if name in line]


FOUND = [
    (0, LabelSwap(), "loss"),
    (0, Rotation(), "l2"),
    cases.exhaustive(0, LabelSwap(), "l2"),
    cases.exhaustive(0, Rotation(), "loss"),
    cases.exhaustive(1, LabelSwap(), "loss"),
    cases.exhaustive(1, LabelSwap(), "l2"),
    cases.exhaustive(1, Rotation(), "loss"),
    cases.exhaustive(1, Rotation(), "l2"),
]


@pytest.mark.few(1)
@pytest.mark.parametrize(("seed", "scenario", "distance"), FOUND)
def test_the_clusters_are_found_without_their_number(
    seed: int, scenario: Any, distance: str
) -> None:
    fitted = SRFCA(distance=distance, rounds=3).fit(
        Federation.simulate("digits", scenario=scenario, seed=seed)
    )
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


@pytest.mark.exhaustive
@pytest.mark.parametrize("distance", ["loss", cases.exhaustive("l2")])
def test_clients_with_alike_data_are_one_cluster(distance: str) -> None:
    fitted = SRFCA(distance=distance, rounds=2).fit(
        Federation.simulate("digits", scenario=Iid(), seed=0)
    )
    assert list(fitted.labels_) == [0] * 20


VARIANTS: list[dict[str, Any]] = [
    {"trim": 0.3},
    {"distance": "l2"},
    {"distance": "l2", "trim": 0.3, "participation": 0.6},
    {"variant": "gradient", "lr": 0.5},
    {"radius": 2.0},
    {"participation": 0.5, "retrain": 2},
    {"sealed": True},
]


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        cases.exhaustive(params) if params in (VARIANTS[0], VARIANTS[4]) else params
        for params in VARIANTS
    ],
    ids=str,
)
def test_masked_equals_plain_in_every_variant(params: dict[str, Any], two: Federation) -> None:
    plain = short(**params).fit(two, DOUBLE)
    assert plain.agreement_ is not None and plain.agreement_["exact"]
    for mask in (
        ["signed-permutation"]
        if "trim" in params
        else ["haar"]
        if params == {"distance": "l2"}
        else ["permutation"]
    ):
        masked = short(**params, mask=mask).fit(two, DOUBLE)
        assert list(masked.labels_) == list(plain.labels_)
        torch.testing.assert_close(
            masked.client_models_.values, plain.client_models_.values, rtol=0, atol=1e-9
        )


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params",
    [
        # the rest are parts of these, or change nothing but how a client trains or who is near
        params if params in (VARIANTS[2], *VARIANTS[5:]) else cases.exhaustive(params)
        for params in VARIANTS
    ],
    ids=str,
)
def test_every_variant_replays_resumes_and_places_newcomers(
    params: dict[str, Any], two: Federation, tmp_path: Path
) -> None:
    made, settings = short(**params, mask="permutation"), Settings(transcript="full", dropout=0.1)
    whole = made.fit(two, settings)
    assert made.replay(whole.transcript_, made.config(two, "float32")) == whole.server_state_

    for stop in (8, 11):  # after ONE_SHOT, after a refinement
        with pytest.raises(KeyboardInterrupt):
            made.fit(two, settings, folder=tmp_path, report=cases.interrupt_after(stop))
    resumed = made.fit(two, settings, folder=tmp_path)
    assert resumed.transcript_.entries == whole.transcript_.entries
    assert torch.equal(resumed.client_models_.values, whole.client_models_.values)
    assert resumed.history_ == whole.history_
    fresh = Federation.simulate(
        "digits", scenario=Rotation(clusters=2), clients=6, samples=40, seed=0
    )
    cluster = dict(zip(two.truth or (), whole.labels_, strict=True))
    assert list(whole.join(fresh)) == [cluster[c] for c in fresh.truth or ()]
    told = {(e.method, e.verb) for e in whole.joined_.ledger.events}
    own = {"train_locally", "join"} if made.distance == "l2" else {"choose"}
    # what is trained alone stays there
    assert told == {(name, "gather") for name in own - {"train_locally"}}


def test_averages_are_unweighted_trimmed_means_from_the_first_weights(two: Federation) -> None:
    for trim in (0.0, 0.25):
        made = short(local_rounds=4, rounds=2, refine=1, trim=trim)
        fitted = made.fit(two, DOUBLE)
        cohort = build_client(made, two, DOUBLE).client.cohort
        theta, labels = cohort.start[None].repeat(8, 1), fitted.labels_
        plan = made.training.usual(made, {"lr": 0.2})
        for step in (7, 8):  # four calls to train alone, one to hand in, one to judge
            updates = cohort.train(Rows(theta), range(8), plan, step).numpy()
            means = [trim_mean(updates[labels == labels[i]], trim, axis=0) for i in range(8)]
            theta = theta + torch.as_tensor(np.stack(means))
        torch.testing.assert_close(fitted.client_models_.values, theta, rtol=0, atol=1e-9)


@pytest.mark.parametrize("average", ["auto", "weighted", "uniform"])
def test_clients_with_more_samples_count_more_unless_the_average_is_uniform(
    average: str, two: Federation
) -> None:
    kept = [10, 40, 20, 40, 40, 10, 40, 30]
    shards = [replace(s, x=s.x[:n], y=s.y[:n]) for s, n in zip(two.shards, kept, strict=True)]
    uneven = replace(two, shards=tuple(shards), recipe=None)
    made = short(local_rounds=2, rounds=1, refine=1, average=average, threshold=1e9, mask="none")
    with pytest.warns(SecureClusterWarning, match="joins all"):
        fitted = made.fit(uneven, DOUBLE)
    cohort = build_client(made, uneven, DOUBLE).client.cohort
    step = max(e.step for e in fitted.ledger_.events if e.method == "contribute")
    plan = made.training.usual(made, {"lr": 0.2})
    same_start = Rows(cohort.start[None].repeat(8, 1))
    updates = cohort.train(same_start, range(8), plan, step).numpy()
    weight = np.ones(8) if average == "uniform" else np.array(kept)
    mean = cohort.start + torch.as_tensor(np.average(updates, axis=0, weights=weight))
    torch.testing.assert_close(
        fitted.client_models_.values, mean[None].repeat(8, 1), rtol=0, atol=1e-9
    )
    told = "each client's number of samples" in fitted.disclosures().server
    assert told == (average != "uniform")


def test_trimmed_and_clipped_updates_count_the_same() -> None:
    assert SRFCA().weighted and SRFCA(average="weighted").weighted
    equal: list[dict[str, Any]] = [
        {"trim": 0.1},
        {"clip": 1.0},
        {"clip": 1.0, "dp_unit": "example"},
        {"average": "uniform"},
    ]
    assert not any(SRFCA(**params).weighted for params in equal)


@pytest.mark.parametrize("mask", ["none", cases.exhaustive("permutation"), "rotation"])
def test_the_l2_graph_is_that_of_the_models_that_clients_train_alone(
    mask: str, two: Federation
) -> None:
    fitted = short(distance="l2", mask=mask, quantile=0.4).fit(two, DOUBLE)
    # the same batches
    alone = Local(rounds=8, model="linear").fit(two, DOUBLE).client_models_.values.numpy()
    apart = cdist(alone, alone)[np.triu_indices(8, 1)]
    assert notes(fitted, "lambda") == [pytest.approx(np.quantile(apart, 0.4), rel=1e-9)]


@pytest.mark.exhaustive
@pytest.mark.few(1)
@pytest.mark.parametrize("distance", ["loss", "l2"])
def test_a_threshold_decides_how_many_clusters_there_are(distance: str, two: Federation) -> None:
    with pytest.warns(SecureClusterWarning, match="joins all 8"):
        assert len(set(short(distance=distance, threshold=1e6).fit(two).labels_)) == 1
    with pytest.warns(SecureClusterWarning, match="joins no 2 of the 8"):
        none = short(distance=distance, threshold=0.0).fit(two)  # no edge: everyone is one cluster
    assert list(none.labels_) == [0] * 8
    assert notes(none, "clustered")[0] == [list(range(8))]
    middle = notes(short(distance=distance).fit(two), "lambda")[0]
    given = short(distance=distance, threshold=middle, rounds=8).fit(two)
    assert adjusted_rand_score(two.truth or (), given.labels_) == 1
    assert notes(given, "lambda") == [middle]


@pytest.mark.parametrize(
    ("given", "told"),
    [({"threshold": 1e6}, "joins all 8"), ({"quantile": 0.0, "size": 3}, "joins no 3 of the 8")],
)
def test_a_given_threshold_that_tells_nothing_apart_warns_once(
    given: Any, told: str, two: Federation, tmp_path: Path
) -> None:
    made, settings = short(**given), Settings(transcript="full")
    with pytest.warns(SecureClusterWarning, match=told) as caught, pytest.raises(KeyboardInterrupt):
        made.fit(two, settings, folder=tmp_path / "r", report=cases.interrupt_after(8))
    sentence = str(caught[0].message)
    assert len(caught) == 1 and "try a threshold between" in sentence and "\n" not in sentence
    resumed = made.fit(two, settings, folder=tmp_path / "r")  # warnings are errors here
    assert made.replay(resumed.transcript_, made.config(two, "float32")) == resumed.server_state_


@pytest.mark.exhaustive
def test_clients_whose_samples_are_partly_others_keep_their_clusters() -> None:
    """Models trained alone on 40 % foreign samples lose more on each other than models of different
    clusters do later.
    """
    federation = overlapping(LabelPermutation(4), share=0.4, seed=0)
    fitted = SRFCA().fit(federation)
    assert fitted.agreement_ is not None and fitted.agreement_["exact"]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("clients", "distance"),
    [
        (4, "loss"), (8, "l2"), (20, "loss"), cases.exhaustive(4, "l2"),
        cases.exhaustive(8, "loss"), cases.exhaustive(20, "l2"),
    ],
)  # fmt: skip
def test_clients_with_alike_data_are_one_cluster_from_the_start(
    clients: int, distance: str
) -> None:
    federation = Federation.simulate("digits", scenario=Iid(), clients=clients, samples=60, seed=1)
    fitted = SRFCA(distance=distance, rounds=1, refine=1).fit(federation)
    assert notes(fitted, "clustered")[0] == [list(range(clients))]


def test_a_model_reaches_everyone_else_once_and_its_bytes_are_counted(two: Federation) -> None:
    row = 4 * (64 * 10 + 10)
    for params in ({}, {"sealed": True}):
        fitted = short(mask="permutation", **params).fit(two, FULL)
        down = fitted.bytes_["by_message"]["losses"]["down"]
        assert 0 < down - 8 * 7 * row < 8 * 900
        calls = [
            fitted.transcript_.content(k)[0]
            for k, e in enumerate(fitted.transcript_.entries)
            if e.method == "losses"
        ]
        assert len(calls) == 1
        for i, owners in zip(calls[0].to, calls[0].query.owner.picks, strict=True):
            assert [int(calls[0].query.owner.table[k]) for k in owners] == [
                j for j in range(8) if j != i
            ]
    assert "losses" not in short(distance="l2").fit(two).bytes_["by_message"]


@pytest.mark.always
def test_what_leaves_a_client(two: Federation) -> None:
    def told(**params: Any) -> set[tuple[str, str]]:
        return {
            (e.method, e.verb) for e in short(mask="permutation", **params).fit(two).ledger_.events
        }

    shared = {("contribute", "sum"), ("send_model", "gather"), ("post", "gather")}
    loss = {
        ("losses", "pairs"),
        ("known_losses", "sum"),
        ("choose", "gather"),
        ("cluster_losses", "sum"),
    }
    assert told() == shared | loss
    assert told(distance="l2") == shared
    assert told(trim=0.2) == shared - {("contribute", "sum")} | {("train", "gather")} | loss


def test_sealed_models_are_no_models_to_the_server(two: Federation) -> None:
    plain, sealed = (
        short(sealed=s).fit(two, Settings(transcript="full", dtype="float64"))
        for s in (False, True)
    )
    assert torch.equal(plain.client_models_.values, sealed.client_models_.values)
    sent = [
        f.transcript_.content(k)[1]
        for f in (plain, sealed)
        for k, e in enumerate(f.transcript_.entries)
        if e.method == "send_model"
    ]
    assert [answer.reply.delta.values.dtype for answer in sent] == [torch.float64, torch.uint8]
    assert [
        any("inner products" in text for text in short(sealed=s).disclosures().server)
        for s in (False, True)
    ] == [True, False]


@pytest.mark.parametrize(
    ("distance", "mask"),
    [
        ("loss", "none"),
        ("l2", "permutation"),
        cases.exhaustive("loss", "permutation"),
        cases.exhaustive("l2", "none"),
    ],
)
def test_who_never_hands_in_is_served_in_the_end(distance: str, mask: str, two: Federation) -> None:
    made = short(distance=distance, mask=mask)
    state, endpoint, net, transcript = serve(
        made, two, lambda call: {3} if call.method == "send_model" else set()
    )
    assert sum(e.method == "send_model" for e in transcript.entries) == 5 and net.state.lost == {
        3: [8]
    }
    kept = [i for i in range(8) if i != 3]
    assert (
        adjusted_rand_score([(two.truth or ())[i] for i in kept], [state.labels[i] for i in kept])
        == 1
    )
    if distance == "loss":  # it says itself which cluster fits its samples
        assert adjusted_rand_score(two.truth or (), state.labels) == 1
    peer = next(i for i in kept if state.labels[i] == state.labels[3])
    models = made.observer.final_models(endpoint.client, state)
    assert torch.equal(models.row(3), models.row(peer))
    asked = {e.method: e.to for e in transcript.entries if e.method in ("losses", "known_losses")}
    assert all(3 not in to for to in asked.values())


def test_who_has_no_cluster_waits_with_its_own_model_until_one_is_nearest(two: Federation) -> None:
    made = short()
    silent: Callable[[Call], set[int]] = lambda call: {3} if call.method == "losses" else set()  # noqa: E731
    seen: list[tuple[list[int], Any]] = []
    endpoint = build_client(made, two, DOUBLE)
    net = build_network(made, InProcess(endpoint.answer, silent), made.config(two, "float64"))

    def observe(state: Any) -> dict[str, Any]:
        seen.append(
            (state.labels, made.observer.models_after_round(endpoint.client, state).row(3).clone())
        )
        return {}

    state = made.run_server(
        net, Run(observe=observe, begin=lambda number: setattr(net, "round", number))
    )
    alone = Local(rounds=8, model="linear").fit(two, DOUBLE).client_models_.row(3)
    assert [labels.count(labels[3]) for labels, _ in seen] == [1] * 10 + [4] * 4
    torch.testing.assert_close(
        torch.stack([model for _, model in seen[7:10]]), alone.expand(3, -1), rtol=0, atol=1e-9
    )
    assert adjusted_rand_score(two.truth or (), state.labels) == 1


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "params", [{}, {"mask": "permutation"}, {"radius": 2.0}, {"trim": 0.2}], ids=str
)
def test_who_misses_rounds_of_a_refinement_catches_up(
    params: dict[str, Any], two: Federation
) -> None:
    made = short(**params)
    for rounds in ((9, 10), (11, 12)):
        state, endpoint, net, _ = serve(
            made, two, lambda call, rounds=rounds: {2} if call.round in rounds else set()
        )
        assert net.state.lost == {2: list(rounds)} and not state.outbox.lagging_clients()
        assert adjusted_rand_score(two.truth or (), state.labels) == 1
        models = made.observer.final_models(endpoint.client, state)
        assert all(
            torch.equal(models.row(i), models.row(2))
            for i in range(8)
            if state.labels[i] == state.labels[2]
        )


def test_nobody_replies_to_anything_that_refines(two: Federation) -> None:
    silence: Callable[[Call], set[int]] = lambda call: (  # noqa: E731
        set(range(8)) if call.method == "contribute" else set()
    )
    made = short()
    state, endpoint, *_ = serve(made, two, silence)
    assert adjusted_rand_score(two.truth or (), state.labels) == 1  # those of ONE_SHOT
    assert (
        not len(state.models.table)
        and made.observer.final_models(endpoint.client, state).values.isfinite().all()
    )
    nothing, *_ = serve(made, two, lambda call: set(range(8)))
    assert list(nothing.labels) == [0] * 8


def test_nobody_hands_in_a_model_and_everyone_is_one_cluster(two: Federation) -> None:
    for distance in ("loss", "l2"):
        made = short(distance=distance)
        state, endpoint, *_ = serve(
            made, two, lambda call: set(call.to) if call.method == "send_model" else set()
        )
        assert state.clusters == [0] * 8
        assert len(made.observer.final_models(endpoint.client, state).table) == 1


@pytest.mark.parametrize("mask", ["none", "permutation"])
def test_a_refinement_that_nobody_replies_in_leaves_the_models_of_the_one_before(
    mask: str, two: Federation
) -> None:
    made, once = short(mask=mask), short(mask=mask, refine=1)
    silent: Callable[[Call], set[int]] = lambda call: (  # noqa: E731
        {*call.to} if call.method == "contribute" and call.round > 11 else set()
    )
    (state, endpoint, *_), (before, other, *_) = serve(made, two, silent), serve(once, two)
    assert state.clusters == before.clusters and not state.outbox.lagging_clients()
    torch.testing.assert_close(
        made.observer.final_models(endpoint.client, state).values,
        once.observer.final_models(other.client, before).values,
        rtol=0,
        atol=1e-12,
    )


def test_newcomers_choose_among_the_clusters_whose_model_came(two: Federation) -> None:
    made = short(mask="permutation", retrain=1)
    first = {i for i, c in enumerate(made.fit(two, DOUBLE).labels_) if c == 0}
    state, _, net, _ = serve(
        made,
        two,
        lambda call: first if call.method == "post" and call.round > made.total_rounds else set(),
    )
    assert state.models.kept == [1]
    assert made.assign_newcomers(net, state, [0, 7]) == [1, 1]


def test_the_losses_of_a_single_client_go_into_no_mean(two: Federation) -> None:
    made = short()
    found = made.fit(two, DOUBLE).labels_
    first = [i for i in range(8) if found[i] == 0]
    state, *_, transcript = serve(
        made,
        two,
        lambda call: set(first[1:]) if call.method in ("known_losses", "cluster_losses") else set(),
    )
    told = [
        transcript.content(k)[0].query.others.values
        for k, e in enumerate(transcript.entries)
        if e.method == "choose"
    ]
    assert [bool(others[:, c].isnan().all()) for others in told for c in (0, 1)] == [
        True,
        False,
    ] * 2
    assert list(state.labels) == list(found)


def test_newcomers_that_cannot_be_placed_are_an_error(
    two: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    fitted = short().fit(two)
    gather = ServerChannel.gather

    def silent(net: ServerChannel, method: Any, query: Any, to: Any, **rest: Any) -> Any:
        monkeypatch.setattr(net, "_carried", lambda call: Response((), None))
        return gather(net, method, query, to, **rest)

    with monkeypatch.context() as patch:
        patch.setattr(ServerChannel, "gather", silent)
        with pytest.raises(UpdateError, match="do not reply"):
            fitted.join(two)
    state, _, net, _ = serve(short(), two, lambda call: set(range(8)))
    with pytest.raises(UsageError, match="no member of any cluster posted its model"):
        short().assign_newcomers(net, state, [8])


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        ({"distance": "cosine"}, "unknown distance"),
        ({"variant": "sgd"}, "unknown variant"),
        ({"size": 1}, "size = 1 of .* from 2"),
        ({"size": 9}, "size = 9 of .* to that of clients"),
        ({"refine": 0}, "refine = 0"),
        ({"local_rounds": 0}, "local_rounds = 0"),
        ({"retrain": -1}, "retrain = -1"),
        ({"refine": 1.5}, "refine = 1.5"),
        ({"trim": 0.5}, "trim = 0.5"),
        ({"radius": float("nan")}, "radius = nan"),
        ({"threshold": "x"}, "no distance"),
        ({"quantile": 2}, "no share"),
        ({"threshold": 1, "quantile": 0.2}, "one of them"),
        ({"trim": 0.1, "mask": "rotation"}, "mixes coordinates"),
        ({"trim": 0.1, "mask": "haar"}, "mixes coordinates"),
        ({"sealed": True, "distance": "l2"}, "must read them"),
        ({"rounds": 0}, "rounds = 0"),
        ({"average": "median"}, "unknown average"),
        ({"average": "weighted", "trim": 0.1}, "count the same"),
        ({"average": "weighted", "clip": 1.0, "dp_unit": "example"}, "count the same"),
    ],
)
def test_what_is_not_possible_is_refused_in_one_sentence(
    wrong: dict[str, Any], told: str, two: Federation
) -> None:
    with pytest.raises(UsageError, match=told):
        short(**wrong).fit(two)


def test_what_the_plain_sum_and_the_relay_show_is_said() -> None:
    assert any("plain sum" in text and "losses" in text for text in SRFCA().disclosures().server)
    assert any("goes to every client" in text for text in SRFCA().disclosures().server)
    assert any("one mask" in text for text in SRFCA(distance="l2").disclosures().server)
    assert any("one by one" in text for text in SRFCA(trim=0.1).disclosures().server)
    assert any("how well its own" in text for text in SRFCA().disclosures().clients)
    assert SRFCA(distance="l2").disclosures().clients == ["newcomers only: all clusters' models"]


@pytest.mark.parametrize(
    ("order", "owners", "words"),
    [
        ([2, 0, 1, 1], [0, 1], "order has a client twice"),
        ([0, 1], [0, 1], "order has a client twice, or lacks the one that is asked"),
        ([2, 0, 1], [0, 0], "owner has a client twice"),
        ([2, 0, 1], [0, 3], "owner has a client twice, or one that is not in the order"),
    ],
)
def test_a_client_evaluates_each_model_of_those_in_the_order_once(
    order: list[int], owners: list[int], words: str
) -> None:
    def query(order: list[int], owners: list[int]) -> RelayedModels:
        picks = Picks(torch.tensor(owners), (tuple(range(len(owners))),))
        return RelayedModels(picks, picks, Shared(torch.tensor(order)), 4, 1)

    asked: Any = SimpleNamespace(ids=(2,))
    unused: Any = None
    SRFCAClient._check_relay(unused, asked, query([2, 0, 1], [0, 1]))
    with pytest.raises(FrameError, match=words):
        SRFCAClient._check_relay(unused, asked, query(order, owners))
