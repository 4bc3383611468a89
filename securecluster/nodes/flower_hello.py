"""How a server over Flower learns which client each node is, and proves it for a run.

Needs the extra `flower`.
"""

from __future__ import annotations

import json
import secrets
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flwr.serverapp import Grid

from securecluster.data.facts import ClientFacts
from securecluster.errors import FrameError, RefusedError, UsageError
from securecluster.messaging import refusals
from securecluster.nodes import hello
from securecluster.nodes.agent import HELLO, INTRODUCE, OK
from securecluster.nodes.flower_messages import asked, pulled, pushed, record_of
from securecluster.privacy.masking.identities import AUTHORITY_NUMBER

if TYPE_CHECKING:
    from securecluster.privacy.masking.identities import Roster

SECONDS_BETWEEN_LOOKS = 0.5  # at which nodes are there, at first; then twice as long each time
# Flower starts a process for each question: on a machine that is too busy for them, questions that
# came as fast as they failed would make it busier
MOST_SECONDS_BETWEEN_LOOKS = 10.0
SECONDS_ON_THE_WAY = 10.0  # at most, of the time that a node tells: deadlines are not too early
LATEST = 1 << 40  # seconds since 1970, of a clock


@dataclass(frozen=True)
class Patience:
    """Times for which a server waits.

    Args:
        call: seconds for the replies to one call; None waits for all of them.
        start: seconds for the nodes to be there; None waits for all of them.
    """

    call: float | None = 3600.0
    start: float | None = 600.0


@dataclass(frozen=True)
class Introduction:
    """Facts that a party told of itself.

    Args:
        node: Flower's.
        facts: of its data; None for the key authority.
        clock: seconds since 1970 by its own clock when this machine's monotonic clock is 0; None
            where it told none.
    """

    node: int
    facts: ClientFacts | None
    clock: float | None


def gathered(
    grid: Grid,
    parties: Sequence[int],
    run: int,
    roster: Roster | None,
    patience: Patience,
    welcome: Sequence[int] = (),
    server: str = "",
) -> dict[int, Introduction]:
    """Return what each party told of itself, by its number.

    A party's number is that of its key on the roster, which it proves by a signature for this
    server and roster, of Flower's node and of a number drawn for it. Without a roster it is what
    the node says.

    Args:
        grid: of the ServerApp.
        parties: numbers of the clients, and of the key authority where there is one.
        welcome: numbers of parties that are not waited for.
        run: Flower's number of the run.
        roster: public keys of the clients; None takes their word.
        patience: how long to wait for them.
        server: name of the server, as owners of nodes know it.

    Raises:
        UsageError: not all parties are there, or two nodes are one of them.
    """
    began = time.monotonic()
    introductions: dict[int, Introduction] = {}
    missing = list(parties)
    pause = SECONDS_BETWEEN_LOOKS
    while missing:
        known_nodes = {introduction.node for introduction in introductions.values()}
        for number, introduction in _introductions(
            grid, known_nodes, run, roster, patience, server
        ):
            if number in introductions:
                party = name_of(number)
                raise UsageError(f"two of Flower's nodes are {party}: stop one of them")
            if number in parties or number in welcome:
                introductions[number] = introduction
        late = patience.start is not None and time.monotonic() - began > patience.start
        missing = [i for i in parties if i not in introductions]
        if missing and late:
            listed = ", ".join(map(name_of, missing))
            raise UsageError(
                f"after {patience.start:g} s these are not there: {listed}; start their nodes, or "
                "look at their logs"
            )
        if missing:
            time.sleep(pause)
            pause = min(2 * pause, MOST_SECONDS_BETWEEN_LOOKS)
    return introductions


def name_of(number: int) -> str:
    """Return a party in words.

    Args:
        number: on the roster.
    """
    return "the key authority" if number == AUTHORITY_NUMBER else f"client {number}"


