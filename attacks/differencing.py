"""Differencing: one client's update from two sums over groups that differ in this client alone.

A sum over a group hides its members' updates, unless the server also has the sum over all of them
but one. It obtains such a pair by choosing who takes part, by moving a client to another cluster,
or because a client does not reply in one of two rounds. Updates of the other clients cancel as far
as they are the same in both sums: exactly within a round in which clients repeat their step, and
approximately in consecutive rounds with a small learning rate.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from securecluster.attacks.base import SUMS, TAPS, Attack, Guess, Knowledge, Truth, View
from securecluster.attacks.scoring import Scorer
from securecluster.core.lazy_torch import torch
from securecluster.messaging.messages import Rows
from securecluster.runtime.endpoint import SUM

Array = NDArray[Any]
Subject = tuple[str, int, int]  # method, step of the call, number of the client


@dataclass(frozen=True)
class GroupSum:
    """Sum of the updates of some clients.

    Args:
        method: client method that was called.
        round: the protocol's round.
        step: number of the call.
        members: the clients.
        row: their sum, (width,).
    """

    method: str
    round: int
    step: int
    members: frozenset[int]
    row: torch.Tensor


class RecoveredUpdates(Scorer):
    """Cosine of recovered updates with the true ones."""

    metric = "cosine of the recovered update with the true one"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the cosine of each guess, (n,).

        Args:
            guess: updates by method, call and client.
            truth: of the run, with taps.
        """
        return self._cosines(guess, truth, list(guess.values))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the cosines with updates of other clients of the same calls.

        What the updates of all clients have in common is no success of the attack.

        Args:
            guess: updates by method, call and client.
            truth: of the run, with taps.
            draw: source of the other clients.
        """
        updates = _true_updates(truth)
        others = []
        for method, step, client in guess.values:
            same_call = [
                subject
                for subject in updates
                if subject[:2] == (method, step) and subject[2] != client
            ]
            others.append(same_call[draw.integers(len(same_call))])
        return self._cosines(guess, truth, others)

    def _cosines(self, guess: Guess, truth: Truth, subjects: list[Subject]) -> Array:
        """Return the cosines with the updates of the given subjects, in the guess's order."""
        updates = _true_updates(truth)
        cosines = []
        for row, subject in zip(guess.values.values(), subjects, strict=True):
            true = updates[subject]
            length = float(row.norm() * true.norm())
            cosines.append(float(row @ true) / length if length > 0 else 0.0)
        return np.asarray(cosines)


class Differencing(Attack):
    """Updates of single clients, by subtracting sums over groups that differ in one client."""

    name = "differencing"
    source = "Bonawitz et al. 2017, Practical Secure Aggregation; Denning 1980, on trackers"
    needs = "sums over two groups that differ in one client, under one mask or none"
    scorer = RecoveredUpdates()
    requires = frozenset({TAPS})
    reads = frozenset({"delta"})
    hidden_by = frozenset({SUMS})

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.config.get("mask", "none") != "none":
            return "not applicable: sums of different calls have different masks"
        if not _differences(view, knowledge):
            return "not applicable: no two sums over groups that differ in one client were observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return recovered updates (width,) by method, call of the larger group, and client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return Guess("updates", _differences(view, knowledge))


def _differences(view: View, knowledge: Knowledge) -> dict[Subject, torch.Tensor]:
    """Return the difference of the two nearest sums for each client that they single out."""
    sums = list(_sums(view, knowledge))
    nearest: dict[Subject, tuple[int, torch.Tensor]] = {}
    for larger, smaller in itertools.permutations(sums, 2):
        lone = larger.members - smaller.members
        if larger.method != smaller.method or len(lone) != 1:
            continue
        if not smaller.members or not smaller.members < larger.members:
            continue
        (client,) = lone
        # other clients' updates cancel best between calls that are close in time
        subject = (larger.method, larger.step, client)
        distance = abs(larger.step - smaller.step)
        if subject not in nearest or distance < nearest[subject][0]:
            nearest[subject] = (distance, larger.row - smaller.row)
    return {subject: row for subject, (_, row) in nearest.items()}


def _sums(view: View, knowledge: Knowledge) -> Iterator[GroupSum]:
    """Yield the sums of updates that the view's parties got."""
    for outcome in view.outcomes:
        delta = getattr(outcome.content, "delta", None)
        if outcome.verb != SUM or not isinstance(delta, Rows):
            continue
        rows = delta.values.double()
        # sums of other things, such as losses, have another width
        if rows.shape[-1] != knowledge.width:
            continue
        for row, group in zip(rows, outcome.groups, strict=True):
            members = frozenset(group)
            yield GroupSum(outcome.method, outcome.round, outcome.step, members, row)


def _true_updates(truth: Truth) -> dict[Subject, torch.Tensor]:
    """Return the updates before any protection, from the taps of the run."""
    updates: dict[Subject, torch.Tensor] = {}
    for tap in truth.taps:
        delta = getattr(tap.reply, "delta", None)
        if not isinstance(delta, Rows):
            continue
        for row, client in zip(delta.values.double(), tap.ids, strict=True):
            updates[tap.method, tap.step, client] = row
    return updates
