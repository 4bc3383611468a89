"""Newcomers' nodes join a finished run of a server, whose own nodes are the hosts."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from cases import two_clusters

from securecluster import Federation, Settings, load
from securecluster.errors import PolicyError, RefusedError, RunFolderError, UpdateError, UsageError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, Shared
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.agreement import agreed_among
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.labels import UNKNOWN_LABEL
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.privacy.masking.key_agreement import Peers
from securecluster.protocols import (
    CFL,
    FLHC,
    IFCA,
    MRMTL,
    PACFL,
    RDPCFL,
    SRFCA,
    CLoVE,
    FedAvg,
    FineTune,
    Hidden,
    Local,
    LocalKMeans,
    OneShot,
    RandomClusters,
    Signature,
)
from securecluster.protocols.common.comparison.gradient_signatures import (
    ClassMeans,
    SignatureRequest,
    SignatureSender,
)
from securecluster.results.joining import Joined
from securecluster.runtime.transport import Framed

CLIENTS, NEWCOMERS = 4, 2
SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
# divides the clients in the first round
SPLITTING: dict[str, Any] = {"criterion": "absolute", "eps1": 100.0, "eps2": 1e-6, "gamma_max": 0.0}
PRIVATE = CFL(**SMALL, **SPLITTING, clip=1.0, noise=1.0)
TWO_MODELS: dict[str, Any] = {"k": 2, "starts": 2, "start_rounds": 1}
METHODS: dict[str, Any] = {
    "fedavg": FedAvg(**SMALL),
    "cfl": CFL(**SMALL, **SPLITTING, mask="none"),
    "cfl, permutation": CFL(**SMALL, **SPLITTING, mask="permutation"),
    "cfl, rotation": CFL(**SMALL, **SPLITTING, mask="rotation"),
    "cfl, sketch and secagg": CFL(**SMALL, **SPLITTING, sketch=64, aggregation="secagg"),
    "flhc": FLHC(**SMALL, pre_rounds=1),
    "flhc, permutation": FLHC(**SMALL, pre_rounds=1, mask="permutation"),
    "ifca": IFCA(**SMALL, **TWO_MODELS),
    "ifca, secagg": IFCA(**SMALL, **TWO_MODELS, aggregation="secagg", least_choosers=2),
    "srfca": SRFCA(**SMALL),
    "srfca, permutation": SRFCA(**SMALL, distance="l2", mask="permutation"),
    "oneshot": OneShot(**SMALL),
    "oneshot, pads": OneShot(**SMALL, relevance="pads", aggregation="secagg"),
    "signature": Signature(**SMALL),
    "signature, rotation": Signature(**SMALL, mask="rotation"),
    "pacfl": PACFL(**SMALL),
    "clove": CLoVE(**SMALL, k=2),
    "rdpcfl": RDPCFL(**SMALL),
    "mrmtl": MRMTL(**SMALL),
    "finetune": FineTune(**SMALL),
    "local-kmeans": LocalKMeans(**SMALL, k=2),
    "hidden": Hidden(**SMALL, k=2, least_choosers=2),
    "random": RandomClusters(**SMALL, k=2),
    "local": Local(**SMALL),
}


@pytest.fixture(scope="module")
def everyone() -> Federation:
    return two_clusters(CLIENTS + NEWCOMERS, 20)


class World:
    """A server, its clients' nodes, and those of newcomers, started for each message."""

    def __init__(self, made: Any, everyone: Federation, folder: Path) -> None:
        self.made = made
        self.everyone = everyone
        self.run_of = everyone.select(range(CLIENTS))
        self.folder = folder
        self.out = folder / "server"
        self.identities = [Identity.generate() for _ in range(CLIENTS + NEWCOMERS)]
        self.roster = Roster({i: one.public for i, one in enumerate(self.identities)})
        self.proposal = Proposal.of(made, self.run_of.facts, "float32", self.roster)
        self.dead: set[int] = set()
        self.asked: list[tuple[int, bytes]] = []

    def node(self, i: int, **options: Any) -> Node:
        own = self.everyone.select([i])
        given = {"identity": self.identities[i], "roster": self.roster, **options}
        return Node(self.made, own, self.folder / f"node-{i}", **given)

    def server(self) -> ServerRun:
        def to(i: int, frame: bytes) -> bytes:
            if i in self.dead:
                raise ConnectionError
            self.asked.append((i, frame))
            return self.node(i).answer(frame)

        doors = {i: partial(to, i) for i in range(CLIENTS + NEWCOMERS)}
        replies = Deployment(self.made, self.proposal.config).reply_check()
        transport = Framed(doors, lambda name: call_types(self.made, name)[1], check=replies)
        return ServerRun(self.made, self.proposal.config, transport, roster=self.roster)

    def ran(self) -> World:
        nodes = [self.node(i) for i in range(CLIENTS)]
        self.proposal = agreed_among(self.proposal, self.roster, nodes)
        self.server().carried_out(self.out)
        self.asked.clear()
        return self

    def in_this_process(self) -> Any:
        """The run in this process, with the seed that the clients drew."""
        drawn = dataclasses.replace(self.run_of, seed=self.proposal.config["seed"])
        return self.made.fit(drawn, Settings(threads=1))

    def joined(self, *numbers: int) -> Joined:
        invitation = dataclasses.replace(self.proposal, joins=True)
        for i in numbers:
            self.node(i).agree(invitation.packed())
        told = {i: self.node(i).facts().samples for i in numbers}
        return self.server().join(self.out, told)


