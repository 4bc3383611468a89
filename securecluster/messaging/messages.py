"""Messages, and the batch of frames that one call is.

A message is a frozen dataclass whose fields are `Shared`, `Rows`, `Picks` (tensors) or plain
scalars. One message object stands for the frames of a whole batch of recipients (or senders);
`take` cuts out the single frame of one of them and `stack` puts single frames together, so that the
simulator keeps one (clients, d) matrix where a deployment sends many frames.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any, TypeVar, get_args, get_type_hints

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError

if TYPE_CHECKING:
    pass


M = TypeVar("M")
# calls for models, made only under a mask, are numbered from here: later calls draw the same
# batches without a mask
FIRST_SEPARATE_STEP = 1 << 32
# the verb of frames between servers: a local parameter server sends, the server replies
RELAY = "relay"


@dataclass(frozen=True, eq=False)
class Shared:
    """A tensor that is the same in every frame of the batch."""

    value: torch.Tensor


@dataclass(frozen=True, eq=False)
class Rows:
    """One row of a tensor per frame: frame k carries `table[k]`, or `table[index[k]]` where equal
    rows are stored once.
    """

    table: torch.Tensor
    index: tuple[int, ...] | None = None

    def __len__(self) -> int:
        return len(self.table) if self.index is None else len(self.index)

    @property
    def values(self) -> torch.Tensor:
        """All rows, (frames, …); a copy where rows are shared."""
        return (
            self.table
            if self.index is None
            else self.table[torch.as_tensor(self.index, dtype=torch.long)]
        )

    def row(self, frame: int) -> torch.Tensor:
        """One frame's row, without a copy."""
        return self.table[frame if self.index is None else self.index[frame]]

    def select(self, positions: Sequence[int]) -> Rows:
        """The rows of some frames; shared rows stay stored once."""
        if self.index is None:
            return Rows(self.table[torch.as_tensor(tuple(positions), dtype=torch.long)])
        kept = sorted({self.index[k] for k in positions})
        place = {row: n for n, row in enumerate(kept)}
        return Rows(
            self.table[torch.as_tensor(kept, dtype=torch.long)],
            tuple(place[self.index[k]] for k in positions),
        )


@dataclass(frozen=True, eq=False)
class Picks:
    """Several rows of one table per frame, possibly none: frame k carries `table[picks[k]]`,
    (len(picks[k]), …).
    """

    table: torch.Tensor
    picks: tuple[tuple[int, ...], ...]

    def __len__(self) -> int:
        return len(self.picks)

    def select(self, positions: Sequence[int]) -> Picks:
        """The rows of some frames."""
        return Picks(self.table, tuple(self.picks[k] for k in positions))


Batched = Rows | Picks


@cache
def kinds(message: Any) -> dict[str, type]:
    """Field name -> `Shared`, `Rows`, `Picks` or a scalar type of a message class."""
    found: dict[str, type] = {}
    for name, hint in get_type_hints(message).items():
        options = [t for t in get_args(hint) if t is not type(None)] or [hint]
        if len(options) != 1 or options[0] not in (Shared, Rows, Picks, int, float, str, bool):
            raise TypeError(
                f"{message.__name__}.{name}: a message field is Shared, Rows, Picks or a scalar, "
                f"not {hint}"
            )
        found[name] = options[0]
    return found


def optional(message: type, name: str) -> bool:
    """Whether a field may be None (it then is absent from the frame)."""
    return type(None) in get_args(get_type_hints(message)[name])


def select(message: M, positions: Sequence[int]) -> M:
    """The batch of frames at `positions`."""
    if list(positions) == list(range(frames(message, len(positions)))):
        return message
    changes = {k: v.select(positions) for k, v in vars(message).items() if isinstance(v, Batched)}
    return dataclasses.replace(message, **changes)  # type: ignore[type-var]


def placed(message: M, there: Sequence[str], device: torch.device) -> M:
    """Return a message with some of its fields on a device, and its other tensors in main memory.

    Args:
        message: nothing is copied of what lies in its place already.
        there: names of the fields that go to the device.
    """
    main_memory = torch.device("cpu")
    changes: dict[str, Shared | Rows | Picks] = {}
    for name, value in vars(message).items():
        if not isinstance(value, (Shared, Rows, Picks)):
            continue
        target = device if name in there else main_memory
        tensor = value.value if isinstance(value, Shared) else value.table
        moved = tensor.to(target)
        if moved is tensor:
            continue
        if isinstance(value, Shared):
            changes[name] = Shared(moved)
        else:
            changes[name] = dataclasses.replace(value, table=moved)
    return dataclasses.replace(message, **changes) if changes else message  # type: ignore[type-var]


