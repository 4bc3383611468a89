"""Recordings of apps of others: what a server of Flower sent and received, in a folder.

`recorded(grid, folder)` wraps a grid. The app is as it was, and everything that goes through the
grid is written down before the app gets it: arrays that can be read as a transcript, and the
metrics, the bytes and what could not be read as a line for each exchange. A message that cannot be
read ends no app: the line says in one sentence why its arrays are not in the transcript.

An app has one method for each type of its messages. The reply to "train" is an update: the arrays
of the reply minus those that were sent. What a client's mod has taken out of a message, such as
arrays that secure aggregation masks, is recorded as hidden.

What attacks need to know of the training is in no message. `TrainingFacts` declares it.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

import numpy as np
from numpy.typing import NDArray

from securecluster.core import atomic_files
from securecluster.core.lazy_torch import torch
from securecluster.errors import RunFolderError, UsageError
from securecluster.messaging.bounds import Real
from securecluster.messaging.messages import Call, Response, Rows
from securecluster.messaging.transcript import INDEX, Transcript

SCHEMA = 1
FACTS = "recording.json"
NODES = "nodes.jsonl"
EXCHANGES = "exchanges.jsonl"
TRANSCRIPT = "transcript"
MOST_BYTES = 2**30  # of the arrays of a message that is stored
GATHER = "gather"
SIZES = ("num-examples", "num_examples")  # as strategies of Flower call a client's samples
ROUNDS = ("server-round", "server_round", "current_round")
PLACEMENTS = ("local", "central")
OPTIMIZERS = ("sgd", "adam", "adamw")
NOT_PRINTED = 200  # letters of a name that a message chose
NO_ARRAYS = "without arrays"
HIDDEN = "hidden: secure aggregation"
NOTHING_SENT = "the server sent no arrays that its own could be compared with"
STEP = "a step of secure aggregation without an update"
TRAIN = "train"
PARTITION = "partition-id"
Layout = tuple[tuple[str, tuple[int, ...]], ...]  # name and shape of each array
SECURE = ("secagg", "secure_aggregation", "secaggplus")


@dataclass(frozen=True)
class SentModel:
    """Query of an app's "train".

    Args:
        model: arrays that the server sent, as one vector, (b, d).
    """

    model: Annotated[Rows, Real(("dimension",))]


@dataclass(frozen=True)
class Update:
    """Reply to an app's "train".

    Args:
        delta: arrays of the reply minus those that were sent, (b, d).
        size: numbers of samples, (b,); None where a client sends none.
    """

    delta: Annotated[Rows, Real(("dimension",))]
    size: Annotated[Rows | None, Real(low=0.0)]


def message_types(method: str) -> tuple[type, type]:
    """Return the classes of a recorded query and of its reply.

    Args:
        method: any type of message.
    """
    return SentModel, Update


@dataclass(frozen=True)
class TrainingFacts:
    """What a user declares of an app's training; None where it is not known.

    Attacks that need an absent fact are not applicable, and say which one it is.

    Args:
        lr: learning rate of a client's optimizer.
        epochs: passes over a client's samples in a round.
        batch_size: samples in a step.
        optimizer: "sgd", "adam" or "adamw".
        momentum: of the optimizer.
        clip: norm to which a client's update is clipped; None also without clipping.
        noise: deviation of the Gaussian noise on an update ("local"), or on the sum of a round
            ("central"), over `clip`. Flower's LocalDpMod has √(2 ln(1.25/δ))·sensitivity/(ε·clip);
            its strategies call it noise_multiplier.
        placement: who adds the noise: "local", a client's mod, or "central", the server's strategy.
        delta: δ of the guarantee that is priced.

    Raises:
        UsageError: a value that no training can have.
    """

    lr: float | None = None
    epochs: int | None = None
    batch_size: int | None = None
    optimizer: str | None = None
    momentum: float | None = None
    clip: float | None = None
    noise: float | None = None
    placement: str | None = None
    delta: float | None = None

    def __post_init__(self) -> None:
        for name in ("lr", "clip", "noise", "delta"):
            self._check(name, lambda value: _is_number(value) and value > 0, "a positive number")
        for name in ("epochs", "batch_size"):
            self._check(name, _is_count, "a positive integer")
        self._check("momentum", lambda value: _is_number(value) and 0 <= value < 1, "in [0, 1)")
        self._check("delta", lambda value: value < 1, "below 1")
        for name, choices in (("optimizer", OPTIMIZERS), ("placement", PLACEMENTS)):
            self._check(name, choices.__contains__, " or ".join(choices))

    def _check(self, name: str, holds: Callable[[Any], bool], must: str) -> None:
        """Raise UsageError if a fact that is declared is not what it must be."""
        value = getattr(self, name)
        if value is not None and not holds(value):
            raise UsageError(f"TrainingFacts: {name} is {must}, not {value!r}")

    @property
    def known(self) -> dict[str, Any]:
        """Return the facts that were declared."""
        return {name: value for name, value in asdict(self).items() if value is not None}


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value > 0


def _is_number(value: Any) -> bool:
    number = isinstance(value, int | float) and not isinstance(value, bool)
    return number and math.isfinite(value)


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
    parts = []
    layout = []
    for name, array in arrays:
        values, reason = _read(name, array)
        if reason:
            return Vector(reason=reason)
        # counters, such as those of batch normalization, are no parameters
        if values is not None:
            parts.append(values.ravel())
            layout.append((name, tuple(values.shape)))
    if not parts:
        return Vector(reason="it has no floating-point array")
    return Vector(torch.from_numpy(np.concatenate(parts)), tuple(layout))


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
    found = {}
    records = list(content.metric_records.values())
    # apps of NumPyClient have them among their settings
    records += [item for name, item in content.config_records.items() if name.endswith(".metrics")]
    for record in records:
        for name, value in record.items():
            if _is_number(value):
                found[name[:NOT_PRINTED]] = float(value)
    return found


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
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, str | bytes):
                count += len(part)
            else:
                count += 1 if isinstance(part, bool) else 8
    return count


def _round_of(message: Any) -> int:
    """Return the round that a message of the server tells, or 0."""
    for record in message.content.config_records.values():
        for name in ROUNDS:
            value = record.get(name)
            if isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**31:
                return value
    # Flower's workflows call the messages of a round a group
    group = message.metadata.group_id
    return int(group) if re.fullmatch("[0-9]{1,9}", group, re.ASCII) else 0


@dataclass
class Recording:
    """Folder of what an app sent and received.

    Args:
        folder: of the recording.
        app: name of the app, for reports.
        facts: that were declared.
        nodes: ids of Flower's nodes in the order in which they appeared: the clients.
        exchanges: a line for each exchange.
        transcript: the arrays of those that could be read.
        most_bytes: of the arrays of a message that is stored.
    """

    folder: Path
    app: str
    facts: TrainingFacts
    nodes: list[int]
    exchanges: list[dict[str, Any]]
    transcript: Transcript = field(repr=False)
    most_bytes: int = MOST_BYTES

    @classmethod
    def begin(
        cls, folder: Path | str, app: str, facts: TrainingFacts, most_bytes: int = MOST_BYTES
    ) -> Recording:
        """Return a new recording, or that of the folder, which goes on.

        Args:
            folder: new, empty, or of a recording of the same app with the same facts.
            app: name of the app.
            facts: of its training.
            most_bytes: of the arrays of a message that is stored.

        Raises:
            UsageError: another recording, or something else, is in the folder.
        """
        path = Path(folder)
        if is_recording(path):
            found = cls.read(path, durable=True)
            if (found.app, found.facts) != (app, facts):
                raise UsageError(
                    f"{path} is a recording of another app, or with other facts: give another "
                    "folder"
                )
            found.most_bytes = most_bytes
            return found
        if path.is_dir() and any(path.iterdir()):
            raise UsageError(f"{path} is not empty, and no recording: give another folder")
        atomic_files.make_folder(path)
        atomic_files.make_private_folder(path / TRANSCRIPT)
        content = {"schema": SCHEMA, "app": app, "facts": facts.known}
        data = json.dumps(content, indent=2).encode()
        atomic_files.write_atomic(path / FACTS, data, atomic_files.OWNER, durable=True)
        transcript = Transcript("full", path / TRANSCRIPT, message_types, durable=True)
        return cls(path, app, facts, [], [], transcript, most_bytes)

    @classmethod
    def read(cls, folder: Path | str, durable: bool = False) -> Recording:
        """Return the recording in a folder.

        Args:
            folder: of a recording, also of an app that was killed.
            durable: True to go on with it; a line that a kill has cut short is then removed.

        Raises:
            RunFolderError: there is none, or it cannot be read.
        """
        path = Path(folder)
        if not is_recording(path):
            raise RunFolderError(f"{path} is no recording of an app: it has no {FACTS}")
        try:
            content = json.loads(atomic_files.read(path / FACTS))
            if content["schema"] != SCHEMA:
                raise RunFolderError(f"{path} is a recording of another version")
            facts = TrainingFacts(**content["facts"])
            app = str(content["app"])
        except (ValueError, KeyError, TypeError, RecursionError, UsageError):
            raise RunFolderError(f"{path / FACTS} is damaged") from None
        if durable:
            for name in (NODES, EXCHANGES, f"{TRANSCRIPT}/{INDEX}"):
                _cut_torn_line(path / name)
        nodes = [int(line["node"]) for line in _lines(path / NODES)]
        exchanges = _lines(path / EXCHANGES)
        names = [str(node) for node in nodes]
        transcript = Transcript.read("full", path / TRANSCRIPT, message_types, names, durable)
        return cls(path, app, facts, nodes, exchanges, transcript)

    @property
    def names(self) -> list[str]:
        """Return the names of the clients: the ids of their nodes."""
        return [str(node) for node in self.nodes]

    @property
    def layout(self) -> Layout:
        """Return name and shape of the arrays of the first exchange that has any."""
        for exchange in self.exchanges:
            if exchange["layout"]:
                return tuple((name, tuple(shape)) for name, shape in exchange["layout"])
        return ()

    def record(
        self, sent: Mapping[int, Sent], replies: Mapping[int, Any], failed: Mapping[int, str]
    ) -> None:
        """Write one exchange down.

        Args:
            sent: by node, of messages of one type.
            replies: contents of the replies by node.
            failed: by node that replied with an error, its code.
        """
        self._number(sent)
        numbers = self._numbers()
        order = sorted(sent, key=numbers.__getitem__)
        first = sent[order[0]]
        earlier = [exchange for exchange in self.exchanges if exchange["kind"] == first.kind]
        # an app that tells its clients no round has one in each exchange
        first = replace(first, round=first.round or len(earlier) + 1)
        readable = [node for node in order if not sent[node].vector.reason]
        layout = sent[readable[0]].vector.layout if readable else ()
        notes: dict[str, str] = {}
        rows: dict[int, torch.Tensor] = {}
        for node in order:
            if node not in replies:
                note = failed.get(node, "no reply")
            else:
                reply = vector_of(replies[node], self.most_bytes)
                note = _difference(sent[node].vector, reply, layout, rows, node)
            if note:
                notes[str(numbers[node])] = note
        first_layout = self.layout
        changed = bool(layout and first_layout and layout != first_layout)
        if changed:
            notes["all"] = "the arrays have other names or shapes than in the first exchange"
        metrics = {node: numbers_of(replies[node]) for node in order if node in replies}
        updates = len(rows) if first.kind.startswith(TRAIN) else 0
        if updates:
            self._store(first, sent, layout, rows, _sizes(metrics))
        line = {
            "kind": first.kind,
            "round": first.round,
            "to": [numbers[node] for node in order],
            "down": [sent[node].bytes for node in order],
            "up": [bytes_of(replies[node]) if node in replies else 0 for node in order],
            "layout": layout if changed or not first_layout else (),
            "updates": updates,
            "metrics": {str(numbers[node]): found for node, found in metrics.items()},
            "notes": notes,
        }
        text = json.dumps(line)
        atomic_files.append_line(self.folder / EXCHANGES, text, atomic_files.OWNER, durable=True)
        self.exchanges.append(json.loads(text))

    def _numbers(self) -> dict[int, int]:
        """Return the number of each node: a search of the list costs in proportion to it."""
        return {node: number for number, node in enumerate(self.nodes)}

    def _number(self, nodes: Iterable[int], partitions: Mapping[int, int] | None = None) -> None:
        """Give nodes that are new the next numbers.

        Args:
            nodes: their ids.
            partitions: by id, the part of a simulation's data that a node has.
        """
        known_nodes = set(self.nodes)
        for node in sorted(nodes):
            if node in known_nodes:
                continue
            known: dict[str, int] = {"node": node}
            if partitions and node in partitions:
                known["partition"] = partitions[node]
            line = json.dumps(known)
            atomic_files.append_line(self.folder / NODES, line, atomic_files.OWNER, durable=True)
            self.nodes.append(node)
            known_nodes.add(node)
        self.transcript.names = tuple(self.names)

    def _store(
        self,
        first: Sent,
        sent: Mapping[int, Sent],
        layout: Layout,
        rows: Mapping[int, torch.Tensor],
        sizes: Mapping[int, float],
    ) -> None:
        """Add an exchange of arrays to the transcript, of the clients that were sent the same.

        Args:
            first: message, for its type and round.
            sent: by node.
            layout: of the arrays.
            rows: updates by node.
            sizes: numbers of samples by node, of nodes that sent them.
        """
        number_of = self._numbers()
        order = sorted(sent, key=number_of.__getitem__)
        asked = [node for node in order if sent[node].vector.layout == layout]
        models = torch.stack([sent[node].vector.values for node in asked])  # type: ignore[misc]
        index = None
        if bool((models == models[0]).all()):
            index = (0,) * len(asked)
            models = models[:1]
        numbers = tuple(number_of[node] for node in asked)
        method = first.kind.replace(".", "_")
        call = Call(
            config=self.app,
            method=method,
            verb=GATHER,
            round=first.round,
            step=self.transcript.count + 1,
            to=numbers,
            query=SentModel(Rows(models, index)),
            members=(1,) * len(asked),
        )
        replied = [node for node in asked if node in rows]
        size = None
        if all(node in sizes for node in replied):
            size = Rows(torch.tensor([sizes[node] for node in replied]))
        reply = Update(Rows(torch.stack([rows[node] for node in replied])), size)
        ids = tuple(number_of[node] for node in replied)
        self.transcript.record(call, Response(ids, reply))


@dataclass(frozen=True)
class Sent:
    """A message of the server, read before the grid takes its contents.

    Args:
        kind: type of the message.
        round: of the app; 0 where the message tells none.
        bytes: of its records.
        vector: of its arrays.
    """

    kind: str
    round: int
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
            round=_round_of(message),
            bytes=bytes_of(content),
            vector=vector_of(content, most_bytes),
        )


class RecordedGrid:
    """A grid of Flower that writes each exchange down and passes everything on.

    Args:
        grid: of Flower.
        recording: that is written.
    """

    def __init__(self, grid: Any, recording: Recording) -> None:
        self._grid = grid
        self.recording = recording
        self._pending: dict[str, tuple[int, Sent]] = {}

    def __getattr__(self, name: str) -> Any:
        """Return whatever else the grid has."""
        return getattr(self._grid, name)

    def send_and_receive(self, messages: Iterable[Any], *, timeout: float | None = None) -> Any:
        """Return the replies to messages, which are on the disk by then.

        Args:
            messages: of the app.
            timeout: seconds, as Flower has it.
        """
        listed = list(messages)
        most = self.recording.most_bytes
        sent = [(message.metadata.dst_node_id, Sent.of(message, most)) for message in listed]
        replies = list(self._grid.send_and_receive(listed, timeout=timeout))
        self._write(sent, replies)
        return replies

    def push_messages(self, messages: Iterable[Any]) -> Any:
        """Return the numbers of messages that are sent.

        Args:
            messages: of the app.
        """
        listed = list(messages)
        most = self.recording.most_bytes
        sent = [(message.metadata.dst_node_id, Sent.of(message, most)) for message in listed]
        numbers = list(self._grid.push_messages(listed))
        self._pending.update(zip(numbers, sent, strict=True))
        return numbers

    def pull_messages(self, message_ids: Iterable[str]) -> Any:
        """Return the replies that are there, which are on the disk by then.

        Args:
            message_ids: numbers of the messages that they answer.
        """
        replies = list(self._grid.pull_messages(message_ids))
        answered = [reply.metadata.reply_to_message_id for reply in replies]
        sent = [self._pending.pop(number) for number in answered if number in self._pending]
        self._write(sent, replies)
        return replies

    def _write(self, sent: Sequence[tuple[int, Sent]], replies: Sequence[Any]) -> None:
        """Write messages down, an exchange for each type and round."""
        contents = {}
        failed = {}
        for reply in replies:
            node = reply.metadata.src_node_id
            if reply.has_error():
                failed[node] = f"error {int(reply.error.code)}"
            else:
                contents[node] = reply.content
        groups: dict[tuple[str, int], dict[int, Sent]] = {}
        for node, message in sent:
            groups.setdefault((message.kind, message.round), {})[node] = message
        for group in groups.values():
            self.recording.record(group, contents, failed)


def _difference(
    sent: Vector, reply: Vector, layout: Layout, rows: dict[int, torch.Tensor], node: int
) -> str:
    """Add the reply's arrays minus those that were sent to rows, or return why there is no row.

    Args:
        sent: to the node.
        reply: of the node.
        layout: of what was sent to the first node.
        rows: by node.
        node: its id.
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
    rows[node] = reply.values - sent.values
    return ""


