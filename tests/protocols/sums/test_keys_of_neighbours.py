"""Clients are sent the keys of their neighbours alone, under a root that sums are bound to."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from cases import DOUBLE, Lost, framed, no_client, node_each, run_server, two_clusters

from securecluster import Federation
from securecluster.errors import PolicyError
from securecluster.messaging.messages import Call
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.protections.secure_sums.double_mask import SumContext, UnmaskingGuard
from securecluster.protections.secure_sums.graph import complete_graph
from securecluster.protocols import FedAvg, RandomClusters
from securecluster.runtime.endpoint import releases_of
from securecluster.runtime.transport import InProcess, Recorded

CLIENTS = 30
NEIGHBOURS = 20
SPARSE: dict[str, Any] = {
    "rounds": 3, "epochs": 1, "model": "linear", "aggregation": "secagg", "cohort_size": 0,
    "lost": 0.05, "colluding": 0.0,
}  # fmt: skip
PLAIN = {**SPARSE, "aggregation": "plain", "lost": 0.1, "colluding": 0.1}


class Parties:
    """A run whose clients are each on a node of their own."""

    def __init__(self, made: Any, federation: Federation, lost: Lost = no_client) -> None:
        self.nodes = node_each(made, federation, DOUBLE)
        self.transcript = Transcript("full")
        config = made.config(federation, DOUBLE.dtype)
        answered = framed(made, self.nodes).exchange

        def reach(call: Call) -> Any:
            kept = [k for k, client in enumerate(call.to) if client not in lost(call)]
            return answered(call.select(kept))

        self.net = build_network(
            made, Recorded(InProcess(reach, no_client), self.transcript), config
        )
        self.state = run_server(made, self.net)

    @property
    def models(self) -> torch.Tensor:
        return self.state.outbox.posts[0].table

    def calls(self, method: str) -> list[Call]:
        entries = self.transcript.entries
        return [self.transcript.content(k)[0] for k, e in enumerate(entries) if e.method == method]

    def keys(self, client: int) -> set[int]:
        """The clients whose keys a node has."""
        return set(self.nodes[client].halves["sum"]._exchange.public)


@pytest.fixture(scope="module")
def federation() -> Federation:
    return two_clusters(CLIENTS, 10)


def test_keys_of_neighbours_are_sent_once_where_lists_stay(federation: Federation) -> None:
    parties = Parties(FedAvg(**SPARSE), federation)
    (call,) = parties.calls("sum_keys")
    for k, client in enumerate(call.to):
        sent = {int(call.query.ids.table[row]) for row in call.query.ids.picks[k]}
        assert len(sent) == NEIGHBOURS and client not in sent
        assert parties.keys(client) == sent == set(parties.net.state.sum_keys.sent[client])
        assert len(call.query.path.picks[k]) == 5
    plain = Parties(FedAvg(**PLAIN), federation)
    torch.testing.assert_close(parties.models, plain.models, rtol=0, atol=1e-6)


def test_sampled_clients_are_sent_what_their_next_sum_needs_under_the_next_root(
    federation: Federation,
) -> None:
    sampled = {"participation": 0.8}
    parties = Parties(FedAvg(**SPARSE, **sampled), federation)
    plain = Parties(FedAvg(**PLAIN, **sampled), federation)
    torch.testing.assert_close(parties.models, plain.models, rtol=0, atol=1e-6)
    directory = parties.net.state.sum_keys
    roots = [bytes(call.query.root.value.numpy()) for call in parties.calls("sum_keys")]
    assert 2 <= len(set(roots)) == len(roots) <= 3
    assert len(directory.offers) > 24
    for client, sent in directory.sent.items():
        assert len(sent) == len(set(sent)) and client not in sent
        assert parties.keys(client) == set(sent)
        pairwise = parties.nodes[client].halves["sum"]._exchange._keys.secrets.pairwise
        assert pairwise.roots.keys() == {client} and pairwise.roots[client] in roots
    # a client that took part in several sums has keys of several graphs
    assert max(map(len, directory.sent.values())) > NEIGHBOURS


def test_where_a_client_takes_no_keys_the_others_have_other_neighbours(
    federation: Federation,
) -> None:
    deaf = Parties(
        FedAvg(**{**SPARSE, "rounds": 1}),
        federation,
        lambda call: {3} if call.method == "sum_keys" else set(),
    )
    plain = Parties(
        FedAvg(**{**PLAIN, "rounds": 1}),
        federation,
        lambda call: {3} if call.method == "contribute" else set(),
    )
    torch.testing.assert_close(deaf.models, plain.models, rtol=0, atol=1e-6)
    (rows,) = deaf.calls("contribute")
    assert rows.to == tuple(client for client in range(CLIENTS) if client != 3)
    first, *again, last = deaf.calls("sum_keys")
    assert [call.to for call in again] == [(3,)] * 4
    assert len(first.to) == CLIENTS and 3 not in last.to
    sent = {len(picks) for picks in last.query.ids.picks}
    assert 0 < max(sent) < NEIGHBOURS


def test_few_clients_are_sent_all_keys_at_once_whatever_clusters_come_later() -> None:
    made = RandomClusters(rounds=3, epochs=1, model="linear", aggregation="secagg", k=2)
    parties = Parties(made, two_clusters(8, 20))
    (call,) = parties.calls("sum_keys")
    assert {len(picks) for picks in call.query.ids.picks} == {7}


def test_a_client_refuses_a_sum_without_the_key_of_a_neighbour(federation: Federation) -> None:
    parties = Parties(FedAvg(**{**SPARSE, "rounds": 1}), federation)
    service: Any = parties.nodes[0].halves["sum"]
    release = releases_of(type(parties.nodes[0].client))["contribute"]
    (rows,) = parties.calls("contribute")
    own = rows.select([0])
    service.check(own, release)
    pairwise = service._exchange._keys.secrets.pairwise
    neighbour = min(pairwise.public)
    key = pairwise.public.pop(neighbour)
    with pytest.raises(PolicyError, match=f"client 0 has no key of client {neighbour}, so it"):
        service.check(own, release)
    pairwise.public[neighbour] = key
    # under another root others are its neighbours
    pairwise.roots[0] = bytes(32)
    with pytest.raises(PolicyError, match="client 0 has no key of client"):
        service.check(own, release)
    pairwise.roots.clear()
    with pytest.raises(PolicyError, match="client 0 was told no keys of others"):
        service.check(own, release)


def test_rows_that_never_change_are_opened_over_one_list_whatever_the_root() -> None:
    guard = UnmaskingGuard(0, 2)

    def context(call: int, root: bytes, members: tuple[int, ...] = (0, 1, 2, 3, 4)) -> SumContext:
        return SumContext(b"run", "points", call, 0, members, len(members) - 1, root, "points")

    first, second = context(1, b"first root"), context(2, b"second root")
    for asked in (first, second):
        guard.take_part(asked, complete_graph(asked.members, asked.threshold), b"row")
    assert guard.reveal_shares(first, (0, 1, 2, 3)) == (0, 1, 2, 3)
    with pytest.raises(PolicyError, match="over another list of survivors"):
        guard.reveal_shares(second, second.members)
    fewer = context(3, b"third root", (0, 1, 2, 4))
    with pytest.raises(PolicyError, match="over another list of survivors"):
        guard.take_part(fewer, complete_graph(fewer.members, fewer.threshold), b"row")
    assert guard.reveal_shares(second, (0, 1, 2, 3)) == (0, 1, 2, 3)
    # another root does not reopen what the earlier one closed
    with pytest.raises(PolicyError, match="with these members and keys"):
        guard.reveal_shares(dataclasses.replace(first, root=b"second root"), (0, 1, 2, 3))
