"""An attack that guesses for each client who is most similar to it."""

from __future__ import annotations

from typing import Any

import numpy as np

from securecluster.attacks.base import (
    SUMS,
    TRUE_CLUSTERS,
    Attack,
    Guess,
    Harm,
    Knowledge,
    Scorer,
    Truth,
    View,
)
from securecluster.attacks.views import observed_updates


class SameCluster(Scorer):
    """Share of clients whose guessed partner is of the same true cluster."""

    metric = "share of partners in the same cluster"

    def units(self, guess: Guess, truth: Truth) -> Any:
        """Return for each client whether its partner is of its cluster."""
        return self._hits(guess, np.asarray(truth.clusters))

    def shuffled(self, guess: Guess, truth: Truth, draw: np.random.Generator) -> Any:
        """Return the same where clusters are dealt out at random."""
        return self._hits(guess, draw.permutation(np.asarray(truth.clusters)))

    def _hits(self, guess: Guess, clusters: Any) -> Any:
        pairs = np.asarray(list(guess.values.items()))
        return (clusters[pairs[:, 0]] == clusters[pairs[:, 1]]).astype(float)


class Neighbours(Attack):
    """The most similar client of each client, by the cosine of their first updates."""

    name = "neighbours"
    learns = "whose data are most alike"
    harm = Harm.GROUPS
    source = "an example"
    needs = "single updates of three clients"
    scorer = SameCluster()
    requires = frozenset({TRUE_CLUSTERS})
    reads = frozenset({"delta"})
    hidden_by = frozenset({SUMS})

    def applies(self, view: View, knowledge: Knowledge) -> str | None:
        """Return why the attack does not apply; None where it does."""
        if len(self._rows(view, knowledge)) < 3:
            return "not applicable: single updates of three clients were not observed"
        return None

    def run(self, view: View, knowledge: Knowledge) -> Guess:
        """Return for each client the one whose update points most in its direction."""
        rows = self._rows(view, knowledge)
        clients = np.asarray(list(rows))
        directions = np.stack([row / np.linalg.norm(row) for row in rows.values()])
        cosines = directions @ directions.T
        np.fill_diagonal(cosines, -np.inf)
        nearest = clients[cosines.argmax(axis=1)]
        return Guess("partners", dict(zip(clients.tolist(), nearest.tolist(), strict=True)))

    def _rows(self, view: View, knowledge: Knowledge) -> dict[int, Any]:
        """Return the first update of each client by its number."""
        first: dict[Any, Any] = {}
        for update in observed_updates(view, knowledge):
            first.setdefault(update.sender.index, update.row.double().numpy())
        return first
