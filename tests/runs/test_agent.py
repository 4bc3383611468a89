"""An agent answers for its node over a Unix socket, whoever asks and however they fail."""

from __future__ import annotations

import json
import socket
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Thread
from typing import Any

import pytest

from securecluster import Federation, LabelSwap
from securecluster.data.facts import ClientFacts
from securecluster.errors import RefusedError, UsageError
from securecluster.protocols import FedAvg
from securecluster.runs.agent import AGREE, FACTS, FRAME, Agent, ask, receive, send
from securecluster.runs.node import Node
from securecluster.runs.policy import Policy
from securecluster.runs.proposal import Proposal

MADE = FedAvg(rounds=2, epochs=1, model="linear", clip=1.0, noise=1.0)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return Federation.simulate(
        "digits", scenario=LabelSwap(clusters=2), clients=2, samples=20, seed=0
    )


@contextmanager
def serving(agent: Agent) -> Iterator[Path]:
    thread = Thread(target=agent.serve)
    thread.start()
    try:
        yield agent.path
    finally:
        agent.stop()
        thread.join(timeout=10)
        assert not thread.is_alive()


@pytest.fixture
def node(federation: Federation, tmp_path: Path) -> Node:
    policy = Policy(roster=False)
    return Node(MADE, federation.select([0]), tmp_path / "node", number=0, policy=policy)


def test_what_a_node_answers_comes_over_the_socket(
    node: Node, federation: Federation, tmp_path: Path
) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path:
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        told = ClientFacts.read(json.loads(ask(path, FACTS)))
        assert told == federation.facts_of(0)
        proposal = Proposal.of(MADE, federation.facts, "float32", None)
        assert ask(path, AGREE, proposal.packed()).decode() in node.runs()[0]
        assert b"!refused" in ask(path, FRAME, b"junk")
    assert not path.exists()


def test_an_error_that_nobody_foresaw_is_a_code_and_the_agent_goes_on(
    node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    with monkeypatch.context() as patch, serving(Agent(node, tmp_path / "socket")) as path:
        patch.setattr(node, "facts", lambda: {}["37.25"])
        with pytest.raises(RefusedError, match="could not be answered") as told:
            ask(path, FACTS)
        assert "37.25" not in str(told.value) and "37.25" in caplog.text
        patch.undo()
        assert json.loads(ask(path, FACTS))


def test_a_refusal_is_a_code_and_no_text(
    node: Node, federation: Federation, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    quiet = FedAvg(rounds=2, epochs=1, model="linear", clip=1.0, noise=0.1)
    proposal = Proposal.of(quiet, federation.facts, "float32", None)
    with serving(Agent(node, tmp_path / "socket")) as path:
        with pytest.raises(RefusedError, match="the node refused agree: its own protocol"):
            ask(path, AGREE, proposal.packed())
        with pytest.raises(RefusedError, match="damaged, forged"):
            ask(path, AGREE, b"junk")
        with pytest.raises(RefusedError, match="could not be answered"):
            ask(path, "other")
    # the node's own log says why
    assert "noise = 0.1" in caplog.text


@pytest.mark.parametrize("sent", [b"", b"\x01", b"\xff" * 8, b"\x05" + bytes(7) + b"fac"])
def test_whoever_asks_badly_or_leaves_stops_no_agent(
    sent: bytes, node: Node, tmp_path: Path
) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path:
        for _ in range(3):
            with socket.socket(socket.AF_UNIX) as end:
                end.connect(str(path))
                end.sendall(sent)
        assert ask(path, FACTS)


def test_nobody_answers_where_no_agent_is(tmp_path: Path) -> None:
    with pytest.raises(ConnectionError, match="no agent answers"):
        ask(tmp_path / "socket", FACTS)


def test_an_agent_that_ends_before_it_answers_is_a_lost_client(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(path))
    listener.listen()

    def hang_up() -> None:
        end, _ = listener.accept()
        receive(end, 16)
        end.close()

    thread = Thread(target=hang_up)
    thread.start()
    with pytest.raises(ConnectionError):
        ask(path, FACTS)
    thread.join()
    listener.close()


def test_a_socket_has_one_agent_and_outlives_a_killed_one(node: Node, tmp_path: Path) -> None:
    path = tmp_path / "socket"
    left = socket.socket(socket.AF_UNIX)
    left.bind(str(path))  # of an agent that was killed
    left.close()
    with serving(Agent(node, path)), pytest.raises(UsageError, match="another agent serves"):
        Agent(node, path)
    with pytest.raises(UsageError, match="too long for a socket"):
        Agent(node, tmp_path / ("x" * 120))


def test_a_message_may_have_any_bytes() -> None:
    left, right = socket.socketpair()
    data = bytes(range(256)) * 1000
    thread = Thread(target=send, args=(left, data))
    thread.start()
    assert receive(right, len(data)) == data
    thread.join()
    send(left, b"more")
    with pytest.raises(EOFError, match="4 bytes"):
        receive(right, 3)
    left.close()
    right.close()


def two_at_once(path: Path) -> list[Any]:
    answers: list[Any] = []
    both = [Thread(target=lambda: answers.append(ask(path, FACTS))) for _ in range(2)]
    for thread in both:
        thread.start()
    for thread in both:
        thread.join()
    return answers


def test_two_ask_at_once(node: Node, tmp_path: Path) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path:
        first, second = two_at_once(path)
    assert first == second
