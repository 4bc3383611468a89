"""The three verbs, the release policy, and the transports under them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Annotated

import numpy as np
import pytest
import torch
from cases import two_clusters

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, UsageError
from securecluster.messaging.bounds import Real, Upto
from securecluster.messaging.messages import Call, Empty, Rows
from securecluster.messaging.parties import SERVER, WIRE, client
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.privacy.masking.key_agreement import KeyRing
from securecluster.privacy.pipeline import Pipeline
from securecluster.protocols import CFL, ClusteringProtocol, FedAvg, Settings
from securecluster.runtime.call_context import CallContext
from securecluster.runtime.endpoint import GATHER, PAIRS, SUM, Endpoint, answers
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import Framed, InProcess, Recorded

CONFIG = "c" * 32
M = 7
NOBODY: Callable[[Call], set[int]] = lambda call: set()  # noqa: E731


@dataclass(frozen=True, eq=False)
class Values:
    values: Annotated[Rows, Real((Upto("width", 1000),))]


@dataclass(frozen=True, eq=False)
class Nothing:
    pass


class Toy:
    """Clients that hold one row each."""

    def __init__(self, rows: torch.Tensor) -> None:
        self.rows = rows

    @answers(GATHER, SUM, unmasked=("values",))
    def row(self, context: CallContext, query: Empty) -> Values:
        return Values(Rows(self.rows[list(context.positions)]))

    @answers(SUM, unmasked=("values",))
    def summed(self, context: CallContext, query: Empty) -> Values:
        return self.row(context, query)

    @answers(PAIRS, unmasked=("values",))
    def relevance(self, context: CallContext, query: Empty) -> Values:
        return self.row(context, query)

    @answers(GATHER, private=False)
    def ready(self, context: CallContext, query: Empty) -> Nothing:
        return Nothing()

    def hidden(self, context: CallContext, query: Empty) -> Values:
        return self.row(context, query)


def network(
    rows: torch.Tensor, lost: Callable[[Call], set[int]] = NOBODY, chunk: int | None = None
) -> ServerChannel:
    pipeline = Pipeline()
    endpoint = Endpoint(
        Toy(rows),
        range(len(rows)),
        CONFIG,
        pipeline,
        KeyRing(CONFIG, Randomness(0), lambda seed: None),
    )
    transport = InProcess(endpoint.answer, lost, chunk)
    net = ServerChannel(len(rows), transport, CONFIG, pipeline, Randomness(0))
    net.round = 4
    return net


ROWS = torch.from_numpy(np.random.default_rng(0).normal(size=(M, M)))


def test_a_plain_sum_never_holds_more_replies_than_a_chunk() -> None:
    held: list[int] = []

    def seen(call: Call) -> set[int]:
        held.append(len(call.to))
        return set()

    network(ROWS, seen, chunk=3).sum(Toy.row, Empty(), to=range(M))
    assert held == [3, 3, 1]


def test_every_private_release_is_in_the_ledger_and_nothing_else() -> None:
    net = network(ROWS)
    net.gather(Toy.ready, Empty(), to=range(M))
    assert net.state.ledger.epsilon == 0
    net.gather(Toy.row, Empty(), to=(0, 1))
    net.sum(Toy.summed, Empty(), to=range(M))
    net.pairs(Toy.relevance, Empty(), to=range(M))
    assert [(e.method, e.verb, e.clients) for e in net.state.ledger.events] == [
        ("row", "gather", 2),
        ("summed", "sum", M),
        ("relevance", "pairs", M),
    ]
    assert net.state.ledger.epsilon == float("inf")
    assert net.state.ledger.reported() is None


@pytest.fixture
def tiny() -> Federation:
    return two_clusters(4, 20)


def served(
    method: ClusteringProtocol, federation: Federation, transport: InProcess | Framed
) -> tuple[Transcript, list[int]]:
    transcript = Transcript("full")
    net = build_network(
        method, Recorded(transport, transcript), method.config(federation, "float32")
    )
    state = method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    return transcript, state.labels


def test_a_dropped_connection_is_a_dropout_and_a_stale_reply_is_refused(tiny: Federation) -> None:
    method = FedAvg(rounds=2)
    nodes = {i: build_client(method, tiny, Settings(), [i]).answer_frame for i in range(4)}
    kept: list[bytes] = []

    def gone(data: bytes) -> bytes:
        raise ConnectionError

    def stale(data: bytes) -> bytes:
        kept.append(nodes[0](data))
        return kept[0]

    from securecluster.messaging.messages import Ack
    from securecluster.protocols.common.messages import Update

    replies = {"train": Update, "contribute": Update, "receive": Ack}.__getitem__
    transcript, _ = served(method, tiny, Framed({**nodes, 2: gone}, replies))
    assert all(entry.lost == (2,) for entry in transcript.entries)
    nodes = {i: build_client(method, tiny, Settings(), [i]).answer_frame for i in range(4)}
    with pytest.raises(FrameError, match="another request"):
        served(method, tiny, Framed({**nodes, 0: stale}, replies))


def test_parties_see_their_own_frames_and_the_wire_sees_lengths(tiny: Federation) -> None:
    fitted = CFL(rounds=2).fit(tiny, Settings(transcript="full"))
    server, third, wire = (list(fitted.transcript_.seen_by({p})) for p in (SERVER, client(3), WIRE))
    assert len(server) == len(wire) > len(third) > 0
    assert all(seen.content is not None for seen in server + third)
    assert all(seen.content is None for seen in wire)
    assert {seen.sender for seen in third} | {seen.receiver for seen in third} == {
        SERVER,
        client(3),
    }
    assert sum(s.bytes for s in wire if s.receiver == SERVER) == fitted.bytes_["up"]
    updates = [s for s in third if s.method == "train" and s.sender == client(3)]
    assert [s.content.delta.values.shape[0] for s in updates] == [1, 1]
    with pytest.raises(UsageError, match="transcript='full'"):
        list(CFL(rounds=1).fit(tiny, Settings(transcript="sizes")).transcript_.seen_by({SERVER}))
    assert list(CFL(rounds=1).fit(tiny, Settings(transcript="sizes")).transcript_.seen_by({WIRE}))
