"""Source inference: the client whose model has the least loss of a record owned it."""

from __future__ import annotations

from functools import partial

import numpy as np

from securecluster.attacks.arrays import Array, sample_keys
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
from securecluster.attacks.client_models import candidate_losses, first_models, why_not


class OwnersFound(Scorer):
    """Share of the records of clients whose owner is guessed; records of nobody do not count."""

    metric = "share of records whose owner is found"

    def units(self, guess: Guess, truth: Truth) -> Array:
        """Return 1 for each right owner and 0 for each wrong one, (records,).

        Args:
            guess: client by the candidate's position.
            truth: of the run.
        """
        guessed, owners = self._owned(guess, truth)
        return np.asarray(guessed == owners, dtype=float)

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Array:
        """Return the same for shuffled owners.

        Args:
            guess: client by the candidate's position.
            truth: of the run.
            draw: source of the shuffle.
        """
        guessed, owners = self._owned(guess, truth)
        return np.asarray(guessed == draw.permutation(owners), dtype=float)

    def _owned(self, guess: Guess, truth: Truth) -> tuple[Array, Array]:
        """Return the guessed and the true owners of the candidates that a client owns."""
        owned: tuple[Array, Array] = guess.once(
            truth, "owners", partial(self._compared, guess, truth)
        )
        return owned

    def _compared(self, guess: Guess, truth: Truth) -> tuple[Array, Array]:
        """Return what `_owned` does."""
        # A sample that several clients hold counts as the last one's, which is rare in images.
        owner_of = {}
        for client, shard in enumerate(truth.federation.shards):
            for key in sample_keys(np.asarray(shard.x, np.float32)):
                owner_of[key] = client
        guessed = []
        owners = []
        candidates = np.asarray(guess.details["candidates"], np.float32)
        keys = sample_keys(candidates)
        for position, client in guess.values.items():
            key = keys[position]
            if key in owner_of:
                guessed.append(client)
                owners.append(owner_of[key])
        return np.asarray(guessed), np.asarray(owners)


class SourceInference(Attack):
    """Owner of each candidate, by the losses of clients' models."""

    name = "source-inference"
    learns = "which client a record belongs to"
    harm = Harm.MEMBERS
    source = "Hu et al. 2021, Source Inference Attacks in Federated Learning"
    needs = (
        "single updates of the first round, or models that clients trained alone, without a mask, "
        "and records of unknown owners"
    )
    scorer = OwnersFound()
    reads = ("delta",)
    hidden_by = (MASK, SUMS)

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack is not applicable; None if it is.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        return why_not(view, knowledge)

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return the guessed client by the candidate's position.

        Args:
            view: what the adversary observed.
            knowledge: what it knows besides.
        """
        models = first_models(view, knowledge)
        rows = [candidate_losses(model, knowledge) for model in models.values()]
        losses = np.stack(rows)  # (clients, candidates)
        # with equal priors, the client of least loss is the likeliest owner (Hu et al. 2021)
        nearest = losses.argmin(0).tolist()
        clients = list(models)
        owners = {position: clients[row] for position, row in enumerate(nearest)}
        details = {"candidates": knowledge.inputs}
        return Guess("owners", owners, details)
