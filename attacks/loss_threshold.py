"""Membership of candidates in a client's data, by their loss under its model (Yeom et al. 2018)."""

from __future__ import annotations

from securecluster.attacks.base import MASK, SUMS, Attack, Guess, Harm, Knowledge, View
from securecluster.attacks.client_models import candidate_losses, first_models, why_not
from securecluster.attacks.subspaces import AT_LOW_RATES, SampleMembership


class LossThreshold(Attack):
    """Membership of candidates in clients' data: the lower the loss, the likelier."""

    name = "membership-loss-threshold"
    learns = "whether a record is in a client's data"
    harm = Harm.MEMBERS
    source = "Yeom et al. 2018, Privacy Risk in Machine Learning"
    needs = (
        "single updates of the first round, or models that clients trained alone, without a mask, "
        "and candidate samples, of which some may be clients' own"
    )
    scorer = SampleMembership()
    reads = ("delta",)
    hidden_by = (MASK, SUMS)
    further = AT_LOW_RATES

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return why_not(view, knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return minus the loss of each candidate by client, (candidates,).

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        losses = {}
        for client, model in first_models(view, knowledge).items():
            # scorers take larger values for likelier members
            losses[client] = -candidate_losses(model, knowledge)
        return Guess("membership", losses, {"candidates": knowledge.inputs})
