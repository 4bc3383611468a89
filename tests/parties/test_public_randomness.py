"""Nobody picks the public randomness of a run on a roster who knows what the others drew."""

from __future__ import annotations

import itertools
import json
import secrets
import shutil
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from cases import two_clusters

from securecluster import Federation, load
from securecluster.cli.main import main
from securecluster.errors import (
    FrameError,
    OwnerPolicyError,
    PolicyError,
    ProposalError,
    RefusedError,
    RunFolderError,
    UsageError,
)
from securecluster.nodes.agreed_runs import LOG, SECRET
from securecluster.nodes.agreement import agreed, agreed_among
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.nodes.server_run import ServerRun
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.public_randomness import Draw, Signed, digest_of, proposed_of
from securecluster.privacy.cohorts import Cohorts
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.protocols import CFL, FedAvg
from securecluster.runtime.endpoint import config_hash
from securecluster.runtime.transport import Framed

SMALL: dict[str, Any] = {"rounds": 2, "epochs": 1, "model": "linear"}
MADE = FedAvg(**SMALL, aggregation="secagg", participation=0.5)
CLIENTS = 6
VICTIM = 0
LIAR = 5
OWN = {3, 4, LIAR}  # clients that work with the server
CHANCE = 3 / 10  # that both others of the victim's cohort of three are among these
Values = list[tuple[bytes, bytes]]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(CLIENTS, 4)


class World:
    """Nodes of a roster, made anew for each message, and a server that may do anything."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        self.federation = federation
        self.folder = folder
        self.identities = [Identity.generate() for _ in range(CLIENTS)]
        self.roster = Roster({i: one.public for i, one in enumerate(self.identities)})
        self.policy = Policy()

    def node(self, i: int, made: Any = MADE) -> Node:
        return Node(
            made,
            self.federation.select([i]),
            self.folder / f"node-{i}",
            identity=self.identities[i],
            roster=self.roster,
            policy=self.policy,
            durable=False,
        )

    def proposal(self, made: Any = MADE, seed: int = 0, clients: int = CLIENTS) -> Proposal:
        facts = replace(self.federation.select(range(clients)).facts, seed=seed)
        return Proposal.of(made, facts, "float32", self.roster)

    def agreed(self, made: Any = MADE, clients: int = CLIENTS, seed: int = 0) -> Proposal:
        nodes = [self.node(i, made) for i in range(clients)]
        return agreed_among(self.proposal(made, seed, clients), self.roster, nodes)

    def commitments(self, proposal: Proposal) -> list[Signed]:
        data = proposal.packed()
        return [Signed.read(self.node(i).agree(data)) for i in range(CLIENTS)]

    def nonces(self, proposal: Proposal, commitments: list[Signed]) -> list[Signed]:
        data = relayed(proposal, commitments).packed()
        return [Signed.read(self.node(i).agree(data)) for i in range(CLIENTS)]

    def committed(self, draw: Draw, i: int, run: bytes, cohorts: bytes) -> Signed:
        """Commitments of a client to nonces of its choice."""
        values = draw.commitments(i, run, cohorts)
        return Signed(*values, self.identities[i].sign(draw.commitment_statement(i, *values)))

    def opened(self, draw: Draw, values: Values) -> list[Signed]:
        """Nonces of clients that open any list."""
        pairs = [draw.commitments(i, *value) for i, value in enumerate(values)]
        listed = digest_of(pairs)
        return [
            Signed(*value, self.identities[i].sign(draw.nonce_statement(i, listed)))
            for i, value in enumerate(values)
        ]


def relayed(proposal: Proposal, commitments: list[Signed]) -> Proposal:
    return replace(proposal, commitments=tuple(one.as_text() for one in commitments))


def drawn() -> tuple[bytes, bytes]:
    return secrets.token_bytes(32), secrets.token_bytes(32)


def cohorts_of(config: Mapping[str, Any], made: Any = MADE) -> set[tuple[int, ...]]:
    cohorts = Deployment(made, config).cohorts()
    assert cohorts is not None
    return set(cohorts.of(range(int(config["clients"]))))


def isolates(cohorts: Any) -> bool:
    """Whether all others of the victim's cohort are the server's."""
    (own,) = (set(one) for one in cohorts if VICTIM in one)
    return own - {VICTIM} <= OWN


@pytest.fixture
def world(federation: Federation, tmp_path: Path) -> World:
    return World(federation, tmp_path)


# --- who picks it ---


def test_each_nonce_moves_the_seed_and_the_cohorts(world: World) -> None:
    draw = Draw(world.proposal().config, world.roster)
    values = [drawn() for _ in range(CLIENTS)]
    config = draw.configured(world.opened(draw, values))
    assert proposed_of(config) == draw.config
    for i in range(CLIENTS):
        changed = [*values[:i], drawn(), *values[i + 1 :]]
        other = draw.configured(world.opened(draw, changed))
        for entry in ("seed", "cohort_seed"):
            assert other[entry] != config[entry]


def test_a_server_s_seed_places_nobody(world: World) -> None:
    """It proposes seeds that would give a victim's cohort to clients of its own."""
    isolating = []
    for seed in itertools.count():
        if isolates(Cohorts.drawn(CLIENTS, seed, 2, 0.5, None).of(range(CLIENTS))):
            isolating.append(seed)
        if len(isolating) == 3:
            break
    configs = [world.agreed(seed=seed).config for seed in isolating]
    assert [config["proposed_seed"] for config in configs] == isolating
    assert len({config["seed"] for config in configs} | {*isolating}) == 6
    assert len({config["cohort_seed"] for config in configs} - {*isolating}) == 1


