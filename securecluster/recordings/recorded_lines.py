"""Lines of a recording, and the rounds that they are of."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NotRequired, TypedDict

from securecluster.recordings.recorded_messages import ERROR, WITHOUT_UPDATE

NUMBER = re.compile("[0-9]{1,9}", re.ASCII)


class MarkEntry(TypedDict):
    """Size and digest of the beginning of a file."""

    size: int
    sha256: str


class Gap(TypedDict):
    """An exchange that was not recorded.

    Entries: why, its type, what the app calls its round, and the number of its messages.
    """

    gap: str
    kind: str
    told: str
    messages: int


class Head(TypedDict):
    """Content of `recording.json`.

    Entries: version, name of the app, declared facts, marks of the logs, and the exchanges that are
    under way, or null where nobody records.
    """

    schema: int
    app: str
    facts: dict[str, Any]
    nodes: MarkEntry
    exchanges: MarkEntry
    under_way: list[Gap] | None


class NodeLine(TypedDict):
    """A line of `nodes.jsonl`: id of a node, and in a simulation the part of the data it has."""

    node: int
    partition: NotRequired[int]


class ExchangeLine(TypedDict):
    """A line of `exchanges.jsonl`.

    Entries: type of its messages, round, what the app calls it, whether it is a reply that came
    after the line of its exchange, clients' numbers, bytes to and from each, name and shape of the
    arrays where they are new, number of updates in the transcript, digest of the model that was
    sent, numbers and notes by client, and the mark of the transcript's index.
    """

    kind: str
    round: int
    told: str
    late: bool
    to: list[int]
    down: list[int]
    up: list[int]
    layout: list[tuple[str, list[int]]]
    updates: int
    average: str
    metrics: dict[str, dict[str, float]]
    notes: dict[str, str]
    index: MarkEntry


def updaters(line: Mapping[str, Any]) -> set[int]:
    """Return the numbers of the clients that sent an update, in the open or masked.

    Args:
        line: of an exchange.
    """
    senders = set()
    for number in line["to"]:
        note = line["notes"].get(str(number), "")
        if note not in WITHOUT_UPDATE and not note.startswith(f"{ERROR} "):
            senders.add(number)
    return senders


@dataclass
class Rounds:
    """The rounds of one kind of work, such as training.

    A round is what the app says it is. Where it says nothing, another one begins with another
    average, and with a second update of a client to messages of the same type.
    """

    round: int = 0
    last: int = 0
    average: str = ""
    labels: dict[str, int] = field(default_factory=dict)
    updates: set[tuple[str, int]] = field(default_factory=set)

    def of(self, label: str, average: str, updates: set[tuple[str, int]]) -> int:
        """Return the round of an exchange.

        Args:
            label: what the app calls the round; empty where it tells none.
            average: digest of the model that was sent; empty if there is none.
            updates: message type and client of each update.
        """
        if NUMBER.fullmatch(label):
            return int(label)
        if label:
            return self.labels.get(label, self.last + 1)
        other = bool(average and self.average and average != self.average)
        if not self.last or other or updates & self.updates:
            return self.last + 1
        return self.round

    def learn(self, round: int, label: str, average: str, updates: set[tuple[str, int]]) -> None:
        """Take an exchange in.

        Args:
            round: its round.
            label: as in `of`.
            average: as in `of`.
            updates: as in `of`.
        """
        if label:
            self.labels[label] = round
        if round != self.round:
            self.average = ""
            self.updates = set()
        self.round = round
        self.last = max(self.last, round)
        self.average = average or self.average
        self.updates |= updates
