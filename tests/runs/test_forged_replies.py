"""Hidden replies that parse and are of no use: the run goes on without their client."""

from __future__ import annotations

import dataclasses
import secrets
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import pytest
import torch
from cases import exhaustive, stub_pair_network
from seeded_node import SeededNode

from benchmarks import golden
from securecluster import Federation, LabelSwap
from securecluster.core.serialization import pack
from securecluster.errors import FrameError, RefusedError, SecureClusterError, UsageError
from securecluster.messaging import refusals, run_number, wire
from securecluster.messaging.messages import Header, Picks, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.agreement import agreed_among
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.deployment import Deployment
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.privacy.dp.ledger import UNSEEN, Event
from securecluster.privacy.masking.identities import Identity, Roster
from securecluster.protocols import FedAvg
from securecluster.runtime.transport import Framed, Replay, Transport, WithAuthority

pytestmark = pytest.mark.filterwarnings("ignore:.*:securecluster.errors.SecureClusterWarning")

CLIENTS = 7
LIAR, LOST = 1, 5
KEY = bytes(range(32))
MADE = FedAvg(rounds=2, epochs=1, model="linear", aggregation="secagg", cohort_size=0)
Forge = Callable[[Any], Any]


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=1), clients=CLIENTS, samples=12, seed=0
    )


def fewer(picks: Picks) -> Picks:
    (chosen,) = picks.picks
    return Picks(picks.table, (chosen[:-1],))


def other(picks: Picks) -> Picks:
    draw = np.random.default_rng(int(picks.table.sum()))
    table = picks.table.clone()
    table[:, 1:] = torch.from_numpy(draw.integers(0, 256, table[:, 1:].shape, np.uint8))
    return Picks(table, picks.picks)


def wider(picks: Picks) -> Picks:
    """Numbers that are no remainders modulo the prime, or are none under most covers."""
    return Picks(torch.full_like(picks.table, 255), picks.picks)


# by exchange: what a client makes of its reply, and whether its row is in the sum all the same
FORGERIES: dict[str, tuple[str, Forge]] = {
    "a box is missing": (
        "contribute",
        lambda reply: dataclasses.replace(reply, boxes=fewer(reply.boxes)),
    ),
    "a pad is missing": (
        "reveal_pads",
        lambda reply: dataclasses.replace(reply, keys=fewer(reply.keys)),
    ),
    "a share is missing": (
        "reveal_shares",
        lambda reply: dataclasses.replace(reply, shares=fewer(reply.shares)),
    ),
    "shares of other seeds": (
        "reveal_shares",
        lambda reply: dataclasses.replace(reply, shares=other(reply.shares)),
    ),
    "no shares of any seed": (
        "reveal_shares",
        lambda reply: dataclasses.replace(reply, shares=wider(reply.shares)),
    ),
}