@pytest.mark.always
def test_clients_of_a_server_place_a_victim_as_often_as_chance_does(world: World) -> None:
    """They choose nonces by which they isolate it, if the others' are those that they guess."""
    draw = Draw(world.proposal().config, world.roster)
    trials, isolated = 150, 0
    honest = set(range(CLIENTS)) - OWN
    for _ in range(trials):
        guess = [drawn() for _ in range(CLIENTS)]
        while not isolates(cohorts_of(draw.configured(world.opened(draw, guess)))):
            guess[LIAR] = drawn()
        values = [drawn() if i in honest else guess[i] for i in range(CLIENTS)]
        isolated += isolates(cohorts_of(draw.configured(world.opened(draw, values))))
    deviation = (trials * CHANCE * (1 - CHANCE)) ** 0.5
    assert abs(isolated - trials * CHANCE) < 4.5 * deviation


def test_who_opens_last_can_give_up_a_run_and_no_more(world: World) -> None:
    """It knows the run's seed before all others do, and each try is one of `most_runs`."""
    world.policy = Policy(most_runs=3)
    seen = set()
    for _ in range(3):
        proposal = world.proposal()
        draw = Draw(proposal.config, world.roster)
        nonces = world.nonces(proposal, world.commitments(proposal))
        config = draw.configured(nonces)
        seen.add(config["cohort_seed"])  # and it does not let the run begin
        # nor does it put another nonce in place of its own
        values = [(one.run, one.cohorts) for one in nonces]
        values[LIAR] = drawn()
        forged = list(nonces)
        forged[LIAR] = world.opened(draw, values)[LIAR]
        with pytest.raises(ProposalError, match="client 0 did not sign these nonces"):
            draw.configured(forged)
    assert len(seen) == 1
    with pytest.raises(OwnerPolicyError, match="in 3 runs at most, and has agreed to as many"):
        world.agreed()
    # a run that it knows goes on
    data = replace(proposal, config=config).packed()
    assert len({world.node(i).agree(data) for i in range(CLIENTS)}) == 1


