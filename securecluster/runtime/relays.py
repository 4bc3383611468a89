"""Rows of single clients' replies that a query would bring to other clients.

Every client can undo the run's mask, so a row that is sent on shows its client's reply to whoever
receives it. A client method names the fields of its query that may hold such rows, by
`@answers(..., relays=...)`. `Gathered` remembers what single clients sent, and refuses the rest.

This finds mistakes of honest authors: rows are compared bit for bit, so a server that rounds a row,
or adds a constant to it, is not noticed. Nor are whole numbers, rows of few numbers, which
clients often have in common, and replies before the last hundred thousand rows. A resumed run
remembers the replies since it was resumed.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import Any, NamedTuple, cast

import numpy as np

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real, declared
from securecluster.messaging.messages import Call, Picks, Rows, Shared

DIGEST = 16  # bytes
# Different numbers, other than whole ones, of the shortest row that is recognized: zeros, choices,
# counts and unit vectors are equal between clients without being anybody's reply.
LEAST_NUMBERS = 3
MOST_ROWS = 100_000  # that are remembered: some 35 MB
LEAST_OCTETS = 8  # different bytes of the shortest recognized row of codes, or of sealed numbers


class Source(NamedTuple):
    """A reply that contained a row.

    Args:
        client: who sent it.
        replied: all clients that replied to the same call, so far.
    """

    client: int
    replied: set[int]


class Gathered:
    """Digests of the rows of single clients' replies in one run, the last ones.

    Args:
        most: number of rows that are remembered, so that memory does not grow with the rounds.
    """

    def __init__(self, most: int = MOST_ROWS) -> None:
        self._most = most
        # by digest of the row's bytes, and the digests in the order in which they came
        self._sources: dict[bytes, list[Source]] = {}
        self._order: deque[bytes] = deque()
        self._call: tuple[str, int] | None = None  # method and number of the last call
        self._replied: set[int] = set()  # clients that replied to it

    def remember(self, method: str, step: int, ids: Sequence[int], fields: Iterable[Any]) -> None:
        """Store what single clients replied.

        Args:
            method: name of the client method.
            step: number of the call.
            ids: clients that replied.
            fields: of the replies, each with a frame for each of them.
        """
        if self._call != (method, step):
            self._call = (method, step)
            self._replied = set()
        self._replied.update(ids)
        for value in fields:
            if not isinstance(value, Rows) or not _is_compared(value.table):
                continue
            rows = _digests_of_rows(value.values)
            for client, digests in zip(ids, rows, strict=True):
                source = Source(client, self._replied)
                for digest in digests:
                    self._sources.setdefault(digest, []).append(source)
                    self._order.append(digest)
        while len(self._order) > self._most:
            oldest = self._order.popleft()
            del self._sources[oldest][0]
            if not self._sources[oldest]:
                del self._sources[oldest]

    def check(self, method: str, relays: Sequence[str], call: Call) -> None:
        """Raise PolicyError for a row of a client that goes to another one without a declaration.

        Args:
            method: name of the client method, for the error.
            relays: fields of its query that may hold such rows.
            call: the call.
        """
        if not self._sources:
            return
        bounds = declared(cast(Hashable, type(call.query)))
        for name, value in vars(call.query).items():
            if name in relays:
                continue
            bound = bounds.get(name)
            is_average = isinstance(bound, Real) and bound.average
            for table, recipients in _rows_and_recipients(value, call.to):
                if self._shows_another(table, recipients, is_average):
                    raise _undeclared(method, name)

    def _shows_another(
        self, table: torch.Tensor, recipients: Sequence[int], is_average: bool
    ) -> bool:
        """Return True if a row is the reply of a client other than some recipient.

        Args:
            table: the row, (1, …).
            recipients: clients that it goes to.
            is_average: True for an average over those that replied. Over one client it is this
                client's reply, which reaches the clients that did not reply to the same call.
        """
        row = table[0]
        pieces = [row] if row.ndim < 2 else [row, *row]
        (digests,) = _digests_of_rows(table)
        for piece, digest in zip(pieces, digests, strict=True):
            sources = self._sources.get(digest)
            if sources is None or not _is_recognized(piece):
                continue
            others = set(recipients) - {source.client for source in sources}
            if is_average:
                others = {i for i in others if all(i in source.replied for source in sources)}
            if others:
                return True
        return False


def _undeclared(method: str, field: str) -> PolicyError:
    """Return the error for a relayed row that no declaration mentions."""
    return PolicyError(
        f"{method} would bring a single client's reply to other clients, in {field} of its query: "
        f'declare it with @answers(..., relays=("{field}",)) if they are to see it, or send an '
        "average"
    )


def _is_compared(table: torch.Tensor) -> bool:
    """Return True for rows of real numbers, codes or sealed numbers."""
    is_numeric = table.is_floating_point() or table.dtype == torch.uint8
    return is_numeric and table.ndim > 1 and table.numel() > 0


def _rows_and_recipients(
    value: Any, to: Sequence[int]
) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Yield the tables of rows of a query's field, one row each, with the clients that get it."""
    if isinstance(value, Shared):
        table = value.value[None]
        if _is_compared(table):
            yield table, to
        return
    if not isinstance(value, Rows | Picks) or not _is_compared(value.table):
        return
    recipients: dict[int, list[int]] = {}
    for position, client in enumerate(to):
        for row in _rows_of(value, position):
            recipients.setdefault(row, []).append(client)
    for row, clients in recipients.items():
        yield value.table[row : row + 1], clients


def _rows_of(value: Rows | Picks, frame: int) -> tuple[int, ...]:
    """Return which rows of a field's table one frame has."""
    if isinstance(value, Picks):
        return value.picks[frame]
    if value.index is None:
        return (frame,)
    return (value.index[frame],)


def _digests_of_rows(table: torch.Tensor) -> Iterator[list[bytes]]:
    """Yield, for each row, the digests of its numbers and of those of its own rows.

    Shapes are not digested, since a row may be sent on in another one.

    Args:
        table: rows, (r, …).
    """
    flat = table.detach().cpu().reshape(len(table), -1).contiguous()
    octets = flat.view(torch.uint8).numpy()
    subrow_count = table.shape[1] if table.ndim > 2 else 0
    for row in octets:
        pieces = [row]
        if subrow_count:
            pieces += list(row.reshape(subrow_count, -1))
        yield [hashlib.blake2b(piece.data, digest_size=DIGEST).digest() for piece in pieces]


def _is_recognized(row: torch.Tensor) -> bool:
    """Return True for a row that two clients do not have in common by chance."""
    distinct = np.unique(row.detach().cpu().numpy())
    if row.dtype == torch.uint8:
        return len(distinct) >= LEAST_OCTETS
    return int((distinct != np.round(distinct)).sum()) >= LEAST_NUMBERS
