"""Results of the verbs `gather`, `sum` and `pairs`, and checks of the numbers in replies."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from securecluster.core.lazy_torch import torch
from securecluster.errors import UpdateError
from securecluster.messaging.bounds import squared, too_long
from securecluster.messaging.messages import Call, Response, Rows, Shared

A = TypeVar("A")
B = TypeVar("B")

SHOWN_CLIENTS = 5  # clients that an error names


@dataclass(frozen=True, eq=False)
class Replies(Generic[A]):
    """Result of `gather`: single replies.

    Args:
        ids: clients that replied.
        rows: reply message with one frame per client of `ids`; None if nobody replied.
        lost: recipients that did not reply.
        step: number of the call.
    """

    ids: tuple[int, ...]
    rows: A
    lost: tuple[int, ...]
    step: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Sums(Generic[A]):
    """Result of `sum`: one sum per group.

    Args:
        ids: clients that replied.
        rows: reply message with (groups, …) sums; None if nobody replied.
        counts: number of members of each sum.
        lost: recipients that did not reply.
        step: number of the call.
    """

    ids: tuple[int, ...]
    rows: A
    counts: tuple[int, ...]
    lost: tuple[int, ...]
    step: int


@dataclass(frozen=True, eq=False)
class Pairs(Generic[B]):
    """Result of `pairs`: a number for each pair of clients.

    Args:
        ids: clients that replied, r of them.
        value: R over `ids`, (r, r), or the result of a function of R.
        step: number of the call.
    """

    ids: tuple[int, ...]
    value: B
    step: int


def check_finite(call: Call, answer: Response) -> None:
    """Raise UpdateError, with the clients' numbers, for replies that are not finite.

    Args:
        call: the call, for the error.
        answer: its replies, one or more.
    """
    for name, value in vars(answer.reply).items():
        if isinstance(value, Rows) and value.table.is_floating_point():
            _check_finite_rows(call, name, value, answer.ids)
        elif isinstance(value, Shared) and value.value.is_floating_point():
            finite = torch.isfinite(value.value)
            if not bool(finite.all()):  # no single client: all frames share the tensor
                raise UpdateError(
                    f"round {call.round}: {name} of the clients' replies is not finite: lower the "
                    "learning rate (--lr)"
                )


def _check_finite_rows(call: Call, name: str, rows: Rows, ids: Sequence[int]) -> None:
    """Raise UpdateError for a field with rows that are not finite."""
    finite = _finite(rows.table)
    if bool(finite.all()):
        return
    infinite = (~finite).nonzero()
    infinite_rows = set(infinite.flatten().tolist())
    clients = _clients_of_rows(rows, ids, infinite_rows)
    shown = ", ".join(map(str, clients[:SHOWN_CLIENTS]))
    cure = "lower the learning rate (--lr)"
    if call.round == 0:  # nothing has been trained yet
        cure = "check these clients' data"
    raise UpdateError(f"round {call.round}: {name} of client(s) {shown} is not finite: {cure}")


def check_squares(number: int, ids: Sequence[int], reply: object) -> None:
    """Raise UpdateError for rows of finite numbers whose squares would overflow at the server.

    Args:
        number: number of the round.
        ids: clients of the rows.
        reply: a message over `ids`; None if nobody replied.
    """
    if reply is None:
        return
    for name in squared(type(reply)):
        rows = getattr(reply, name)
        if not rows.table.is_floating_point():  # sealed, or not decoded yet
            continue
        long_rows = set(too_long(rows.table))
        clients = _clients_of_rows(rows, ids, long_rows)
        if clients:
            shown = ", ".join(map(str, clients[:SHOWN_CLIENTS]))
            raise UpdateError(
                f"round {number}: {name} of client(s) {shown} is too large to be squared: scale "
                "the features, or lower the learning rate (--lr)"
            )


def _clients_of_rows(rows: Rows, ids: Sequence[int], positions: set[int]) -> list[int]:
    """Return the clients whose row is one of some rows of the table.

    Args:
        rows: one row per client.
        ids: the clients.
        positions: positions in the table, which several clients may share.
    """
    index = rows.index
    if index is None:
        index = tuple(range(len(ids)))
    return [client for client, row in zip(ids, index, strict=True) if row in positions]


def _finite(table: torch.Tensor) -> torch.Tensor:
    """Return which rows of a table (r, …) are finite, (r,), without a copy of the table.

    A sum is not finite if a term is not; only rows whose sum is not finite (it may have overflowed)
    are checked number by number.
    """
    sums = table
    if table.ndim > 1:
        sums = table.flatten(1).sum(1)  # (r,)
    finite = torch.isfinite(sums)
    doubtful = (~finite).nonzero()
    for row in doubtful.flatten().tolist():
        finite[row] = torch.isfinite(table[row]).all()
    return finite
