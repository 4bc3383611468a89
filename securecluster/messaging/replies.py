"""What the verbs bring."""

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


@dataclass(frozen=True, eq=False)
class Replies(Generic[A]):
    """What `gather` brings: `rows` is the reply message over `ids` (None when nobody replied);
    `lost` did not reply.
    """

    ids: tuple[int, ...]
    rows: A
    lost: tuple[int, ...]
    step: int

    def __len__(self) -> int:
        return len(self.ids)


@dataclass(frozen=True, eq=False)
class Sums(Generic[A]):
    """What `sum` brings: `rows` is the reply message with (groups, …) sums (None when nobody
    replied), `counts` their members.
    """

    ids: tuple[int, ...]
    rows: A
    counts: tuple[int, ...]
    lost: tuple[int, ...]
    step: int


@dataclass(frozen=True, eq=False)
class Pairs(Generic[B]):
    """What `pairs` brings: R over `ids`, (r, r), or what was computed from it."""

    ids: tuple[int, ...]
    value: B
    step: int


def check_finite(call: Call, answer: Response) -> None:
    """Raise UpdateError, with the clients' numbers, for replies that are not finite."""
    for name, value in vars(answer.reply).items():
        if isinstance(value, Rows) and value.table.is_floating_point():
            good = _finite(value.table)
            if not bool(good.all()):
                bad = [
                    i
                    for k, i in enumerate(answer.ids)
                    if not good[k if value.index is None else value.index[k]]
                ]
                raise UpdateError(
                    f"round {call.round}: {name} of client(s) {', '.join(map(str, bad[:5]))} is "
                    "not finite: lower the learning rate (--lr)"
                )
        elif (
            isinstance(value, Shared)
            and value.value.is_floating_point()
            and not bool(torch.isfinite(value.value).all())
        ):
            raise UpdateError(
                f"round {call.round}: {name} of the clients' replies is not finite: lower the "
                "learning rate (--lr)"
            )


def check_squares(number: int, ids: Sequence[int], reply: object) -> None:
    """Raise UpdateError for rows of finite numbers that the server could not square.

    Args:
        number: of the round.
        ids: whose rows they are.
        reply: a message over `ids`; None where nobody replied.
    """
    for name in squared(type(reply)) if reply is not None else ():
        rows = getattr(reply, name)
        if not rows.table.is_floating_point():  # sealed, or not decoded yet
            continue
        bad = set(too_long(rows.table))
        who = [i for k, i in enumerate(ids) if (k if rows.index is None else rows.index[k]) in bad]
        if who:
            few = ", ".join(map(str, who[:5]))
            raise UpdateError(
                f"round {number}: {name} of client(s) {few} is too large to be squared: scale the "
                "features, or lower the learning rate (--lr)"
            )


def _finite(table: torch.Tensor) -> torch.Tensor:
    """Which rows of a table (r, …) are finite, (r,); no copy of the table is made.

    A sum is not finite when a term is not; only rows whose sum is not finite (it may have
    overflowed) are looked at number by number.
    """
    good = torch.isfinite(table.flatten(1).sum(1) if table.ndim > 1 else table)
    for row in (~good).nonzero().flatten().tolist():
        good[row] = torch.isfinite(table[row]).all()
    return good
