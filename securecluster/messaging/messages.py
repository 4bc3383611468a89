"""Messages, and calls as batches of frames.

A message is a frozen dataclass whose fields are `Shared`, `Rows`, `Picks` (tensors) or scalars. One
message object stands for the frames of a batch of recipients (or senders); `select` cuts out the
frames of some of them, and `stack` joins batches, such as single frames. So the simulator holds one
(clients, d) matrix where a deployment sends many frames.

`Shared` is one value for all, `Rows` one row a recipient, of which equal ones are stored once, and
`Picks` several rows a recipient. To select or encode one frame takes no other copy.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import Hashable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, TypeVar, get_args, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.receipts import Receipts

M = TypeVar("M")
FrameRows = tuple[int, ...]  # rows of a table that one frame has
# lists of clients that are kept: each client of a sum reads the same one
KEPT_LISTS = 16
# number of the first call of those that only masked runs make, such as for models: numbered apart,
# so that all later calls draw the same batches with and without a mask
FIRST_SEPARATE_STEP = 1 << 32
# verb of frames between servers: a local parameter server sends, and the server replies
RELAY = "relay"
# verb of the server's calls to the key authority, the one recipient, whose number is 0
AUTHORITY_CALL = "authority"
# one id, or the first and last of consecutive ones, in the text of `format_ids`
_RUN = re.compile(r"\d{1,10}(-\d{1,10})?", re.ASCII)


@dataclass(frozen=True, eq=False)
class Shared:
    """Tensor that is the same in every frame of the batch.

    Args:
        value: the tensor, without a frame axis.
    """

    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """Tensor of which each frame has one row.

    Args:
        table: rows, (r, …).
        index: row of each frame, so that equal rows are stored once; None if frame k has row k.
    """

    table: torch.Tensor
    index: tuple[int, ...] | None = None

    def __len__(self) -> int:
        if self.index is None:
            return len(self.table)
        return len(self.index)

    @property
    def values(self) -> torch.Tensor:
        """Rows of all frames, (frames, …); a copy if rows are shared."""
        if self.index is None:
            return self.table
        return _rows(self.table, self.index)

    def row(self, frame: int) -> torch.Tensor:
        """Return the row of one frame, without a copy.

        Args:
            frame: position of the frame in the batch.
        """
        if self.index is None:
            return self.table[frame]
        return self.table[self.index[frame]]

    def select(self, positions: Sequence[int]) -> Rows:
        """Return the rows of some frames; shared rows remain stored once.

        Args:
            positions: positions of the frames in the batch.
        """
        if self.index is None:
            return Rows(_rows(self.table, positions))
        selected = [self.index[k] for k in positions]
        # rows that no selected frame has are dropped
        remaining = sorted(set(selected))
        new_row = {row: k for k, row in enumerate(remaining)}
        index = tuple(new_row[row] for row in selected)
        return Rows(_rows(self.table, remaining), index)


@dataclass(frozen=True, eq=False)
class Picks:
    """Tensor of which each frame has several rows, possibly none.

    Args:
        table: rows, (r, …).
        picks: rows of each frame: frame k has `table[picks[k]]`, (len(picks[k]), …).
    """

    table: torch.Tensor
    picks: tuple[FrameRows, ...]

    def __len__(self) -> int:
        return len(self.picks)

    def select(self, positions: Sequence[int]) -> Picks:
        """Return the rows of some frames.

        Args:
            positions: positions of the frames in the batch.
        """
        picks = tuple(self.picks[k] for k in positions)
        return Picks(self.table, picks)


def _rows(table: torch.Tensor, positions: Sequence[int]) -> torch.Tensor:
    """Return a copy of some rows of a table."""
    # the type is given for an empty selection, which torch would take for floats
    index = torch.as_tensor(tuple(positions), dtype=torch.long)
    return table[index]


Batched = Rows | Picks
FIELD_KINDS = (Shared, Rows, Picks, int, float, str, bool)


@cache
def kinds(message: Any) -> dict[str, type]:
    """Return the kind of each field of a message class, by name.

    Args:
        message: the class.

    Returns:
        `Shared`, `Rows`, `Picks` or a scalar type; of an optional field, the type when present.

    Raises:
        TypeError: a field is of another type.
    """
    field_kinds: dict[str, type] = {}
    for name, hint in get_type_hints(message).items():
        options = [option for option in get_args(hint) if option is not type(None)]
        if not options:
            options = [hint]
        if len(options) != 1 or options[0] not in FIELD_KINDS:
            raise TypeError(
                f"{message.__name__}.{name}: a message field is Shared, Rows, Picks or a scalar, "
                f"not {hint}"
            )
        field_kinds[name] = options[0]
    return field_kinds


@cache
def optional(message: Any, name: str) -> bool:
    """Return True if a field may be None; it is then absent from the frame.

    Args:
        message: class of the message.
        name: name of the field.
    """
    hint = get_type_hints(message)[name]
    return type(None) in get_args(hint)


def select(message: M, positions: Sequence[int]) -> M:
    """Return the batch of some of a message's frames.

    Args:
        message: a batch of frames.
        positions: positions of the frames; without a copy if these are all of them in order.
    """
    all_positions = range(frames(message, len(positions)))
    if list(positions) == list(all_positions):
        return message
    changes: dict[str, Rows | Picks] = {}
    for name, value in vars(message).items():
        if isinstance(value, Batched):
            changes[name] = value.select(positions)
    return dataclasses.replace(message, **changes)  # type: ignore[type-var]


def placed(message: M, on_device: Sequence[str], device: torch.device) -> M:
    """Return a message with some fields on a device, and its other tensors in main memory.

    Args:
        message: a batch of frames; tensors that are in the right memory are not copied.
        on_device: names of the fields that go to the device.
        device: the device.
    """
    main_memory = torch.device("cpu")
    changes: dict[str, Shared | Rows | Picks] = {}
    for name, value in vars(message).items():
        if not isinstance(value, (Shared, Rows, Picks)):
            continue
        target = main_memory
        if name in on_device:
            target = device
        if isinstance(value, Shared):
            tensor = value.value.to(target)  # the same tensor if it is there already
            if tensor is not value.value:
                changes[name] = Shared(tensor)
        else:
            tensor = value.table.to(target)
            if tensor is not value.table:
                changes[name] = dataclasses.replace(value, table=tensor)
    if not changes:
        return message
    return dataclasses.replace(message, **changes)  # type: ignore[type-var]


def frames(message: Any, default: int) -> int:
    """Return the number of frames that a batch message stands for.

    Args:
        message: a batch of frames.
        default: the result if no field has a frame axis.

    Raises:
        FrameError: the fields disagree on the number.
    """
    fields = vars(message).values()
    lengths = {len(value) for value in fields if isinstance(value, Batched)}
    if len(lengths) > 1:
        raise FrameError(
            f"{type(message).__name__}: its fields disagree on the number of frames: "
            f"{sorted(lengths)}"
        )
    if not lengths:
        return default
    return lengths.pop()


def stack(messages: Sequence[M]) -> M:
    """Return batches of one message class as one batch, the frames of one after those of another.

    Args:
        messages: one or more batches; a single frame is a batch of one.

    Raises:
        FrameError: their shapes, types or shared values differ.
    """
    first = messages[0]
    message_class = type(first)
    fields: dict[str, Any] = {}
    for name, value in vars(first).items():
        column = [getattr(message, name) for message in messages]
        label = f"{message_class.__name__}.{name}"
        fields[name] = _join(label, value, column)
    return message_class(**fields)


def _join(name: str, first: Any, column: list[Any]) -> Any:
    """Return one field of several batches as the field of one batch.

    Args:
        name: message and field, for errors.
        first: value of the first batch.
        column: values of all batches.
    """
    types = {type(value) for value in column}
    if types != {type(first)}:
        raise FrameError(f"{name}: present in some frames and absent in others")
    if isinstance(first, Rows):
        tables = [value.values for value in column]
        return Rows(_joined_tables(name, tables))
    if isinstance(first, Picks):
        tables = [value.table for value in column]
        picks = _joined_picks(column)
        return Picks(_joined_tables(name, tables), picks)
    if not all(_equal(value, first) for value in column):
        raise FrameError(f"{name}: shared by all frames of a call, yet the frames differ")
    return first


def _joined_tables(name: str, tables: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all frames, one frame after the other."""
    shapes = {tuple(table.shape[1:]) for table in tables}
    dtypes = {table.dtype for table in tables}
    if len(shapes) > 1 or len(dtypes) > 1:
        shown = sorted(map(str, shapes))
        raise FrameError(f"{name}: the frames differ in shape or type: {shown}")
    return torch.cat(tables)