def frames(message: Any, default: int) -> int:
    """How many frames a batch message stands for (`default` where it has no field with a frame
    axis).
    """
    lengths = {len(v) for v in vars(message).values() if isinstance(v, Batched)}
    if len(lengths) > 1:
        raise FrameError(
            f"{type(message).__name__}: its fields disagree on the number of frames: "
            f"{sorted(lengths)}"
        )
    return lengths.pop() if lengths else default


def stack(messages: Sequence[M]) -> M:
    """Single-frame messages of one class as one batch message; shapes, types and shared values must
    agree.
    """
    first = messages[0]
    fields: dict[str, Any] = {}
    for name, value in vars(first).items():
        column = [getattr(m, name) for m in messages]
        fields[name] = _join(f"{type(first).__name__}.{name}", value, column)
    return type(first)(**fields)


def _join(name: str, first: Any, column: list[Any]) -> Any:
    """Return one field of several frames as the field of one batch.

    Args:
        name: of the message and the field, for errors.
        first: the first frame's value.
        column: every frame's value.
    """
    if any(type(value) is not type(first) for value in column):
        raise FrameError(f"{name}: present in some frames and absent in others")
    if isinstance(first, Rows):
        return Rows(_joined_tables(name, [value.values for value in column]))
    if isinstance(first, Picks):
        table = _joined_tables(name, [value.table for value in column])
        return Picks(table, _joined_picks(column))
    if not all(_equal(value, first) for value in column):
        raise FrameError(f"{name}: shared by all frames of a call, yet the frames differ")
    return first


def _joined_tables(name: str, tables: list[torch.Tensor]) -> torch.Tensor:
    """Return the rows of all frames, one frame after the other."""
    if len({(table.shape[1:], table.dtype) for table in tables}) > 1:
        shapes = sorted({str(tuple(table.shape[1:])) for table in tables})
        raise FrameError(f"{name}: the frames differ in shape or type: {shapes}")
    return torch.cat(tables)


def _joined_picks(column: list[Picks]) -> tuple[tuple[int, ...], ...]:
    """Return each frame's picks, counted in the joined table."""
    picks = []
    start = 0
    for value in column:
        picks.append(tuple(start + pick for pick in value.picks[0]))
        start += len(value.table)
    return tuple(picks)


def _equal(value: Any, other: Any) -> bool:
    """Return whether two values of a field that all frames share are the same."""
    if not isinstance(other, Shared):
        return bool(value == other)
    one, two = value.value, other.value
    return one.shape == two.shape and one.dtype == two.dtype and torch.equal(one, two)


@dataclass(frozen=True)
class Header:
    """What every frame says of itself; `config` is the hash of the configuration both sides were
    built from.
    """

    config: str
    method: str
    verb: str
    round: int
    step: int
    sender: str
    recipient: str
    members: int  # the size of the group this answer will be summed with; 1: it is read on its own


@dataclass(frozen=True, eq=False)
class Call:
    """One request to each of several clients, as a batch; `query` has one frame per entry of `to`.

    With the verb RELAY `to` are local parameter servers, which send the query to the server.
    """

    config: str
    method: str
    verb: str
    round: int
    step: int
    to: tuple[int, ...]
    query: Any
    members: tuple[int, ...]
    # the local parameter server that asks each of `to`; empty: the server itself does
    asker: tuple[int, ...] = ()

    def header(self, position: int) -> Header:
        """The header of the request to `to[position]`."""
        sender, recipient = "server", f"client/{self.to[position]}"
        if self.verb == RELAY:
            sender, recipient = f"lps/{self.to[position]}", "server"
        elif self.asker:
            sender = f"lps/{self.asker[position]}"
        return Header(
            self.config,
            self.method,
            self.verb,
            self.round,
            self.step,
            sender,
            recipient,
            self.members[position],
        )

    def select(self, positions: Sequence[int]) -> Call:
        """The same call to some of its recipients."""
        pick = tuple(positions)
        return dataclasses.replace(
            self,
            to=tuple(self.to[k] for k in pick),
            members=tuple(self.members[k] for k in pick),
            asker=tuple(self.asker[k] for k in pick) if self.asker else (),
            query=select(self.query, pick),
        )


@dataclass(frozen=True, eq=False)
class Response:
    """The replies that came, as a batch over `ids`; who is missing dropped out."""

    ids: tuple[int, ...]
    reply: Any  # None when nobody replied


def reply_header(request: Header) -> Header:
    """The header of the reply to a request."""
    return dataclasses.replace(request, sender=request.recipient, recipient=request.sender)


@dataclass(frozen=True, eq=False)
class Empty:
    """Server to client: send your public key."""


@dataclass(frozen=True, eq=False)
class Ack:
    """Client to server: understood; nothing else."""
