"""Calls in one process, over real frames, recorded and replayed."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch
from cases import two_clusters

from securecluster import Federation
from securecluster.core.randomness import Randomness
from securecluster.errors import FrameError, ReplayError
from securecluster.messaging import wire
from securecluster.messaging.messages import Call, Response, Rows
from securecluster.messaging.transcript import Transcript
from securecluster.parties.deployment import build_network
from securecluster.parties.endpoints import build_client
from securecluster.protocols import CFL, ClusteringProtocol, Settings
from securecluster.runtime.endpoint import GATHER, Endpoint, hidden_message_types
from securecluster.runtime.run import Run
from securecluster.runtime.server_channel import ServerChannel
from securecluster.runtime.transport import (
    Framed,
    InProcess,
    Recorded,
    Replay,
    Transport,
    WithAuthority,
    random_dropouts,
)

CONFIG = "c" * 32


@pytest.fixture(scope="module")
def tiny() -> Federation:
    return two_clusters(4, 20)


def serve(
    method: ClusteringProtocol, federation: Federation, transport: Transport, dtype: str
) -> tuple[Transcript, ServerChannel, list[int]]:
    transcript = Transcript("full")
    net = build_network(method, Recorded(transport, transcript), method.config(federation, dtype))
    state = method.run_server(net, Run(begin=lambda number: setattr(net, "round", number)))
    return transcript, net, state.labels


def framed(
    method: ClusteringProtocol,
    nodes: list[Endpoint],
    lost: Callable[[int, str, int], bool] = lambda i, name, step: False,
) -> Framed:  # type: ignore[type-arg]
    """Every node behind bytes; `lost(client, method, step)` breaks a connection."""

    def behind(i: int) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            header = wire.peek(data)
            if lost(i, header.method, header.step):
                raise ConnectionError
            return nodes[i].answer_frame(data)

        return answer

    return Framed(
        {i: behind(i) for i in range(len(nodes))},
        lambda name: hidden_message_types(method.client, name, {})[1],
    )


def test_the_bytes_written_down_are_those_that_went_over_the_wire(tiny: Federation) -> None:
    method, counted = CFL(rounds=2), {"up": 0, "down": 0}

    def counting(node: Endpoint) -> Callable[[bytes], bytes]:  # type: ignore[type-arg]
        def answer(data: bytes) -> bytes:
            reply = node.answer_frame(data)
            counted["down"] += len(data)
            counted["up"] += len(reply)
            return reply

        return answer

    clients = {i: counting(build_client(method, tiny, Settings(), [i])) for i in range(4)}
    transport = Framed(clients, lambda name: hidden_message_types(method.client, name, {})[1])
    transcript, _, _ = serve(method, tiny, transport, "float32")
    totals = transcript.totals()
    assert counted == {"up": totals["up"], "down": totals["down"]}


@dataclass(frozen=True, eq=False)
class Row:
    row: Rows


def call(to: tuple[int, ...] = (5, 2, 9), **change: object) -> Call:
    query = Row(Rows(torch.arange(float(len(to)))[:, None]))
    made = Call(CONFIG, "double", "gather", 1, 1, to, query, (1,) * len(to))
    return dataclasses.replace(made, **change)  # type: ignore[arg-type]


def double(asked: Call) -> Response:
    return Response(asked.to, Row(Rows(asked.query.row.values * 2)))


def test_clients_that_are_lost_are_not_asked_in_one_process() -> None:
    asked: list[tuple[int, ...]] = []

    def answer(some: Call) -> Response:
        asked.append(some.to)
        return double(some)

    got = InProcess(answer, lambda c: {2, 77}).exchange(call())
    assert (asked, got.ids, got.reply.row.values.tolist()) == ([(5, 9)], (5, 9), [[0.0], [4.0]])
    assert (
        InProcess(answer, lambda c: {2, 5, 9}).exchange(call()) == Response((), None)
        or len(asked) == 1
    )
    assert len(asked) == 1


def test_dropouts_come_at_their_rate_and_depend_on_client_method_and_step_alone() -> None:
    lost = random_dropouts(0.3, Randomness(0))
    everyone = tuple(range(50))
    draws = [lost(call(everyone, step=step)) for step in range(60)]
    assert sum(map(len, draws)) == pytest.approx(0.3 * 3000, rel=0.1)
    assert draws == [lost(call(everyone, step=step, round=9, verb="sum")) for step in range(60)]
    assert {i for i in everyone if lost(call((i,), step=4))} == draws[4]
    assert lost(call(everyone, step=4, method="other")) != draws[4] != draws[5]
    assert random_dropouts(0.0, Randomness(0))(call(everyone)) == set()


def test_replies_to_other_requests_of_other_shapes_or_other_kinds_are_refused() -> None:
    def node(change: dict[str, object], reply: object) -> Callable[[bytes], bytes]:
        def answer(data: bytes) -> bytes:
            header = wire.peek(data)
            back = dataclasses.replace(header, sender=header.recipient, recipient="server")
            return wire.encode(dataclasses.replace(back, **change), reply)  # type: ignore[arg-type]

        return answer

    good = Row(Rows(torch.zeros(1, 3)))
    assert Framed(
        {5: node({}, good), 2: node({}, good), 9: node({}, good)}, lambda name: Row
    ).exchange(call()).ids == (5, 2, 9)
    changes = (
        {"step": 2},
        {"round": 2},
        {"sender": "client/9"},
        {"config": "x"},
        {"method": "x"},
        {"verb": "sum"},
        {"members": 2},
    )
    for change in ({"recipient": "client/5"}, *changes):
        with pytest.raises(
            FrameError, match="client 2 answered another request than double of round 1"
        ):
            Framed(
                {5: node({}, good), 2: node(change, good), 9: node({}, good)}, lambda name: Row
            ).exchange(call())
    for other in (
        Row(Rows(torch.zeros(1, 4))),
        Row(Rows(torch.zeros(1, 3).double())),
        good.row,
        call(),
    ):
        message = (
            other
            if isinstance(other, Row)
            else dataclasses.make_dataclass("Other", [("x", int)])(1)
        )
        with pytest.raises(FrameError):
            Framed(
                {5: node({}, good), 2: node({}, message), 9: node({}, good)}, lambda name: Row
            ).exchange(call())


def test_a_replay_refuses_other_requests_and_another_number_of_them() -> None:
    transcript = Transcript("full")
    recorded = Recorded(InProcess(double, lambda c: {2}), transcript)
    for step in (1, 2):
        recorded.exchange(call(step=step))
    replay = Replay(transcript)
    answer = replay.exchange(call(step=1))
    assert (answer.ids, answer.reply.row.values.tolist()) == ((5, 9), [[0.0], [4.0]])
    with pytest.raises(ReplayError, match="after 1 of 2"):
        replay.finish()
    replay.exchange(call(step=2))
    replay.finish()
    with pytest.raises(ReplayError, match="had ended"):
        replay.exchange(call(step=3))
    values = torch.arange(3.0)[:, None]
    values[1] = torch.nextafter(values[1], torch.tensor(2.0))  # one bit
    others = (
        call(step=3),
        call(round=2),
        call(verb="sum"),
        call(method="other"),
        call(config="d"),
        call((5, 2)),
        call((2, 5, 9)),
        call(members=(1, 1, 2)),
        call(query=Row(Rows(values))),
        call(query=Row(Rows(torch.arange(3.0).double()[:, None]))),
    )
    for other in others:
        with pytest.raises(ReplayError, match="differs"):
            Replay(transcript).exchange(other)


CALL = SimpleNamespace(verb=GATHER)


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("exchange", (CALL,)), ("exchange_all", ([CALL],)), ("begin", (CALL,)),
        ("stream", (CALL, 7)), ("relay", (CALL, "the replies")), ("tolerate", ("an error",)),
    ],
)  # fmt: skip
def test_an_authoritys_transport_passes_everything_on_to_that_of_the_clients(
    name: str, arguments: tuple[object, ...]
) -> None:
    passed: list[tuple[object, ...]] = []

    class Inner:
        def __getattr__(self, method: str) -> Callable[..., object]:
            assert method == name
            return lambda *given: passed.append(given) or "what came"

    transport = WithAuthority(Inner(), lambda frame: frame, str)  # type: ignore[arg-type]
    came = getattr(transport, name)(*arguments)
    assert passed == [arguments]
    assert came == ("what came" if name not in ("relay", "tolerate") else None)