def _joined_picks(column: list[Picks]) -> tuple[FrameRows, ...]:
    """Return the picks of each frame, counted in the joined table."""
    picks = []
    start = 0
    for value in column:
        for frame_rows in value.picks:
            picks.append(tuple(start + row for row in frame_rows))
        start += len(value.table)
    return tuple(picks)


def _equal(value: Any, other: Any) -> bool:
    """Return True if two values of a field that all frames share are the same."""
    if not isinstance(other, Shared):
        return bool(value == other)
    first = value.value
    second = other.value
    if first.shape != second.shape or first.dtype != second.dtype:
        return False
    return torch.equal(first, second)


@dataclass(frozen=True)
class Header:
    """Address and context of a frame.

    Args:
        config: hash of the configuration that both sides were built from.
        method: name of the client method.
        verb: verb that the method is called through.
        round: the protocol's round.
        step: number of the call.
        sender: party that sends the frame.
        recipient: party that receives it.
        members: size of the sum that the reply becomes part of; 1 if it is read on its own.
        group: clients of the secure sum that the frame belongs to (`format_ids`); empty where there
            is none.
        attempt: number of the attempt at a secure sum, from 0.
        deadline: seconds since 1970 by the recipient's clock, after which it refuses; 0 for none.
            Replies have none.
    """

    config: str
    method: str
    verb: str
    round: int
    step: int
    sender: str
    recipient: str
    members: int
    group: str = ""
    attempt: int = 0
    deadline: int = 0