def test_what_a_proposal_without_a_roster_draws_is_the_server_s(
    federation: Federation, tmp_path: Path
) -> None:
    """Nobody knows who the other clients are, so their nonces would be the server's, too."""
    policy = Policy(roster=False, most_runs=1)
    node = Node(MADE, federation.select([1]), tmp_path, number=1, policy=policy)
    proposal = Proposal.of(MADE, federation.facts, "float32", None)
    assert agreed_among(proposal, None, [node]) == proposal
    assert agreed_among(proposal, None, [node]) == proposal  # the same one
    with pytest.raises(OwnerPolicyError, match="in 1 runs at most"):
        node.agree(Proposal.of(MADE, federation.facts, "float32", None).packed())


# --- lists that a node does not open its nonce for ---


def swapped(given: list[Signed]) -> list[Signed]:
    return [given[1], given[0], *given[2:]]


FORGED: dict[str, tuple[Callable[[World, Draw, list[Signed]], list[Signed]], str]] = {
    "one is missing": (lambda _, __, given: given[:-1], "of 5 clients, and the run has 6"),
    "one is too many": (lambda _, __, given: [*given, given[0]], "of 7 clients"),
    "none is there": (lambda _, __, given: [], "of 0 clients"),
    "in another order": (lambda _, __, given: swapped(given), "client 0 did not sign"),
    "one is copied": (
        lambda _, __, given: [*given[:LIAR], given[1]],
        "client 5 has the commitments of client 1",
    ),
    "one is copied and signed": (
        lambda world, draw, given: [*given[:LIAR], resigned(world, draw, given[1])],
        "client 5 has the commitments of client 1",
    ),
    "one for the cohorts is copied": (
        lambda world, draw, given: [
            *given[:LIAR],
            resigned(world, draw, replace(given[LIAR], cohorts=given[1].cohorts)),
        ],
        "client 5 has the commitments of client 1",
    ),
    "another client's is made up": (
        lambda world, draw, given: [given[0], world.committed(draw, LIAR, *drawn()), *given[2:]],
        "client 1 did not sign",
    ),
    "a signature is cut off": (
        lambda _, __, given: [*given[:LIAR], replace(given[LIAR], signature=bytes(64))],
        "client 5 did not sign",
    ),
    "the owner's own is another": (
        lambda world, draw, given: [world.committed(draw, 0, *drawn()), *given[1:]],
        "other commitments in this client's name",
    ),
}


def resigned(world: World, draw: Draw, given: Signed) -> Signed:
    statement = draw.commitment_statement(LIAR, given.run, given.cohorts)
    return replace(given, signature=world.identities[LIAR].sign(statement))


@pytest.mark.parametrize("name", FORGED)
def test_a_node_opens_no_nonce_for_a_list_that_is_not_all_clients(name: str, world: World) -> None:
    forge, sentence = FORGED[name]
    proposal = world.proposal()
    draw = Draw(proposal.config, world.roster)
    given = world.commitments(proposal)
    with pytest.raises(ProposalError, match=sentence):
        world.node(0).agree(relayed(proposal, forge(world, draw, given)).packed())
    assert not (world.folder / "node-0" / LOG).exists()
    world.nonces(proposal, given)


@pytest.mark.parametrize("entry", [None, 7, "", "AA==", "é" * 8, ["AA=="]])
def test_what_is_no_list_of_commitments_is_refused(entry: Any, world: World) -> None:
    proposal = world.proposal()
    given = relayed(proposal, world.commitments(proposal))
    assert given.commitments is not None
    forged = replace(given, commitments=(entry, *given.commitments[1:]))
    with pytest.raises((FrameError, PolicyError)):
        world.node(0).agree(forged.packed())


def test_commitments_of_one_run_are_none_of_another(world: World) -> None:
    old = world.commitments(world.proposal())
    proposal = world.proposal()
    given = world.commitments(proposal)
    assert not {one.run for one in old} & {one.run for one in given}
    assert [one.cohorts for one in old] == [one.cohorts for one in given]
    with pytest.raises(ProposalError, match="client 5 did not sign"):
        world.node(0).agree(relayed(proposal, [*given[:LIAR], old[LIAR]]).packed())


