"""A party keeps a bounded number of runs in which nothing has left it, and all others."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest

from securecluster import Federation
from securecluster.errors import FrameError
from securecluster.messaging.transcript import Transcript
from securecluster.nodes import idle_runs
from securecluster.nodes.idle_runs import MOST_IDLE, SECONDS_FOR_FIRST, forget_surplus
from securecluster.nodes.node import Node
from securecluster.nodes.party import AGREED, LOCK, OWN, STATE
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.protocols import FedAvg
from securecluster.runtime.transport import Framed

CLIENTS = 4
FLOOD = 3 * MOST_IDLE
# the first frames agree on the mask's seed, and release nothing
MADE = FedAvg(rounds=2, epochs=1, model="linear", mask="permutation", clip=1.0, noise=1.0)
OWNER = Policy(roster=False)


class Stop(Exception):  # noqa: N818 (stops a server, and is no error of it)
    """Raised by a node's door."""


@pytest.fixture
def nodes(federation: Federation, tmp_path: Path) -> list[Node]:
    return [
        Node(
            MADE,
            federation.select([i]),
            tmp_path / f"node-{i}",
            number=i,
            policy=OWNER,
            durable=False,
        )
        for i in range(CLIENTS)
    ]


def proposed(federation: Federation, seed: int) -> Proposal:
    """Return a proposal, another one for each seed."""
    return Proposal.of(MADE, replace(federation.facts, seed=seed), "float32", None)


def answer(nodes: list[Node], proposal: Proposal, frames: int | None = None) -> ServerHalf:
    """Carry out a run over nodes that have agreed to it, or its first frames to each."""
    asked = dict.fromkeys(range(CLIENTS), 0)

    def door(node: Node, frame: bytes) -> bytes:
        if asked[node.number] == frames:
            raise Stop
        asked[node.number] += 1
        return node.answer(frame)

    doors = {node.number: partial(door, node) for node in nodes}
    transport = Framed(doors, lambda name: call_types(MADE, name)[1])
    half = ServerHalf.over(transport, MADE, proposal.config, Transcript("full"))
    half.final_state(half.started())
    return half


def agree(nodes: list[Node], proposal: Proposal) -> str:
    (run,) = {node.agree(proposal.packed()) for node in nodes}
    return f"run-{run}"


def test_a_flood_of_proposals_takes_bounded_room_and_honest_runs_go_on(
    federation: Federation, nodes: list[Node]
) -> None:
    waits, runs = proposed(federation, 1), proposed(federation, 2)
    agree(nodes, waits)
    name = agree(nodes, runs)
    with pytest.raises(Stop):
        answer(nodes, runs, frames=1)
    state = (nodes[0].folder / name / STATE).read_bytes()
    for seed in range(10, 10 + FLOOD):
        nodes[0].agree(proposed(federation, seed).packed())
    assert len(nodes[0].runs()) == MOST_IDLE + 1
    assert len(list(nodes[0].folder.iterdir())) < MOST_IDLE + 10
    # one that was under way, one that waited, and one that comes afterwards
    assert (nodes[0].folder / name / STATE).read_bytes() == state
    answer(nodes, waits)
    after = proposed(federation, 3)
    agree(nodes, after)
    answer(nodes, after)


def test_runs_that_begin_and_release_nothing_are_bounded_too(
    federation: Federation, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_runs, "MOST_IDLE", 4)
    honest = proposed(federation, 1)
    name = agree(nodes, honest)
    answer(nodes, honest)
    ledger = (nodes[0].folder / "ledger-client.jsonl").read_bytes()
    spent = nodes[0].spent()
    for seed in range(10, 22):
        begun = proposed(federation, seed)
        agree(nodes, begun)
        with pytest.raises(Stop):
            answer(nodes, begun, frames=1)
    kept = nodes[0].runs()
    assert len(kept) == 4 + 1
    assert name in kept
    assert (nodes[0].folder / name / STATE).exists()
    assert (nodes[0].folder / "ledger-client.jsonl").read_bytes() == ledger
    assert nodes[0].spent() == spent


def test_runs_that_released_something_are_never_forgotten(
    federation: Federation, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_runs, "MOST_IDLE", 2)
    names = []
    for seed in range(6):
        honest = proposed(federation, seed)
        names.append(agree(nodes, honest))
        answer(nodes, honest)
    assert nodes[0].runs() == sorted(names)


def test_what_was_forgotten_is_refused_and_can_be_agreed_to_again(
    federation: Federation, nodes: list[Node], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_runs, "MOST_IDLE", 2)
    runs = [proposed(federation, seed) for seed in range(4)]
    names = [agree(nodes, proposal) for proposal in runs]
    (gone, also) = sorted(set(names) - set(nodes[0].runs()))
    assert {gone, also} == {names[1], names[2]}
    with pytest.raises(FrameError, match="agreed to no run of this configuration"):
        nodes[0]._living(names[1].removeprefix("run-"))
    agree(nodes, runs[1])
    answer(nodes, runs[1])


# ages of runs in seconds, of which a party keeps four, and the positions of those that go
AGES: list[tuple[list[float], set[int]]] = [
    ([], set()),
    ([9, 8, 7, 6], set()),
    ([9, 8, 7, 6, 5], {2}),
    ([9, 8, 7, 6, 5, 4, 3], {2, 3, 4}),
    ([1, 2, 3, 4, 5], {2}),
    ([SECONDS_FOR_FIRST + 60, 8, 7, 6, 5], {0}),
    ([SECONDS_FOR_FIRST + 60, SECONDS_FOR_FIRST + 50, 7, 6, 5, 4, 3], {0, 1, 4}),
]


@pytest.mark.parametrize("files", [(AGREED,), (AGREED, STATE)])
@pytest.mark.parametrize(("ages", "gone"), AGES)
def test_the_first_keep_their_place_for_a_while(
    ages: list[float],
    gone: set[int],
    files: tuple[str, ...],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(idle_runs, "MOST_IDLE", 4)
    names = [f"run-{k}" for k in range(len(ages))]
    for name, age in zip(names, ages, strict=True):
        (tmp_path / name).mkdir()
        for file in files:
            (tmp_path / name / file).write_text("")
        os.utime(tmp_path / name / files[-1], (time.time() - age, time.time() - age))
    (tmp_path / LOCK).touch()
    forget_surplus(tmp_path, OWN, names, files)
    left = {path.name for path in tmp_path.iterdir()} - {LOCK}
    assert left == {name for k, name in enumerate(names) if k not in gone}


def test_a_folder_with_a_file_of_somebody_else_keeps_that_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(idle_runs, "MOST_IDLE", 0)
    (tmp_path / "run-1").mkdir()
    for file in (AGREED, "notes.txt"):
        (tmp_path / "run-1" / file).write_text("")
    forget_surplus(tmp_path, OWN, ["run-1"], (AGREED,))
    assert [path.name for path in (tmp_path / "run-1").iterdir()] == ["notes.txt"]
