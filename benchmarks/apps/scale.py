"""Seconds and bytes of a round of many clients over Flower, beside its own FedAvg and SecAgg+.

python -m benchmarks.apps.scale [--clients 50] [--rounds 4] [--out FILE]

All are in Flower's simulation engine, one after the other: one vector of the same length, a tenth
of the clients lost after their keys are agreed on, and the clients' training next to nothing, so
that messages and secure sums remain. Bytes are those of the contents of all messages, as Flower
sends them. The first round, which has what is agreed on once, is a row of its own.

A deployment has the same messages, and its SuperNodes start a process for each, which takes about
three processor seconds. Flower gives a process up that has not begun within 30 seconds, so fewer
than ten clients to a core of one machine answer at all: fifty clients take a machine each, or this
engine.
"""

from __future__ import annotations

import argparse
import csv
import os
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np
from flwr.app import ConfigRecord, Context, Message
from flwr.client import NumPyClient
from flwr.client.mod import secaggplus_mod
from flwr.clientapp import ClientApp
from flwr.common import ndarrays_to_parameters
from flwr.common.secure_aggregation.secaggplus_constants import RECORD_KEY_CONFIGS, Key, Stage
from flwr.common.serde import recorddict_to_proto
from flwr.server import LegacyContext, ServerConfig
from flwr.server.strategy import FedAvg as FlowerFedAvg
from flwr.server.workflow import DefaultWorkflow, SecAggPlusWorkflow
from flwr.serverapp import ServerApp
from flwr.simulation import run_simulation

from benchmarks.apps.over_flower import RAY
from securecluster import FedAvg, Federation
from securecluster.errors import FrameError
from securecluster.messaging import refusals, wire
from securecluster.nodes import flower
from securecluster.nodes.flower_messages import bytes_of, record_of
from securecluster.nodes.node import Node
from securecluster.nodes.policy import Policy

FOLDER, CLIENTS, ROUNDS = "SCALE_FOLDER", "SCALE_CLIENTS", "SCALE_ROUNDS"  # for Flower's workers
LENGTH = 650  # numbers of a linear model of ten digits
LOST = 0.1
Row = dict[str, Any]


def is_lost(number: int) -> bool:
    """Return whether a client is one of those that are lost in every round."""
    clients = int(os.environ[CLIENTS])
    return number >= clients - round(LOST * clients)


class Counted:
    """Grid that counts the bytes of contents.

    Args:
        grid: Flower's.

    Attributes:
        bytes: of all messages so far, in both directions.
    """

    def __init__(self, grid: Any) -> None:
        self._grid = grid
        self.bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._grid, name)

    def _counted(self, messages: Iterable[Message]) -> list[Message]:
        listed = list(messages)
        for message in listed:
            if message.has_content():
                self.bytes += recorddict_to_proto(message.content).ByteSize()
        return listed

    def push_messages(self, messages: Iterable[Message]) -> Any:
        """Send messages, and return their numbers."""
        return self._grid.push_messages(self._counted(messages))

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        """Return the replies that are there."""
        return self._counted(self._grid.pull_messages(numbers))

    def send_and_receive(self, messages: Iterable[Message], **options: Any) -> list[Message]:
        """Send messages, and return their replies."""
        return self._counted(self._grid.send_and_receive(self._counted(messages), **options))


class Marks:
    """Seconds and bytes at the end of each round.

    Args:
        grid: whose bytes count.
    """

    def __init__(self, grid: Counted) -> None:
        self._grid = grid
        self._at = [(time.monotonic(), 0)]

    def mark(self) -> None:
        """Note the end of a round."""
        self._at.append((time.monotonic(), self._grid.bytes))

    def rows(self, name: str) -> list[Row]:
        """Return a row for the first round, and one of medians for the others."""
        pairs = zip(self._at, self._at[1:], strict=False)
        rounds = [(end[0] - begin[0], end[1] - begin[1]) for begin, end in pairs]
        first, *others = rounds
        late = tuple(median(column) for column in zip(*others, strict=True))
        return [
            {"way": name, "rounds": label, "seconds": round(seconds, 2), "bytes": int(size)}
            for label, (seconds, size) in (("first", first), ("later", late))
        ]


# --- ours ---

_NODES: dict[int, Node] = {}  # of this process


def method() -> FedAvg:
    """Return the protocol."""
    rounds = int(os.environ[ROUNDS])
    secure = {"aggregation": "secagg", "cohort_size": 0}
    return FedAvg(rounds=rounds, epochs=1, model="linear", clip=1.0, **secure)


def node_of(number: int) -> Node:
    """Return the node of a client."""
    if number not in _NODES:
        everyone = Federation.simulate(
            "digits", clients=int(os.environ[CLIENTS]), samples=20, seed=0
        )
        folder = Path(os.environ[FOLDER]) / f"node-{number}"
        policy = Policy(roster=False)
        own = everyone.select([number])
        _NODES[number] = Node(method(), own, folder, number=number, policy=policy, durable=False)
    return _NODES[number]