NEW = tuple(range(CLIENTS, CLIENTS + NEWCOMERS))


@pytest.mark.filterwarnings("ignore:on their own test samples")
@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("name", METHODS)
def test_newcomers_nodes_get_the_clusters_of_the_run_in_this_process(
    name: str, everyone: Federation, tmp_path: Path
) -> None:
    made = METHODS[name]
    world = World(made, everyone, tmp_path).ran()
    found = world.joined(*NEW)
    whole = world.in_this_process()
    expected = whole.join(everyone.select(NEW))
    if made.observer.server_knows_labels:
        assert list(found.labels) == expected.tolist()
    else:
        assert list(found.labels) == [UNKNOWN_LABEL] * NEWCOMERS
    assert found.bytes == whole.joined_.bytes
    events = [(e.method, e.ids, e.round) for e in whole.joined_.ledger.events]
    assert [(e.method, e.ids, e.round) for e in found.ledger.events] == events
    again = load(tmp_path / "server")
    of_newcomers = [e for e in again.ledger_.events if min(e.ids) >= CLIENTS]
    assert [e.method for e in of_newcomers] == [e.method for e in found.ledger.events]


def test_the_mask_seed_comes_from_a_host_that_lives(everyone: Federation, tmp_path: Path) -> None:
    made = METHODS["cfl, permutation"]
    world = World(made, everyone, tmp_path).ran()
    world.dead = {0, 1}
    found = world.joined(4)
    expected = world.in_this_process()
    assert list(found.labels) == expected.join(everyone.select([4])).tolist()
    asked = [i for i, _ in world.asked]
    assert 2 in asked and 3 not in asked  # the first that replies leads
    world.dead = set(range(CLIENTS))
    with pytest.raises(UpdateError, match="newcomer"):
        world.joined(5)


def test_hosts_seal_the_seed_to_parties_of_the_roster_alone(
    everyone: Federation, tmp_path: Path
) -> None:
    made = METHODS["cfl, permutation"]
    world = World(made, everyone, tmp_path).ran()
    # a server that makes up a newcomer: no host has its key
    world.identities[5] = Identity.generate()
    keys = {i: one.public for i, one in enumerate(world.identities)}
    stranger = world.node(5, roster=Roster(keys))
    other = Proposal.of(made, world.run_of.facts, "float32", Roster(keys))
    world.folder = tmp_path / "another federation"
    world.folder.mkdir()
    nodes = [world.node(i, roster=Roster(keys)) for i in range(CLIENTS)]
    other = agreed_among(other, Roster(keys), nodes)
    world.folder = tmp_path
    stranger.agree(dataclasses.replace(other, joins=True).packed())
    with pytest.raises(UsageError, match="no key of this identity"):
        world.node(5)
    # and in its own place, with a key of the server's, it is refused by hosts
    (run,) = world.node(0).runs()
    offer = stranger._living(stranger.runs()[0].removeprefix("run-")).endpoint.keys.offer((5,))
    query = Peers(
        Shared(torch.tensor([5])), Shared(offer.key.values), Shared(offer.signature.values)
    )
    header = Header(
        run.removeprefix("run-"), "key_seal", "gather", 9, 9, "server", "client/0", "", 1
    )
    assert b"!refused" in world.node(0).answer(wire.encode(header, query))


