"""What a node answers is on its disk first, and a run on nodes is the run in one process."""

from __future__ import annotations

import itertools
import shutil
import stat
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from threading import Thread
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, Settings
from securecluster.core import atomic_files
from securecluster.errors import (
    FrameError,
    PolicyError,
    RefusedError,
    RunFolderError,
    SecureClusterWarning,
    UsageError,
)
from securecluster.messaging.transcript import Transcript
from securecluster.nodes import party
from securecluster.nodes.agreement import agreed_among
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.dp.budget import Budget
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster
from securecluster.protocols import CFL, FedAvg, OneShot
from securecluster.protocols.common.client import TrainingClient
from securecluster.runtime.endpoint import Endpoint
from securecluster.runtime.transport import Framed, Replay

CLIENTS = 4
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
# whose replies depend on no key: secure sums are exact; test_every_node.py has all others
EQUAL = {
    "fedavg": FedAvg(**SMALL),
    "fedavg, momentum kept": FedAvg(**SMALL, momentum=0.9, keep_momentum=True),
    "fedavg, secagg": FedAvg(**SMALL, aggregation="secagg"),
    "cfl, sketch and secagg": CFL(**SMALL, sketch=64, aggregation="secagg"),
}
NOISY = FedAvg(**SMALL, clip=1.0, noise=1.0)


@pytest.fixture(scope="module")
def enrolled() -> tuple[list[Identity], Roster]:
    """Clients and, last, a key authority, of which most runs have no need."""
    identities = [Identity.generate() for _ in range(CLIENTS + 1)]
    keys = {i: one.public for i, one in enumerate(identities[:-1])}
    return identities, Roster({**keys, AUTHORITY_NUMBER: identities[-1].public})


Enrolled = tuple[list[Identity], Roster]


def nodes_of(
    made: Any, federation: Federation, enrolled: Enrolled, folder: Path, **options: Any
) -> list[Node]:
    identities, roster = enrolled
    return [
        Node(
            made,
            federation.select([i]),
            folder / f"node-{i}",
            identity=identities[i],
            roster=roster,
            **options,
        )
        for i in range(CLIENTS)
    ]


def serve(
    made: Any,
    federation: Federation,
    nodes: list[Node],
    roster: Roster | None,
    door: Callable[[Node, bytes], bytes] = Node.answer,
    **options: Any,
) -> ServerHalf:
    """Run the server over nodes, which all agree first, and return its half after the run."""
    proposal = Proposal.of(made, federation.facts, "float32", roster)
    proposal = agreed_among(proposal, roster, nodes)
    doors = {node.number: lambda frame, node=node: door(node, frame) for node in nodes}
    transport = Framed(doors, lambda name: call_types(made, name)[1])
    half = ServerHalf.over(transport, made, proposal.config, Transcript("full"), **options)
    half.state = half.final_state(half.started())  # type: ignore[attr-defined]
    return half


def in_this_process(made: Any, federation: Federation, half: ServerHalf) -> Any:
    """Run the same in this process, with the seed that the clients of a run on nodes drew."""
    drawn = replace(federation, seed=half.net.agreed["seed"])
    return made.fit(drawn, Settings(threads=1))


def rebuilt(node: Node, frame: bytes) -> bytes:
    """Answer a frame by a new object, as a process does that was started for it."""
    again = Node(
        node.method,
        node._data,
        node.folder,
        identity=node._identity,
        roster=node._roster,
        policy=node.policy,
    )
    return again.answer(frame)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.filterwarnings("ignore:on their own test samples")  # after a short run