def test_a_nonce_is_opened_for_one_list_of_a_run(world: World) -> None:
    proposal = world.proposal()
    draw = Draw(proposal.config, world.roster)
    given = world.commitments(proposal)
    first = world.nonces(proposal, given)
    assert world.nonces(proposal, given) == first
    # of the nonces for the run alone, since those for the cohorts never change
    other = replace(given[LIAR], run=world.committed(draw, LIAR, *drawn()).run)
    with pytest.raises(ProposalError, match="a second list of commitments"):
        forged = [*given[:LIAR], resigned(world, draw, other)]
        world.node(0).agree(relayed(proposal, forged).packed())


def test_all_clients_have_signed_one_list(world: World) -> None:
    """A server that tells two clients two lists gets no nonces that anybody takes."""
    proposal = world.proposal()
    draw = Draw(proposal.config, world.roster)
    given = world.commitments(proposal)
    mine = drawn()
    other = [*given[:LIAR], world.committed(draw, LIAR, *mine)]
    first = Signed.read(world.node(0).agree(relayed(proposal, given).packed()))
    data = relayed(proposal, other).packed()
    rest = [Signed.read(world.node(i).agree(data)) for i in range(1, LIAR)]
    values = [(one.run, one.cohorts) for one in (first, *rest)]
    last = world.opened(draw, [*values, mine])[LIAR]
    with pytest.raises(ProposalError, match="client 0 did not sign these nonces"):
        draw.configured([first, *rest, last])


FINAL: dict[str, Callable[[dict[str, Any]], dict[str, Any]]] = {
    "another seed": lambda config: {"seed": config["seed"] + 1},
    "other cohorts": lambda config: {"cohort_seed": config["cohort_seed"] + 1},
    "another proposed seed": lambda config: {"proposed_seed": 1},
    "no proposed seed": lambda config: {"proposed_seed": None},
    "a nonce less": lambda config: {"nonces": config["nonces"][:-1]},
    "nonces in another order": lambda config: {"nonces": config["nonces"][::-1]},
    "no list": lambda config: {"nonces": None},
    "no nonce": lambda config: {"nonces": [0] * CLIENTS},
    "another run": lambda config: {"run": "ab" * 16},
}


@pytest.mark.parametrize("name", FINAL)
def test_parties_derive_the_seeds_themselves(name: str, world: World) -> None:
    proposal = world.proposal()
    nonces = world.nonces(proposal, world.commitments(proposal))
    config = Draw(proposal.config, world.roster).configured(nonces)
    forged = replace(proposal, config={**config, **FINAL[name](config)})
    with pytest.raises((ProposalError, FrameError)):
        world.node(0).agree(forged.packed())
    assert world.node(0).runs() == []
    assert world.node(0).agree(replace(proposal, config=config).packed())


def test_a_newcomer_checks_the_nonces_of_the_run_that_it_joins(world: World) -> None:
    new = CLIENTS - 1
    proposal = replace(world.agreed(clients=new), joins=True)
    config = proposal.config
    forged = [{**config, **change(dict(config))} for change in FINAL.values()]
    for wrong in (*forged, proposed_of(config)):
        with pytest.raises((ProposalError, FrameError)):
            world.node(new).agree(replace(proposal, config=wrong).packed())
    assert world.node(new).runs() == []
    world.node(new).agree(proposal.packed())
    world.policy = Policy(most_runs=1)
    world.node(new).agree(proposal.packed())


# --- one partition of a roster ---


def test_runs_on_a_roster_have_one_partition(world: World) -> None:
    first = world.agreed()
    for made in (MADE, FedAvg(**SMALL, aggregation="secagg", cohort_size=3), CFL(**SMALL)):
        config = world.agreed(made).config
        if made.aggregation == "secagg":
            assert cohorts_of(config, made) == cohorts_of(first.config)
        assert config["seed"] != first.config["seed"]


