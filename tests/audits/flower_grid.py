"""A grid of Flower over function calls, for tests of recordings. It needs flwr."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from types import SimpleNamespace
from typing import Any

import numpy as np
from flwr.app import Array, ArrayRecord, ConfigRecord, Error, Message, MetricRecord, RecordDict

NODES = [31, 17, 5]
Answer = Callable[[int, Message], RecordDict | Error | None]


class Grid:
    """Flower's grid, whose nodes answer at once, or when they are told to.

    Args:
        answer: content of a node's reply to a message; None if it stays silent.
    """

    run = SimpleNamespace(run_id=1)

    def __init__(self, answer: Answer) -> None:
        self.answer = answer
        self.waiting: dict[str, Message] = {}
        self.sent = 0

    def get_node_ids(self) -> list[int]:
        return NODES

    def send_and_receive(
        self, messages: Iterable[Message], *, timeout: float | None = None
    ) -> list[Message]:
        numbers = self.push_messages(messages)
        return self.pull_messages(numbers)

    def push_messages(self, messages: Iterable[Message]) -> list[str]:
        numbers = []
        for message in messages:
            self.sent += 1
            number = f"m{self.sent}"
            message.metadata.__dict__["_message_id"] = number
            answer = self.answer(message.metadata.dst_node_id, message)
            if answer is not None:
                self.waiting[number] = Message(answer, reply_to=message)
            numbers.append(number)
        return numbers

    def pull_messages(self, numbers: Iterable[str]) -> list[Message]:
        return [self.waiting.pop(number) for number in numbers if number in self.waiting]


def arrays(*values: Any) -> ArrayRecord:
    return ArrayRecord({f"w{k}": Array(np.asarray(v, np.float32)) for k, v in enumerate(values)})


def trained(node: int, message: Message) -> RecordDict:
    """A client whose update is its node's number in each coordinate."""
    metrics = MetricRecord({"num-examples": node, "loss": 0.5})
    if message.metadata.message_type == "evaluate":
        return RecordDict({"metrics": metrics})
    moved = [array.numpy() + node for array in message.content["arrays"].values()]
    return RecordDict({"arrays": arrays(*moved), "metrics": metrics})


def messages(
    *values: Any,
    kind: str = "train",
    number: int | None = 1,
    group: str | None = None,
    nodes: Iterable[int] = NODES,
) -> list[Message]:
    """One message to each node, with arrays if there are values.

    Args:
        values: of the arrays.
        kind: type of the messages.
        number: that the app calls the round; None tells none.
        group: of the messages.
        nodes: that they are sent to.
    """
    made = []
    for node in nodes:
        content = RecordDict({"arrays": arrays(*values)} if values else {})
        if number is not None:
            content["config"] = ConfigRecord({"server-round": number})
        made.append(Message(content, node, kind, group_id=group))
    return made
