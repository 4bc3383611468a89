"""Differencing: one client's update from two sums over groups that differ in this client alone.

A sum over a group hides its members' updates, unless the server also has the sum over all of them
but one. It obtains such a pair by choosing who takes part, by moving a client to another cluster,
or because a client does not reply in one of two rounds. Updates of the other clients cancel as far
as they are the same in both sums: exactly within a round in which clients repeat their step, and
approximately in consecutive rounds with a small learning rate.
"""

from __future__ import annotations

import itertools
from dataclasses import replace

import numpy as np

from securecluster.attacks.arrays import Array
from securecluster.attacks.base import SUMS, TAPS, Attack, Guess, Harm, Knowledge, Truth, View
from securecluster.attacks.scoring import AgainstOthers
from securecluster.attacks.views import observed_sums
from securecluster.core.lazy_torch import torch

Subject = tuple[str, int, int]  # method, step of the call, number of the client


class RecoveredUpdates(AgainstOthers):
    """Cosine of recovered updates with the true ones."""

    metric = "cosine of the recovered update with the true one"

    def others(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> list[Subject]:
        """Return for each update that of another client of its call.

        Updates of one call have a common part: only what goes beyond it is a success.

        Args:
            guess: updates by method, call and client.
            truth: of the run, with taps.
            draw: source of the other clients.
        """
        updates = _true_updates(truth)
        others = []
        for method, step, client in guess.values:
            same_call = []
            for subject in updates:
                if subject[:2] == (method, step) and subject[2] != client:
                    same_call.append(subject)
            chosen = draw.integers(len(same_call))
            others.append(same_call[chosen])
        return others

    def compared(self, guess: Guess, truth: Truth, subjects: list[Subject]) -> Array:
        """Return the cosine of each guess with a client's update, (n,).

        Args:
            guess: updates by method, call and client.
            truth: of the run, with taps.
            subjects: one for each guess.
        """
        updates = _true_updates(truth)
        cosines = []
        for row, subject in guess.beside(subjects):
            # a tap has room for what a mask adds
            true = updates[subject][: len(row)]
            lengths = float(row.norm() * true.norm())
            cosine = 0.0
            if lengths > 0:
                cosine = float(row @ true) / lengths
            cosines.append(cosine)
        return np.asarray(cosines)


class Differencing(Attack):
    """Updates of single clients, by subtracting sums over groups that differ in one client."""

    name = "differencing"
    learns = "the update of a single client"
    harm = Harm.MESSAGES
    source = "Bonawitz et al. 2017, Practical Secure Aggregation; Denning 1980, on trackers"
    needs = "sums over two groups that differ in one client, under one mask or none"
    scorer = RecoveredUpdates()
    requires = (TAPS,)
    reads = ("delta",)
    hidden_by = (SUMS,)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if knowledge.mask != "none":
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
    """Return by client and call its update, from the two sums that differ in it alone."""
    sums = []
    for observed in observed_sums(view, "delta"):
        # sums of other things, such as losses, have another width
        if observed.row.shape[-1] == knowledge.width:
            sums.append(replace(observed, row=observed.row.double()))
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


def _true_updates(truth: Truth) -> dict[Subject, torch.Tensor]:
    """Return the updates before any protection, by method, call and client."""
    updates: dict[Subject, torch.Tensor] = {}
    for tap, client, row in truth.tapped_rows("delta"):
        updates[tap.method, tap.step, client] = row.double()
    return updates