@pytest.mark.parametrize("first", [True, False])
def test_a_run_that_divides_a_roster_in_another_way_is_refused(first: bool, world: World) -> None:
    other = FedAvg(**SMALL, aggregation="secagg", cohort_size=2)
    made, again = (MADE, other) if first else (other, MADE)
    world.agreed(made)
    sizes = (3, 2) if first else (2, 3)
    sentence = (
        f"into {CLIENTS // sizes[0]} cohorts, and this one into {CLIENTS // sizes[1]}.*"
        f"give cohort_size={sizes[0]}, or a new roster"
    )
    with pytest.raises(ProposalError, match=sentence):
        world.agreed(again)
    with pytest.raises(ProposalError, match="cohorts of 6 clients, and this one of 5"):
        world.agreed(made, clients=5)
    plain = FedAvg(**SMALL)  # has no cohorts, and every reply is read alone
    world.agreed(plain, clients=5)


def test_a_client_that_answers_with_another_nonce_for_the_cohorts_is_refused_by_all(
    world: World,
) -> None:
    """A node that lost its secret, or a client that now knows what the others' nonces are."""
    world.agreed()
    shutil.rmtree(world.folder / f"node-{LIAR}")
    proposal = world.proposal()
    given = world.commitments(proposal)
    with pytest.raises(ProposalError, match="other cohorts in its first run: a node that lost"):
        world.node(0).agree(relayed(proposal, given).packed())


def test_a_partition_is_fixed_before_anybody_knows_it(world: World) -> None:
    """The first run never begins, since a client that knows the cohorts does not open its nonce."""
    proposal = world.proposal()
    draw = Draw(proposal.config, world.roster)
    given = world.commitments(proposal)
    for i in range(LIAR):
        world.node(i).agree(relayed(proposal, given).packed())
    again = world.proposal()
    draw = Draw(again.config, world.roster)
    fresh = [*world.commitments(again)[:LIAR], world.committed(draw, LIAR, *drawn())]
    for i in range(LIAR):
        with pytest.raises(ProposalError, match="committed themselves to other cohorts"):
            world.node(i).agree(relayed(again, fresh).packed())
    assert cohorts_of(world.agreed().config)  # and begins with the nonce to which it is held


# --- nodes and servers that die ---


def test_nodes_that_are_killed_at_any_time_give_one_run(world: World) -> None:
    """Nodes are made for each message here, and asked twice."""
    proposal = world.proposal()
    given = world.commitments(proposal)
    assert world.commitments(proposal) == given
    nonces = world.nonces(proposal, given)
    with (world.folder / "node-0" / LOG).open("a") as log:
        log.write('{"run": "torn')  # a kill while a later line was written
    assert world.nonces(proposal, given) == nonces
    config = Draw(proposal.config, world.roster).configured(nonces)
    final = replace(proposal, config=config)
    runs = [world.node(i).agree(final.packed()) for i in (0, 0, *range(CLIENTS))]
    assert len(set(runs)) == 1
    assert world.agreed().config["cohort_seed"] == config["cohort_seed"]


def test_a_node_keeps_its_secret_for_itself(world: World) -> None:
    config = world.agreed().config
    path = world.folder / "node-1" / SECRET
    assert path.stat().st_mode & 0o777 == 0o600
    assert (world.folder / "node-1" / LOG).stat().st_mode & 0o777 == 0o600
    assert path.read_bytes().hex() not in str(config)
    (world.folder / "node-2" / LOG).write_text("[" * 10_000 + "\n")
    with pytest.raises(RunFolderError, match="does not parse"):
        world.agreed()
    (world.folder / "node-2" / LOG).unlink()
    path.write_bytes(b"short")
    with pytest.raises(RunFolderError, match="no secret of 32 bytes"):
        world.agreed()


# --- the server ---


