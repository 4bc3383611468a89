"""Nodes of many protocols, which `benchmarks.apps.over_flower` simulates as apps of Flower.

Each message says by which case of `benchmarks.golden` it is meant.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ConfigRecord, Context, Message
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from benchmarks import golden
from securecluster import Federation, LabelSwap
from securecluster.nodes import flower
from securecluster.nodes.agent import answer
from securecluster.nodes.flower_messages import bytes_of, record_of
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.runtime.endpoint import Endpoint

CASE = "case"
FOLDER = "OVER_FLOWER_FOLDER"  # set by `over_flower`, and read by the workers that Flower starts
CLIENTS = 6


class SeededNode(Node):
    """Node whose keys follow from the seed, so that its noise and masks are those of a run here."""

    def _endpoint(self, config: Mapping[str, Any]) -> Endpoint[Any]:
        return build_client(
            self.method,
            self._data,
            self._settings,
            key_source=KeySource(),
            agreed=config,
            numbers=[self.number],
        )

    def _keep(self, config: Mapping[str, Any], joins: bool = False) -> str:
        """Agree to runs without a number, as those in one process are."""
        return super()._keep(config, joins=True)


def protocol_of(case: str) -> Any:
    """Return the protocol of a case.

    Args:
        case: a name of `golden.cases`.
    """
    (golden_case,) = [one for one in golden.cases() if one.name == case]
    return golden_case.build()


@functools.cache
def clients_of_all() -> Federation:
    """Return the clients and their data."""
    return Federation.simulate("digits", scenario=LabelSwap(2), clients=CLIENTS, samples=40, seed=0)


class OfCase:
    """Grid whose messages say by which case they are meant.

    Args:
        grid: Flower's.
        case: its name.

    Attributes:
        messages: number of messages to nodes.
    """

    def __init__(self, grid: Grid, case: str) -> None:
        self._grid = grid
        self._case = case
        self.messages = 0

    def get_node_ids(self) -> list[int]:
        """Return the numbers of all nodes."""
        return list(self._grid.get_node_ids())

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        """Send messages, and return their numbers.

        Args:
            messages: to nodes.
        """
        named = list(messages)
        for message in named:
            message.content[CASE] = ConfigRecord({CASE: self._case})
        self.messages += len(named)
        return list(self._grid.push_messages(named))

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        """Return the replies that are there.

        Args:
            numbers: of the messages.
        """
        return list(self._grid.pull_messages(numbers))


_NODES: dict[tuple[str, int], Node] = {}  # of this process


def folder_of(case: str, number: int) -> Path:
    """Return the folder of a node.

    Args:
        case: its name.
        number: of the client.
    """
    name = case.replace(", ", "-").replace(" ", "-")
    return Path(os.environ[FOLDER]) / name / f"node-{number}"


def _node(case: str, number: int) -> Node:
    if (case, number) not in _NODES:
        folder = folder_of(case, number)
        folder.parent.mkdir(parents=True, exist_ok=True)
        client_data = clients_of_all().select([number])
        policy = Policy(roster=False)
        _NODES[case, number] = SeededNode(
            protocol_of(case), client_data, folder, number=number, policy=policy, durable=False
        )
    return _NODES[case, number]


def _handler(message_type: str) -> Callable[[Message, Context], Message]:
    """Return the function that answers messages of a kind."""

    def handle(message: Message, context: Context) -> Message:
        number = int(context.node_config["partition-id"])
        case = str(message.content[CASE][CASE])
        code, data = answer(lambda: _node(case, number), message_type, bytes_of(message.content))
        return Message(record_of(data, code), reply_to=message)

    return handle


client_app = ClientApp()
for _kind in flower.KINDS:
    client_app.query(_kind)(_handler(_kind))
