"""Functions that undo masks, and scorers of unmasked rows."""

from __future__ import annotations

from abc import abstractmethod

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import Guess, Knowledge, Scorer, Truth, View
from securecluster.attacks.views import WEIGHTED, ObservedUpdate, observed_updates
from securecluster.errors import UsageError
from securecluster.privacy.masking.masks import ENTRYWISE

Subject = tuple[str, int, int]  # client method, number of the call, client
TOLERANCE = 1e-4  # relative error of a coordinate that counts as recovered
NO_MASK = "not applicable: updates are not masked"
NO_UPDATES = "not applicable: no single update of a first round was observed"


def first_updates(view: View, knowledge: Knowledge) -> dict[Subject, ObservedUpdate]:
    """Return the updates of the first round, which were trained from θ_0.

    Args:
        view: what the adversary observed.
        knowledge: what it knows besides.
    """
    updates = {}
    for update in observed_updates(view, knowledge):
        client = update.sender.index
        if update.round == 1 and client is not None:
            updates[update.method, update.step, client] = update
    return updates


def keeps_values(mask: str) -> bool:
    """Return True if a mask moves numbers, and at most flips their signs.

    Args:
        mask: its name.
    """
    return mask in ENTRYWISE


def flips_signs(mask: str) -> bool:
    """Return True if a mask that moves numbers may flip their signs.

    Args:
        mask: its name.
    """
    return keeps_values(mask) and mask != "permutation"


def by_rank(pairs: Array, masked_known: Array, masked: Array, signed: bool = False) -> Array:
    """Return rows with a permutation undone, which maps `known` to `masked_known`.

    Coordinates are matched by the rank of a combination of the known rows. Those that are equal in
    all known rows, such as zeros, cannot be told apart: they are matched in any order.

    Args:
        pairs: rows before the permutation, or what they are guessed to be, (k, d).
        masked_known: the same after it, (k, d).
        masked: rows after it, (n, d).
        signed: True if the permutation also flips signs.

    Returns:
        (n, d).
    """
    # A random combination: coordinates that differ in some row almost surely differ in it, too.
    weights = np.random.default_rng(0).normal(size=len(pairs))
    if len(pairs) == 1:
        weights = np.ones(1)
    before = weights @ pairs
    after = weights @ masked_known
    signs = np.ones(len(before))
    if signed:
        # magnitudes survive the flips; comparing signs of matched coordinates then gives these
        order = np.argsort(np.abs(before), kind="stable")
        places = np.argsort(np.abs(after), kind="stable")
        signs = np.sign(before[order]) * np.sign(after[places])
    else:
        order = np.argsort(before, kind="stable")
        places = np.argsort(after, kind="stable")
    rows = np.empty_like(masked)
    rows[:, order] = masked[:, places] * signs
    return rows


def by_span(pairs: Array, masked_known: Array, masked: Array) -> Array:
    """Return rows with a linear mask undone, as far as they lie in the span of known rows.

    An orthonormal map keeps inner products, so the nearest combination of the masked known rows is
    that of the known ones.

    Args:
        pairs: rows before the mask, (k, d).
        masked_known: the same after it, (k, w).
        masked: rows after it, (n, w).

    Returns:
        (n, d), each the projection of its row on the span of the known ones.
    """
    # for an orthonormal M, ‖Mx − Σ c_k M x_k‖ = ‖x − Σ c_k x_k‖, so both sides have the same c
    combination, *_ = np.linalg.lstsq(masked_known.T, masked.T, rcond=None)
    return np.asarray(combination.T @ pairs)


def true_row(truth: Truth, subject: Subject) -> Array:
    """Return a client's update before any protection, (d,), not multiplied by a weight.

    Args:
        truth: of the run, with taps.
        subject: the client and its call.

    Raises:
        UsageError: the truth has no such tap.
    """
    method, step, client = subject
    for tap in truth.taps:
        if (tap.method, tap.step) != (method, step) or client not in tap.ids:
            continue
        position = tap.ids.index(client)
        row = as_array(tap.reply.delta.values[position])
        size = getattr(tap.reply, "size", None)
        if method in WEIGHTED and size is not None:
            row = row / float(size.values[position])
        return row
    raise UsageError(
        "the truth has no update before its protection: repeat the run with "
        "securecluster.attacks.experiments.tapped, and give its taps to truth_of"
    )


class UnmaskedRows(Scorer):
    """Agreement of unmasked rows with the updates before any protection.

    The negative control moves the coordinates of the true rows along by a random offset.
    """

    @abstractmethod
    def agreement(self, guess: Array, true: Array) -> float:
        """Return how well one row agrees.

        Args:
            guess: (d,).
            true: (d,).
        """

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the agreement of each row, (n,).

        Args:
            guess: rows by client and call.
            truth: of the run, with taps.
        """
        return self._agreements(guess, truth, [0] * len(guess.values))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the agreements with rows whose coordinates have moved along.

        Args:
            guess: rows by client and call.
            truth: of the run, with taps.
            draw: source of the offsets.
        """
        offsets = [int(draw.integers(1, len(row))) for row in guess.listed]
        return self._agreements(guess, truth, offsets)

    def _agreements(self, guess: Guess, truth: Truth, offsets: list[int]) -> Array:
        """Return the agreements with true rows that are moved by the given offsets."""
        true_rows = guess.once(
            truth, "rows", lambda: [true_row(truth, subject) for subject in guess.values]
        )
        agreements = []
        for row, whole, offset in zip(guess.listed, true_rows, offsets, strict=True):
            agreements.append(self.agreement(row, np.roll(whole[: len(row)], offset)))
        return np.asarray(agreements)


class RecoveredCoordinates(UnmaskedRows):
    """Share of the coordinates that are not zero whose value is recovered."""

    metric = "share of recovered coordinates"

    def agreement(self, guess: Array, true: Array) -> float:
        """Return the share of one row."""
        # Zeros are many and any guess of zero would hit them (weights of unused pixels, padding).
        counted = true != 0
        if not counted.any():
            return 0.0
        numbers = true[counted]
        errors = np.abs(guess[counted] - numbers)
        recovered = errors <= TOLERANCE * np.abs(numbers)
        return float(np.mean(recovered))


class UnmaskedCosine(UnmaskedRows):
    """Cosine of unmasked rows and true ones."""

    metric = "cosine after unmasking"

    def agreement(self, guess: Array, true: Array) -> float:
        """Return the cosine of one row."""
        norms = float(np.linalg.norm(guess) * np.linalg.norm(true))
        if norms == 0:
            return 0.0
        return float(guess @ true) / norms
