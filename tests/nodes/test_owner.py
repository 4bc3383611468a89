"""What the owner of a node decides holds while a run goes on: policies, revoked runs, scores."""

from __future__ import annotations

import itertools
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, Settings
from securecluster.data.facts import ClientFacts, agree
from securecluster.errors import (
    BudgetError,
    FrameError,
    OwnerPolicyError,
    PolicyError,
    ProposalError,
    RefusedError,
    RevokedRunError,
    UnknownRunError,
    UsageError,
)
from securecluster.messaging.messages import Picks, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.nodes import hello, party
from securecluster.nodes.agreement import agreed_among
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.policy_file import PolicyFile
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types, initial_model
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.protocols import IFCA, FedAvg, OneShot
from securecluster.protocols.common.averages.averaging import SumClient
from securecluster.protocols.common.messages import AverageDeltas
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import Framed

CLIENTS = 4
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
PLAIN = FedAvg(**SMALL)
SECURE = FedAvg(**SMALL, aggregation="secagg", cohort_size=0, mask="none")
NOISY = FedAvg(**SMALL, clip=1.0, noise=1.0)
OPEN = Policy(roster=False)


class World:
    """A server and its clients' nodes, in one process."""

    def __init__(self, made: Any, federation: Federation, folder: Path, **options: Any) -> None:
        self.made = made
        self.federation = federation
        self.folder = folder
        self.options = {"policy": OPEN, **options}
        self.nodes = [self.node(i) for i in range(CLIENTS)]
        self.proposal = Proposal.of(made, federation.facts, "float32", None)

    def node(self, i: int, **options: Any) -> Node:
        given = {**self.options, **options}
        own = self.federation.select([i])
        return Node(self.made, own, self.folder / f"n{i}", number=i, durable=False, **given)

    def agreed(self) -> str:
        (run,) = {node.agree(self.proposal.packed()) for node in self.nodes}
        return run

    def half(self, door: Callable[[Node, bytes], bytes] = Node.answer) -> ServerHalf:
        doors = {n.number: lambda frame, n=n: door(n, frame) for n in self.nodes}
        transport = Framed(doors, lambda name: call_types(self.made, name)[1], strict=False)
        return ServerHalf.over(transport, self.made, self.proposal.config, Transcript("none"))

    def served(self, door: Callable[[Node, bytes], bytes] = Node.answer) -> Any:
        half = self.half(door)
        return half.final_state(half.started())


# --- a policy that changes ---

STRICTER = [
    {"protocols": ["cfl"]},
    {"masks": ["rotation"]},
    {"aggregations": ["secagg"]},
    {"least_noise": 2.0},
    {"least_clients": 50},
    {"unit": "example"},
    {"roster": True},
]


@pytest.mark.parametrize("stricter", STRICTER, ids=lambda one: next(iter(one)))
@pytest.mark.parametrize("again", [False, True], ids=["the same process", "another one"])
def test_a_stricter_policy_stops_a_run_that_was_agreed_to(
    again: bool, stricter: dict[str, Any], federation: Federation, tmp_path: Path
) -> None:
    files = [tmp_path / f"policy-{i}.toml" for i in range(CLIENTS)]
    for path in files:
        path.write_text("roster = false\n")
    world = World(NOISY, federation, tmp_path)
    world.nodes = [world.node(i, policy=PolicyFile(path)) for i, path in enumerate(files)]
    world.agreed()
    answered: list[int] = []

    def door(node: Node, frame: bytes) -> bytes:
        answered.append(node.number)
        if len(answered) == CLIENTS + 1:  # in the middle of the run
            lines = {"roster": False, **stricter}
            for path in files:
                path.write_text("".join(f"{k} = {json.dumps(v)}\n" for k, v in lines.items()))
        if again:
            node = world.node(node.number, policy=PolicyFile(files[node.number]))
        return node.answer(frame)

    with pytest.warns(UserWarning), pytest.raises(RefusedError, match="policy forbids") as told:
        world.served(door)
    assert told.value.code == "policy"
    assert len(answered) <= 3 * CLIENTS  # and asks for nothing more


def test_nothing_is_allowed_while_a_policy_cannot_be_read(
    federation: Federation, tmp_path: Path
) -> None:
    path = tmp_path / "policy.toml"
    with pytest.raises(UsageError, match="there is no policy"):
        PolicyFile(path)
    path.write_text("roster = false\n")
    node = World(PLAIN, federation, tmp_path).node(0, policy=PolicyFile(path))
    for text in ("least_noise = ", None):
        path.unlink() if text is None else path.write_text(text)
        with pytest.raises(OwnerPolicyError, match="nothing is allowed, since"):
            node.policy  # noqa: B018 (it raises)
    path.write_text("roster = false\nleast_clients = 2\n")
    assert node.policy.least_clients == 2