def test_a_newcomer_agrees_to_what_clients_agreed_to(everyone: Federation, tmp_path: Path) -> None:
    made = PRIVATE
    world = World(made, everyone, tmp_path)
    with pytest.raises(PolicyError, match="a run of 4 clients without this one"):
        world.node(4).agree(world.proposal.packed())
    invitation = dataclasses.replace(world.proposal, joins=True)
    with pytest.raises(PolicyError, match="a run of 4 clients with this one"):
        world.node(3).agree(invitation.packed())
    quiet = CFL(**SMALL, **SPLITTING, clip=1.0, noise=0.1)
    other = Proposal.of(quiet, world.run_of.facts, "float32", world.roster)
    with pytest.raises(PolicyError, match=r"noise = 0\.1, and this client's protocol has 1\.0"):
        world.node(4).agree(dataclasses.replace(other, joins=True).packed())
    with pytest.raises(PolicyError, match="at least 2"):
        strict = Policy(least_noise=2.0)
        world.node(4, policy=strict).agree(invitation.packed())


def test_a_newcomer_joins_again_from_the_root_of_the_tree(
    everyone: Federation, tmp_path: Path
) -> None:
    world = World(CFL(**SMALL, **SPLITTING), everyone, tmp_path).ran()
    nodes = load(world.out).tree_.nodes
    assert any(child for node in nodes[1:] for child in node.children)  # two levels or more
    (first,) = world.joined(5).labels
    assert world.joined(4, 5).labels[1] == first
    assert world.joined(5).labels == (first,)


@pytest.mark.always
def test_releases_of_newcomers_are_in_the_folder_and_on_their_own_ledgers(
    everyone: Federation, tmp_path: Path
) -> None:
    made = Signature(**SMALL, signature_noise=0.7)  # asks every newcomer
    world = World(made, everyone, tmp_path).ran()
    before = load(world.out).ledger_.price(1e-5).epsilon
    world.joined(5)  # its number stays its own, whoever comes first
    found = world.joined(4, 5)
    ledger = load(world.out).ledger_
    assert ledger.price(1e-5).epsilon >= before
    releases = [event for event in ledger.events if min(event.ids) >= CLIENTS]
    # what the newcomer sent again has the same bits, and costs nothing
    for number in NEW:
        own = ledger.of({str(number)}).price(1e-5).epsilon
        assert world.node(number).spent() == {"example": pytest.approx(own)}
    assert releases and {e.method for e in found.ledger.events} == {e.method for e in releases}


EXAMPLES: dict[str, Any] = {"clip": 1.0, "noise": 1.0, "dp_unit": "example"}
BY_GRADIENTS: dict[str, Any] = {"signature": "gradient", "signature_noise": 0.7}


@pytest.mark.parametrize(
    ("made", "training"),
    [
        (Signature(**SMALL, **EXAMPLES), 20),
        # a quarter of the samples is held out of training
        (CFL(**SMALL, **EXAMPLES, **BY_GRADIENTS, fallback=0.25), 15),
    ],
    ids=["signature", "cfl fallback"],
)
def test_examples_of_newcomers_are_priced_by_the_number_that_they_told(
    made: Any, training: int, everyone: Federation, tmp_path: Path
) -> None:
    world = World(made, everyone, tmp_path).ran()
    world.joined(4)
    ledger = load(world.out).ledger_
    assert ledger.samples[4] == training
    own = ledger.of({"4"}).price(1e-5).epsilon
    assert world.node(4).spent() == {"example": pytest.approx(own)}
    with pytest.raises(UsageError, match="newcomer 5 did not tell its number of samples"):
        world.server().join(world.out, {5: None})