def _sizes(metrics: Mapping[int, Mapping[str, float]]) -> dict[int, float]:
    """Return by node the number of samples that it sent, where it sent one."""
    sizes = {}
    for node, numbers in metrics.items():
        for name in SIZES:
            if numbers.get(name, -1.0) >= 0:
                sizes[node] = numbers[name]
    return sizes


def recorded(
    grid: Any,
    folder: Path | str,
    facts: TrainingFacts | None = None,
    app: str = "",
    most_bytes: int = MOST_BYTES,
) -> Any:
    """Return a grid of Flower that records everything an app sends and receives to a folder.

    Args:
        grid: that Flower gives a ServerApp's main function.
        folder: new or empty; or the recording of the same app, which then goes on.
        facts: of the clients' training; None declares nothing.
        app: name of the app in reports; the folder's where none is given.
        most_bytes: that the arrays of a message may have to be stored.

    Raises:
        UsageError: something else is in the folder.
    """
    name = app or Path(folder).resolve().name
    recording = Recording.begin(folder, name, facts or TrainingFacts(), most_bytes)
    return RecordedGrid(grid, recording)


def recorded_client(folder: Path | str, facts: TrainingFacts | None = None, app: str = "") -> Any:
    """Return a mod of Flower that records what a client receives and sends, in a folder of its own.

    The folder of a client is named after its node, so those of a simulation may lie side by side.
    As the first mod of an app it sees what leaves the client; as the last, what the app computed.

    Args:
        folder: in which the client's folder is made.
        facts: of the training.
        app: name of the app in reports; the folder's where none is given.
    """
    parent = Path(folder)
    name = app or parent.resolve().name

    def mod(message: Any, context: Any, call_next: Any) -> Any:
        node = int(context.node_id)
        atomic_files.make_folder(parent)
        recording = Recording.begin(parent / str(node), name, facts or TrainingFacts())
        partition = context.node_config.get(PARTITION)
        known = {node: partition} if isinstance(partition, int) else {}
        recording._number([node], known)
        sent = Sent.of(message, recording.most_bytes)
        reply = call_next(message, context)
        contents = {} if reply.has_error() else {node: reply.content}
        failed = {node: f"error {int(reply.error.code)}"} if reply.has_error() else {}
        recording.record({node: sent}, contents, failed)
        return reply

    return mod