class World:
    """Nodes, some of which are lost or forge their replies in the first round.

    Args:
        made: the protocol.
        enrolled: the clients have a roster.
    """

    def __init__(
        self, federation: Federation, folder: Path, made: Any = MADE, enrolled: bool = False
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.made = made
        identities = [Identity(bytes([i] * 32)) if enrolled else None for i in range(CLIENTS)]
        self.roster = Roster({i: one.public for i, one in enumerate(identities) if one is not None})
        if not enrolled:
            self.roster = None  # type: ignore[assignment]
        policy = Policy(roster=enrolled)
        # of equal numbers, and of equal nonces, so that runs have equal bits
        with mock.patch.object(run_number, "drawn", lambda: "ab" * 16):
            self.proposal = Proposal.of(made, federation.facts, "float32", self.roster)
        # without identities they have the keys of simulated clients, so that runs have equal bits
        kind = Node if enrolled else SeededNode
        self.nodes = [
            kind(
                made,
                federation.select([i]),
                folder / f"n{i}",
                identity=identities[i],
                roster=self.roster,
                number=i,
                policy=policy,
            )
            for i in range(CLIENTS)
        ]
        with mock.patch.object(secrets, "token_bytes", bytes):
            self.proposal = agreed_among(self.proposal, self.roster, self.nodes)
        self.deployment = Deployment(made, self.proposal.config)
        self.authority = self.deployment.authority()
        if self.authority is not None:
            self.authority.on_refusal = refusals.log  # its text stays with it, as on many machines
        # (client, method) in which it is away
        self.away: set[tuple[int, str]] = set()
        self.forged: dict[tuple[int, str], Forge] = {}
        # in its first call of these verbs, the liar is away (None), or forges its reply
        self.first: dict[str, Forge | None] = {}
        self._first_steps: dict[str, int] = {}
        self.strict = False
        self.names = [str(i) for i in range(CLIENTS)]

    def _door(self, i: int, frame: bytes) -> bytes:
        header = wire.peek(frame)
        key = (i, header.method)
        if header.round == 1 and key in self.away:
            raise ConnectionError
        forge = self.forged.get(key) if header.round == 1 else None
        if i == LIAR and header.verb in self.first:
            step = self._first_steps.setdefault(header.verb, header.step)
            if header.step == step:
                forge = self.first[header.verb]
                if forge is None:
                    raise ConnectionError
        reply = self.nodes[i].answer(frame)
        if forge is None:
            return reply
        found: Header
        found, message, receipts = wire.decode_reply(reply, self._reply(header.method))
        return wire.encode(found, forge(message), 0, receipts)

    def _reply(self, method: str) -> type:
        reply: type = call_types(self.made, method)[1]
        return reply

    def run(self) -> ServerHalf:
        doors = {i: lambda frame, i=i: self._door(i, frame) for i in range(CLIENTS)}
        check = self.deployment.reply_check(self.roster)
        transport: Transport = Framed(doors, self._reply, strict=self.strict, check=check)
        if self.authority is not None:
            transport = WithAuthority(transport, self.authority.answer_frame, self._reply)
        frames = self.folder / "frames"
        frames.mkdir()
        return self._over(transport, Transcript("full", frames, self._types, self.names))

    def replayed(self) -> ServerHalf:
        """The run again, of a server that has the frames alone."""
        read = Transcript.read("full", self.folder / "frames", self._types, self.names)
        return self._over(Replay(read), Transcript("none"))

    def _types(self, name: str) -> Any:
        return call_types(self.made, name)

    def _over(self, transport: Transport, transcript: Transcript) -> ServerHalf:
        half = ServerHalf.over(
            transport, self.made, self.proposal.config, transcript, key=KEY, roster=self.roster
        )
        half.state = half.final_state(half.started())  # type: ignore[attr-defined]
        return half


def revealed(transcript: Transcript) -> dict[tuple[int, int], tuple[set[int], set[int]]]:
    """Of each client in each sum: with whom it revealed pads, and whose shares it revealed."""
    told: dict[tuple[int, int], tuple[set[int], set[int]]] = {}
    for k in range(transcript.count):
        call, response = transcript.content(k)
        if call.method not in ("reveal_pads", "reveal_shares"):
            continue
        for client in response.ids:
            lost = set(
                call.query.lost.table[list(call.query.lost.picks[call.to.index(client)])].tolist()
            )
            pads, shares = told.setdefault((call.step, client), (set(), set()))
            if call.method == "reveal_pads":
                pads |= lost
            else:
                shares |= set(range(CLIENTS)) - lost
    return told


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("name", FORGERIES)
def test_the_run_goes_on_without_who_forged_a_reply(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    method, forge = FORGERIES[name]
    world = World(federation, tmp_path / "forged")
    world.away.add((LOST, "contribute"))
    world.forged[LIAR, method] = forge
    half = world.run()
    # as the run in which the same client does not reply, but where its row is in the sum
    calm = World(federation, tmp_path / "calm")
    calm.away.add((LOST, "contribute"))
    if method != "reveal_shares":
        calm.away.add((LIAR, method))
    expected = calm.run()
    assert pack(half.state) == pack(expected.state)  # type: ignore[attr-defined]
    assert half.net.state.refused == {LIAR: {"frame": [1]}}
    assert half.net.state.lost == {LOST: [1]}
    for pads, shares in revealed(half.transcript).values():
        assert pads.isdisjoint(shares)  # both together would open a row
    # a replay of the server alone refuses the same reply
    assert world.replayed().net.state.refused == half.net.state.refused


@pytest.mark.parametrize("name", ["a box is missing", "a pad is missing", "a share is missing"])
def test_a_simulation_ends_whose_user_is_both_sides(
    name: str, federation: Federation, tmp_path: Path
) -> None:
    method, forge = FORGERIES[name]
    world = World(federation, tmp_path / "strict")
    world.strict = True
    world.away.add((LOST, "contribute"))
    world.forged[LIAR, method] = forge
    with pytest.raises(FrameError, match=f"client {LIAR} "):
        world.run()


@pytest.mark.always
def test_two_of_seven_who_alter_shares_change_nothing(
    federation: Federation, tmp_path: Path
) -> None:
    """They are not named: two who work together could have made two others look like this."""
    world = World(federation, tmp_path / "forged")
    for liar in (0, 3):
        world.forged[liar, "reveal_shares"] = FORGERIES["shares of other seeds"][1]
    half = world.run()
    expected = World(federation, tmp_path / "calm").run()
    assert pack(half.state) == pack(expected.state)  # type: ignore[attr-defined]
    assert half.net.state.refused == {}


@pytest.mark.parametrize("what", ["commitment", "boxes", "too many liars"])
def test_a_sum_that_nobody_can_read_is_given_up_and_the_next_one_is_not(
    what: str, federation: Federation, tmp_path: Path
) -> None:
    """A client that commits to another seed than it deals shares of, or deals none."""
    world = World(federation, tmp_path / "forged")
    if what == "commitment":

        def forge(reply: Any) -> Any:
            rows = reply.commitment
            return dataclasses.replace(reply, commitment=type(rows)(rows.table ^ 1, rows.index))

        world.forged[LIAR, "contribute"] = forge
    elif what == "boxes":
        world.forged[LIAR, "contribute"] = lambda reply: dataclasses.replace(
            reply, boxes=other(reply.boxes)
        )
    else:
        for liar in range(5):
            world.forged[liar, "reveal_shares"] = FORGERIES["shares of other seeds"][1]
    half = world.run()
    sums = read_sums(half)
    assert {event.round for event in sums} == {2}
    assert all(rounds == [1] for rounds in half.net.state.lost.values())
    assert half.net.state.refused == {}  # nobody is called a liar that may be none


def test_a_pad_that_a_survivor_made_up_shows_in_the_range_of_the_sum(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(federation, tmp_path / "forged")
    world.away.add((LOST, "contribute"))
    world.forged[LIAR, "reveal_pads"] = lambda reply: dataclasses.replace(
        reply, keys=other(reply.keys)
    )
    half = world.run()
    sums = read_sums(half)
    assert {event.round for event in sums} == {2}
    assert half.net.state.refused == {}  # it is the row of one of them, and nobody knows whose


# --- ciphertexts and pads ---


def altered(value: Any) -> Any:
    table = value.table ^ 1
    return Picks(table, value.picks) if isinstance(value, Picks) else Rows(table, value.index)


def sealed_otherwise(reply: Any) -> Any:
    return dataclasses.replace(reply, envelope=altered(reply.envelope))


def beyond_the_range(reply: Any) -> Any:
    """Padded numbers half the ring away, so that no sum with another client's is in range."""
    ((name, rows),) = vars(reply).items()
    half = -(2**31) if rows.table.dtype == torch.int32 else 2**62
    return dataclasses.replace(reply, **{name: Rows(rows.table + half, rows.index)})


def read_sums(half: ServerHalf) -> list[Event]:
    """Return the sums of updates that the server has read; rows in no sum are not among them."""
    events = half.net.state.ledger.events
    return [e for e in events if e.method == "contribute" and UNSEEN not in e.digests]


# by way: the verb of hidden replies, and what is made of one
HIDDEN: dict[str, tuple[str, Forge]] = {
    "ckks pairs": ("pairs", sealed_otherwise),
    "pads": ("pairs", beyond_the_range),
}


def hidden_cases() -> Iterator[golden.Case]:
    """Every protocol with encryption or pads."""
    for case in golden.cases():
        if case.way not in HIDDEN:
            continue
        try:
            case.build().check(CLIENTS)
        except UsageError:
            continue
        yield case


CASES = {case.name: case for case in hidden_cases()}


def outcome(world: World) -> tuple[ServerHalf | None, Any]:
    """The run and its state; where it cannot go on with so few clients, the sentence."""
    try:
        half = world.run()
    except SecureClusterError as error:
        return None, str(error)
    return half, pack(half.state)  # type: ignore[attr-defined]


@pytest.mark.few(4)
@pytest.mark.parametrize("name", CASES)
def test_every_protocol_goes_on_without_a_row_that_is_of_no_use(
    name: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_pair_network(monkeypatch)
    case = CASES[name]
    made = dataclasses.replace(case.build(), rounds=2, model="linear")
    verb, forge = HIDDEN[case.way]
    world = World(federation, tmp_path / "forged", made)
    world.first[verb] = forge
    half, found = outcome(world)
    calm = World(federation, tmp_path / "calm", made)
    calm.first[verb] = None
    assert found == outcome(calm)[1]
    if half is not None:
        assert list(half.net.state.refused) == [LIAR]
        assert list(half.net.state.refused[LIAR]) == ["frame"]
        assert LIAR not in half.net.state.lost
        assert world.replayed().net.state.refused == half.net.state.refused


def test_a_simulation_ends_by_a_row_that_is_of_no_use(
    federation: Federation, tmp_path: Path
) -> None:
    for name in ("oneshot, pads", "oneshot, ckks pairs"):
        verb, forge = HIDDEN[CASES[name].way]
        world = World(federation, tmp_path / name, CASES[name].build())
        world.strict = True
        world.first[verb] = forge
        with pytest.raises(FrameError, match=rf"client.{LIAR}"):
            world.run()


def one_cohort(**options: Any) -> Any:
    return FedAvg(rounds=2, epochs=1, model="linear", **options)


def test_a_sum_of_pairs_is_refused_whose_boxes_the_authority_does_not_open(
    federation: Federation, tmp_path: Path
) -> None:
    """The server cannot open them, so it names nobody."""
    # there is no next sum, and any client can move the numbers of all pairs
    pairs = World(federation, tmp_path / "pairs", CASES["oneshot, ckks pairs"].build())
    pairs.first["pairs"] = lambda reply: dataclasses.replace(reply, box=altered(reply.box))
    with pytest.raises(RefusedError, match="damaged, forged"):
        pairs.run()


# --- public keys ---


def unsigned(reply: Any) -> Any:
    return dataclasses.replace(reply, signature=altered(reply.signature))


def of_low_order(reply: Any) -> Any:
    return dataclasses.replace(reply, key=Rows(torch.zeros_like(reply.key.table)))


@pytest.mark.parametrize(
    ("method", "forge"),
    [
        ("sum_offer", unsigned),
        ("key_offer", of_low_order),
        exhaustive("sum_offer", of_low_order),
        exhaustive("key_offer", unsigned),
    ],
)
def test_a_key_that_its_client_did_not_sign_drops_nobody_else(
    method: str, forge: Forge, federation: Federation, tmp_path: Path
) -> None:
    made = dataclasses.replace(MADE, mask="permutation" if method == "key_offer" else "none")
    world = World(federation, tmp_path / "forged", made, enrolled=True)
    world.forged[LIAR, method] = forge
    half = world.run()
    calm = World(federation, tmp_path / "calm", made, enrolled=True)
    calm.away.add((LIAR, method))
    assert pack(half.state) == pack(calm.run().state)  # type: ignore[attr-defined]
    assert half.net.state.refused == {LIAR: {"frame": [1]}}
    assert set(half.net.state.lost) <= {LIAR}  # it has no seed, and answers other messages
    rounds = {event.round: len(event.ids) for event in half.net.state.ledger.events}
    assert rounds == {1: CLIENTS - 1, 2: CLIENTS}
    offers = [call.to for call in calls_of(half, method) if LIAR in call.to]
    assert len(offers) == 2  # in each round once
    again = world.replayed()
    assert again.net.state.refused == half.net.state.refused


def calls_of(half: ServerHalf, method: str) -> list[Any]:
    calls = [half.transcript.content(k)[0] for k in range(half.transcript.count)]
    return [call for call in calls if call.method == method]


def test_a_key_that_another_client_offered_drops_nobody_else(
    federation: Federation, tmp_path: Path
) -> None:
    """It is of no use, with or without a roster: nobody can tell the two clients apart."""
    world = World(federation, tmp_path / "forged")
    seen: list[Any] = []
    world.forged[0, "sum_offer"] = lambda reply: seen.append(reply) or reply
    world.forged[LIAR, "sum_offer"] = lambda reply: seen[0]
    half = world.run()
    assert half.net.state.refused == {LIAR: {"frame": [1]}}
    assert half.net.state.lost == {}
    first = next(e for e in half.net.state.ledger.events if e.method == "contribute")
    assert set(first.ids) == set(range(CLIENTS)) - {LIAR}
