"""Rows of single clients, from the centres of clusters over several iterations.

A centre times its count is a sum over the members of a cluster. Whoever moves to another cluster is
in one sum and then in another, so that sums of several iterations are a linear system for the rows
(Yang, Luo & Li 2025, arXiv 2511.07073). Where assignments are known, a row is solved if its unit
vector is in the row space of who was in which sum (`solved`). Where only counts are known, a client
that moved alone shows itself: one count falls by one, another rises by one, and what the first sum
lost is what the second gained, to the last digit (`moved_alone`). That equality is a proof, so no
row is claimed that changed between the iterations: those of `ifca` are of other models then.

In `hidden` the first iteration are the cells of the code book, each of them with the centre that is
nearest to its mean, and the second the step. A client of `local-kmeans` has the mean of its
cluster's models alone, and takes its own out, and those of helpers, as if one other were left.

Counts that come first, of blocks with enough members, leave one iteration of sums in `hidden`.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import MASK, SUMS, TAPS, Attack, Guess, Harm, Knowledge, View
from securecluster.attacks.client_models import SENT_ALONE
from securecluster.attacks.lone_members import MEMBERS, SCALED, ReadRow, RowsRead, Subject, undoing
from securecluster.attacks.sums_over_rounds import MemberSums
from securecluster.attacks.views import observed_sums
from securecluster.clustering import noisy_centres
from securecluster.core.lazy_torch import torch

ROUNDING = 1e-4  # of a row, relative to its length, in the equality of what was lost and gained
BLOCKS = "blocks"
STEPS = "steps"
CELLS = "cells"


class Iteration(NamedTuple):
    """Clusters at one time.

    Attributes:
        counts: members of each cluster, (k,).
        sums: of their rows, (k, d).
    """

    counts: Array
    sums: Array


class Move(NamedTuple):
    """A client that moved alone from a cluster to another one.

    Attributes:
        source: the cluster that it left.
        target: the cluster that it came to.
        row: its own, (d,).
    """

    source: int
    target: int
    row: Array


def moved_alone(before: Iteration, after: Iteration) -> list[Move]:
    """Return the clients that alone left one cluster and alone came to another.

    Args:
        before: the clusters.
        after: the same clusters of the same clients later.
    """
    change = np.rint(after.counts - before.counts)
    gains = after.sums - before.sums
    moves = []
    for source in np.flatnonzero(change == -1):
        for target in np.flatnonzero(change == 1):
            row = gains[target]
            rest = float(np.linalg.norm(row + gains[source]))
            if rest <= ROUNDING * float(np.linalg.norm(row)):
                moves.append(Move(int(source), int(target), row))
    return moves


def solved(assignments: Array, sums: Array) -> dict[int, Array]:
    """Return by number the rows that sums over known members determine, (d,) each.

    Args:
        assignments: the cluster of each row in each iteration, (iterations, n).
        sums: of the rows of each cluster, (iterations, k, d).
    """
    iterations, k, width = sums.shape
    members = np.asarray(assignments[:, None] == np.arange(k)[:, None], dtype=float)
    flat = members.reshape(iterations * k, -1)
    rounds = np.repeat(np.arange(iterations), k)
    system = MemberSums(flat, sums.reshape(-1, width), rounds, tuple(rounds.tolist()))
    rows = np.linalg.pinv(flat) @ system.values
    return {number: rows[number] for number in system.solvable}


class CentresOverRounds(Attack):
    """Rows of single clients, from sums or means of clusters of several iterations."""

    name = "centres-over-rounds"
    learns = "the row of a client that moved to another cluster, or is alone in one with colluders"
    harm = Harm.MESSAGES
    source = "Yang, Luo & Li 2025, Perfect Input Reconstruction, arXiv 2511.07073"
    needs = (
        "sums and counts of clusters in two iterations, in which a client moved alone; or clients "
        "that collude, and all others of their cluster but one"
    )
    scorer = RowsRead("rows of moved clients")
    requires = (TAPS,)
    reads = (STEPS, CELLS, BLOCKS, "delta")
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if any(True for _ in _rows(view, knowledge)):
            return None
        return (
            "not applicable: no client moved alone between two sums of one row, and no client "
            "colludes that has the mean of its cluster"
        )

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return what single clients' rows would be.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        others = frozenset(range(knowledge.clients)) - frozenset(knowledge.colluders)
        values: dict[Subject, Array] = {}
        members = {}
        for row in _rows(view, knowledge):
            values[row.subject()] = row.values
            members[row.subject()] = (row.members or others) & others
        scaled = knowledge.config.get("clip") is not None
        return Guess("rows of clients", values, {MEMBERS: members, SCALED: scaled})


def _rows(view: View, knowledge: Knowledge) -> Iterator[ReadRow]:
    """Yield what the adversary takes for rows of single clients."""
    yield from _of_steps(view)
    yield from _of_blocks(view)
    yield from _of_means(view, knowledge)


def _of_steps(view: View) -> Iterator[ReadRow]:
    """Yield the rows in the step of `hidden`, after the cells of its code book."""
    centres = _centres(view)
    cells = list(observed_sums(view, CELLS))
    steps = list(observed_sums(view, STEPS))
    if len(cells) != 1 or len(steps) != 1 or cells[0].members != steps[0].members:
        return
    fine = _iteration(cells[0].row, centres[cells[0].step], noisy_centres.CELL_REACH)
    step, public = steps[0], centres[steps[0].step]
    after = _iteration(step.row, public, noisy_centres.STEP_REACH)
    filled = fine.counts > 0
    means = fine.sums[filled] / fine.counts[filled][:, None]
    nearest = noisy_centres.nearest_centres(means, public)
    grouped = np.asarray(np.eye(len(public))[nearest].T)
    before = Iteration(grouped @ fine.counts[filled], grouped @ fine.sums[filled])
    for move in moved_alone(before, after):
        displacement = (move.row - public[move.target]) / noisy_centres.STEP_REACH
        values = math.sqrt(0.5) * np.append(1.0, displacement)
        yield ReadRow(step.step, STEPS, 0, move.target, step.round, step.members, values)


def _of_blocks(view: View) -> Iterator[ReadRow]:
    """Yield the rows in blocks of updates, each after a count and after an earlier block."""
    counts: Array | None = None
    earlier: tuple[frozenset[int], Iteration] | None = None
    for outcome in view.outcomes:
        for field in ("count", BLOCKS):
            if not hasattr(outcome.content, field) or len(outcome.groups) != 1:
                continue
            values = as_array(getattr(outcome.content, field).values[0])
            if field == "count":
                counts = values
                continue
            if counts is None or counts.shape != values.shape[:1]:
                continue
            members = frozenset(outcome.groups[0])
            now = Iteration(counts, values)
            if earlier is not None and earlier[0] == members:
                for move in moved_alone(earlier[1], now):
                    yield ReadRow(
                        outcome.step, BLOCKS, 0, move.target, outcome.round, members, move.row
                    )
            earlier = (members, now)


def _of_means(view: View, knowledge: Knowledge) -> Iterator[ReadRow]:
    """Yield what the first mean of a cluster is of without the colluders that were sent it."""
    undo = undoing(knowledge)
    if knowledge.mask != "none" and undo is None:
        return
    of_mean: dict[bytes, list[Array]] = {}
    means: dict[bytes, tuple[int, Array]] = {}
    for message in view.messages():
        number = message.receiver.index
        colluder = knowledge.colluders.get(number) if number is not None else None
        content: Any = message.content
        if colluder is None or not hasattr(content, "means") or hasattr(content, "models"):
            continue
        for position in content.means.picks[0]:
            step = int(content.steps.table[position])
            reply = colluder.replies.get((SENT_ALONE, step))
            if reply is None:
                continue
            mean = content.means.table[position][None]
            key = mean.numpy().tobytes()
            means[key] = (step, as_array(undo(mean, step) if undo else mean)[0])
            own = as_array(reply.delta.values[0])[: knowledge.dimension]
            if not any(np.array_equal(own, other) for other in of_mean.setdefault(key, [])):
                of_mean[key].append(own)
    for group, (key, (step, mean)) in enumerate(means.items()):
        sent = of_mean[key]
        other = (len(sent) + 1) * mean[: knowledge.dimension] - np.sum(sent, axis=0)
        yield ReadRow(step, "delta", group, 0, 0, frozenset(), other)


def _centres(view: View) -> dict[int, Array]:
    """Return by call the centres that clients compare themselves with."""
    centres = {}
    for message in view.messages():
        public = getattr(message.content, "centres", None)
        if public is not None:
            centres[message.step] = as_array(public.value)
    return centres


def _iteration(row_sum: torch.Tensor, centres: Array, reach: float) -> Iteration:
    """Return counts and sums of coordinates of a sum of displacements from centres."""
    values = as_array(row_sum)
    counts = noisy_centres.counts_of(values)
    displaced = values[:, 1:] * (math.sqrt(2) * reach)
    return Iteration(np.rint(counts), displaced + counts[:, None] * centres)
