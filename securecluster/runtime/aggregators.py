"""Aggregators, which form the sums over clients.

An aggregator defines its own rounds, parties and keys, and its rule for clients that drop out.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Response, Rows
from securecluster.privacy.cohorts import Cohort
from securecluster.runtime.port import Connected, KeyMessages, Keys, Lists, Port


class Exchange(Protocol):
    """Interface of what sends the calls of one client method."""

    def __call__(self, call: Call) -> Response:
        """Send a call and return the replies that arrive.

        Args:
            call: the call.
        """
        ...

    def stream(self, call: Call, chunk: int | None = None) -> Iterator[Response]:
        """Send a call and yield the replies in parts, so that few of them are in memory at once.

        Args:
            call: the call.
            chunk: clients of a part, where parts are asked one after another; None takes as many
                as memory allows.
        """
        ...


@dataclass(frozen=True, eq=False)
class Total:
    """Sums of one call, per group.

    Args:
        rows: reply message with (groups, …) fields; None if nobody replied.
        counts: number of clients in each sum.
        ids: clients that replied.
    """

    rows: Any
    counts: tuple[int, ...]
    ids: tuple[int, ...]


class Aggregator(Protocol):
    """Interface of aggregators: from a call to sums per group.

    Attributes:
        name: name of the aggregator.
        server_reads_replies: True if the server can read single replies.
        hides_replies: True if replies arrive hidden, as messages of another class.
        needs_seed: True if clients need the seed that they agree on for masks.
    """

    name: str
    server_reads_replies: bool
    hides_replies: bool
    needs_seed: bool

    @property
    def keys(self) -> Keys | None:
        """Return its exchange of keys; None without any."""
        ...

    def connect(self, port: Port) -> None:
        """Take the channel's port.

        Args:
            port: sends the messages of the aggregator itself.
        """
        ...

    def ready(self, clients: Sequence[int], lists: Lists) -> list[int]:
        """Return the clients that can take part now, after an exchange of keys where needed.

        Args:
            clients: ids of the clients of the next sums.
            lists: members of each of the sums, by the clients that can take part.
        """
        ...

    def beside(self, clients: Sequence[int], lists: Lists) -> KeyMessages:
        """Yield what of an exchange of keys may go out beside another one.

        Args:
            clients: ids of the clients of the next call.
            lists: members of each of the sums, by the clients that can take part.
        """
        ...

    def run(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort] = (),
    ) -> Total:
        """Call every client and sum the replies.

        Args:
            exchange: sends calls and brings the replies that arrive.
            call: the call to all clients.
            by: group of each recipient of the call, in its order.
            groups: number of groups.
            cohorts: of the recipients, each of which is in a sum as a whole or not at all; empty
                where clients are lost one by one.
        """
        ...


class Plain(Connected):
    """Aggregator whose server receives every reply and sums them as they arrive.

    It protects nothing. Its memory does not grow with the number of clients.

    Args:
        wide: True to sum in float64, whatever the type of the replies. A trusted server does so
            before it adds noise: a sum in float32 may move by more than the clip norm when one
            client is left out.
    """

    name = "plain"
    server_reads_replies = True
    hides_replies = False

    def __init__(self, wide: bool = False) -> None:
        self._wide = wide

    def run(
        self,
        exchange: Exchange,
        call: Call,
        by: Sequence[int],
        groups: int,
        cohorts: Sequence[Cohort] = (),
    ) -> Total:
        """Call the clients and sum their replies, part by part.

        Args:
            exchange: sends calls and brings the replies that arrive.
            call: the call to all clients.
            by: group of each recipient of the call, in its order.
            groups: number of groups.
            cohorts: ignored, since whoever reads every reply needs no second sum.
        """
        sums = None
        counts = [0] * groups
        ids: list[int] = []
        group_of = dict(zip(call.to, by, strict=True))
        for response in exchange.stream(call):
            if response.reply is None:  # all clients of the part dropped out
                continue
            reply_groups = [group_of[client] for client in response.ids]
            chunk_sums = part_sums(response.reply, reply_groups, self._wide)
            sums = _add(sums, response.reply, chunk_sums, groups)
            ids += response.ids
            for group in reply_groups:
                counts[group] += 1
        return Total(sums, tuple(counts), tuple(ids))


def members_by_group(clients: Iterable[int], by: Iterable[int], groups: int) -> list[list[int]]:
    """Return the clients of each group, in the order in which they are given.

    Args:
        clients: ids of clients.
        by: group of each.
        groups: number of groups.
    """
    members: list[list[int]] = [[] for _ in range(groups)]
    for client, group in zip(clients, by, strict=True):
        members[group].append(client)
    return members


def part_sums(
    reply: Any, reply_groups: Sequence[int], wide: bool = False
) -> dict[str, dict[int, torch.Tensor]]:
    """Return the sums of a part's rows, by field and group.

    Args:
        reply: the replies of a part, as a batch.
        reply_groups: group of each reply.
        wide: True to sum in float64.
    """
    # in ascending order, so that equal replies give equal bits
    present = sorted(set(reply_groups))
    sums: dict[str, dict[int, torch.Tensor]] = {}
    for name, rows in _addends(reply, wide).items():
        by_group = {}
        for group in present:
            members = _rows_of_group(rows, reply_groups, group)
            by_group[group] = members.sum(0, dtype=rows.dtype)
        sums[name] = by_group
    return sums


def _add(
    sums: Any, reply: Any, chunk_sums: Mapping[str, dict[int, torch.Tensor]], groups: int
) -> Any:
    """Add the sums of a part to those of the parts before, in place, and return them.

    Args:
        sums: reply message with (groups, …) fields; None before the first part.
        reply: the replies of the part.
        chunk_sums: their sums, by field and group.
        groups: number of groups.

    Raises:
        FrameError: the replies of two parts do not have the same fields, shapes and types.
    """
    if sums is None:
        sums = _zeros(reply, chunk_sums, groups)
    for name, value in vars(reply).items():
        absent_so_far = getattr(sums, name) is None
        if (value is None) != absent_so_far:
            raise FrameError(f"{name}: present in some replies and absent in others")
    for name, by_group in chunk_sums.items():
        table = getattr(sums, name).table  # (groups, …)
        for group, row in by_group.items():
            if row.shape != table[group].shape or row.dtype != table.dtype:
                raise FrameError(
                    f"{name}: the replies differ in shape or type: {tuple(table.shape[1:])} and "
                    f"{tuple(row.shape)}"
                )
            table[group] += row
    return sums


def _addends(reply: Any, wide: bool) -> dict[str, torch.Tensor]:
    """Return the rows of a reply's fields by name, (b, …), in float64 if `wide`."""
    addends = {}
    for name, value in vars(reply).items():
        if not isinstance(value, Rows):
            continue
        rows = value.values
        if wide and rows.is_floating_point():  # sums of integers are exact as they are
            rows = rows.double()
        addends[name] = rows
    return addends


def _zeros(reply: Any, chunk_sums: Mapping[str, dict[int, torch.Tensor]], groups: int) -> Any:
    """Return a reply message whose rows are zero sums, one per group."""
    empty = {}
    for name, by_group in chunk_sums.items():
        row = next(iter(by_group.values()))
        shape = (groups, *row.shape)
        zeros = torch.zeros(shape, dtype=row.dtype, device=row.device)
        empty[name] = Rows(zeros)
    return dataclasses.replace(reply, **empty)


def _rows_of_group(rows: torch.Tensor, reply_groups: Sequence[int], group: int) -> torch.Tensor:
    """Return the rows of one group; all rows, without a copy, if they are of this group."""
    positions = [k for k, other in enumerate(reply_groups) if other == group]
    if len(positions) == len(rows):
        return rows
    return rows[torch.as_tensor(positions, device=rows.device)]
