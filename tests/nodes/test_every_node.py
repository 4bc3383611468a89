"""Nodes of every protocol and protection, under what happens to messages on many machines.

Each frame reaches its node twice at once, in processes that know nothing but the node's folder, so
what a node had in memory is lost after each reply. The run is the run in this process.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from cases import stub_pair_network
from seeded_node import SeededNode

from benchmarks import golden
from securecluster import Federation, Settings
from securecluster.core.serialization import pack
from securecluster.errors import UsageError
from securecluster.messaging import run_number, wire
from securecluster.messaging.transcript import Transcript
from securecluster.nodes.policy import Policy
from securecluster.nodes.proposal import Proposal
from securecluster.parties.derived import call_types
from securecluster.parties.server_half import ServerHalf
from securecluster.runtime.transport import Framed

CLIENTS = 4
WAYS = (
    "plain", "masked", "secagg", "pads", "pads and secagg", "noised clients", "noised examples",
    "secagg noised in shares",
)  # fmt: skip
CASES = {case.name: case for case in golden.cases() if case.way in WAYS}
KEYS = Settings(keys_from_seed=True, threads=1)


def run(
    made: Any, federation: Federation, folder: Path, second: bool = False
) -> tuple[Any, ServerHalf]:
    """Run the server over nodes that answer each frame twice at once.

    Args:
        second: it gets the reply that was made second, since the first one was lost.
    """

    def node(i: int) -> SeededNode:
        policy = Policy(roster=False)
        own = federation.select([i])
        return SeededNode(made, own, folder / f"node-{i}", number=i, policy=policy)

    # noise and masks are those of the run in one process, which has no number
    with mock.patch.object(run_number, "drawn", lambda: None):
        proposal = Proposal.of(made, federation.facts, "float32", None)
    for i in range(CLIENTS):
        node(i).agree(proposal.packed())

    def door(pool: ThreadPoolExecutor, i: int, frame: bytes) -> bytes:
        replies = pool.map(lambda living: living.answer(frame), [node(i), node(i)])
        again, once = sorted(replies, key=len)
        # a request that was carried out before reports no second training
        trained = made.privacy.per_example and wire.peek(frame).method == "train_locally"
        assert once == again or trained
        return again if second else once

    with ThreadPoolExecutor(2) as pool:
        doors = {i: partial(door, pool, i) for i in range(CLIENTS)}
        transport = Framed(doors, lambda name: call_types(made, name)[1])
        half = ServerHalf.over(transport, made, proposal.config, Transcript("full"))
        return half.final_state(half.started()), half


@pytest.mark.always
@pytest.mark.few(1)
@pytest.mark.parametrize("name", CASES)
def test_a_node_that_forgets_and_hears_all_twice_makes_the_run_in_this_process(
    name: str, federation: Federation, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    stub_pair_network(monkeypatch)  # the server's, of users that it makes up in both runs alike
    try:
        made = CASES[name].build()
        whole = made.fit(federation, KEYS)
    except UsageError as error:
        pytest.skip(f"refused by name: {error}")
    state, half = run(made, federation, tmp_path)
    assert pack(state) == pack(whole.state_)
    told = half.transcript.totals()
    assert [told[way] for way in ("up", "down")] == [whole.bytes_[way] for way in ("up", "down")]
    calls = [(entry.method, entry.to) for entry in half.transcript.entries]
    assert calls == [(entry.method, entry.to) for entry in whole.transcript_.entries]
    events = [(e.method, e.ids, e.round) for e in whole.ledger_.events]
    assert [(e.method, e.ids, e.round) for e in half.net.state.ledger.events] == events
    assert half.net.state.lost == {} and half.net.state.refused == {}


def test_a_training_counts_whose_first_reply_was_lost(
    federation: Federation, tmp_path: Path
) -> None:
    made = CASES["srfca loss, noised examples"].build()
    whole = made.fit(federation, KEYS)
    _, half = run(made, federation, tmp_path, second=True)
    trainings = [e for e in whole.ledger_.events if e.method == "train_locally"]
    assert trainings and all(e.mechanism == "dp-sgd" for e in trainings)
    assert half.net.state.ledger.events == whole.ledger_.events