@dataclass(frozen=True, eq=False)
class Call:
    """Request to several clients, as a batch of frames.

    With the verb RELAY the recipients are local parameter servers, which send the query to the
    server; with the verb AUTHORITY_CALL the only recipient is the key authority.

    Args:
        config: hash of the configuration.
        method: name of the client method.
        verb: verb that the method is called through.
        round: the protocol's round.
        step: number of the call.
        to: ids of the recipients.
        query: message with one frame per recipient.
        members: size of the sum that each recipient's reply becomes part of.
        asker: local parameter server that calls each recipient; empty if the server itself does.
        group: clients of each recipient's secure sum, as in a header; empty without secure sums.
        attempt: number of the attempt at a secure sum, from 0.
        deadline: as in a header. Transports that wait only so long set it in their frames.
        origins: digest of the public numbers behind each recipient's reply, as its endpoint knows
            them once the reply is there. It is not in frames.
    """

    config: str
    method: str
    verb: str
    round: int
    step: int
    to: tuple[int, ...]
    query: Any
    members: tuple[int, ...]
    asker: tuple[int, ...] = ()
    group: tuple[str, ...] = ()
    attempt: int = 0
    deadline: int = 0
    origins: tuple[bytes, ...] = ()

    def header(self, position: int) -> Header:
        """Return the header of the request to `to[position]`.

        Args:
            position: position of the recipient.
        """
        sender = "server"
        recipient = f"client/{self.to[position]}"
        if self.verb == AUTHORITY_CALL:
            recipient = "authority"
        elif self.verb == RELAY:
            sender = f"lps/{self.to[position]}"
            recipient = "server"
        elif self.asker:
            sender = f"lps/{self.asker[position]}"
        group = ""
        if self.group:
            group = self.group[position]
        return Header(
            config=self.config,
            method=self.method,
            verb=self.verb,
            round=self.round,
            step=self.step,
            sender=sender,
            recipient=recipient,
            members=self.members[position],
            group=group,
            attempt=self.attempt,
            deadline=self.deadline,
        )

    def forms(self) -> list[Hashable]:
        """Return what the length of each request's header depends on beside the call itself.

        Headers of equal forms are equally long, and so are those of the replies to them.
        """
        digits = [len(str(number)) for number in self.to]
        askers = [len(str(number)) for number in self.asker] or [0] * len(digits)
        groups = self.group or [""] * len(digits)
        return list(zip(digits, self.members, askers, groups, strict=True))

    def select(self, positions: Sequence[int]) -> Call:
        """Return the same call to some of its recipients.

        Args:
            positions: positions of the recipients.
        """
        positions = tuple(positions)
        asker: tuple[int, ...] = ()
        if self.asker:
            asker = tuple(self.asker[k] for k in positions)
        group: tuple[str, ...] = ()
        if self.group:
            group = tuple(self.group[k] for k in positions)
        return dataclasses.replace(
            self,
            to=tuple(self.to[k] for k in positions),
            members=tuple(self.members[k] for k in positions),
            asker=asker,
            group=group,
            query=select(self.query, positions),
        )