@pytest.mark.parametrize("name", EQUAL)
def test_a_run_on_nodes_that_are_started_for_each_message_is_the_run_in_this_process(
    name: str, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = EQUAL[name]
    half = serve(
        made, federation, nodes_of(made, federation, enrolled, tmp_path), enrolled[1], rebuilt
    )
    whole = in_this_process(made, federation, half)
    assert list(half.state.labels) == list(whole.state_.labels)  # type: ignore[attr-defined]
    sent = [entry.method for entry in half.transcript.entries]
    assert sent == [entry.method for entry in whole.transcript_.entries]
    events = half.net.state.ledger.events
    assert [(e.method, e.ids, e.round) for e in events] == [
        (e.method, e.ids, e.round) for e in whole.ledger_.events
    ]


@pytest.mark.parametrize("name", ["cfl, sketch and secagg", "fedavg, momentum kept"])
def test_two_processes_take_turns_and_build_each_endpoint_once(
    name: str,
    federation: Federation,
    enrolled: Enrolled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made = EQUAL[name]
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    others = nodes_of(made, federation, enrolled, tmp_path)
    built: list[int] = []
    endpoint = Node._endpoint

    def counted(node: Node, config: Any) -> Endpoint[Any]:
        built.append(node.number)
        return endpoint(node, config)

    monkeypatch.setattr(Node, "_endpoint", counted)
    turns = itertools.cycle([nodes, nodes, others])

    def in_turn(node: Node, frame: bytes) -> bytes:
        return next(turns)[node.number].answer(frame)

    half = serve(made, federation, nodes, enrolled[1], in_turn)
    whole = in_this_process(made, federation, half)
    assert sorted(built) == sorted([*range(CLIENTS)] * 2)
    for i, pair in enumerate(zip(nodes, others, strict=True)):
        last = max(pair, key=lambda node: next(iter(node._running.values())).stamp[1])  # type: ignore[index]
        (running,) = last._running.values()
        found = running.endpoint.client.models.row(0).numpy()
        np.testing.assert_array_equal(found, whole.client_models_.row(i).numpy())


@pytest.mark.parametrize("scaling", ["client", (-3, 3)])
def test_a_node_has_the_module_of_its_client_and_prepares_alike(
    scaling: Any, enrolled: Enrolled, tmp_path: Path
) -> None:
    draw = np.random.default_rng(0)
    sites = [
        (np.where(draw.random((30, 3)) < 0.1, np.nan, 2.0), [0, 1] * 15) for _ in range(CLIENTS)
    ]
    sites = [(x * draw.normal(size=x.shape) + k, y) for k, (x, y) in enumerate(sites)]
    data = Federation.from_arrays(sites, scaling=scaling, prepare="auto", classes=2, seed=0)
    nodes = nodes_of(made := EQUAL["fedavg, secagg"], data, enrolled, tmp_path)
    half = serve(made, data, nodes, enrolled[1])
    whole = in_this_process(made, data, half)
    rows = np.where(draw.random((20, 3)) < 0.2, np.nan, draw.normal(size=(20, 3)))
    for i, node in enumerate(nodes):
        (run,) = node._running
        answers = node.module_of(run.encode())(torch.as_tensor(rows)).argmax(1).tolist()
        assert answers == whole.predict_samples(str(i), rows).tolist()


def test_only_the_owner_reads_the_folder(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    nodes = nodes_of(NOISY, federation, enrolled, tmp_path)
    serve(NOISY, federation, nodes, enrolled[1])
    (run,) = nodes[0].runs()
    names = [f"{run}/agreed.json", f"{run}/state.safetensors", "ledger-client.jsonl"]
    for path in [nodes[0].folder, nodes[0].folder / run]:
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in names:
        assert stat.S_IMODE((nodes[0].folder / name).stat().st_mode) == 0o600


# --- the ledger of a node ---


def test_a_node_prices_its_own_releases_as_the_server_does(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    nodes = nodes_of(NOISY, federation, enrolled, tmp_path)
    half = serve(NOISY, federation, nodes, enrolled[1])
    expected = half.net.state.ledger.price(1e-5).epsilon
    for node in nodes:
        assert node.spent() == {"client": pytest.approx(expected)}
    # a second run adds to it, and a node that was never asked has spent nothing
    more = FedAvg(**{**SMALL, "rounds": 1}, clip=1.0, noise=1.0)
    again = nodes_of(more, federation, enrolled, tmp_path)
    serve(more, federation, again, enrolled[1])
    assert again[0].spent("client")["client"] > expected
    assert len(again[0].runs()) == 2
    fresh = Node(NOISY, federation.select([0]), tmp_path / "fresh", number=0)
    assert fresh.spent() == {} and fresh.spent("example") == {"example": 0}


def test_a_run_without_noise_costs_everything(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    nodes = nodes_of(EQUAL["fedavg"], federation, enrolled, tmp_path)
    serve(EQUAL["fedavg"], federation, nodes, enrolled[1])
    assert nodes[0].spent() == {"client": float("inf")}


def test_an_owner_s_epsilon_ends_the_run_at_its_node(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    policy = Policy(most_epsilon=6.0, unit="client")
    nodes = nodes_of(NOISY, federation, enrolled, tmp_path, policy=policy)
    warned = pytest.warns(SecureClusterWarning, match="owner's privacy budget")
    # the second round would cost too much, and without anybody the run does not go on
    sentence = "^all clients refuse, contribute of round 2 for instance: .* owner's privacy budget"
    with warned, pytest.raises(RefusedError, match=sentence):
        serve(NOISY, federation, nodes, enrolled[1], rebuilt)
    assert all(0 < node.spent()["client"] <= 6.0 for node in nodes)


@pytest.mark.always
def test_a_target_holds_over_restarts_of_the_node(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    params = {**SMALL, "clip": 1.0, "target_epsilon": 4.0, "aggregation": "plain"}
    made = FedAvg(**params)
    greedy = FedAvg(**{**params, "rounds": 6})
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    proposal = Proposal.of(made, federation.facts, "float32", enrolled[1])
    proposal = agreed_among(proposal, enrolled[1], nodes)
    doors = {i: lambda frame, node=node: rebuilt(node, frame) for i, node in enumerate(nodes)}
    transport = Framed(doors, lambda name: call_types(made, name)[1])
    # a server that goes on for more rounds than the run has
    half = ServerHalf.over(transport, greedy, proposal.config, Transcript("full"))
    with pytest.raises(RefusedError, match="exceed the run's target epsilon"):
        half.final_state(half.started())
    assert all(node.spent()["client"] <= 4.0 for node in nodes)


# --- faults ---


@pytest.mark.always
def test_a_node_that_dies_before_its_reply_gives_the_same_reply_when_it_is_asked_again(
    federation: Federation, enrolled: Enrolled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = NOISY
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    replies: list[bytes] = []

    def twice(node: Node, frame: bytes) -> bytes:
        first, second = rebuilt(node, frame), rebuilt(node, frame)
        replies.append(first)
        assert first == second
        return second

    half = serve(made, federation, nodes, enrolled[1], twice)
    assert len(replies) >= 3 * CLIENTS
    expected = half.net.state.ledger.price(1e-5).epsilon
    # what left twice was written once
    assert nodes[1].spent()["client"] == pytest.approx(expected)


@pytest.mark.parametrize("dies", ["before", "after"])
def test_a_state_that_cannot_be_written_lets_no_reply_leave(
    dies: str,
    federation: Federation,
    enrolled: Enrolled,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A full disk, or a kill before or after the state is on it."""
    made = NOISY
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    store = Node._store
    failures = []

    def failing(node: Node, run: str, running: Any) -> None:
        if dies == "after":
            store(node, run, running)
        failures.append(node.number)
        raise OSError(28, "No space left on device")

    def answer(node: Node, frame: bytes) -> bytes:
        with monkeypatch.context() as full:
            full.setattr(Node, "_store", failing)
            refusal = node.answer(frame)
        reply = node.answer(frame)
        assert b"!refused" in refusal and b"!refused" not in reply
        assert b"No space" not in refusal  # a code, and no text of an error
        return reply

    half = serve(made, federation, nodes, enrolled[1], answer)
    assert len(failures) >= 3 * CLIENTS
    (tmp_path / "b").mkdir()
    others = nodes_of(made, federation, enrolled, tmp_path / "b")
    plain = serve(made, federation, others, enrolled[1])
    counts = [len(run.net.state.ledger.events) for run in (half, plain)]
    assert counts[0] == counts[1]
    assert nodes[0].spent() == {"client": pytest.approx(half.net.state.ledger.price(1e-5).epsilon)}


def test_a_failure_half_way_changes_nothing(
    federation: Federation, enrolled: Enrolled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EQUAL["fedavg"]
    reply_frame = Endpoint.reply_frame

    def failing(endpoint: Any, frame: bytes) -> bytes:
        reply_frame(endpoint, frame)
        endpoint.client.models.table[:] = 9.0
        raise MemoryError

    def answer(node: Node, frame: bytes) -> bytes:
        with monkeypatch.context() as broken:
            broken.setattr(Endpoint, "reply_frame", failing)
            assert b"failed" in node.answer(frame)
        return node.answer(frame)

    nodes = nodes_of(made, federation, enrolled, tmp_path)
    half = serve(made, federation, nodes, enrolled[1], answer)
    whole = in_this_process(made, federation, half)
    found = [next(iter(node._running.values())).endpoint.client.models.row(0) for node in nodes]
    for i, row in enumerate(found):
        np.testing.assert_array_equal(row.numpy(), whole.client_models_.row(i).numpy())
    assert len(half.net.state.ledger.events) == len(whole.ledger_.events)


def test_two_messages_of_a_node_at_once_are_carried_out_one_after_another(
    federation: Federation, enrolled: Enrolled, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = EQUAL["fedavg"]
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    inside: list[int] = []
    together: list[int] = []
    state = TrainingClient.state

    def counting(client: Any, secrets: Any) -> Any:
        inside.append(1)
        together.append(len(inside))
        time.sleep(0.02)  # another one would come in now
        found = state(client, secrets)
        inside.pop()
        return found

    monkeypatch.setattr(TrainingClient, "state", counting)

    def parallel(node: Node, frame: bytes) -> bytes:
        replies: list[bytes] = []
        both = [Thread(target=lambda: replies.append(rebuilt(node, frame))) for _ in range(2)]
        for thread in both:
            thread.start()
        for thread in both:
            thread.join()
        assert replies[0] == replies[1]
        return replies[0]

    half = serve(made, federation, nodes, enrolled[1], parallel)
    assert max(together) == 1
    whole = in_this_process(made, federation, half)
    assert list(half.state.labels) == list(whole.labels_)  # type: ignore[attr-defined]


def test_what_the_node_did_not_agree_to_is_refused(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    nodes = nodes_of(NOISY, federation, enrolled, tmp_path)
    quiet = FedAvg(**SMALL, clip=1.0, noise=0.1)
    proposal = Proposal.of(quiet, federation.facts, "float32", enrolled[1])
    with pytest.raises(PolicyError, match=r"noise = 0\.1, and this client's protocol has 1\.0"):
        nodes[0].agree(proposal.packed())
    # and a server that goes on all the same reads a code
    doors = {node.number: node.answer for node in nodes}
    transport = Framed(doors, lambda name: call_types(quiet, name)[1])
    half = ServerHalf.over(transport, quiet, proposal.config, Transcript("full"))
    with pytest.raises(RefusedError, match="another configuration"):
        half.final_state(half.started())
    assert nodes[0].runs() == [] and nodes[0].spent() == {}


@pytest.mark.parametrize("frame", [b"", b"junk", b"\xff" * 100])
def test_a_frame_may_be_anything(
    frame: bytes, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    node = nodes_of(NOISY, federation, enrolled, tmp_path)[0]
    assert len(node.answer(frame)) < 300


def test_damage_in_the_folder_is_told_and_nothing_is_answered(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    nodes = nodes_of(NOISY, federation, enrolled, tmp_path)
    serve(NOISY, federation, nodes, enrolled[1])
    (run,) = nodes[0].runs()
    agreed = nodes[0].folder / run / "agreed.json"
    content = agreed.read_bytes()
    for damaged in (b"", content.replace(b'"noise": 1.0', b'"noise": 0.1')):
        agreed.write_bytes(damaged)
        with pytest.raises(RunFolderError, match="not what the node agreed to"):
            nodes[0]._agreed(run.removeprefix("run-"))
    ledger = nodes[0].folder / "ledger-client.jsonl"
    ledger.write_bytes(ledger.read_bytes()[5:])
    with pytest.raises(RunFolderError, match="restore it from a copy"):
        nodes[0].spent()


# --- the server ---


@pytest.mark.parametrize("dies", ["in a round", "between rounds"])
def test_a_server_that_is_killed_goes_on_over_the_same_nodes(
    dies: str, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = CFL(**{**SMALL, "rounds": 3}, sketch=64, aggregation="secagg")
    proposal = Proposal.of(made, federation.facts, "float32", enrolled[1])
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    proposal = agreed_among(proposal, enrolled[1], nodes)
    types = partial(call_types, made)
    names = [str(i) for i in range(CLIENTS)]
    folder = tmp_path / "server"
    asked: list[int] = []

    def half(limit: int) -> ServerHalf:
        def door(node: Node, frame: bytes) -> bytes:
            asked.append(node.number)
            if len(asked) == limit:
                raise KeyboardInterrupt
            return rebuilt(node, frame)

        doors = {node.number: partial(door, node) for node in nodes}
        frames = folder / "transcript"
        frames.mkdir(parents=True, exist_ok=True)
        transport = Framed(doors, lambda name: types(name)[1])
        transcript = Transcript("full", frames, types, names)
        return ServerHalf.over(transport, made, proposal.config, transcript)

    def stop(line: Any) -> None:
        if dies == "between rounds" and line["round"] == 2:
            raise KeyboardInterrupt

    first = half(30 if dies == "in a round" else 10**9)
    with pytest.raises(KeyboardInterrupt):
        first.final_state(first.started(folder, report=stop))
    second = half(10**9)
    run = second.started(folder)
    assert run.resumed
    state = second.final_state(run)
    whole = in_this_process(made, federation, second)
    assert list(state.labels) == list(whole.labels_)
    assert second.net.state.lost == {}
    events = [(e.method, e.ids, e.round) for e in whole.ledger_.events]
    assert [(e.method, e.ids, e.round) for e in second.net.state.ledger.events] == events
    assert [line["round"] for line in run.history] == [1, 2, 3]


def over_lenient(
    made: Any, doors: dict[int, Callable[[bytes], bytes]], config: Any, frames: Path
) -> ServerHalf:
    """Run a server that goes on without the clients that refuse."""
    types = partial(call_types, made)
    frames.mkdir()
    transport = Framed(doors, lambda name: types(name)[1], strict=False)
    transcript = Transcript("full", frames, types, [str(i) for i in range(CLIENTS)])
    half = ServerHalf.over(transport, made, config, transcript)
    half.state = half.final_state(half.started())  # type: ignore[attr-defined]
    return half


@pytest.mark.parametrize("aggregation", ["plain", "secagg"])
@pytest.mark.filterwarnings("ignore:client/3:securecluster.errors.SecureClusterWarning")
def test_who_refuses_is_not_lost_and_the_run_goes_on(
    aggregation: str, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = FedAvg(**SMALL, aggregation=aggregation)
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    proposal = Proposal.of(made, federation.facts, "float32", enrolled[1])
    proposal = agreed_among(proposal, enrolled[1], nodes)
    shutil.rmtree(nodes[3].folder / nodes[3].runs()[0])  # the last one has lost the run
    doors: dict[int, Callable[[bytes], bytes]] = {node.number: node.answer for node in nodes}
    half = over_lenient(made, doors, proposal.config, tmp_path / "frames")
    (client,) = half.net.state.refused
    (code,) = half.net.state.refused[3]
    assert (client, code) == (3, "run")
    # of its cohort, whose sum cannot be read without it
    cohorts = Deployment(made, proposal.config).cohorts()
    together = {}
    if cohorts is not None:
        (cohort,) = (one for one in cohorts.of(range(CLIENTS)) if 3 in one)
        together = {i: [1, 2] for i in cohort if i != 3}
    assert len(together) == {"plain": 0, "secagg": 1}[aggregation]
    assert half.net.state.lost == together
    assert half.state.labels == [0] * CLIENTS  # type: ignore[attr-defined]
    # the transcript has it, so that a replay ends in the same state
    refusals = {entry.refused for entry in half.transcript.entries if entry.refused}
    assert refusals == {((3, "run"),)}
    types = partial(call_types, made)
    names = [str(i) for i in range(CLIENTS)]
    read = Transcript.read("full", tmp_path / "frames", types, names)
    assert read.entries == half.transcript.entries
    again = ServerHalf.over(Replay(read), made, proposal.config, Transcript("none"))
    again.final_state(again.started())
    assert again.net.state.refused == half.net.state.refused
    assert again.net.state.lost == together


@pytest.mark.filterwarnings("ignore:.*:securecluster.errors.SecureClusterWarning")
@pytest.mark.parametrize("wrong", ["junk", "another request"])
def test_a_client_s_malformed_frame_refuses_that_client_and_not_the_run(
    wrong: str, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = EQUAL["fedavg"]
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    proposal = Proposal.of(made, federation.facts, "float32", enrolled[1])
    proposal = agreed_among(proposal, enrolled[1], nodes)
    sent: list[bytes] = []

    def forging(frame: bytes) -> bytes:
        sent.append(nodes[1].answer(frame))
        return b"junk" if wrong == "junk" else sent[0]

    doors: dict[int, Callable[[bytes], bytes]] = {node.number: node.answer for node in nodes}
    doors[1] = forging
    half = over_lenient(made, doors, proposal.config, tmp_path / "frames")
    assert list(half.net.state.refused) == [1] and set(half.net.state.refused[1]) == {"frame"}
    # a simulation ends, whose user is both sides
    strict = Framed(doors, lambda name: call_types(made, name)[1])
    again = ServerHalf.over(strict, made, proposal.config, Transcript("none"))
    for node in nodes:
        shutil.rmtree(node.folder / node.runs()[0])
        node.agree(proposal.packed())
    sent.clear()
    with pytest.raises(FrameError):
        again.final_state(again.started())


@pytest.mark.parametrize(
    ("made", "sentence"),
    [
        (FedAvg(**SMALL, clip=1.0, noise=1.0, placement="central"), "draws its noise by a key"),
        (OneShot(**SMALL, relevance="ckks"), "opens the ciphertexts"),
    ],
    ids=["central", "ckks"],
)
def test_a_server_with_secrets_has_a_key_of_its_own(
    made: Any, sentence: str, federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    with pytest.raises(UsageError, match=sentence):
        serve(made, federation, nodes_of(made, federation, enrolled, tmp_path), enrolled[1])


def test_a_trusted_server_s_noise_is_on_the_node_s_ledger(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = FedAvg(**SMALL, clip=1.0, noise=1.0, placement="central")
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    half = serve(made, federation, nodes, enrolled[1], rebuilt, key=bytes(range(32)))
    expected = half.net.state.ledger.price(1e-5).epsilon
    assert nodes[0].spent() == {"client": pytest.approx(expected)}


# --- who a node is ---


def test_a_node_knows_its_number_by_its_key(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    identities, roster = enrolled
    own = federation.select([2])
    assert Node(NOISY, own, tmp_path, identity=identities[2], roster=roster).number == 2
    with pytest.raises(UsageError, match="has this identity as client 2, and not 1"):
        Node(NOISY, own, tmp_path, identity=identities[2], roster=roster, number=1)
    with pytest.raises(UsageError, match="no key of this identity"):
        Node(NOISY, own, tmp_path, identity=Identity.generate(), roster=roster)
    with pytest.raises(UsageError, match="signs what it sends"):
        Node(NOISY, own, tmp_path, roster=roster)
    with pytest.raises(UsageError, match="give number"):
        Node(NOISY, own, tmp_path)
    with pytest.raises(UsageError, match="a node is one client"):
        Node(NOISY, federation, tmp_path, number=0)


def test_facts_have_the_number_of_samples_only_where_it_is_needed_and_allowed(
    federation: Federation, tmp_path: Path
) -> None:
    own = federation.select([0])
    example = FedAvg(**SMALL, clip=1.0, noise=1.0, dp_unit="example")

    def told(made: Any, allowed: bool) -> int | None:
        policy = Policy(samples=allowed)
        return Node(made, own, tmp_path, number=0, policy=policy).facts().samples

    assert told(NOISY, True) is None
    assert told(example, True) == 20
    assert told(example, False) is None


def test_another_process_that_keeps_the_folder_is_told(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(party, "SECONDS_FOR_LOCK", 0.1)
    first = Node(NOISY, federation.select([0]), tmp_path, number=0)
    second = Node(NOISY, federation.select([0]), tmp_path, number=0)
    told = pytest.raises(RunFolderError, match="another process has")
    with first._alone(), told, second._alone():
        raise AssertionError


def test_a_ledger_without_a_limit_is_a_budget_of_any_size(tmp_path: Path) -> None:
    budget = Budget(tmp_path / "ledger.jsonl", float("inf"))
    assert budget.spent == 0
    assert atomic_files.OWNER == 0o600


def test_no_run_has_a_folder_elsewhere(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    node = nodes_of(EQUAL["fedavg"], federation, enrolled, tmp_path)[0]
    for run in ("../other", "a/b", "", ".", "a\x00"):
        with pytest.raises(FrameError, match="agreed to no run"):
            node._folder_of(run)


def test_what_a_killed_node_left_half_written_is_removed_when_nobody_writes(
    federation: Federation, enrolled: Enrolled, tmp_path: Path
) -> None:
    made = EQUAL["fedavg"]
    nodes = nodes_of(made, federation, enrolled, tmp_path)
    serve(made, federation, nodes, enrolled[1])
    folder = nodes[0].folder
    (run,) = nodes[0].runs()
    whole = sorted(folder.rglob("*"))
    left = [
        folder / f"{name}.0123456789abcdef.tmp"
        for name in (f"{run}/.state.safetensors", f"{run}/.agreed.json", ".ledger-client.jsonl")
    ]
    others = [folder / name for name in (".notes.tmp", f"{run}/.mine.0123456789abcdef.tmp")]
    for path in (*left, *others):
        path.write_bytes(b"half")
    with nodes[1]._alone(), nodes[0]._alone():  # another process may be writing one of them
        nodes_of(made, federation, enrolled, tmp_path)
    assert all(path.exists() for path in left)
    nodes_of(made, federation, enrolled, tmp_path)
    assert sorted(folder.rglob("*")) == sorted([*whole, *others])