def _introductions(
    grid: Grid,
    known_nodes: set[int],
    run: int,
    roster: Roster | None,
    patience: Patience,
    server: str,
) -> Iterator[tuple[int, Introduction]]:
    """Yield the number of each node that says who it is, and what it told.

    A stranger, whose key is not on the roster, keeps no run from its clients: it is left out.

    Args:
        grid: of the ServerApp.
        known_nodes: nodes that are not asked again.
        run: Flower's number of the run.
        roster: public keys of the clients; None takes their word.
        patience: how long to wait.
        server: its name.
    """
    nonce = secrets.token_hex(16)
    challenges = {
        node: hello.challenge_of(run, node, nonce, roster, server)
        for node in grid.get_node_ids()
        if node not in known_nodes
    }
    sent = (
        (node, node, record_of(json.dumps(challenge).encode()))
        for node, challenge in challenges.items()
    )
    seconds = patience.call if patience.start is None else patience.start
    for node, code, data in pulled(grid, pushed(grid, INTRODUCE, sent), seconds):
        arrived = time.monotonic()
        if code != OK:
            continue
        try:
            statement = hello.statement_of(hello.INTRODUCTION, challenges[node])
            number, facts, clock = introduced(data, statement, roster)
        except (FrameError, UsageError) as error:
            refusals.log(error)
            continue
        if clock is not None:
            clock += SECONDS_ON_THE_WAY - arrived
        yield number, Introduction(node, facts, clock)


def introduced(
    data: bytes, statement: bytes, roster: Roster | None
) -> tuple[int, ClientFacts | None, float | None]:
    """Return the number of a node, what it told of its data, and the time by its clock.

    The key authority tells nothing of data.

    Args:
        data: of the node's answer, which may be anything.
        statement: that it was to sign.
        roster: public keys of the clients; None takes its word.

    Raises:
        FrameError: no introduction, or one that the roster's key did not sign.
    """
    try:
        answer = json.loads(data)
        number = answer["number"]
        signature = bytes.fromhex(answer["signature"])
        clock = answer.get("clock")
        if clock is not None and not (type(clock) is int and 0 <= clock < LATEST):
            raise ValueError
        if type(number) is not int or number < 0:
            raise ValueError
    except (ValueError, KeyError, TypeError, RecursionError):
        raise FrameError("a node did not say which client it is") from None
    if roster is not None:
        roster.check(number, statement, signature)
    time_there = None if clock is None else float(clock)
    if number == AUTHORITY_NUMBER:
        return number, None, time_there
    return number, ClientFacts.read(answer["facts"]), time_there


def proven(
    grid: Grid,
    nodes: Mapping[int, int],
    run: str,
    roster: Roster | None,
    patience: Patience,
    server: str = "",
    needed: Sequence[int] | None = None,
) -> dict[int, int]:
    """Return the nodes of parties that prove to have agreed to a run.

    Args:
        grid: of the ServerApp.
        nodes: Flower's node of each party.
        run: fingerprint of the run.
        roster: public keys of the parties; None takes their word.
        patience: how long to wait.
        server: name of the server, as owners of nodes know it.
        needed: parties that have to prove it; None is all, others are left out.

    Raises:
        RefusedError: one of those needed does not.
    """
    if roster is None:
        return dict(nodes)
    nonce = secrets.token_hex(16)
    challenges = {
        node: hello.challenge_of(run, node, nonce, roster, server) for node in nodes.values()
    }
    sent = {node: record_of(json.dumps(one).encode()) for node, one in challenges.items()}
    answers = asked(grid, HELLO, sent, patience.call)
    proven_nodes = {}
    for party, node in sorted(nodes.items()):
        code, data = answers.get(node, (refusals.FAILED, b""))
        if code == OK and _signed(party, data, challenges[node], roster):
            proven_nodes[party] = node
        elif needed is None or party in needed:
            refusal = refusals.refusal("to sign that it agreed to the run", code)
            reason = "its signature is not that of its key" if code == OK else str(refusal)
            refusal_code = refusals.FRAME if code == OK else refusal.code
            raise RefusedError(f"{name_of(party)}: {reason}", refusal_code)
    return proven_nodes


def _signed(party: int, data: bytes, challenge: Mapping[str, object], roster: Roster) -> bool:
    """Return whether a party signed that it agreed to a run."""
    try:
        signature = bytes.fromhex(json.loads(data)["signature"])
        roster.check(party, hello.statement_of(hello.HELLO, challenge), signature)
    except (ValueError, KeyError, TypeError, RecursionError, FrameError) as error:
        refusals.log(FrameError(str(error)))
        return False
    return True
