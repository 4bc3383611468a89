"""What an attack gets: views from runs and their folders, knowledge, and the truth for scorers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import FULL, build, two_clusters

import securecluster
from securecluster import Federation, open_transcript
from securecluster.attacks import views
from securecluster.attacks.experiments import tapped
from securecluster.attacks.views import knowledge_of, observed_updates, truth_of, view_of
from securecluster.errors import RunFolderError, UsageError
from securecluster.folders import run_folder
from securecluster.messaging.parties import AUTHORITY, SERVER, WIRE, client, lps
from securecluster.messaging.transcript import NAMING_METHODS, Transcript
from securecluster.parties.derived import initial_model
from securecluster.protections.registry import service_methods
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, OneShot, Settings

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(6, 30)


@pytest.fixture(scope="module")
def folder(federation: Federation, tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("run") / "run"
    FedAvg(**SMALL, mask="permutation").fit(federation, FULL, folder=target)
    return target


@pytest.fixture(scope="module")
def fitted(folder: Path) -> ClusteringProtocol:
    return securecluster.load(folder)


def frames(transcript: Transcript) -> list[Any]:
    found = []
    for message in transcript.seen_by(SERVER):
        delta = getattr(message.content, "delta", None)
        numbers = None if delta is None else delta.values.tolist()
        found.append((message.sender, message.method, message.verb, message.step, numbers))
    return found


def test_a_folders_transcript_is_opened_by_its_path_alone(
    folder: Path, fitted: ClusteringProtocol
) -> None:
    assert type(fitted) is FedAvg
    opened = frames(open_transcript(folder))
    assert opened == frames(open_transcript(str(folder))) == frames(fitted.transcript_)
    assert opened == frames(FedAvg.load(folder).transcript_)
    assert {row[2] for row in opened} == {"gather", "sum"}
    assert any(row[4] for row in opened)


def test_a_folder_without_what_was_asked_for_says_what_to_do(
    folder: Path, federation: Federation, tmp_path: Path
) -> None:
    FedAvg(**SMALL).fit(federation, Settings(transcript="sizes"), folder=tmp_path / "sizes")
    with pytest.raises(UsageError, match=r"transcript=.full., in Python with Settings\(transcri"):
        list(open_transcript(tmp_path / "sizes").seen_by(SERVER))
    with pytest.raises(UsageError, match=r"transcript=.full., in Python with Settings\(transcri"):
        view_of(securecluster.load(tmp_path / "sizes"))
    assert list(open_transcript(tmp_path / "sizes").seen_by(WIRE))
    FedAvg.load(folder).save(tmp_path / "saved")
    with pytest.raises(UsageError, match="written by save, which keeps no transcript"):
        open_transcript(tmp_path / "saved")
    with pytest.raises(UsageError, match="has no transcript: fit it with"):
        view_of(securecluster.load(tmp_path / "saved"))
    with pytest.raises(RunFolderError, match="holds no fitted protocol"):
        open_transcript(tmp_path)
    texts = {"config.json": run_folder.comparison_json(["cfl", "flhc"])}
    with run_folder.claimed(tmp_path / "several", False, "", texts):
        pass
    with pytest.raises(UsageError, match=r"holds several runs: .*several/cfl$"):
        open_transcript(tmp_path / "several")


def test_a_party_that_does_not_exist_is_refused_with_the_nearest_name(
    fitted: ClusteringProtocol,
) -> None:
    name = fitted.transcript_.names[3]
    steps = [message.step for message in view_of(fitted, name).messages()]
    assert steps == [message.step for message in view_of(fitted, 3).messages()] != []
    with pytest.raises(UsageError, match="did you mean 'server'"):
        view_of(fitted, "serve")
    with pytest.raises(UsageError, match=f"did you mean {name!r}"):
        view_of(fitted, name.upper() + "0")


def test_an_anonymous_view_names_nobody_and_links_no_calls(fitted: ClusteringProtocol) -> None:
    transcript = fitted.transcript_
    named = [m for m in transcript.seen_by(SERVER) if m.method not in NAMING_METHODS]
    hidden = list(transcript.seen_by(SERVER, anonymous=True, seed=5))
    assert len(named) == len(hidden)
    parties = {message.sender for message in hidden} | {message.receiver for message in hidden}
    assert {party.kind for party in parties} == {"server", "anonymous"}

    identities = transcript.identities(seed=5)
    uploads = [message for message in hidden if message.receiver == SERVER]
    labels = [message.sender.index for message in uploads]
    assert len(set(labels)) == len(labels), "no two calls share a label"
    assert {identities[label] for label in labels if label is not None} == set(range(6))
    # the truth behind the labels is who sent the frame
    rows = {
        (message.step, message.method, message.sender): message.content
        for message in named
        if message.receiver == SERVER
    }
    for message in uploads:
        assert message.sender.index is not None
        sender = client(identities[message.sender.index])
        content = rows[message.step, message.method, sender]
        for name, value in vars(content).items():
            if value is not None:
                assert torch.equal(value.values, getattr(message.content, name).values)


def test_the_order_of_anonymous_frames_says_nothing(fitted: ClusteringProtocol) -> None:
    orders = []
    for seed in range(3):
        identities = fitted.transcript_.identities(seed)
        order = []
        for message in fitted.transcript_.seen_by(SERVER, anonymous=True, seed=seed):
            if message.method == "contribute" and message.sender.kind == "anonymous":
                assert message.sender.index is not None
                order.append(identities[message.sender.index])
        orders.append((tuple(order[:6]), tuple(order[6:])))
    numbered = tuple(range(6))
    assert len({order for pair in orders for order in pair} | {numbered}) == 7


def test_an_observing_client_knows_itself(fitted: ClusteringProtocol) -> None:
    messages = list(fitted.transcript_.seen_by([SERVER, 2], anonymous=True))
    parties = {message.sender for message in messages}
    assert {party for party in parties if party.kind != "anonymous"} == {SERVER, client(2)}


def test_frames_that_name_clients_are_those_of_the_services() -> None:
    assert set(service_methods()) == NAMING_METHODS


def sums_of_frames(fitted: ClusteringProtocol, step: int) -> torch.Tensor:
    rows = [
        message.content.delta.values[0].double()
        for message in fitted.transcript_.seen_by(SERVER)
        if message.method == "contribute" and message.step == step and message.receiver == SERVER
    ]
    return torch.stack(rows).sum(0)


def sums_given(fitted: ClusteringProtocol) -> list[Any]:
    return [o for o in view_of(fitted).outcomes if o.method == "contribute"]


def test_a_view_has_the_sums_and_their_members(fitted: ClusteringProtocol) -> None:
    given = sums_given(fitted)
    assert [outcome.round for outcome in given] == [1, 2]
    for outcome in given:
        assert (outcome.reader, outcome.verb, outcome.groups) == (SERVER, "sum", (tuple(range(6)),))
        total = sums_of_frames(fitted, outcome.step)
        given_sum = outcome.content.delta.values[0].double()
        torch.testing.assert_close(given_sum, total, rtol=0, atol=1e-5)
    assert view_of(fitted, 3).outcomes == view_of(fitted, WIRE).outcomes == ()


def test_a_trusted_servers_sums_have_its_noise(federation: Federation) -> None:
    noisy = {"clip": 1.0, "noise": 2.0, "placement": "central"}
    fitted = FedAvg(**SMALL, **noisy).fit(federation, FULL)
    outcome = sums_given(fitted)[0]
    noise = outcome.content.delta.values[0].double() - sums_of_frames(fitted, outcome.step)
    assert float(noise.std()) == pytest.approx(2.0, rel=0.2)


def test_secure_sums_are_told_unmasked(federation: Federation) -> None:
    plain = FedAvg(**SMALL).fit(federation, FULL)
    secure = FedAvg(**SMALL, aggregation="secagg").fit(federation, FULL)
    for hidden, read in zip(sums_given(secure), sums_given(plain), strict=True):
        assert hidden.groups == read.groups
        difference = hidden.content.delta.values - read.content.delta.values
        assert float(difference.abs().max()) < 1e-3
    assert observed_updates(view_of(secure), knowledge_of(secure)) == []
    assert len(observed_updates(view_of(plain), knowledge_of(plain))) == 12


def test_pairs_give_r_and_local_servers_read_their_own_sums() -> None:
    clients = two_clusters(6, 30)
    fitted = build(OneShot, rounds=1, model="mlp-32").fit(clients, FULL)
    outcomes = fitted.verb_outcomes()
    (pairs,) = [outcome for outcome in outcomes if outcome.verb == "pairs"]
    rows = [
        next(iter(vars(message.content).values())).values[0]
        for message in fitted.transcript_.seen_by(SERVER)
        if message.method == pairs.method and message.receiver == SERVER
    ]
    square = torch.stack(rows)
    assert pairs.groups == (tuple(range(6)),)
    assert torch.equal(pairs.content, (square + square.T) / 2)
    hidden = [o for o in view_of(fitted, anonymous=True).outcomes if o.verb == "pairs"]
    assert sorted(hidden[0].content.flatten()) == sorted(pairs.content.flatten())
    assert not torch.equal(hidden[0].content, pairs.content)

    sums = [outcome for outcome in outcomes if outcome.verb == "sum"]
    readers = {outcome.reader for outcome in sums}
    assert lps(1) in readers <= {lps(0), lps(1)}, "a cluster of one sends nothing"
    for outcome in sums:
        for group in outcome.groups:
            assert {lps(int(fitted.labels_[member])) for member in group} <= {outcome.reader}
    assert {o.reader for o in view_of(fitted, lps(1)).outcomes} == {lps(1)}


@pytest.mark.always
def test_a_key_authority_reads_r_and_the_server_labels_alone() -> None:
    clients = two_clusters(6, 24)
    params: dict[str, Any] = {"rounds": 1, "model": "linear", "mask": "none", "sealed": False}
    plain = build(OneShot, **params).fit(clients, FULL)
    fitted, _ = tapped(build(OneShot, **params, relevance="ckks"), clients, FULL)
    methods = [message.method for message in fitted.transcript_.seen_by(AUTHORITY)]
    assert set(methods) == {"authority_key", "authority_pairs"}
    (found,) = view_of(fitted, AUTHORITY).outcomes
    (expected,) = [o for o in plain.verb_outcomes() if o.verb == "pairs"]
    assert (found.verb, found.method) == ("pairs", expected.method)
    assert found.groups == expected.groups == (tuple(range(6)),)
    apart = ~torch.eye(6, dtype=torch.bool)
    difference = (found.content - expected.content)[apart]
    # clients round to 2^-14 before they encrypt, so not even the authority reads finer numbers
    assert float(difference.abs().max()) <= 2**-15
    assert not [o for o in view_of(fitted).outcomes if o.verb == "pairs"]
    with pytest.raises(UsageError, match="no party authority"):
        view_of(plain, AUTHORITY)


def test_knowledge_has_the_secrets_of_colluders_alone(
    fitted: ClusteringProtocol, federation: Federation
) -> None:
    knowledge = knowledge_of(fitted, federation, colluders=[2])
    colluder = knowledge.colluders[2]
    assert set(colluder.secrets.seed) == set(colluder.secrets.private) == {2}
    assert np.array_equal(colluder.shard.x, federation.shards[2].x)
    assert set(knowledge.colluders) == {2}
    shared = set(fitted.kept_.clients.secrets.seed.values())
    assert set(colluder.secrets.seed.values()) == shared, "one colluder gives the mask away"
    assert colluder.secrets.seed[2].hex() not in repr(knowledge)
    secrets_of_run = fitted.kept_.clients.secrets
    assert set(secrets_of_run.private) == set(range(6)), "the run's own are left as they are"
    with pytest.raises(UsageError, match="no client 9"):
        knowledge_of(fitted, federation, colluders=[9])
    with pytest.raises(UsageError, match="give the federation"):
        knowledge_of(fitted, colluders=[1])


def test_the_secrets_of_secure_sums_are_told_apart_too(federation: Federation) -> None:
    secure = FedAvg(**SMALL, aggregation="secagg").fit(federation, FULL)
    alone = secure.secrets_of(4)
    assert set(alone.pairwise.private) == set(alone.records["secagg"]) == {4}
    everyones = secure.kept_.clients.secrets
    assert alone.pairwise.private[4] == everyones.pairwise.private[4]
    assert alone.records["secagg"][4] == everyones.records["secagg"][4]


def test_knowledge_has_the_public_start_and_layout(
    fitted: ClusteringProtocol, federation: Federation
) -> None:
    knowledge = knowledge_of(fitted)
    start = initial_model(fitted, federation).initial()
    assert torch.equal(knowledge.initial, start)
    assert knowledge.width == len(start) == knowledge.config["dimension"]
    parameters = knowledge.parameters(start[None])
    first, last = list(knowledge.slices.items())
    assert torch.equal(start[last[1]], parameters[last[0]][0])
    assert (first[1].start, first[1].stop, last[1].stop) == (0, last[1].start, len(start))
    wide = knowledge_of(CFL(**SMALL, mask="rotation").fit(federation, FULL))
    assert wide.width > wide.network.dimension
    assert parameters.keys() == wide.parameters(torch.zeros(wide.width)).keys()


def test_updates_are_read_without_their_weights(
    fitted: ClusteringProtocol, federation: Federation
) -> None:
    updates = observed_updates(view_of(fitted), knowledge_of(fitted))
    assert [update.size for update in updates] == [30.0] * 12
    total = torch.stack([update.row for update in updates[:6]]).sum(0) * 30
    given = sums_given(fitted)[0].content.delta.values[0]
    torch.testing.assert_close(total, given, rtol=0, atol=1e-4)


def test_truth_belongs_to_the_runs_own_clients(
    fitted: ClusteringProtocol, federation: Federation
) -> None:
    view = view_of(fitted, anonymous=True, seed=7)
    truth = truth_of(fitted, federation, view)
    assert truth.identities == fitted.transcript_.identities(7)
    assert truth.clusters == federation.truth
    assert truth.clusters is not None
    assert truth.label_counts(1).tolist() == np.bincount(federation.shards[1].y).tolist()
    assert truth_of(fitted, federation, view_of(fitted)).identities == {}
    with pytest.raises(UsageError, match="other clients than the run"):
        truth_of(fitted, federation.select([0, 1]), view)


def test_views_of_one_run_replay_its_server_once(monkeypatch: pytest.MonkeyPatch) -> None:
    fitted = FedAvg(**SMALL).fit(two_clusters(6, 24), FULL)
    replay = type(fitted.result_).verb_outcomes
    replays = []

    def counted(run: Any) -> Any:
        replays.append(run)
        return replay(run)

    monkeypatch.setattr(type(fitted.result_), "verb_outcomes", counted)
    assert len(view_of(fitted).outcomes) == len(view_of(fitted, anonymous=True).outcomes) > 0
    assert replays == [fitted.result_]
    # frames are kept, too, where a transcript is small
    assert view_of(fitted)._observed() is view_of(fitted)._observed()  # type: ignore[attr-defined]
    kept = [message.bytes for message in view_of(fitted).messages()]
    monkeypatch.setattr(views, "MOST_KEPT", 0)
    assert [message.bytes for message in view_of(fitted).messages()] == kept
    fitted.fit(two_clusters(6, 24), FULL)
    assert view_of(fitted).outcomes
    assert replays[1:] == [fitted.result_]
