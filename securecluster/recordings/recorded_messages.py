"""Messages of an app of others: their arrays as a vector, their numbers, bytes and round.

Whoever sent a message may have put anything into it. What cannot be read is said in a sentence.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core.lazy_torch import torch
from securecluster.recordings.training_facts import is_number

MOST_BYTES = 2**30  # of the arrays of a message that is stored
ROUNDS = ("server-round", "server_round", "current_round")
SECURE = ("secagg", "secure_aggregation", "secaggplus")
SIZES = ("num-examples", "num_examples")  # as strategies of Flower call a client's samples
MOST_SAMPLES = 2**53  # that a client's number of samples may be
NOT_PRINTED = 200  # letters of a name that a message chose
TRAIN = "train"
NO_ARRAYS = "without arrays"
HIDDEN = "hidden: secure aggregation"
NOTHING_SENT = "the server sent no arrays that its own could be compared with"
STEP = "a step of secure aggregation without an update"
NO_REPLY = "no reply"
NOT_SENT = "its message was not sent"
ERROR = "error"  # and its code
# a reply with one of these brought no update, neither in the open nor masked
WITHOUT_UPDATE = (NO_ARRAYS, STEP, NO_REPLY, NOT_SENT)
Layout = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each array


@dataclass(frozen=True)
class Vector:
    """Arrays of a message as one vector, or why there is none.

    Args:
        values: all floating-point arrays in their order, (d,).
        layout: name and shape of each.
        reason: why it cannot be read; empty if it can.
    """

    values: torch.Tensor | None = None
    layout: Layout = ()
    reason: str = ""


def vector_of(content: Any, most_bytes: int = MOST_BYTES) -> Vector:
    """Return the arrays of a message, whose sender may send anything.

    Args:
        content: of the message.
        most_bytes: that its arrays may have.
    """
    records = content.array_records
    arrays = [(name, array) for record in records.values() for name, array in record.items()]
    if not arrays:
        # what has the record of secure aggregation and arrays all the same hides nothing
        secure = any(marker in key.lower() for key in content for marker in SECURE)
        return Vector(reason=HIDDEN if secure else NO_ARRAYS)
    size = sum(len(array.data) for _, array in arrays)
    if size > most_bytes:
        return Vector(reason=f"its arrays have {size:,} bytes, and {most_bytes:,} are stored")
    flat_arrays = []
    layout = []
    for name, array in arrays:
        values, reason = _read(name, array)
        if reason:
            return Vector(reason=reason)
        # counters, such as those of batch normalization, are no parameters
        if values is not None:
            flat_arrays.append(values.ravel())
            layout.append((name, tuple(values.shape)))
    if not flat_arrays:
        return Vector(reason="it has no floating-point array")
    numbers = torch.from_numpy(np.concatenate(flat_arrays))
    return Vector(numbers, tuple(layout))


def _read(name: str, array: Any) -> tuple[NDArray[np.float32] | None, str]:
    """Return an array of a message as float32, and why it cannot be read.

    Args:
        name: of the array.
        array: of Flower, whose bytes may be anything.

    Returns:
        None of an array of whole numbers, and an empty text of one that can be read.
    """
    shown = repr(name[:NOT_PRINTED])
    try:
        values = np.asarray(array.numpy())
    # the bytes are another party's: whatever reading them raises is about them
    except Exception as error:
        return None, f"array {shown} cannot be read ({type(error).__name__})"
    if values.dtype.kind != "f":
        return None, ""
    with np.errstate(over="ignore"):
        values = values.astype(np.float32)
    if not np.isfinite(values).all():
        return None, f"array {shown} has values that are not finite in float32"
    return values, ""


def numbers_of(content: Any) -> dict[str, float]:
    """Return the metrics of a message that are single finite numbers, by name.

    Args:
        content: of the message.
    """
    metrics = {}
    records = list(content.metric_records.values())
    # apps of NumPyClient have them among their settings
    records += [item for name, item in content.config_records.items() if name.endswith(".metrics")]
    for record in records:
        for name, value in record.items():
            if is_number(value):
                metrics[name[:NOT_PRINTED]] = float(value)
    return metrics


def bytes_of(content: Any) -> int:
    """Return the bytes of the records of a message, as Flower counts them.

    Args:
        content: of the message.
    """
    counted = [*content.array_records.values(), *content.metric_records.values()]
    count: int = sum(record.count_bytes() for record in counted)
    return count + sum(_config_bytes(record) for record in content.config_records.values())


def _config_bytes(record: Any) -> int:
    """Return the bytes of a record of settings.

    Flower counts alike, but fails at an empty list or text, which its SecAgg+ sends.

    Args:
        record: of settings.
    """
    count = 0
    for name, value in record.items():
        count += len(name)
        entries = value if isinstance(value, list) else [value]
        for entry in entries:
            if isinstance(entry, str | bytes):
                count += len(entry)
            else:
                count += 1 if isinstance(entry, bool) else 8
    return count


def told_round(message: Any) -> str:
    """Return what a message of the server calls its round; empty where it tells none.

    Args:
        message: of Flower.
    """
    for record in message.content.config_records.values():
        for name in ROUNDS:
            value = record.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                return str(value)
    # Flower's workflows call the messages of a round a group
    return str(message.metadata.group_id or "")[:NOT_PRINTED]


def action_of(message_type: str) -> str:
    """Return what a type of message is about: "train" of "train" and of "train.head".

    Args:
        message_type: type of a message.
    """
    return message_type.partition(".")[0]


@dataclass(frozen=True)
class Sent:
    """A message of the server, read before the grid takes its contents.

    Args:
        kind: type of the message.
        told: what the app calls its round; empty where the message tells none.
        bytes: of its records.
        vector: of its arrays.
    """

    kind: str
    told: str
    bytes: int
    vector: Vector

    @classmethod
    def of(cls, message: Any, most_bytes: int) -> Sent:
        """Return what is recorded of a message.

        Args:
            message: of Flower.
            most_bytes: that its arrays may have.
        """
        content = message.content
        return cls(
            kind=str(message.metadata.message_type),
            told=told_round(message),
            bytes=bytes_of(content),
            vector=vector_of(content, most_bytes),
        )


@dataclass(frozen=True)
class Reply:
    """A client's answer.

    Args:
        vector: of its arrays.
        bytes: of its records.
        metrics: its numbers by name.
    """

    vector: Vector
    bytes: int = 0
    metrics: Mapping[str, float] = field(default_factory=dict)

    @classmethod
    def of(cls, message: Any, most_bytes: int) -> Reply:
        """Return what is recorded of a reply, whose sender may have sent anything.

        Args:
            message: of Flower.
            most_bytes: that its arrays may have.
        """
        try:
            if message.has_error():
                return cls(Vector(reason=f"{ERROR} {int(message.error.code)}"))
            content = message.content
            return cls(vector_of(content, most_bytes), bytes_of(content), numbers_of(content))
        # another party made it: whatever reading it raises is about it
        except Exception as error:
            return cls(Vector(reason=f"it cannot be read ({type(error).__name__})"))

    @property
    def size(self) -> float | None:
        """Return the number of samples that the client told; None where it told none."""
        for name in SIZES:
            if 0 <= self.metrics.get(name, -1.0) < MOST_SAMPLES:
                return self.metrics[name]
        return None


@dataclass(eq=False)
class Exchange:
    """Messages of one type and round that the server pushed together, and what came back.

    Args:
        kind: type of the messages.
        told: what the app calls the round; empty where the messages tell none.
        sent: by node.
        replies: by node.
        unsent: nodes whose message the grid did not take.
        late: the round of a single reply that came after its exchange was written; None of others.
    """

    kind: str
    told: str
    sent: dict[int, Sent]
    replies: dict[int, Reply] = field(default_factory=dict)
    unsent: set[int] = field(default_factory=set)
    late: int | None = None

    @property
    def waits_for(self) -> set[int]:
        """Return the nodes that have not answered."""
        return self.sent.keys() - self.replies.keys() - self.unsent

    @property
    def average(self) -> str:
        """Return a digest of the models that were sent; empty if none can be read."""
        models = {}
        for sent in self.sent.values():
            if sent.vector.values is not None:
                models[id(sent.vector.values)] = sent.vector.values
        digests = {hashlib.sha256(model.numpy().tobytes()).hexdigest() for model in models.values()}
        if not digests:
            return ""
        return hashlib.sha256("".join(sorted(digests)).encode()).hexdigest()[:16]

    @property
    def kept_bytes(self) -> int:
        """Return the bytes of the vectors that this holds."""
        vectors = [sent.vector for sent in self.sent.values()]
        vectors += [reply.vector for reply in self.replies.values()]
        unique_arrays = {
            id(vector.values): vector.values for vector in vectors if vector.values is not None
        }
        return sum(values.nbytes for values in unique_arrays.values())

    def rows(self, order: Iterable[int]) -> tuple[Layout, dict[int, torch.Tensor], dict[int, str]]:
        """Return the layout of what was sent, the updates, and why there are no others, by node.

        Args:
            order: of the nodes.
        """
        nodes = list(order)
        readable = [node for node in nodes if not self.sent[node].vector.reason]
        layout = self.sent[readable[0]].vector.layout if readable else ()
        rows: dict[int, torch.Tensor] = {}
        notes = {}
        for node in nodes:
            if node in self.unsent:
                note = NOT_SENT
            elif node not in self.replies:
                note = NO_REPLY
            else:
                sent, reply = self.sent[node].vector, self.replies[node].vector
                note = _why_no_row(sent, reply, layout)
                if sent.values is not None and reply.values is not None and not note:
                    rows[node] = reply.values - sent.values
            if note:
                notes[node] = note
        return layout, rows, notes


def _why_no_row(sent: Vector, reply: Vector, layout: Layout) -> str:
    """Return why the arrays that were sent cannot be taken off those of a reply.

    Args:
        sent: to the node.
        reply: of the node.
        layout: of what was sent to the first node.
    """
    if reply.values is None:
        nothing_trained = reply.reason == HIDDEN and sent.reason == HIDDEN
        return STEP if nothing_trained else reply.reason
    if sent.values is None:
        return NOTHING_SENT if sent.reason in (HIDDEN, NO_ARRAYS) else sent.reason
    if sent.layout != layout:
        return "other arrays were sent to it than to other clients"
    if [shape for _, shape in reply.layout] != [shape for _, shape in layout]:
        return "its arrays have other shapes than those that were sent"
    return ""


def exchanges_of(messages: Iterable[tuple[int, Sent]]) -> list[Exchange]:
    """Return for each message of a push the exchange that it is in.

    Messages of a push are of one exchange if they have the same type and round. A node that gets
    several of these is in several exchanges. Equal models are kept once.

    Args:
        messages: node and what it is sent.
    """
    exchange_by_key: dict[tuple[str, str, int], Exchange] = {}
    placed = []
    model: Vector | None = None
    for node, sent in messages:
        if model is not None and _same(model, sent.vector):
            sent = replace(sent, vector=model)
        elif sent.vector.values is not None:
            model = sent.vector
        key = (sent.kind, sent.told, 0)
        while key in exchange_by_key and node in exchange_by_key[key].sent:
            key = (sent.kind, sent.told, key[2] + 1)
        exchange = exchange_by_key.setdefault(key, Exchange(sent.kind, sent.told, {}))
        exchange.sent[node] = sent
        placed.append(exchange)
    return placed


def _same(one: Vector, other: Vector) -> bool:
    """Return whether two vectors are equal, of which the first has values."""
    if other.values is None or one.layout != other.layout:
        return False
    return bool(torch.equal(one.values, other.values))  # type: ignore[arg-type]
