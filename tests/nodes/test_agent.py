"""An agent answers for its node over a Unix socket, whoever asks and however they fail."""

from __future__ import annotations

import errno
import json
import os
import socket
import stat
import struct
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Thread
from threading import enumerate as enumerate_threads
from typing import Any

import pytest

from securecluster import Federation
from securecluster.data.facts import ClientFacts
from securecluster.errors import RefusedError, UsageError
from securecluster.nodes.agent import (
    AGREE,
    FACTS,
    FRAME,
    HELLO,
    MOST_WAITING,
    SCORE,
    Agent,
    ask,
    receive,
    send,
)
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.frame_bounds import largest_request
from securecluster.protocols import FedAvg

CLIENTS = 2
MADE = FedAvg(rounds=2, epochs=1, model="linear", clip=1.0, noise=1.0)


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


@pytest.mark.parametrize(
    "kind", ["file", "empty file", "pipe", "folder", "link", "link to a socket", "link to nothing"]
)
def test_what_is_no_socket_is_never_taken_for_one(kind: str, node: Node, tmp_path: Path) -> None:
    path, target = tmp_path / "path", tmp_path / "target"
    if kind == "file":
        path.write_text("precious")
    elif kind == "empty file":
        path.touch()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(target)
        if kind == "link":
            target.write_text("precious")
        elif kind == "link to a socket":
            left_socket(target)
    before = [(each, os.lstat(each)) for each in (path, target) if os.path.lexists(each)]
    with pytest.raises(UsageError, match="exists, and is no socket: give another path"):
        Agent(node, path)
    assert [(each, os.lstat(each)) for each in (path, target) if os.path.lexists(each)] == before


def left_socket(path: Path) -> None:
    """Leave the socket of an agent that was killed."""
    with socket.socket(socket.AF_UNIX) as left:
        left.bind(str(path))


@pytest.mark.parametrize("path", ["nowhere/socket", "file/socket"])
def test_a_path_without_a_folder_is_one_sentence(path: str, node: Node, tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"no socket can be made at .*: give another path"):
        Agent(node, tmp_path / path)


def test_an_agent_that_ends_removes_no_file_that_took_its_socket_s_place(
    node: Node, tmp_path: Path
) -> None:
    path = tmp_path / "socket"
    with serving(Agent(node, path)):
        path.unlink()
        path.write_text("precious")
    assert path.read_text() == "precious"
    path.unlink()
    with serving(Agent(node, path)):
        path.unlink()
        left_socket(path)
    assert stat.S_ISSOCK(path.lstat().st_mode)


@contextmanager
def silent(path: Path, count: int) -> Iterator[list[socket.socket]]:
    """Connections that say nothing."""
    ends = []
    try:
        for _ in range(count):
            end = socket.socket(socket.AF_UNIX)
            end.settimeout(10)
            end.connect(str(path))
            ends.append(end)
        yield ends
    finally:
        for end in ends:
            end.close()


def waiting() -> list[Thread]:
    """Return the threads of connections."""
    return [thread for thread in enumerate_threads() if "_one" in thread.name]


def test_whoever_connects_and_says_nothing_keeps_nobody_out(node: Node, tmp_path: Path) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path, silent(path, 50) as ends:
        assert json.loads(ask(path, FACTS, seconds=20))
        # the oldest ones gave way, so that what the agent holds does not grow
        assert ends[0].recv(1) == b""
        # the threads of those that gave way end soon after, and not in the same moment
        until = time.monotonic() + 20
        while len(waiting()) > MOST_WAITING + 1 and time.monotonic() < until:
            time.sleep(0.05)
        assert len(waiting()) <= MOST_WAITING + 1


@pytest.mark.parametrize("code", [errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ECONNABORTED])
def test_an_agent_outlives_a_lack_of_descriptors(
    code: int, node: Node, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    agent = Agent(node, tmp_path / "socket")
    accept, failures = agent._listener.accept, [code] * 3

    class Listener:
        """Listener of an agent whose process has no descriptors left for a while."""

        close = agent._listener.close

        def accept(self) -> Any:
            if failures:
                raise OSError(failures.pop(), "nothing left")
            return accept()

    monkeypatch.setattr(agent, "_listener", Listener())
    with serving(agent) as path:
        assert json.loads(ask(path, FACTS, seconds=20))
    assert not failures


ANNOUNCED = [
    (HELLO, (1 << 20) + 1), (AGREE, (1 << 20) + 1), (FACTS, 1 << 30), (SCORE, 1 << 32),
    ("other", (1 << 20) + 1), (FRAME, (1 << 20) + 1), (FRAME, 1 << 32), (FRAME, 1 << 63),
    ("x" * 17, 0),
]  # fmt: skip


@pytest.mark.parametrize(("kind", "length"), ANNOUNCED)
def test_what_is_announced_too_long_is_not_read(
    kind: str, length: int, node: Node, tmp_path: Path
) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path, silent(path, 1) as (end,):
        with suppress(ConnectionError):  # which may end before all is sent
            send(end, kind.encode())
            end.sendall(struct.pack("<Q", length))
            assert end.recv(1) == b""
        assert json.loads(ask(path, FACTS, seconds=20))


def test_a_frame_is_as_long_as_an_agreed_run_lets_it_be(
    node: Node, federation: Federation, tmp_path: Path
) -> None:
    with serving(Agent(node, tmp_path / "socket")) as path:
        proposal = Proposal.of(MADE, federation.facts, "float32", None)
        ask(path, AGREE, proposal.packed())
        bound = largest_request(MADE, proposal.config)
        assert 1 << 20 < bound < 2 << 20
        assert b"!refused" in ask(path, FRAME, bytes(bound))
        with pytest.raises(ConnectionError):
            ask(path, FRAME, bytes(bound + 1))