def our_app() -> ClientApp:
    """Return the app of the nodes, of which a tenth does not send its row of a sum."""
    app = flower.client_app(lambda context: node_of(int(context.node_config["partition-id"])))

    def losing(message: Message, context: Context, call_next: Callable[..., Message]) -> Message:
        if is_lost(int(context.node_config["partition-id"])):
            try:
                asked = wire.peek(bytes_of(message.content)).method
            except FrameError:  # it is no frame
                asked = ""
            if asked == "contribute":
                return Message(record_of(b"", refusals.FAILED), reply_to=message)
        return call_next(message, context)

    lossy = ClientApp(mods=[losing])
    for kind in flower.KINDS:
        lossy.query(kind)(lambda message, context: app(message, context))
    return lossy


def our_server(rows: list[Row]) -> Callable[[Any, Context], None]:
    """Return the server of secure sums of this project."""

    def main(grid: Any, context: Context) -> None:
        counted = Counted(grid)
        marks = Marks(counted)
        clients = int(os.environ[CLIENTS])
        fitted = flower.serve(
            counted,
            context,
            method(),
            clients=clients,
            seed=0,
            classes=10,
            report=lambda line: marks.mark(),
        )
        assert len(fitted.dropped_) + len(fitted.refused_) >= round(LOST * clients)
        rows.extend(marks.rows("securecluster FedAvg, secagg"))

    return main


# --- Flower's ---


class Client(NumPyClient):  # type: ignore[misc]
    """Client that sends its vector.

    Args:
        number: of the client.
    """

    def __init__(self, number: int) -> None:
        self._number = number

    def fit(self, parameters: Any, config: Any) -> tuple[list[Any], int, dict[str, Any]]:
        """Return a vector."""
        return [np.random.default_rng(self._number).random(LENGTH, "f4")], 20, {}


def losing_flowers(message: Message, context: Context, call_next: Any) -> Message:
    """End the app of a lost client, under SecAgg+ at the stage in which it sends its vector."""
    if is_lost(int(context.node_config["partition-id"])):
        configs = message.content.config_records.get(RECORD_KEY_CONFIGS, ConfigRecord())
        if configs.get(Key.STAGE, Stage.COLLECT_MASKED_VECTORS) == Stage.COLLECT_MASKED_VECTORS:
            raise ConnectionError("lost")
    reply: Message = call_next(message, context)
    return reply


def flowers_app(secure: bool) -> ClientApp:
    """Return Flower's app of clients."""

    def client_fn(context: Context) -> Any:
        return Client(int(context.node_config["partition-id"])).to_client()

    mods = [losing_flowers, secaggplus_mod] if secure else [losing_flowers]
    return ClientApp(client_fn=client_fn, mods=mods)


def flowers_server(secure: bool, rows: list[Row]) -> Callable[[Any, Context], None]:
    """Return Flower's server, with its FedAvg and, if secure, its SecAgg+."""

    def main(grid: Any, context: Context) -> None:
        counted = Counted(grid)
        marks = Marks(counted)
        clients = int(os.environ[CLIENTS])

        class Marked(FlowerFedAvg):  # type: ignore[misc]
            def aggregate_fit(self, number: int, results: Any, failures: Any) -> Any:
                assert len(results) == clients - round(LOST * clients), (results, failures)
                found = super().aggregate_fit(number, results, failures)
                marks.mark()
                return found

        strategy = Marked(
            fraction_evaluate=0.0,
            min_fit_clients=clients,
            min_available_clients=clients,
            initial_parameters=ndarrays_to_parameters([np.zeros(LENGTH, "f4")]),
        )
        shares = clients if clients % 2 else clients - 1  # SecAgg+ takes an odd number
        workflow = SecAggPlusWorkflow(shares, shares // 2 + 1) if secure else None
        config = ServerConfig(num_rounds=int(os.environ[ROUNDS]))
        legacy = LegacyContext(context=context, config=config, strategy=strategy)
        DefaultWorkflow(fit_workflow=workflow)(counted, legacy)
        rows.extend(marks.rows("Flower's FedAvg, SecAgg+" if secure else "Flower's FedAvg"))

    return main


def main(argv: Sequence[str] | None = None) -> int:
    """Measure the three ways, and return the exit code.

    Args:
        argv: the command line; None takes it from the system.
    """
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=50)
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args(argv)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {FOLDER: folder, CLIENTS: str(options.clients), ROUNDS: str(options.rounds)}
        ways = [
            (flowers_server(False, rows), flowers_app(False)),
            (flowers_server(True, rows), flowers_app(True)),
            (our_server(rows), our_app()),
        ]
        for server, app in ways:
            server_app = ServerApp()
            server_app.main()(server)
            run_simulation(server_app, app, options.clients, backend_config=RAY)
    base = {row["rounds"]: row["seconds"] for row in rows if row["way"] == "Flower's FedAvg"}
    for row in rows:
        row |= {"clients": options.clients, "times": round(row["seconds"] / base[row["rounds"]], 2)}
        print(row)
    if options.out is not None:
        with options.out.open("w", newline="", encoding="utf-8") as file:
            writer = csv.DictWriter(file, list(rows[0]), lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
