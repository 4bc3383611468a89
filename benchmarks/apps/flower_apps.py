"""Apps of Flower that `benchmarks.apps.over_flower` simulates: nodes of many protocols, and FedAvg.

Each message says by which case it is meant: a protocol of `benchmarks.golden`, or a size.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from flwr.app import ArrayRecord, ConfigRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from flwr.serverapp import Grid

from benchmarks import golden
from securecluster import Federation, LabelSwap
from securecluster.core.lazy_torch import torch
from securecluster.nodes import flower
from securecluster.nodes.agent import answer
from securecluster.nodes.flower_messages import bytes_of, record_of
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy
from securecluster.parties.endpoints import KeySource, build_client
from securecluster.protocols import CFL, FedAvg
from securecluster.runtime.endpoint import Endpoint

CASE = "case"
SPENT = "spent"  # by a node on its answer
SECONDS = "processor-seconds"
# set by `over_flower`, and read by the workers that Flower starts
VARIABLES = {"clients": "OVER_FLOWER_CLIENTS", "rounds": "OVER_FLOWER_ROUNDS"}
FOLDER = "OVER_FLOWER_FOLDER"
SECURE: Mapping[str, Any] = {"aggregation": "secagg"}
COSTS: Mapping[str, tuple[type, Mapping[str, Any]]] = {
    "fedavg": (FedAvg, {"mask": "none"}),
    "fedavg, masked": (FedAvg, {"mask": "permutation"}),
    "fedavg, secure sums": (FedAvg, {"mask": "none", **SECURE}),
    "cfl, masked, secure sums": (CFL, {"mask": "permutation", "sketch": 64, **SECURE}),
}
BATCH = 20
LEARNING_RATE = 0.2  # also of Flower's FedAvg, on the same network, samples and batches


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
        case: a name of `golden.cases`, or of `COSTS`.
    """
    if case in COSTS:
        protocol, options = COSTS[case]
        training = {"epochs": 1, "model": "mlp-32", "lr": LEARNING_RATE, "batch_size": BATCH}
        return protocol(rounds=size("rounds"), **training, **options)
    (golden_case,) = [one for one in golden.cases() if one.name == case]
    return golden_case.build()


def size(name: str) -> int:
    """Return a size of the simulation.

    Args:
        name: clients or rounds.
    """
    return int(os.environ[VARIABLES[name]])


@functools.cache
def clients_of_all() -> Federation:
    """Return the clients and their data."""
    clients = size("clients")
    samples = min(40, 1200 // clients)  # of 1,797
    return Federation.simulate(
        "digits", scenario=LabelSwap(2), clients=clients, samples=samples, seed=0
    )


class OfCase:
    """Grid whose messages say by which case they are meant.

    Args:
        grid: Flower's.
        case: its name.

    Attributes:
        messages: number of messages to nodes.
        spent: processor seconds of all nodes on their answers.
    """

    def __init__(self, grid: Grid, case: str) -> None:
        self._grid = grid
        self._case = case
        self.messages = 0
        self.spent = 0.0

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
        replies = list(self._grid.pull_messages(numbers))
        for reply in replies:
            if reply.has_content():
                self.spent += float(reply.content[SPENT][SECONDS])
        return replies


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
        began = time.process_time()
        number = int(context.node_config["partition-id"])
        case = str(message.content[CASE][CASE])
        code, data = answer(lambda: _node(case, number), message_type, bytes_of(message.content))
        content = record_of(data, code)
        content[SPENT] = MetricRecord({SECONDS: time.process_time() - began})
        return Message(content, reply_to=message)

    return handle


def network() -> Any:
    """Return the network that Flower's FedAvg trains, of the size of `mlp-32`."""
    nn = torch.nn
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))


client_app = ClientApp()
for _kind in flower.KINDS:
    client_app.query(_kind)(_handler(_kind))


def train(message: Message, context: Context) -> Message:
    """Train an epoch, as clients of Flower's FedAvg do.

    Args:
        message: with the weights.
        context: with the number of the client.
    """
    began = time.process_time()
    torch.set_num_threads(1)
    shard = clients_of_all().shards[int(context.node_config["partition-id"])]
    model = network()
    model.load_state_dict(message.content["arrays"].to_torch_state_dict())
    x = torch.as_tensor(shard.x)
    y = torch.as_tensor(shard.y)
    optimizer = torch.optim.SGD(model.parameters(), lr=LEARNING_RATE)
    for batch in torch.split(torch.randperm(len(y)), BATCH):
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(x[batch]), y[batch])
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
    weights = ArrayRecord(model.state_dict())
    metrics = MetricRecord({"num-examples": len(y), SECONDS: time.process_time() - began})
    return Message(RecordDict({"arrays": weights, "metrics": metrics}), reply_to=message)


client_app.train()(train)