def test_a_mistake_is_one_sentence(everyone: Federation, tmp_path: Path) -> None:
    world = World(METHODS["cfl"], everyone, tmp_path)
    with pytest.raises(RunFolderError, match=r"no run|config\.json"):
        world.server().join(tmp_path / "nothing", {4: None})
    world.ran()
    for numbers in ({}, {3: None}):
        with pytest.raises(UsageError, match="the numbers on the roster after the run's 4 clients"):
            world.server().join(world.out, numbers)
    with pytest.raises(RefusedError, match="agreed to no such run"):
        world.server().join(world.out, {4: None})  # it has not agreed
    other = World(METHODS["fedavg"], everyone, tmp_path / "other").server()
    with pytest.raises(RunFolderError, match="another configuration"):
        other.join(world.out, {4: None})


# --- a newcomer that is asked to join again and again ---

REJOINED = Signature(**SMALL, k=2, mask="none", clip=1.0, dp_unit="example", target_epsilon=4.0)


def asked_again(world: World, times: int, means_of: Any) -> list[str]:
    """Let a newcomer join a finished run again and again, and return what became of each.

    Args:
        means_of: returns the means of classes that the server sends, by the number of the join.
    """
    newcomer = CLIENTS
    half = ServerHalf.over(
        Framed(
            {newcomer: lambda frame: world.node(newcomer).answer(frame)},
            lambda name: call_types(world.made, name)[1],
        ),
        world.made,
        world.proposal.config,
        Transcript("none"),
        key=b"k" * 32,
        roster=world.roster,
    )
    half.started()
    centre = Shared(torch.tensor([float(world.proposal.config["signature_centre"])]))
    client = world.made.client
    invitation = dataclasses.replace(world.proposal, joins=True).packed()
    outcomes = []
    for number in range(times):
        world.node(newcomer).agree(invitation)
        try:
            sums = half.net.gather(client.send_class_sums, SignatureRequest(centre), to=(newcomer,))
            shape = sums.rows.projections.values.shape[1:]
            means = ClassMeans(Shared(means_of(number, shape)), sums.step)
            half.net.gather(client.send_residuals, means, to=(newcomer,))
            outcomes.append("answered")
        except RefusedError as error:
            outcomes.append(error.code)
    return outcomes


def drawn(number: int, shape: Any) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(number))


@pytest.fixture(scope="module")
def rejoined(tmp_path_factory: pytest.TempPathFactory) -> Any:
    many = two_clusters(CLIENTS + 1, 40)

    def world(name: str, made: Any = REJOINED) -> World:
        folder = tmp_path_factory.mktemp(name)
        found = World.__new__(World)
        found.made, found.everyone = made, many
        found.run_of = many.select(range(CLIENTS))
        found.folder, found.out = folder, folder / "server"
        found.identities = [Identity.generate() for _ in range(CLIENTS + 1)]
        found.roster = Roster({i: one.public for i, one in enumerate(found.identities)})
        proposal = Proposal.of(made, found.run_of.facts, "float32", found.roster)
        clients = [found.node(i) for i in range(CLIENTS)]
        found.proposal = agreed_among(proposal, found.roster, clients)
        return found

    return world


def test_a_newcomer_that_is_asked_again_answers_the_same_at_no_cost(rejoined: Any) -> None:
    world = rejoined("same")
    node = world.node(CLIENTS)
    assert asked_again(world, 1, lambda _, shape: drawn(0, shape)) == ["answered"]
    spent = node.spent()["example"]
    assert 0 < spent <= 4.0
    assert asked_again(world, 4, lambda _, shape: drawn(0, shape)) == ["answered"] * 4
    assert node.spent()["example"] == spent


def test_a_newcomer_answers_one_question_in_all_its_joins(rejoined: Any) -> None:
    world = rejoined("other")
    assert asked_again(world, 8, drawn) == ["answered", *["rule"] * 7]
    assert world.node(CLIENTS).spent()["example"] <= 4.0


def test_a_newcomer_is_held_to_the_target_over_all_its_joins(
    rejoined: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where no rule of the protocol keeps it from answering again."""
    monkeypatch.setattr(SignatureSender, "_once", lambda *given: None)
    world = rejoined("target")
    outcomes = asked_again(world, 12, drawn)
    answered = outcomes.count("answered")
    assert 0 < answered < 12 and outcomes[answered:] == ["target"] * (12 - answered)
    assert world.node(CLIENTS).spent()["example"] <= 4.0
