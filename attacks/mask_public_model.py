"""Unmasked rows by the public initial model, for rows that are nearly that model.

A permutation of weights is undone by ranks: after little training the weights are still ordered as
those of θ_0, which everybody knows. Masked displacements θ − θ_0 tell nothing in this way, which is
why this project's clients send displacements. The attack treats whatever was sent as weights, so
its score says whether they do.
"""

from __future__ import annotations

from typing import ClassVar

from securecluster.attacks.base import MASK, SUMS, TAPS, Attack, Guess, Knowledge, View
from securecluster.attacks.scoring import Scorer
from securecluster.attacks.unmasking import (
    NO_MASK,
    NO_UPDATES,
    RecoveredCoordinates,
    UnmaskedCosine,
    by_rank,
    first_updates,
    flips_signs,
    keeps_values,
    mask_of,
)


class MaskPublicModel(Attack):
    """Rows without their permutation, by the order of the weights of θ_0.

    Attributes:
        further: other scores of the same guess.
    """

    name = "mask-public-model"
    source = "this project's threat model: ranks of known values against a permutation"
    needs = "single updates of the first round under a mask that moves numbers, and θ_0"
    scorer = RecoveredCoordinates()
    requires = frozenset({TAPS})
    reads = frozenset({"delta"})
    hidden_by = frozenset({MASK, SUMS})
    further: ClassVar[tuple[Scorer, ...]] = (UnmaskedCosine(),)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        mask = mask_of(knowledge)
        if mask == "none":
            return NO_MASK
        if not keeps_values(mask):
            return f"not applicable: the mask {mask} mixes numbers, so their order tells nothing"
        if not first_updates(view, knowledge):
            return NO_UPDATES
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return rows (d,) by method, call and client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        initial = knowledge.initial.double().cpu().numpy()[None]
        signed = flips_signs(mask_of(knowledge))
        guesses = {}
        for subject, update in first_updates(view, knowledge).items():
            row = update.row.double().cpu().numpy()[None]
            # θ_0 stands in for the unmasked row: after one round the order of weights is nearly its
            guesses[subject] = by_rank(initial, row, row, signed)[0]
        return Guess("rows", guesses)
