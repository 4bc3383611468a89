"""Rows of single clients' replies that a query would bring to other clients.

Every client can undo the run's mask, so a row that is sent on shows its client's reply to whoever
receives it. A client method names the fields of its query that may hold such rows, by
`@answers(..., relays=...)`. `Gathered` remembers what single clients sent, and refuses the rest.

This finds mistakes of honest authors: rows are compared bit for bit, so a server that rounds a row,
or adds a constant to it, is not noticed. Nor are whole numbers, and rows of few numbers, which
clients often have in common. A resumed run remembers the replies since it was resumed.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from securecluster.core.lazy_torch import torch
from securecluster.errors import PolicyError
from securecluster.messaging.bounds import Real, declared
from securecluster.messaging.messages import Call, Picks, Rows, Shared

DIGEST = 16  # bytes
# Different numbers, other than whole ones, of the shortest row that is recognized: zeros, choices,
# counts and unit vectors are equal between clients without being anybody's reply.
LEAST_NUMBERS = 3
LEAST_OCTETS = 8  # different bytes of the shortest recognized row of codes, or of sealed numbers
ONE_CLIENT = "a single client's"


class Source(NamedTuple):
    """A reply that contained a row."""

    client: int
    method: str
    step: int


class Gathered:
    """Digests of the rows of single clients' replies in one run."""

    def __init__(self) -> None:
        # by digest of the row's bytes
        self._sources: dict[bytes, set[Source]] = {}
        # clients that replied to a call, by method and number of the call
        self._replied: dict[tuple[str, int], set[int]] = {}

    def remember(self, method: str, step: int, ids: Sequence[int], reply: Any) -> None:
        """Store what single clients replied.

        Args:
            method: name of the client method.
            step: number of the call.
            ids: clients that replied.
            reply: message with one frame for each of them.
        """
        self._replied.setdefault((method, step), set()).update(ids)
        for value in vars(reply).values():
            if not isinstance(value, Rows) or not _is_compared(value.table):
                continue
            for client, row in zip(ids, value.values, strict=True):
                source = Source(client, method, step)
                for digest in _digests(row):
                    self._sources.setdefault(digest, set()).add(source)

    def check(self, method: str, relays: Sequence[str], call: Call) -> None:
        """Raise PolicyError for a row of a client that goes to another one without a declaration.

        Args:
            method: name of the client method, for the error.
            relays: fields of its query that may hold such rows.
            call: the call.
        """
        if not self._sources:
            return
        bounds = declared(type(call.query))
        for name, value in vars(call.query).items():
            if name in relays:
                continue
            bound = bounds.get(name)
            is_average = isinstance(bound, Real) and bound.average
            for row, recipients in _rows_and_recipients(value, call.to):
                if self._shows_another(row, recipients, is_average):
                    raise PolicyError(
                        f"{method} would bring a row of {ONE_CLIENT} reply to other clients, in "
                        f'{name} of its query: declare it with @answers(..., relays=("{name}",)) '
                        "if they are to see it, or send an average"
                    )

    def _shows_another(
        self, row: torch.Tensor, recipients: Sequence[int], is_average: bool
    ) -> bool:
        """Return True if a row is the reply of a client other than some recipient.

        Args:
            row: of a query.
            recipients: clients that it goes to.
            is_average: True for an average over those that replied. Over one client it is this
                client's reply, which reaches the clients that did not reply to the same call.
        """
        for piece, digest in zip(_pieces(row), _digests(row), strict=True):
            sources = self._sources.get(digest)
            if sources is None or not _is_recognized(piece):
                continue
            others = set(recipients) - {source.client for source in sources}
            if is_average:
                of_one = [self._replied[source.method, source.step] for source in sources]
                others = {i for i in others if all(i in replied for replied in of_one)}
            if others:
                return True
        return False


def _is_compared(table: torch.Tensor) -> bool:
    """Return True for real numbers, codes and sealed rows of more than one number."""
    is_numeric = table.is_floating_point() or table.dtype == torch.uint8
    return is_numeric and table.ndim > 1


def _rows_and_recipients(
    value: Any, to: Sequence[int]
) -> Iterator[tuple[torch.Tensor, Sequence[int]]]:
    """Yield each row of a query's field, with the clients that it goes to."""
    if isinstance(value, Shared):
        if _is_compared(value.value[None]):
            yield value.value, to
        return
    if not isinstance(value, Rows | Picks) or not _is_compared(value.table):
        return
    recipients: dict[int, list[int]] = {}
    for position, client in enumerate(to):
        for row in _rows_of(value, position):
            recipients.setdefault(row, []).append(client)
    for row, clients in recipients.items():
        yield value.table[row], clients


def _rows_of(value: Rows | Picks, frame: int) -> tuple[int, ...]:
    """Return which rows of a field's table one frame has."""
    if isinstance(value, Picks):
        return value.picks[frame]
    if value.index is None:
        return (frame,)
    return (value.index[frame],)


def _pieces(row: torch.Tensor) -> list[torch.Tensor]:
    """Return a row, and the rows of a matrix beside it."""
    if row.ndim < 2:
        return [row]
    return [row, *row]


def _digests(row: torch.Tensor) -> Iterator[bytes]:
    """Yield a digest of the numbers of each piece of a row, in whatever shape they are sent on."""
    in_memory = row.detach().cpu().contiguous()
    count = 1 if row.ndim < 2 else len(row)
    flat = in_memory.reshape(count, math.prod(row.shape) // max(count, 1))
    octets = flat.view(torch.uint8).numpy()
    yield hashlib.blake2b(octets.data, digest_size=DIGEST).digest()
    if row.ndim >= 2:
        for piece in octets:
            yield hashlib.blake2b(piece.data, digest_size=DIGEST).digest()


def _is_recognized(row: torch.Tensor) -> bool:
    """Return True for a row that two clients do not have in common by chance."""
    distinct = row.unique()
    if row.dtype == torch.uint8:
        return len(distinct) >= LEAST_OCTETS
    return int((distinct != distinct.round()).sum()) >= LEAST_NUMBERS
