"""Rows of single clients, from blocks that they alone filled.

The attack reads every block that somebody filled as if it were one client's row. The server has the
sums. A client has the averages that it is sent, under no mask that it could not undo, and takes its
own update out of a block of two. Whose row a block is, is not claimed.

In sums of three members in each block, and in sums with noise, nothing is read.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import (
    MASK,
    SUMS,
    TAPS,
    Attack,
    Colluder,
    Guess,
    Harm,
    Knowledge,
    View,
)
from securecluster.attacks.lone_members import (
    MEMBERS,
    SCALED,
    SOURCE,
    ReadRow,
    RowsRead,
    Subject,
    Undo,
    undoing,
)
from securecluster.attacks.views import observed_sums
from securecluster.messaging.messages import Rows
from securecluster.messaging.transcript import ObservedMessage

BLOCKS = "blocks"
FIELDS = (BLOCKS, "cells", "steps", "parts")  # of replies, with blocks
TABLE = 2  # dimensions of a row with blocks
TWO = 2  # members of a block of which a client takes its own row out


class LoneBlocks(Attack):
    """Rows of single clients, from blocks of sums or of averages that they alone filled."""

    name = "lone-blocks"
    learns = "the row of a client that is alone in a block, not whose it is"
    harm = Harm.MESSAGES
    source = SOURCE
    needs = (
        "sums with a block for each cluster, cell or class, or averages of all blocks that a "
        "client is sent"
    )
    scorer = RowsRead("blocks")
    requires = (TAPS,)
    reads = FIELDS
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if not any(True for _ in _rows_of_blocks(view, knowledge)):
            return "not applicable: no block that somebody filled was observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return what every block that somebody filled would be of one client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        others = frozenset(range(knowledge.clients)) - frozenset(knowledge.colluders)
        values: dict[Subject, Array] = {}
        members = {}
        of_averages = False
        for row in _rows_of_blocks(view, knowledge):
            subject = row.subject()
            values.setdefault(subject, row.values)
            members[subject] = (row.members or others) & others
            of_averages |= not row.members
        scaled = of_averages or knowledge.config.get("clip") is not None
        return Guess("rows of blocks", values, {MEMBERS: members, SCALED: scaled})


def _rows_of_blocks(view: View, knowledge: Knowledge) -> Iterator[ReadRow]:
    """Yield the blocks that somebody filled, of sums and then of averages that clients are sent."""
    for field in FIELDS:
        for row in _summed(view, field):
            if row.values.any():
                yield row
    undo = undoing(knowledge)
    if knowledge.mask != "none" and undo is None:
        return
    for number, colluder in knowledge.colluders.items():
        yield from _averaged(view, number, colluder, undo)


def _summed(view: View, field: str) -> Iterator[ReadRow]:
    """Yield the blocks of a field of sums."""
    groups: dict[tuple[int, str], int] = {}
    for observed in observed_sums(view, field):
        blocks = as_array(observed.row)
        if blocks.ndim != TABLE:
            continue
        group = groups.setdefault((observed.step, field), 0)
        groups[observed.step, field] += 1
        for block, values in enumerate(blocks):
            yield ReadRow(
                observed.step, field, group, block, observed.round, observed.members, values
            )


def _averaged(view: View, number: int, colluder: Colluder, undo: Undo | None) -> Iterator[ReadRow]:
    """Yield what the averages that a client was sent tell of blocks of others.

    Args:
        view: what the adversary observed.
        number: of the client.
        colluder: the client.
        undo: undoes the mask; None where there is none.
    """
    displacements: dict[int, Array] = {}
    for message in view.messages():
        if message.receiver.index != number:
            continue
        for step, block, values, absolute in _means(message, undo):
            before = displacements.get(block, np.zeros_like(values))
            # a displacement since θ_0 is the sum of the averages so far
            average = values - before if absolute else values
            displacements[block] = before + average
            if average.any():
                other = _without_own(average, colluder, step, block)
                yield ReadRow(step, BLOCKS, -1, block, 0, frozenset(), other)


def _means(message: ObservedMessage, undo: Undo | None) -> Iterator[tuple[int, int, Array, bool]]:
    """Yield the averages of blocks in a message: call, block, row, and whether it is absolute."""
    content = message.content
    means = getattr(content, "means", None)
    models = getattr(content, "models", None)
    if means is None or getattr(content, "steps", None) is None:
        return
    for position in means.picks[0]:
        step = int(content.steps.table[position])
        rows = means.table[position]
        blocks = list(range(len(rows)))
        if rows.ndim != TABLE:
            # one row a message, of a model that the message names
            if models is None:
                return
            rows, blocks = rows[None], [int(models.table[position])]
        if undo is not None:
            rows = undo(rows, step)
        for block, values in zip(blocks, as_array(rows), strict=True):
            yield step, block, values, bool(content.absolute)


def _without_own(average: Array, colluder: Colluder, step: int, block: int) -> Array:
    """Return an average without the client's own row, as if one other client were in the block."""
    for (_, number), reply in colluder.replies.items():
        rows = getattr(reply, BLOCKS, None)
        if number == step and isinstance(rows, Rows):
            client_row = as_array(rows.values[0])[block]
            if client_row.any():
                return np.asarray(TWO * average - client_row)
    return average
