"""How a sum over clients is formed. An aggregator owns its rounds, parties, keys and its rule for
dropouts.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from securecluster.core.lazy_torch import torch
from securecluster.errors import FrameError
from securecluster.messaging.messages import Call, Response, Rows

# on a CPU, memory that the allocator reuses and caches hold
CHUNK_BYTES = {
    "cpu": 1 << 25,
    "cuda": 1 << 28,
}


@dataclass(frozen=True, eq=False)
class Total:
    """Sums per group: `rows` is a reply message with (groups, …) tables, `counts` how many clients
    each sum holds.
    """

    rows: Any  # None when nobody replied
    counts: tuple[int, ...]
    ids: tuple[int, ...]


class Aggregator(Protocol):
    """From a call to per-group sums."""

    name: str
    server_reads_replies: bool

    def run(
        self, exchange: Callable[[Call], Response], call: Call, by: Sequence[int], groups: int
    ) -> Total:
        """Call every client and sum the replies; `by[k]` is the group of `call.to[k]`."""
        ...


class Plain:
    """The server receives every reply and adds it up, by chunks of clients: no protection, and
    memory that does not grow with m.
    """

    name = "plain"
    server_reads_replies = True

    def __init__(self, chunk: int | None = None, wide: bool = False) -> None:
        """Take sums.

        Args:
            chunk: clients at a time.
            wide: add up in float64, whatever the replies are in. A trusted server does before it
                adds noise: a sum in float32 may move by more than the clip norm when one client is
                left out.
        """
        self._chunk, self._wide = chunk, wide

    def run(
        self, exchange: Callable[[Call], Response], call: Call, by: Sequence[int], groups: int
    ) -> Total:
        """Call chunk by chunk and add up."""
        total, counts = None, [0] * groups
        ids: list[int] = []
        group = dict(zip(call.to, by, strict=True))
        first, step = 0, self._chunk or 32
        while first < len(call.to):
            answer = exchange(call.select(range(first, min(first + step, len(call.to)))))
            first += step
            if answer.reply is None:
                continue
            place = [group[i] for i in answer.ids]
            total = _add(total, answer.reply, place, groups, self._wide)
            ids += answer.ids
            for g in place:
                counts[g] += 1
            step = self._chunk or _step(total)
        return Total(total, tuple(counts), tuple(ids))


def _step(total: Any) -> int:
    """How many clients at a time: enough to keep every thread busy, and no more memory than is
    quick.
    """
    tables = [r.table for r in vars(total).values() if isinstance(r, Rows)]
    width = sum(t[0].numel() * t.element_size() for t in tables)
    room = CHUNK_BYTES[tables[0].device.type] if tables else 0
    return max(4 * torch.get_num_threads(), min(1024, room // max(width, 1)))


def _add(total: Any, reply: Any, place: list[int], groups: int, wide: bool) -> Any:
    fields = {name: value.values for name, value in vars(reply).items() if isinstance(value, Rows)}
    if wide:
        fields = {
            name: rows.double() if rows.is_floating_point() else rows
            for name, rows in fields.items()
        }
    if total is None:
        empty = {
            n: Rows(torch.zeros(groups, *v.shape[1:], dtype=v.dtype, device=v.device))
            for n, v in fields.items()
        }
        total = dataclasses.replace(reply, **empty)
    for name, value in vars(reply).items():
        if (value is None) != (getattr(total, name) is None):
            raise FrameError(f"{name}: present in some replies and absent in others")
    for name, value in fields.items():
        held = getattr(total, name).table
        if (held.shape[1:], held.dtype) != (value.shape[1:], value.dtype):
            raise FrameError(
                f"{name}: the replies differ in shape or type: {tuple(held.shape[1:])} and "
                f"{tuple(value.shape[1:])}"
            )
        for group in sorted(set(place)):
            held[group] += _of_group(value, place, group).sum(0)
    return total


def _of_group(rows: torch.Tensor, place: list[int], group: int) -> torch.Tensor:
    own = [k for k, g in enumerate(place) if g == group]
    return rows if len(own) == len(rows) else rows[torch.as_tensor(own, device=rows.device)]
