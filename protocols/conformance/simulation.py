"""Runs that checks watch from both ends: lost replies, nodes with real frames, early ends."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

from securecluster.core.serialization import pack, unpack
from securecluster.messaging.messages import Call
from securecluster.messaging.transcript import Transcript
from securecluster.parties.client_state import ClientState
from securecluster.parties.deployment import Deployment, build_network
from securecluster.parties.derived import call_types
from securecluster.parties.endpoints import build_client
from securecluster.parties.shared_scale import find_scale
from securecluster.protocols import authoring as fl
from securecluster.runtime.settings import Settings
from securecluster.runtime.transport import Framed, InProcess, Recorded, Transport, WithAuthority

if TYPE_CHECKING:
    from securecluster.runtime.endpoint import Endpoint

Lost = Callable[[Call], set[int]]

# Keys, masks and noise follow from the seed, so that runs can be compared bit for bit.
SEEDED = Settings(keys_from_seed=True)
FULL = replace(SEEDED, transcript="full")
DOUBLE = replace(SEEDED, dtype="float64")


def no_client(call: Call) -> set[int]:
    """Return that no client of a call is lost."""
    return set()


def run_server(made: Any, net: fl.ServerChannel) -> Any:
    """Run the server's loop over a channel, without a folder, and return its final state.

    Args:
        made: the protocol.
        net: the server's channel.
    """
    find_scale(made, net)
    return made.run_server(net, fl.Run(begin=lambda number: setattr(net, "round", number)))


class Served(NamedTuple):
    """The server's final state, both ends, and what went between them."""

    state: Any
    endpoint: Endpoint[Any]
    net: fl.ServerChannel
    transcript: Transcript


def serve(
    made: Any,
    federation: fl.Federation,
    lost: Lost = no_client,
    settings: Settings = DOUBLE,
    record: str = "full",
) -> Served:
    """Run a protocol over all clients in this process.

    Args:
        made: the protocol.
        federation: the clients and their data.
        lost: returns which clients of a call do not reply.
        settings: device and precision.
        record: what the transcript keeps.
    """
    endpoint = build_client(made, federation, settings)
    transcript = Transcript(record)
    config = made.config(federation, settings.dtype)
    inner = with_authority(made, config, InProcess(endpoint.answer, lost))
    net = build_network(made, Recorded(inner, transcript), config)
    return Served(run_server(made, net), endpoint, net, transcript)


def with_authority(made: Any, config: dict[str, Any], inner: Transport) -> Transport:
    """Return a transport that reaches the run's key authority, too, if it has one.

    Args:
        made: the protocol.
        config: what clients and server agreed on.
        inner: transport to the clients.
    """
    authority = Deployment(made, config).authority()
    if authority is None:
        return inner
    return WithAuthority(inner, authority.answer_frame, lambda name: call_types(made, name)[1])


def node_each(made: Any, federation: fl.Federation, settings: Settings) -> list[Endpoint[Any]]:
    """Return an endpoint for each client, which holds this client's shard alone.

    Args:
        made: the protocol.
        federation: the clients and their data.
        settings: device and precision.
    """
    return [build_client(made, federation, settings, [i]) for i in range(len(federation))]


class NewProcess:
    """A node that is a new process for every frame, and keeps its packed state alone.

    Args:
        made: the protocol.
        data: of its client alone.
        settings: device and precision.
        config: what clients and server agreed on.
        number: of the client.
    """

    def __init__(
        self,
        made: Any,
        data: fl.Federation,
        settings: Settings,
        config: dict[str, Any],
        number: int,
    ) -> None:
        self._build = partial(build_client, made, data, settings, agreed=config, numbers=[number])
        self._state: bytes | None = None  # on its disk

    def endpoint(self) -> Endpoint[Any]:
        """Return the node's endpoint, made anew from its state."""
        endpoint = self._build()
        if self._state is not None:
            state = unpack(self._state, ClientState)
            endpoint.client.restore(state)
            endpoint.keys.restore(state.secrets)
        return endpoint

    def answer_frame(self, data: bytes) -> bytes:
        """Return the reply to a frame.

        Args:
            data: bytes of the request.
        """
        endpoint = self.endpoint()
        reply = endpoint.answer_frame(data)
        self._state = pack(endpoint.client.state(endpoint.keys.secrets))
        return reply


def framed(made: Any, nodes: Sequence[Endpoint[Any] | NewProcess]) -> Transport:
    """Return a transport that encodes every message between a server and its nodes.

    Args:
        made: the protocol.
        nodes: one for each client.
    """
    doors = {i: node.answer_frame for i, node in enumerate(nodes)}
    return Framed(doors, lambda name: call_types(made, name)[1])


def serve_nodes(
    made: Any, federation: fl.Federation, settings: Settings = DOUBLE
) -> tuple[Any, list[Endpoint[Any]]]:
    """Run a protocol over nodes with one client each, made anew from their state for every call.

    Args:
        made: the protocol.
        federation: the clients and their data.
        settings: device and precision.

    Returns:
        The server's final state, and the nodes' endpoints.
    """
    config = made.config(federation, settings.dtype)
    nodes = [
        NewProcess(made, federation.select([i]), settings, config, i)
        for i in range(len(federation))
    ]
    net = build_network(made, with_authority(made, config, framed(made, nodes)), config)
    return run_server(made, net), [node.endpoint() for node in nodes]


def interrupt_after(number: int) -> Callable[[dict[str, object]], None]:
    """Return a report that stops a run after a round, as Ctrl-C would.

    Args:
        number: of the round.
    """

    def report(line: dict[str, object]) -> None:
        if line["round"] == number:
            raise KeyboardInterrupt

    return report