@dataclass(frozen=True, eq=False)
class Response:
    """Replies that arrived, as a batch; recipients that are missing dropped out.

    Args:
        ids: clients that replied.
        reply: message with one frame per client of `ids`; None if nobody replied.
        receipts: what each client of `ids` released in its reply; empty where nobody has any.
        refused: by client that is alive and refused, the code of its refusal (`refusals`).
        without_release: clients elsewhere that have certainly released nothing: the request was not
            sent to them, or they refused it beforehand. Others without a reply may have.
    """

    ids: tuple[int, ...]
    reply: Any
    receipts: tuple[Receipts, ...] = ()
    refused: Mapping[int, str] = field(default_factory=dict)
    without_release: tuple[int, ...] = ()

    def receipts_at(self, position: int) -> Receipts:
        """Return the receipts of one client's reply.

        Args:
            position: of the client in `ids`.
        """
        return self.receipts[position] if self.receipts else ()

    def of(self, clients: Sequence[int]) -> Response:
        """Return the replies of some clients, of those that replied, and all refusals.

        Args:
            clients: in the order of the new response.
        """
        position_of = {client: position for position, client in enumerate(self.ids)}
        positions = [position_of[client] for client in clients if client in position_of]
        if not positions:
            return dataclasses.replace(self, ids=(), reply=None, receipts=())
        receipts = self.receipts
        if receipts:
            receipts = tuple(receipts[k] for k in positions)
        ids = tuple(self.ids[k] for k in positions)
        reply = select(self.reply, positions)
        return dataclasses.replace(self, ids=ids, reply=reply, receipts=receipts)


def format_ids(ids: Sequence[int]) -> str:
    """Return client ids as text, such as "0-5,9"; `parse_ids` reads it.

    Args:
        ids: distinct ids in ascending order, one or more.
    """
    runs: list[list[int]] = []
    for client in ids:
        if runs and client == runs[-1][-1] + 1:
            runs[-1][1:] = [client]
        else:
            runs.append([client])
    return ",".join("-".join(map(str, run)) for run in runs)


@lru_cache(KEPT_LISTS)
def parse_ids(text: str, count: int) -> tuple[int, ...]:
    """Return the client ids that `format_ids` wrote, ascending.

    Args:
        text: the text.
        count: number of ids that it must have, which bounds what is allocated.

    Raises:
        FrameError: the text has another number of ids, or is not what `format_ids` writes.
    """
    ids: list[int] = []
    for run in text.split(","):
        if not _RUN.fullmatch(run):
            raise _no_group(text)
        first, _, last = run.partition("-")
        length = int(last or first) - int(first) + 1
        if length < 1 or len(ids) + length > count:
            raise _no_group(text)
        ids.extend(range(int(first), int(first) + length))
    # one text for each list of clients: what is signed or hashed cannot differ
    if len(ids) != count or ids != sorted(set(ids)) or format_ids(ids) != text:
        raise _no_group(text)
    return tuple(ids)


def _no_group(text: str) -> FrameError:
    return FrameError(
        f"a frame names the clients of a secure sum as {text[:40]!r}, which is no list of its "
        "members: the frame is refused"
    )


def reply_header(request: Header) -> Header:
    """Return the header of the reply to a request.

    Args:
        request: header of the request.
    """
    return dataclasses.replace(
        request, sender=request.recipient, recipient=request.sender, deadline=0
    )


@dataclass(frozen=True, eq=False)
class Empty:
    """Request without content, such as the request for a public key."""


@dataclass(frozen=True, eq=False)
class Ack:
    """Acknowledgement of a request, without content."""
