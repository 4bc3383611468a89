"""The key authority on a machine of its own: the run is the run in one process, and it refuses what
an authority in one process refuses, also after it was killed.
"""

from __future__ import annotations

import dataclasses
import json
import stat
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from securecluster import Federation, Settings
from securecluster.core.serialization import unpack
from securecluster.errors import FrameError, PolicyError, RefusedError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Response
from securecluster.nodes.agreement import agreed_among
from securecluster.nodes.authority_node import LOG, AuthorityNode, counted
from securecluster.nodes.node import Node
from securecluster.nodes.party import STATE, Party
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.derived import call_types
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER, Identity, Roster
from securecluster.protections.encryption.authority import AuthorityState
from securecluster.protocols import SRFCA, FedAvg, OneShot
from securecluster.results.fitted import FittedRun
from securecluster.runtime.transport import Framed, Transport, WithAuthority

CLIENTS = 4
KEY = bytes(range(32))
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
METHODS: dict[str, Any] = {
    "oneshot, ckks": OneShot(**SMALL, relevance="ckks"),
    "oneshot, ckks with R": OneShot(**SMALL, relevance="ckks", relevance_release="matrix"),
    "oneshot, ckks and secagg": OneShot(**SMALL, relevance="ckks", aggregation="secagg"),
}
PAIRS = METHODS["oneshot, ckks"]


class World:
    """Nodes of clients and of an authority, each in a folder of its own."""

    def __init__(self, made: Any, federation: Federation, folder: Path) -> None:
        self.made = made
        self.federation = federation
        self.identities = [Identity.generate() for _ in range(CLIENTS + 1)]
        keys = {i: one.public for i, one in enumerate(self.identities[:-1])}
        self.roster = Roster({**keys, AUTHORITY_NUMBER: self.identities[-1].public})
        self.folder = folder
        self.proposal = Proposal.of(made, federation.facts, "float32", self.roster)
        self.sent: list[bytes] = []  # to the authority
        self.proposal = agreed_among(self.proposal, self.roster, self.parties())

    def authority(self, **options: Any) -> AuthorityNode:
        """The authority as a process has it that was started now."""
        return AuthorityNode(
            self.made,
            self.folder / "authority",
            identity=self.identities[-1],
            roster=self.roster,
            **options,
        )

    def node(self, i: int) -> Node:
        return Node(
            self.made,
            self.federation.select([i]),
            self.folder / f"node-{i}",
            identity=self.identities[i],
            roster=self.roster,
        )

    def parties(self) -> list[Party]:
        return [*(self.node(i) for i in range(CLIENTS)), self.authority()]

    def ask_authority(self, frame: bytes) -> bytes:
        self.sent.append(frame)
        return self.authority().answer(frame)

    def replies(self, name: str) -> type:
        reply: type = call_types(self.made, name)[1]
        return reply

    def run(
        self,
        door: Callable[[bytes], bytes] | None = None,
        wrap: Callable[[Transport], Transport] = lambda transport: transport,
    ) -> FittedRun:
        """The run of a server, over nodes that are started for each message."""

        def to_client(i: int, frame: bytes) -> bytes:
            return self.node(i).answer(frame)

        doors = {i: partial(to_client, i) for i in range(CLIENTS)}
        inner = Framed(doors, self.replies)
        transport = wrap(WithAuthority(inner, door or self.ask_authority, self.replies))
        run = ServerRun(self.made, self.proposal.config, transport, key=KEY, roster=self.roster)
        return run.carried_out()

    def state(self) -> AuthorityState:
        (path,) = (self.folder / "authority").glob(f"run-*/{STATE}")
        state: AuthorityState = unpack(path.read_bytes(), AuthorityState)
        return state


