"""Replies that parse and are of no use in a secure sum: the run goes on without their client."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from securecluster import Federation, LabelSwap
from securecluster.core.serialization import pack
from securecluster.errors import FrameError
from securecluster.messaging import wire
from securecluster.messaging.messages import Header, Picks
from securecluster.messaging.transcript import Transcript
from securecluster.protocols import FedAvg
from securecluster.runs.deployment import Deployment
from securecluster.runs.derived import call_types
from securecluster.runs.node import Node
from securecluster.runs.policy import Policy
from securecluster.runs.proposal import Proposal
from securecluster.runs.server_half import ServerHalf
from securecluster.runtime.transport import Framed, Replay

pytestmark = pytest.mark.filterwarnings("ignore:.*:securecluster.errors.SecureClusterWarning")

CLIENTS = 7
LIAR, LOST = 1, 5
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
    """Numbers of 33 bytes that are no remainders modulo the prime."""
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
    """Nodes, some of which are lost or forge their replies in the first round."""

    def __init__(self, federation: Federation, folder: Path) -> None:
        folder.mkdir()
        self.folder = folder
        policy = Policy(roster=False)
        self.proposal = Proposal.of(MADE, federation.facts, "float32", None)
        self.nodes = [
            Node(MADE, federation.select([i]), folder / f"n{i}", number=i, policy=policy)
            for i in range(CLIENTS)
        ]
        for node in self.nodes:
            node.agree(self.proposal.packed())
        # (client, method) in which it is away
        self.away: set[tuple[int, str]] = set()
        self.forged: dict[tuple[int, str], Forge] = {}
        self.strict = False
        self.names = [str(i) for i in range(CLIENTS)]

    def _door(self, i: int, frame: bytes) -> bytes:
        header = wire.peek(frame)
        key = (i, header.method)
        if header.round == 1 and key in self.away:
            raise ConnectionError
        reply = self.nodes[i].answer(frame)
        if header.round != 1 or key not in self.forged:
            return reply
        found: Header
        found, message, receipts = wire.decode_reply(reply, self._reply(header.method))
        return wire.encode(found, self.forged[key](message), 0, receipts)

    def _reply(self, method: str) -> type:
        reply: type = call_types(MADE, method)[1]
        return reply

    def run(self) -> ServerHalf:
        doors = {i: lambda frame, i=i: self._door(i, frame) for i in range(CLIENTS)}
        check = Deployment(MADE, self.proposal.config).reply_check()
        transport = Framed(doors, self._reply, strict=self.strict, check=check)
        frames = self.folder / "frames"
        frames.mkdir()
        transcript = Transcript("full", frames, lambda name: call_types(MADE, name), self.names)
        half = ServerHalf.over(transport, MADE, self.proposal.config, transcript)
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
    types = lambda name: call_types(MADE, name)  # noqa: E731
    read = Transcript.read("full", tmp_path / "forged" / "frames", types, world.names)
    again = ServerHalf.over(Replay(read), MADE, world.proposal.config, Transcript("none"))
    again.final_state(again.started())
    assert again.net.state.refused == half.net.state.refused


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
    sums = [event for event in half.net.state.ledger.events if event.method == "contribute"]
    assert {event.round for event in sums} == {2}
    assert all(rounds == [1] for rounds in half.net.state.lost.values())
    # only clients that do not open the boxes refuse, and nobody is called a liar that may be none
    refused = set(half.net.state.refused)
    assert refused == (set(range(CLIENTS)) - {LIAR} if what == "boxes" else set())


def test_a_pad_that_a_survivor_made_up_shows_in_the_range_of_the_sum(
    federation: Federation, tmp_path: Path
) -> None:
    world = World(federation, tmp_path / "forged")
    world.away.add((LOST, "contribute"))
    world.forged[LIAR, "reveal_pads"] = lambda reply: dataclasses.replace(
        reply, keys=other(reply.keys)
    )
    half = world.run()
    sums = [event for event in half.net.state.ledger.events if event.method == "contribute"]
    assert {event.round for event in sums} == {2}
    assert half.net.state.refused == {}  # it is the row of one of them, and nobody knows whose