def test_a_server_names_the_client_that_keeps_a_run_from_beginning(world: World) -> None:
    proposal = world.proposal()

    def lying(stage: int, answer: str) -> Callable[[Mapping[int, bytes]], Mapping[int, str]]:
        asked = itertools.count()

        def ask(sent: Mapping[int, bytes]) -> Mapping[int, str]:
            lies = next(asked) == stage
            told = {i: world.node(i).agree(data) for i, data in sent.items()}
            return {**told, LIAR: answer} if lies else told

        return ask

    valid = Signed(*drawn(), bytes(64)).as_text()
    for answer in ("", "x" * 172, valid):
        for stage, sentence in enumerate(
            ("does not commit itself to a nonce", "does not open the nonce", "to another run")
        ):
            with pytest.raises(RefusedError, match=f"^client 5 .*{sentence}"):
                agreed(proposal, world.roster, [*range(CLIENTS)], lying(stage, answer))


def served(world: World, proposal: Proposal, out: Path, rounds: int | None = None) -> Any:
    """The run of a server in a folder, which is killed after some rounds."""
    doors = {i: lambda frame, i=i: world.node(i).answer(frame) for i in range(CLIENTS)}
    transport = Framed(doors, lambda name: call_types(MADE, name)[1])

    def stop(line: Any) -> None:
        if line["round"] == rounds:
            raise KeyboardInterrupt

    server = ServerRun(MADE, proposal.config, transport, roster=world.roster)
    return server.carried_out(out, stop)


def test_a_server_that_is_killed_goes_on_with_the_nonces_in_its_folder(
    world: World, tmp_path: Path
) -> None:
    out = tmp_path / "server"
    proposal = world.agreed()
    with pytest.raises(KeyboardInterrupt):
        served(world, proposal, out, 1)
    world.policy = Policy(most_runs=1)
    asked: list[int] = []

    def ask(sent: Mapping[int, bytes]) -> Mapping[int, str]:
        asked.append(len(sent))
        return {i: world.node(i).agree(data) for i, data in sent.items()}

    facts = world.federation.facts
    again = Proposal.of(MADE, facts, "float32", world.roster, out)
    assert again.config == proposal.config
    assert agreed(again, world.roster, [*range(CLIENTS)], ask) == again
    assert asked == [CLIENTS]
    fitted = served(world, again, out)
    assert fitted.kept_.learned.config["seed"] == proposal.config["seed"]
    assert load(out).kept_.learned.config["nonces"] == proposal.config["nonces"]
    assert main(["replay", str(out)]) == 0
    with pytest.raises(OwnerPolicyError, match="in 1 runs at most"):
        world.agreed()


def test_a_server_that_goes_on_with_another_seed_asks_nobody(world: World, tmp_path: Path) -> None:
    out = tmp_path / "server"
    with pytest.raises(KeyboardInterrupt):
        served(world, world.agreed(), out, 1)
    facts = replace(world.federation.facts, seed=1)
    with pytest.raises(RunFolderError, match=r"a run of another configuration \(seed\)"):
        Proposal.of(MADE, facts, "float32", world.roster, out)


def test_a_run_of_an_earlier_version_goes_on_by_its_server_s_seed(world: World) -> None:
    proposal = world.proposal()
    run = config_hash(proposal.config)
    for i in range(CLIENTS):
        folder = world.node(i).folder / f"run-{run}"
        folder.mkdir()
        (folder / "agreed.json").write_text(json.dumps(proposal.config, sort_keys=True))
    nodes = [world.node(i) for i in range(CLIENTS)]
    assert agreed_among(proposal, world.roster, nodes) == proposal
    assert {node.agree(proposal.packed()) for node in nodes} == {run}


def test_most_runs_is_a_whole_number(tmp_path: Path) -> None:
    for wrong in (-1, 1.5, True):
        with pytest.raises(UsageError, match="most_runs"):
            Policy(most_runs=wrong)  # type: ignore[arg-type]
    path = tmp_path / "policy.toml"
    path.write_text("most_runs = 3\n")
    assert Policy.load(path).most_runs == 3