@pytest.mark.few(2)
@pytest.mark.parametrize("name", METHODS)
def test_a_run_with_an_authority_s_node_is_the_run_in_this_process(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    made = METHODS[name]
    world = World(made, federation, tmp_path)
    served = world.run()
    drawn = dataclasses.replace(federation, seed=world.proposal.config["seed"])
    whole = made.fit(drawn, Settings(threads=1, transcript="full"))
    assert served.labels_.tolist() == whole.labels_.tolist()
    assert served.bytes_ == whole.bytes_
    events = [(e.method, e.ids, e.round) for e in whole.ledger_.events]
    assert [(e.method, e.ids, e.round) for e in served.ledger_.events] == events
    # R where it is released, and where labels are, these
    for ours, theirs in zip(told_of_pairs(served), told_of_pairs(whole), strict=True):
        np.testing.assert_array_equal(ours, theirs)
    asked = {request: n for (_, request, _), n in counted(tmp_path / "authority").items()}
    assert asked == {"authority_key": 1, "authority_pairs": 1}


def told_of_pairs(fitted: FittedRun) -> list[Any]:
    """What the authority told the server of R, as it came."""
    transcript = fitted.transcript_
    calls = [transcript.content(k) for k in range(transcript.count)]
    return [
        response.reply.numbers.values.numpy()
        for call, response in calls
        if call.method == "authority_pairs"
    ]


def test_only_the_owner_reads_the_folder_and_its_log_names_no_row(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(PAIRS, federation, tmp_path)
    world.run()
    folder = tmp_path / "authority"
    (run,) = world.authority().runs()
    for path in (folder, folder / run):
        assert stat.S_IMODE(path.stat().st_mode) == 0o700
    for name in (f"{run}/agreed.json", f"{run}/{STATE}", LOG):
        assert stat.S_IMODE((folder / name).stat().st_mode) == 0o600
    lines = [json.loads(line) for line in (folder / LOG).read_text().splitlines()]
    assert len(lines) == len(world.sent)
    assert {line["outcome"] for line in lines} == {"answered"}
    assert {line["clients"] for line in lines} <= {"", "0-3"}
    assert set(lines[0]) == {"run", "round", "step", "method", "clients", "outcome"}


# --- what it agrees to ---


def test_an_authority_takes_part_in_runs_of_its_own_protocol_alone(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(PAIRS, federation, tmp_path)
    facts = federation.facts
    others = [
        OneShot(**{**SMALL, "rounds": 3}, relevance="ckks"),
        OneShot(**SMALL, relevance="ckks", aggregation="secagg"),
        OneShot(**SMALL, relevance="ckks", relevance_release="matrix"),
    ]
    for other in others:
        proposal = Proposal.of(other, facts, "float32", world.roster)
        with pytest.raises(PolicyError, match="and this client's protocol has"):
            world.authority().agree(proposal.packed())
    plain = Proposal.of(OneShot(**SMALL), facts, "float32", world.roster)
    with pytest.raises(PolicyError, match="a run without a key authority"):
        world.authority().agree(plain.packed())
    srfca = SRFCA(**SMALL, relevance="ckks", aggregation="secagg")
    other_method = Proposal.of(srfca, facts, "float32", world.roster)
    with pytest.raises(PolicyError, match="proposes srfca, and this client runs oneshot"):
        world.authority().agree(other_method.packed())
    with pytest.raises(PolicyError, match="at least 8 clients"):
        world.authority(policy=Policy(least_clients=8)).agree(world.proposal.packed())
    # other keys on the roster: the authority would verify what nobody signed
    keys = {i: Identity.generate().public for i in range(CLIENTS)}
    strangers = Roster({**keys, AUTHORITY_NUMBER: world.identities[-1].public})
    proposal = Proposal.of(PAIRS, facts, "float32", strangers)
    with pytest.raises(PolicyError, match="proposes roster"):
        world.authority().agree(proposal.packed())
    for junk in (b"", b"{}", world.proposal.packed().replace(b'"shape"', b'"form"')):
        with pytest.raises((FrameError, PolicyError)):
            world.authority().agree(junk)


def test_facts_that_clients_do_not_have_give_no_run(federation: Federation, tmp_path: Path) -> None:
    """The authority has no data, and takes the clients' signatures for their form."""
    world = World(PAIRS, federation, tmp_path)
    facts = dataclasses.replace(federation.facts, classes=11)
    proposal = Proposal.of(PAIRS, facts, "float32", world.roster)
    with pytest.raises(PolicyError, match="without nonces of its clients"):
        world.authority().agree(proposal.packed())
    # and with those that the clients opened for other facts
    drawn = {name: world.proposal.config[name] for name in ("nonces", "proposed_seed", "seed")}
    forged = dataclasses.replace(proposal, config={**proposal.config, **drawn})
    with pytest.raises(PolicyError, match="client 0 did not sign these nonces for this run"):
        world.authority().agree(forged.packed())
    assert len(world.authority().runs()) == 1


def test_an_authority_that_is_not_on_the_roster_is_a_mistake(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(PAIRS, federation, tmp_path)
    alone = Roster({i: one.public for i, one in enumerate(world.identities[:-1])})
    with pytest.raises(UsageError, match="the roster has no key of it: add the line"):
        Proposal.of(PAIRS, federation.facts, "float32", alone)
    with pytest.raises(UsageError, match="as client 1, and not as the key authority"):
        AuthorityNode(PAIRS, tmp_path, identity=world.identities[1], roster=world.roster)
    with pytest.raises(UsageError, match="no key of this identity"):
        AuthorityNode(PAIRS, tmp_path, identity=Identity.generate(), roster=world.roster)
    advice = "runs have one with relevance ckks$"
    with pytest.raises(UsageError, match=f"fedavg has no key authority with these.*{advice}"):
        AuthorityNode(FedAvg(**SMALL), tmp_path)


# --- what it refuses, as in one process ---


class Asking:
    """Transport that changes what the server asks the authority for."""

    def __init__(self, inner: Transport, change: Callable[[Call], Call]) -> None:
        self.inner = inner
        self.change = change

    def exchange(self, call: Call) -> Response:
        return self.inner.exchange(self.change(call))

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("then", ["", "identity", "spectral"])
def test_the_node_tells_labels_and_no_r(then: str, federation: Federation, tmp_path: Path) -> None:
    def asks_for_r(call: Call) -> Call:
        if call.method != "authority_pairs":
            return call
        query = dataclasses.replace(call.query, then=then)
        return dataclasses.replace(call, query=query)

    world = World(PAIRS, federation, tmp_path)
    with pytest.raises(RefusedError, match=r"authority refused authority_pairs.* a rule of"):
        world.run(wrap=lambda transport: Asking(transport, asks_for_r))
    assert ("rule", 1) in {
        (outcome, n) for (_, _, outcome), n in counted(tmp_path / "authority").items()
    }


@pytest.mark.parametrize("name", ["oneshot, ckks", "oneshot, ckks with R"])
def test_a_sum_over_fewer_clients_is_refused_after_the_authority_was_started_again(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    world = World(METHODS[name], federation, tmp_path)
    world.run()
    method = "authority_pairs"
    frame = next(frame for frame in world.sent if wire.peek(frame).method == method)
    header, query = wire.decode(frame, call_types(world.made, method)[0])
    # the same sum again is told again: a reply that was lost costs nothing
    assert b"!refused" not in world.authority().answer(frame)
    for survivors in ("0-2", "0", "0-4"):
        fewer = wire.encode(header, dataclasses.replace(query, survivors=survivors))
        assert b"!refused" in world.authority().answer(fewer)
    stranger = wire.encode(dataclasses.replace(header, sender="client/1"), query)
    assert b"!refused" in world.authority().answer(stranger)


def test_a_refused_sum_stays_recorded_over_a_restart(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is recorded before it is decrypted counts, also where the decryption then fails."""
    from securecluster.protections.encryption import authority as module

    world = World(PAIRS, federation, tmp_path)
    failed: list[bytes] = []

    def failing(*args: Any) -> Any:
        raise FrameError("a decrypted sum lies between two integers")

    def door(frame: bytes) -> bytes:
        if wire.peek(frame).method == "authority_pairs" and not failed:
            failed.append(frame)
            with monkeypatch.context() as broken:
                broken.setattr(module, "unpack", failing)
                return world.ask_authority(frame)
        return world.ask_authority(frame)

    with pytest.raises(RefusedError):
        world.run(door)
    state = world.state()
    ((recorded,),) = state.sums.values()
    assert recorded.survivors == "0-3" and state.decryptions >= 1


def test_a_state_that_cannot_be_written_lets_no_sum_leave(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(PAIRS, federation, tmp_path)
    living = world.authority()

    def full(*args: Any) -> Any:
        raise OSError(28, "No space left on device")

    def door(frame: bytes) -> bytes:
        before = [path.read_bytes() for path in (tmp_path / "authority").glob(f"run-*/{STATE}")]
        with monkeypatch.context() as broken:
            broken.setattr(AuthorityNode, "_write_state", full)
            refusal = living.answer(frame)
        assert b"!refused" in refusal and b"No space" not in refusal
        after = [path.read_bytes() for path in (tmp_path / "authority").glob(f"run-*/{STATE}")]
        assert before == after
        reply = living.answer(frame)
        assert b"!refused" not in reply
        return reply

    served = world.run(door)
    assert served.labels_.tolist() == [0] * CLIENTS


def test_an_authority_that_is_away_ends_the_run_by_a_sentence(
    federation: Federation, tmp_path: Path
) -> None:
    def away(frame: bytes) -> bytes:
        raise ConnectionError

    with pytest.raises(FrameError, match="the key authority does not reply: start it"):
        World(PAIRS, federation, tmp_path).run(away)
