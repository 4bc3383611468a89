"""Repeated mask: whether coordinates of two calls belong together, by the sizes of their moves.

A weight that moves much in one round moves much in the next. Masks are drawn anew for every call,
so the coordinates of two masked calls do not belong together, and the absolute means of their
updates are not correlated. Under one mask for all calls they are, and a server can add rounds up.
"""

from __future__ import annotations

import numpy as np

from securecluster.attacks.arrays import Array, as_array
from securecluster.attacks.base import (
    MASK,
    SUMS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.views import observed_updates

FEWEST = 3  # calls


class MovesAlike(Scorer):
    """Correlation of the sizes of moves, over pairs of calls that follow each other."""

    metric = "correlation of coordinates of two calls"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return the correlation of each pair, (pairs,).

        Args:
            guess: sizes of moves by call, (d,).
            truth: of the run, unused.
        """
        return _correlations(self._units(guess, truth))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the correlations where coordinates of every other call are in another order.

        Args:
            guess: sizes of moves by call, (d,).
            truth: of the run, unused.
            draw: source of the orders.
        """
        calls = self._units(guess, truth).copy()
        # one call of each pair is enough
        for sizes in calls[1::2]:
            draw.shuffle(sizes)
        return _correlations(calls)

    def _units(self, guess: Guess, truth: Truth) -> Array:
        """Return each call's sizes about their mean, of length 1, (calls, d)."""

        def compared() -> Array:
            rows = np.stack(guess.listed)
            centred = rows - rows.mean(axis=1, keepdims=True)
            return np.asarray(centred / np.linalg.norm(centred, axis=1, keepdims=True))

        units: Array = guess.once(truth, "units", compared)
        return units


def _correlations(units: Array) -> Array:
    """Return the correlation of each call's sizes with the next one's, (calls − 1,)."""
    return np.asarray(np.einsum("nd,nd->n", units[:-1], units[1:]))


class RepeatedMask(Attack):
    """Tells whether the updates of several calls are under one mask."""

    name = "repeated-mask"
    learns = "which weights messages of different rounds are about"
    harm = Harm.MESSAGES
    source = "Sattler, Müller & Samek 2019, V-B; this project's threat model"
    needs = f"single updates of {FEWEST} calls"
    scorer = MovesAlike()
    of_masks = True
    reads = ("delta",)
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        if len(_sizes(view, knowledge)) < FEWEST:
            return f"not applicable: single updates of {FEWEST} calls were not observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the absolute mean update by call, (d,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return Guess("sizes of moves", _sizes(view, knowledge))


def _sizes(view: View, knowledge: Knowledge) -> dict[tuple[str, int], Array]:
    """Return the absolute mean update of each call in which somebody moved."""
    rows: dict[tuple[str, int], list[Array]] = {}
    for update in observed_updates(view, knowledge):
        rows.setdefault((update.method, update.step), []).append(as_array(update.row))
    means = {call: np.abs(np.mean(of_call, axis=0)) for call, of_call in rows.items()}
    return {call: sizes for call, sizes in means.items() if sizes.std() > 0}