def partitions_in(folder: Path) -> dict[int, int]:
    """Return by node the part of the data that it has, as recordings of clients tell.

    Args:
        folder: that `recorded_client` was given.
    """
    found = {}
    for path in sorted(folder.glob(f"*/{NODES}")):
        for line in _lines(path):
            if "partition" in line:
                found[int(line["node"])] = int(line["partition"])
    return found


def is_recording(folder: Path) -> bool:
    """Return True if a folder is the recording of an app.

    Args:
        folder: any path.
    """
    with atomic_files.as_run_folder_error(folder, "read"):
        return (folder / FACTS).is_file()


def _lines(path: Path) -> list[Any]:
    """Return the lines of a file, without a last one that a kill has cut short."""
    if not path.is_file():
        return []
    data = atomic_files.read(path)
    try:
        return [json.loads(line) for line in data[: data.rfind(b"\n") + 1].splitlines()]
    except (ValueError, RecursionError):
        raise RunFolderError(f"{path} is damaged") from None


def _cut_torn_line(path: Path) -> None:
    """Remove a last line that a kill has cut short."""
    if path.is_file():
        data = atomic_files.read(path)
        end = data.rfind(b"\n") + 1
        if end < len(data):
            atomic_files.write_atomic(path, data[:end], atomic_files.OWNER, durable=True)