def test_a_policy_is_compared_once_by_nodes_that_are_started_for_each_message(
    federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(NOISY, federation, tmp_path, policy=Policy(roster=False, least_noise=1.0))
    world.agreed()
    checked: list[int] = []
    check = Node._check
    monkeypatch.setattr(
        Node, "_check", lambda node, *given: checked.append(node.number) or check(node, *given)
    )
    world.served(lambda node, frame: world.node(node.number).answer(frame))
    assert sorted(checked) == list(range(CLIENTS))


# --- runs that are revoked ---


@pytest.mark.parametrize("made", [NOISY, SECURE], ids=["noisy", "secure"])
def test_a_revoked_run_is_answered_never_again_and_its_ledger_stays(
    made: Any, federation: Federation, tmp_path: Path
) -> None:
    world = World(made, federation, tmp_path)
    run = world.agreed()
    frames: list[bytes] = []

    def door(node: Node, frame: bytes) -> bytes:
        if node.number == 0:
            frames.append(frame)
        return node.answer(frame)

    world.served(door)
    node = world.nodes[0]
    ledger = (node.folder / "ledger-client.jsonl").read_bytes()
    assert node.revoke(run[:6]) == run
    assert not (node.folder / f"run-{run}").exists() and node.runs() == []
    for answers in (node, world.node(0)):  # in this process, and after a restart
        assert all(b"revoked" in answers.answer(frame) for frame in frames)
        for ask in (answers.agree, lambda data, n=answers: n.score(run.encode())):
            with pytest.raises(RevokedRunError, match="has taken it out of the run"):
                ask(world.proposal.packed())
    assert (node.folder / "ledger-client.jsonl").read_bytes() == ledger
    with pytest.raises(UsageError, match=rf"the run {run} was revoked at 20\d\d-"):
        node.revoke(run)
    # the others, and other runs, go on
    assert world.nodes[1].runs() == [f"run-{run}"]
    other = Proposal.of(made, federation.facts, "float32", None)
    assert node.agree(other.packed()) != run


def test_a_run_is_revoked_in_the_middle_and_ends_at_the_server(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(NOISY, federation, tmp_path)
    run = world.agreed()

    def door(node: Node, frame: bytes) -> bytes:
        reply = node.answer(frame)
        if (node.folder / f"run-{run}").exists() and b"contribute" in frame:
            party.revoke(node.folder, run)  # by another process, such as the command
        return reply

    with pytest.warns(UserWarning), pytest.raises(RefusedError, match="for good") as told:
        world.served(door)
    assert told.value.code == "revoked"
    assert 0 < world.nodes[0].spent()["client"] < np.inf


@pytest.mark.parametrize("dies", ["before anything is removed", "half way"])
def test_what_a_kill_left_of_a_revoked_run_goes_with_the_next_start(
    dies: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    world = World(NOISY, federation, tmp_path)
    run = world.agreed()
    world.served()
    node = world.nodes[0]
    folder = node.folder / f"run-{run}"
    (folder / "mine.txt").write_text("the owner's")
    removed: list[Any] = []
    remove = party.atomic_files.remove_below

    def dying(*given: Any) -> None:
        if len(removed) == (dies == "half way"):
            raise KeyboardInterrupt
        removed.append(given)
        remove(*given)

    with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
        patch.setattr(party.atomic_files, "remove_below", dying)
        node.revoke(run)
    again = world.node(0)
    assert [path.name for path in folder.iterdir()] == ["mine.txt"]
    with pytest.raises(RevokedRunError):
        again.agree(world.proposal.packed())


def test_a_run_is_named_by_the_beginning_of_its_fingerprint(
    federation: Federation, tmp_path: Path
) -> None:
    node = World(PLAIN, federation, tmp_path).node(0)
    with pytest.raises(UsageError, match="it takes part in no run"):
        node.revoke("ab")
    runs = sorted(
        node.agree(Proposal.of(PLAIN, federation.facts, "float32", None).packed())
        for _ in range(17)  # of which two begin alike
    )
    first, second = next(pair for pair in itertools.pairwise(runs) if pair[0][0] == pair[1][0])
    with pytest.raises(UsageError, match=f"several runs begin with '{first[0]}'.*give more of it"):
        node.revoke(first[0])
    for text in ("", " ", "run-", "x", "../..", f"{first}0"):
        with pytest.raises(UsageError, match="no run that begins with"):
            node.revoke(text)
    assert node.revoke(f"run-{first}") == first
    assert node.revoke(second.upper()) == second
    assert len(node.runs()) == 15


# --- scores ---


def test_a_score_is_told_once_after_the_last_round_and_is_in_the_ledger(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(PLAIN, federation, tmp_path)
    run = world.agreed().encode()
    with pytest.raises(PolicyError, match="told after its last round, 2, and this client has"):
        world.nodes[0].score(run)
    world.served()
    told = [json.loads(node.score(run)) for node in world.nodes]
    whole = PLAIN.fit(federation, Settings(threads=1))
    np.testing.assert_array_equal(told, whole.scores_)
    lines = (world.nodes[0].folder / "ledger-client.jsonl").read_text().splitlines()
    (line,) = [one for one in lines if '"score"' in one]
    assert '"exact"' in line
    # whoever asks again is told the same, also by another process, and with another model
    receive(world, 1, torch.zeros)
    for node in (world.nodes[1], world.node(1)):
        assert json.loads(node.score(run)) == told[1]
    for other in (b"", b"../..", b"a" * 32, b"\xff"):
        with pytest.raises(UnknownRunError, match="agreed to no run"):
            world.nodes[0].score(other)


def receive(world: World, client: int, theta: Callable[..., torch.Tensor]) -> Any:
    """Send a client alone a model of the server's."""
    start = initial_model(world.made, world.federation).initial()
    model = theta(len(start))
    query = AverageDeltas(
        Picks((model - start)[None], ((0,),)),
        Picks(torch.tensor([1]), ((0,),)),
        True,
        Rows(torch.tensor([9])),
    )
    half = world.half()
    half.started()
    return half.net.gather(SumClient.receive, query, to=(client,))


@pytest.mark.parametrize(
    ("made", "policy", "sentence"),
    [
        (NOISY, OPEN, "which no noise covers"),
        (PLAIN, Policy(roster=False, scores=False), "which no noise covers"),
        (SECURE, OPEN, "no sum hides"),
        (OneShot(**SMALL, relevance="pads"), OPEN, "no sum hides"),
        (IFCA(**SMALL, k=2), OPEN, "several models"),
        (NOISY, Policy(roster=False, scores=True), None),
        (SECURE, Policy(roster=False, scores=True), None),
        (PLAIN, OPEN, None),
    ],
)
def test_a_node_tells_its_score_as_its_policy_says(
    made: Any, policy: Policy, sentence: str | None, federation: Federation, tmp_path: Path
) -> None:
    node = World(made, federation, tmp_path, policy=policy).nodes[0]
    proposal = Proposal.of(made, federation.facts, "float32", None)
    run = node.agree(proposal.packed()).encode()
    with pytest.raises(PolicyError, match=sentence or "after its last round"):
        node.score(run)


def test_an_owner_s_epsilon_holds_for_scores_too(federation: Federation, tmp_path: Path) -> None:
    policy = Policy(roster=False, scores=True, most_epsilon=50.0, unit="client")
    world = World(NOISY, federation, tmp_path, policy=policy)
    run = world.agreed().encode()
    world.served()
    with pytest.raises(BudgetError, match="score would bring"):
        world.nodes[0].score(run)
    assert world.nodes[0].spent()["client"] <= 50.0


def test_models_of_the_server_s_own_are_scored_at_most_once(
    federation: Federation, tmp_path: Path
) -> None:
    """An owner who tells scores answers about one model a run, whatever the server sends."""
    world = World(SECURE, federation, tmp_path, policy=Policy(roster=False, scores=True))
    run = world.agreed().encode()
    world.served()
    answers = set()
    for value in (0.0, 1.0, -1.0):
        receive(world, 2, lambda n, value=value: torch.full((n,), value))
        answers.add(world.nodes[2].score(run))
    assert len(answers) == 1


# --- to whom a node signs ---


@pytest.fixture(scope="module")
def identities() -> list[Identity]:
    return [Identity.generate() for _ in range(2 * CLIENTS)]


def federated(
    identities: list[Identity], federation: Federation, folder: Path, **policy: Any
) -> tuple[list[Node], Roster, str]:
    """Return nodes of a federation on a roster, and a run that they agreed to."""
    folder.mkdir(exist_ok=True)
    roster = Roster({i: one.public for i, one in enumerate(identities)})
    nodes = []
    for i, identity in enumerate(identities):
        own = federation.select([i])
        given: dict[str, Any] = {"identity": identity, "roster": roster, "policy": Policy(**policy)}
        nodes.append(Node(PLAIN, own, folder / f"n{i}", durable=False, **given))
    facts = agree([node.facts() for node in nodes], seed=0, classes=10)
    proposal = agreed_among(Proposal.of(PLAIN, facts, "float32", roster), roster, nodes)
    return nodes, roster, config_hash(proposal.config)


def asks(ask: Callable[[bytes], bytes], challenge: dict[str, Any]) -> dict[str, Any]:
    return dict(json.loads(ask(json.dumps(challenge).encode())))


def test_a_challenge_that_is_relayed_from_another_federation_is_not_signed(
    identities: list[Identity], federation: Federation, tmp_path: Path
) -> None:
    """One owner takes part in two federations, of which one's server poses as it in the other."""
    first, second = identities[:CLIENTS], [identities[0], *identities[CLIENTS : 2 * CLIENTS - 1]]
    here, roster, run = federated(first, federation, tmp_path / "a")
    there, other, other_run = federated(second, federation, tmp_path / "b")
    challenge = hello.challenge_of(other_run, 7, "00", other, "b")
    signature = bytes.fromhex(asks(there[0].hello, challenge)["signature"])
    other.check(0, hello.statement_of(hello.HELLO, challenge), signature)
    for ask in (here[0].hello, here[0].introduce):
        with pytest.raises(ProposalError, match="roster is another one"):
            asks(ask, challenge)
    # under the roster of the first federation it is good for the first alone
    relayed = {**challenge, "roster": roster.digest}
    with pytest.raises(UnknownRunError):
        asks(here[0].hello, relayed)
    relayed["run"] = run
    signature = bytes.fromhex(asks(here[0].hello, relayed)["signature"])
    for kind in (hello.HELLO, hello.INTRODUCTION):
        with pytest.raises(FrameError, match="did not sign"):
            other.check(0, hello.statement_of(kind, challenge), signature)


def test_a_node_signs_that_it_takes_part_in_runs_alone_that_it_does(
    identities: list[Identity], federation: Federation, tmp_path: Path
) -> None:
    (node, *_), roster, run = federated(identities[:CLIENTS], federation, tmp_path, server="here")
    challenge = hello.challenge_of(run, 5, "ab", roster, "here")
    told = asks(node.hello, challenge)
    assert told["number"] == 0
    signature = bytes.fromhex(told["signature"])
    roster.check(0, hello.statement_of(hello.HELLO, challenge), signature)
    changes = {"run": "0" * 32, "node": 6, "nonce": "ac", "roster": "00", "server": "there"}
    for name, value in changes.items():
        statement = hello.statement_of(hello.HELLO, {**challenge, name: value})
        with pytest.raises(FrameError, match="client 0 did not sign"):
            roster.check(0, statement, signature)
    introduced = asks(node.introduce, {**challenge, "run": 1})
    assert ClientFacts.read(introduced["facts"]) == federation.facts_of(0)
    with pytest.raises(FrameError, match="did not sign"):
        statement = hello.statement_of(hello.HELLO, {**challenge, "run": 1})
        roster.check(0, statement, bytes.fromhex(introduced["signature"]))
    for ask in (node.hello, node.introduce):
        with pytest.raises(OwnerPolicyError, match="answers the server here, and not 'there'"):
            asks(ask, {**challenge, "server": "there"})
        with pytest.raises(FrameError, match="statement of an earlier version"):
            asks(ask, {name: challenge[name] for name in ("run", "node", "nonce")})
        for junk in (b"", b"[]", b"1", b'{"run":1,"node":1}', b"\xff"):
            with pytest.raises(FrameError, match="has no run, node and nonce"):
                ask(junk)
    for other in ("0" * 32, "", "../x", 7, None):
        with pytest.raises(UnknownRunError):
            asks(node.hello, {**challenge, "run": other})
    node.revoke(run)
    with pytest.raises(RevokedRunError):
        asks(node.hello, challenge)


def test_a_policy_names_a_server(tmp_path: Path) -> None:
    path = tmp_path / "policy.toml"
    path.write_text('server = "aggregator"\n')
    assert Policy.load(path).server == "aggregator"
    path.write_text("server = 1\n")
    with pytest.raises(UsageError, match=re.escape('server is a name, such as "aggregator"')):
        Policy.load(path)
