"""One-shot clustering: relevance, who sees what, common layers, newcomers."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import cases
import numpy as np
import pytest
import torch

from securecluster import Federation, Iid, Tasks
from securecluster.errors import FrameError, ReplayError, UpdateError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import RELAY, Call, Picks, Rows, reply_header
from securecluster.messaging.parties import SERVER, WIRE, client, lps
from securecluster.messaging.transcript import Transcript
from securecluster.models.objectives import Language
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import OneShot, Settings
from securecluster.protocols.oneshot.client import OtherEigenvectors
from securecluster.protocols.oneshot.hierarchical_averaging import GPS, CommonDeltas
from securecluster.protocols.oneshot.server import OneShotState, agglomerate
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.run import Run
from securecluster.runtime.transport import InProcess, Recorded

FULL = Settings(transcript="full")
MASKS = ("none", "permutation", "signed-permutation", "rotation", "haar")


@pytest.fixture(scope="module")
def tasks() -> Federation:
    """Ten clients, digits 0–4 against 5–9, a tenth of their samples from the other task."""
    return Federation.simulate("digits", scenario=Tasks(), clients=10, samples=60, seed=0)


def oracle(federation: Federation, p: int) -> np.ndarray:
    """R by full decompositions and plain products (Ali & Arafa 2024, eq. 1–5, the root over p)."""
    flat = [s.x.reshape(len(s.y), -1).astype(np.float64) for s in federation.shards]
    grams = [x.T @ x / len(x) for x in flat]
    eigen = [np.linalg.eigh(g) for g in grams]
    r = np.zeros((len(grams), len(grams)))
    for i, (values, _) in enumerate(eigen):
        for j, (_, vectors) in enumerate(eigen):
            own, seen = values[::-1][:p], np.linalg.norm(grams[i] @ vectors[:, ::-1][:, :p], axis=0)
            r[i, j] = (
                1 if i == j else np.prod(np.minimum(own, seen) / np.maximum(own, seen)) ** (1 / p)
            )
    return (r + r.T) / 2


def served(
    made: OneShot, federation: Federation, lost: cases.Lost = cases.no_client
) -> OneShotState:
    state: OneShotState = cases.serve(made, federation, lost, Settings()).state
    return state


@pytest.mark.few(3)
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("mask", MASKS)
def test_relevance_is_that_of_full_decompositions_whatever_hides_the_eigenvectors(
    mask: str, sealed: bool, tasks: Federation
) -> None:
    made = OneShot(rounds=1, mask=mask, sealed=sealed, vectors=7, model="linear")
    r = served(made, tasks).relevance
    assert r is not None
    np.testing.assert_allclose(r.numpy(), oracle(tasks, 7), rtol=0, atol=1e-5)


@pytest.mark.parametrize("seed", cases.seeds(1, of=4))
@pytest.mark.parametrize("told", [{"tasks": 2}, {}, {"height": 0.2}])
def test_it_finds_the_tasks(told: dict[str, Any], seed: int) -> None:
    federation = Federation.simulate("digits", scenario=Tasks(), clients=10, samples=90, seed=seed)
    fitted = OneShot(rounds=1, **told).fit(federation)
    assert fitted.agreement_ is not None
    assert fitted.agreement_["exact"]


def test_clients_of_one_distribution_stay_together_and_t_clusters_are_made_where_t_is_given() -> (
    None
):
    federation = Federation.simulate("digits", scenario=Iid(), clients=12, samples=100, seed=0)
    assert set(OneShot(rounds=1).fit(federation).labels_) == {0}
    for count in (1, 3, 12):
        assert len(set(OneShot(rounds=1, tasks=count).fit(federation).labels_)) == count


@pytest.mark.parametrize("sealed", [True, False])
def test_each_server_sees_its_own_and_no_more(sealed: bool, tasks: Federation) -> None:
    fitted = OneShot(rounds=2, mask="permutation", sealed=sealed, tasks=2).fit(tasks, FULL)
    gps = list(fitted.transcript_.seen_by({SERVER}))
    assert {s.method for s in gps} == {
        "key_offer", "key_seal", "key_open", "eigen", "relevance", "mix",
    }  # fmt: skip
    for c in (0, 1):
        own = {client(i) for i in range(10) if fitted.labels_[i] == c}
        seen = list(fitted.transcript_.seen_by({lps(c)}))
        assert {s.method for s in seen} == {"contribute", "receive", "mix"}
        assert {p for s in seen for p in (s.sender, s.receiver)} == {lps(c), SERVER} | own
        sent = [s for s in seen if s.method == "mix"]
        assert [(s.sender, s.receiver) for s in sent] == [(lps(c), SERVER), (SERVER, lps(c))] * 2
        assert sent[0].content.deltas.values.shape == (1, 1, 64 * 64 + 64)
        assert sent[0].content.size is not None
        assert sent[1].content.size is None
        got = [
            s.content
            for s in seen
            if s.method == "contribute" and s.receiver == lps(c) and s.round == 1
        ]
        # what it tells the GPS follows from what it was sent
        total = sum(float(r.size.values[0]) for r in got)
        mean = torch.stack([r.delta.values[0, : 64 * 64 + 64] for r in got]).double().sum(0) / total
        assert float(sent[0].content.size.values[0, 0]) == total
        torch.testing.assert_close(
            sent[0].content.deltas.values[0, 0].double(), mean, rtol=0, atol=1e-6
        )
    mine = [s for s in fitted.transcript_.seen_by({client(3)}) if s.method == "contribute"]
    assert {p for s in mine for p in (s.sender, s.receiver)} == {
        client(3),
        lps(int(fitted.labels_[3])),
    }
    assert all(s.content is None for s in fitted.transcript_.seen_by({WIRE}))
    kind = next(
        s.content for s in gps if s.method == "eigen" and s.receiver == SERVER
    ).vectors.values.dtype
    assert kind == (torch.uint8 if sealed else torch.float32)
    fields = {(e.method, e.fields, e.reader, e.seen) for e in fitted.ledger_.events}
    rest = {
        ("relevance", ("row",), "server", False),
        ("contribute", ("delta",), "lps", True),
        ("contribute", ("size",), "lps", False),
    }
    assert fields == {("eigen", ("vectors",), "server", not sealed), *rest}


def test_bytes_between_servers_and_of_eigenvectors_are_those_of_real_frames(
    tasks: Federation,
) -> None:
    fitted = OneShot(rounds=5, gps_every=2, mask="rotation", tasks=2).fit(tasks, FULL)
    total = 0
    for n, entry in enumerate(fitted.transcript_.entries):
        call, answer = fitted.transcript_.content(n)
        if entry.verb == RELAY:
            for k in range(len(call.to)):
                frames = (
                    wire.encode(call.header(k), call.query, k),
                    wire.encode(reply_header(call.header(k)), answer.reply, k),
                )
                assert tuple(map(len, frames)) == (entry.up[k], entry.down[k])
                assert wire.decode(frames[0], CommonDeltas)[0].sender == f"lps/{call.to[k]}"
                total += sum(map(len, frames))
    assert fitted.bytes_["servers"] == fitted.bytes_["by_message"]["mix"]["servers"] == total > 0
    assert fitted.bytes_["up"] == sum(
        sum(e.up) for e in fitted.transcript_.entries if e.verb != RELAY
    )
    eigen, relevance = (
        next(e for e in fitted.transcript_.entries if e.method == name)
        for name in ("eigen", "relevance")
    )
    numbers = 4 * 5 * 64 + 16  # p·D float32, sealed
    assert all(numbers < up < numbers + 400 for up in eigen.up)
    assert all(9 * numbers < down < 9 * (numbers + 8) + 600 for down in relevance.down)
    assert max(relevance.up) < 4 * 10 + 400


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "common", "mask"),
    [
        *(("mlp", "auto", mask) for mask in MASKS[:4]),
        (None, "0,2", MASKS[1]),
        *(cases.exhaustive(None, "0,2", mask) for mask in (MASKS[0], *MASKS[2:4])),
    ],
)
def test_common_layers_become_the_weighted_average_and_the_rest_stays(
    mask: str, model: str | None, common: str
) -> None:
    federation = Federation.simulate(
        "digits", scenario=Tasks(sizes=(3, 1)), clients=8, samples=60, seed=1
    )
    net = _net() if model is None else model
    shared = 64 * 64 + 64 if model else 64 * 20 + 20 + 20 * 12 + 12
    settings = Settings(dtype="float64")
    for every in (1, 3):
        apart = OneShot(rounds=every, mask=mask, model=net, common="none", tasks=2).fit(
            federation, settings
        )
        mixed = OneShot(
            rounds=every, gps_every=every, mask=mask, model=net, common=common, tasks=2
        ).fit(federation, settings)
        sizes = np.array([len(s.y) for s in federation.shards], dtype=np.float64)
        assert len(set(sizes)) > 1
        models = apart.client_models_.values.numpy()
        expected = models.copy()
        expected[:, :shared] = np.average(models[:, :shared], axis=0, weights=sizes)
        np.testing.assert_allclose(mixed.client_models_.values.numpy(), expected, rtol=0, atol=1e-9)


def _net() -> torch.nn.Module:
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        parts = [
            torch.nn.Flatten(),
            torch.nn.Linear(64, 20),
            torch.nn.Linear(20, 12),
            torch.nn.Tanh(),
            torch.nn.Linear(12, 10),
        ]
        return torch.nn.Sequential(torch.nn.Sequential(*parts[:2]), torch.nn.Identity(), *parts[2:])


def test_the_last_round_mixes_too_and_a_round_nobody_replied_in_does_no_harm(
    tasks: Federation,
) -> None:
    made = OneShot(rounds=5, gps_every=2, mask="permutation", tasks=2)
    lost: Callable[[Call], set[int]] = lambda call: set(call.to) if call.round == 4 else set()  # noqa: E731
    state = served(made, tasks, lost)
    assert not state.pending
    fitted = made.fit(tasks)
    one, two = (m["1.weight"] for m in fitted.models_)
    torch.testing.assert_close(one, two)
    assert not torch.allclose(fitted.models_[0]["3.weight"], fitted.models_[1]["3.weight"])
    assert len([e for e in fitted.transcript_.entries if e.method == "mix"]) == 3


def test_partial_participation_weighs_by_those_who_took_part() -> None:
    sums = GPS().mix(
        CommonDeltas(
            Rows(torch.tensor([[[1.0], [5.0]], [[4.0], [7.0]]])),
            Rows(torch.tensor([[1.0, 0.0], [2.0, 3.0]])),
        )
    )
    assert sums.deltas.values.tolist() == [[[3.0], [7.0]]] * 2
    nobody = GPS().mix(CommonDeltas(Rows(torch.ones(2, 1, 3)), Rows(torch.zeros(2, 1))))
    assert not bool(nobody.deltas.values.any())


@pytest.mark.few(2)
@pytest.mark.parametrize("mask", ["none", "permutation"])
@pytest.mark.parametrize("every", [1, 2])
def test_what_a_single_member_sent_stays_with_its_lps(
    every: int, mask: str, tasks: Federation
) -> None:
    made = OneShot(rounds=2, gps_every=every, mask=mask, tasks=2)
    first = list(np.flatnonzero(made.fit(tasks).labels_ == 0))
    endpoint, transcript = build_client(made, tasks, Settings()), Transcript("full")

    def lost(call: Call) -> set[int]:
        return set(first[1:]) if (call.method, call.round) == ("contribute", 2) else set()

    net = build_network(
        made, Recorded(InProcess(endpoint.answer, lost), transcript), made.config(tasks, "float32")
    )
    state = made.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    zero, one = (
        [
            s.content
            for s in transcript.seen_by({lps(c)})
            if s.method == "mix" and s.receiver == SERVER
        ][-1]
        for c in (0, 1)
    )
    assert zero.size.values[0, -1] == 0 and not bool(zero.deltas.values[0, -1].any())
    assert one.size.values[0, -1] > 0 and bool(one.deltas.values[0, -1].any())
    models = made.observer.final_models(endpoint.client, state).values
    # the other's, all the same
    torch.testing.assert_close(models[:, : 64 * 64 + 64], models[:1, : 64 * 64 + 64].expand(10, -1))


def test_what_is_read_beside_replies_is_said() -> None:
    assert any("over how many samples" in text for text in OneShot().disclosures().server)
    assert any("the other's" in text for text in OneShot().disclosures().lps)
    assert any(
        "newcomers" in text and "each client's cluster" in text
        for text in OneShot().disclosures().clients
    )


def test_a_lone_client_trains_alone_and_none_of_its_layers_leaves() -> None:
    federation = Federation.simulate("digits", scenario=Iid(), clients=5, samples=60, seed=0)
    x = np.zeros_like(federation.shards[4].x)
    x[:, 0, 0, :4] = 1
    odd = {str(k): (s.x if k < 4 else x, s.y) for k, s in enumerate(federation.shards)}
    given = Federation.from_arrays(odd, seed=0)
    fitted = OneShot(rounds=3, tasks=2).fit(given, FULL)
    assert list(fitted.labels_) == [0, 0, 0, 0, 1]
    assert {s.method for s in fitted.transcript_.seen_by({lps(1)})} == {"train_locally"}
    assert not fitted.bytes_["servers"]


def test_who_never_replies_before_training_joins_the_largest_cluster(tasks: Federation) -> None:
    made = OneShot(rounds=2, tasks=2)
    most = int(np.argmax(np.bincount(tasks.truth or ())))
    odd = next(i for i in range(10) if tasks.truth is not None and tasks.truth[i] != most)
    for method in ("eigen", "relevance"):
        state = served(
            made, tasks, lambda call, method=method: {odd} if call.method == method else set()
        )  # type: ignore[misc]
        assert state.linkage is not None
        assert state.found is not None
        assert odd not in state.linkage.ids
        assert len(state.found.vectors) == 9
        assert state.labels[odd] == int(
            np.argmax(np.bincount([state.labels[i] for i in state.linkage.ids]))
        )
    with pytest.raises(UpdateError, match="1 client"):
        served(made, tasks, lambda call: set(call.to) - {3} if call.method == "eigen" else set())
    asked = list[tuple[int, ...]]()

    def once(call: Call) -> set[int]:
        asked.extend([call.to] if call.method == "eigen" else [])
        return {2, 5} if call.method == "eigen" and len(asked) == 1 else set()

    state = served(made, tasks, once)
    assert asked == [tuple(range(10)), (2, 5)]
    assert state.linkage is not None
    assert state.linkage.ids == list(range(10))


@pytest.mark.parametrize("method", ["key_offer", "key_open"])
def test_who_misses_the_key_is_asked_for_it_again_before_the_clusters_are_made(
    method: str, tasks: Federation
) -> None:
    times: dict[str, int] = {}

    def lost(call: Call) -> set[int]:
        times[call.method] = times.get(call.method, 0) + 1
        return set(range(1, 10)) if call.method == method and times[method] < 5 else set()

    found = served(OneShot(rounds=1, tasks=2), tasks, lost)
    assert found.linkage is not None and found.linkage.ids == list(range(10))


@pytest.mark.parametrize("p", [70, 10**30])
def test_more_eigenvectors_than_numbers_a_sample_are_not_sent(p: int, tasks: Federation) -> None:
    found = served(OneShot(rounds=1, tasks=2, sealed=False, vectors=p), tasks).found
    assert found is not None and found.vectors.shape == (10, 64, 64)


def test_newcomers_who_map_with_other_weights_are_refused(tasks: Federation) -> None:
    fitted = OneShot(rounds=1, features="pca", public="digits", components=8, tasks=2).fit(
        tasks.select(range(8))
    )
    config = fitted.kept_.learned.config
    config["phi"] = config["phi"] | {"samples": "others"}
    with pytest.raises(UsageError, match="give the same map, data or weights"):
        fitted.join(tasks.select([8, 9]))


@pytest.mark.few(2)
@pytest.mark.parametrize("sealed", [True, False])
@pytest.mark.parametrize("mask", ["none", "rotation"])
def test_newcomers_name_a_cluster_and_nothing_else(mask: str, sealed: bool) -> None:
    whole = Federation.simulate("digits", scenario=Tasks(), clients=16, samples=80, seed=2)
    fitted = OneShot(rounds=2, mask=mask, sealed=sealed, tasks=2).fit(whole.select(range(10)), FULL)
    assert whole.truth is not None
    of = {int(c): whole.truth[i] for i, c in enumerate(fitted.labels_)}
    assert [of[int(c)] for c in fitted.join(whole.select(range(10, 16)))] == list(whole.truth[10:])
    replies = [
        s
        for s in fitted.joined_.transcript.seen_by({SERVER})
        if s.method == "choose" and s.receiver == SERVER
    ]
    assert len(replies) == 6
    assert all(
        set(vars(s.content)) == {"cluster"} and s.content.cluster.values.shape == (1,)
        for s in replies
    )
    net = build_network(
        fitted,
        InProcess(lambda call: pytest.fail("nobody answers"), lambda call: set(call.to)),
        fitted.kept_.learned.config,
    )
    with pytest.raises(UpdateError, match="10, 11 do not reply"):
        fitted.assign_newcomers(net, fitted.state_, [10, 11])


def test_altered_eigenvectors_are_refused_by_the_clients(tasks: Federation) -> None:
    made = OneShot(rounds=1, tasks=2)
    endpoint = build_client(made, tasks, Settings())

    def meddle(call: Call) -> Any:
        if call.method == "relevance":
            call.query.vectors.table[4, 9] ^= 1
        return endpoint.answer(call)

    net = build_network(made, InProcess(meddle), made.config(tasks, "float32"))
    with pytest.raises(FrameError, match="client 4 sealed cannot be opened"):
        made.run_server(net, Run())


def test_a_gps_that_does_something_else_does_not_replay(
    tasks: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = OneShot(rounds=4, gps_every=2, tasks=2)
    fitted, config = (
        made.fit(tasks, Settings(transcript="full", dropout=0.1)),
        made.config(tasks, "float32"),
    )
    assert made.replay(fitted.transcript_, config) == fitted.server_state_
    inner = GPS.mix

    def other(self: GPS, query: CommonDeltas) -> CommonDeltas:
        found = inner(self, query)
        return CommonDeltas(Rows(found.deltas.table + 1e-6, found.deltas.index), None)

    other.__name__, other.__release__ = "mix", inner.__release__  # type: ignore[attr-defined]
    monkeypatch.setattr(GPS, "mix", other)
    with pytest.raises(ReplayError, match="reply to mix"):
        made.replay(fitted.transcript_, config)


def test_features_of_ones_own_are_asked_for_when_a_run_is_loaded(
    tasks: Federation, tmp_path: Path
) -> None:
    phi = torch.nn.Sequential(torch.nn.Flatten(), torch.nn.Linear(64, 30))
    fitted = OneShot(rounds=1, features=phi, tasks=2).fit(tasks.select(range(8)))
    fitted.save(tmp_path)
    new = tasks.select([8, 9])
    assert list(OneShot.load(tmp_path, features=phi).join(new)) == list(fitted.join(new))
    with pytest.raises(UsageError, match="load it with features=…"):
        OneShot.load(tmp_path)
    with pytest.raises(UsageError, match="not those by which"):
        OneShot.load(tmp_path, features=torch.nn.Flatten())
    with pytest.raises(UsageError, match="not those by which"):
        OneShot.load(tmp_path, features="identity")
    OneShot(rounds=1, tasks=2).fit(tasks).save(tmp_path / "other")
    with pytest.raises(UsageError, match="leave out all but the model"):
        OneShot.load(tmp_path / "other", features=phi)


@pytest.mark.parametrize(
    ("params", "word"),
    [
        ({"tasks": 2, "height": 0.1}, "give one of them"),
        ({"tasks": 0}, "tasks = 0"),
        ({"tasks": 11}, "11 clusters cannot be made of 10 clients"),
        ({"height": 1.5}, "height = 1.5"),
        ({"height": "x"}, "height = 'x'"),
        ({"vectors": 0}, "vectors = 0"),
        ({"gps_every": 0.5}, "gps_every = 0.5"),
        ({"floor": 1.0}, "floor = 1.0"),
        ({"features": "convv"}, "convv"),
        ({"features": "pca"}, "public"),
        ({"common": "3"}, "must name the first layers"),
        ({"common": "1,9"}, "must name the first layers"),
        ({"common": 1}, "common = 1 is no text"),
        ({"sealed": "no"}, "sealed = 'no' is a choice"),
    ],
)
def test_what_cannot_work_is_refused(params: dict[str, Any], word: str, tasks: Federation) -> None:
    with pytest.raises(UsageError, match=word):
        OneShot(rounds=1, **params).fit(tasks)


def test_layers_without_names_cannot_be_named() -> None:
    rng = np.random.default_rng(0)
    federation = Federation.from_arrays(
        {f"{k}": (rng.random((9, 6)), rng.integers(0, 3, 9)) for k in range(3)}, seed=0
    )
    with pytest.raises(UsageError, match="some have none, so give auto or none"):
        OneShot(rounds=1, model=torch.nn.Linear(6, 3), common="weight").fit(federation)


def test_text_is_refused() -> None:
    draw = np.random.default_rng(0)
    texts = {f"c{k}": (t := draw.integers(0, 9, (20, 7)), np.roll(t, -1, 1)) for k in range(4)}
    with pytest.raises(UsageError, match="text is not: choose another protocol"):
        OneShot(rounds=1, tasks=2).fit(Federation.from_arrays(texts, objective=Language(), seed=0))


def test_tasks_are_merged_by_their_average_relevance() -> None:
    places = np.array([0.0, 0.1, 0.22, 0.35, 0.6, 0.72])  # a chain, at whose end two are apart
    relevance = torch.from_numpy(1 - np.abs(places[:, None] - places))
    found = agglomerate(relevance, 3, None)
    assert found.labels == [0, 0, 1, 1, 2, 2]
    assert found.merges[-1, 2] == pytest.approx(np.abs(places[:4, None] - places[4:]).mean())


def test_a_newcomer_joins_the_task_whose_members_are_most_relevant_on_average(
    tasks: Federation, monkeypatch: pytest.MonkeyPatch
) -> None:
    newcomers: Any = build_client(OneShot(), tasks, Settings()).client
    relevances = torch.tensor([0.9, 0.1, 0.6, 0.6])
    monkeypatch.setattr(newcomers, "_compared", lambda *_: [([0, 1, 2, 3], relevances)])
    rows = ((0, 1, 2, 3),)
    query = OtherEigenvectors(
        Picks(torch.zeros(4, 1, 1), rows),
        Picks(torch.arange(4), rows),
        Picks(torch.tensor([0, 0, 1, 1]), rows),
        1,
    )
    choice = newcomers.choose(CallContext((9,), (9,), 1, 1), query)
    assert choice.cluster.values.tolist() == [1]
