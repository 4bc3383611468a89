"""Unmasked rows by the public initial model, for rows that are nearly that model.

A permutation of weights is undone by ranks: after little training the weights are still ordered as
those of θ_0, which everybody knows. Masked displacements θ − θ_0 tell nothing in this way, which is
why this project's clients send displacements. The attack treats whatever was sent as weights, so
its score says whether they do.
"""

from __future__ import annotations

from securecluster.attacks import unmasking
from securecluster.attacks.arrays import as_array
from securecluster.attacks.base import MASK, SUMS, TAPS, Attack, Guess, Harm, Knowledge, View


class MaskPublicModel(Attack):
    """Rows without their permutation, by the order of the weights of θ_0."""

    name = "mask-public-model"
    learns = "a client's update behind the mask"
    harm = Harm.MESSAGES
    source = "this project's threat model: ranks of known values against a permutation"
    needs = "single updates of the first round under a mask that moves numbers, and θ_0"
    scorer = unmasking.RecoveredCoordinates()
    of_masks = True
    requires = (TAPS,)
    reads = ("delta",)
    hidden_by = (MASK, SUMS)
    further = (unmasking.UnmaskedCosine(),)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        mask = knowledge.mask
        if mask == "none":
            return unmasking.NO_MASK
        if not unmasking.keeps_values(mask):
            return f"not applicable: the mask {mask} mixes numbers, so their order tells nothing"
        if not unmasking.first_updates(view, knowledge):
            return unmasking.NO_UPDATES
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return rows (d,) by method, call and client.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        initial = as_array(knowledge.initial)[None]
        signed = unmasking.flips_signs(knowledge.mask)
        guesses = {}
        for subject, update in unmasking.first_updates(view, knowledge).items():
            row = as_array(update.row)[None]
            # θ_0 stands in for the unmasked row: after one round the order of weights is nearly its
            (guesses[subject],) = unmasking.by_rank(initial, row, row, signed)
        return Guess("rows", guesses)
